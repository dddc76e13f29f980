"""Replace the trained weights temporarily, for an evaluation or for the saved model."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch

from zerobook.strategy.state import TrainingState


class SwappedWeights:
    """A context in which a prepared model has other weights. See `Strategy.swapped_weights`."""

    def __init__(self, state: TrainingState, weights: Mapping[str, torch.Tensor]):
        self._state = state
        self._weights = weights

    def __enter__(self) -> None:
        check_shards(self._state, self._weights, "swapped_weights")
        self._swap()
        self._state.refresh_copies()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swap()
        # If only this rank has an error, the others do not get here, and a collective would wait for them and hide the error.
        if error is None or self._state.mesh.world_size == 1:
            self._state.refresh_copies()

    def _swap(self) -> None:
        """Exchange the values of the optimizer's fp32 weights with those of the user's tensors."""
        # Weights that are still gathered after a forward pass are copies, and would keep the old values.
        self._state.release_gathered_parameters()
        with torch.no_grad():
            for name, parameter in self._state.trainable():
                values = self._state.shard(parameter).clone()
                self._state.set_shard(parameter, self._weights[name])
                self._weights[name].copy_(values)


def check_shards(state: TrainingState, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Check that ``tensors`` have the names, shapes and dtypes of this rank's shards of the trained weights.

    Args:
        source: what the tensors belong to, for the message.

    Raises:
        ValueError: names the first difference.
    """
    names = set(tensors)
    for name, shard in state.shards():
        if name not in names:
            raise ValueError(f"{source}: there is no tensor for the trained weight {name}.")
        names.remove(name)
        tensor = tensors[name]
        if tensor.shape != shard.shape or tensor.dtype != shard.dtype:
            raise ValueError(
                f"{source}: the tensor for {name} is {list(tensor.shape)} in {tensor.dtype}, and this rank's shard is "
                f"{list(shard.shape)} in {shard.dtype}. Strategy.shards() yields the shards."
            )
    if names:
        raise ValueError(f"{source}: there is no trained weight {min(names)}.")
