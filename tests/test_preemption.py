"""However far apart the hosts are when a signal comes, all ranks stop behind the same step, and none waits for ever."""

from __future__ import annotations

import random
import signal
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobook.monitor import preemption
from zerobook.monitor.preemption import Preemption


class Store(dict):
    """Imitates the part of torch's store that is used."""

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key].encode()

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def ranks(monkeypatch):
    """Makes the processes of a run that talk through one store, without their signal handlers."""
    monkeypatch.setattr(preemption.signal, "signal", lambda *args: None)

    def make(count):
        store = Store()
        monkeypatch.setattr(preemption.dist.distributed_c10d, "_get_default_store", lambda: store)
        return [Preemption(SimpleNamespace(world_size=count, rank=rank), settle=lambda: None) for rank in range(count)]

    return make


def simulate(processes, *, seed, log_every, warned, start):
    """Hosts in any order: each may run ahead of the others, but at log points, and at all once it has said where it is.

    Returns:
        the step behind which each rank stopped.
    """
    chance, count = random.Random(seed), len(processes)
    launched, asked, stopped = [0] * count, [0] * count, {}
    while len(stopped) < count:
        able = []
        for rank, process in enumerate(processes):
            if rank in stopped:
                continue
            if launched[rank] == asked[rank]:
                able.append(rank)  # the next step can always be launched
            elif not (process._has_written_step or launched[rank] % log_every == 0) or min(launched) >= launched[rank]:
                able.append(rank)  # waits for the device, which waits for all ranks' parts of this step
        assert able, f"all wait for each other at {launched}"
        rank = chance.choice(able)
        if launched[rank] == asked[rank]:
            launched[rank] += 1
            assert launched[rank] < start + 200, "it never stops"
            continue
        if rank in warned and launched[rank] >= start:
            processes[rank]._receive(signal.SIGUSR1, None)
        asked[rank] = launched[rank]
        if processes[rank].due(launched[rank]):
            stopped[rank] = launched[rank]
    return stopped


@given(st.integers(2, 5), st.integers(0, 10**6), st.integers(1, 30), st.sets(st.integers(0, 1), min_size=1), st.integers(1, 40))
@settings(max_examples=300)
def test_all_ranks_stop_behind_the_same_step(count, seed, log_every, warned, start):
    with pytest.MonkeyPatch.context() as patch:
        stopped = simulate(ranks.__wrapped__(patch)(count), seed=seed, log_every=log_every, warned=warned, start=start)
    assert len(set(stopped.values())) == 1
    assert start <= stopped[0] <= start + log_every + 4, "soon: no further than hosts can be apart, and two steps"


@pytest.mark.parametrize("first, second, ends", [
    (signal.SIGINT, signal.SIGINT, True), (signal.SIGINT, signal.SIGTERM, True), (signal.SIGTERM, signal.SIGTERM, False),
    (signal.SIGINT, signal.SIGUSR1, False), (signal.SIGTERM, signal.SIGINT, False),
])  # fmt: skip
def test_a_second_ctrl_c_ends_the_process_at_once(ranks, monkeypatch, first, second, ends):
    """torchrun sends SIGTERM to its ranks for a second Ctrl-C."""
    codes = []
    monkeypatch.setattr(preemption.os, "_exit", codes.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    (rank,) = ranks(1)
    rank._receive(first, None)
    assert not codes
    rank._receive(second, None)
    assert codes == ([130] if ends else [])


def test_without_a_signal_nothing_happens_and_one_process_stops_at_once(ranks):
    processes = ranks(3)
    assert not any(process.due(step) for step in range(1, 50) for process in processes)
    (alone,) = ranks(1)
    assert not alone.due(1)
    alone._receive(signal.SIGTERM, None)
    assert alone.due(2) and alone.received == "SIGTERM"
