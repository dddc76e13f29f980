"""The lines of a runlog: write, check and read them, from either end of the file.

A line is a JSON object whose last member is ``crc``, the CRC-32 of the bytes before it:
``{"seq":7,...,"crc":"89abcdef"}``.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from zerobook.errors import RunLogError
from zerobook.utils.reading import open_regular
from zerobook.utils.writing import refuse_link

FORMAT = 2
_TAIL = len(b',"crc":"00000000"}')
RENAMED_FIELDS = {
    "decision": {"measure": "action", "ladder": "policy"},
    "rollback": {"measure": "action"},
}
"""Type of event -> its fields in earlier logs, and their names now."""


def encode(record: dict[str, Any]) -> bytes:
    """Return one line, with its CRC and newline. Types that JSON does not know are written as text."""
    # The closing brace is cut off, since the checksum is the last member.
    body = orjson.dumps(record, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)[:-1]
    return b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, set | range) else str(value)


class BadLine(ValueError):
    """Raised for a line that is damaged or not complete."""


def decode(line: bytes) -> dict[str, Any]:
    """Return the record of one line, which is given without its newline. Raises `BadLine` with the reason."""
    body = line[:-_TAIL]
    tail = line[-_TAIL:]
    if not tail.startswith(b',"crc":"'):
        raise BadLine("it has no checksum at its end")
    if tail[8:16] != b"%08x" % zlib.crc32(body):
        raise BadLine("its checksum does not fit")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadLine(f"it is no JSON: {error}") from None
    del record["crc"]
    # Logs of earlier versions stay readable, and a run may have both names in one log.
    for old_name, name in RENAMED_FIELDS.get(record.get("type"), {}).items():
        if old_name in record:
            record[name] = record.pop(old_name)
    return record


class Damage(NamedTuple):
    """A damaged line of a file. ``line`` counts from 1."""

    line: int
    reason: str


def stream(file: Path, damaged: list[Damage] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of all sound lines of a runlog file, oldest first, one at a time, with little memory.

    Args:
        damaged: list that gets the damaged lines. A last line without a newline, which is still being written or was torn, is
            ignored.
    """
    if not file.exists():
        return
    with open_regular(file) as handle:
        for number, line in enumerate(handle, 1):
            # A last line without a newline is still being written, or was torn.
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line[:-1])
            except BadLine as error:
                if damaged is not None:
                    damaged.append(Damage(number, str(error)))


def backwards(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the records, newest first, and None for a damaged line. Reads no more of the file than needed."""
    if not file.exists():
        return
    with open_regular(file) as handle, mapped(handle) as content:
        # A last line without a newline is still being written, or was torn.
        line_end = content.rfind(b"\n")
        while line_end >= 0:
            line_start = content.rfind(b"\n", 0, line_end) + 1
            yield _record_or_none(content[line_start:line_end])
            line_end = line_start - 1


@contextmanager
def mapped(handle: BinaryIO) -> Iterator[mmap.mmap | bytes]:
    """Return a context with the content of a file, without reading all of it."""
    # An empty file cannot be mapped.
    if not os.fstat(handle.fileno()).st_size:
        yield b""
        return
    with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def _record_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        return decode(line)
    except BadLine:
        return None


def newest(file: Path) -> tuple[dict[str, Any] | None, int]:
    """Return (record of the newest sound line, number of damaged lines after it)."""
    damaged = 0
    for record in backwards(file):
        if record is not None:
            return record, damaged
        damaged += 1
    return None, damaged


def check_format(events: Path) -> None:
    """Raise `RunLogError` if a newer version wrote the log."""
    first = next(stream(events), None)
    if first and first.get("format", FORMAT) > FORMAT:
        raise RunLogError(
            f"{events}: it has format {first['format']}, and this version of Zerobook knows formats up to {FORMAT}. Update "
            "Zerobook, or give another --output_dir."
        )


def repair(file: Path) -> dict[str, Any] | None:
    """Move the bytes after the last newline to ``FILE.torn``. Return what was done; None if there are none."""
    if not file.exists():
        return None
    with open_regular(file) as handle, mapped(handle) as content:
        torn = content[content.rfind(b"\n") + 1 :]
    if not torn:
        return None
    # The bytes are saved before the file is cut, so that a crash between the two loses nothing.
    with open(file.with_name(file.name + ".torn"), "ab", opener=refuse_link) as torn_file:
        torn_file.write(torn + b"\n")
    os.truncate(file, file.stat().st_size - len(torn))
    return {"file": file.name, "torn_bytes": len(torn), "kept_as": f"{file.name}.torn"}
