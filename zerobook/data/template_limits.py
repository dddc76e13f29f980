"""Limits on the time and memory of chat templates. A template from elsewhere may run without end, or fill the memory."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zerobook.errors import DataError
from zerobook.utils.memory_limit import memory_limit

# Processor time of one rendering; real ones take milliseconds.
SECONDS = 10.0
# Memory of the renderings of some chats together.
BYTES = 1 << 30
# Length of the text of one rendering. To tokenize the text takes many times as much memory.
CHARACTERS = 64 << 20
_ADVICE = "Correct it, or give another with --chat_template."


@contextmanager
def template_memory() -> Iterator[None]:
    """Return a context for compiling a chat template or rendering chats. It limits the memory of all of them together.

    Entering the context takes about as long as one rendering, so use one context for many chats.

    Raises:
        DataError: the template took too much memory, or is nested too deeply.
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
    """Return a context that limits the time of one rendering. It needs signals, so it does nothing outside of the main thread.

    Raises:
        DataError: the rendering has taken `SECONDS` of processor time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise DataError(f"chat_template: it has not ended after {SECONDS:g} s with one sample. {_ADVICE}")

    # The timer of SIGVTALRM counts only the time of this process, so a busy machine stops no rendering.
    old_handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        # Stop the timer first: the old handler does not expect its signal.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old_handler)
