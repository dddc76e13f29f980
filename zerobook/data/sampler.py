"""The order of the samples: a permutation that is computed, not stored, and one cursor for all processes.

The order depends only on the seed, the numbers of samples, and the weights and lengths if they are given. Without weights,
position ``cursor`` of the run is position ``cursor % size`` of epoch ``cursor // size``. So any process can seek to any
position at once, and a run that resumes on another number of processes takes the same samples in the same order.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

_ROUNDS = 6


def rows_of(epochs: float, rows: int) -> int:
    """Return the number of rows in ``epochs`` passes over ``rows``, rounded up.

    ``epochs`` is read as the decimal number that was written: 0.07 is 7 / 100 and not the binary fraction above it.

    >>> rows_of(0.07, 100), rows_of(1.1, 100), rows_of(0.071, 100), rows_of(3.0, 7)
    (7, 110, 8, 21)
    """
    return math.ceil(Fraction(str(epochs)) * rows)


class Permutation:
    """A pseudo-random bijection of ``range(size)`` with O(1) access.

    It is a balanced Feistel network over the smallest even number of bits that holds ``size``. The network is applied again
    to values that are not below ``size`` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The round
    function is the mixer of SplitMix64.

    Args:
        owner: number of a dataset; the datasets of a mixture have different permutations in the same epoch.

    >>> sorted(Permutation(10, seed=1, epoch=0)(np.arange(10)).tolist()) == list(range(10))
    True
    """

    def __init__(self, size: int, *, seed: int, epoch: int, owner: int | None = None):
        self.size = size
        # Bits in each half of a value. The network permutes at most four times as many values as ``size``, so few of its
        # results are out of range.
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        entropy = [seed, epoch]
        if owner is not None:
            entropy.append(owner)
        self._keys = np.random.SeedSequence(entropy).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the elements at ``positions`` (int array [n], each in ``range(size)``), as int64 [n]."""
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        """Return the results of the Feistel network, run once. It permutes the numbers of twice ``_half`` bits."""
        left = values >> self._half
        right = values & self._mask
        # The mixer computes modulo 2 to the 64.
        with np.errstate(over="ignore"):
            for key in self._keys:
                mixed = right + key
                mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                mixed ^= mixed >> np.uint64(31)
                new_right = left ^ (mixed & self._mask)
                left = right
                right = new_right
        return (left << self._half) | right


class Mixture:
    """The dataset of each position: chosen by weight, evenly distributed, and computed directly for any position.

    The order of the datasets repeats after `PERIOD` positions. In a period, each dataset has a number of positions by its
    weight, at equal distances. So the number of samples of a dataset before any position is computed without iterating.

    Args:
        weights: share of the positions per dataset, in any unit.
    """

    PERIOD = 10_000

    def __init__(self, weights: Sequence[float]):
        exact = np.asarray(weights, float) / sum(weights) * self.PERIOD
        shares = np.maximum(1, np.floor(exact)).astype(np.int64)
        # Positions are left over by the rounding. They go to the shares that it reduced most.
        missing_count = max(0, self.PERIOD - shares.sum())
        for index in np.argsort(shares - exact, kind="stable")[:missing_count]:
            shares[index] += 1
        # If tiny weights were rounded up to one position, the sum may be too large. The largest share is reduced by the excess.
        shares[np.argmax(shares)] -= shares.sum() - self.PERIOD
        self.shares = shares
        # The positions of a dataset are at equal distances in the period, which goes from 0 to 1 here.
        places = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        datasets = np.repeat(np.arange(len(shares)), shares)
        # Sort the positions of all datasets by place. At the same place, the dataset with the lower number comes first.
        self._dataset = datasets[np.lexsort((datasets, places))]
        # For each dataset, the number of its samples before each position of the period: int64 [datasets, `PERIOD`].
        counts_before = [np.cumsum(self._dataset == i) - (self._dataset == i) for i in range(len(shares))]
        self._before = np.stack(counts_before)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (dataset of each position, number of its samples at earlier positions), int64 [n] each."""
        period, offset = np.divmod(positions, self.PERIOD)
        dataset = self._dataset[offset]
        return dataset, period * self.shares[dataset] + self._before[dataset, offset]

    def count_before(self, dataset: int, position: int) -> int:
        """Return the number of samples that ``dataset`` has given before ``position``."""
        period, offset = divmod(position, self.PERIOD)
        return int(period * self.shares[dataset] + self._before[dataset, offset])


class SampleOrder:
    """The endless sequence of row numbers of a run, epoch after epoch.

    An epoch has as many positions as there are rows. Without weights, each row comes once per epoch. With weights,
    the datasets come by weight, and the rows of each are repeated, in another permutation for each pass.

    Args:
        sizes: rows per dataset; rows are numbered across the datasets.
        seed: of the order; each epoch has another order.
        shuffle: False keeps the rows' own order (evaluation).
        weights: one per dataset, see `Mixture`; None mixes all rows equally.
        dropped: bool [rows], rows left out of every epoch. They keep their positions, so that restoring one moves no
            other row.
        lengths: int [rows]; if given, rows of similar length come together (see `GROUP`), which reduces padding.
    """

    GROUP = 32
    """Number of rows of similar length that stay together; these groups come in random order."""
    SORTED = 64 * GROUP
    """Number of positions that are sorted by length at a time."""
    AHEAD = 4096
    """Number of positions whose rows `take` computes at once. To compute only a few takes as long."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
        dropped: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ):
        self.sizes = list(sizes)
        self.size = sum(sizes)
        self.seed = seed
        self.shuffle = shuffle
        self.mixture: Mixture | None = None
        if weights is not None and len(sizes) > 1:
            self.mixture = Mixture(weights)
        self.dropped = dropped
        self.lengths = lengths
        # What a checkpoint records of streamed shards, see `zerobook.data.stream.StreamOrder`. Here there are none.
        self.passed: list[list[int]] | None = None
        # (Size, number of the epoch or pass, dataset or None for all of them) -> its permutation.
        self._permutations: dict[tuple[int, int, int | None], Permutation] = {}
        # The segment that was sorted last: (its first position, its row numbers).
        self._sorted: tuple[int, np.ndarray] | None = None
        # What `_buffered` computed last: (first position, row numbers from there on).
        self._computed: tuple[int, np.ndarray] = (0, np.empty(0, np.int64))

    def ids(self, start: int, end: int) -> np.ndarray:
        """Return the row numbers at the positions ``start`` to ``end`` of the run, int64 [end - start]."""
        if self.lengths is None or not self.shuffle:
            return self._unsorted(start, end)
        pieces = [np.empty(0, np.int64)]
        while start < end:
            segment_start, segment_end = self._segment(start)
            rows = self._by_length(segment_start, segment_end)
            pieces.append(rows[start - segment_start : end - segment_start])
            start = segment_end
        return np.concatenate(pieces)

    def _unsorted(self, start: int, end: int) -> np.ndarray:
        """Return what `ids` returns, in the order before rows are sorted by length."""
        if self.mixture is not None and self.shuffle:
            return self._mixed(self.mixture, start, end)
        pieces = [np.empty(0, np.int64)]
        while start < end:
            epoch, offset = divmod(start, self.size)
            # Stop at the end of the epoch, since the next one has another permutation.
            count = min(end - start, self.size - offset)
            ids = np.arange(offset, offset + count)
            if self.shuffle:
                ids = self._permutation(self.size, epoch)(ids)
            pieces.append(ids)
            start += count
        return np.concatenate(pieces)

    def _mixed(self, mixture: Mixture, start: int, end: int) -> np.ndarray:
        """Return the row numbers at positions of a mixture. The rows of a dataset are repeated in a new order for each pass."""
        datasets, counts_before = mixture.locate(np.arange(start, end))
        ids = np.empty(end - start, np.int64)
        # Rows are numbered across the datasets.
        first_row = 0
        for dataset, size in enumerate(self.sizes):
            # The k-th sample of a dataset is in its pass k // size, at position k % size.
            passes, offsets = np.divmod(counts_before, size)
            for pass_number in np.unique(passes[datasets == dataset]):
                is_in_pass = (datasets == dataset) & (passes == pass_number)
                permutation = self._permutation(size, int(pass_number), dataset)
                ids[is_in_pass] = first_row + permutation(offsets[is_in_pass])
            first_row += size
        return ids

    def _segment(self, position: int) -> tuple[int, int]:
        """Return the range (first, end) of the positions that are sorted together with ``position``, within one epoch."""
        epoch, offset = divmod(position, self.size)
        first = epoch * self.size + offset // self.SORTED * self.SORTED
        return first, min(first + self.SORTED, (epoch + 1) * self.size)

    def _by_length(self, first: int, end: int) -> np.ndarray:
        """Return the row numbers of a segment, in which rows of similar length are neighbours."""
        if self._sorted is None or self._sorted[0] != first:
            assert self.lengths is not None
            ids = self._unsorted(first, end)
            # Stable, so that the order is the same on every machine.
            ids = ids[np.argsort(self.lengths[ids], kind="stable")]
            # Shuffle groups of neighbours, so that the lengths of batches come in random order.
            groups = np.array_split(ids, range(self.GROUP, len(ids), self.GROUP))
            # The seed includes the position, so that a segment can be computed without those before it.
            order = np.random.default_rng([self.seed, first]).permutation(len(groups))
            self._sorted = (first, np.concatenate([groups[i] for i in order]))
        return self._sorted[1]

    def take(self, cursor: int, count: int, end: int) -> tuple[np.ndarray, int]:
        """Return the next ``count`` ids from ``cursor`` on that are not dropped, and the cursor after them.

        Fewer ids are returned only if position ``end`` is reached.
        """
        batches = [np.empty(0, np.int64)]
        missing = count
        while missing and cursor < end:
            stop = min(cursor + missing, end)
            ids = self._buffered(cursor, stop)
            # Later rows replace the dropped ones in the next iteration.
            if self.dropped is not None:
                ids = ids[~self.dropped[ids]]
            batches.append(ids)
            missing -= len(ids)
            cursor = stop
        return np.concatenate(batches), cursor

    def _buffered(self, start: int, end: int) -> np.ndarray:
        """Return what `ids` returns. At least `AHEAD` positions are computed at once, and kept for the next calls."""
        first, ids = self._computed
        if not first <= start <= end <= first + len(ids):
            # Go no further than the end of the epoch, unless ``end`` is behind it: the next epoch has another permutation.
            epoch_end = (start // self.size + 1) * self.size
            first = start
            ids = self.ids(start, max(end, min(start + self.AHEAD, epoch_end)))
            self._computed = (first, ids)
        return ids[start - first : end - first]

    def preview(self, cursor: int, rows: int) -> np.ndarray:
        """Return the next ``rows`` row numbers."""
        return self.ids(cursor, cursor + rows)

    def epoch(self, cursor: int) -> float:
        """Return the number of passes completed at ``cursor``."""
        return cursor / self.size

    def take_reached_shards(self) -> list[dict[str, Any]]:
        """Return nothing: everything about the data was reported before the start."""
        return []

    def remaining(self, cursor: int, end: int) -> int:
        """Return the number of rows that `take` returns between ``cursor`` and ``end``."""
        if self.dropped is None or not self.dropped.any():
            return max(0, end - cursor)
        total = 0
        per_epoch = self.size - int(self.dropped.sum())
        while cursor < end:
            offset = cursor % self.size
            # Complete epochs are counted without computing their rows. In a mixture, epochs do not have the same rows.
            if offset == 0 and end - cursor >= self.size and self.mixture is None:
                epochs = (end - cursor) // self.size
                total += epochs * per_epoch
                cursor += epochs * self.size
                continue
            # Count the rows up to the end of this epoch.
            stop = min(end, cursor - offset + self.size)
            total += int((~self.dropped[self.ids(cursor, stop)]).sum())
            cursor = stop
        return total

    # Return the permutation of a pass over ``size`` rows. Each one is made only once.
    def _permutation(self, size: int, epoch: int, owner: int | None = None) -> Permutation:
        key = (size, epoch, owner)
        if key not in self._permutations:
            # A run needs the permutations of the current and the next pass over each dataset.
            if len(self._permutations) > 2 * len(self.sizes):
                self._permutations.clear()
            self._permutations[key] = Permutation(size, seed=self.seed, epoch=epoch, owner=owner)
        return self._permutations[key]


def held_out_mask(samples: int, share: float, seed: int) -> np.ndarray:
    """Return which samples are held out at random, bool [samples]: at least one of several, and never all; none for share 0."""
    mask = np.zeros(samples, bool)
    if share:
        count = min(max(1, round(samples * share)), samples - 1)
        # If there are no samples, the count is -1.
        mask[np.random.default_rng(seed).permutation(samples)[: max(0, count)]] = True
    return mask
