"""Ranks that are slower than the others, from what heartbeats say. Synchronous training is as slow as the slowest."""

from collections.abc import Mapping
from typing import NamedTuple

from zerobook.health.judge import Beat
from zerobook.health.position import Window

SLOW_RANK_RATIO = 2.0
"""A rank is slow if it takes this many times as long as a typical rank ..."""
MIN_STEP_SHARE = 0.1
"""... and the difference is this share of the time of a step ..."""
MIN_DIFFERENCE_S = 0.01
"""... and this many seconds: in steps of milliseconds, other work of the operating system alone makes such shares."""
MIN_STEPS = 5
"""Steps over which ranks are compared: in a single step, any other program can delay a rank."""
MAX_NAMED_RANKS = 8
"""Ranks that a sentence names."""


class Slow(NamedTuple):
    """A slow host. ``what``: data or forward. ``ranks`` are its ranks that are slow, ``seconds`` is the longest time that
    one of them takes in a step, and ``typical`` that of the others."""

    what: str
    host: str
    ranks: list[int]
    step: int
    seconds: float
    typical: float


class Stragglers:
    """Compares ranks at log points. What stays slow is reported once."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._step = 0
        self._summed_windows: dict[int, Window] = {}

    def update(self, beats: Mapping[int, Beat]) -> list[Slow]:
        """Take in the newest heartbeats of all ranks, and return what has become slow."""
        windows = {rank: beat.window for rank, beat in beats.items() if beat.window is not None}
        step = _common_step(windows, len(beats))
        if step is None or step <= self._step:
            return []
        self._step = step
        for rank, window in windows.items():
            self._summed_windows[rank] = window.after(self._summed_windows.get(rank))
        # With short log intervals, several windows make one comparison.
        if min(window.steps for window in self._summed_windows.values()) < MIN_STEPS:
            return []
        hosts = {rank: beat.host for rank, beat in beats.items()}
        slow = self._slow_ranks(hosts, self._summed_windows)
        self._summed_windows = {}
        newly_slow = [entry for entry in slow if (entry.what, entry.host) not in self._reported]
        # Hosts that are not slow any more can be reported again.
        self._reported = {(entry.what, entry.host) for entry in slow}
        return newly_slow

    def _slow_ranks(self, hosts: Mapping[int, str], windows: Mapping[int, Window]) -> list[Slow]:
        """Return slow ranks, those of a host together."""
        slow = []
        # Ranks wait for each other, so a step takes all of them about the same time.
        step_seconds = min(window.total / window.steps for window in windows.values())
        for what in ("data", "forward"):
            totals = {rank: getattr(window, what) for rank, window in windows.items()}
            if None in totals.values():
                continue
            seconds = {rank: totals[rank] / window.steps for rank, window in windows.items()}
            # The lower median: of two ranks, the faster one is typical.
            typical = sorted(seconds.values())[(len(seconds) - 1) // 2]
            slowest_normal = max(SLOW_RANK_RATIO * typical, typical + MIN_STEP_SHARE * step_seconds, typical + MIN_DIFFERENCE_S)
            slow_ranks_by_host: dict[str, list[int]] = {}
            for rank, rank_seconds in seconds.items():
                if rank_seconds > slowest_normal:
                    slow_ranks_by_host.setdefault(hosts[rank], []).append(rank)
            for host, ranks in slow_ranks_by_host.items():
                longest = max(seconds[rank] for rank in ranks)
                slow.append(Slow(what, host, ranks, self._step, longest, typical))
        return slow


def _common_step(windows: Mapping[int, Window], number_of_ranks: int) -> int | None:
    """Return the log point whose window all ranks have closed; None if there is none, and for a single rank."""
    # Heartbeats are not from one moment, so the newest windows of two ranks may be of different log points.
    steps = {window.step for window in windows.values()}
    if len(windows) < number_of_ranks or number_of_ranks < 2 or len(steps) > 1:
        return None
    return steps.pop()


def describe(slow: Slow) -> str:
    """Return what is slow as a sentence."""
    activity = {"data": "waiting for data", "forward": "forward passes"}.get(slow.what, slow.what)
    noun = "rank" if len(slow.ranks) == 1 else "ranks"
    numbers = ", ".join(map(str, slow.ranks[:MAX_NAMED_RANKS]))
    return (
        f"slow host: {activity} on {slow.host} ({noun} {numbers}): {slow.seconds:.2f} s a step; "
        f"on the other ranks: {slow.typical:.2f} s"
    )
