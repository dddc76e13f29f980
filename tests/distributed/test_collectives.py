"""How ranks talk: how long they wait for each other, how often they reduce, and in which precision."""

from __future__ import annotations

import pytest

from tests.harness import calls, timeouts
from zerobook.launch import COLLECTIVE_TIMEOUT


@pytest.fixture
def watched(launches):
    def run(strategy, processes, **flags):
        return launches(strategy, processes, 1, 2, max_train_steps=3, num_warmup_steps=0, spy={}, **flags)

    return run


@pytest.mark.launch
@pytest.mark.parametrize("strategy, processes, groups", [("zero2", 2, 2), ("zero3_hpz", 4, 3), ("fsdp_hybrid", 4, 3)])
def test_every_group_waits_as_long_as_the_default_one(watched, strategy, processes, groups):
    run = watched(strategy, processes)
    for rank in range(processes):
        found = timeouts(run.output, rank)
        assert len(found) >= groups, "the strategy makes groups of its own"
        assert set(found) == {COLLECTIVE_TIMEOUT.total_seconds()}
