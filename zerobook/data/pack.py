"""Best-fit-decreasing bin packing, which chooses the samples that share a row."""

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
    row_of, row_count = _assign_rows(lengths, capacity)
    # List the items of each row, the longest first. ``row_of`` has the rows of the items from the longest to the shortest.
    by_length = np.argsort(-lengths, kind="stable")
    by_row = np.argsort(row_of, kind="stable")
    offsets = np.zeros(row_count + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=row_count), out=offsets[1:])
    return Packing(offsets, by_length[by_row])


def _assign_rows(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Return (the row of each item, in the order of the items from the longest to the shortest; the number of rows)."""
    row_of = np.empty(len(lengths), np.int64)
    # For each room, the tokens that are free in a row: arrays with the numbers of the rows that have so much room.
    rows_by_room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]
    # Which of these lists are not empty, as an array, so that one call finds the smallest room that fits.
    has_rows = np.zeros(capacity + 1, bool)
    row_count = 0
    placed_count = 0

    def place(rows: np.ndarray, room: int, length: int, count: int) -> None:
        """Put ``count`` items of ``length`` into ``rows``, which have the same ``room``: fill the first row, then the next."""
        nonlocal placed_count
        per_row = room // length
        row_of[placed_count : placed_count + count] = np.repeat(rows, per_row)[:count]
        placed_count += count
        # Some rows get as many items as fit, one may get the remaining items, and the others get none.
        full_count, rest = divmod(count, per_row)
        partial_count = 1 if rest else 0
        full, partial, untouched = np.split(rows, [full_count, full_count + partial_count])
        for group, items in ((full, per_row), (partial, rest), (untouched, 0)):
            if len(group):
                room_left = room - items * length
                rows_by_room[room_left].append(group)
                has_rows[room_left] = True

    distinct_lengths, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(distinct_lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # Take the rows that have room for such an item, those with the least room first.
        for room in (np.flatnonzero(has_rows[length:]) + length).tolist():
            if not count:
                break
            rows = np.concatenate(rows_by_room[room])
            rows_by_room[room] = []
            has_rows[room] = False
            fitting_count = min(count, len(rows) * (room // length))
            place(rows, room, length, fitting_count)
            count -= fitting_count
        if count:
            # The remaining items fit into no row that was begun, so they begin new ones.
            new_count = -(-count // (capacity // length))
            place(np.arange(row_count, row_count + new_count), capacity, length, count)
            row_count += new_count
    return row_of, row_count
