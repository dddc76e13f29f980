"""A clock that does not run while this process is suspended."""

import threading
import time


class RunningClock:
    """Counts seconds as `time.monotonic` does, without those of a suspension (Ctrl-Z, Slurm's ``suspend``, a paused container).

    Without this clock, the other processes would seem to have been silent during a suspension. The clock notices a suspension
    by a long time in which no thread has called `now`, so some thread must call it often.

    Args:
        longest_gap: if more seconds than these lie between two calls, the process was suspended.
    """

    def __init__(self, longest_gap: float):
        self.longest_gap = longest_gap
        self._last_call = time.monotonic()
        self._resumed = self._last_call
        self._suspended = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds of this clock. Any thread may call it."""
        with self._lock:
            moment = time.monotonic()
            gap = moment - self._last_call
            self._last_call = moment
            if gap > self.longest_gap:
                self._suspended += gap
                self._resumed = moment
            return moment - self._suspended

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since ``moment`` (a time of `time.monotonic`), or since the last suspension if that was later."""
        # Notice a suspension that has just ended.
        self.now()
        return time.monotonic() - max(moment, self._resumed)
