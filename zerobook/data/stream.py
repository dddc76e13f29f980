"""Streams: data that is too large to prepare before the start is prepared shard by shard, during training.

A pass over a stream takes its shards in a permuted order, and the rows of each shard in a permuted order of its own. So the
order of the rows depends on the seed and the shards alone. The number of rows in a shard is known once the shard is reached.
Every checkpoint holds the counts so far. A run that resumes opens the shard where it stopped, and none of those before.
"""

from __future__ import annotations

import multiprocessing
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from zerobook.data.sampler import Mixture, Permutation, SampleOrder
from zerobook.data.views import PreparedRows, Row, View
from zerobook.errors import DataError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from zerobook.config import OrderSettings

Numbers = TypeVar("Numbers", int, np.ndarray)

# A row number has the row in its shard in these lowest bits, and the number of the shard above them.
_SHARD_SHIFT = 32
# The lowest bit of the number of the dataset in a row number.
_DATASET_SHIFT = 56
# Number of passed shards that are kept on disk: other processes and their loaders may be a few steps late.
BEHIND = 3


class Shards(Protocol):
    """Provider of a stream's shards. Can be pickled."""

    def shard(self, dataset: int, index: int) -> PreparedRows:
        """Return the rows of one shard. Prepare the shard if it is missing; wait if another process is preparing it."""

    def delete_shard(self, dataset: int, index: int) -> None:
        """Delete what `shard` wrote, if it is there."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Rows of a stream, with the methods that `zerobook.data.views.PreparedRows` has for data on disk.

    Row numbers encode dataset, shard and row in the shard.

    Args:
        shards: provides the rows.
        counts: shards per dataset.
        fingerprint: of the sources and of how they are read.
        isolated: rows hold several samples that must not see each other.
        longest_sample: maximum number of tokens in a sample.
        largest_id: maximum token id.
        ahead: number of next shards that other processes prepare during training; 0 on all but one process of each node.
        skipped: ranges of samples that are left out, [start, end) each.
    """

    shards: Shards
    counts: Sequence[int]
    fingerprint: str
    isolated: bool
    longest_sample: int
    largest_id: int
    ahead: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    _open: dict[tuple[int, int], PreparedRows] = field(default_factory=dict)
    _makers: dict[tuple[int, int], BaseProcess] = field(default_factory=dict)

    filler = -1
    """No row: a stream has no end, so no batch is filled up."""

    is_empty = False
    """Not known in advance: `StreamOrder.take` raises an error if all rows are skipped."""

    def __len__(self) -> int:
        # The rows are not counted in advance, and no caller needs their number.
        return 0

    @property
    def views(self) -> tuple[View, ...]:
        """The first shard of each dataset."""
        return tuple(self.open_shard(dataset, 0).views[0] for dataset in range(len(self.counts)))

    def order(
        self,
        settings: OrderSettings,
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        passed: Sequence[Sequence[int]] | None = None,
    ) -> StreamOrder:
        """Return the order of the rows. ``passed``: rows of the shards that were reached before, see `StreamOrder`."""
        return StreamOrder(self, settings, seed=seed, weights=weights, passed=passed)

    def open_shard(self, dataset: int, index: int) -> PreparedRows:
        """Return the rows of one shard, without those that are skipped."""
        key = (dataset, index)
        if key not in self._open:
            rows = self.shards.shard(dataset, index)
            first = row_number(dataset, index, 0)
            end = first + (1 << _SHARD_SHIFT)
            # The skipped ranges that touch this shard, counted from its first row.
            ranges = []
            for range_start, range_end in self.skipped:
                if range_end > first and range_start < end:
                    ranges.append((max(first, range_start) - first, min(end, range_end) - first))
            self._open[key] = rows.without_samples(ranges)
            # The shard that was opened first is closed first.
            while len(self._open) > len(self.counts) * (BEHIND + 1) + 1:
                del self._open[next(iter(self._open))]
        return self._open[key]

    def replace_shards(self, next_shards: Sequence[tuple[int, int]], old_shards: Sequence[tuple[int, int]]) -> None:
        """Start processes that prepare the next shards, and delete the old ones. Each shard is (dataset, shard)."""
        if not self.ahead:
            return
        # A fork would copy locks that other threads hold.
        context = multiprocessing.get_context("spawn")
        for key in next_shards[: self.ahead]:
            busy_count = sum(maker.is_alive() for maker in self._makers.values())
            if key not in self._makers and key not in self._open and busy_count < self.ahead:
                self._makers[key] = context.Process(
                    target=_prepare_shard, args=(self.shards, *key), daemon=True, name=f"shard {key}"
                )
                self._makers[key].start()
        for key in old_shards:
            if key in self._makers and not self._makers[key].is_alive():
                del self._makers[key]
            self._open.pop(key, None)
            self.shards.delete_shard(*key)

    def loss_weights_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the loss weights of the rows ``ids``, int64."""
        return self._look_up(ids, lambda shard, rows: shard.loss_weights_of(rows))

    def lengths_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of tokens in the rows ``ids``, int64."""
        return self._look_up(ids, lambda shard, rows: shard.lengths_of(rows))

    def is_dropped(self, ids: np.ndarray) -> np.ndarray:
        """Return which of the rows ``ids`` are left out, bool."""
        return self._look_up(ids, lambda shard, rows: shard.is_dropped(rows)).astype(bool)

    # Look up one value for each row: ``look_up_rows`` gets a shard and the numbers of rows in this shard.
    def _look_up(self, ids: np.ndarray, look_up_rows: Callable[[PreparedRows, np.ndarray], np.ndarray]) -> np.ndarray:
        values = np.empty(len(ids), np.int64)
        shard_numbers = ids >> _SHARD_SHIFT
        for shard_number in np.unique(shard_numbers):
            is_in_shard = shard_numbers == shard_number
            shard, rows = self._locate(int(shard_number) << _SHARD_SHIFT, ids[is_in_shard])
            values[is_in_shard] = look_up_rows(shard, rows)
        return values

    def _locate(self, number: int, ids: Numbers) -> tuple[PreparedRows, Numbers]:
        """Return the shard that row ``number`` of the stream is in, and where in this shard the rows ``ids`` are."""
        # The inverse of `row_number`.
        dataset = number >> _DATASET_SHIFT
        index = (number >> _SHARD_SHIFT) & ((1 << (_DATASET_SHIFT - _SHARD_SHIFT)) - 1)
        return self.open_shard(dataset, index), ids & ((1 << _SHARD_SHIFT) - 1)

    def __getitem__(self, row: int) -> Row:
        shard, shard_row = self._locate(int(row), int(row))
        return shard[shard_row]

    def samples_of(self, row: int) -> list[int]:
        """Return the numbers of the samples in a row, as skip ranges name them."""
        shard, shard_row = self._locate(int(row), int(row))
        # Samples are numbered as rows are: the number of the shard's first row is added.
        first = int(row) >> _SHARD_SHIFT << _SHARD_SHIFT
        return [first + sample for sample in shard.samples_of(shard_row)]

    def without_samples(self, ranges: Iterable[Iterable[int]]) -> Stream:
        """Return this stream without the samples in ``ranges``, [start, end) each."""
        skipped = tuple((int(start), int(end)) for start, end in ranges)
        if skipped == self.skipped:
            return self
        # Open shards were read with the old ranges, so they are opened again.
        return replace(self, skipped=skipped, _open={}, _makers={})


def _prepare_shard(shards: Shards, dataset: int, index: int) -> None:
    """Prepare a shard, in a separate process. The run raises its `DataError` when it reaches the shard."""
    with suppress(DataError):
        shards.shard(dataset, index)


def row_number(dataset: int, shard: int, row: int) -> int:
    """Return the number of a stream's row, as the runlog and skip ranges name it."""
    return dataset << _DATASET_SHIFT | shard << _SHARD_SHIFT | row


class StreamOrder:
    """The endless sequence of row numbers of a stream, as `zerobook.data.sampler.SampleOrder` is for data on disk.

    Args:
        stream: gives the shards.
        settings: of the order; with ``group_by_length``, rows of similar length in a shard come together.
        seed: of the order of the shards and of the rows in each; each pass has another order.
        weights: one per dataset, their shares of the rows; None if there is one dataset.
        passed: for each dataset, the number of rows in each shard that was reached so far, in the order of the run.
    """

    def __init__(
        self,
        stream: Stream,
        settings: OrderSettings,
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        passed: Sequence[Sequence[int]] | None = None,
    ):
        self.stream = stream
        self.seed = seed
        self.settings = settings
        self.mixture: Mixture | None = None
        if len(stream.counts) > 1 and weights:
            self.mixture = Mixture(weights)
        self.passed: list[list[int]] = [[] for _ in stream.counts]
        if passed:
            self.passed = [list(rows) for rows in passed]
        # For each dataset, the number of its rows up to the end of each shard that was reached, over all passes.
        self._ends: list[list[int]] = [np.cumsum(rows, dtype=np.int64).tolist() for rows in self.passed]
        # The order of the rows in a shard, by (dataset, number of the shard along the run).
        self._orders: dict[tuple[int, int], SampleOrder] = {}
        # The order of the shards in a pass, by (dataset, number of the pass).
        self._shard_orders: dict[tuple[int, int], np.ndarray] = {}
        # For each dataset, the number along the run of the shard that was read last; -1 before the first.
        self._current = [-1] * len(stream.counts)
        self._reached_shards: list[dict[str, Any]] = []

    def ids(self, start: int, end: int) -> np.ndarray:
        """Return the row numbers at the positions ``start`` to ``end`` of the run, int64 [end - start]."""
        if self.mixture is None:
            return self._dataset_ids(0, start, end)
        datasets, dataset_positions = self.mixture.locate(np.arange(start, end))
        ids = np.empty(end - start, np.int64)
        for dataset in np.unique(datasets):
            # These positions among the dataset's rows are consecutive, so the first and the last one are enough.
            consecutive = dataset_positions[datasets == dataset]
            ids[datasets == dataset] = self._dataset_ids(int(dataset), int(consecutive[0]), int(consecutive[-1]) + 1)
        return ids

    def take(self, cursor: int, count: int, end: int) -> tuple[np.ndarray, int]:
        """Return the next ``count`` row numbers from ``cursor`` on that are not dropped, and the cursor after them."""
        batches = [np.empty(0, np.int64)]
        missing = count
        last_success = cursor
        while missing and cursor < end:
            stop = min(cursor + missing, end)
            # Some of the ids may be dropped. The next iteration replaces them.
            ids = self.ids(cursor, stop)
            ids = ids[~self.stream.is_dropped(ids)]
            # A row may come early in one pass and late in the next, so one pass without a row does not mean that there is none.
            if len(ids):
                last_success = stop
            elif self.epoch(stop) - self.epoch(last_success) > 3:
                raise DataError("streaming: all samples are left out, so there are none to train on.")
            batches.append(ids)
            missing -= len(ids)
            cursor = stop
        return np.concatenate(batches), cursor

    def preview(self, cursor: int, rows: int) -> np.ndarray:
        """Return the next row numbers, ``rows`` at most, without opening many more shards."""
        # This call opens the shard at the cursor, so that its end is known. The preview ends there; that of a mixture is short.
        self.ids(cursor, cursor + 1)
        limit = self._ends[0][-1] if self.mixture is None else cursor + 256
        return self.ids(cursor, min(cursor + rows, limit))

    def epoch(self, cursor: int) -> float:
        """Return how many passes are completed at ``cursor``, counted in complete shards. The slowest dataset decides."""
        passes = []
        for dataset, count in enumerate(self.stream.counts):
            row_count = cursor if self.mixture is None else self.mixture.count_before(dataset, cursor)
            passes.append(bisect_right(self._ends[dataset], row_count) / count)
        return min(passes)

    def take_reached_shards(self) -> list[dict[str, Any]]:
        """Return the facts about shards that were reached since the last call."""
        reached_shards = self._reached_shards
        self._reached_shards = []
        return reached_shards

    def _dataset_ids(self, dataset: int, start: int, end: int) -> np.ndarray:
        """Return the row numbers of one dataset's rows ``start`` to ``end``, int64 [end - start]."""
        pieces = [np.empty(0, np.int64)]
        while start < end:
            # Take the rows of one shard after another.
            nth = self._find_shard(dataset, start)
            first = self._ends[dataset][nth - 1] if nth else 0
            stop = min(end, self._ends[dataset][nth])
            shard = self._shard(dataset, nth)
            shard_rows = self._shard_order(dataset, nth).ids(start - first, stop - first)
            pieces.append(shard_rows + row_number(dataset, shard, 0))
            start = stop
        return np.concatenate(pieces)

    def _find_shard(self, dataset: int, position: int) -> int:
        """Return the number along the run of the shard with the dataset's row at ``position``. Open new shards as needed."""
        ends = self._ends[dataset]
        passed = self.passed[dataset]
        count = self.stream.counts[dataset]
        while not ends or ends[-1] <= position:
            nth = len(ends)
            # If a complete pass has no row, the next ones have none either.
            if nth == count and not any(passed):
                raise DataError("streaming: none of the shards has a row that can be trained on.")
            shard = self._shard(dataset, nth)
            # The number of its rows is known once it is open.
            rows = self.stream.open_shard(dataset, shard)
            first = ends[-1] if ends else 0
            passed.append(len(rows))
            ends.append(first + len(rows))
            meta = rows.views[0].store.meta
            # For the runlog: a stream reports its samples as it reaches them.
            shard_facts = {key: meta[key] for key in ("tokens", "report", "bad_samples")}
            self._reached_shards.append({"dataset": dataset, "shard": shard, "rows": len(rows)} | shard_facts)
        nth = bisect_right(ends, position)
        # This method is called for every batch. Do something only if the run comes to another shard.
        if nth != self._current[dataset]:
            self._replace_shards(dataset, nth)
            self._current[dataset] = nth
        return nth

    def _replace_shards(self, dataset: int, nth: int) -> None:
        """Let the stream prepare the shards after the ``nth``, and delete those that are more than `BEHIND` before it."""
        kept = [(dataset, self._shard(dataset, n)) for n in range(max(0, nth - BEHIND), nth + 1)]
        following = [(dataset, self._shard(dataset, n)) for n in range(nth + 1, nth + 1 + self.stream.ahead)]
        # Several shards may be too old now, since empty shards are passed without a stop. After a resume, `_current` is -1.
        # Then take the shard before the ``nth`` as the previous one, since the earlier process deleted the older shards.
        previous = self._current[dataset] if self._current[dataset] >= 0 else nth - 1
        old = [(dataset, self._shard(dataset, n)) for n in range(max(0, previous - BEHIND), nth - BEHIND)]
        # If there are few shards, the next pass may need one of these again soon.
        self.stream.replace_shards(following, [shard for shard in old if shard not in kept + following])

    def _shard(self, dataset: int, nth: int) -> int:
        """Return which shard of a dataset is its ``nth`` along the run. Each pass has the shards in another order."""
        count = self.stream.counts[dataset]
        pass_number, position = divmod(nth, count)
        if (dataset, pass_number) not in self._shard_orders:
            # The pass before is still needed, for shards that are kept.
            for other_dataset, other_pass in list(self._shard_orders):
                if other_dataset == dataset and other_pass < pass_number - 1:
                    del self._shard_orders[other_dataset, other_pass]
            permutation = Permutation(count, seed=self.seed, epoch=pass_number, owner=dataset)
            self._shard_orders[dataset, pass_number] = permutation(np.arange(count))
        return int(self._shard_orders[dataset, pass_number][position])

    # Return the order of the rows in a dataset's ``nth`` shard along the run.
    def _shard_order(self, dataset: int, nth: int) -> SampleOrder:
        if (dataset, nth) not in self._orders:
            rows = self.stream.open_shard(dataset, self._shard(dataset, nth))
            lengths = rows.lengths_of(np.arange(len(rows))) if self.settings.group_by_length else None
            # The number along the run is in the seed: a shard has another order in each pass.
            seed = int(np.random.SeedSequence([self.seed, dataset, nth]).generate_state(1)[0])
            # Only the order of the latest shard of each dataset is kept.
            self._orders = {key: order for key, order in self._orders.items() if key[0] != dataset}
            self._orders[dataset, nth] = SampleOrder([len(rows)], seed=seed, lengths=lengths)
        return self._orders[dataset, nth]
