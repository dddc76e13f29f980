"""Pieces of tensors, as each rank writes them into a checkpoint."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Piece(NamedTuple):
    """A slice of a weight (``key`` None) or of optimizer state.

    ``offset`` says where the slice begins, in each dimension of the whole tensor, and ``values`` (fp32) has the slice's shape.
    With one number, ``offset`` is a position in the flattened tensor, and ``values`` is a range of it, [n].
    """

    name: str
    key: str | None
    offset: tuple[int, ...]
    values: torch.Tensor

    def cut(self, room: int) -> tuple[Piece, list[Piece]]:
        """Return (a part of at most ``room`` numbers, 1 or more; what is left, as pieces in order)."""
        if self.values.numel() <= room:
            return self, []
        # The first dimension that can be cut: those before it have one row.
        dimension = next(d for d, size in enumerate(self.values.shape) if size > 1)
        row_numbers = self.values.numel() // self.values.shape[dimension]
        if row_numbers <= room:
            rows = room // row_numbers
            return self._narrow(dimension, 0, rows), [self._narrow(dimension, rows, None)]
        first, rest = self._narrow(dimension, 0, 1).cut(room)
        return first, [*rest, self._narrow(dimension, 1, None)]

    def _narrow(self, dimension: int, start: int, stop: int | None) -> Piece:
        """Return rows ``start`` to ``stop`` of a dimension, as a piece; to the end where ``stop`` is None."""
        if stop is None:
            stop = self.values.shape[dimension]
        offset = list(self.offset)
        offset[dimension] += start
        return self._replace(offset=tuple(offset), values=self.values.narrow(dimension, start, stop - start))


class Read(Protocol):
    """Reads one tensor of a checkpoint. Values are fp32, on the CPU, and valid until the next call."""

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, [stop - start]."""

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slice of ``shape`` that begins at ``offset``."""
