"""Loading of models whose weights ZeRO-3 partitions while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def loaded_modules_left_alone() -> Iterator[None]:
    """Let transformers initialise only those modules that have a weight which the file lacks.

    transformers 5.23 also calls the initialisation of modules with loaded weights, which then changes nothing. That of Pegasus
    computes positions from the shape of the weight, and a partitioned weight has none.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel._initialize_weights

    def initialise(model: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not tensors or not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
            original(model, module, is_custom_code)

    PreTrainedModel._initialize_weights = initialise  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original  # type: ignore[method-assign]


def drop_unused_renamings(model: PreTrainedModel) -> None:
    """Leave out the renamings of weights that matched no name in the model's file.

    transformers 5.23 reverses its renamings when it saves a model. Those that matched nothing, which it keeps under ZeRO-3
    only, would give the saved weights other names than the loaded file has, which other programs do not know.
    """
    renamings = getattr(model, "_weight_conversions", None)
    if renamings is not None:
        model._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]  # type: ignore[assignment]
