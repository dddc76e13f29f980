"""File locks (flock), and file systems that have none."""

import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerobook.utils.writing import refuse_link

_HELD_BY_OTHER = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
_POLL_S = 0.1


def _do_nothing() -> None: ...


def lock(handle: int, *, shared: bool = False, wait: float = 0.0, meanwhile: Callable[[], None] = _do_nothing) -> bool | None:
    """Lock an open file, and try again for ``wait`` seconds where another process holds it; each time, call ``meanwhile``.

    Returns:
        True: it is locked now. False: another process holds it. None: its file system has no locks.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + wait
    while True:
        try:
            # Without LOCK_NB, the call would wait for as long as the other process likes.
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in _HELD_BY_OTHER:
                raise
        # Tried at least once, also without a wait.
        if time.monotonic() >= deadline:
            return False
        meanwhile()
        time.sleep(_POLL_S)


@contextmanager
def locked(
    file: Path,
    *,
    wait: float = math.inf,
    before_wait: Callable[[], None] = _do_nothing,
    meanwhile: Callable[[], None] = _do_nothing,
    temporary: bool = False,
) -> Iterator[bool | None]:
    """Lock ``file``, which is made if it is missing, for the block. Yield what `lock` returns.

    Args:
        wait: seconds to wait for another process that holds the lock.
        before_wait: called once, where another process holds the lock.
        meanwhile: called again and again during the wait.
        temporary: delete the file after the block. A process that opened it just before counts it as held.
    """
    with open(file, "a", opener=refuse_link) as handle:
        is_locked = lock(handle.fileno())
        if is_locked is False:
            before_wait()
            is_locked = lock(handle.fileno(), wait=wait, meanwhile=meanwhile)
        # The process that held the lock before may have deleted the file: then others lock another file of this name.
        if temporary and is_locked and not _is_open(file, handle.fileno()):
            unlock(handle.fileno())
            is_locked = False
        try:
            yield is_locked
        finally:
            # Deleted while it is locked: afterwards it may be another process's.
            if temporary and is_locked is not False:
                file.unlink(missing_ok=True)
            if is_locked:
                unlock(handle.fileno())


def _is_open(file: Path, handle: int) -> bool:
    """Return whether ``handle`` is the file that has this name now."""
    return file.exists() and file.stat().st_ino == os.fstat(handle).st_ino


def unlock(handle: int) -> None:
    """Release the lock, also for forked processes that inherited the file."""
    fcntl.flock(handle, fcntl.LOCK_UN)
