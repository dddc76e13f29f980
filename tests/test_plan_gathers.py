"""The weights that ZeRO-3 gathers by plan; tests/distributed/test_plan_measured.py compares them with runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zerobook.plan.gather_schedule import Visit, follow_gathers
from zerobook.plan.memory import peak_memory
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights, Weight
from zerobook.plan.trace import TimelinePoint, Trace, trace_step
from zerobook.plan.traffic import list_transfers

SIZES = {"embed": 60, "a": 30, "b": 40, "c": 50, "small": 3}
WEIGHTS = [Weight(name, (size,), 4, True) for name, size in SIZES.items()]
MODEL = ModelWeights(WEIGHTS, [WEIGHTS])


def zero3(**limits) -> ShardingSpec:
    """Return ZeRO-3 with limits in elements, under short names."""
    names = {
        "persistent": "persistence_threshold",
        "reuse": "max_reuse_elements",
        "prefetch_bucket": "prefetch_bucket_elements",
        "live": "max_live_elements",
        "reduce_bucket": "reduce_bucket_elements",
        "secondary": "secondary_ranks",
    }
    values = {"ranks": 2, "persistent": 10, "reuse": 0, "prefetch_bucket": 0, "live": 1000} | limits
    values = {names.get(name, name): value for name, value in values.items()}
    return ShardingSpec(kind="deepspeed", name="", ranks_per_node=2, stage=3, shard_ranks=values["ranks"], **values)


def run(*moments: str) -> list[Visit]:
    """``a`` is a module that runs to its end, ``-a`` its way back; ``(a`` begins, ``a)`` ends. Modules have the weight of their
    name; ``head`` shares that of ``embed``."""
    found = []
    for word in moments:
        back, name = word.startswith("-"), word.strip("-()")
        begins, ends = not word.endswith(")"), "(" not in word
        visit = Visit(name, ("embed" if name == "head" else name,), back)
        found += [visit] * begins + [visit._replace(end=True)] * ends
    return found


def counts(spread: ShardingSpec, *moments: str, accumulation: int = 1) -> tuple[dict[str, int], dict[str, int]]:
    found = follow_gathers(WEIGHTS, spread, run(*moments), accumulation)
    return Counter(w.name for w in found.forward), Counter(w.name for w in found.backward)


THERE = ("embed", "a", "small", "b", "c")
PLAIN = (*THERE, "-c", "-b", "-small", "-a", "-(embed")
ONCE = {"embed": 1, "a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    "limits, again",
    [
        ({"reuse": 10**9}, {}),
        ({"reuse": 0}, ONCE),
        ({"reuse": 1}, {"embed": 1, "a": 1, "b": 1}),  # c comes again at once
        ({"reuse": 100}, {"embed": 1, "a": 1, "b": 1}),  # between b and itself lie twice the 50 of c
        ({"reuse": 101}, {"embed": 1, "a": 1}),
        ({"reuse": 186}, {"embed": 1, "a": 1}),  # 2 x (3 + 40 + 50): small weights count
        ({"reuse": 187}, {"embed": 1}),
        # what was passed over while all was gathered ahead is kept, but for the module that comes at once: DeepSpeed's test
        # is for uses behind the next module
        ({"prefetch_bucket": 10**6}, {"c": 1}),
    ],
)
def test_what_comes_again_soon_is_kept(limits, again):
    for accumulation in (1, 3):
        assert counts(zero3(**limits), *PLAIN, accumulation=accumulation) == (ONCE, again)


@pytest.mark.parametrize(
    "limits, accumulation, twice",
    [
        ({"prefetch_bucket": 1}, 1, {"embed", "a", "c"}),  # one ahead of each module: b is passed over when c runs
        # in the first pass small weights, too, were still to be gathered: it got less far, and that was remembered
        ({"prefetch_bucket": 1}, 3, set(ONCE)),
        ({"prefetch_bucket": 10**6, "live": 90}, 1, set(ONCE)),  # there is no room to run ahead
        ({"prefetch_bucket": 10**6, "live": 100}, 1, {"embed", "a", "c"}),  # there is, once others are given up
    ],
)
def test_a_prefetch_ends_at_its_limits(limits, accumulation, twice):
    forward, again = counts(zero3(**limits), *PLAIN, accumulation=accumulation)
    assert {name for name in ONCE if forward[name] + again[name] == 2} == twice


@pytest.mark.parametrize(
    "limits, most",
    [
        ({}, 60),  # the embedding alone
        ({"reuse": 10**9}, 180),
        ({"reuse": 101}, 90),  # b and c
        ({"prefetch_bucket": 1}, 180),  # embed is gathered for the way back while c runs, and a and b are still there
        ({"prefetch_bucket": 10**6, "live": 100}, 130),  # embed, a and b: the last one may pass the limit
    ],
)
def test_the_most_that_is_gathered_at_once(limits, most):
    assert follow_gathers(WEIGHTS, zero3(**limits), run(*PLAIN)).peak_elements == most


@pytest.mark.parametrize(
    "ranks, offload, whole",
    [(2, "none", 180 + 20), (2, "cpu", 180 + 20), (1, "cpu", 180), (1, "none", 0)],  # alone a part is the whole
)
def test_gathered_weights_take_room(ranks, offload, whole):
    spread = zero3(reuse=10**9, prefetch_bucket=20, ranks=ranks, offload_param=offload, reduce_bucket=1000)
    micro = Trace(0, [TimelinePoint(0, 10**6), TimelinePoint(1, 0)], visits=run(*PLAIN))
    planned = peak_memory(MODEL, spread, micro, accumulation=1, gpus_per_node=ranks)
    assert planned.device.buffers == 4 * (1000 + whole)


def test_a_shared_weight_is_gathered_for_each_module():
    """The head gathers the embedding's weight again, and so does the embedding's way back, unless it is still there."""
    tied = (*THERE, "head", "-head", "-c", "-b", "-small", "-a", "-(embed")
    assert counts(zero3(), *tied) == (ONCE | {"embed": 2}, ONCE | {"embed": 2})
    assert counts(zero3(reuse=1), *tied) == (ONCE | {"embed": 2}, ONCE), "the head's comes again at once"
    # a weight of a module whose way back has no end stays until all is over: two embeddings need it once
    two = ("embed", "a", "head", "b", "-b", "-(head", "-a", "-(embed")
    assert counts(zero3(), *two)[1] == {"b": 1, "embed": 1, "a": 1}
    assert counts(zero3(), *two[:5], "-head", *two[6:])[1] == {"b": 1, "embed": 2, "a": 1}
    assert counts(zero3(), *two[:-1], "-embed", "-(embed")[1] == {"b": 1, "embed": 1, "a": 1}, "the head still has it"


def test_hpz_gathers_a_shared_weight_from_all_ranks_once():
    """The head's gathering, the second in a step, is from the second copy already."""
    hpz = zero3(ranks=4, secondary=2)
    tied = follow_gathers(WEIGHTS, hpz, run("embed", "a", "head", "-head", "-a", "-(embed"), 3)
    found = {transfer.content: transfer.size_bytes for transfer in list_transfers(MODEL, hpz, 3, tied)}
    assert found["weights, forward"] == 4 * (60 + 32), "a is padded to 32"
    assert found["weights, forward, second copy"] == 4 * (3 * (2 * 60 + 32) - (60 + 32))


def test_what_is_run_twice_is_gathered_for_it():
    """Checkpointing runs a layer again once its last module asks for what that saved, and stops at that module."""
    layer = ("-(b", "a", "(b", "-b)", "-a", "-(embed")
    assert counts(zero3(), "embed", "a", "b", *layer)[1] == {"b": 1, "a": 2, "embed": 1}
    assert counts(zero3(reuse=10**9), "embed", "a", "b", *layer)[1] == {}


@given(st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=12), st.data())
def test_limits_bound_what_is_follow_gathers(modules, data):
    """Once for each weight at the least, and once for each module that comes to it at the most."""
    limits = {key: data.draw(st.integers(0, 500), key) for key in ("reuse", "prefetch_bucket", "live")}
    moments = (*modules, *(f"-{name}" for name in reversed(modules)))
    forward, again = counts(zero3(**limits), *moments)
    visits = Counter(name for name in modules if name != "small")
    assert set(forward) | set(again) == set(visits)
    assert all(1 <= forward[name] + again[name] <= 2 * visits[name] for name in visits)
    forward, again = counts(zero3(reuse=10**9), *moments)
    assert forward == dict.fromkeys(visits, 1) and not again
    forward, again = counts(zero3(live=0, reuse=0, prefetch_bucket=limits["prefetch_bucket"]), *moments)
    assert forward == again == visits, "nothing is gathered ahead, and nothing kept"


def test_without_an_order_weights_are_taken_as_they_are_listed():
    assert follow_gathers(WEIGHTS, zero3(reuse=187)) == follow_gathers(WEIGHTS, zero3(reuse=187), run(*PLAIN))


class Tied(nn.Module):
    """Looks ids up and multiplies by the same weight; a layer in between, which may be run twice."""

    def __init__(self, checkpointing: bool):
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Embedding(8, 4),
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            nn.Linear(4, 8, False),
        )
        self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def forward(self, input_ids):
        made = self.embed(input_ids)
        if self.checkpointing:
            made = torch.utils.checkpoint.checkpoint(self.layer, made, use_reentrant=False)
        else:
            made = self.layer(made)
        return type("Output", (), {"logits": self.head(made)})()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trace_says_where_the_passes_are(checkpointing):
    ids = torch.zeros(2, 3, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    found = trace_step(Tied(checkpointing), batch, lambda model, batch: model(batch["input_ids"]).logits.sum(), "no")
    said = [f"{'-' * visit.backward}{visit.module or 'model'}{')' * visit.end}" for visit in found.visits]
    names = {visit.module: visit.weight_names for visit in found.visits}
    assert names["embed"] == names["head"] == ("embed.weight",) and names["layer.0"] == ("layer.0.weight", "layer.0.bias")
    layer = ["layer", "layer.0", "layer.0)", "layer.1", "layer.1)", "layer)"]
    assert said[:11] == ["model", "embed", "embed)", *layer, "head", "head)"]
    back = [word for word in said[11:] if word != "model)"]
    again = ["layer", "layer.0", "layer.0)", "layer.1"] if checkpointing else []  # and there it stops
    assert back == [
        "-head", "-head)", "-layer", "-layer.1", *again, "-layer.1)", "-layer.0", "-layer.0)", "-layer)", "-embed"
    ]  # fmt: skip
