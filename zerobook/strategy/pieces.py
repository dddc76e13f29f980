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
        dimension = next(d for d, size in enumerate(self.values.shape) if size > 1)
        each = self.values.numel() // self.values.shape[dimension]
        if each <= room:
            return self._part(dimension, 0, room // each), [self._part(dimension, room // each, None)]
        first, rest = self._part(dimension, 0, 1).cut(room)
        return first, [*rest, self._part(dimension, 1, None)]

    def _part(self, dimension: int, start: int, stop: int | None) -> Piece:
        size = self.values.shape[dimension]
        values = self.values.narrow(dimension, start, (size if stop is None else stop) - start)
        offset = tuple(at + start if d == dimension else at for d, at in enumerate(self.offset))
        return self._replace(offset=offset, values=values)


class Read(Protocol):
    """Reads one tensor of a checkpoint. Values are fp32, on the CPU, and valid until the next call."""

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, [stop - start]."""

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slice of ``shape`` that begins at ``offset``."""
