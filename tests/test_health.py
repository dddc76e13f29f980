"""Heartbeats, the judgement about them, and the meeting of ranks after a restart."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import function_calls
from zerobook.errors import LaunchError
from zerobook.health import clock, position
from zerobook.health.exchange import Exchange
from zerobook.health.judge import GPU_SILENT, NO_BEAT, Beat, Judge, Verdict, describe
from zerobook.health.position import Window
from zerobook.health.presence import Presence, listen
from zerobook.health.watch import EXIT_CODE, Watch, is_connection_error
from zerobook.launch.meet import meet
from zerobook.utils import messages
from zerobook.utils.messages import SignedStore

ROOT = Path(__file__).resolve().parents[1]
LIMIT, INTERVAL, GRACE = 30.0, 1.0, 10.0
PHASES = [("data", 2.0), ("forward", 1.0), ("backward", 1.0), ("optimizer", 2.0)]
"""Phases of a step, each with its limit in units of `LIMIT`. No rank leaves ``backward`` before all are in it."""


@dataclass
class Rank:
    """A simulated rank. It stays in each phase for a while, and in ``backward`` until all ranks have come."""

    host: str
    pace: list[float]
    place: int = 0
    since: float = 0.0
    beats: int = 0
    dead_at: float = float("inf")
    stuck_at: float = float("inf")
    failed_at: float = float("inf")
    seen: Beat | None = field(default=None)

    def advance(self, now: float, slowest: int) -> None:
        while now < min(self.dead_at, self.failed_at):
            phase = PHASES[self.place % 4][0]
            ends = self.since + self.pace[self.place % len(self.pace)]
            waits = phase == "backward" and slowest < self.place
            if ends > now or waits or self.since >= self.stuck_at:
                break
            self.place, self.since = self.place + 1, ends if phase != "backward" else now
        if now < self.dead_at and (now <= self.failed_at or self.seen is None or self.seen.phase != "failed"):
            self.beats += 1
            phase, factor = PHASES[self.place % 4]
            if now >= self.failed_at:
                phase = "failed"
            self.seen = Beat(self.beats, self.host, 1, phase, self.place // 4 + 1, self.place, now - self.since, factor * LIMIT,
                             "ValueError: no" if phase == "failed" else "")  # fmt: skip


def simulate(ranks: list[Rank], until: float) -> tuple[float, Verdict] | None:
    """Return (time, verdict) of the first verdict; None where there is none."""
    judge, now = Judge(len(ranks), LIMIT, GRACE, 0.0), 0.0
    while now < until:
        now += INTERVAL
        for rank in ranks:
            rank.advance(now, min(other.place for other in ranks))
        verdict = judge.update(now, {number: rank.seen for number, rank in enumerate(ranks) if rank.seen})
        if verdict:
            return now, verdict
    return None


paces = st.lists(st.floats(0.1, 25.0), min_size=1, max_size=7)
clusters = st.lists(paces, min_size=2, max_size=6).map(
    lambda all_paces: [Rank(f"host{number // 2}", pace) for number, pace in enumerate(all_paces)]
)


@settings(max_examples=60, deadline=None)
@given(clusters)
def test_a_run_that_gets_on_is_left_alone(ranks):
    """Ranks of very different pace wait for each other for long, and each phase of each rank stays within its limit."""
    assert simulate(ranks, 400.0) is None
    assert min(rank.place for rank in ranks) > 4


@settings(max_examples=100, deadline=None)
@given(clusters, st.data())
def test_the_rank_that_stops_is_named_in_time(ranks, data):
    culprit = data.draw(st.integers(0, len(ranks) - 1))
    fault, at = data.draw(st.sampled_from(["dead_at", "stuck_at", "failed_at"])), data.draw(st.floats(5.0, 100.0))
    setattr(ranks[culprit], fault, at)
    when, verdict = simulate(ranks, 400.0)
    expected = {"dead_at": "silent", "stuck_at": "stuck", "failed_at": "failed"}[fault]
    assert verdict.ranks == [culprit] and verdict.hosts == [f"host{culprit // 2}"]
    assert verdict.kind == expected and str(culprit) in describe(verdict)
    patience = {"silent": LIMIT, "stuck": 2 * LIMIT, "failed": GRACE}[expected]
    a_step = 4 * max(max(rank.pace) for rank in ranks)  # it may wait so long for the others before it stops
    assert at <= when <= at + patience + 3 * INTERVAL + a_step
    assert sorted(rank for _, _, found in verdict.others for first, last in found for rank in range(first, last + 1)) == [
        rank for rank in range(len(ranks)) if rank != culprit
    ]


def test_ranks_that_all_wait_in_one_collective_are_said_to_hang_together():
    ranks = [Rank("a", [1.0]), Rank("b", [1.0])]
    for rank in ranks:
        rank.stuck_at = 10.0
    _, verdict = simulate(ranks, 200.0)
    assert verdict.kind == "together" and verdict.ranks == [0, 1] and not verdict.others


def test_a_host_without_any_heartbeat_is_named_with_all_of_its_ranks():
    ranks = [Rank(f"host{number // 2}", [1.0]) for number in range(6)]
    ranks[2].dead_at = ranks[3].dead_at = 20.0
    when, verdict = simulate(ranks, 200.0)
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("silent", [2, 3], ["host1"]) and when < 20 + LIMIT + 3
    assert describe(verdict).startswith("ranks 2-3 on host1 sent no heartbeat for 3")
    # after a broken connection, nobody waits for the limit
    judge = Judge(2, LIMIT, GRACE, 0.0)
    beat = Beat(1, "a", 1, "backward", 3, 9, 0.0, LIMIT)
    judge.update(1.0, {0: beat, 1: beat._replace(host="b")})
    judge.update(4.0, {0: beat._replace(number=2)})
    assert judge.judge_silent(4.0, 2.5).ranks == [1] and judge.judge_silent(3.0, 2.5) is None


def test_a_rank_that_waited_long_is_behind_only_if_its_next_heartbeat_says_so():
    """Rank 0 waited for rank 1, which came and went on to the next phase before rank 0's next heartbeat."""
    judge = Judge(2, LIMIT, GRACE, 0.0)
    waits = Beat(1, "a", 1, "backward", 3, 9, LIMIT + 1, LIMIT)
    assert judge.update(50.0, {0: waits, 1: Beat(1, "b", 1, "optimizer", 3, 10, 0.1, LIMIT)}) is None
    assert (
        judge.update(
            51.0, {0: waits._replace(number=2, entered=10, seconds=0.5), 1: Beat(2, "b", 1, "data", 4, 11, 0.1, LIMIT)}
        )
        is None
    )
    assert judge.update(90.0, {0: waits._replace(number=3, entered=10), 1: Beat(3, "b", 1, "data", 4, 11, 0.1, LIMIT)}) is None
    found = judge.update(91.0, {0: waits._replace(number=4, entered=10), 1: Beat(4, "b", 1, "data", 4, 11, 1.1, LIMIT)})
    assert found is not None and (found.kind, found.ranks) == ("stuck", [0])


def test_ranks_of_a_lost_host_are_named_together():
    """Their last heartbeats were not sent at the same moment, and a rank of another host that is late for once is not named."""
    judge = Judge(4, LIMIT, GRACE, 0.0)
    beats = {rank: Beat(1, f"host{rank // 2}", 1, "backward", 3, 9, 0.0, LIMIT) for rank in range(4)}
    judge.update(1.0, {2: beats[2]})
    judge.update(1.0 + INTERVAL, beats)
    for now in range(3, 32):
        late = {1: beats[1]._replace(number=now)} if now < 9 or now > 30 else {}
        found = judge.update(float(now), {0: beats[0]._replace(number=now)} | late)
        assert found is None
    found = judge.update(31.5, {0: beats[0]._replace(number=32)})
    assert found is not None and (found.kind, found.ranks, found.hosts) == ("silent", [2, 3], ["host1"])


def test_a_phase_without_a_limit_is_never_too_long_and_what_has_ended_is_not_missed():
    judge = Judge(2, LIMIT, GRACE, 0.0)
    for now in range(1, 5000, 10):
        preparing = Beat(now, "a", 1, "prepare data", 0, 1, float(now), float("inf"))
        assert judge.update(now, {0: preparing, 1: messages.read(json.dumps(preparing), Beat)}) is None
    ended = Beat(5001, "a", 1, "ended", 9, 99, 0.0, float("inf"))
    judge.update(5001, {0: ended, 1: ended})
    assert judge.update(9000, {0: ended, 1: ended}) is None


def test_verdicts_survive_the_store():
    verdict = Verdict("stuck", [3], ["b"], "data", 7, 31.5, [("backward", 7, [(0, 1)])], "")
    again = messages.read(json.dumps(verdict), Verdict)
    assert describe(again) == describe(verdict)
    assert describe(verdict) == (
        'rank 3 on b made no progress for 32 s in phase "data" of step 7. Waiting: ranks 0-1 in "backward" of step 7.'
    )


# --- the position
def test_only_phases_of_a_step_have_more_time_in_the_first_step():
    position.reset()
    assert position.here().limit(10.0) == float("inf"), "one process may download the model for hours"
    position.enter("data", 5)
    position.enter("forward")
    assert position.here().limit(10.0) == 40.0
    with position.during("save", 5):
        assert position.here().limit(10.0) == 120.0
    position.enter("data", 6)
    position.enter("forward")
    assert position.here()[:3] == ("forward", 6, 6) and position.here().limit(10.0) == 10.0
    before = position.here()
    position.touch()
    assert position.here().since >= before.since and position.here().entered == before.entered
    position.reset()


# --- the watch, in processes of its own
ALONE = """
import sys, threading, time
import torch.distributed as dist
from zerobook.health import position
from zerobook.health.position import Window
from zerobook.health.watch import Watch
watch = Watch(dist.HashStore(), 0, 1, 0.3, local=[0])
watch.report = lambda verdict, text: print("REPORT", verdict.kind, verdict.phase, verdict.step, flush=True)
position.enter("data", 1)
position.enter("data", 2)
def waits_for_a_file_that_never_comes():
    time.sleep(60)
{}
"""


def alone(body: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", ALONE.format(body)], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_process_that_hangs_ends_with_its_stack_and_an_exit_code_of_its_own():
    done = alone("waits_for_a_file_that_never_comes()")
    assert done.returncode == EXIT_CODE == 77
    assert "REPORT stuck data 2" in done.stdout
    assert 'in phase "data" of step 2' in done.stderr and "waits_for_a_file_that_never_comes" in done.stderr


def test_a_lock_that_the_main_thread_holds_does_not_stop_the_report():
    done = alone(
        "lock = threading.Lock(); lock.acquire()\nwatch.report = lambda verdict, text: lock.acquire()\n"
        "waits_for_a_file_that_never_comes()"
    )
    assert done.returncode == EXIT_CODE and "HANG: " in done.stderr


def test_a_process_that_cannot_run_python_code_writes_its_stacks_and_ends():
    """A call into C that keeps the interpreter's lock stops all threads, those of the watch too."""
    done = alone("import ctypes\ntime.sleep(0.2)\nposition.enter('start')\nctypes.PyDLL(None).sleep(60)\nwatch.stop()")
    assert done.returncode == 1
    assert "Timeout" in done.stderr and 'File "<string>"' in done.stderr


def test_a_process_is_not_ended_for_a_lock_that_is_kept_after_its_run():
    done = alone("import ctypes\nwatch.stop()\nctypes.PyDLL(None).sleep(2)\nprint('ended')")
    assert (done.returncode, done.stdout) == (0, "ended\n")


ASKING = """
import ctypes, sys, time
from datetime import timedelta
import torch.distributed as dist
from zerobook.health import position
from zerobook.health.watch import Watch
rank, victim, port = map(int, sys.argv[1:])
store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
watch = Watch(store, rank, 2, 6.0, local=[rank])
def ask_a_gpu_that_hangs():
    ctypes.PyDLL(None).sleep(120)
position.enter("backward", 7)
# Each rank is heard before one of them hangs.
sys.stdin.readline()
time.sleep(2)
if rank == victim:
    watch.locate = ask_a_gpu_that_hangs
time.sleep(120)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_gpu_keeps_pythons_lock_ends_and_is_said_to_wait_for_its_gpu(victim):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", ASKING, str(rank), str(victim), str(store.port)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        store.wait(["beat/0", "beat/1", "pulse"])
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        printed = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (ranks[1 - victim].returncode, ranks[victim].returncode) == (EXIT_CODE, 1)
    assert f"rank {victim} on" in printed[1 - victim]
    assert 'phase "backward" of step 7, and its GPU has not answered' in printed[1 - victim]
    assert "ask_a_gpu_that_hangs" in printed[victim]


SUSPENDED = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from zerobook.health import position
from zerobook.health.watch import Watch
rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
watch = Watch(store, rank, 2, 4.0, local=[rank])
for step in range(1, 1000):
    position.enter("forward", step)
    time.sleep(0.2)
"""


def test_ranks_that_were_suspended_together_go_on():
    """Ctrl-Z and Slurm's suspend do this. The rank that goes on first hears nothing of the other one for a moment."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", SUSPENDED, str(rank), str(store.port)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    try:
        store.wait(["beat/0", "beat/1", "pulse"])
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(5)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        # Longer than two heartbeats: the second one would confirm a suspicion.
        time.sleep(1)
        assert [rank.poll() for rank in ranks] == [None, None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


ENDING = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from zerobook.health import position
from zerobook.health.watch import Watch
rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
watch = Watch(store, rank, 2, 4.0, local=[rank])
position.enter("export", 3)
sys.stdin.readline()
time.sleep(1 + 6 * rank)
watch.stop()
"""


def test_a_rank_that_needs_longer_than_rank_0_for_its_end_is_left_alone():
    """A hook that closes something on this rank may take this time."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", ENDING, str(rank), str(store.port)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        store.wait(["beat/0", "beat/1", "pulse"])
        printed = [rank.communicate("\n", timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ([rank.returncode for rank in ranks], printed) == ([0, 0], ["", ""])


def test_a_clock_leaves_out_the_time_of_a_suspension(monkeypatch):
    moment = 100.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: moment)
    running = clock.RunningClock(longest_gap=10.0)
    start = running.now()
    moment = 105.0
    assert (running.now() - start, running.seconds_since(101.0)) == (5.0, 4.0)
    moment = 405.0
    assert (running.now() - start, running.seconds_since(101.0)) == (5.0, 0.0)
    moment = 407.0
    assert (running.now() - start, running.seconds_since(101.0)) == (7.0, 2.0)


def test_a_heartbeat_before_a_question_to_the_gpu_shows_no_progress():
    """Rank 0 waited for rank 1, and sends its last heartbeat again before it asks its GPU, which has got on since."""
    judge = Judge(2, LIMIT, GRACE, 0.0)
    waits = Beat(1, "a", 1, "backward", 3, 9, LIMIT + 1, LIMIT)
    other = Beat(1, "b", 1, "optimizer", 3, 10, 0.1, LIMIT)
    assert judge.update(50.0, {0: waits, 1: other}) is None
    assert judge.update(51.0, {0: waits._replace(error=GPU_SILENT), 1: other._replace(number=2)}) is None
    assert judge.last_heard[0] == 50.0
    assert judge.update(52.0, {0: waits._replace(number=2, entered=10, seconds=0.5), 1: other._replace(number=3)}) is None


def test_a_record_that_keeps_the_interpreters_lock_does_not_keep_the_process():
    """A call to a GPU that hangs may do so, and Python cannot end the process then."""
    done = alone("import ctypes\nwatch.record = lambda: ctypes.PyDLL(None).sleep(90)\nwaits_for_a_file_that_never_comes()")
    assert done.returncode == 1 and "REPORT stuck data 2" in done.stdout


def test_a_process_that_gets_on_is_left_alone():
    done = alone(
        "for step in range(2, 30):\n    position.enter('data', step)\n    time.sleep(0.05)\nwatch.stop(); print('ended')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_a_machine_on_which_every_step_is_slow_is_left_alone():
    """The first step has more time than the others, and shows how long a step takes here."""
    done = alone(
        "for step in (1, 3, 4):\n    position.enter('data', step)\n    position.enter('forward')\n    time.sleep(0.6)\n"
        "watch.stop(); print('ended')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_collectives_of_each_recorder_are_kept(tmp_path, monkeypatch):
    """On a GPU, NCCL's collectives are in a recorder of their own."""
    from zerobook.training.watching import _keep_collectives

    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: b'{"entries": []}', raising=False)
    _keep_collectives(tmp_path, 3)
    assert json.loads((tmp_path / "collectives.nccl.rank3.json").read_text()) == {"entries": []}
    assert "version" in json.loads((tmp_path / "collectives.rank3.json").read_text())
    # A build without a recorder writes what it has.
    monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    _keep_collectives(tmp_path, 4)
    assert [path.name for path in tmp_path.glob("*rank4*")] == ["collectives.nccl.rank4.json"]


def test_what_is_an_error_of_a_connection():
    assert is_connection_error(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4711"))
    assert is_connection_error(dist.DistBackendError("NCCL error: remote process exited"))
    assert not is_connection_error(ValueError("connection of two ideas")) and not is_connection_error(RuntimeError("shape"))


def test_an_error_is_told_to_the_others_and_the_missing_one_is_named():
    store, found = dist.HashStore(), []
    watches = [Watch(dist.PrefixStore("x", store), rank, 2, 3.0, local=[0, 1]) for rank in range(2)]
    time.sleep(0.5)
    watches[1]._done.set()  # as if it were killed: it sends nothing more
    watches[1]._wake.set()
    time.sleep(0.3)
    found.append(watches[0].failed(RuntimeError("gloo: Connection closed by peer")))
    watches[0].stop()
    position.reset()
    assert found[0] is not None and found[0].kind == "silent" and found[0].ranks == [1]


def test_an_error_of_ones_own_that_names_a_connection_is_passed_on():
    """Another service's, as of a tracker. In one process nobody is asked; the others would call this rank the failed one."""
    error = RuntimeError("DataLoader timed out")
    watches = [Watch(dist.PrefixStore("x", dist.HashStore()), 0, size, 3.0, local=[0]) for size in (1, 2)]
    watches[1]._exchange.verdict = Verdict("failed", [0], ["here"], "failed", 1, 20.0, [])
    started = time.monotonic()
    assert [watch.failed(error) for watch in watches] == [None, None]
    assert time.monotonic() - started < 3
    for watch in watches:
        watch.stop()
    position.reset()


def test_a_process_that_ended_is_named_before_those_that_it_made_fail():
    """With the default of ``hang_timeout``: it sent a heartbeat and ended between two looks of rank 0."""
    store = SignedStore(dist.HashStore(), "secret")
    servers = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(3)]
    exchanges = [Exchange(store, rank, 3, 300.0, 0.0) for rank in range(3)]
    numbers = itertools.count(1)

    def beat(rank, phase="backward", error=""):
        return NO_BEAT._replace(
            number=next(numbers), host=f"host{rank}", pid=1, phase=phase, step=7, entered=30, seconds=1.0, limit=300.0,
            error=error, endpoint=servers[rank].getsockname()[:2],
        )  # fmt: skip

    exchanges[1].send(beat(1))
    exchanges[0].step(beat(0), 0.0)
    exchanges[2].send(beat(2))
    servers[2].close()
    lost = "RuntimeError: [gloo] Connection closed by peer"
    seconds = 0.0
    while exchanges[0].verdict is None and seconds < 60:
        seconds += 5.02
        exchanges[1].send(beat(1, "failed", lost))
        exchanges[0].step(beat(0, "failed", lost), seconds)
    for server in servers:
        server.close()

    assert exchanges[0].verdict is not None
    assert (exchanges[0].verdict.kind, exchanges[0].verdict.ranks) == ("ended", [2])


def test_heartbeats_tell_where_the_device_is_and_the_rank_of_a_stuck_gpu_is_named():
    """Both hosts wait in "reduce". GPU 1 is in its forward pass, and GPU 0 waits for it in the backward pass."""
    position.reset()
    store, found = dist.HashStore(), []
    watches = [Watch(dist.PrefixStore("x", store), rank, 2, 0.6, local=[]) for rank in range(2)]
    position.enter("data", 2)
    position.enter("reduce", 3)
    since = time.monotonic()
    for watch, (phase, entered) in zip(watches, [("backward", 12), ("forward", 11)], strict=True):
        watch.locate = partial(position.Position, phase, 3, entered, since, since)
        watch._end = lambda verdict, *, done=watch._done, **_: found.append(verdict) or done.wait()
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
    for watch in watches:
        watch.stop()
    position.reset()
    assert found and (found[0].kind, found[0].ranks, found[0].phase) == ("stuck", [1], "forward")
    assert found[0].others == [("backward", 3, [(0, 0)])]


def test_an_evaluation_is_told_at_its_begin_and_not_an_interval_later():
    position.reset()
    store = dist.HashStore()
    watch = Watch(store, 0, 1, 300.0, local=[0])
    time.sleep(0.3)
    with position.during("evaluate", 4):
        time.sleep(0.3)
        beat = messages.read(store.get("beat/0"), Beat)
    watch.stop()
    position.reset()
    assert (beat.phase, beat.step) == ("evaluate", 4)


RANK = """
import ctypes, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from zerobook.health import position
from zerobook.health.watch import Watch
rank, port = int(sys.argv[1]), int(sys.argv[2])
# As in a run, the store belongs to a process of its own.
store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
signal.signal(signal.SIGTERM, lambda *_: None)
watch = Watch(store, rank, 2, 30.0, local=[rank])
position.enter("{}")
print("ready", flush=True)
# A lock of C that is taken twice: no signal ends this wait, and Python's handlers do not run in it.
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["load", "backward"])
def test_a_killed_process_is_named_within_seconds_in_every_phase(victim, phase):
    """No connection of the others breaks, as under NCCL. They wait in C, and their launcher has sent them SIGTERM."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", RANK.replace("{}", phase), str(rank), str(store.port)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        store.wait(["beat/0", "beat/1", "pulse"])
        # The first interval has passed: each rank has reached the other one.
        time.sleep(2)
        ranks[victim].kill()
        ranks[1 - victim].terminate()
        _, said = ranks[1 - victim].communicate(timeout=15)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1 - victim].returncode == EXIT_CODE
    assert f"the process of rank {victim} on" in said and "ended" in said


def test_a_process_counts_as_ended_where_its_port_refuses_after_it_has_answered():
    listener = listen()
    endpoint = listener.getsockname()[:2]
    presence, late = Presence(patience=5.0), Presence(patience=5.0)
    assert not presence.find_ended({endpoint: 0.0}), "the first call only asks"
    # Nothing accepts: a process that hangs is there all the same.
    assert not presence.find_ended({endpoint: 6.0})
    listener.close()
    assert not presence.find_ended({endpoint: 4.0}) and presence.find_ended({endpoint: 6.0}) == {endpoint}
    assert not late.find_ended({endpoint: 6.0}) and not late.find_ended({endpoint: 7.0}), "it may be a firewall that refuses"
    assert not presence.find_ended({("", 0): 6.0}), "a process without a port"


def test_ranks_behind_a_dead_switch_cost_one_wait_and_hide_no_ended_process():
    listener = listen()
    endpoint = listener.getsockname()[:2]
    presence = Presence(patience=5.0)
    # A full queue of connections that nobody accepts answers no further one, as a switch without power does.
    full = socket.create_server(("127.0.0.2", 0), backlog=0)
    target = full.getsockname()
    waiting = []
    for _ in range(4):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(target)
        waiting.append(connection)
    presence.find_ended({endpoint: 0.0})
    listener.close()
    # Names of one address that does not answer: each is a connection of its own.
    silences = {("127.0.0.2", target[1]): 6.0, ("::ffff:127.0.0.2", target[1]): 6.0, endpoint: 6.0}
    begun = time.monotonic()
    ended = presence.find_ended(silences)
    seconds = time.monotonic() - begun
    assert ended == {endpoint}
    assert 0.4 < seconds < 0.9, "one after the other, two ranks without an answer take a second"
    for connection in waiting:
        connection.close()
    full.close()


FORKING = """
import os, sys, time
from multiprocessing import get_context
from zerobook.health.presence import listen
listener = listen()
children = [get_context(method).Process(target=time.sleep, args=(30,)) for method in ("fork", "spawn")]
if __name__ == "__main__":
    for child in children:
        child.start()
    print(*listener.getsockname()[:2], *(child.pid for child in children), flush=True)
    time.sleep(60)
"""


def test_workers_that_outlive_their_rank_do_not_keep_its_port(tmp_path):
    (tmp_path / "rank.py").write_text(FORKING)
    rank = subprocess.Popen([sys.executable, str(tmp_path / "rank.py")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    address, port, *workers = rank.stdout.readline().split()
    endpoint = (address, int(port))
    presence = Presence(patience=5.0)
    assert not presence.find_ended({endpoint: 0.0})
    rank.kill()
    rank.wait()
    try:
        alive = [Path(f"/proc/{worker}/status").exists() for worker in workers]
        assert presence.find_ended({endpoint: 6.0}) == {endpoint}
    finally:
        for worker in workers:
            os.kill(int(worker), signal.SIGKILL)
    assert alive == [True, True]


def test_a_store_that_closes_its_connection_ends_the_run_before_the_timeout():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    body = ALONE.replace("dist.HashStore(), 0, 1, 0.3", f'dist.TCPStore("localhost", {store.port}), 1, 2, 30.0')
    body = body.replace("{}", "print('ready', flush=True)\nwaits_for_a_file_that_never_comes()")
    rank = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert rank.stdout.readline() == "ready\n"
    del store
    _, said = rank.communicate(timeout=20)
    assert rank.returncode == EXIT_CODE and "closed its connection" in said


# --- many ranks
@dataclass
class CountingStore:
    """A store in a dict, which counts the calls and the values that are read."""

    values: dict[str, bytes] = field(default_factory=dict)
    calls: int = 0
    read: int = 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.calls, self.read = self.calls + 1, self.read + 1
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls, self.read = self.calls + 1, self.read + len(keys)
        return [self.values[key] for key in keys]


def exchanged(ranks: int) -> tuple[set[int], int, int]:
    """Let ranks exchange heartbeats until the last one, which stops, is named.

    Returns:
        (the numbers of calls that ranks other than 0 make in an interval, those of rank 0, and the values that it reads).
    """
    store = CountingStore()
    exchanges = [Exchange(store, rank, ranks, 30.0, 0.0) for rank in range(ranks)]
    others: set[int] = set()
    for now in (1.0, 2.0, 3.0, 40.0, 41.0):
        for rank in reversed(range(ranks)):
            if now > 3 and rank == ranks - 1:
                continue
            calls, read, step = store.calls, store.read, int(now)
            window = Window(step, 1, 1.0, 0.1, 0.5)
            beat = Beat(step, f"host{rank // 8}", 1, "forward", step, step, 0.5, 30.0, "", window)
            exchanges[rank].step(beat, now)
            if rank:
                others.add(store.calls - calls)
    assert len(store.values["verdict"]) < 1000 and len(store.values["beat/0"]) < 150, (
        "bytes that all ranks read, and of a heartbeat"
    )
    assert exchanges[1].verdict is not None and exchanges[1].verdict.ranks == [ranks - 1]
    return others, store.calls - calls, store.read - read


def test_the_work_grows_with_the_ranks_and_nothing_is_read_by_all_from_all():
    # Calls and not seconds: other processes and the garbage collector take time, too.
    calls = []
    most = []
    for ranks in (256, 2048):
        number, (others, main, read) = function_calls(exchanged, ranks)
        calls.append(number)
        assert max(others) <= 5, "a rank's own work does not depend on the others"
        assert main <= 5 and read == ranks, "rank 0 reads each heartbeat once, in one call"
        tracemalloc.start()
        exchanged(ranks)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert calls[1] < 1.1 * 8 * calls[0] and most[1] < 1.5 * 8 * most[0], "eight times the ranks"


# --- the meeting
def met(store: dist.Store, world_size: int, ranks: list[int] | None = None) -> dict[int, str]:
    """Let ranks meet in threads, and return the name of the attempt that each of them got."""
    names: dict[int, str] = {}

    def one(rank: int) -> None:
        names[rank] = meet(store, rank, world_size, patience=20.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (ranks or range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return names


def test_ranks_meet_anew_in_a_store_that_earlier_attempts_have_used():
    store, before = dist.HashStore(), set()
    for _ in range(4):
        names = met(store, 3)
        assert len(names) == 3 and len(set(names.values())) == 1 and not set(names.values()) & before
        before |= set(names.values())


def test_a_rank_that_comes_first_does_not_take_an_old_attempt():
    store = dist.HashStore()
    old = set(met(store, 3).values())
    names: dict[int, str] = {}
    early = threading.Thread(target=lambda: names.update({2: meet(store, 2, 3, patience=20.0)}))
    early.start()
    time.sleep(1.5)
    assert not names, "it answers to the old attempt's name, which nobody confirms"
    names |= met(store, 3, [0, 1])
    early.join(20)
    assert len(set(names.values())) == 1 and not set(names.values()) & old


def test_a_meeting_that_fails_names_the_absent():
    with pytest.raises(LaunchError, match=r"1, 2 did not come within 1 s"):
        meet(dist.HashStore(), 0, 3, patience=1.2)
    with pytest.raises(LaunchError, match=r"rank 0 did not come"):
        meet(dist.HashStore(), 1, 3, patience=0.5)
