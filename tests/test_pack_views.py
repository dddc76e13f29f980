"""Packing is as good as it is said to be, and every view gives the rows it counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobook.constants import IGNORE
from zerobook.data.pack import best_fit_decreasing
from zerobook.data.store import Ragged, TokenStore, TokenWriter
from zerobook.data.views import Blocks, Documents, PreparedRows, pack
from zerobook.objective import NextToken, TargetTokens

OBJECTIVE = NextToken()


def one_by_one(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook: longest first, into the fullest row that has room."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        max(fitting, key=sum).append(length) if fitting else rows.append([length])
    return rows


@given(st.integers(1, 60).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=120))))
def test_packing_is_best_fit_decreasing(case):
    capacity, lengths = case
    packing = best_fit_decreasing(np.array(lengths, int), capacity)
    rows = [packing.members[a:b] for a, b in zip(packing.offsets, packing.offsets[1:], strict=False)]
    assert sorted(packing.members.tolist()) == list(range(len(lengths)))
    filled = sorted(sum(lengths[i] for i in row) for row in rows)
    assert filled == sorted(map(sum, one_by_one(lengths, capacity)))
    assert all(0 < f <= capacity for f in filled)


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="from 0 to 9 do not fit into rows of 1 to 8"):
        best_fit_decreasing(np.array([0, 9]), 8)


def test_a_long_tail_fills_its_rows():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 50_000).astype(int), 1, 4096)
    packing = best_fit_decreasing(lengths, 4096)
    assert lengths.sum() / (len(packing) * 4096) > 0.995


def make(tmp_path, documents, objective=OBJECTIVE):
    writer = TokenWriter(tmp_path / "store")
    ids, labels = (Ragged.join([d[which] for d in documents]) for which in (0, 1))
    weights = np.array([objective.weight({"input_ids": d[0], "labels": d[1]}) for d in documents])
    begins = np.ones(len(documents), bool)
    writer.append(ids, None if all(a is b for a, b in documents) else labels, weights, begins=begins, extra={})
    writer.close({"format": "messages"})
    return TokenStore(tmp_path / "store")


def chats(rng, count, longest=20):
    """Documents whose first half is not supervised."""
    found = []
    for _ in range(count):
        ids = rng.integers(3, 90, rng.integers(2, longest)).astype(np.int32)
        labels = ids.copy()
        labels[: len(ids) // 2] = IGNORE
        found.append((ids, labels))
    return found


def counted(row):
    return int((row["labels"][1:] != IGNORE).sum())


def test_documents_come_back_as_written(tmp_path):
    written = chats(np.random.default_rng(0), 30)
    view = Documents(make(tmp_path, written), np.arange(30)[::-1])
    for row, (ids, labels) in zip(view, written[::-1], strict=True):
        assert row["input_ids"].tolist() == ids.tolist() and row["labels"].tolist() == labels.tolist()
    assert view.loss_weights.tolist() == [counted(row) for row in view]
    assert view.lengths.tolist() == [len(row["input_ids"]) for row in view]


def test_labels_of_another_length_are_kept_apart(tmp_path):
    written = [(np.arange(5), np.array([1, IGNORE])), (np.arange(2), np.array([7, 8, 9]))]
    view = Documents(make(tmp_path, written, TargetTokens()), np.arange(2))
    assert [row["labels"].tolist() for row in view] == [[1, IGNORE], [7, 8, 9]]
    assert view.loss_weights.tolist() == [1, 3]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 9), st.data())
def test_blocks_are_the_joined_text_cut(tmp_path_factory, lengths, length, data):
    ids = [np.full(n, 10 + i, np.int32) for i, n in enumerate(lengths)]
    store = make(tmp_path_factory.mktemp("blocks"), [(d, d) for d in ids])
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), min_size=1))))
    view = Blocks(store, store.offsets[chosen], store.offsets[chosen + 1], length, length - 1)
    joined = np.concatenate([ids[i] for i in chosen])
    whole = len(joined) // length * length
    assert len(view) * length == whole
    assert [i for row in view for i in row["input_ids"].tolist()] == joined[:whole].tolist()
    assert view.loss_weights.tolist() == [counted(row) for row in view]


def test_packs_hold_every_sample_once_and_isolate_it(tmp_path):
    written = chats(np.random.default_rng(1), 200)
    view = pack(make(tmp_path, written), np.arange(200), 32, OBJECTIVE.weight)
    found = []
    for row in view:
        assert len(row["input_ids"]) <= 32
        starts = np.flatnonzero(row["position_ids"] == 0)
        assert (row["labels"][starts] == IGNORE).all()
        for ids, labels in zip(np.split(row["input_ids"], starts[1:]), np.split(row["labels"], starts[1:]), strict=True):
            found.append((ids.tolist(), labels[1:].tolist()))
    assert sorted(found) == sorted((ids.tolist(), labels[1:].tolist()) for ids, labels in written)
    assert view.loss_weights.tolist() == [counted(row) for row in view]
    assert view.lengths.tolist() == [len(row["input_ids"]) for row in view]
    assert view.lengths.sum() / (len(view) * 32) > 0.98


def test_a_long_text_is_cut_into_samples_of_a_row(tmp_path):
    ids = np.arange(100, dtype=np.int32) + 5
    view = pack(make(tmp_path, [(ids, ids)]), np.arange(1), 33, OBJECTIVE.weight)
    assert sorted(i for row in view for i in row["input_ids"].tolist()) == ids[:99].tolist()  # one token alone predicts nothing
    assert view.loss_weights.sum() == 96


def test_skipped_samples_leave_their_packs_and_counts(tmp_path):
    written = chats(np.random.default_rng(2), 60)
    store = make(tmp_path, written)
    part = PreparedRows((pack(store, np.arange(40), 32, OBJECTIVE.weight), Documents(store, np.arange(40, 60))), "x")
    packs = len(part.views[0])
    gone = part.samples_of(0) + part.samples_of(3)[:1] + part.samples_of(packs + 2)
    assert gone[-1] == 42, "samples are numbered through over the datasets"
    kept = part.without_samples([[s, s + 1] for s in gone])
    assert np.flatnonzero(kept.dropped).tolist() == [0, packs + 2]
    assert len(kept) == len(part)
    assert kept.samples_of(3) == part.samples_of(3)[1:]
    assert kept.loss_weights[3] == counted(kept[3]) < part.loss_weights[3]
    for row in range(len(part)):
        if row not in (0, 3, packs + 2):
            assert kept[row]["input_ids"].tolist() == part[row]["input_ids"].tolist()
    assert part.without_samples([]) is part


def test_rows_are_numbered_through_the_datasets(tmp_path):
    written = chats(np.random.default_rng(3), 10)
    store = make(tmp_path, written)
    part = PreparedRows((Documents(store, np.arange(4)), Documents(store, np.arange(4, 10))), "x")
    assert part.sizes == [4, 6]
    assert [row["input_ids"].tolist() for row in (part[i] for i in range(10))] == [ids.tolist() for ids, _ in written]
    with pytest.raises(IndexError):
        part[10]
