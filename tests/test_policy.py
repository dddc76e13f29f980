"""The ladder: which measure follows which, and that it always ends."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobook.monitor.finding import Finding
from zerobook.monitor.policy import LEAD, RecoveryPolicy, compute_rate_share
from zerobook.utils.ranges import joined, ranges


def finding(onset, kind="damage", noticed=None):
    noticed = onset + 8 if noticed is None else noticed
    return Finding(kind=kind, step=noticed, onset=onset, points=noticed - onset + 1, base=2.0, peak=5.0, reason="it rose")


def ladder(on_spike="rollback", **options):
    return RecoveryPolicy(on_spike, **{"max_rollbacks": 8, "rate_factor": 0.5} | options)


def take(policy, *arguments, **options):
    """Decide on a measure, and take it."""
    action = policy.decide(*arguments, **options)
    policy.record(action)
    return action


GOOD = [10, 20, 30, 40]


def test_the_rungs_in_their_order():
    climbing = ladder()
    measures = [take(climbing, finding(45), GOOD) for _ in range(5)]
    assert [m.kind for m in measures] == ["replay", "skip", "lower_rate", "lower_rate", "stop"]
    assert [m.to_step for m in measures] == [40, 40, 30, 20, None]
    assert [m.steps for m in measures[:3]] == [None, (44, 53), (44, 53)], "the step before the first high loss is suspect too"
    assert [m.rate_factor for m in measures[:3]] == [None, None, 0.5]
    assert "all was tried" in measures[-1].rule and "damage since step 45: it rose" in measures[0].reason
    assert measures[0].options == ("replay", "skip", "lower_rate", "stop") and measures[2].options == ("lower_rate", "stop")


def test_a_policy_orders_the_actions():
    climbing = ladder(order=["skip", "further_back", "lower_rate"])
    measures = [take(climbing, finding(45), GOOD) for _ in range(5)]
    assert [m.kind for m in measures] == ["skip", "further_back", "lower_rate", "lower_rate", "stop"]
    assert [m.to_step for m in measures] == [40, 30, 20, 10, None]
    assert all(m.steps == (44, 53) for m in measures[:4])
    assert measures[0].options == ("skip", "further_back", "lower_rate")
    assert take(ladder(order=["stop"]), finding(45), GOOD).kind == "stop"
    # A fault of the hardware is not in the data, whatever the order says.
    assert take(ladder(order=["skip"]), finding(45), GOOD, hardware="replicas differ").kind == "replay"


def test_after_a_slow_rise_the_rate_is_lowered_and_no_sample_is_left_out():
    rise = replace(finding(25, "divergence", noticed=70), is_slow=True)
    climbing = ladder(total_steps=1000)
    measures = [take(climbing, rise, GOOD) for _ in range(3)]
    assert [(m.kind, m.to_step, m.steps) for m in measures] == [
        ("lower_rate", 20, None),
        ("lower_rate", 10, None),
        ("stop", None, None),
    ]
    assert measures[0].options == ("lower_rate", "stop")
    left_out = take(RecoveryPolicy("skip", max_rollbacks=3, rate_factor=0.5), rise, GOOD)
    assert (left_out.kind, left_out.steps) == ("none", None)


def test_a_short_run_is_not_replayed():
    """A replay of its steps costs more than the samples that a skip may leave out for nothing."""
    short, long = ladder(total_steps=129), ladder(total_steps=130)
    assert [take(short, finding(45), GOOD).kind for _ in range(3)] == ["skip", "lower_rate", "lower_rate"]
    measure = take(long, finding(45), GOOD)
    assert measure.kind == "replay" and measure.rule.endswith("13 steps abandoned, 77 left")
    assert take(ladder(total_steps=60), finding(45), GOOD, hardware="replicas differ").kind == "replay"
    assert take(ladder(total_steps=60, order=["replay"]), finding(45), GOOD).kind == "replay"


def test_nothing_is_left_where_nothing_can_be_done():
    """The log says which actions are left, and none of them is possible without a checkpoint."""
    assert ladder().decide(finding(45), []).options == ()
    assert ladder("log").decide(finding(45), GOOD).options == ()


def test_another_place_is_another_trouble():
    climbing = ladder()
    assert take(climbing, finding(45), GOOD).kind == "replay"
    assert take(climbing, finding(100), [*GOOD, 90]).kind == "replay"
    assert take(climbing, finding(102), [*GOOD, 90]).kind == "skip", "close to the last one: the same"
    assert take(climbing, finding(45), GOOD).kind == "replay"


def test_what_is_not_proven_is_second_choice_and_what_is_too_near_is_none():
    assert ladder().decide(finding(45), [10], [30, 44]).to_step == 10
    measure = ladder().decide(finding(45), [], [30, 44])
    assert measure.to_step == 30 and "not proven good yet" in measure.rule
    assert ladder().decide(finding(45), [], [43]).to_step == 43 and ladder().decide(finding(45), [], [44]).kind == "none"


@pytest.mark.parametrize("on_spike", ["rollback", "lower_rate"])
def test_with_nothing_to_go_back_to_only_what_cannot_recover_stops_the_run(on_spike):
    rising = finding(45, "divergence")

    measure = ladder(on_spike).decide(rising, [])

    assert measure.kind == "none" and "training goes on" in measure.rule
    assert ladder(on_spike).decide(replace(rising, finite=False), []).kind == "stop"
    assert ladder(on_spike).decide(rising, [], hardware="replicas differ").kind == "stop"


def test_hardware_that_is_known_is_not_blamed_on_the_data():
    climbing = ladder()
    measures = [take(climbing, finding(45), GOOD, hardware="replicas differ") for _ in range(3)]
    assert [m.kind for m in measures] == ["replay", "replay", "skip"] and "replicas differ" in measures[0].reason


def test_other_policies_and_limits():
    assert ladder("log").decide(finding(45), GOOD).kind == "none"
    assert ladder("stop").decide(finding(45), GOOD).kind == "stop"
    left_out = ladder("skip").decide(finding(45), GOOD)
    assert (left_out.kind, left_out.steps, left_out.goes_back) == ("leave_out", (44, 53), False)
    limited = ladder(max_rollbacks=1)
    assert take(limited, finding(45), GOOD).kind == "replay" and "max_rollbacks is 1" in take(limited, finding(45), GOOD).rule


def test_lowering_the_rate_is_a_policy_of_its_own():
    lowering = ladder("lower_rate", max_rollbacks=3)
    measures = [take(lowering, finding(45), GOOD) for _ in range(4)]
    assert [m.kind for m in measures] == ["lower_rate"] * 3 + ["stop"]
    assert [m.to_step for m in measures] == [40, 30, 20, None], "one checkpoint further each time"
    assert [m.rate_factor for m in measures] == [0.5, 0.5, 0.5, None] and all(m.steps is None for m in measures)
    assert measures[0].options == ("lower_rate", "stop") and "max_rollbacks is 3" in measures[3].rule
    broken = ladder("lower_rate")
    assert take(broken, finding(45), GOOD, hardware="replicas differ").kind == "replay", "the rate is not to blame"


onsets = st.lists(st.tuples(st.integers(3, 500), st.integers(0, 30), st.sampled_from(["damage", "divergence"])), max_size=40)


@given(onsets, st.lists(st.integers(0, 500), max_size=12), st.integers(0, 6), st.integers(0, 39))
@settings(max_examples=200)
def test_it_ends_goes_back_far_enough_and_outlives_a_stop(found, good, limit, cut):
    whole, first = ladder(max_rollbacks=limit), ladder(max_rollbacks=limit)
    second = None
    backs = 0
    for number, (onset, length, kind) in enumerate(found):
        if number == cut:
            second = ladder(max_rollbacks=limit, state=json.loads(json.dumps(first.state())))
        measure = take(whole, finding(onset, kind, onset + length), sorted(good))
        assert take(second or first, finding(onset, kind, onset + length), sorted(good)) == measure
        backs += measure.goes_back
        if measure.goes_back:
            assert measure.to_step in good and measure.to_step <= onset - LEAD
            assert (measure.kind == "replay") == (measure.steps is None)
        if measure.steps:
            assert (
                measure.steps[0] <= onset - LEAD + 1
                and measure.steps[1] >= onset + length
                and measure.to_step < measure.steps[0]
            )
        if measure.kind == "stop" and measure.goes_back:
            raise AssertionError("a stop goes nowhere")
    assert backs <= limit


numbers = st.lists(st.integers(0, 60), max_size=30)


@given(numbers, numbers)
def test_ranges_hold_what_they_were_made_of(first, second):
    def members(found):
        return [n for a, b in found for n in range(a, b)]

    assert members(ranges(first)) == sorted(set(first))
    union = joined(ranges(first), ranges(second))
    assert members(union) == sorted({*first, *second})
    assert all(a[1] < b[0] for a, b in pairwise(union)), "neither empty nor touching"


def test_the_rate_comes_back_slowly():
    cuts = [[100, 0.5, 200]]
    assert [compute_rate_share(cuts, step) for step in (99, 100, 200, 300, 400)] == [1, 0.5, 0.75, 1, 1]
    assert compute_rate_share([*cuts, [100, 0.5, 200]], 100) == 0.25
