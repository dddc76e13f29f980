"""Weights and buffers of a model by name, and the storages of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Prefixes that wrappers of a model put before the names of its weights.
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def parameter_groups(
    model: nn.Module, weight_decay: float, shape: Callable[[nn.Parameter], torch.Size] = lambda p: p.shape
) -> list[dict[str, Any]]:
    """Return the optimizer's groups of trained weights.

    As in the examples of transformers, weight decay applies only to matrices, and not to biases and norm gains.

    Args:
        shape: returns the shape of the complete weight, of which a rank may hold a part.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices = [parameter for parameter in trained if len(shape(parameter)) >= 2]
    vectors = [parameter for parameter in trained if len(shape(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers that a model's saved state holds, such as BART's ``final_logits_bias``.

    For a model with adapters, yield only the adapters' buffers: the base is frozen, and its buffers are loaded with it.
    """
    has_adapters = hasattr(model, "peft_config")
    for name, module, buffer_name in owners_of_buffers(model):
        # LoRA under PiSSA is the only adapter with buffers: they hold the initial weights.
        if not has_adapters or ".lora_" in name:
            yield unwrapped_name(name), getattr(module, buffer_name)


def owners_of_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name in the model, module that holds the buffer, name in that module) for each buffer of the state dict."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for buffer_name, buffer in module._buffers.items():
            if buffer is not None and buffer_name not in module._non_persistent_buffers_set:
                yield prefix + buffer_name, module, buffer_name


def quantisation_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that bitsandbytes' layers keep beside their weights. They are not sharded.

    These are scales, tables, and in an int8 layer the weight itself. If nothing is sharded, this weight shares its memory with
    the parameter.
    """
    for module in model.modules():
        for attribute in ("quant_state", "state"):
            yield from _iterate_tensors(getattr(module, attribute, None))


def _iterate_tensors(holder: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of an object of bitsandbytes, and of such objects inside it: double quantisation nests its states."""
    if type(holder).__module__.startswith("bitsandbytes."):
        for key, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                # `idx` belongs to the last micro-batch: it lists the columns with large activations.
                if key != "idx":
                    yield value
            else:
                yield from _iterate_tensors(value)


def unwrapped_name(name: str) -> str:
    """Return a weight's name without the prefixes of the model's wrappers."""
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            name = name.replace(wrapper, "", 1)
        else:
            name = name.replace("." + wrapper, ".")
    return name


# Return a tensor with all its elements: the shards of a DTensor are gathered, which is collective.
def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Return this rank's shard of a DTensor; any other tensor as it is.
def get_local_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of ``tensors``; views of one buffer count once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # An empty storage, such as that of a weight that is not gathered, has no address.
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
