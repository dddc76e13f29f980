"""Writing of files in folders that somebody else may have made, such as the folder of a run that was downloaded.

A link in the place of a file that is written there can lead to any file of the user.
"""

import errno
import os
import stat
from pathlib import Path


def refuse_link(path: str, flags: int) -> int:
    """Open a regular file for writing: an ``opener`` for `open`.

    Raises:
        OSError: also for a link, a pipe or a device.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody who reads it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, and nothing is written through one", path) from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def write_whole(file: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file completely or not at all, in the place of a file or link of that name.

    Half a file on a full disk would take space that the run's model still needs.

    Args:
        durable: wait until the content is on the disk, so that it outlives a loss of power.
    """
    data = content.encode() if isinstance(content, str) else content
    staging = file.with_name(f"{file.name}.partial")
    try:
        # What a killed process left there, or a link.
        staging.unlink(missing_ok=True)
        with open(staging, "wb", opener=refuse_link) as handle:
            handle.write(data)
            if durable:
                handle.flush()
                os.fsync(handle.fileno())
        staging.replace(file)
    except OSError:
        staging.unlink(missing_ok=True)
        raise
