"""The table of all ranks' pieces, in which each element of each tensor must occur once."""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import Any

from zerobook.errors import CheckpointError

Entry = list[Any]
"""[start, stop, file] of a stretch of the flattened tensor, or [offset, shape, file] of a slice, with lists of numbers."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a slice."""


def is_slice(entry: Entry) -> bool:
    """Return whether an entry is of a slice, not of a stretch of the flattened tensor."""
    return isinstance(entry[0], list)


def merge(parts: list[dict[str, list[Entry]]], shapes: dict[str, list[int]]) -> dict[str, list[Entry]]:
    """Return the pieces of all ranks as one table.

    Args:
        shapes: of all tensors, by names as ``exp_avg/PARAMETER``.

    Raises:
        CheckpointError: an element is missing, or occurs twice.
    """
    merged: dict[str, list[Entry]] = {}
    for part in parts:
        for name, entries in part.items():
            merged.setdefault(name, []).extend(entries)
    for name, shape in shapes.items():
        entries = merged.get(name, [])
        merged[name] = sorted(entries, key=lambda entry: (is_slice(entry), entry[0]))
        if not (_slices_cover if any(map(is_slice, entries)) else _stretches_cover)(merged[name], shape):
            spans = ", ".join(_words(entry) for entry in merged[name]) or "nothing"
            raise CheckpointError(f"{name}: it has {prod(shape)} numbers, and the ranks gave {spans}")
    return merged


def _words(entry: Entry) -> str:
    if is_slice(entry):
        return f"{' x '.join(map(str, entry[1]))} at {', '.join(map(str, entry[0]))}"
    return f"{entry[0]} to {entry[1]}"


def _stretches_cover(entries: list[Entry], shape: list[int]) -> bool:
    ends = [0, *(stop for _, stop, _ in entries)]
    return [start for start, _, _ in entries] == ends[:-1] and ends[-1] == prod(shape)


def _slices_cover(entries: list[Entry], shape: list[int]) -> bool:
    """Return whether slices, and stretches among them, hold each number of a tensor once."""
    found: list[Box] = []
    for entry in entries:
        found += [(tuple(entry[0]), tuple(entry[1]))] if is_slice(entry) else boxes(entry[0], entry[1], tuple(shape))
    inside = all(
        len(offset) == len(size) == len(shape)
        and all(at >= 0 and at + n <= whole for at, n, whole in zip(offset, size, shape, strict=True))
        for offset, size in found
    )
    return (
        inside
        and sum(prod(size) for _, size in found) == prod(shape)
        and not any(_meet(one, other) for one, other in combinations(found, 2))
    )


def _meet(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the slices that make up the stretch ``start`` to ``stop`` of a flattened tensor of ``shape``, in order.

    >>> boxes(2, 9, (3, 4))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # inside of one row
        return _in_row(last, start, stop, shape)
    found = _in_row(first - 1, start, first * row, shape)
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + _in_row(last, last * row, stop, shape)


def _in_row(number: int, start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    before = number * prod(shape[1:])
    return [((number, *offset), (1, *size)) for offset, size in boxes(start - before, stop - before, shape[1:])]
