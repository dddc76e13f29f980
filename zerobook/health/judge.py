"""Decide from the heartbeats of all ranks which rank blocks a run. The `Judge` has no clock, sockets or threads of its own."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from zerobook.health.position import FINISHED_PHASES, Window
from zerobook.health.presence import Endpoint, Presence
from zerobook.utils.ranges import ranges

# Largest number of ranges of ranks that a verdict lists for each position at which ranks wait.
MAX_RANK_RANGES = 16
# Largest number of positions at which ranks wait that a verdict lists.
MAX_POSITIONS = 8
# If a rank of a host is silent, its other ranks count as silent after this share of the time.
NEARLY_SILENT = 0.75
# A process sends its last heartbeat again with this error before it asks its GPU, since a GPU that hangs may block it.
GPU_SILENT = "its GPU has not answered"
Kind = Literal["silent", "ended", "stuck", "together", "failed", "lost"]
# A first and a last rank.
RankRange = tuple[int, int]


class Beat(NamedTuple):
    """One heartbeat of a rank.

    Attributes:
        number: counts the heartbeats of the rank.
        entered: number of phases that the process has entered so far.
        seconds: time that it has spent in ``phase`` without progress.
        limit: time that it may spend so.
        error: the error that it failed with, or `GPU_SILENT`.
        window: its times between the last two log points.
        endpoint: address and port at which it listens, see `zerobook.health.presence`.
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


# Stands for the heartbeat of a rank that has not sent any.
NO_BEAT = Beat(0, "", 0, "start", 0, 0, 0.0, 0.0)


class Verdict(NamedTuple):
    """The ranks that block the run, and why. ``kind`` is one of

    ``silent``    the ranks have sent no heartbeat for ``seconds``
    ``ended``     the processes of the ranks have ended without a message
    ``stuck``     the ranks are in a phase for longer than its limit, while others wait for them
    ``together``  all ranks are in the same phase for longer than its limit
    ``failed``    the ranks have ended with an error
    ``lost``      the store of the run, on the first host, does not answer

    Attributes:
        phase: phase of the first of ``ranks``, and ``step`` its step.
        others: (phase, step, `rank_ranges`) of each position at which other ranks wait. Every rank reads the verdict, so it has
            ranges, whose number does not grow with that of the ranks.
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
    """Decides when a run hangs, and which ranks block it.

    A rank that has sent no heartbeat for ``silence`` seconds is gone, whatever its phase. Otherwise, the rank that has entered
    the fewest phases is behind, and the others wait for it. So only its time is compared with the limit of its phase.
    Heartbeats of two ranks are not from the same moment, so a later heartbeat has to confirm that a rank is behind.

    Args:
        silence: seconds without a heartbeat after which a rank counts as gone.
        grace: seconds that ranks have to end by themselves after one of them failed.
        now: seconds of the clock that all later calls use, too. The silence of every rank is counted from here at first.

    Attributes:
        beats: rank -> its newest heartbeat.
        last_heard: rank -> when that heartbeat came; ``now`` of the start for a rank without heartbeats.
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
        """Process the newest heartbeat of each rank. Return the verdict if the run hangs, else None.

        Args:
            beats: rank -> its newest heartbeat. A rank that has not sent any is missing.
        """
        for rank, beat in beats.items():
            # The store keeps the last heartbeat of a rank for ever. Only a new number shows that the rank is alive.
            if beat.number != self.beats.get(rank, NO_BEAT).number:
                self.last_heard[rank] = now
            self.beats[rank] = beat
        if any(beat.phase == "failed" for beat in self.beats.values()):
            # The others wait for the failed rank, so none of them is judged as stuck.
            return self._judge_failed(now) or self.judge_silent(now, self.silence)
        return self.judge_silent(now, self.silence) or self._judge_behind()

    def judge_silent(self, now: float, silence: float) -> Verdict | None:
        """Return the verdict on ranks that have sent no heartbeat for ``silence`` seconds; None if there are none."""
        quiet_seconds: dict[int, float] = {}
        for rank, heard in self.last_heard.items():
            if now - heard > silence * NEARLY_SILENT and self.beats.get(rank, NO_BEAT).phase not in FINISHED_PHASES:
                quiet_seconds[rank] = now - heard
        longest = max(quiet_seconds.values(), default=0.0)
        if longest <= silence:
            return None
        # The ranks of a lost host have sent their last heartbeats at slightly different times. Report all of them together.
        silent_hosts = {self._host_of(rank) for rank, seconds in quiet_seconds.items() if seconds > silence}
        silent_ranks = [rank for rank in quiet_seconds if self._host_of(rank) in silent_hosts]
        return self._make_verdict("silent", silent_ranks, longest)

    def judge_ended(self, now: float, presence: Presence) -> Verdict | None:
        """Return the verdict on silent ranks whose process has ended, and does not only hang; None if there are none."""
        ranks = {beat.endpoint: rank for rank, beat in self.beats.items() if beat.phase not in FINISHED_PHASES}
        silences = {endpoint: now - self.last_heard[rank] for endpoint, rank in ranks.items()}
        ended_ranks = sorted(ranks[endpoint] for endpoint in presence.find_ended(silences))
        if not ended_ranks:
            return None
        return self._make_verdict("ended", ended_ranks, now - self.last_heard[ended_ranks[0]])

    # Returns the verdict on failed ranks; None during the grace, in which the launcher may stop the other ranks.
    def _judge_failed(self, now: float) -> Verdict | None:
        if self._failed_since is None:
            self._failed_since = now
        seconds = now - self._failed_since
        if seconds < self.grace:
            return None
        return self._make_verdict("failed", [rank for rank, beat in self.beats.items() if beat.phase == "failed"], seconds)

    # Returns the verdict on the ranks that have entered the fewest phases, if the time of all of them exceeds its limit.
    def _judge_behind(self) -> Verdict | None:
        running = {rank: beat for rank, beat in self.beats.items() if beat.phase not in FINISHED_PHASES}
        # A rank that has not sent any heartbeat may be the one that is behind.
        if len(self.beats) < len(self.last_heard) or not running:
            return None
        fewest_phases = min(beat.entered for beat in running.values())
        behind = {rank: beat for rank, beat in running.items() if beat.entered == fewest_phases}
        if any(beat.seconds <= beat.limit for beat in behind.values()):
            # At least one of them is within its limit, and may still be at work.
            self._suspects = {}
            return None
        if not self._confirm_suspects(behind):
            return None
        kind: Kind = "stuck"
        # All ranks of a run with several ranks are behind.
        if len(behind) > 1 and len(behind) == len(self.last_heard):
            kind = "together"
        # The shortest time is true of all of these ranks.
        return self._make_verdict(kind, list(behind), min(beat.seconds for beat in behind.values()))

    def _confirm_suspects(self, behind: Mapping[int, Beat]) -> bool:
        """Return whether each rank has sent a later heartbeat from the phase in which it was first seen behind.

        Without a later one, the rank may have entered the next phase since, as one that has just waited for a slow rank.
        """
        suspects: dict[int, Beat] = {}
        for rank, beat in behind.items():
            earlier = self._suspects.get(rank)
            if earlier is None or earlier.entered != beat.entered:
                earlier = beat
            suspects[rank] = earlier
        self._suspects = suspects
        return all(beat.number > suspects[rank].number for rank, beat in behind.items())

    def _host_of(self, rank: int) -> str:
        """Return the rank's host. For a rank that has not sent any heartbeat, return a name that no other rank has."""
        beat = self.beats.get(rank)
        return beat.host if beat is not None else f"rank {rank}"

    def _make_verdict(self, kind: Kind, ranks: Sequence[int], seconds: float) -> Verdict:
        """Return the verdict on ``ranks``, with the phase and the step of the first of them."""
        blamed_ranks = sorted(ranks)
        blamed_beats = [self.beats.get(rank, NO_BEAT) for rank in blamed_ranks]
        errors = [beat.error for beat in blamed_beats if beat.error]
        # The host of a rank that has not sent any heartbeat is not known.
        hosts = {beat.host for beat in blamed_beats} - {""}
        return Verdict(
            kind=kind,
            ranks=blamed_ranks,
            hosts=sorted(hosts),
            phase=blamed_beats[0].phase,
            step=blamed_beats[0].step,
            seconds=round(seconds, 1),
            others=self._list_waiting(blamed_ranks),
            error=errors[0] if errors else "",
        )

    def _list_waiting(self, blamed_ranks: Sequence[int]) -> list[tuple[str, int, list[RankRange]]]:
        """Return (phase, step, ranges of ranks) of the positions at which the other ranks wait."""
        ranks_by_position: dict[tuple[str, int], list[int]] = {}
        for rank, beat in sorted(self.beats.items()):
            if rank not in blamed_ranks and beat.phase not in FINISHED_PHASES:
                ranks_by_position.setdefault((beat.phase, beat.step), []).append(rank)
        waiting = [(phase, step, rank_ranges(ranks)) for (phase, step), ranks in ranks_by_position.items()]
        return waiting[:MAX_POSITIONS]


def describe(verdict: Verdict) -> str:
    """Return the verdict as text, without stacks."""
    hosts = ", ".join(verdict.hosts)
    ranks_on_hosts = f"{_name_ranks(rank_ranges(verdict.ranks))} on {hosts or 'an unknown host'}"
    position = f'in phase "{verdict.phase}" of step {verdict.step}'
    if verdict.kind == "silent":
        event = f"{ranks_on_hosts} sent no heartbeat for {verdict.seconds:.0f} s; last seen {position}"
        if verdict.error == GPU_SILENT:
            event += f", and {GPU_SILENT}"
    elif verdict.kind == "ended":
        event = f"the process of {ranks_on_hosts} ended without a message; last seen {position}"
    elif verdict.kind == "lost":
        event = f"{hosts or 'the first host'} cannot be reached: {verdict.error}"
    elif verdict.kind == "stuck":
        event = f"{ranks_on_hosts} made no progress for {verdict.seconds:.0f} s {position}"
    elif verdict.kind == "together":
        event = f"no rank made progress for {verdict.seconds:.0f} s: all are {position}"
    else:
        event = f"{ranks_on_hosts} failed {position}"
        if verdict.error:
            event += f": {verdict.error}"
    waiting = [f'{_name_ranks(waiting_ranks)} in "{phase}" of step {step}' for phase, step, waiting_ranks in verdict.others]
    if not waiting:
        return f"{event}."
    return f"{event}. Waiting: {'; '.join(waiting)}."


def rank_ranges(ranks: Sequence[int]) -> list[RankRange]:
    """Return the ranges that ranks form, each a pair of its first and last rank; at most `MAX_RANK_RANGES`.

    >>> rank_ranges([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    return [(start, end - 1) for start, end in ranges(ranks)[:MAX_RANK_RANGES]]


def _name_ranks(ranks: Sequence[RankRange]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``.

    >>> _name_ranks([(3, 3)]), _name_ranks([(0, 2), (5, 5)])
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
