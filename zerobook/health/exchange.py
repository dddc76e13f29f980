"""Heartbeats through a store: each rank writes its own and reads the verdict, and rank 0 reads and judges all of them.

A rank's work does not depend on the number of ranks, and rank 0's grows linearly with it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from zerobook.health.judge import Beat, Judge, Verdict
from zerobook.health.stragglers import Slow, Stragglers
from zerobook.utils.messages import MessageError

if TYPE_CHECKING:
    from torch.distributed import Store

    from zerobook.utils.messages import SignedStore

PER_TIMEOUT = 30
"""Heartbeats in ``hang_timeout`` seconds, at most one every `SLOWEST_S`."""
SLOWEST_S = 5.0
GRACE_S = 10.0
"""Seconds that the other ranks have to end by themselves after one failed: their launcher may stop them."""
GONE = 2.5
"""Intervals without a heartbeat after which a rank counts as gone, if a connection to some rank is broken."""
BROKEN = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
"""Beginnings of a failed rank's ``error`` that can be those of a connection."""


class Exchange:
    """The heartbeats of a rank. It has no threads and no clock of its own.

    Attributes:
        interval: seconds between two heartbeats.
        verdict: the ranks that hold up the run, once it is known.
        pulsed: when the last sign of rank 0 came.
        main_host: rank 0's host, once it is known.
        slow: on rank 0, ranks and links that have become slow; the reader empties it.
    """

    def __init__(self, store: Store | SignedStore, rank: int, world_size: int, hang_timeout: float, now: float):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.interval = min(SLOWEST_S, hang_timeout / PER_TIMEOUT)
        self.verdict: Verdict | None = None
        self.pulsed, self.main_host = now, ""
        self.slow: list[Slow] = []
        self._pulse = ""
        self._stragglers = Stragglers()
        self._judge = Judge(world_size, hang_timeout, GRACE_S, now) if rank == 0 else None

    def step(self, beat: Beat, now: float) -> None:
        """Send a heartbeat, and read or make the verdict. It may block while the store is not reached."""
        self.store.set(f"beat/{self.rank}", beat.encode())
        if self._judge is not None:
            verdict = self._judge_all(self._judge, now)
            self.store.set("pulse", f"{beat.number} {beat.host}")
            if verdict is not None and self.verdict is None:
                self.store.set("verdict", verdict.encode())
                self.verdict = verdict
        elif self.verdict is None:
            self.verdict = self._read_verdict()
            if self.verdict is not None:
                self.store.set(f"read/{self.rank}", "")
            elif self.store.check(["pulse"]):
                self._read_pulse(now)

    def _read_verdict(self) -> Verdict | None:
        """Return rank 0's verdict; None where there is none, or where something else stands in its place."""
        if not self.store.check(["verdict"]):
            return None
        with suppress(MessageError):
            verdict = Verdict.decode(self.store.get("verdict"))
            if all(0 <= rank < self.world_size for rank in verdict.ranks):
                return verdict
        return None

    def _read_pulse(self, now: float) -> None:
        pulse = self.store.get("pulse").decode(errors="replace")
        if pulse and pulse != self._pulse:
            self._pulse = pulse
            self.pulsed = now
            self.main_host = pulse.partition(" ")[2]

    def _judge_all(self, judge: Judge, now: float) -> Verdict | None:
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        there = [rank for rank, key in enumerate(keys) if rank in judge.beats or self.store.check([key])]
        texts = self.store.multi_get([keys[rank] for rank in there])
        beats = {}
        for rank, text in zip(there, texts, strict=True):
            # What is no heartbeat counts as none: the rank's own next one takes its place.
            with suppress(MessageError):
                beats[rank] = Beat.decode(text)
        if len(beats) == self.world_size:
            self.slow += self._stragglers.see(beats)
        if any(beat.phase == "failed" and beat.error.startswith(BROKEN) for beat in beats.values()):
            return judge.see(now, beats) or judge.missing(now, GONE * self.interval)
        return judge.see(now, beats)
