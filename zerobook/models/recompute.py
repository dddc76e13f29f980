"""Activation checkpointing: layers that keep less for the backward pass, and compute it again there (Chen et al., 2016)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import checkpoint

from zerobook.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names of torch's operations whose results ``selective`` saves: matrix products and attention.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "transformers::grouped_mm_fallback")
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "zerobook::attention",  # the planner's, in place of those above
)
# If the result of a product is more than this many times as wide as the dimension that it sums over, the product is cheap, and
# is recomputed. The second product of an adapter is such a product.
_WIDENING = 8


def enable(model: PreTrainedModel, mode: str, *, attention_dropout: float = 0.0) -> None:
    """Let the model's layers recompute activations as the setting ``activation_checkpointing`` says.

    Args:
        mode: ``full``, ``every:N``, ``selective`` or ``offload``; ``none`` changes nothing.
        attention_dropout: the model's. Above 0, ``selective`` also recomputes attention: if its kernel did not run again, it
            would not advance the generator of random numbers, and every dropout after it would draw another mask.

    Raises:
        ConfigError: transformers cannot do this to the model's class.
    """
    if mode == "none":
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"activation_checkpointing: {mode}, and {name} does not support it in transformers. Pass none.")
    if mode == "selective" and model.config._attn_implementation == "flex_attention":
        raise ConfigError(
            "activation_checkpointing: selective, and attention is flex_attention, a compiled kernel whose result cannot be "
            "kept apart. Pass full, or --attn_implementation sdpa."
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        # transformers before 5.20 has another name for it.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The outputs of frozen embeddings require no gradient. Let them require one, so that the layers become part of autograd's
    # graph.
    model.enable_input_require_grads()
    if mode == "full":
        return
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"activation_checkpointing: {mode}, and the code of {name} supports only full and none. Pass one of them."
        )
    # Attention with dropout runs again: see ``attention_dropout`` above.
    saved_operations = frozenset(_PRODUCTS if attention_dropout else _PRODUCTS + _ATTENTION)
    make_contexts = partial(_make_contexts, saved_operations)
    selective_checkpoint = partial(checkpoint, use_reentrant=False, context_fn=make_contexts)
    for index, layer in enumerate(layers):
        if mode == "selective":
            layer._gradient_checkpointing_func = selective_checkpoint
        elif mode == "offload":
            layer._gradient_checkpointing_func = _with_inputs_on_host
        else:
            # every:N recomputes the layers 0, N, 2 N, ...
            layer.gradient_checkpointing = index % int(mode.removeprefix("every:")) == 0


def _with_inputs_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer, and keep its inputs in host memory until the backward pass."""
    on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in args)
    with save_on_cpu(pin_memory=on_gpu):
        return checkpoint(function, *args, use_reentrant=False)


class _SavedResults:
    """Results of one forward pass of a layer, by operation and in order. None stands for one that has to be computed again."""

    # All objects that still exist, for `iterate_saved_tensors`.
    alive: WeakSet[_SavedResults] = WeakSet()

    def __init__(self, operations: frozenset[str]):
        self.operations = operations
        self.results: dict[str, list[Any]] = defaultdict(list)
        self.alive.add(self)

    def is_worth_saving(self, name: str, args: Any, result: Any) -> bool:
        """Return whether a result is saved: that of attention, or of a product that costs much."""
        if name not in _PRODUCTS:
            return True
        # A product sums over the last dimension of its first factor. addmm takes the bias before the factors.
        first_factor = args[1] if name == "aten::addmm" else args[0]
        return result.shape[-1] <= _WIDENING * first_factor.shape[-1]

    def drop(self, changed: torch.Tensor) -> None:
        """Drop the result whose storage an operation writes to."""
        # Views of a tensor share its storage, and have other addresses.
        storage = changed.untyped_storage()._cdata
        for results in self.results.values():
            for index, result in enumerate(results):
                if any(tensor.untyped_storage()._cdata == storage for tensor in _iterate_tensors(result)):
                    results[index] = None


def _iterate_tensors(result: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor))


class _SaveResults(TorchDispatchMode):
    """A context of the forward pass that saves results.

    torch's `create_selective_checkpoint_contexts` does nearly the same, but has two faults. It raises an error if the second
    run has other operations than the first, and under ZeRO-3 it has: the gathers of weights. It also does not notice if a
    result is changed in place through the `_unsafe_view` that every linear layer without a bias returns.
    """

    def __init__(self, saved: _SavedResults):
        super().__init__()
        self.saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        name = schema.name
        if name in self.saved.operations:
            # None says that this operation has to run again, and keeps the place of its result in the order.
            saved_result = None
            if self.saved.is_worth_saving(name, args, result):
                # Detach the result from its graph. The graph refers to the checkpoint, which refers to the saved result, so
                # that none of them would be freed.
                saved_result = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            self.saved.results[name].append(saved_result)
        # A result that a later operation changes in place has to be computed again.
        elif schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, torch.Tensor):
                    self.saved.drop(value)
        return result


class _ReuseResults(TorchDispatchMode):
    """A context of the second run that returns each saved result once, and runs every other operation again."""

    def __init__(self, saved: _SavedResults):
        super().__init__()
        self.saved = saved
        self.counts: dict[str, int] = defaultdict(int)

    def __enter__(self) -> _ReuseResults:
        # The backward pass may enter this context several times. Each time, the layer runs from its first operation.
        self.counts.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in self.saved.operations:
            results = self.saved.results[name]
            index = self.counts[name]
            self.counts[name] += 1
            if index < len(results) and results[index] is not None:
                result = results[index]
                # Drop the reference, so that the memory is free as soon as the backward pass has used the result.
                results[index] = None
                return result
        return func(*args, **(kwargs or {}))


# Return the contexts of a layer's forward pass and of its second run, as torch's `checkpoint` takes them.
def _make_contexts(operations: frozenset[str]) -> tuple[_SaveResults, _ReuseResults]:
    saved = _SavedResults(operations)
    return _SaveResults(saved), _ReuseResults(saved)


def iterate_saved_tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors that ``selective`` has saved for later backward passes. autograd does not list them."""
    for saved in list(_SavedResults.alive):
        yield from _iterate_tensors(dict(saved.results))
