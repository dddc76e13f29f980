"""Decision which rank holds up a run, from the heartbeats of all ranks. A state machine without clocks, sockets or threads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from zerobook.health.position import Window
from zerobook.utils import messages

MOST_SPANS, MOST_PLACES = 16, 8
"""Limits of a verdict's size: spans of ranks, and places where ranks wait."""
NEARLY = 0.75
"""Part of the silence after which a rank is gone together with a silent rank of its host."""
Kind = Literal["silent", "stuck", "together", "failed", "lost"]


class Beat(NamedTuple):
    """One heartbeat of a rank.

    ``number`` counts the heartbeats. ``seconds`` is the time that the process has spent in ``phase`` without progress, and
    ``limit`` the time that it may. ``error`` is the error that it failed with. ``exchange`` is the seconds that its last
    exchange with the store took, ``window`` its times between the last two log points.
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
    exchange: float = 0.0
    window: Window | None = None

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str | bytes) -> Beat:
        """Return the heartbeat that a store holds. Raises `MessageError` for anything else."""
        beat: Beat = messages.read(text, Beat)
        return beat


class Verdict(NamedTuple):
    """The ranks that hold up the run.

    ``kind``: ``silent`` ranks have sent no heartbeat for ``seconds``; ``stuck`` ranks are in a phase that exceeded its limit
    while others wait for them; ``together``: all ranks are in the same phase, and none gets on; ``failed`` ranks ended with an
    error; ``lost``: the store of the run, on the first host, does not answer. ``others`` has the phase, step and ranks that
    wait, as ``(phase, step, spans)`` with `spans` of ranks: every rank reads the verdict, so its size must not grow with them.
    """

    kind: Kind
    ranks: Annotated[list[int], Field(min_length=1)]
    hosts: list[str]
    phase: str
    step: int
    seconds: float
    others: list[tuple[str, int, Annotated[list[tuple[int, int]], Field(min_length=1)]]]
    error: str = ""

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str | bytes) -> Verdict:
        """Return the verdict that a store holds. Raises `MessageError` for anything else."""
        verdict: Verdict = messages.read(text, Verdict)
        return verdict


class Judge:
    """Decides when a run hangs.

    A rank that sent no heartbeat for ``silence`` seconds is gone, whatever its phase. Otherwise, the rank that entered the
    fewest phases is behind, and the others wait for it: only its time counts, against the limit of its phase. Heartbeats of
    two ranks are not from the same moment, so a later heartbeat has to confirm that a rank is behind.

    Args:
        silence: seconds without a heartbeat after which a rank counts as gone.
        grace: seconds that ranks have to end by themselves after one of them failed.
        now: seconds of the clock that all later calls use; the start for ranks that never send a heartbeat.
    """

    def __init__(self, world_size: int, silence: float, grace: float, now: float):
        self.silence, self.grace = silence, grace
        self.beats: dict[int, Beat] = {}
        self.seen = dict.fromkeys(range(world_size), now)
        self._failed_since: float | None = None
        self._suspects: dict[int, Beat] = {}

    def see(self, now: float, beats: Mapping[int, Beat]) -> Verdict | None:
        """Take in the newest heartbeat of each rank, and return the verdict if the run hangs."""
        for rank, beat in beats.items():
            if rank not in self.beats or beat.number != self.beats[rank].number:
                self.beats[rank], self.seen[rank] = beat, now
        if any(beat.phase == "failed" for beat in self.beats.values()):
            return self._failed(now) or self._silent(now, self.silence)  # the others wait for the failed one
        return self._silent(now, self.silence) or self._behind()

    def missing(self, now: float, silence: float) -> Verdict | None:
        """Return the verdict for ranks without a heartbeat for ``silence`` seconds, less than the limit: after a connection to
        some rank broke, it is known that one of them is gone."""
        return self._silent(now, silence)

    def _silent(self, now: float, silence: float) -> Verdict | None:
        quiet = {
            rank: now - seen
            for rank, seen in self.seen.items()
            if now - seen > silence * NEARLY and self._phase(rank) not in ("ended", "failed")
        }
        if max(quiet.values(), default=0.0) <= silence:
            return None
        # ranks of a host that is lost have sent their last heartbeats at slightly different times
        hosts = {self._host(rank) for rank, seconds in quiet.items() if seconds > silence}
        ranks = [rank for rank, seconds in quiet.items() if seconds > silence or self._host(rank) in hosts]
        return self._verdict("silent", ranks, max(quiet.values()))

    def _failed(self, now: float) -> Verdict | None:
        ranks = [rank for rank, beat in self.beats.items() if beat.phase == "failed"]
        if not ranks:
            return None
        self._failed_since = now if self._failed_since is None else self._failed_since
        if now - self._failed_since < self.grace:
            return None
        return self._verdict("failed", ranks, now - self._failed_since)

    def _behind(self) -> Verdict | None:
        running = {rank: beat for rank, beat in self.beats.items() if beat.phase not in ("ended", "failed")}
        if len(self.beats) < len(self.seen) or not running:
            return None
        first = min(beat.entered for beat in running.values())
        behind = [rank for rank, beat in running.items() if beat.entered == first]
        over = [rank for rank in behind if running[rank].seconds > running[rank].limit]
        if len(over) < len(behind):
            self._suspects = {}
            return None  # one of them still works, within its limit
        # a rank that waited for a slow one, and got on since, is behind until its next heartbeat
        before, confirmed = self._suspects, True
        self._suspects = {}
        for rank in behind:
            known = before.get(rank)
            if known is None or known.entered != first:
                known = running[rank]
            confirmed = confirmed and running[rank].number > known.number
            self._suspects[rank] = known
        if not confirmed:
            return None
        together = 1 < len(behind) == len(self.seen)
        return self._verdict("together" if together else "stuck", behind, min(running[rank].seconds for rank in behind))

    def _host(self, rank: int) -> str:
        """Return the rank's host, or a name of its own where the rank never sent a heartbeat."""
        return self.beats[rank].host if rank in self.beats else f"rank {rank}"

    def _phase(self, rank: int) -> str:
        return self.beats[rank].phase if rank in self.beats else "start"

    def _verdict(self, kind: Kind, ranks: Sequence[int], seconds: float) -> Verdict:
        known = [self.beats[rank] for rank in ranks if rank in self.beats]
        others: dict[tuple[str, int], list[int]] = {}
        for rank, beat in sorted(self.beats.items()):
            if rank not in ranks and beat.phase not in ("ended", "failed"):
                others.setdefault((beat.phase, beat.step), []).append(rank)
        waiting = [(*where, spans(found)) for where, found in list(others.items())[:MOST_PLACES]]
        return Verdict(
            kind, sorted(ranks), sorted({beat.host for beat in known}), known[0].phase if known else "start",
            known[0].step if known else 0, round(seconds, 1), waiting,
            next((beat.error for beat in known if beat.error), ""),
        )  # fmt: skip


def describe(verdict: Verdict) -> str:
    """Return the verdict as text, without stacks."""
    who = f"{_ranks(verdict.ranks)} on {', '.join(verdict.hosts) or 'an unknown host'}"
    where = f'in phase "{verdict.phase}" of step {verdict.step}'
    seen = "" if verdict.phase == "unknown" else f"; last seen {where}"
    what = {
        "silent": f"{who} sent no heartbeat for {verdict.seconds:.0f} s{seen}",
        "lost": f"{', '.join(verdict.hosts) or 'the first host'} cannot be reached: {verdict.error}",
        "stuck": f"{who} made no progress for {verdict.seconds:.0f} s {where}",
        "together": f"no rank made progress for {verdict.seconds:.0f} s: all are {where}",
        "failed": f"{who} failed {where}" + (f": {verdict.error}" if verdict.error else ""),
    }[verdict.kind]
    waiting = [f'{_named(found)} in "{phase}" of step {step}' for phase, step, found in verdict.others]
    return f"{what}." + (f" Waiting: {'; '.join(waiting)}." if waiting else "")


def spans(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranks as pairs of a first and a last one, at most `MOST_SPANS`.

    >>> spans([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found[:MOST_SPANS]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``.

    >>> _ranks([3]), _ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    return _named(spans(ranks))


def _named(found: Sequence[tuple[int, int]]) -> str:
    several = len(found) > 1 or found[0][0] < found[0][1]
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
    return f"rank{'s' if several else ''} {words}{' and others' if len(found) == MOST_SPANS else ''}"
