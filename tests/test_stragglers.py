"""Slow ranks are found from heartbeats, named once, and only where they cost something."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobook.health import position
from zerobook.health.judge import Beat
from zerobook.health.position import Window
from zerobook.health.stragglers import Slow, Stragglers, describe
from zerobook.utils import messages


def beats(step: int, data: list[float], forward: list[float], per_host: int = 1):
    """Heartbeats of ranks with these seconds a step, after 10 steps of 1 second."""
    return {
        rank: Beat(step, f"host{rank // per_host}", 1, "reduce", step, 1, 0.0, 30.0, "",
                   Window(step, 10, 10.0, 10 * data[rank], 10 * forward[rank]))
        for rank in range(len(data))
    }  # fmt: skip


def test_the_host_that_waits_for_its_data_is_named_once_and_again_after_it_recovered():
    found = Stragglers()
    fine, slow = [0.01] * 4, [0.01, 0.01, 0.4, 0.01]
    assert found.update(beats(10, fine, [0.3] * 4, per_host=2)) == []
    assert found.update(beats(20, slow, [0.3] * 4, per_host=2)) == [Slow("data", "host1", [2], 20, 0.4, 0.01)]
    assert found.update(beats(20, slow, [0.3] * 4, per_host=2)) == [], "the same log point"
    assert found.update(beats(30, slow, [0.3] * 4, per_host=2)) == []
    assert found.update(beats(40, fine, [0.3] * 4, per_host=2)) == []
    assert len(found.update(beats(50, slow, [0.3] * 4, per_host=2))) == 1


def test_forward_passes_that_wait_for_each_other_are_not_compared():
    """Under ZeRO-3, the ranks that have their data wait in the first gather for the host that has not."""
    late = beats(10, [0.01, 1.5], [2.1, 0.6])
    coupled = {rank: beat._replace(window=beat.window._replace(forward=None)) for rank, beat in late.items()}

    assert [(slow.what, slow.host) for slow in Stragglers().update(coupled)] == [("data", "host1")]


def test_one_of_two_ranks_is_found():
    assert [s.host for s in Stragglers().update(beats(10, [0.0, 0.0], [0.2, 0.7]))] == ["host1"]


def test_a_rank_is_judged_by_several_steps():
    """With a log point in every step, one long step is no straggler, and five are."""

    def see(found, step, forward):
        given = beats(step, [0.0] * 2, [0.0] * 2)
        for rank, seconds in enumerate(forward):
            given[rank] = given[rank]._replace(window=Window(step, 1, 1.0, 0.0, seconds))
        return found.update(given)

    once, always = Stragglers(), Stragglers()
    assert not any(see(once, step, (0.2, 0.7 if step == 3 else 0.2)) for step in range(1, 11))
    assert [len(see(always, step, (0.2, 0.7))) for step in range(1, 6)] == [0, 0, 0, 0, 1]


def test_what_costs_little_is_not_mentioned():
    assert Stragglers().update(beats(10, [0.0001, 0.05], [0.3, 0.31])) == []
    few = beats(10, [0.0] * 2, [0.0] * 2)
    for rank, forward in enumerate((0.002, 0.008)):  # in steps of 10 ms
        few[rank] = few[rank]._replace(window=Window(10, 10, 0.1, 0.0, 10 * forward))
    assert Stragglers().update(few) == []


def test_ranks_at_different_log_points_are_not_compared():
    mixed = beats(10, [0.0, 0.0], [0.2, 0.2])
    mixed[1] = mixed[1]._replace(window=Window(20, 10, 10.0, 9.0, 0.1))
    assert Stragglers().update(mixed) == []
    mixed[1] = mixed[1]._replace(window=None)
    assert Stragglers().update(mixed) == []


@given(st.lists(st.floats(0.2, 0.39), min_size=1, max_size=40))
def test_ordinary_differences_are_no_stragglers(forward):
    assert Stragglers().update(beats(10, [0.001] * len(forward), forward)) == []


@pytest.mark.parametrize("slow, said", [
    (Slow("data", "b", [2, 3], 9, 0.4, 0.01),
     "slow host: waiting for data on b (ranks 2, 3): 0.40 s a step; on a typical rank: 0.01 s"),
])  # fmt: skip
def test_findings_as_text(slow, said):
    assert describe(slow) == said


def test_a_window_holds_the_seconds_of_each_phase():
    position.reset()
    for step in (1, 2, 3):
        # The first step compiles, for longer on one host than on another.
        if step == 2:
            position.log_point(1)
            assert position.window() is None
        position.enter("data", step)
        time.sleep(0.05)
        position.enter("forward")
        time.sleep(0.02)
        position.enter("backward")
        time.sleep(0.03)
    position.enter("reduce")
    position.log_point(3)
    found = position.window()
    assert (found.step, found.steps) == (3, 2)
    assert 0.1 <= found.data < 0.2 and 0.04 <= found.forward < 0.1 and found.total > 0.2 - 0.001
    assert messages.read(json.dumps(Beat(1, "a", 1, "data", 1, 1, 0.0, 1.0, "", found)), Beat).window == found
    position.reset()
    assert position.window() is None
