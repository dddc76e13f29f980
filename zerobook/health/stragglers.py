"""Find ranks that are slower than the others from the times in their heartbeats. The slowest rank delays all others."""

from collections.abc import Mapping
from typing import NamedTuple

from zerobook.health.judge import Beat
from zerobook.health.position import Window

# A rank is slow if all of these three conditions are true:
# It takes more than SLOW_RANK_RATIO times as long as a typical rank.
SLOW_RANK_RATIO = 2.0
# The difference is more than this share of the time of a step.
MIN_STEP_SHARE = 0.1
# The difference is more than this number of seconds. In steps of milliseconds, the operating system alone can cause such
# shares.
MIN_DIFFERENCE_S = 0.01
# Smallest number of steps over which ranks are compared. In a single step, any other program can delay a rank.
MIN_STEPS = 5
# Largest number of ranks that a message names.
MAX_NAMED_RANKS = 8


class Slow(NamedTuple):
    """A host with slow ranks.

    Attributes:
        what: ``data`` or ``forward``: the phase in which they are slow.
        ranks: the slow ranks of the host.
        seconds: the longest time that one of them takes in a step for this phase.
        typical: the time that a typical rank takes.
    """

    what: str
    host: str
    ranks: list[int]
    step: int
    seconds: float
    typical: float


class Stragglers:
    """Compares the times of ranks at log points. A host that stays slow is reported once."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._step = 0
        self._summed_windows: dict[int, Window] = {}

    def update(self, beats: Mapping[int, Beat]) -> list[Slow]:
        """Process the newest heartbeats of all ranks, and return the hosts that have become slow."""
        windows = {rank: beat.window for rank, beat in beats.items() if beat.window is not None}
        step = _find_common_step(windows, len(beats))
        if step is None or step <= self._step:
            return []
        self._step = step
        for rank, window in windows.items():
            self._summed_windows[rank] = window.joined_with(self._summed_windows.get(rank))
        # If log intervals are short, add up several windows for one comparison.
        if min(window.steps for window in self._summed_windows.values()) < MIN_STEPS:
            return []
        hosts = {rank: beat.host for rank, beat in beats.items()}
        slow = self._find_slow(hosts, self._summed_windows)
        self._summed_windows = {}
        newly_slow = [entry for entry in slow if (entry.what, entry.host) not in self._reported]
        # If a host is not slow any more, and becomes slow later, it is reported again.
        self._reported = {(entry.what, entry.host) for entry in slow}
        return newly_slow

    def _find_slow(self, hosts: Mapping[int, str], windows: Mapping[int, Window]) -> list[Slow]:
        """Return the hosts with slow ranks.

        Args:
            hosts: rank -> its host.
            windows: rank -> its times.
        """
        slow = []
        # Ranks wait for each other, so a step takes all of them about the same time.
        step_seconds = min(window.total / window.steps for window in windows.values())
        for what in ("data", "forward"):
            totals = {rank: getattr(window, what) for rank, window in windows.items()}
            # Forward passes are not compared if they wait for other ranks.
            if None in totals.values():
                continue
            seconds = {rank: totals[rank] / window.steps for rank, window in windows.items()}
            # The typical time is the lower median, so that of two ranks the faster one is typical.
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


def _find_common_step(windows: Mapping[int, Window], number_of_ranks: int) -> int | None:
    """Return the log point at which the windows of all ranks end.

    None if they end at different ones, if a rank has no window, or for a single rank.
    """
    # Heartbeats are not from the same moment, so one rank's may have the window of a later log point.
    steps = {window.step for window in windows.values()}
    if len(windows) < number_of_ranks or number_of_ranks < 2 or len(steps) > 1:
        return None
    return steps.pop()


def describe(slow: Slow) -> str:
    """Return a sentence with the host, its first `MAX_NAMED_RANKS` slow ranks, and the slowest and a typical rank's time."""
    activity = {"data": "waiting for data", "forward": "forward passes"}.get(slow.what, slow.what)
    noun = "rank" if len(slow.ranks) == 1 else "ranks"
    numbers = ", ".join(map(str, slow.ranks[:MAX_NAMED_RANKS]))
    return (
        f"slow host: {activity} on {slow.host} ({noun} {numbers}): {slow.seconds:.2f} s a step; "
        f"on a typical rank: {slow.typical:.2f} s"
    )
