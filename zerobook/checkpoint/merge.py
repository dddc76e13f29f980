"""The table of all ranks' pieces, in which each element of each tensor must occur once."""

from itertools import combinations
from math import prod
from typing import Any

from zerobook.errors import CheckpointError

Entry = list[Any]
"""[start, stop, file] of a segment of the flattened tensor, or [offset, shape, file] of a slice, with lists of numbers."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a slice."""


def is_slice(entry: Entry) -> bool:
    """Return whether an entry is of a slice, not of a segment of the flattened tensor."""
    return isinstance(entry[0], list)


def merge(indices: list[dict[str, list[Entry]]], shapes: dict[str, list[int]]) -> dict[str, list[Entry]]:
    """Return the pieces of all ranks as one table.

    Args:
        indices: of each rank: the entries of its pieces, by tensor.
        shapes: of all tensors, by names as ``exp_avg/PARAMETER``.

    Raises:
        CheckpointError: an element is missing, or occurs twice.
    """
    merged: dict[str, list[Entry]] = {}
    for index in indices:
        for name, entries in index.items():
            merged.setdefault(name, []).extend(entries)
    for name, shape in shapes.items():
        # Segments first, each kind in order.
        entries = sorted(merged.get(name, []), key=lambda entry: (is_slice(entry), entry[0]))
        merged[name] = entries
        covers = _slices_cover if any(map(is_slice, entries)) else _segments_cover
        if not covers(entries, shape):
            spans = ", ".join(_describe(entry) for entry in entries) or "nothing"
            raise CheckpointError(f"{name}: it has {prod(shape)} numbers, and the ranks gave {spans}")
    return merged


def _describe(entry: Entry) -> str:
    if is_slice(entry):
        return f"{' x '.join(map(str, entry[1]))} at {', '.join(map(str, entry[0]))}"
    return f"{entry[0]} to {entry[1]}"


def _segments_cover(entries: list[Entry], shape: list[int]) -> bool:
    """Return whether segments, in order, hold each number of a tensor once: each begins where the one before it ends."""
    end = 0
    for start, stop, _ in entries:
        if start != end:
            return False
        end = stop
    return end == prod(shape)


def _slices_cover(entries: list[Entry], shape: list[int]) -> bool:
    """Return whether slices, and segments among them, hold each number of a tensor once."""
    slices: list[Box] = []
    # Segments are cut into slices, so that all are compared alike.
    for entry in entries:
        if is_slice(entry):
            slices.append((tuple(entry[0]), tuple(entry[1])))
        else:
            slices += boxes(entry[0], entry[1], tuple(shape))
    for offset, size in slices:
        if not _is_inside(offset, size, shape):
            return False
    # If there are as many numbers as the tensor has, and none of them twice, then none is missing.
    if sum(prod(size) for _, size in slices) != prod(shape):
        return False
    return not any(_overlap(first, second) for first, second in combinations(slices, 2))


def _is_inside(offset: tuple[int, ...], size: tuple[int, ...], shape: list[int]) -> bool:
    """Return whether a slice lies inside of a tensor of ``shape``."""
    if not len(offset) == len(size) == len(shape):
        return False
    return all(start >= 0 and start + count <= full for start, count, full in zip(offset, size, shape, strict=True))


def _overlap(first: Box, second: Box) -> bool:
    """Return whether two slices have an element in common. Then their ranges overlap in every dimension."""
    for start, size, other_start, other_size in zip(*first, *second, strict=True):
        if start >= other_start + other_size or other_start >= start + size:
            return False
    return True


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the slices that make up the segment ``start`` to ``stop`` of a flattened tensor of ``shape``, in order.

    >>> boxes(2, 9, (3, 4))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop - start,))]
    row_size = prod(shape[1:])
    # Rows ``first`` to ``last`` lie in the segment completely.
    first = -(-start // row_size)
    last = stop // row_size
    if first > last:
        # The segment begins and ends inside of one row.
        return _in_row(last, start, stop, shape)
    slices = _in_row(first - 1, start, first * row_size, shape)
    if first < last:
        offset = (first, *[0] * (len(shape) - 1))
        slices.append((offset, (last - first, *shape[1:])))
    return slices + _in_row(last, last * row_size, stop, shape)


def _in_row(row: int, start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the slices of a segment that lies inside of one row."""
    row_start = row * prod(shape[1:])
    return [((row, *offset), (1, *size)) for offset, size in boxes(start - row_start, stop - row_start, shape[1:])]
