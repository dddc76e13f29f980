"""Files of samples: JSON lines, JSON arrays, tables, Parquet and text, also compressed, read one sample at a time."""

import codecs
import csv
import errno
import gzip
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from zerobook.data import parquet
from zerobook.data.arrow_rows import without_padding
from zerobook.data.parquet import MOST_EXPANSION, MOST_TOTAL
from zerobook.data.samples import Segment
from zerobook.data.source import Item, Malformed, Source, digest_of, not_utf8
from zerobook.data.values import refuse_constant
from zerobook.errors import DataError, SourceError
from zerobook.utils.bars import tqdm
from zerobook.utils.reading import file_digest, open_regular

# Bytes. A longer line is not a sample: the file lacks line ends.
LINE_LIMIT = 256 << 20
# Characters of a table's row, which the parser holds several times.
ROW_LIMIT = 64 << 20
# Bytes. Longer texts are read in blocks, cut at line ends where they have any.
TEXT_BLOCK = 16 << 20
# Characters of a JSON array that are read at a time.
JSON_BLOCK = 1 << 20
# Size of a stream's shards, if a file can be cut into such small parts.
SHARD_BYTES = 64 << 20
# Errors of a disk, mostly of one on the network, that may be gone at the next start.
DISK_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET)
# Bytes at each end of a file that its sketch covers. A compressed file is decompressed by as many bytes at a time.
_EDGE = 1 << 16

JSON_LINES = (".jsonl", ".ndjson")
TEXT = (".txt", ".md", ".py")
TABLE = (".csv", ".tsv")
COMPRESSED = (".gz", ".zst")
KNOWN = (*JSON_LINES, ".json", *TABLE, ".parquet", *TEXT)


def suffix_of(file: Path) -> str:
    """Return the suffix of a file's type, without that of a compression: ``.jsonl`` for ``a.jsonl.gz``."""
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        suffix = Path(file.stem).suffix.lower()
    return suffix


def file_source(file: Path) -> Source:
    """Return a file's samples. Raises `DataError` for an unknown type."""
    kind = suffix_of(file)
    if kind not in KNOWN:
        raise DataError(f"{file}: unknown file type {file.suffix!r}. Known: {', '.join(KNOWN)}, also with .gz or .zst.")
    # The suffix .json is used for arrays and for JSON lines, so the first character decides.
    if kind == ".json":
        kind = _detect_json_kind(file)
    readers = {
        ".json": _read_array,
        ".parquet": _read_parquet,
        **dict.fromkeys(TABLE, _read_table),
        **dict.fromkeys(JSON_LINES, _read_lines),
        **dict.fromkeys(TEXT, _read_text),
    }
    return Source(
        name=str(file),
        read=lambda: readers[kind](file),
        # The same bytes are other samples if they are read as another type, so the type is in the digest.
        digest=lambda: f"{kind} {read_digest(file)}",
        total=file.stat().st_size,
        unit="B",
        lone_text=kind in TEXT,
        sketch=lambda: f"{kind} {read_sketch(file)}",
        cut=_make_cutter(file, kind),
    )


def read_digest(file: Path) -> str:
    """Return the digest of a file's content."""
    # The bar appears if the file takes longer than a few seconds.
    with tqdm(total=file.stat().st_size, desc=f"reading {file.name}", unit="B", unit_scale=True, leave=False, delay=5) as bar:
        return file_digest(file, bar.update)


def read_sketch(file: Path) -> str:
    """Return a digest of a file's size and both ends, for files that are too large to read twice."""
    size = file.stat().st_size
    with open_regular(file) as handle:
        # Appended rows change the size and the end. A new header changes the beginning.
        first = handle.read(_EDGE)
        handle.seek(max(0, size - _EDGE))
        return digest_of(str(size).encode(), first, handle.read())


@contextmanager
def read_errors_named(file: Path) -> Iterator[None]:
    """Return a context in which any error becomes a `DataError` that names ``file``; an error of the disk, a `SourceError`.

    Decompressors and parsers raise errors of many classes if a file is damaged.
    """
    try:
        yield
    except (DataError, GeneratorExit):
        # A generator that is not read to its end raises GeneratorExit.
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: {not_utf8(None)}") from error
    except Exception as error:
        is_of_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
        error_type = SourceError if is_of_disk else DataError
        raise error_type(f"{file}: cannot be read ({type(error).__name__}: {error}).") from error


def _make_cutter(file: Path, kind: str) -> Callable[[], list[Source]] | None:
    """Return a function that cuts a file into shards; None for a file that can only be read from its beginning."""
    # Reading can start at any row group of Parquet and at any line, but not inside of a compressed file.
    if kind == ".parquet":
        return lambda: _parquet_shards(file)
    if file.suffix.lower() in COMPRESSED or kind not in (*JSON_LINES, *TEXT):
        return None
    read = _read_lines if kind in JSON_LINES else _read_text
    return lambda: _byte_shards(file, read)


def _byte_shards(file: Path, read: Callable[..., Iterator[Item]]) -> list[Source]:
    """Return byte ranges of a file of lines as sources. A line belongs to the range in which it begins."""
    size = file.stat().st_size
    # The size is always the last end: an empty file is one shard, and a multiple of `SHARD_BYTES` has no empty shard.
    ends = [*range(SHARD_BYTES, size, SHARD_BYTES), size]
    starts = [0, *ends[:-1]]

    shards = []
    for start, stop in zip(starts, ends, strict=True):
        shards.append(_make_shard(file, stop - start, partial(read, file, start, stop)))
    return shards


# Return a part of a file as a source.
def _make_shard(file: Path, size: int, read: Callable[[], Iterator[Item]]) -> Source:
    # The content is not read for a digest: the shards of a large file are prepared one by one.
    return Source(name=str(file), read=read, digest=partial(read_sketch, file), total=size, unit="B")


def _parquet_shards(file: Path) -> list[Source]:
    """Return groups of rows of a Parquet file as sources. Smaller parts cannot be read separately."""
    import pyarrow.parquet

    with read_errors_named(file), open_regular(file) as content:
        metadata = pyarrow.parquet.read_metadata(content)
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    shards = []
    # A shard is one large group, or several small ones in succession.
    for groups in join_small(sizes):
        first_row = sum(rows[: groups[0]])
        size = sum(sizes[groups[0] : groups[-1] + 1])
        shards.append(_make_shard(file, size, partial(_read_parquet, file, groups, first_row)))
    return shards


def join_small(sizes: Iterable[int]) -> list[list[int]]:
    """Return the shards of a source as lists of the numbers of its parts: neighbours of `SHARD_BYTES` at most, or one part.

    Args:
        sizes: bytes of the parts of a source.

    >>> join_small([100, SHARD_BYTES, 200, 300])
    [[0], [1], [2, 3]]
    """
    shards: list[list[int]] = []
    shard_bytes = 0
    for number, size in enumerate(sizes):
        if not shards or shard_bytes + size > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(number)
        shard_bytes += size
    return shards


def _open(file: Path) -> tuple[BinaryIO, BinaryIO]:
    """Return (the decompressed content, the file as it is on the disk, whose position shows how much of it was read)."""
    with read_errors_named(file):
        content = raw = open_regular(file)
    if file.suffix.lower() == ".gz":
        content = io.BufferedReader(_Decompressed(gzip.GzipFile(fileobj=raw), file), _EDGE)
    elif file.suffix.lower() == ".zst":
        import pyarrow

        # zstandard's own reader accepts a truncated file without an error.
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        content = io.BufferedReader(_Decompressed(stream, file), _EDGE)
    with read_errors_named(file):
        start = content.peek(64)
        for mark, problem in _NO_TEXT.items():
            if start.startswith(mark):
                raise DataError(f"{file}: {problem}.")
    return content, raw


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, up to a limit: a few kilobytes may be made to decompress to terabytes."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, file: Path):
        self.stream = stream
        self.file = file
        # Small files may expand by any factor up to a total that does no harm.
        self.remaining_size = max(MOST_TOTAL, MOST_EXPANSION * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.stream.read(len(buffer))
        self.remaining_size -= len(content)
        if self.remaining_size < 0:
            raise DataError(f"{self.file}: it decompresses to more than {MOST_EXPANSION:,} times its size.")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


# First bytes of files that are not text -> the error message.
_NO_TEXT = {
    codecs.BOM_UTF16_LE: "it is UTF-16, and UTF-8 is expected. Convert it: iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16, and UTF-8 is expected. Convert it: iconv -f UTF-16 -t UTF-8",
    b"version https://git-lfs.github.com/": "it is a pointer of Git LFS, and its content was not downloaded. Run: git lfs pull",
    b"\x1f\x8b": "its content is compressed with gzip, which its name does not say, or twice. Decompress it",
    b"\x28\xb5\x2f\xfd": "its content is compressed with zstd, which its name does not say, or twice. Decompress it",
}


def _byte_counter(raw: BinaryIO, position: int = 0) -> Callable[[], int]:
    """Return a function that returns how many bytes of ``raw`` were read since its last call.

    Args:
        position: of ``raw`` from which the first call counts.
    """

    def bytes_read() -> int:
        nonlocal position
        previous = position
        position = raw.tell()
        return position - previous

    return bytes_read


def _read_lines(file: Path, start: int = 0, stop: int | None = None) -> Iterator[Item]:
    """Yield the lines of a file. ``start`` and ``stop``: only lines that begin between these bytes."""
    content, raw = _open(file)
    with content, read_errors_named(file):
        position = _seek_line(content, start)
        bytes_read = _byte_counter(raw, start)
        number = 0
        while stop is None or position < stop:
            # Read one byte more than the limit, to see whether the line is longer.
            line = content.readline(LINE_LIMIT + 1)
            if not line:
                return
            number += 1
            where = f"the line at byte {position}" if start else f"line {number}"
            if len(line) > LINE_LIMIT:
                raise DataError(f"{file}, {where}: longer than {LINE_LIMIT >> 20} MiB; are its line ends missing?")
            position += len(line)
            if number == 1 and not start:
                line = line.removeprefix(codecs.BOM_UTF8)
            # Blank lines are not samples, and still count as lines in messages.
            if line.strip():
                yield where, line, bytes_read()


def _seek_line(content: BinaryIO, start: int) -> int:
    """Move to the first line that begins at byte ``start`` or after it. Return its position."""
    if not start:
        return 0
    # Search for a line end from one byte before: if it is there, a line begins exactly at ``start``.
    content.seek(start - 1)
    while True:
        piece = content.readline(_EDGE)
        if not piece or piece.endswith(b"\n"):
            return content.tell()


def _detect_json_kind(file: Path) -> str:
    """Return ``.json`` for an array, ``.jsonl`` for a sample in each line."""
    content, _ = _open(file)
    with content, read_errors_named(file):
        start = content.read(_EDGE).removeprefix(codecs.BOM_UTF8).lstrip()
    return ".json" if start.startswith(b"[") else ".jsonl"


def _read_array(file: Path) -> Iterator[Item]:
    """Yield (location, sample, bytes read for it) of a JSON array. Memory holds one sample and `JSON_BLOCK` characters."""
    content, raw = _open(file)
    bytes_read = _byte_counter(raw)
    with read_errors_named(file), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        for index, row in enumerate(_parse_array(text, file)):
            yield f"sample {index}", row, bytes_read()


def _parse_array(text: io.TextIOBase, file: Path) -> Iterator[Any]:
    """Yield the values of a JSON array, one after another. Only the value that is parsed is in memory, and a block of text."""
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    buffer = ""
    # The caller has seen the bracket that begins the array, maybe after many blanks.
    while not buffer:
        buffer = text.read(JSON_BLOCK).lstrip()
    position = 1  # in the buffer, behind the bracket or the last separator
    index = 0
    while True:
        start = _BLANK.match(buffer, position).end()  # type: ignore[union-attr]  # it matches anything
        if index == 0 and buffer.startswith("]", start):
            position = start + 1
            break
        separator = None
        problem = "a comma or a bracket is missing"
        try:
            value, end = decoder.raw_decode(buffer, start)
            # A value is complete only if a separator follows it. A number at the buffer's end may have more digits.
            separator = _SEPARATOR.match(buffer, end)
        except json.JSONDecodeError as error:
            problem = error.msg
        # `refuse_constant` raises ValueError for NaN and the infinities.
        except ValueError as error:
            raise DataError(f"{file}, sample {index}: not valid JSON: {error}.") from None
        if separator is not None:
            yield value
            index += 1
            position = separator.end()
            if separator[1] == "]":
                break
            continue
        # The value goes on behind the buffer. Double its text and parse it again: with blocks of one size, a long value would
        # take quadratic time.
        size = len(buffer) - position
        block = text.read(max(JSON_BLOCK, size))
        if not block or size > LINE_LIMIT:
            raise DataError(
                f"{file}, sample {index}: not valid JSON ({problem}), or longer than {LINE_LIMIT >> 20} MiB, the most that a "
                "sample may have."
            )
        buffer = buffer[position:] + block
        position = 0
    if buffer[position:].strip() or text.read(JSON_BLOCK).strip():
        raise DataError(f"{file}: not valid JSON: something follows the array.")


_BLANK = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])")


# Yield the rows of a table. A row with more or fewer fields than the header is `Malformed`.
def _read_table(file: Path) -> Iterator[Item]:
    content, raw = _open(file)
    bytes_read = _byte_counter(raw)
    # The default of the csv module is 128 KiB, which long documents exceed. `_BoundedLines` limits whole rows.
    csv.field_size_limit(ROW_LIMIT)
    with read_errors_named(file), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        lines = _BoundedLines(text, file)
        delimiter = "\t" if suffix_of(file) == ".tsv" else ","
        # Without strict, a quote that is never closed would take all rows after it into its field.
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        for row in _table_rows(reader, file):
            lines.begin_row()
            # In a row with too many fields, DictReader has the key None. In one with too few, it has values that are None.
            if None in row or None in row.values():
                unnamed_fields = row.pop(None, None) or []
                # Several columns may have an empty name, and share one value in the row.
                named_fields = [name for name in reader.fieldnames or [] if row[name] is not None]
                field_count = len(unnamed_fields) + len(named_fields)
                reason = f"{field_count} fields where the header has {len(reader.fieldnames or [])}"
                yield f"line {reader.line_num}", Malformed(reason), bytes_read()
            else:
                yield f"line {reader.line_num}", row, bytes_read()


class _BoundedLines:
    """The lines of a table, with a limit to the size of a row. A small compressed file can hold a line of many gigabytes."""

    def __init__(self, text: io.TextIOBase, file: Path):
        self.text = text
        self.file = file
        self.row_size = 0  # characters read since the last row

    def begin_row(self) -> None:
        """Count the characters of the next row from here."""
        self.row_size = 0

    def __iter__(self) -> Iterator[str]:
        while line := self.text.readline(ROW_LIMIT + 1):
            self.row_size += len(line)
            if self.row_size > ROW_LIMIT:
                raise DataError(
                    f"{self.file}: a row has more than {ROW_LIMIT >> 20} MiB. Are line ends missing, or is a quote not closed?"
                )
            yield line


def _table_rows(reader: csv.DictReader, file: Path) -> Iterator[dict[Any, Any]]:
    """Yield the rows of a table. Raises `DataError` if rows cannot be separated, or two columns have one name."""
    last_line = 0  # of the row before
    try:
        names = list(filter(None, reader.fieldnames or []))
        # Of columns with the same name, DictReader would drop all but the last.
        repeated_names = sorted({name for name in names if names.count(name) > 1})
        if repeated_names:
            raise DataError(f"{file}: its header has the column {repeated_names[0]!r} twice. Rename one.")
        last_line = reader.line_num
        for row in reader:
            yield row
            last_line = reader.line_num
    except csv.Error as error:
        raise DataError(
            f"{file}, the row that begins on line {last_line + 1}: its quotes are not closed as they should be ({error}). A "
            'field that begins with a quote ends with one, and a quote inside it is written twice ("").'
        ) from None


def _read_parquet(file: Path, groups: list[int] | None = None, index: int = 0) -> Iterator[Item]:
    """Yield the rows of a Parquet file. ``groups``: only these row groups; ``index``: number of the first row, for messages."""
    with read_errors_named(file):
        for total, rows in parquet.read_parts(file, groups):
            # The bar shows the bytes of the file, and each row counts as many.
            cost = file.stat().st_size // max(1, total)
            for row in rows:
                yield f"row {index}", without_padding(row), cost
                index += 1


def _read_text(file: Path, start: int = 0, stop: int | None = None) -> Iterator[Item]:
    """Yield a text in blocks of about `TEXT_BLOCK`. ``start`` and ``stop``: only lines that begin between these bytes."""
    content, raw = _open(file)
    with content, read_errors_named(file):
        position = _seek_line(content, start)
        bytes_read = _byte_counter(raw, start)
        # Only a file's first bytes can be a byte order mark.
        decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
        blocks = _text_blocks(content, position, stop)
        begins = not start
        block = next(blocks, b"")
        # An empty file is one empty text.
        while block or begins:
            position += len(block)
            # This block is the last one if no other follows. It ends the text if the file has no further byte either.
            next_block = next(blocks, b"")
            ends = not next_block and not content.read(1)
            try:
                text = decoder.decode(block, not next_block)
            except UnicodeDecodeError as error:
                # ``position`` is the end of the block. ``error.object`` ends there too, and may begin in the block before, with
                # the first bytes of a character that is split between both.
                error_position = position - len(error.object) + error.start
                raise DataError(f"{file}: {not_utf8(error_position)}") from None
            yield "the text", Segment(text, begins, ends), bytes_read()
            begins = False
            block = next_block


def _text_blocks(content: BinaryIO, position: int, stop: int | None) -> Iterator[bytes]:
    """Yield the lines that begin before byte ``stop``, joined to about `TEXT_BLOCK`; longer lines in pieces.

    ``content`` is at byte ``position``, where a line begins.
    """
    lines: list[bytes] = []
    size = 0
    # A line that is longer than a block is read to its end, also behind ``stop``.
    is_inside_line = False
    while is_inside_line or stop is None or position < stop:
        line = content.readline(TEXT_BLOCK)
        if not line:
            break
        is_inside_line = not line.endswith(b"\n")
        lines.append(line)
        position += len(line)
        size += len(line)
        if size >= TEXT_BLOCK:
            yield b"".join(lines)
            lines = []
            size = 0
    if lines:
        yield b"".join(lines)
