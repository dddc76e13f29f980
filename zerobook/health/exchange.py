"""Exchange heartbeats through a store: each rank writes its own and reads the verdict; rank 0 reads and judges all of them.

Rank 0 also writes its heartbeat as the *pulse*, which shows the other ranks that it still judges. The work of rank 0 grows
linearly with the number of ranks, and that of any other rank does not depend on it.
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

# Number of heartbeats in ``hang_timeout`` seconds. There are more if the interval would exceed `MAX_INTERVAL_S`.
BEATS_PER_TIMEOUT = 30
# Seconds between two heartbeats, at most.
MAX_INTERVAL_S = 5.0
# Seconds that the other ranks have to end after one has failed, since its launcher may stop them. If it failed because another
# process has ended, this is noticed before these seconds are over.
GRACE_S = 20.0
# Intervals without a heartbeat after which a rank counts as gone, if a connection to some rank is broken.
GONE_INTERVALS = 2.5
# Intervals without a heartbeat after which the process of a rank is looked for.
MISSED_INTERVALS = 1.5
# Beginnings of a failed rank's ``error`` that can be those of a connection.
CONNECTION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")


class Exchange:
    """Sends the heartbeats of a rank, and reads or makes the verdict. It has no threads and no clock: `Watch` calls it.

    Args:
        now: seconds of the clock that all later calls use, too.

    Attributes:
        interval: seconds between two heartbeats.
        verdict: the verdict on the ranks that block the run; None until there is one.
        pulse_time: when the newest pulse came; at first, the time of the start.
        main_beat: the newest heartbeat of rank 0, from its pulse.
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
        """Return the hosts with slow ranks that were noticed since the last call. Other ranks than 0 notice none."""
        # Another thread may append entries meanwhile. Remove only those that are returned.
        count = len(self._newly_slow)
        newly_slow = self._newly_slow[:count]
        del self._newly_slow[:count]
        return newly_slow

    def send(self, beat: Beat) -> None:
        """Send a heartbeat to the ranks that may judge this one: to rank 0, or from rank 0 to all others."""
        self.store.set(f"beat/{self.rank}", json.dumps(beat))
        if self.rank == 0:
            self.store.set("pulse", json.dumps(beat))

    def step(self, beat: Beat, now: float) -> None:
        """Send a heartbeat, and read or make the verdict. It may block for long if the store cannot be reached."""
        self.store.set(f"beat/{self.rank}", json.dumps(beat))
        if self._judge is not None:
            verdict = self._judge_all(self._judge, now)
            # Send the pulse after the judgement, since it tells the others that rank 0 still judges.
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

    # A value of the store that is no heartbeat is ignored.
    def _read_pulse(self, now: float) -> None:
        with suppress(MessageError):
            beat: Beat = messages.read(self.store.get("pulse"), Beat)
            # The store keeps the last pulse for ever. Only a new number shows that rank 0 is alive.
            if beat.number != self.main_beat.number:
                self.pulse_time = now
            self.main_beat = beat

    def has_main_ended(self, now: float) -> bool:
        """Return whether the process of rank 0, which judges the others, has ended."""
        silences = {self.main_beat.endpoint: now - self.pulse_time}
        return self.rank != 0 and len(self.presence.find_ended(silences)) > 0

    # Reads the heartbeats of all ranks, notes which ranks are slow, and returns the verdict if some block the run. Rank 0.
    def _judge_all(self, judge: Judge, now: float) -> Verdict | None:
        ranks = []
        keys = []
        for rank in range(self.world_size):
            key = f"beat/{rank}"
            # The key of a rank stays in the store after its first heartbeat, so it need not be looked for again.
            if rank in judge.beats or self.store.check([key]):
                ranks.append(rank)
                keys.append(key)
        beats = {}
        for rank, text in zip(ranks, self.store.multi_get(keys), strict=True):
            # A value that is no heartbeat is ignored. The rank's next heartbeat replaces it.
            with suppress(MessageError):
                beats[rank] = messages.read(text, Beat)
        if len(beats) == self.world_size:
            self._newly_slow += self._stragglers.update(beats)
        verdict = judge.update(now, beats)
        failed_beats = [beat for beat in beats.values() if beat.phase == "failed"]
        if verdict is None and any(beat.error.startswith(CONNECTION_ERRORS) for beat in failed_beats):
            # A connection is broken, so some rank is gone. A short silence is enough to tell which.
            verdict = judge.judge_silent(now, GONE_INTERVALS * self.interval)
        return verdict or judge.judge_ended(now, self.presence)
