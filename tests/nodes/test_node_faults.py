"""Faults of processes, hosts and links, on simulated hosts: each ends the run with the name of the culprit, or costs nothing.

``make test-nodes`` runs all rows, and writes docs/measured/nodes.md.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.distributed.test_parity import record
from tests.nodes.hosts import Network, missing
from tests.nodes.runs import HANG_S, NodeRun
from zerobook.health.watch import EXIT_CODE

NEEDS = missing()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.launch,
    pytest.mark.full,
    pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS)),
]
STALLS = "tests.nodes.stalls:Stalls"


@dataclass(frozen=True)
class Fault:
    """A fault, the culprit that every report has to name, and the seconds after which the others have stopped."""

    name: str
    apply: Callable[[NodeRun], None]
    rank: int | None
    host: int
    within: float
    hooks: str | None = None


def last(run: NodeRun) -> int:
    return sum(len(host.ranks()) for host in run.hosts) - 1


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("rank killed", lambda run: run.signal(last(run), signal.SIGKILL), -1, 1, 12),
        Fault("rank 0 killed", lambda run: run.signal(0, signal.SIGKILL), 0, 0, 12),
        Fault("host killed", lambda run: run.hosts[1].kill(), -1, 1, 12),
        Fault("first host killed", lambda run: run.hosts[0].kill(), 0, 0, 12),
        Fault("rank stopped (SIGSTOP)", lambda run: run.signal(last(run), signal.SIGSTOP), -1, 1, HANG_S + 6),
        Fault("link cut for good", lambda run: run.hosts[1].cut(), -1, 1, HANG_S + 6),
        Fault("data loader hangs", lambda run: None, -1, 1, 3 * HANG_S + 6, hooks=STALLS),
    )
}
MATRIX = [
    (name, strategy, per_host) for strategy, per_host in (("ddp", 1), ("zero3", 1), ("fsdp_hybrid", 2)) for name in FAULTS
]


def cases() -> list:
    return [pytest.param(*row, id="-".join(row[:2])) for row in MATRIX]


@pytest.mark.parametrize("name, strategy, per_host", cases())
def test_all_hosts_stop_and_name_the_culprit(tmp_path, tiny, name, strategy, per_host):
    fault = FAULTS[name]
    flags = {"hooks": fault.hooks} if fault.hooks else {}
    with Network(tmp_path) as hosts:
        run = NodeRun.begin(hosts, tmp_path, tiny, strategy, per_host, **flags)
        run.trains()
        count = per_host * len(hosts)
        culprit = fault.rank if fault.rank is None or fault.rank >= 0 else count - 1
        run.fault(lambda: fault.apply(run))
        others = [host for host in hosts if host is not hosts[fault.host] or name in ("link cut for good", "data loader hangs")]
        run.until(lambda: all(host.name in run.ended for host in others), fault.within + 15)
        seconds = max(run.ended[host.name][0] for host in others)
        said = {host.name: [line for line in run.said(host).splitlines() if line.startswith(("HANG: ", "PeerError"))]
                for host in others}  # fmt: skip
    assert all(said.values()), f"silence on {[name for name, lines in said.items() if not lines]}"
    for host in others:
        blamed = " ".join(said[host.name])
        far = hosts[fault.host] if host is not hosts[fault.host] or name == "data loader hangs" else hosts[1 - fault.host]
        assert far.name in blamed, blamed
        if name != "link cut for good" and culprit:
            # The processes of a killed host end one after the other, and the first that is missed may be named alone.
            culprits = range(culprit - per_host + 1, culprit + 1) if name == "host killed" else [culprit]
            assert any(f"{rank} on {far.name}" in blamed for rank in culprits), blamed
        assert f"exitcode: {EXIT_CODE}" in run.said(host)
    if hosts[0] in others:
        assert run.events("crash")[-1]["reason"], "the runlog's last event says it too"
    if fault.hooks:
        assert "before_step" in run.said(hosts[0]), "the stack of the culprit"
        kept = [json.loads(path.read_text()) for path in sorted((run.output / "runlog").glob("collectives.rank*.json"))]
        waits, stalls = (kept[rank]["entries"][-1]["collective_seq_id"] for rank in (0, culprit))
        assert len(kept) == count
        if strategy != "fsdp_hybrid":  # which has several groups, each with a count of its own
            assert waits > stalls, "rank 0 is in a collective that the culprit has not begun"
    assert seconds < fault.within, f"{seconds:.1f} s"
    record("nodes", fault=name, strategy=strategy, ranks=f"{per_host} + {per_host}", seconds=round(seconds, 1),
           named=said[others[0].name][0].partition(" Waiting:")[0], ends="stops on all hosts, exit code 77")  # fmt: skip


@pytest.mark.parametrize("killed", [0, 1])
def test_a_host_that_is_killed_while_models_load_is_named_within_seconds(tmp_path, tiny, killed):
    """Nobody waits in a collective, so no connection of gloo says that it is gone."""
    with Network(tmp_path) as hosts:
        loads = "tests.nodes.stalls:LoadsForLong"
        run = NodeRun.begin(hosts, tmp_path, tiny, "ddp", 1, hang_timeout=60, hooks=loads)
        run.faulted = time.monotonic()
        run.until(lambda: all("LOADING" in run.said(host) for host in hosts), 120)
        # An interval of heartbeats, in which each host reaches the other one.
        time.sleep(5)
        run.fault(hosts[killed].kill)
        other = hosts[1 - killed]
        run.until(lambda: other.name in run.ended, 30)
        seconds, _ = run.ended[other.name]
        (said,) = [line for line in run.said(other).splitlines() if line.startswith("HANG: ")]
    assert hosts[killed].name in said and seconds < 20
    record("nodes", fault=f"{('first', 'second')[killed]} host killed while models load, hang_timeout 60", strategy="ddp",
           ranks="1 + 1", seconds=round(seconds, 1), named=said, ends="stops on all hosts, exit code 77")  # fmt: skip


@pytest.mark.parametrize("strategy, per_host", [
    pytest.param("ddp", 1, id="ddp"), pytest.param("zero3", 1, id="zero3"), pytest.param("fsdp_hybrid", 2, id="fsdp_hybrid"),
])  # fmt: skip
def test_a_link_that_comes_back_costs_only_time(tmp_path, tiny, strategy, per_host):
    with Network(tmp_path) as hosts:
        # TCP doubles the time between its attempts, so a link that was away for 5 s is used again after 10 s at most
        run = NodeRun.begin(hosts, tmp_path, tiny, strategy, per_host, hang_timeout=15)
        run.trains()

        def blink() -> None:
            hosts[1].cut()
            time.sleep(5)
            hosts[1].mend()

        run.fault(blink)
        before = run.step()
        run.until(lambda: run.step() > before + 5, 30)
        seconds = time.monotonic() - run.faulted
        assert not run.ended and not run.events("crash")
        attempts = [event["attempt"] for event in run.events("run_start")]
    assert attempts == [1]
    record("nodes", fault="link cut for 5 s", strategy=strategy, ranks=f"{per_host} + {per_host}",
           seconds=round(seconds, 1), named="", ends="continues, no step is repeated")  # fmt: skip


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_clock_that_jumps_changes_nothing(tmp_path, tiny, host, ahead):
    with Network(tmp_path) as hosts:
        run = NodeRun.begin(hosts, tmp_path, tiny, "ddp", 1)
        run.trains()
        run.fault(lambda: hosts[host].set_clock(ahead))
        before = run.step()
        run.until(lambda: run.step() > before + 50 and time.monotonic() > run.faulted + 2 * HANG_S, 60)
        assert not run.ended and not run.events("crash", "straggler")
    record("nodes", fault=f"clock of the {('first', 'second')[host]} host jumps by {ahead} s", strategy="ddp", ranks="1 + 1",
           seconds=None, named="", ends="continues, no step is repeated")  # fmt: skip


def test_a_full_disk_of_one_host_is_named(tmp_path, tiny):
    """The second host has no room for its prepared data."""
    with Network(tmp_path) as hosts:
        cache = tmp_path / "cache"
        cache.mkdir()
        hosts[1].disks[cache] = 40960
        began = time.monotonic()
        run = NodeRun.begin(hosts, tmp_path, tiny, "ddp", 1)
        run.faulted = began
        run.until(lambda: len(run.ended) == 2, 120)
        for host in hosts:
            said = [line for line in run.said(host).splitlines() if re.search("disk of .* is full", line)]
            assert said and "on hostb" in said[0], run.said(host)[-3000:]
    record("nodes", fault="disk of one host full", strategy="ddp", ranks="1 + 1", seconds=None, named=said[0],
           ends="no host starts")  # fmt: skip


def test_other_data_on_one_host_is_refused(tmp_path, tiny):
    """A file of the same name lies on each host's own disk, and one of them is newer."""
    with Network(tmp_path) as hosts:
        own = tmp_path / "own"
        own.mkdir()
        hosts[1].disks[own] = 2**20
        text = (tiny / "text.txt").read_text()
        (own / "text.txt").write_text(text)
        hosts[1].prepare = f"head -c {len(text) // 2} {tiny / 'text.txt'} > {own / 'text.txt'}"
        run = NodeRun.begin(hosts, tmp_path, tiny, "ddp", 1, train_file=own / "text.txt")
        run.faulted = time.monotonic()
        run.until(lambda: len(run.ended) == 2, 120)
        for host in hosts:
            assert re.search("training data: the fingerprint of the prepared data is .* on hosta; .* on hostb", run.said(host))
            assert not run.events("run_start")
