"""Training speed, measured from log point to log point."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """Measures tokens a second, and the share of the time that the run waits for data.

    Attributes:
        tokens_per_second: supervised tokens, over all ranks.
        data_wait: share of the time spent waiting for data, 0 to 1.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self.data_wait = 0.0
        self._since = time.monotonic()
        self._tokens = 0
        self._waited = 0.0

    def start(self, tokens: int) -> None:
        """Start a measurement at ``tokens`` tokens seen."""
        self._since, self._tokens = time.monotonic(), tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for data. Use it as a context manager."""
        asked = time.monotonic()
        yield
        self._waited += time.monotonic() - asked

    def measure(self, tokens: int) -> None:
        """Update the attributes at ``tokens`` tokens seen, and start a new measurement."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        self.tokens_per_second = (tokens - self._tokens) / seconds
        self.data_wait, self._waited = self._waited / seconds, 0.0
        self.start(tokens)
