"""Heartbeats through a store: each rank writes its own and reads the verdict, and rank 0 reads and judges all of them.

A rank's work does not depend on the number of ranks, and rank 0's grows linearly with it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from zerobook.health.judge import NO_BEAT, Beat, Judge, Verdict
from zerobook.health.presence import Presence
from zerobook.health.stragglers import Slow, Stragglers
from zerobook.utils import messages
from zerobook.utils.messages import MessageError

if TYPE_CHECKING:
    from torch.distributed import Store

    from zerobook.utils.messages import SignedStore

BEATS_PER_TIMEOUT = 30
"""Heartbeats in ``hang_timeout`` seconds, unless `MAX_INTERVAL_S` asks for more."""
MAX_INTERVAL_S = 5.0
"""Seconds between two heartbeats, at most."""
GRACE_S = 20.0
"""Seconds that the other ranks have to end by themselves after one failed: their launcher may stop them. The end of a process
that made the failed one fail is found before that."""
GONE_INTERVALS = 2.5
"""Intervals without a heartbeat after which a rank counts as gone, if a connection to some rank is broken."""
MISSED_INTERVALS = 1.5
"""Intervals without a heartbeat after which the process of a rank is looked for."""
CONNECTION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
"""Beginnings of a failed rank's ``error`` that can be those of a connection."""


class Exchange:
    """The heartbeats of a rank. It has no threads and no clock of its own.

    Attributes:
        interval: seconds between two heartbeats.
        verdict: the ranks that block the run, once it is known.
        pulse_time: when the last sign of rank 0 came.
        main_beat: rank 0's newest heartbeat.
    """

    def __init__(self, store: Store | SignedStore, rank: int, world_size: int, hang_timeout: float, now: float):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.interval = min(MAX_INTERVAL_S, hang_timeout / BEATS_PER_TIMEOUT)
        self.verdict: Verdict | None = None
        self.pulse_time = now
        self.main_beat = NO_BEAT
        self.presence = Presence(MISSED_INTERVALS * self.interval)
        self._newly_slow: list[Slow] = []
        self._stragglers = Stragglers()
        self._judge = Judge(world_size, hang_timeout, GRACE_S, now) if rank == 0 else None

    def take_slow(self) -> list[Slow]:
        """Return the ranks that have become slow since the last call. On other ranks than 0 there are none."""
        # Another thread may append meanwhile, so nothing but what is returned is removed.
        count = len(self._newly_slow)
        newly_slow = self._newly_slow[:count]
        del self._newly_slow[:count]
        return newly_slow

    def send(self, beat: Beat) -> None:
        """Send a heartbeat alone, to whoever may have to judge this rank: rank 0, or all others."""
        self.store.set(f"beat/{self.rank}", json.dumps(beat))
        if self.rank == 0:
            self.store.set("pulse", json.dumps(beat))

    def step(self, beat: Beat, now: float) -> None:
        """Send a heartbeat, and read or make the verdict. It may block while the store is not reached."""
        self.store.set(f"beat/{self.rank}", json.dumps(beat))
        if self._judge is not None:
            verdict = self._judge_all(self._judge, now)
            # Send this after the judgement: a pulse tells the others that rank 0 still judges.
            self.store.set("pulse", json.dumps(beat))
            if verdict is not None and self.verdict is None:
                self.store.set("verdict", json.dumps(verdict))
                self.verdict = verdict
        elif self.verdict is None:
            self.verdict = self._read_verdict()
            if self.verdict is not None:
                # Rank 0, whose process may hold the store, waits for this before it ends.
                self.store.set(f"read/{self.rank}", "")
            elif self.store.check(["pulse"]):
                self._read_pulse(now)

    def _read_verdict(self) -> Verdict | None:
        """Return rank 0's verdict; None if there is none, or if the key has another content."""
        # `get` would wait for a key that is not there yet.
        if not self.store.check(["verdict"]):
            return None
        with suppress(MessageError):
            verdict: Verdict = messages.read(self.store.get("verdict"), Verdict)
            if all(0 <= rank < self.world_size for rank in verdict.ranks):
                return verdict
        return None

    def _read_pulse(self, now: float) -> None:
        with suppress(MessageError):
            beat: Beat = messages.read(self.store.get("pulse"), Beat)
            # The store repeats rank 0's last heartbeat for ever, and only a new number is a sign of it.
            if beat.number != self.main_beat.number:
                self.pulse_time = now
            self.main_beat = beat

    def has_main_ended(self, now: float) -> bool:
        """Return whether the process of rank 0, which judges the others, has ended."""
        return self.rank != 0 and bool(self.presence.find_ended({self.main_beat.endpoint: now - self.pulse_time}))

    def _judge_all(self, judge: Judge, now: float) -> Verdict | None:
        ranks = []
        keys = []
        for rank in range(self.world_size):
            key = f"beat/{rank}"
            # A rank that was heard once has its key for good, so the store is not asked again.
            if rank in judge.beats or self.store.check([key]):
                ranks.append(rank)
                keys.append(key)
        beats = {}
        for rank, text in zip(ranks, self.store.multi_get(keys), strict=True):
            # What is not a heartbeat counts as none: the rank's own next one takes its place.
            with suppress(MessageError):
                beats[rank] = messages.read(text, Beat)
        if len(beats) == self.world_size:
            self._newly_slow += self._stragglers.update(beats)
        verdict = judge.update(now, beats)
        failed_beats = [beat for beat in beats.values() if beat.phase == "failed"]
        if verdict is None and any(beat.error.startswith(CONNECTION_ERRORS) for beat in failed_beats):
            # Some rank is gone, so a short silence shows which.
            verdict = judge.judge_silent(now, GONE_INTERVALS * self.interval)
        return verdict or judge.judge_ended(now, self.presence)
