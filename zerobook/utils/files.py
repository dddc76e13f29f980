"""File modes, and folders that get their names only when they are complete and durable."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zerobook.errors import ConfigError, LockedError
from zerobook.utils import locks

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""What libraries in Rust (safetensors, tokenizers) write at the end of a message, in errors of classes of their own."""
SEEN_S = 10.0
"""Seconds within which a host sees what another one has written. Buckets that are mounted keep listings for seconds."""


def is_seen(path: Path) -> bool:
    """Wait for `SEEN_S` until this host sees a path that another host has made. Return whether it does."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        refresh(path)
        time.sleep(0.1)
    return True


def refresh(path: Path) -> None:
    """Let an NFS client see whether other hosts have made ``path``.

    One that was asked for a path before answers for up to a minute that it is missing. When a folder is opened, it asks the
    server for changes in it: nfs(5), "lookupcache" and "Close-to-open cache consistency".
    """
    for folder in reversed(path.absolute().parents):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def modes_by_umask(folder: Path) -> None:
    """Give the files in ``folder`` the mode that the umask gives new files. safetensors lets only the owner read its files."""
    # The umask can only be read by changing it for a moment, in all threads, so a new file tells it.
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.iterdir():
        if file.is_file() and file.stat().st_mode & 0o777 != mode:
            file.chmod(mode)


def require_new(folder: Path, key: str) -> None:
    """Raise `ConfigError` if ``folder`` is a file or holds something, which would be overwritten.

    Args:
        key: the flag or argument that names the folder.
    """
    advice = "Nothing was written. Give a folder that does not exist, or is empty."
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}: {folder} is a file. {advice}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{key}: {folder} is not empty. {advice}")


def staging_of(folder: Path) -> Path:
    """Return the path beside ``folder`` where it is written until it is complete. Deletes the remains of a killed process."""
    staging = folder.with_name(f".{folder.name}.partial")
    _remove(staging)
    return staging


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Return a context with an empty folder, which becomes ``folder`` if the block ends without an error.

    Raises:
        LockedError: another process writes ``folder``, or has written it meanwhile.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_file = folder.with_name(f".{folder.name}.lock")
    with locks.locked(lock_file, wait=0, temporary=True) as locked:
        if locked is False:
            raise LockedError(
                f"{folder}: another process is writing this folder. Wait until it ends, or give another folder. If its host is "
                f"gone for good, a network disk may keep its lock for ever: delete {lock_file}"
            )
        # What a killed process left there is deleted: by the lock, nobody writes it now.
        staging = staging_of(folder)
        staging.mkdir()
        try:
            yield staging
            _make_durable(staging)
            # A rename replaces an empty folder, and no other one.
            staging.rename(folder)
            fsync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, folder: Path, *, is_sound: Callable[[], bool] = lambda: False) -> None:
    """Make a complete folder durable, and give it its name. An old one of that name is deleted when the new one is there.

    A process that is killed between the renames leaves both, hidden; the next process writes the folder again.

    Args:
        is_sound: returns whether ``folder`` is sound by now, since another host has made it. Then it stays, and others may
            read it already.
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
    """Return a context that turns an error of the disk, such as a full one, into a `ConfigError` that names ``folder``.

    Args:
        advice: the way out, a sentence.
    """
    try:
        yield
    except Exception as error:
        reason = _reason_of_system(error)
        if reason is None:
            raise
        raise ConfigError(f"{folder}: it could not be written ({reason}), and nothing of it is kept. {advice}") from error


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_durable(folder: Path) -> None:
    # Files, and the names in the folders.
    for path in sorted(folder.rglob("*")):
        fsync(path)
    fsync(folder)


def _reason_of_system(error: Exception) -> str | None:
    """Return what the operating system said; None for an error that is not its own."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror
    # Libraries in Rust have classes of their own for these errors.
    match = _OS_ERROR.search(str(error))
    return os.strerror(int(match[1])) if match else None


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
