"""Training speed, measured from log point to log point."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from zerobook.training.utilization import ModelFlops


class Pace:
    """Measures tokens a second, the share of the time that the run waits for data, and the use of the devices.

    Evaluations and saves do not count: see `apart`.

    Attributes:
        flops: operations of the model; None where they are not known.
        peak: operations a second of all devices; None where it is not known.
        tokens_per_second: supervised tokens, over all ranks.
        all_tokens_per_second: tokens of the rows without padding, over all ranks.
        data_wait: share of the time spent waiting for data, 0 to 1.
        mfu: model FLOPs utilization, 0 to 1; None where ``flops`` or ``peak`` is.
    """

    def __init__(self) -> None:
        self.flops: ModelFlops | None = None
        self.peak: float | None = None
        self.tokens_per_second = self.all_tokens_per_second = 0.0
        self.data_wait = 0.0
        self.mfu: float | None = None
        self._since = time.monotonic()
        self._tokens = self._all_tokens = self._rows = 0
        self._waited = 0.0

    def start(self) -> None:
        """Start a measurement."""
        self._since = time.monotonic()
        self._tokens = self._all_tokens = self._rows = 0
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for data. Use it as a context manager."""
        asked = time.monotonic()
        yield
        self._waited += time.monotonic() - asked

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out the time of something that is no training step. Use it as a context manager."""
        begun = time.monotonic()
        yield
        self._since += time.monotonic() - begun

    def count(self, tokens: int, all_tokens: int, rows: int) -> None:
        """Add a step, over all ranks: its supervised tokens, the tokens of its rows, and its rows."""
        self._tokens += tokens
        self._all_tokens += all_tokens
        self._rows += rows

    def measure(self) -> None:
        """Update the attributes, and start a new measurement."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        self.tokens_per_second = self._tokens / seconds
        self.all_tokens_per_second = self._all_tokens / seconds
        self.data_wait = self._waited / seconds
        if self.flops and self.peak and self._rows:
            needed = self.flops.per_token(self._all_tokens / self._rows)
            self.mfu = needed * self.all_tokens_per_second / self.peak
        self.start()
