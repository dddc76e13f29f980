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
_WIDENING = 8
"""A product whose result is more than so many times as wide as the sum that makes it is cheap, and is computed again: the
second product of an adapter."""


def enable(model: PreTrainedModel, asked: str, *, attention_dropout: float = 0.0) -> None:
    """Let the model's layers recompute activations as the config's ``activation_checkpointing`` asks.

    Args:
        asked: ``full``, ``every:N``, ``selective`` or ``offload``; ``none`` changes nothing.
        attention_dropout: the model's. Above 0, ``selective`` recomputes attention too: a kernel that is not run again does
            not advance the generator of random numbers, and every dropout after it would draw another mask.

    Raises:
        ConfigError: transformers cannot do this to the model's class.
    """
    if asked == "none":
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"activation_checkpointing: {asked}, and {name} does not support it in transformers. Pass none.")
    if asked == "selective" and model.config._attn_implementation == "flex_attention":
        raise ConfigError(
            "activation_checkpointing: selective, and attention is flex_attention, a compiled kernel whose result cannot be "
            "kept apart. Pass full, or --attn_implementation sdpa."
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # transformers before 5.20
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # outputs of frozen embeddings have no graph; an input that requires grad connects the checkpoints to one
    model.enable_input_require_grads()
    if asked == "full":
        return
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"activation_checkpointing: {asked}, and the code of {name} knows full and none. Pass one of them.")
    for at, layer in enumerate(layers):
        if asked == "selective":
            kept = frozenset(_PRODUCTS + (() if attention_dropout else _ATTENTION))
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, kept))
        elif asked == "offload":
            layer._gradient_checkpointing_func = _with_inputs_on_host
        else:
            layer.gradient_checkpointing = at % int(asked.removeprefix("every:")) == 0


def _with_inputs_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer, and keep its inputs in host memory until the backward pass."""
    on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in args)
    with save_on_cpu(pin_memory=on_gpu):
        return checkpoint(function, *args, use_reentrant=False)


class _Kept:
    """Results of one run of a layer, by operation and by their order; None where an operation is to run again."""

    alive: WeakSet[_Kept] = WeakSet()

    def __init__(self, operations: frozenset[str]):
        self.operations = operations
        self.results: dict[str, list[Any]] = defaultdict(list)
        self.alive.add(self)

    def worth(self, name: str, args: Any, result: Any) -> bool:
        """Return whether a result is kept: that of attention, or of a product that costs much."""
        if name not in _PRODUCTS:
            return True
        first = args[1] if name == "aten::addmm" else args[0]
        return result.shape[-1] <= _WIDENING * first.shape[-1]

    def drop(self, changed: torch.Tensor) -> None:
        """Drop the result whose storage an operation writes to."""
        storage = changed.untyped_storage()._cdata
        for results in self.results.values():
            for at, result in enumerate(results):
                if any(tensor.untyped_storage()._cdata == storage for tensor in _tensors(result)):
                    results[at] = None


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor))


class _Keep(TorchDispatchMode):
    """Keep results of the forward pass.

    torch's `create_selective_checkpoint_contexts` does nearly the same. It refuses a second run with other operations than
    the first had, as ZeRO-3's gathers are, and does not see a change in place through `_unsafe_view`, which every linear layer
    without a bias returns.
    """

    def __init__(self, kept: _Kept):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, schema = func._schema.name, func._schema
        if name in self.kept.operations:
            worth = self.kept.worth(name, args, result)
            # with a graph, what is kept would keep itself
            self.kept.results[name].append(tree_map_only(torch.Tensor, torch.Tensor.detach, result) if worth else None)
        elif schema.is_mutable:
            for argument, given in zip(schema.arguments, args, strict=False):
                if argument.is_write and isinstance(given, torch.Tensor):
                    self.kept.drop(given)
        return result


class _Reuse(TorchDispatchMode):
    """Return the results that were kept, each once, and run every other operation again."""

    def __init__(self, kept: _Kept):
        super().__init__()
        self.kept = kept
        self.at: dict[str, int] = defaultdict(int)

    def __enter__(self) -> _Reuse:
        self.at.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in self.kept.operations:
            results, at = self.kept.results[name], self.at[name]
            self.at[name] += 1
            if at < len(results) and results[at] is not None:
                found, results[at] = results[at], None
                return found
        return func(*args, **(kwargs or {}))


def _contexts(operations: frozenset[str]) -> tuple[_Keep, _Reuse]:
    kept = _Kept(operations)
    return _Keep(kept), _Reuse(kept)


def kept_tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors that ``selective`` keeps for backward passes to come. autograd does not know them."""
    for kept in list(_Kept.alive):
        yield from _tensors(dict(kept.results))
