"""Writing of files in folders that somebody else may have made, such as the folder of a run that was downloaded.

A symbolic link in such a folder may lead to any file of the user, so nothing is written through a link.
"""

import errno
import os
import stat
from pathlib import Path


def refuse_link(path: str, flags: int) -> int:
    """Open a regular file for writing, and return its descriptor. This function is for the argument ``opener`` of `open`.

    Raises:
        OSError: the file cannot be opened, or it is a symbolic link, a pipe or a device.
    """
    try:
        # With O_NOFOLLOW, a link gives the error ELOOP. Without O_NONBLOCK, opening a pipe waits for somebody who reads it.
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
    """Write a file completely or not at all. A file or link of that name is replaced.

    An incomplete file is deleted: on a full disk, the run still needs the space for its model.

    Args:
        durable: wait until the content is on the disk, so that a loss of power cannot destroy it.
    """
    data = content.encode() if isinstance(content, str) else content
    staging = file.with_name(f"{file.name}.partial")
    try:
        # Remove what a killed process left there, or a link that somebody else made.
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
