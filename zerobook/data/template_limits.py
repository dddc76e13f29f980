"""Limits on what a chat template takes: one from elsewhere may have no end, or fill the memory."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zerobook.errors import DataError
from zerobook.utils.memory_limit import memory_limit

SECONDS = 10.0
"""Processor time of one rendering; real ones take milliseconds."""
BYTES = 1 << 30
"""Memory of the renderings of some chats together."""
CHARACTERS = 64 << 20
"""Text of one rendering, which the tokenizer needs many times as much memory for."""
_ADVICE = "Correct it, or give another with --chat_template."


@contextmanager
def template_memory() -> Iterator[None]:
    """Return a context for compiling a chat template, and for rendering some chats: entering it takes as long as one of them.

    Raises:
        DataError: it took too much memory, or is nested too deeply.
    """
    try:
        with memory_limit(BYTES):
            yield
    except MemoryError:
        raise DataError(f"chat_template: it takes more than {BYTES >> 20} MiB. {_ADVICE}") from None
    except RecursionError:
        raise DataError(f"chat_template: it is nested too deeply. {_ADVICE}") from None


def checked_length(text: str) -> str:
    """Return the text of a rendering. Raises `DataError` if it has more than `CHARACTERS`."""
    if len(text) > CHARACTERS:
        raise DataError(f"chat_template: it writes more than {CHARACTERS >> 20} MiB for one sample. {_ADVICE}")
    return text


@contextmanager
def template_time() -> Iterator[None]:
    """Return a context for one rendering, in the main thread. Other threads get no signals, so there it does nothing.

    Raises:
        DataError: it has taken `SECONDS` of the processor's time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise DataError(f"chat_template: it has not ended after {SECONDS:g} s with one sample. {_ADVICE}")

    # SIGVTALRM counts the time of this process alone, so a busy machine stops nothing.
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        # The timer ends before the old handler is back, which would not expect it.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
