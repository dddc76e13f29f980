"""Sorted [start, end) ranges of whole numbers."""

from collections.abc import Iterable


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the ranges that cover exactly ``numbers``.

    >>> ranges([7, 3, 4, 5, 9, 4])
    [[3, 6], [7, 8], [9, 10]]
    """
    return joined([[number, number + 1] for number in numbers], [])


def joined(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Return the union of two lists of ranges. Ranges that touch become one.

    >>> joined([[0, 3], [8, 9]], [[2, 5]])
    [[0, 5], [8, 9]]
    """
    union: list[list[int]] = []
    for start, end in sorted([*first, *second]):
        if union and start <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    return union
