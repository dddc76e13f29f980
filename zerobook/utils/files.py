"""Folders that get their names only when they are complete and on the disk, file modes, and paths on network disks."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zerobook.errors import ConfigError, LockedError
from zerobook.utils import locks

# Libraries in Rust (safetensors, tokenizers) raise errors of their own classes, and end the message so.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# Seconds within which a host sees what another host has written. A mounted bucket shows an old listing for seconds.
SEEN_S = 10.0


def is_seen(path: Path) -> bool:
    """Wait up to `SEEN_S` seconds for a path that another host has made. Return whether this host sees the path."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        refresh(path)
        time.sleep(0.1)
    return True


def refresh(path: Path) -> None:
    """Let an NFS client see whether other hosts have made ``path``.

    If a path was missing at the first look, an NFS client may report it as missing for up to a minute. When a folder is opened,
    the client asks the server for changes in the folder: nfs(5), "lookupcache" and "Close-to-open cache consistency".
    """
    # From the root down: a folder can only be opened if the folder above knows of it.
    for folder in reversed(path.absolute().parents):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def modes_by_umask(folder: Path) -> None:
    """Give the files in ``folder`` the mode of new files, by the umask: files of safetensors are readable by the owner only."""
    # Read the mode from a new file. os.umask reads the umask only by changing it for a moment, in all threads.
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.iterdir():
        if file.is_file() and file.stat().st_mode & 0o777 != mode:
            file.chmod(mode)


def require_new(folder: Path, key: str) -> None:
    """Raise `ConfigError` if ``folder`` is a file, or a folder that is not empty: its content would be overwritten.

    Args:
        key: the flag or argument that names the folder.
    """
    advice = "Nothing was written. Give a folder that does not exist, or is empty."
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}: {folder} is a file. {advice}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{key}: {folder} is not empty. {advice}")


def staging_of(folder: Path) -> Path:
    """Return the path beside ``folder`` at which it is written first. Delete what a killed process has left there."""
    staging = folder.with_name(f".{folder.name}.partial")
    _remove(staging)
    return staging


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Return a context with an empty folder, which is renamed to ``folder`` if the block ends without an error.

    Raises:
        LockedError: another process is writing ``folder``, or finished just after this one had opened the lock file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_file = folder.with_name(f".{folder.name}.lock")
    with locks.locked(lock_file, wait=0, temporary=True) as locked:
        if locked is False:
            raise LockedError(
                f"{folder}: another process is writing this folder. Wait until it ends, or give another folder. If its host "
                f"does not come back, a network disk may never release the lock: delete {lock_file}"
            )
        # This deletes what a killed process left there. If the file system has locks, no other process is writing it; if it has
        # none, ``locked`` is None, and two processes must not write one folder.
        staging = staging_of(folder)
        staging.mkdir()
        try:
            yield staging
            _make_durable(staging)
            # A rename replaces an empty folder, and fails if the folder has content.
            staging.rename(folder)
            fsync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, folder: Path, *, is_sound: Callable[[], bool] = lambda: False) -> None:
    """Write the complete folder ``staging`` to the disk, and rename it to ``folder``, whose old content is then deleted.

    If the process is killed between the two renames, both folders stay under hidden names, and the next process writes
    ``folder`` again.

    Args:
        is_sound: returns whether another host has written a sound ``folder`` meanwhile. That folder is not replaced, since
            processes may be reading it.
    """
    _make_durable(staging)
    if is_sound():
        return
    old = folder.with_name(f".{folder.name}.replaced")
    _remove(old)
    # A rename cannot replace a folder with content.
    if os.path.lexists(folder):
        folder.rename(old)
    staging.rename(folder)
    fsync(folder.parent)
    _remove(old)


@contextmanager
def disk_errors_named(folder: Path, advice: str) -> Iterator[None]:
    """Return a context that turns an error of the operating system, as of a full disk, into a `ConfigError` for ``folder``.

    Args:
        advice: a sentence that says what to do.
    """
    try:
        yield
    except Exception as error:
        reason = _find_system_error(error)
        if reason is None:
            raise
        raise ConfigError(f"{folder}: it could not be written ({reason}), and nothing of it is kept. {advice}") from error


def fsync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Wait until a folder is on the disk with all its files and subfolders.
def _make_durable(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        fsync(path)
    fsync(folder)


def _find_system_error(error: Exception) -> str | None:
    """Return the operating system's text, such as ``No space left on device``; None if the error is not the system's."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror
    match = _OS_ERROR.search(str(error))
    return os.strerror(int(match[1])) if match else None


# Delete a file, a link, or a folder with its content, if it exists.
def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
