"""Runs that go on after a fault: the same hosts again, fewer of them, and all of them once more."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.distributed.test_parity import record
from tests.nodes.hosts import Network, missing
from tests.nodes.runs import NodeRun

NEEDS = missing()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.launch,
    pytest.mark.full,
    pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS)),
]
AWAY_S = 25
"""Seconds that a host or a link is away before it comes back."""


@dataclass(frozen=True)
class Restart:
    """A fault, what mends it, and the hosts that train after each of them.

    ``resumes`` has the seconds that a resume may take: after the fault where the others go on without the host, else after the
    host is back.
    """

    fault: Callable[[NodeRun], None]
    mend: Callable[[NodeRun], None] | None = None
    least: int | None = None
    resumes: float = 60

    @property
    def shrinks(self) -> bool:
        return self.least is not None


def back(run: NodeRun) -> None:
    run.launch(1)


RESTARTS = {
    "rank killed": Restart(lambda run: run.signal(run.world_size - 1, signal.SIGKILL)),
    # torchrun waits 30 seconds before it kills a process that does not end
    "rank stopped (SIGSTOP)": Restart(lambda run: run.signal(run.world_size - 1, signal.SIGSTOP), resumes=90),
    "host killed, then it is back": Restart(lambda run: run.hosts[1].kill(), back),
    "host gone for good": Restart(lambda run: run.hosts[1].kill(), least=1),
    "host killed, others continue, then it is back": Restart(lambda run: run.hosts[1].kill(), back, least=1),
    "link cut, others continue, then it is back": Restart(
        lambda run: run.hosts[1].cut(), lambda run: run.hosts[1].mend(), least=1
    ),
}
MATRIX = [
    (name, strategy, per_host)
    for strategy, per_host in (("ddp", 1), ("zero3", 1), ("fsdp_hybrid", 2))
    for name, restart in RESTARTS.items()
    if not (restart.shrinks and strategy == "fsdp_hybrid")  # its groups are as many as the hosts
]


@pytest.mark.parametrize("name, strategy, per_host", [
    pytest.param(*row, id="-".join(row[:2])) for row in MATRIX
])  # fmt: skip
def test_a_run_goes_on(tmp_path, tiny, name, strategy, per_host):
    restart = RESTARTS[name]
    with Network(tmp_path) as hosts:
        run = NodeRun.begin(hosts, tmp_path, tiny, strategy, per_host, restarts=3, least=restart.least)
        run.trains()
        whole = run.world_size
        run.fault(lambda: restart.fault(run))
        began, at, resumed = run.faulted, run.step(), []
        if restart.shrinks:
            resumed.append(resume(run, 2, at, restart.resumes))
            assert resumed[-1]["ranks"] == per_host
        if restart.mend:
            time.sleep(max(0, began + AWAY_S - time.monotonic()))
            at = run.step()
            run.fault(lambda: restart.mend(run))
            resumed.append(resume(run, len(resumed) + 2, at, restart.resumes))
        elif not restart.shrinks:
            resumed.append(resume(run, 2, at, restart.resumes))
        if not restart.shrinks or restart.mend:
            assert resumed[-1]["ranks"] == whole
        crash = run.events("crash")[0]
        rows = run.steps()
        assert not [host.name for host in hosts if "Traceback" in run.said(host) and "HANG" not in run.said(host)]
    assert "hostb" in crash["reason"]
    attempts = [event["attempt"] for event in run.events("run_start")]
    assert attempts == list(range(1, len(resumed) + 2)), "no try is wasted"
    assert {len(row["ids"]) for row in rows} == {whole}, "the global batch"
    done = {row["step"]: (row["ids"], row["learning_rate"]) for row in rows}
    assert sorted(done) == list(range(1, len(done) + 1))
    assert all(done[row["step"]] == (row["ids"], row["learning_rate"]) for row in rows), "samples and rate of a repeated step"
    ends = []
    for found in resumed:
        who = f"{found['ranks']} ranks train" if found["ranks"] > 1 else "1 rank trains"
        ends.append(f"{who} {found['seconds']:.0f} s later, {found['lost']} steps are repeated")
    named = crash["reason"].partition(" Waiting")[0].partition(" Start the")[0]
    record("nodes", fault=name, strategy=strategy, ranks=f"{per_host} + {per_host}",
           seconds=round(crash["monotonic"] - began, 1), named=named, ends="; then ".join(ends))  # fmt: skip


def resume(run: NodeRun, attempt: int, at: int, seconds: float) -> dict:
    """Wait until an attempt trains; return its ranks, its seconds after the fault, and the steps that are done again."""
    event = run.until(lambda: next((e for e in run.events("resume") if e["attempt"] == attempt), None), seconds)
    run.until(lambda: run.step() > event["step"] + 5, 30)
    ranks = event["world_size"]["now"]
    return {"ranks": ranks, "seconds": event["monotonic"] - run.faulted, "lost": max(0, at - event["step"])}
