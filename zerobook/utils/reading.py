"""Reading of files that somebody else may have written: regular files of bounded size, and JSON of bounded depth."""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

# Size of the largest file that is read into memory at once: configs, manifests, templates.
MOST_BYTES = 256 << 20
# Size of the largest header of a safetensors file, by the definition of the format.
_MOST_HEADER_BYTES = 100_000_000
_BLOCK_BYTES = 1 << 22


def open_regular(file: str | Path) -> BufferedReader:
    """Open a file for reading, like ``open(file, "rb")``.

    Raises:
        OSError: the file cannot be opened, or it is a pipe or a device, from which a read could wait without end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a process that writes into it.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def read_text(file: str | Path, errors: str = "strict", *, may_be_pipe: bool = False) -> str:
    """Return a file's UTF-8 text, with line ends as newlines and without a byte order mark.

    Args:
        errors: what to do with bytes that are not UTF-8, as in `bytes.decode`.
        may_be_pipe: also read a pipe, for a file that the user names on the command line. This waits for the pipe's writer.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than `MOST_BYTES`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with open(file, "rb") if may_be_pipe else open_regular(file) as handle:
        # Read one byte more than is allowed, to see whether the file is larger.
        content = handle.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB", str(file))
    return content.decode("utf-8-sig", errors).replace("\r\n", "\n")


def read_json(file: str | Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError, UnicodeDecodeError: as in `read_text`.
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_text(file))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_safetensors_header(file: Path) -> bytes:
    """Return the header of a safetensors file: JSON with the names, shapes and dtypes of its tensors.

    Raises:
        OSError: the file cannot be read, is not a regular file, or announces a header of more than `_MOST_HEADER_BYTES`.
    """
    with open_regular(file) as handle:
        # The first 8 bytes are the header's length.
        size = int.from_bytes(handle.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise OSError(errno.EFBIG, f"its first 8 bytes announce a header of {size} bytes", str(file))
        return handle.read(size)


def file_digest(file: Path, tell: Callable[[int], Any] = lambda count: None) -> str:
    """Return the xxh3_128 digest of a file.

    Args:
        tell: called with the number of bytes of each block that has been read, to show the progress.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    with open_regular(file) as handle:
        block = handle.read(_BLOCK_BYTES)
        while block:
            digest.update(block)
            tell(len(block))
            block = handle.read(_BLOCK_BYTES)
    return digest.hexdigest()
