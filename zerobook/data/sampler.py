"""The order of the samples: a permutation computed, not stored, and one cursor for all processes.

The order depends on (seed, epoch, number of samples) alone. Position `cursor` of the run is
position ``cursor % size`` of epoch ``cursor // size``, so any process can seek anywhere at once,
and a run continued on another number of processes takes the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of ``range(size)`` with O(1) access.

    A balanced Feistel network over the smallest even number of bits that holds ``size``, walked
    along its cycle until the value is in range (Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002). The round function is the mixer of SplitMix64.

    >>> sorted(Permutation(10, seed=1, epoch=0)(np.arange(10)).tolist()) == list(range(10))
    True
    """

    def __init__(self, size: int, *, seed: int, epoch: int):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Elements at ``positions`` (int array [n], each in ``range(size)``), as int64 [n]."""
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        with np.errstate(over="ignore"):
            for key in self._keys:
                mixed = right + key
                mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                mixed ^= mixed >> np.uint64(31)
                left, right = right, left ^ (mixed & self._mask)
        return (left << self._half) | right


class SampleOrder:
    """The endless sequence of sample ids of a run, epoch after epoch.

    Args:
        size: samples in the dataset.
        seed: of the order; epochs differ by themselves.
        shuffle: False keeps the dataset's own order (evaluation).
        skip: ranges ``(start, end)`` of sample ids that are left out of every epoch. They use
            up their positions, so lifting a range later moves no other sample.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True, skip: Iterable[tuple[int, int]] = ()):
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.skip = sorted((int(a), int(b)) for a, b in skip)
        self._permutation: tuple[int, Permutation] | None = None

    def ids(self, start: int, end: int) -> np.ndarray:
        """Sample ids at the positions ``start`` to ``end`` of the run, int64 [end - start]."""
        parts = []
        while start < end:
            epoch, offset = divmod(start, self.size)
            count = min(end - start, self.size - offset)
            positions = np.arange(offset, offset + count)
            parts.append(self._epoch(epoch)(positions) if self.shuffle else positions)
            start += count
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def take(self, cursor: int, count: int, end: int) -> tuple[np.ndarray, int]:
        """The next ``count`` ids from ``cursor`` on that are not skipped, and the cursor behind them.

        Fewer come back only where position ``end`` is reached.
        """
        taken: list[np.ndarray] = []
        missing = count
        while missing and cursor < end:
            stop = min(cursor + missing, end)
            ids = self.ids(cursor, stop)
            kept = ids[~self._skipped(ids)]
            taken.append(kept)
            missing -= len(kept)
            cursor = stop
        return (np.concatenate(taken) if taken else np.empty(0, np.int64)), cursor

    def remaining(self, cursor: int, end: int) -> int:
        """Samples that `take` will still give between ``cursor`` and ``end``."""
        if not self.skip:
            return max(0, end - cursor)
        whole, total = 0, 0
        per_epoch = self.size - int(self._skipped(np.arange(self.size)).sum())
        while cursor < end:
            offset = cursor % self.size
            if offset == 0 and end - cursor >= self.size:
                whole = (end - cursor) // self.size
                total += whole * per_epoch
                cursor += whole * self.size
                continue
            stop = min(end, cursor - offset + self.size)
            ids = self.ids(cursor, stop)
            total += int((~self._skipped(ids)).sum())
            cursor = stop
        return total

    def _epoch(self, epoch: int) -> Permutation:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (epoch, Permutation(self.size, seed=self.seed, epoch=epoch))
        return self._permutation[1]

    def _skipped(self, ids: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in self.skip:
            mask |= (ids >= start) & (ids < end)
        return mask
