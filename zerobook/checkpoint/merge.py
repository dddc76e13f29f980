"""Merge the pieces that the ranks have written into one table, in which each element of each tensor must occur once."""

from itertools import combinations
from math import prod
from typing import Any

from zerobook.errors import CheckpointError

# [start, stop, file] of a segment of the flattened tensor, or [offset, shape, file] of a slice, with lists of numbers.
Entry = list[Any]
# (offset, shape) of a slice.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def is_slice(entry: Entry) -> bool:
    """Return whether an entry describes a slice. Otherwise it describes a segment of the flattened tensor."""
    return isinstance(entry[0], list)


def merge(indices: list[dict[str, list[Entry]]], shapes: dict[str, list[int]]) -> dict[str, list[Entry]]:
    """Return the entries of all ranks' pieces by tensor.

    Args:
        indices: for each rank, tensor's name -> the entries of its pieces.
        shapes: name -> shape of every tensor, with names as ``exp_avg/PARAMETER``.

    Raises:
        CheckpointError: an element is missing, or occurs twice.
    """
    merged: dict[str, list[Entry]] = {}
    for index in indices:
        for name, entries in index.items():
            merged.setdefault(name, []).extend(entries)
    for name, shape in shapes.items():
        # Segments come first. Each kind is sorted by its start.
        entries = sorted(merged.get(name, []), key=lambda entry: (is_slice(entry), entry[0]))
        merged[name] = entries
        is_covered = _is_covered_by_slices if any(map(is_slice, entries)) else _is_covered_by_segments
        if not is_covered(shape, entries):
            spans = ", ".join(_describe(entry) for entry in entries) or "nothing"
            raise CheckpointError(f"{name}: it has {prod(shape)} numbers, and the ranks gave {spans}")
    return merged


# Writes a slice as "2 x 3 at 0, 4" (shape, offset), and a segment as "0 to 6".
def _describe(entry: Entry) -> str:
    if is_slice(entry):
        return f"{' x '.join(map(str, entry[1]))} at {', '.join(map(str, entry[0]))}"
    return f"{entry[0]} to {entry[1]}"


def _is_covered_by_segments(shape: list[int], entries: list[Entry]) -> bool:
    """Return whether sorted segments hold each number of a tensor once: each begins where the segment before it ends."""
    end = 0
    for start, stop, _ in entries:
        if start != end:
            return False
        end = stop
    return end == prod(shape)


def _is_covered_by_slices(shape: list[int], entries: list[Entry]) -> bool:
    """Return whether slices, and segments among them, hold each number of a tensor once."""
    slices: list[Box] = []
    # Cut segments into slices, so that all entries are compared in the same way.
    for entry in entries:
        if is_slice(entry):
            slices.append((tuple(entry[0]), tuple(entry[1])))
        else:
            slices += boxes(entry[0], entry[1], tuple(shape))
    for offset, size in slices:
        if not _is_inside(offset, size, shape):
            return False
    # If the slices hold as many numbers as the tensor, and no number twice, then no number is missing.
    if sum(prod(size) for _, size in slices) != prod(shape):
        return False
    return not any(_has_overlap(first, second) for first, second in combinations(slices, 2))


def _is_inside(offset: tuple[int, ...], size: tuple[int, ...], shape: list[int]) -> bool:
    """Return whether a slice lies completely inside a tensor of ``shape``."""
    if not len(offset) == len(size) == len(shape):
        return False
    return all(start >= 0 and start + count <= full for start, count, full in zip(offset, size, shape, strict=True))


def _has_overlap(first: Box, second: Box) -> bool:
    """Return whether two slices have an element in common, that is, whether their ranges overlap in every dimension."""
    # A box is (offset, shape), so this yields the start and the size of both slices in one dimension after the other.
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
    # The rows from ``first_row`` to before ``end_row`` lie in the segment completely: the start is rounded up, the stop down.
    first_row = -(-start // row_size)
    end_row = stop // row_size
    if first_row > end_row:
        # The segment begins and ends inside the same row.
        return _cut_row(end_row, start, stop, shape)
    # The end of the row before the complete rows, these rows, and the beginning of the row after them. Each may be empty.
    slices = _cut_row(first_row - 1, start, first_row * row_size, shape)
    if first_row < end_row:
        offset = (first_row, *[0] * (len(shape) - 1))
        slices.append((offset, (end_row - first_row, *shape[1:])))
    return slices + _cut_row(end_row, end_row * row_size, stop, shape)


def _cut_row(row: int, start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the slices of the segment ``start`` to ``stop``, which lies inside one row."""
    row_start = row * prod(shape[1:])
    return [((row, *offset), (1, *size)) for offset, size in boxes(start - row_start, stop - row_start, shape[1:])]
