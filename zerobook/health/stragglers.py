"""Ranks and links that are slower than the others, from what heartbeats say. Synchronous training is as slow as the slowest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zerobook.health.judge import Beat
from zerobook.health.position import Window

TIMES = 2.0
"""A rank is slow if it takes so many times as long as a typical one ..."""
SHARE = 0.1
"""... and the difference is this share of the time of a step ..."""
LEAST_S = 0.01
"""... and so many seconds: in steps of milliseconds, the operating system's other work alone makes such differences."""
LEAST_STEPS = 5
"""Steps over which ranks are compared: in a single one, any other program can hold up a rank."""
LINK_TIMES, LINK_S = 5.0, 0.05
"""A link is slow if an exchange with the store takes so many times as long as its fastest one, and so many seconds."""


class Slow(NamedTuple):
    """A slow rank or link. ``what``: data, forward, link. ``ranks`` are those that it was measured on; ``seconds`` is the time
    of a step, or of an exchange, and ``typical`` that of the others, or the best one so far."""

    what: str
    host: str
    ranks: list[int]
    step: int
    seconds: float
    typical: float


class Stragglers:
    """Compares ranks at log points, and links with their own past. Each finding is given once until it has gone away."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}
        self._given: set[tuple[str, str]] = set()
        self._step = 0
        self._sums: dict[int, Window] = {}

    def see(self, beats: Mapping[int, Beat]) -> list[Slow]:
        """Take in the newest heartbeats of all ranks, and return what has become slow."""
        found = self._links(beats)
        windows = {rank: beat.window for rank, beat in beats.items() if beat.window is not None}
        steps = {window.step for window in windows.values()}
        if len(windows) == len(beats) > 1 and len(steps) == 1 and (step := steps.pop()) > self._step:
            self._step = step
            self._sums = {rank: window.after(self._sums.get(rank)) for rank, window in windows.items()}
            if min(window.steps for window in self._sums.values()) >= LEAST_STEPS:
                found += self._ranks({rank: beat.host for rank, beat in beats.items()}, self._sums)
                self._sums = {}
        new = [slow for slow in found if (slow.what, slow.host) not in self._given]
        self._given |= {(slow.what, slow.host) for slow in new}
        return new

    def _ranks(self, hosts: Mapping[int, str], windows: Mapping[int, Window]) -> list[Slow]:
        """Return slow ranks, those of a host together."""
        found = []
        for what in ("data", "forward"):
            each = {rank: getattr(window, what) / window.steps for rank, window in windows.items()}
            typical = sorted(each.values())[(len(each) - 1) // 2]
            total = min(window.total / window.steps for window in windows.values())
            slow = [rank for rank, s in each.items() if s > TIMES * typical and s - typical > max(SHARE * total, LEAST_S)]
            for host in dict.fromkeys(hosts[rank] for rank in slow):
                ranks = [rank for rank in slow if hosts[rank] == host]
                found.append(Slow(what, host, ranks, self._step, max(each[rank] for rank in ranks), typical))
            self._forget(what, {hosts[rank] for rank in slow})
        return found

    def _links(self, beats: Mapping[int, Beat]) -> list[Slow]:
        """Return slow links. Rank 0's host has the store, so its own exchanges do not leave it."""
        main = beats[0].host if 0 in beats else ""
        hosts: dict[str, list[int]] = {}
        for rank, beat in beats.items():
            if beat.host != main and beat.exchange > 0:
                hosts.setdefault(beat.host, []).append(rank)
        found = []
        for host, ranks in hosts.items():
            seconds = min(beats[rank].exchange for rank in ranks)
            best = self._best[host] = min(seconds, self._best.get(host, seconds))
            training = beats[ranks[0]].step > 0  # a process that loads its model may answer late
            if training and seconds > LINK_TIMES * best and seconds > LINK_S:
                found.append(Slow("link", host, ranks, max(beats[rank].step for rank in ranks), seconds, best))
        self._forget("link", {slow.host for slow in found})
        if len(found) == len(hosts) > 1:  # they have one end in common
            worst = max(found, key=lambda slow: slow.seconds)
            return [worst._replace(host=main, ranks=[0])]
        return found

    def _forget(self, what: str, still: set[str]) -> None:
        self._given = {(kind, host) for kind, host in self._given if kind != what or host in still}


def describe(slow: Slow) -> str:
    """Return the finding as a sentence."""
    ranks = f"rank{'s' if len(slow.ranks) > 1 else ''} {', '.join(map(str, slow.ranks[:8]))}"
    if slow.what == "link":
        return (
            f"slow link: a message between {slow.host} and the first host takes {1000 * slow.seconds:.0f} ms, "
            f"{1000 * slow.typical:.1f} ms at best"
        )
    doing = {"data": "waiting for data", "forward": "forward passes"}[slow.what]
    return f"slow host: {doing} on {slow.host} ({ranks}): {slow.seconds:.2f} s a step; on the other ranks: {slow.typical:.2f} s"
