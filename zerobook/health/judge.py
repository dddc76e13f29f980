"""Decision which rank blocks a run, from the heartbeats of all ranks. A state machine without clocks, sockets or threads."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from zerobook.health.position import FINISHED_PHASES, Window
from zerobook.health.presence import Endpoint, Presence
from zerobook.utils.ranges import ranges

MAX_RANK_RANGES = 16
"""Ranges of ranks that a verdict lists for a place."""
MAX_PLACES = 8
"""Places where ranks wait that a verdict lists."""
NEARLY_SILENT = 0.75
"""Share of the silence after which a rank is gone together with a silent rank of its host."""
GPU_SILENT = "its GPU has not answered"
"""The last heartbeat is sent again with this error before its process asks the GPU, which may keep it from sending others."""
Kind = Literal["silent", "ended", "stuck", "together", "failed", "lost"]
RankRange = tuple[int, int]
"""A first and a last rank."""


class Beat(NamedTuple):
    """One heartbeat of a rank.

    ``number`` counts the heartbeats. ``seconds`` is the time that the process has spent in ``phase`` without progress, and
    ``limit`` the time that it may. ``error`` is the error that it failed with, or `GPU_SILENT`. ``window`` has its times
    between the last two log points. ``endpoint`` is where the process listens, see `presence`.
    """

    number: int
    host: str
    pid: int
    phase: str
    step: int
    entered: int
    seconds: float
    limit: float
    error: str = ""
    window: Window | None = None
    endpoint: Endpoint = ("", 0)


NO_BEAT = Beat(0, "", 0, "start", 0, 0, 0.0, 0.0)
"""In place of the heartbeat of a rank that was never heard."""


class Verdict(NamedTuple):
    """The ranks that block the run.

    ``kind``: ``silent`` ranks have sent no heartbeat for ``seconds``; processes of ``ended`` ranks
    ended without a message; ``stuck`` ranks are in a phase that exceeded its limit
    while others wait for them; ``together``: all ranks are in the same phase, and none gets on; ``failed`` ranks ended with an
    error; ``lost``: the store of the run, on the first host, does not answer. ``others`` has the phase, step and ranks that
    wait, as ``(phase, step, ranges)`` with `rank_ranges`: every rank reads the verdict, so its size must not grow with them.
    """

    kind: Kind
    ranks: Annotated[list[int], Field(min_length=1)]
    hosts: list[str]
    phase: str
    step: int
    seconds: float
    others: list[tuple[str, int, Annotated[list[RankRange], Field(min_length=1)]]]
    error: str = ""


class Judge:
    """Decides when a run hangs.

    A rank that sent no heartbeat for ``silence`` seconds is gone, whatever its phase. Otherwise, the rank that entered the
    fewest phases is behind, and the others wait for it: only its time counts, against the limit of its phase. Heartbeats of
    two ranks are not from the same moment, so a later heartbeat has to confirm that a rank is behind.

    Args:
        silence: seconds without a heartbeat after which a rank counts as gone.
        grace: seconds that ranks have to end by themselves after one of them failed.
        now: seconds of the clock that all later calls use; the start for ranks that never send a heartbeat.

    Attributes:
        beats: rank -> its newest heartbeat.
        last_heard: rank -> when that heartbeat came.
    """

    def __init__(self, world_size: int, silence: float, grace: float, now: float):
        self.silence = silence
        self.grace = grace
        self.beats: dict[int, Beat] = {}
        self.last_heard = dict.fromkeys(range(world_size), now)
        self._failed_since: float | None = None
        # Ranks that were behind at the last update, with the heartbeat that first showed it.
        self._suspects: dict[int, Beat] = {}

    def update(self, now: float, beats: Mapping[int, Beat]) -> Verdict | None:
        """Take in the newest heartbeat of each rank, and return the verdict if the run hangs."""
        for rank, beat in beats.items():
            # The store repeats a rank's last heartbeat for ever, and only a new number is a sign of the rank.
            if beat.number != self.beats.get(rank, NO_BEAT).number:
                self.last_heard[rank] = now
            self.beats[rank] = beat
        if any(beat.phase == "failed" for beat in self.beats.values()):
            # The others wait for the failed rank, so none of them is judged as stuck.
            return self._judge_failed(now) or self.judge_silent(now, self.silence)
        return self.judge_silent(now, self.silence) or self._judge_behind()

    def judge_silent(self, now: float, silence: float) -> Verdict | None:
        """Return the verdict for ranks without a heartbeat for ``silence`` seconds. They may be fewer than the limit after a
        connection to some rank broke, since it is known then that one of them is gone."""
        quiet_seconds: dict[int, float] = {}
        for rank, heard in self.last_heard.items():
            if now - heard > silence * NEARLY_SILENT and self.beats.get(rank, NO_BEAT).phase not in FINISHED_PHASES:
                quiet_seconds[rank] = now - heard
        longest = max(quiet_seconds.values(), default=0.0)
        if longest <= silence:
            return None
        # Ranks of a host that is lost have sent their last heartbeats at slightly different times.
        silent_hosts = {self._host(rank) for rank, seconds in quiet_seconds.items() if seconds > silence}
        silent_ranks = [rank for rank in quiet_seconds if self._host(rank) in silent_hosts]
        return self._verdict("silent", silent_ranks, longest)

    def judge_ended(self, now: float, presence: Presence) -> Verdict | None:
        """Return the verdict for silent ranks whose process has ended. The connections of a hanging one stay as they are."""
        running = {beat.endpoint: rank for rank, beat in self.beats.items() if beat.phase not in FINISHED_PHASES}
        silences = {endpoint: now - self.last_heard[rank] for endpoint, rank in running.items()}
        ended = sorted(running[endpoint] for endpoint in presence.find_ended(silences))
        if not ended:
            return None
        return self._verdict("ended", ended, now - self.last_heard[ended[0]])

    def _judge_failed(self, now: float) -> Verdict | None:
        if self._failed_since is None:
            self._failed_since = now
        seconds = now - self._failed_since
        # Until then the launcher may stop the other ranks, and no verdict is needed.
        if seconds < self.grace:
            return None
        return self._verdict("failed", [rank for rank, beat in self.beats.items() if beat.phase == "failed"], seconds)

    def _judge_behind(self) -> Verdict | None:
        running = {rank: beat for rank, beat in self.beats.items() if beat.phase not in FINISHED_PHASES}
        # A rank that was never heard may be the one that is behind.
        if len(self.beats) < len(self.last_heard) or not running:
            return None
        fewest_phases = min(beat.entered for beat in running.values())
        behind = {rank: beat for rank, beat in running.items() if beat.entered == fewest_phases}
        if any(beat.seconds <= beat.limit for beat in behind.values()):
            # One of them still works, within its limit.
            self._suspects = {}
            return None
        if not self._confirm_suspects(behind):
            return None
        kind: Kind = "stuck"
        if 1 < len(behind) == len(self.last_heard):
            kind = "together"
        # The shortest time, so that it is true of all of these ranks.
        return self._verdict(kind, list(behind), min(beat.seconds for beat in behind.values()))

    def _confirm_suspects(self, behind: Mapping[int, Beat]) -> bool:
        """Return whether a later heartbeat of each rank shows it in the same phase as the one that first showed it behind.

        A rank that waited for a slow one, and got on since, is behind until its next heartbeat.
        """
        suspects: dict[int, Beat] = {}
        for rank, beat in behind.items():
            earlier = self._suspects.get(rank)
            if earlier is None or earlier.entered != beat.entered:
                earlier = beat
            suspects[rank] = earlier
        self._suspects = suspects
        return all(beat.number > suspects[rank].number for rank, beat in behind.items())

    def _host(self, rank: int) -> str:
        """Return the rank's host, or a name of its own if the rank never sent a heartbeat."""
        beat = self.beats.get(rank)
        return beat.host if beat is not None else f"rank {rank}"

    def _verdict(self, kind: Kind, ranks: Sequence[int], seconds: float) -> Verdict:
        """Return the verdict on ``ranks``, with the phase and the step of the first of them."""
        blamed_ranks = sorted(ranks)
        blamed_beats = [self.beats.get(rank, NO_BEAT) for rank in blamed_ranks]
        # A rank that was never heard has no host.
        hosts = {beat.host for beat in blamed_beats} - {""}
        return Verdict(
            kind=kind,
            ranks=blamed_ranks,
            hosts=sorted(hosts),
            phase=blamed_beats[0].phase,
            step=blamed_beats[0].step,
            seconds=round(seconds, 1),
            others=self._waiting(blamed_ranks),
            error=next(filter(None, (beat.error for beat in blamed_beats)), ""),
        )

    def _waiting(self, blamed_ranks: Sequence[int]) -> list[tuple[str, int, list[RankRange]]]:
        """Return (phase, step, ranges of ranks) of the places where the other ranks wait."""
        ranks_by_position: dict[tuple[str, int], list[int]] = {}
        for rank, beat in sorted(self.beats.items()):
            if rank not in blamed_ranks and beat.phase not in FINISHED_PHASES:
                ranks_by_position.setdefault((beat.phase, beat.step), []).append(rank)
        waiting = [(phase, step, rank_ranges(ranks)) for (phase, step), ranks in ranks_by_position.items()]
        return waiting[:MAX_PLACES]


def describe(verdict: Verdict) -> str:
    """Return the verdict as text, without stacks."""
    hosts = ", ".join(verdict.hosts)
    ranks_on_hosts = f"{_named(rank_ranges(verdict.ranks))} on {hosts or 'an unknown host'}"
    position = f'in phase "{verdict.phase}" of step {verdict.step}'
    if verdict.kind == "silent":
        what = f"{ranks_on_hosts} sent no heartbeat for {verdict.seconds:.0f} s; last seen {position}"
        if verdict.error == GPU_SILENT:
            what += f", and {GPU_SILENT}"
    elif verdict.kind == "ended":
        what = f"the process of {ranks_on_hosts} ended without a message; last seen {position}"
    elif verdict.kind == "lost":
        what = f"{hosts or 'the first host'} cannot be reached: {verdict.error}"
    elif verdict.kind == "stuck":
        what = f"{ranks_on_hosts} made no progress for {verdict.seconds:.0f} s {position}"
    elif verdict.kind == "together":
        what = f"no rank made progress for {verdict.seconds:.0f} s: all are {position}"
    else:
        what = f"{ranks_on_hosts} failed {position}"
        if verdict.error:
            what += f": {verdict.error}"
    waiting = [f'{_named(waiting_ranks)} in "{phase}" of step {step}' for phase, step, waiting_ranks in verdict.others]
    if not waiting:
        return f"{what}."
    return f"{what}. Waiting: {'; '.join(waiting)}."


def rank_ranges(ranks: Sequence[int]) -> list[RankRange]:
    """Return ranks as pairs of a first and a last one, at most `MAX_RANK_RANGES`.

    >>> rank_ranges([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    return [(start, end - 1) for start, end in ranges(ranks)[:MAX_RANK_RANGES]]


def _named(ranks: Sequence[RankRange]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``.

    >>> _named([(3, 3)]), _named([(0, 2), (5, 5)])
    ('rank 3', 'ranks 0-2, 5')
    """
    if len(ranks) == 1 and ranks[0][0] == ranks[0][1]:
        return f"rank {ranks[0][0]}"
    numbers = []
    for first, last in ranks:
        numbers.append(str(first) if first == last else f"{first}-{last}")
    listed = f"ranks {', '.join(numbers)}"
    # A verdict has no more ranges than this, so some may have been left out.
    if len(ranks) == MAX_RANK_RANGES:
        listed += " and others"
    return listed
