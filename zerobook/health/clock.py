"""A clock that does not run while this process is suspended."""

import threading
import time


class RunningClock:
    """Counts seconds as `time.monotonic` does, without those of a suspension (Ctrl-Z, Slurm's ``suspend``, a paused container).

    A suspended process hears nothing from the others, although they are not silent. It is known by a long time in which no
    thread called `now`, so some thread has to call it often.

    Args:
        longest_gap: seconds between two calls above which the process was suspended.
    """

    def __init__(self, longest_gap: float):
        self.longest_gap = longest_gap
        self._last_call = time.monotonic()
        self._resumed = self._last_call
        self._suspended = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds, from any thread."""
        with self._lock:
            moment = time.monotonic()
            gap = moment - self._last_call
            self._last_call = moment
            if gap > self.longest_gap:
                self._suspended += gap
                self._resumed = moment
            return moment - self._suspended

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since ``moment``, a time of `time.monotonic`, but not more than since the last suspension."""
        self.now()
        return time.monotonic() - max(moment, self._resumed)
