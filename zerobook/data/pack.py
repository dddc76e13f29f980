"""Best-fit-decreasing bin packing, which chooses the samples that share a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Items of all packs: ``members[offsets[p]:offsets[p + 1]]`` are those of pack ``p``. Both arrays are int64."""

    offsets: np.ndarray
    members: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack items of ``lengths`` into rows of ``capacity`` by best-fit-decreasing.

    Items are placed, longest first, each into the row with the least room that still holds it. The number of rows is
    at most 11/9 of the fewest possible, plus a constant (Johnson, "Near-optimal bin packing algorithms", MIT 1973).
    Items of one length are placed together: a row that was the best fit for one of them stays the best fit for the next
    until it is full, so whole groups of rows are filled at once and the time grows with the number of
    distinct lengths, not of items.

    Args:
        lengths: int [items], each from 1 to ``capacity``.
        capacity: tokens in a row.

    >>> packing = best_fit_decreasing(np.array([4, 7, 3, 6]), capacity=10)
    >>> packing.members.tolist(), packing.offsets.tolist()
    ([1, 2, 3, 0], [0, 2, 4])
    """
    lengths = np.asarray(lengths)
    if not len(lengths):
        return Packing(np.zeros(1, np.int64), np.empty(0, np.int64))
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit into rows of 1 to {capacity} tokens")
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)  # by position in ``order``
    with_room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # room left -> rows
    has_rows = np.zeros(capacity + 1, bool)
    rows = placed = 0

    def place(chosen: np.ndarray, each: int, room: int, length: int, count: int) -> None:
        """Put ``count`` items of ``length`` into ``chosen`` rows with ``room``, up to ``each`` a row, in their order."""
        nonlocal placed
        row_of[placed : placed + count] = np.repeat(chosen, each)[:count]
        placed += count
        whole, rest = divmod(count, each)
        for group, taken in ((chosen[:whole], each), (chosen[whole:][: rest > 0], rest), (chosen[whole + (rest > 0) :], 0)):
            if len(group):
                left = room - taken * length
                with_room[left].append(group)
                has_rows[left] = True

    distinct, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        for room in (np.flatnonzero(has_rows[length:]) + length).tolist():
            if not count:
                break
            chosen = np.concatenate(with_room[room])
            with_room[room], has_rows[room] = [], False
            here = min(count, len(chosen) * (room // length))
            place(chosen, room // length, room, length, here)
            count -= here
        if count:
            each = capacity // length
            opened = np.arange(rows, rows + -(-count // each))
            rows += len(opened)
            place(opened, each, capacity, length, count)

    by_row = np.argsort(row_of, kind="stable")
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=offsets[1:])
    return Packing(offsets, order[by_row])
