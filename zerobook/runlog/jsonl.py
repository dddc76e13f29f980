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
# Length in bytes of what follows the other members of a line.
_CHECKSUM_LENGTH = len(b',"crc":"00000000"}')
# Type of event -> name of a field in earlier logs -> its name now.
RENAMED_FIELDS = {
    "decision": {"measure": "action", "ladder": "policy"},
    "rollback": {"measure": "action"},
}


def encode(record: dict[str, Any]) -> bytes:
    """Return a record as one line, with its checksum and newline. Types that JSON does not know are written as text."""
    # The closing brace is cut off, since the checksum follows as the last member.
    body = orjson.dumps(record, default=_to_json_type, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)[:-1]
    return b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body))


# orjson calls this for a value of a type that it cannot write.
def _to_json_type(value: Any) -> Any:
    return list(value) if isinstance(value, set | range) else str(value)


class BadLine(ValueError):
    """Raised for a line that is damaged or not complete."""


def decode(line: bytes) -> dict[str, Any]:
    """Return the record of one line, without its checksum. Raises `BadLine` with the reason.

    Args:
        line: the line without its newline.
    """
    body = line[:-_CHECKSUM_LENGTH]
    tail = line[-_CHECKSUM_LENGTH:]
    if not tail.startswith(b',"crc":"'):
        raise BadLine("it has no checksum at its end")
    # Eight characters stand before the digits, and there are eight digits.
    if tail[8:16] != b"%08x" % zlib.crc32(body):
        raise BadLine("its checksum does not fit")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadLine(f"it is no JSON: {error}") from None
    del record["crc"]
    # Earlier versions used other names. A run that an earlier version began has both names in its log.
    for old_name, name in RENAMED_FIELDS.get(record.get("type"), {}).items():
        if old_name in record:
            record[name] = record.pop(old_name)
    return record


class Damage(NamedTuple):
    """A damaged line of a file. ``line`` counts from 1."""

    line: int
    reason: str


def stream(file: Path, damaged: list[Damage] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of all sound lines of a runlog file, oldest first. Holds only one line in memory.

    Args:
        damaged: list to which the damaged lines are appended; a last line without a newline does not count as damaged.
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
    with open_regular(file) as handle, map_content(handle) as content:
        # A last line without a newline is still being written, or was torn.
        line_end = content.rfind(b"\n")
        while line_end >= 0:
            line_start = content.rfind(b"\n", 0, line_end) + 1
            try:
                yield decode(content[line_start:line_end])
            except BadLine:
                yield None
            # The byte before a line is the newline of the line before it. It is -1 before the first line.
            line_end = line_start - 1


@contextmanager
def map_content(handle: BinaryIO) -> Iterator[mmap.mmap | bytes]:
    """Return a context with the content of a file, of which only the parts that are used are read."""
    # mmap raises an error for an empty file.
    if not os.fstat(handle.fileno()).st_size:
        yield b""
        return
    with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def read_newest(file: Path) -> tuple[dict[str, Any] | None, int]:
    """Return (record of the newest sound line, number of damaged lines after it)."""
    damaged = 0
    for record in backwards(file):
        if record is not None:
            return record, damaged
        damaged += 1
    return None, damaged


def check_format(events: Path) -> None:
    """Raise `RunLogError` if a newer version wrote the log."""
    # The first event of a log has its format, but it may stand on a damaged line, which is no reason to refuse the log.
    first = next(stream(events), None)
    if first and first.get("format", FORMAT) > FORMAT:
        raise RunLogError(
            f"{events}: it has format {first['format']}, and this version of Zerobook knows formats up to {FORMAT}. Update "
            "Zerobook, or give another --output_dir."
        )


def repair(file: Path) -> dict[str, Any] | None:
    """Move the bytes after the last newline, those of a torn line, to ``FILE.torn``.

    Returns:
        the fields of an event ``repaired``; None if there are no such bytes.
    """
    if not file.exists():
        return None
    with open_regular(file) as handle, map_content(handle) as content:
        torn = content[content.rfind(b"\n") + 1 :]
    if not torn:
        return None
    # The bytes are saved before they are cut off, so that a crash between the two steps loses nothing.
    with open(file.with_name(file.name + ".torn"), "ab", opener=refuse_link) as torn_file:
        torn_file.write(torn + b"\n")
    os.truncate(file, file.stat().st_size - len(torn))
    return {"file": file.name, "torn_bytes": len(torn), "kept_as": f"{file.name}.torn"}
