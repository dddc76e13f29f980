"""A limit on the time that a chat template takes: one from elsewhere may have no end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zerobook.errors import DataError

SECONDS = 10.0
"""Processor time of one rendering; real ones take milliseconds."""


@contextmanager
def deadline(seconds: float = SECONDS) -> Iterator[None]:
    """Return a context for the rendering of a template, in the main thread. In other threads, which get no signals, it does
    nothing.

    Raises:
        DataError: the rendering took so much of the processor's time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise DataError(
            f"chat_template: it has not ended after {seconds:g} s with one sample. Correct its loops, or give another with "
            "--chat_template."
        )

    # SIGVTALRM counts the time of this process alone, so a busy machine stops nothing.
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
