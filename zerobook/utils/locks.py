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

# Errors of flock: another process holds the lock, or the file system has no locks.
_HELD_BY_OTHER = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
_POLL_S = 0.1


def _do_nothing() -> None: ...


def lock(handle: int, *, shared: bool = False, wait: float = 0.0, meanwhile: Callable[[], None] = _do_nothing) -> bool | None:
    """Lock an open file. While another process holds the lock, call ``meanwhile`` and try again, for up to ``wait`` seconds.

    Args:
        handle: descriptor of the file.
        shared: take a lock that several processes can hold at once.

    Returns:
        True: the file is locked now. False: another process holds the lock. None: the file system has no locks.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + wait
    while True:
        try:
            # Without LOCK_NB, flock would wait until the other process releases the lock.
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in _HELD_BY_OTHER:
                raise
        # Look at the time only here, so that the lock is tried once if ``wait`` is 0.
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
    """Return a context in which ``file`` is locked, with the result of `lock`. The file is made if it is missing.

    Args:
        wait: seconds to wait for another process that holds the lock.
        before_wait: called once before the wait, if another process holds the lock.
        meanwhile: called again and again during the wait.
        temporary: delete the file after the block. A process that has already opened the file then gets False.
    """
    with open(file, "a", opener=refuse_link) as handle:
        is_locked = lock(handle.fileno())
        if is_locked is False:
            before_wait()
            is_locked = lock(handle.fileno(), wait=wait, meanwhile=meanwhile)
        # The process that held the lock before may have deleted the file since it was opened here. Then the lock is useless:
        # other processes lock a new file of this name.
        if temporary and is_locked and not _has_name(handle.fileno(), file):
            unlock(handle.fileno())
            is_locked = False
        try:
            yield is_locked
        finally:
            # Delete the file before the lock is released. Afterwards another process may have locked it.
            if temporary and is_locked is not False:
                file.unlink(missing_ok=True)
            if is_locked:
                unlock(handle.fileno())


def _has_name(handle: int, file: Path) -> bool:
    """Return whether the open file still has the name ``file``: another process may have deleted or replaced it."""
    return file.exists() and file.stat().st_ino == os.fstat(handle).st_ino


def unlock(handle: int) -> None:
    """Release the lock, also for forked processes that inherited the file."""
    fcntl.flock(handle, fcntl.LOCK_UN)
