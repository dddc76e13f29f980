"""Pieces of tensors, as each rank writes them into a checkpoint."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Piece(NamedTuple):
    """A slice of the weight ``name`` (``key`` None) or of its optimizer state ``key``.

    ``offset`` says where the slice begins, in each dimension of the complete tensor, and ``values`` (fp32) has the slice's
    shape. If ``offset`` has one number, it is a position in the flattened tensor, and ``values`` is a range of it, [n].
    """

    name: str
    key: str | None
    offset: tuple[int, ...]
    values: torch.Tensor

    def cut(self, room: int) -> tuple[Piece, list[Piece]]:
        """Return (the first part, which has at most ``room`` numbers; the rest, as pieces in order).

        Args:
            room: at least 1.
        """
        if self.values.numel() <= room:
            return self, []
        # Cut along the first dimension with more than one row.
        dimension = next(d for d, size in enumerate(self.values.shape) if size > 1)
        row_count = self.values.shape[dimension]
        row_size = self.values.numel() // row_count
        if row_size <= room:
            rows = room // row_size
            return self._narrow(dimension, 0, rows), [self._narrow(dimension, rows, row_count)]
        # A single row is larger than the room, so the first row is cut along a later dimension.
        first, rest = self._narrow(dimension, 0, 1).cut(room)
        return first, [*rest, self._narrow(dimension, 1, row_count)]

    def _narrow(self, dimension: int, start: int, stop: int) -> Piece:
        """Return the rows from ``start`` up to ``stop`` of a dimension, as a piece."""
        offset = list(self.offset)
        offset[dimension] += start
        return self._replace(offset=tuple(offset), values=self.values.narrow(dimension, start, stop - start))


class Read(Protocol):
    """Reads one tensor of a checkpoint. Values are fp32, on the CPU, and valid until the next call."""

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from ``start`` up to ``stop`` of the flattened tensor, [stop - start]."""

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slice of ``shape`` that begins at ``offset``."""
