"""The order of samples is a permutation, seekable, and the same however a batch is cut."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import ROOT
from zerobook.constants import FILLER, IGNORE
from zerobook.data.batch_loader import BatchLayout, BatchLoader
from zerobook.data.collate import CausalCollator
from zerobook.data.sampler import Mixture, Permutation, SampleOrder


class Rows(list):
    """Rows with one supervised token each."""

    filler = 0

    def loss_weights_of(self, ids):
        return np.ones(len(ids), np.int64)

    def lengths_of(self, ids):
        return np.array([len(self[row]["input_ids"]) for row in ids])


@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(0, 100))
def test_permutation_takes_every_element_once(size, seed, epoch):
    values = Permutation(size, seed=seed, epoch=epoch)(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))


def test_permutation_mixes_and_depends_on_seed_and_epoch():
    positions = np.arange(10_000)
    orders = [Permutation(10_000, seed=s, epoch=e)(positions) for s, e in ((1, 0), (1, 1), (2, 0))]
    for order in orders:
        # a shuffled order correlates with the sorted one by about 1/sqrt(n)
        assert abs(np.corrcoef(positions, order)[0, 1]) < 0.05
        assert (np.abs(np.diff(order)) == 1).mean() < 0.01
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (orders[a] == orders[b]).mean() < 0.01


def test_permutation_is_pinned_down():
    """A change of these numbers changes the sample order of every run that is resumed after an update."""
    assert Permutation(1000, seed=42, epoch=0)(np.arange(5)).tolist() == PINNED
    assert len(set(PINNED)) == 5


PINNED = [775, 74, 153, 438, 513]


def test_seek_far_reads_one_element():
    order = Permutation(2_000_000_000, seed=3, epoch=1)
    assert 0 <= order(np.array([10**9]))[0] < 2_000_000_000


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(0, 5), st.sets(st.integers(0, 59)), st.booleans(), st.booleans(), st.data())
def test_take_resumes_anywhere_and_never_gives_a_dropped_row(size, seed, drop, weighted, grouped, data):
    dropped = np.isin(np.arange(size), list(drop))
    sizes = [size] if size < 2 else [size // 2, size - size // 2]
    options = dict(seed=seed, dropped=dropped, weights=[1.0, 3.0][: len(sizes)] if weighted else None,
                   lengths=np.arange(size) % 7 if grouped else None)  # fmt: skip
    end = size * 3
    whole, cursor = SampleOrder(sizes, **options).take(0, 10**6, end)
    assert cursor == end
    assert not dropped[whole].any()
    assert SampleOrder(sizes, **options).remaining(0, end) == len(whole)
    cursor, pieces = 0, []
    while cursor < end:
        ids, cursor = SampleOrder(sizes, **options).take(cursor, data.draw(st.integers(1, 9)), end)
        pieces += ids.tolist()
    assert pieces == whole.tolist()
    if not weighted or len(sizes) == 1:
        for epoch in range(3):
            ids = SampleOrder(sizes, **options).ids(epoch * size, (epoch + 1) * size)
            assert sorted(ids.tolist()) == list(range(size))


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(50, 500), st.floats(0.01, 100)), min_size=2, max_size=5), st.integers(0, 10**6))
def test_a_mixture_keeps_its_weights_everywhere_and_passes_through_each_dataset(parts, start):
    sizes, weights = zip(*parts, strict=True)
    order = SampleOrder(sizes, seed=3, weights=weights)
    count = 3000
    ids = order.ids(start, start + count)
    owner = np.searchsorted(np.cumsum(sizes), ids, side="right")
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        # spread evenly: any stretch holds its share, give or take one and what a share is rounded by
        assert abs((owner == index).sum() - share * count) <= 2 + count * len(sizes) / Mixture.PERIOD
    first = SampleOrder(sizes, seed=3, weights=weights).ids(0, 5000)
    owner = np.searchsorted(np.cumsum(sizes), first, side="right")
    for index, size in enumerate(sizes):
        own = first[owner == index] - sum(sizes[:index])
        for done in range(len(own) // size):
            assert sorted(own[done * size : (done + 1) * size].tolist()) == list(range(size))


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), seed=st.integers(0, 3), weighted=st.booleans(),
    grouped=st.booleans(), ahead=st.integers(1, 50),
    asked=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)), min_size=1, max_size=12),
)  # fmt: skip
def test_rows_that_are_computed_ahead_are_those_of_their_positions(sizes, seed, weighted, grouped, ahead, asked):
    total = sum(sizes)
    weights = list(range(1, len(sizes) + 1)) if weighted else None
    lengths = np.random.default_rng(seed).integers(1, 9, total) if grouped else None
    order = SampleOrder(sizes, seed=seed, weights=weights, lengths=lengths)
    order.AHEAD = ahead
    fresh = SampleOrder(sizes, seed=seed, weights=weights, lengths=lengths)
    for cursor, count in asked:  # forward, back, and over the ends of epochs
        ids, after = order.take(cursor, count, cursor + count)
        assert ids.tolist() == fresh.ids(cursor, cursor + count).tolist() and after == cursor + count


def test_rows_of_like_length_come_together_and_not_in_order_of_length():
    lengths = np.random.default_rng(0).lognormal(4, 1, 10_000).astype(int)
    plain, grouped = (SampleOrder([10_000], seed=1, lengths=given) for given in (None, lengths))

    def padding(order):
        batches = lengths[order.ids(0, 9984)].reshape(-1, 16)
        return 1 - batches.sum() / (batches.max(axis=1).sum() * 16)

    assert padding(grouped) < 0.1 < 0.5 < padding(plain)
    means = lengths[grouped.ids(0, 9984)].reshape(-1, 32).mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


@settings(max_examples=25)
@given(
    st.integers(1, 40),
    st.sampled_from([(1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)]),
    st.integers(0, 30),
)
def test_every_cut_gives_the_same_rows_in_the_same_order(size, split, start):
    part = Rows([{"input_ids": [i, i], "labels": [IGNORE, i]} for i in range(size)])
    world, micro, accumulation = split
    end = 2 * size
    start = min(start, end)
    per_rank = []
    for rank in range(world):
        layout = BatchLayout(world_size=world, rank=rank, micro=micro, accumulation=accumulation)
        feed = BatchLoader(part, SampleOrder([size], seed=1), layout, CausalCollator(0), cursor=start, end=end)
        expected_steps = feed.steps()
        steps = [(plan, [b["labels"][:, 1].tolist() for b in batches]) for plan, batches in feed]
        assert len(steps) == expected_steps
        per_rank.append(steps)
    seen = []
    for step in zip(*per_rank, strict=True):
        plans = [plan for plan, _ in step]
        assert all((plan.ids == plans[0].ids).all() and plan.cursor == plans[0].cursor for plan in plans)
        for index in range(accumulation):
            for rank in range(world):
                seen += [label for label in step[rank][1][index] if label != IGNORE]
        assert plans[0].tokens == plans[0].samples == int((plans[0].ids != FILLER).sum())
    assert seen == SampleOrder([size], seed=1).ids(start, end).tolist()


def test_workers_do_not_change_the_plan():
    part = Rows([{"input_ids": [i, i], "labels": [i, i]} for i in range(30)])
    layout = BatchLayout(world_size=1, rank=0, micro=2, accumulation=2)
    found = []
    for workers in (0, 2):
        feed = BatchLoader(part, SampleOrder([30], seed=0), layout, CausalCollator(0), end=45, workers=workers)
        found.append([(p.cursor, p.ids.tolist(), [b["input_ids"].tolist() for b in bs]) for p, bs in feed])
    assert found[0] == found[1] and len(found[0]) == 12


WARNED = """
import os, signal
from tests.test_batch_loader import *
part = Rows([{"input_ids": [i, i], "labels": [i, i]} for i in range(200)])
feed = BatchLoader(part, SampleOrder([200], seed=0), BatchLayout(world_size=1, rank=0, micro=2), CausalCollator(0), end=200,
                   workers=1)
warnings = []
signal.signal(signal.SIGTERM, lambda *_: warnings.append("SIGTERM"))
steps = 0
for plan, batches in feed:
    steps += len(list(batches))
    if steps == 1:
        os.killpg(os.getpgrp(), signal.SIGTERM)
print(warnings, steps)
"""


def test_a_worker_outlives_the_warning_that_torchrun_sends_to_the_group_of_its_rank():
    done = subprocess.run(
        [sys.executable, "-c", WARNED], capture_output=True, text=True, timeout=120, start_new_session=True, cwd=ROOT
    )
    assert done.stdout.split("\n")[0] == "['SIGTERM'] 100", done.stderr[-2000:]


@pytest.mark.parametrize("multiple", [1, 8])
def test_collator_masks_what_it_pads(multiple):
    batch = CausalCollator(9, multiple)([{"input_ids": [1, 9, 3], "labels": [IGNORE, 9, 3]}, {"input_ids": [4], "labels": [4]}])
    length = 3 if multiple == 1 else 8
    assert batch["input_ids"].shape == batch["labels"].shape == (2, length)
    assert batch["attention_mask"].sum().item() == 4
    # a pad id that is also a real token stays supervised where it is real
    assert batch["labels"][0, 1] == 9 and (batch["labels"][batch["attention_mask"] == 0] == IGNORE).all()


def test_padding_of_a_feed_with_no_rows_left():
    layout = BatchLayout(world_size=1, rank=0, micro=2)
    rows = Rows([{"input_ids": [1] * n} for n in (2, 4, 4, 4)])
    shares = [
        BatchLoader(rows, SampleOrder([4], seed=0, shuffle=False), layout, list, cursor=cursor, end=end).padding()
        for cursor, end in ((0, 4), (4, 4), (6, 4))
    ]
    assert shares == [1 - 14 / 16, 0.0, 0.0]


@pytest.mark.parametrize("epochs, rows", [(0.07, 7), (1.1, 110), (0.071, 8), (2.0, 200)])
def test_a_part_of_an_epoch_is_as_many_rows_as_is_written(epochs, rows):
    from zerobook.checkpoint.progress import Progress
    from zerobook.config import RecipeConfig
    from zerobook.data.views import PreparedRows
    from zerobook.training.state import RunState

    class Part100(PreparedRows):
        sizes = (100,)
        lengths = supervised = np.ones(100, np.int64)

    data = SimpleNamespace(train=Part100((), ""), weights=None)
    layout = BatchLayout(world_size=1, rank=0, micro=1)
    state = RunState(RecipeConfig(num_train_epochs=epochs), data, layout, Progress(seed=1), list)
    assert (state.loader.end, state.end_step) == (rows, rows)


@pytest.mark.parametrize("name", ["bart", "blenderbot", "mbart", "marian", "pegasus", "t5"])
def test_a_row_that_fills_up_a_batch_has_a_decoder_input(tiny, name):
    """The rule of mBART begins a row with its last token, and a filler has none."""
    from transformers import AutoModelForSeq2SeqLM

    from zerobook.data.collate import DecoderInput

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny / name)
    labels = torch.tensor([[5, 6, 7], [IGNORE, IGNORE, IGNORE]])

    made = DecoderInput(model)(labels)

    assert made[0, 1:].tolist() == [5, 6]
    assert ((made >= 0) & (made < model.config.vocab_size)).all()
    assert labels[1].eq(IGNORE).all(), "the labels themselves are left as they are"
