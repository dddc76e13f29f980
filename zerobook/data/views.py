"""Rows of prepared data: a document, a block of running text, or a pack of several documents.

Each view of a `TokenStore` is a sequence of rows (dicts of int64 arrays), with the tokens and the supervised tokens of
every row known beforehand. Nothing is copied on disk: another length, split or packing is another view of the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from zerobook.constants import IGNORE
from zerobook.data.pack import Packing, best_fit_decreasing
from zerobook.data.sampler import SampleOrder
from zerobook.data.store import TokenStore

if TYPE_CHECKING:
    from zerobook.config import OrderSettings

Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class Documents:
    """Rows of one document each. ``chosen`` is int64 [rows], document numbers."""

    store: TokenStore
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows], tokens"""
        return np.diff(self.store.offsets)[self.chosen]

    @property
    def labels(self) -> np.ndarray:
        """int64 [rows], number of labels: a target's tokens where there is a source, and all tokens elsewhere"""
        return np.diff(self.store.label_offsets)[self.chosen]

    @property
    def loss_weights(self) -> np.ndarray:
        """int64 [rows], the weight of each in the divisor of the loss"""
        return self.store.loss_weights[self.chosen].astype(np.int64)

    @property
    def selection(self) -> list[np.ndarray]:
        """arrays that say which of the store's tokens the rows have"""
        return [self.chosen]

    def __getitem__(self, row: int) -> Row:
        store = self.store
        document = self.chosen[row]
        ids = store.ids[store.offsets[document] : store.offsets[document + 1]]
        labels = store.labels[store.label_offsets[document] : store.label_offsets[document + 1]]
        arrays = {"input_ids": ids.astype(np.int64), "labels": labels.astype(np.int64)}
        for name, (values, offsets) in store.extra.items():
            arrays[name] = values[offsets[document] : offsets[document + 1]].astype(np.int64)
        return arrays


@dataclass(frozen=True)
class Blocks:
    """Running text, cut every ``length`` tokens; an incomplete block at the end is dropped. All tokens are supervised.

    ``starts`` and ``stops`` are int64 [ranges]: the ranges of the store's tokens that are joined before they are cut.
    ``loss_weight`` is the weight of each block: all tokens are supervised, so all blocks have the same one.
    """

    store: TokenStore
    starts: np.ndarray
    stops: np.ndarray
    length: int
    loss_weight: int

    @cached_property
    def _ends(self) -> np.ndarray:
        """Ends of the ranges among the joined tokens, int64 [ranges]."""
        return np.cumsum(self.stops - self.starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.length if len(self._ends) else 0

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self), self.length, np.int64)

    labels = lengths

    @property
    def loss_weights(self) -> np.ndarray:
        return np.full(len(self), self.loss_weight, np.int64)

    @property
    def selection(self) -> list[np.ndarray]:
        """arrays that say which of the store's tokens the rows have"""
        return [self.starts, self.stops, np.array([self.length])]

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(row)
        # Find the range of tokens in which the block begins. The distance from there to the end of the range is the same among
        # the joined tokens and among the store's tokens.
        first = row * self.length
        index = int(np.searchsorted(self._ends, first, side="right"))
        position = int(self.stops[index] - (self._ends[index] - first))
        missing = self.length
        pieces = []
        while missing:
            # Take the rest of the range, or as many tokens as are missing. Then go on with the next range.
            piece = self.store.ids[position : min(position + missing, self.stops[index])]
            pieces.append(piece)
            missing -= len(piece)
            index += 1
            if missing:
                position = int(self.starts[index])
        ids = np.concatenate(pieces).astype(np.int64)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Packs:
    """Rows of several samples, isolated from each other by ``position_ids`` that restart with each sample.

    ``starts`` and ``stops``, int64 [samples], are the ranges of the store's tokens that the samples have. ``weights``, int64
    [samples], are their loss weights. ``packing`` says which of the samples share a row.
    """

    store: TokenStore
    starts: np.ndarray
    stops: np.ndarray
    weights: np.ndarray
    packing: Packing

    def __len__(self) -> int:
        return len(self.packing)

    @property
    def lengths(self) -> np.ndarray:
        return self._sum_per_row(self.stops - self.starts)

    labels = lengths

    @property
    def loss_weights(self) -> np.ndarray:
        return self._sum_per_row(self.weights)

    @property
    def selection(self) -> list[np.ndarray]:
        """arrays that say which of the store's tokens the rows have"""
        members = self.packing.members
        return [self.starts[members], self.stops[members]]

    # Return the sum of the values of each row's samples. ``values``: int64 [samples].
    def _sum_per_row(self, values: np.ndarray) -> np.ndarray:
        # The samples of a row are a range of the members, so their sum is a difference of two running sums.
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values[self.packing.members])])
        return sums[self.packing.offsets[1:]] - sums[self.packing.offsets[:-1]]

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(row)
        ids = []
        labels = []
        positions = []
        for sample in self.samples(row):
            start = self.starts[sample]
            stop = self.stops[sample]
            ids.append(self.store.ids[start:stop])
            sample_labels = np.array(self.store.labels[start:stop])
            # The first token of a sample has no token before it that could predict it: that is of another sample.
            sample_labels[0] = IGNORE
            labels.append(sample_labels)
            positions.append(np.arange(stop - start))
        return {
            "input_ids": np.concatenate(ids).astype(np.int64),
            "labels": np.concatenate(labels).astype(np.int64),
            "position_ids": np.concatenate(positions).astype(np.int64),
        }

    def samples(self, row: int) -> np.ndarray:
        """Return the numbers of the samples in ``row``, int64."""
        return self.packing.members[self.packing.offsets[row] : self.packing.offsets[row + 1]]

    def without(self, skipped: np.ndarray) -> Packs:
        """Return the same rows without the samples that ``skipped``, bool [samples], marks. A row may become empty."""
        is_left = ~skipped[self.packing.members]
        # For each member, and for the end, how many members before it are left. Rows begin and end at these numbers.
        left_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_left)])
        return replace(self, packing=Packing(left_before[self.packing.offsets], self.packing.members[is_left]))


View = Documents | Blocks | Packs


def text_row(length: int) -> Row:
    """Return a row of running text of ``length`` tokens, for the objective to weigh: all of it is supervised."""
    tokens = np.zeros(length, np.int64)
    return {"input_ids": tokens, "labels": tokens}


def pack(store: TokenStore, chosen: np.ndarray, length: int, weigh: Callable[[Row], int]) -> Packs:
    """Pack documents into rows; longer ones are cut into several samples first.

    Args:
        chosen: int64, numbers of the documents.
        length: tokens of a row.
        weigh: the objective's weight of a row.
    """
    offsets = np.asarray(store.offsets)
    # Cut each document into samples of at most ``length`` tokens. ``document_of`` is the index of each sample's document in
    # ``chosen``, and ``number`` is the sample's number in its document: 0, 1, 2 and so on.
    samples_per_document = -(-np.diff(offsets)[chosen] // length)
    document_of = np.repeat(np.arange(len(chosen)), samples_per_document)
    first_sample_of = np.cumsum(samples_per_document) - samples_per_document
    number = np.arange(len(document_of)) - first_sample_of[document_of]
    starts = offsets[chosen][document_of] + number * length
    stops = np.minimum(starts + length, offsets[chosen + 1][document_of])
    if store.labels is store.ids:
        # The labels equal the ids, so the weight depends on the length alone. Weigh each length once.
        sizes, size_of = np.unique(stops - starts, return_inverse=True)
        weights = np.array([weigh(text_row(int(size))) for size in sizes], np.int64)[size_of]
    else:
        # Documents with labels of their own were cut to the length when they were encoded. So each is one sample, and its
        # weight is stored.
        weights = store.loss_weights[chosen].astype(np.int64)
    # One token alone predicts nothing.
    is_useful = stops - starts > 1
    starts = starts[is_useful]
    stops = stops[is_useful]
    return Packs(store, starts, stops, weights[is_useful], best_fit_decreasing(stops - starts, length))


@dataclass(frozen=True)
class PreparedRows:
    """Rows of one or several datasets, and their samples. Rows and samples are numbered across the datasets.

    ``fingerprint`` changes with the content, the split and the cutting, so that a resumed run can check whether the
    data is still the same.
    """

    views: tuple[View, ...]
    fingerprint: str
    dropped: np.ndarray | None = None
    """bool [rows]: rows that are skipped; None if none is"""

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """rows per dataset"""
        return list(map(len, self.views))

    @property
    def is_empty(self) -> bool:
        """Return whether every row is skipped."""
        return self.dropped is not None and bool(self.dropped.all())

    @property
    def isolated(self) -> bool:
        """Return whether rows hold several samples that must not see each other."""
        return any(isinstance(view, Packs) for view in self.views)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [rows], tokens"""
        return np.concatenate([view.lengths for view in self.views])

    @cached_property
    def loss_weights(self) -> np.ndarray:
        """int64 [rows], the weight of each in the divisor of the loss"""
        return np.concatenate([view.loss_weights for view in self.views])

    def lengths_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of tokens in the rows ``ids``, int64."""
        return self.lengths[ids]

    def loss_weights_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the loss weights of the rows ``ids``, int64."""
        return self.loss_weights[ids]

    def is_dropped(self, ids: np.ndarray) -> np.ndarray:
        """Return which of the rows ``ids`` are left out, bool."""
        return np.zeros(len(ids), bool) if self.dropped is None else self.dropped[ids]

    @property
    def filler(self) -> int:
        """A row with a positive loss weight, with which batches are filled up."""
        return int(np.argmax(self.loss_weights > 0))

    @property
    def longest_sample(self) -> int:
        """Number of tokens in the longest sample. In a pack, each sample is measured by itself."""
        longest = []
        for view in self.views:
            if len(view):
                # A pack is as long as a row, but its samples do not see each other.
                lengths = view.stops - view.starts if isinstance(view, Packs) else view.lengths
                longest.append(int(lengths.max()))
        return max(longest)

    @property
    def most_labels(self) -> int:
        """Number of labels in the row with the most labels. A model makes logits for as many positions."""
        return max(int(view.labels.max()) for view in self.views if len(view))

    @property
    def largest_id(self) -> int:
        """Largest token id in the files."""
        return max(int(max(view.store.ids.max(), view.store.labels.max())) for view in self.views)

    def order(
        self,
        settings: OrderSettings,
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        passed: Sequence[Sequence[int]] | None = None,
    ) -> SampleOrder:
        """Return the order of the rows in training. ``passed`` is not used: only streams pass shards."""
        lengths = self.lengths if settings.group_by_length else None
        return SampleOrder(self.sizes, seed=seed, weights=weights, dropped=self.dropped, lengths=lengths)

    def __getitem__(self, row: int) -> Row:
        # Rows are numbered across the datasets.
        for view in self.views:
            if row < len(view):
                return view[int(row)]
            row -= len(view)
        raise IndexError(row)

    def samples_of(self, row: int) -> list[int]:
        """Return the numbers of the samples in a row, as skip ranges name them. A row that is not a pack is one sample."""
        first = 0
        for view in self.views:
            if row < len(view):
                numbers = view.samples(row) if isinstance(view, Packs) else np.array([row])
                return (numbers + first).tolist()
            row -= len(view)
            first += _sample_count(view)
        raise IndexError(row)

    def without_samples(self, ranges: Iterable[Iterable[int]]) -> PreparedRows:
        """Return these rows without the samples in ``ranges``, [start, end) each.

        Samples are removed from their packs. Rows that lose all samples are marked in ``dropped``. Row numbers do not change.
        """
        # Samples are numbered across the datasets, so a range may be in several of them.
        is_skipped = np.zeros(sum(map(_sample_count, self.views)), bool)
        for start, end in ranges:
            is_skipped[int(start) : int(end)] = True
        if not is_skipped.any():
            return self
        views: list[View] = []
        dropped = []
        first_sample = 0
        for view in self.views:
            end_sample = first_sample + _sample_count(view)
            skipped_samples = is_skipped[first_sample:end_sample]
            first_sample = end_sample
            # A row that is not a pack is one sample.
            dropped_rows = skipped_samples
            if isinstance(view, Packs):
                view = view.without(skipped_samples)
                # A pack is dropped only if it has lost all of its samples.
                dropped_rows = np.diff(view.packing.offsets) == 0
            views.append(view)
            dropped.append(dropped_rows)
        return replace(self, views=tuple(views), dropped=np.concatenate(dropped))


def _sample_count(view: View) -> int:
    return len(view.starts) if isinstance(view, Packs) else len(view)


def report(view: View, length: int) -> dict[str, Any]:
    """Return counts for display: rows, tokens, and the packing efficiency."""
    lengths = view.lengths
    facts: dict[str, Any] = {"rows": len(view), "tokens": int(lengths.sum())}
    if isinstance(view, Packs):
        # After a limit on the rows, the view has samples that are in no row.
        facts |= {"samples": len(view.packing.members), "packing efficiency": round(facts["tokens"] / (len(view) * length), 4)}
    return facts
