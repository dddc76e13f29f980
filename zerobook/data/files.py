"""Files of samples: JSON lines, JSON arrays, tables, Parquet and text, also compressed, read one sample at a time."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from zerobook.data import parquet
from zerobook.data.arrow_rows import without_padding
from zerobook.data.parquet import MOST_EXPANSION, MOST_TOTAL
from zerobook.data.samples import Stretch
from zerobook.data.source import Item, Malformed, Source, digest_of, not_utf8
from zerobook.data.values import json_problem, refuse_constant
from zerobook.errors import DataError
from zerobook.utils.reading import file_digest, open_regular

LINE_LIMIT = 256 << 20
"""Bytes. A longer line is not a sample: the file lacks line ends."""
ROW_LIMIT = 64 << 20
"""Characters of a table's row, which the parser holds several times."""
TEXT_PART = 16 << 20
"""Bytes. Longer texts are read in parts, cut at line ends where they have any."""
JSON_PART = 1 << 20
"""Characters of a JSON array that are read at a time."""
SHARD_BYTES = 64 << 20
"""Size of a stream's shards, where a file can be cut into such small parts."""
_EDGE = 1 << 16
"""Bytes at both ends of a file that its sketch covers, and of a compressed one that are read at a time."""

JSON_LINES, TEXT, TABLE = (".jsonl", ".ndjson"), (".txt", ".md", ".py"), (".csv", ".tsv")
KNOWN = (*JSON_LINES, ".json", *TABLE, ".parquet", *TEXT)


def suffix_of(file: Path) -> str:
    """Return the file type without the suffix of a compression: ``a.jsonl.gz`` is ``.jsonl``."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in (".gz", ".zst") else suffix


def file_source(file: Path) -> Source:
    """Return a file's samples. Raises `DataError` for an unknown type."""
    kind = suffix_of(file)
    if kind not in KNOWN:
        raise DataError(f"{file}: unknown file type {file.suffix!r}. Known: {', '.join(KNOWN)}, also with .gz or .zst.")
    if kind == ".json":
        kind = _json_kind(file)
    readers = {".json": _read_array, "one object": _read_object, ".parquet": _read_parquet, **dict.fromkeys(TABLE, _read_table),
               **dict.fromkeys(JSON_LINES, _read_lines), **dict.fromkeys(TEXT, _read_text)}  # fmt: skip
    return Source(
        name=str(file),
        read=lambda: readers[kind](file),
        digest=lambda: f"{kind} {file_digest(file)}",  # the same bytes, read as another type, are other samples
        total=file.stat().st_size,
        unit="B",
        lone_text=kind in TEXT,
        sketch=lambda: f"{kind} {_sketch(file)}",
        cut=_cutter(file, kind),
    )


def _cutter(file: Path, kind: str) -> Callable[[], list[Source]] | None:
    """Return a function that cuts a file into shards; None for a file that can only be read from its beginning."""
    if kind == ".parquet":
        return lambda: _parquet_shards(file)
    if file.suffix.lower() in (".gz", ".zst") or kind not in (*JSON_LINES, *TEXT):
        return None
    read = _read_lines if kind in JSON_LINES else _read_text
    return lambda: _byte_shards(file, read)


def _byte_shards(file: Path, read: Callable[..., Iterator[Item]]) -> list[Source]:
    """Return byte ranges of a file of lines as sources. A line belongs to the range in which it begins."""
    size = file.stat().st_size
    ends = [*range(SHARD_BYTES, size, SHARD_BYTES), size]
    starts = [0, *ends[:-1]]

    def piece(start: int, stop: int) -> Source:
        def within() -> Iterator[Item]:
            return read(file, start, stop)

        return Source(name=str(file), read=within, digest=lambda: _sketch(file), total=stop - start, unit="B")

    return [piece(start, stop) for start, stop in zip(starts, ends, strict=True)]


def _parquet_shards(file: Path) -> list[Source]:
    """Return whole row groups as sources, since smaller parts cannot be read separately."""
    import pyarrow.parquet

    with _readable(file), open_regular(file) as content:
        metadata = pyarrow.parquet.read_metadata(content)
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    groups: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        if groups[-1] and sum(sizes[i] for i in groups[-1]) + size > SHARD_BYTES:
            groups.append([])
        groups[-1].append(index)

    def piece(chosen: list[int]) -> Source:
        def within() -> Iterator[Item]:
            return _read_parquet(file, chosen, sum(rows[: chosen[0]]))

        total = sum(sizes[i] for i in chosen)
        return Source(name=str(file), read=within, digest=lambda: _sketch(file), total=total, unit="B")

    return [piece(chosen) for chosen in groups if chosen]


def _open(file: Path) -> tuple[BinaryIO, BinaryIO]:
    """Return (the content, the file itself, whose position shows how much was read)."""
    with _readable(file):
        content = raw = open_regular(file)
    if file.suffix.lower() == ".gz":
        content = io.BufferedReader(_Decompressed(gzip.GzipFile(fileobj=raw), file), _EDGE)
    elif file.suffix.lower() == ".zst":
        import pyarrow

        # zstandard's own reader accepts a truncated file without an error
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        content = io.BufferedReader(_Decompressed(stream, file), _EDGE)
    with _readable(file):
        start = content.peek(4)[:4]
        for mark, found in _NO_TEXT.items():
            if start.startswith(mark):
                raise DataError(f"{file}: {found}.")
    return content, raw


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, of which a few kilobytes may be made to give terabytes."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, file: Path):
        self.stream = stream
        self.file = file
        self.left = max(MOST_TOTAL, MOST_EXPANSION * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self.stream.read(len(buffer))
        self.left -= len(part)
        if self.left < 0:
            raise DataError(f"{self.file}: it decompresses to more than {MOST_EXPANSION:,} times its size.")
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


_NO_TEXT = {
    codecs.BOM_UTF16_LE: "it is UTF-16, and UTF-8 is expected. Convert it: iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16, and UTF-8 is expected. Convert it: iconv -f UTF-16 -t UTF-8",
    b"\x1f\x8b": "its content is compressed with gzip, which its name does not say, or twice. Decompress it",
    b"\x28\xb5\x2f\xfd": "its content is compressed with zstd, which its name does not say, or twice. Decompress it",
}
"""First bytes of files that are not text -> the error message."""


def _costs(raw: BinaryIO, done: int = 0) -> Callable[[], int]:
    """Return a function that returns the bytes of ``raw`` read since its last call; ``done`` were read before."""

    def cost() -> int:
        nonlocal done
        before, done = done, raw.tell()
        return done - before

    return cost


def _read_lines(file: Path, start: int = 0, stop: int | None = None) -> Iterator[Item]:
    """Yield the lines of a file. ``start`` and ``stop``: only lines that begin between these bytes."""
    content, raw = _open(file)
    with content, _readable(file):
        at = _to_a_line(content, start)
        cost = _costs(raw)
        number = 0
        while (stop is None or at < stop) and (line := content.readline(LINE_LIMIT + 1)):
            number += 1
            where = f"the line at byte {at}" if start else f"line {number}"
            if len(line) > LINE_LIMIT:
                raise DataError(f"{file}, {where}: longer than {LINE_LIMIT >> 20} MiB; are its line ends missing?")
            begin, at = at, at + len(line)
            line = line if begin else line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield where, line, cost()


def _to_a_line(content: BinaryIO, start: int) -> int:
    """Move to the first line that begins at byte ``start`` or after it. Return its position."""
    if start:
        content.seek(start - 1)
        while (part := content.readline(_EDGE)) and not part.endswith(b"\n"):
            pass
    return content.tell() if start else 0


def _json_kind(file: Path) -> str:
    """Return ``.json`` for an array, ``.jsonl`` for a sample in each line, or ``one object``."""
    import orjson

    content, _ = _open(file)
    with content, _readable(file):
        line = b""
        while not (line := line.lstrip(b"\xef\xbb\xbf \t\r\n")):
            if not (line := content.readline(LINE_LIMIT)):
                return ".jsonl"
        if line.startswith(b"["):
            return ".json"
        rest = content.read(LINE_LIMIT)
    try:
        found, alone = orjson.loads(line), not rest.strip()
    except orjson.JSONDecodeError:  # an object over several lines, or a broken line
        try:
            found, alone = orjson.loads(line + rest), True
        except orjson.JSONDecodeError:
            return "one object" if line.strip() == b"{" else ".jsonl"
        return "one object"
    return "one object" if alone and isinstance(found, dict) and _inside(found) else ".jsonl"


_CONTAINERS = ("data", "rows", "examples", "samples", "instances", "train")


def _inside(value: dict[str, Any]) -> list[Any] | None:
    """Return the list of samples that an object holds under one of `_CONTAINERS`; None if the object is a sample itself."""
    lists = (value[key] for key in _CONTAINERS if isinstance(value.get(key), list))
    return next((rows for rows in lists if rows and all(isinstance(row, dict) for row in rows)), None)


def _read_object(file: Path) -> Iterator[Item]:
    """Yield the samples of a file that is one JSON object: the list in it, or the object itself."""
    import orjson

    content, raw = _open(file)
    cost = _costs(raw)
    with content, _readable(file):
        text = content.read(LINE_LIMIT + 1)
        if len(text) > LINE_LIMIT:
            raise DataError(f"{file}: one JSON object of more than {LINE_LIMIT >> 20} MiB. Write one sample in each line.")
        try:
            value = orjson.loads(text.removeprefix(codecs.BOM_UTF8))
        except orjson.JSONDecodeError as error:
            raise DataError(f"{file}, line {error.lineno}: {json_problem(error)}.") from None
        for index, row in enumerate(_inside(value) or [value]):
            yield f"sample {index}", row, cost()


def _read_array(file: Path) -> Iterator[Item]:
    """Yield the samples of a JSON array. Memory holds one sample and `JSON_PART` characters."""
    content, raw = _open(file)
    cost = _costs(raw)
    with _readable(file), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        for index, row in enumerate(_Array(text, file).values()):
            yield f"sample {index}", row, cost()


class _Array:
    """Reads the values of a JSON array from ``text``, one after another."""

    def __init__(self, text: io.TextIOBase, file: Path):
        self.text, self.file = text, file
        self.buffer, self.at, self.line = "", 0, 1  # unread text begins at ``at``, in this line of the file
        self.whole = False  # the file's end is in the buffer
        self.decoder = json.JSONDecoder(parse_constant=refuse_constant)

    def values(self) -> Iterator[Any]:
        self._expect("[")
        more, index = self._next() != "]", 0
        if not more:
            self._expect("]")
        while more:
            yield self._value(index)
            index += 1
            more = self._expect(",]") == ","
        if self._next():
            self._refuse(self.at, "something follows the array")

    def _expect(self, characters: str) -> str:
        """Consume the next character that is no white space. It must be one of ``characters``."""
        found = self._next()
        if not found or found not in characters:
            self._refuse(self.at, f"expected {' or '.join(characters)}, found {found or 'the end'}")
        self._take(self.at + 1)
        return found

    def _value(self, index: int) -> object:
        self._next()
        while True:
            try:
                found, end = self.decoder.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                # the value is incomplete where a string does not end, or where the error is at the buffer's end
                if self.whole or not (error.msg.startswith("Unterminated") or error.pos > len(self.buffer) - _LONGEST_WORD):
                    self._refuse(error.pos, error.msg)
            except ValueError as error:  # of refuse_constant
                self._refuse(self.at, str(error))
            else:
                number = isinstance(found, int | float) and not self.whole
                if not number or self.buffer[end : end + 1] in tuple(" \t\r\n,]"):  # a number may continue
                    self._take(end)
                    return found
            if len(self.buffer) - self.at > LINE_LIMIT:
                most = f"{LINE_LIMIT >> 20} MiB, the most that a sample may have"
                raise DataError(f"{self.file}, sample {index}: longer than {most}. Is a bracket or a quotation mark missing?")
            self._read(len(self.buffer) - self.at)

    def _next(self) -> str:
        """Return the next character that is no white space, and move there; an empty string at the file's end."""
        while True:
            self._take(_BLANK.match(self.buffer, self.at).end())  # type: ignore[union-attr]  # it also matches an empty string
            if self.at < len(self.buffer) or self.whole:
                return self.buffer[self.at : self.at + 1]
            self._read()

    def _take(self, end: int) -> None:
        self.line += self.buffer.count("\n", self.at, end)
        self.at = end

    def _read(self, least: int = 0) -> None:
        """Read at least ``least`` more characters: as many as a value has so far, since retries would take quadratic time."""
        more = self.text.read(max(JSON_PART, least))
        self.whole = not more
        self.buffer, self.at = self.buffer[self.at :] + more, 0

    def _refuse(self, position: int, reason: str) -> None:
        line = self.line + self.buffer.count("\n", self.at, position)
        raise DataError(f"{self.file}, line {line}: not valid JSON: {reason}.")


_BLANK = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 16
"""Characters. Tokens whose beginning alone is not valid JSON are shorter: ``-Infinity``, an escaped surrogate pair."""


def _read_table(file: Path) -> Iterator[Item]:
    content, raw = _open(file)
    cost = _costs(raw)
    csv.field_size_limit(LINE_LIMIT)
    with _readable(file), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        lines = _BoundedLines(text, file)
        # strict: a quote that is never closed would take all rows after it into its field
        reader = csv.DictReader(lines, delimiter="\t" if suffix_of(file) == ".tsv" else ",", strict=True)
        for row in _table_rows(reader, file):
            lines.size = 0
            if None in row or None in row.values():
                found = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None) or [])
                reason = f"{found} fields where the header has {len(reader.fieldnames or [])}"
                yield f"line {reader.line_num}", Malformed(reason), cost()
            else:
                yield f"line {reader.line_num}", row, cost()


class _BoundedLines:
    """The lines of a table, for one row after another. A small compressed file can hold a line of many gigabytes.

    Attributes:
        size: characters read since the last row; the reader of the rows sets it back.
    """

    def __init__(self, text: io.TextIOBase, file: Path):
        self.text, self.file = text, file
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        while line := self.text.readline(ROW_LIMIT + 1):
            self.size += len(line)
            if self.size > ROW_LIMIT:
                raise DataError(
                    f"{self.file}: a row has more than {ROW_LIMIT >> 20} MiB. Are line ends missing, or is a quote not closed?"
                )
            yield line


def _table_rows(reader: csv.DictReader, file: Path) -> Iterator[dict[Any, Any]]:
    """Yield the rows of a table. Raises `DataError` where rows cannot be separated, or two columns have one name."""
    ends = 0  # the line that the last row ends on
    try:
        names = [name for name in reader.fieldnames or [] if name]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{file}: its header has the column {twice[0]!r} twice. Rename one.")
        ends = reader.line_num
        for row in reader:
            yield row
            ends = reader.line_num
    except csv.Error as error:
        raise DataError(
            f"{file}, the row that begins on line {ends + 1}: its quotes are not closed as they should be ({error}). A field "
            'that begins with a quote ends with one, and a quote inside it is written twice ("").'
        ) from None


def _read_parquet(file: Path, groups: list[int] | None = None, index: int = 0) -> Iterator[Item]:
    """Yield the rows of a Parquet file. ``groups``: only these row groups; ``index``: number of the first row, for messages."""
    try:
        for total, rows in parquet.read_parts(file, groups):
            cost = file.stat().st_size // max(1, total)
            for row in rows:
                yield f"row {index}", without_padding(row), cost
                index += 1
    except (parquet.ParquetError, OSError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from None


def _read_text(file: Path, start: int = 0, stop: int | None = None) -> Iterator[Item]:
    """Yield a text in parts of about `TEXT_PART`. ``start`` and ``stop``: only lines that begin between these bytes."""
    content, raw = _open(file)
    with content, _readable(file):
        at = _to_a_line(content, start)
        cost = _costs(raw, start)
        decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
        begins, parts = not start, _parts(content, at, stop)
        part = next(parts, b"")
        while part or begins:
            at += len(part)
            following = next(parts, b"")
            ends = not following and not content.read(1)
            try:
                text = decoder.decode(part, not following)
            except UnicodeDecodeError as error:
                place = at - len(error.object) + error.start
                raise DataError(f"{file}: {not_utf8(place)}") from None
            yield "the text", Stretch(text, begins, ends), cost()
            begins, part = False, following


def _parts(content: BinaryIO, at: int, stop: int | None) -> Iterator[bytes]:
    """Yield the lines that begin before byte ``stop``, joined to about `TEXT_PART`; longer lines in pieces.

    ``content`` is at byte ``at``, where a line begins.
    """
    lines: list[bytes] = []
    size, goes_on = 0, False
    while (goes_on or stop is None or at < stop) and (line := content.readline(TEXT_PART)):
        goes_on = not line.endswith(b"\n")
        lines.append(line)
        at, size = at + len(line), size + len(line)
        if size >= TEXT_PART:
            yield b"".join(lines)
            lines, size = [], 0
    if lines:
        yield b"".join(lines)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Convert the errors of decompressors and parsers about a damaged ``file`` to a `DataError`."""
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: {not_utf8(None)}") from error
    except Exception as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__}: {error}).") from error


def _sketch(file: Path) -> str:
    """Return a digest of a file's size and both ends, for files that are too large to read twice."""
    size = file.stat().st_size
    with open_regular(file) as handle:
        first = handle.read(_EDGE)
        handle.seek(max(0, size - _EDGE))
        return digest_of(str(size).encode(), first, handle.read())
