"""Where samples come from: a hub name, a file, a folder, a saved dataset, or an embedded one.

A `Source` is read from the front, one sample at a time, so that memory does not grow with it.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from zerobook.data import embedded
from zerobook.errors import DataError

LINE_LIMIT = 256 << 20
"""Bytes. A longer line is a file that lacks its line ends, not a sample."""

_JSON_LINES, _TEXT, _TABLE = (".jsonl", ".ndjson"), (".txt", ".md", ".py"), (".csv", ".tsv")
_KNOWN = (*_JSON_LINES, ".json", *_TABLE, ".parquet", *_TEXT)

Item = tuple[str, Any, int]
"""(where it stands, for messages; the sample, a JSON line's bytes, or `Malformed`; its share of `Source.total`)."""


@dataclass(frozen=True)
class Malformed:
    """A sample that could not be read, while those after it can."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """One split of one dataset. ``read`` starts from the front at each call; ``digest`` changes with the content."""

    name: str
    read: Callable[[], Iterator[Item]]
    digest: Callable[[], str]
    total: int
    unit: str  # "B" or " samples"
    lone_text: bool = False  # one running text, to be held out from by its end


@dataclass(frozen=True, kw_only=True)
class Splits:
    """``held_out`` is None where the data has no split of its own for it."""

    train: Source
    held_out: Source | None = None


def open_source(path: str, *, config_name: str | None = None, split: str | None = None) -> Splits:
    """Find what ``path`` names; nothing is read yet.

    Args:
        path: a local file or folder, ``embedded:NAME``, or a hub name.
        config_name: the hub dataset's configuration.
        split: take only this split, for training; else ``train``, and ``validation`` or ``test`` to hold out.

    Raises:
        DataError: nothing of that name, an unknown file type, a split that is not there.
    """
    if path.startswith(embedded.PREFIX):
        name = path.removeprefix(embedded.PREFIX)
        rows = embedded.rows(name)
        return Splits(train=_from_rows(path, rows, lambda: embedded.digest(name, rows)))
    local = Path(path).expanduser()
    if local.is_file():
        return Splits(train=_file(local))
    if local.is_dir():
        return _folder(local, split)
    if path.startswith((".", "/", "~")) or local.suffix in _KNOWN:
        raise DataError(f"{path}: there is no such file or folder.")
    return _hub(path, config_name, split)


def _from_rows(name: str, rows: Any, digest: Callable[[], str]) -> Source:
    def read() -> Iterator[Item]:
        for index, row in enumerate(rows):
            yield f"sample {index}", row, 1

    return Source(name=name, read=read, digest=digest, total=len(rows), unit=" samples")


# --- folders and the hub
def _hub(name: str, config_name: str | None, split: str | None) -> Splits:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config_name)
    except Exception as error:  # the hub client raises many kinds
        first = str(error).splitlines()[0] if str(error) else "no message"
        raise DataError(
            f"{name}: there is no such file or folder here, and it could not be loaded from the hub "
            f"({type(error).__name__}: {first})."
        ) from error
    return _of_dataset(name, loaded, split)


def _of_dataset(name: str, loaded: Mapping[str, Any], split: str | None) -> Splits:
    wanted = split or "train"
    if wanted not in loaded:
        raise DataError(f"{name}: there is no split {wanted!r}, only {', '.join(loaded)}. Name one with split.")
    held_out = None if split else loaded.get("validation", loaded.get("test"))
    return Splits(
        train=_of_split(f"{name} {wanted}", loaded[wanted]),
        held_out=None if held_out is None else _of_split(f"{name} held out", held_out),
    )


def _of_split(name: str, dataset: Any) -> Source:
    return _from_rows(name, dataset, lambda: str(dataset._fingerprint))


def _folder(path: Path, split: str | None) -> Splits:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            return _of_dataset(str(path), saved, split)
        return Splits(train=_of_split(str(path), saved))
    named = {s: _named(path, s) for s in (split or "train", "validation", "test")}
    if named[split or "train"]:
        held_out = None if split else named["validation"] or named["test"]
        return Splits(train=_file(named[split or "train"]), held_out=_file(held_out) if held_out else None)
    files = [f for f in sorted(path.rglob("*")) if f.is_file()]
    for kinds in (_JSON_LINES, (".parquet",), _TEXT):
        chosen = [f for f in files if _suffix(f) in kinds]
        if chosen:
            return Splits(train=_joined(path, [replace(_file(f), lone_text=False) for f in chosen]))
    raise DataError(
        f"{path}: found neither a saved dataset, nor {split or 'train'}.jsonl (or {', '.join(_KNOWN)}), "
        "nor JSON lines, Parquet or text files."
    )


def _named(folder: Path, split: str) -> Path | None:
    return next((f for f in sorted(folder.glob(f"{split}.*")) if _suffix(f) in _KNOWN), None)


def _joined(folder: Path, parts: list[Source]) -> Source:
    def read() -> Iterator[Item]:
        for part in parts:
            for where, row, cost in part.read():
                yield f"{Path(part.name).name}, {where}", row, cost

    def digest() -> str:
        return _hash(*(f"{part.name}:{part.digest()}".encode() for part in parts))

    return Source(name=str(folder), read=read, digest=digest, total=sum(p.total for p in parts), unit=parts[0].unit)


# --- files
def _suffix(file: Path) -> str:
    """The file type, whatever it is compressed with: ``a.jsonl.gz`` is ``.jsonl``."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in (".gz", ".zst") else suffix


def _file(file: Path) -> Source:
    kind = _suffix(file)
    if kind not in _KNOWN:
        raise DataError(f"{file}: unknown file type {file.suffix!r}. Known: {', '.join(_KNOWN)}, also with .gz or .zst.")
    if kind == ".json" and not _is_array(file):
        kind = ".jsonl"
    readers = {".json": _read_array, ".parquet": _read_parquet, **dict.fromkeys(_TABLE, _read_table),
               **dict.fromkeys(_JSON_LINES, _read_lines), **dict.fromkeys(_TEXT, _read_text)}  # fmt: skip
    return Source(
        name=str(file),
        read=lambda: readers[kind](file),
        digest=lambda: _hash_file(file),
        total=file.stat().st_size,
        unit="B",
        lone_text=kind in _TEXT,
    )


def _open(file: Path) -> tuple[BinaryIO, BinaryIO]:
    """(the content, the file itself, whose position says how far reading has come)."""
    raw = file.open("rb")
    if file.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw)), raw  # type: ignore[arg-type]
    if file.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw)), raw  # type: ignore[arg-type]
    return raw, raw


def _costs(raw: BinaryIO) -> Callable[[], int]:
    """How far ``raw`` was read since the last call, in bytes."""
    done = 0

    def cost() -> int:
        nonlocal done
        before, done = done, raw.tell()
        return done - before

    return cost


def _read_lines(file: Path) -> Iterator[Item]:
    content, raw = _open(file)
    cost = _costs(raw)
    with content, _readable(file):
        number = 0
        while line := content.readline(LINE_LIMIT + 1):
            number += 1
            if len(line) > LINE_LIMIT:
                raise DataError(f"{file}, line {number}: longer than {LINE_LIMIT >> 20} MiB; are its line ends missing?")
            if line.strip():
                yield f"line {number}", line, cost()


def _is_array(file: Path) -> bool:
    content, _ = _open(file)
    with content, _readable(file):
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_array(file: Path) -> Iterator[Item]:
    import orjson

    content, _ = _open(file)
    with content, _readable(file):
        try:
            rows = orjson.loads(content.read())
        except orjson.JSONDecodeError as error:
            raise DataError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}.") from None
    cost = file.stat().st_size // max(1, len(rows))
    for index, row in enumerate(rows):
        yield f"sample {index}", row, cost


def _read_table(file: Path) -> Iterator[Item]:
    content, raw = _open(file)
    cost = _costs(raw)
    csv.field_size_limit(LINE_LIMIT)
    with _readable(file), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, delimiter="\t" if _suffix(file) == ".tsv" else ",")
        for row in reader:
            if None in row or None in row.values():
                found = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None) or [])
                row = Malformed(f"{found} fields where the header has {len(reader.fieldnames or [])}")
            yield f"line {reader.line_num}", row, cost()


def _read_parquet(file: Path) -> Iterator[Item]:
    import pyarrow.parquet

    with _readable(file):
        table = pyarrow.parquet.ParquetFile(file)
        cost = file.stat().st_size // max(1, table.metadata.num_rows)
        index = 0
        for batch in table.iter_batches(batch_size=1000):
            for row in batch.to_pylist():
                yield f"row {index}", row, cost
                index += 1


def _read_text(file: Path) -> Iterator[Item]:
    content, raw = _open(file)
    with content, _readable(file):
        text = content.read()
        try:
            yield "the text", {"text": text.decode("utf-8-sig")}, raw.tell()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 text (byte {error.start}: {error.reason}). Convert it first.") from None


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turns what decompressors and parsers raise about a damaged ``file`` into a `DataError`."""
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__}: {error}).") from error


def _hash(*parts: bytes) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _hash_file(file: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
