"""Sources of samples: a hub name, a file, a folder, a saved dataset, or an embedded one.

A `Source` is read from its beginning, one sample at a time, so that memory does not grow with its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.data import embedded
from zerobook.data.files import JSON_LINES, KNOWN, TEXT, file_source, suffix_of
from zerobook.data.source import Item, Source, Splits, digest_of
from zerobook.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHARD_ROWS = 50_000
"""Rows of a stream's shard, if the source is a dataset in memory."""
_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
           "test": "test"}  # fmt: skip
_NUMBERED = re.compile(r"[-_]\d+(-of-\d+(-\w+)?)?$")


def open_source(
    path: str, *, config_name: str | None = None, revision: str | None = None, split: str | None = None, streaming: bool = False
) -> Splits:
    """Find the dataset that ``path`` names, without reading its samples.

    Args:
        path: a local file or folder, ``embedded:NAME``, or a hub name.
        config_name: the hub dataset's configuration.
        revision: branch, tag or commit on the hub.
        split: take only this split, for training; else ``train``, and ``validation`` or ``test`` to hold out.
        streaming: do not download a hub dataset, but read its shards from there.

    Raises:
        DataError: nothing of that name, an unknown file type, a split that is not there.
    """
    if path.startswith(embedded.PREFIX):
        name = path.removeprefix(embedded.PREFIX)
        rows = embedded.rows(name)
        _only_train(path, split)
        return Splits(train=_from_rows(path, rows, lambda: embedded.digest(name, rows)))
    local = Path(path).expanduser()
    if local.is_file():
        _only_train(path, split)
        return Splits(train=file_source(local))
    if local.is_dir():
        return _folder(local, split)
    if path.startswith((".", "/", "~")) or local.suffix in KNOWN:
        raise DataError(f"{path}: there is no such file or folder.")
    load = _hub_stream if streaming else _hub
    return load(path, config_name, revision, split)


def _only_train(path: str, split: str | None) -> None:
    if split not in (None, "train"):
        raise DataError(f"{path}: it has no splits, and split is {split!r}. Name the file of that split, or drop split.")


def _from_rows(name: str, rows: Sequence[object], digest: Callable[[], str]) -> Source:
    def piece(start: int, stop: int) -> Source:
        def read() -> Iterator[Item]:
            for index in range(start, stop):
                yield f"sample {index}", rows[index], 1

        return Source(name=name, read=read, digest=digest, total=stop - start, unit=" samples", cut=cut)

    def cut() -> list[Source]:
        return [piece(start, min(start + SHARD_ROWS, len(rows))) for start in range(0, len(rows), SHARD_ROWS)]

    return piece(0, len(rows))


# --- folders and the hub
def _hub(name: str, config_name: str | None, revision: str | None, split: str | None) -> Splits:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config_name, revision=revision)
    except Exception as error:  # the hub client raises many kinds
        raise _not_loaded(name, error) from error
    return _of_dataset(name, loaded, split)


def _not_loaded(name: str, error: Exception) -> DataError:
    first = str(error).splitlines()[0] if str(error) else "no message"
    return DataError(
        f"{name}: there is no such file or folder here, and it could not be loaded from the hub "
        f"({type(error).__name__}: {first})."
    )


def _hub_stream(name: str, config_name: str | None, revision: str | None, split: str | None) -> Splits:
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, config_name, revision=revision)
        loaded = builder.as_streaming_dataset()
    except Exception as error:  # the hub client raises many kinds
        raise _not_loaded(name, error) from error
    return _of_dataset(name, loaded, split, revision=f"{builder.config_id} {builder.hash}")


def _of_dataset(name: str, loaded: Mapping[str, Any], split: str | None, revision: str | None = None) -> Splits:
    """Return the splits of a loaded dataset. ``revision``: of a streamed dataset, which has no fingerprint."""
    wanted = split or "train"
    if wanted not in loaded:
        raise DataError(f"{name}: there is no split {wanted!r}, only {', '.join(loaded)}. Name one with split.")
    held_out = None if split else loaded.get("validation", loaded.get("test"))
    return Splits(
        train=_of_split(f"{name} {wanted}", loaded[wanted], revision),
        held_out=None if held_out is None else _of_split(f"{name} held out", held_out, revision),
    )


def _of_split(name: str, dataset: Dataset | IterableDataset, revision: str | None = None) -> Source:
    if revision is not None:
        return _of_iterable(name, dataset, revision)
    return _from_rows(name, dataset, lambda: str(dataset._fingerprint))


def _of_iterable(name: str, dataset: IterableDataset, revision: str) -> Source:
    """Return a source that reads a dataset from the hub during use. Its shards are the dataset's files on the hub."""

    def piece(part: IterableDataset, number: str) -> Source:
        def read() -> Iterator[Item]:
            for index, row in enumerate(part):
                yield f"{number}sample {index}", row, 1

        return Source(name=name, read=read, digest=lambda: f"{revision} {name} {number}", total=0, unit=" samples", cut=cut)

    def cut() -> list[Source]:
        count = dataset.num_shards
        return [piece(dataset.shard(num_shards=count, index=i), f"shard {i}, ") for i in range(count)]

    return piece(dataset, "")


def _folder(path: Path, split: str | None) -> Splits:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            return _of_dataset(str(path), saved, split)
        _only_train(str(path), split)
        return Splits(train=_of_split(str(path), saved))
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and suffix_of(f) in KNOWN and not _hidden(f, path)]
    wanted = split or "train"
    named: dict[str, list[Path]] = {}
    for file in files:
        named.setdefault(_split_of(file, path, wanted), []).append(file)
    held_out = None if split else named.get("validation") or named.get("test")
    if wanted in named:
        train = _all_of(path, wanted, named[wanted])
        return Splits(train=train, held_out=_all_of(path, "held out", held_out) if held_out else None)
    if split:
        there = ", ".join(name for name in named if name) or "none"
        raise DataError(f"{path}: there is no split {split!r}; its files are named after {there}. Name one with split.")
    # no file is named train: files such as test.txt may still be held out; folders such as test/ are ordinary text
    apart = [f for f in held_out or [] if f.parent == path]
    rest = [f for f in files if f not in apart]
    for kinds in (JSON_LINES, (".parquet",), TEXT):
        chosen = [f for f in rest if suffix_of(f) in kinds]
        if chosen:
            train = _joined(path, [replace(file_source(f), lone_text=False) for f in chosen])
            return Splits(train=train, held_out=_all_of(path, "held out", apart) if apart else None)
    raise DataError(
        f"{path}: found neither a saved dataset, nor train.jsonl (or {', '.join(KNOWN)}), "
        "nor JSON lines, Parquet or text files to train on."
    )


def _hidden(file: Path, folder: Path) -> bool:
    """Return whether a file is hidden or in a hidden folder, as copies of notebooks and notes on downloads are."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _split_of(file: Path, folder: Path, wanted: str) -> str:
    """Return the split that a file belongs to: ``train.jsonl``, ``train-0-of-2.parquet``, ``train/any.txt``; "" if none."""
    first, *inside = file.relative_to(folder).parts
    name = first if inside else _NUMBERED.sub("", first.partition(".")[0])
    return wanted if name == wanted else _SPLITS.get(name, "")


def _all_of(folder: Path, split: str, files: list[Path]) -> Source:
    """Return one split's files as one source."""
    kinds = sorted({suffix_of(file) for file in files})
    if len(kinds) > 1:
        raise DataError(f"{folder}: files of the split {split} are of several kinds: {', '.join(kinds)}. Keep one kind.")
    if len(files) == 1:
        return file_source(files[0])
    return _joined(folder, [replace(file_source(f), lone_text=False) for f in files])


def _joined(folder: Path, parts: list[Source]) -> Source:
    def read() -> Iterator[Item]:
        for part in parts:
            for where, row, cost in part.read():
                yield f"{Path(part.name).name}, {where}", row, cost

    def digest() -> str:
        return digest_of(*(f"{part.name}:{part.digest()}".encode() for part in parts))

    def sketch() -> str:
        return digest_of(*(f"{Path(part.name).name}:{(part.sketch or part.digest)()}".encode() for part in parts))

    return Source(
        name=str(folder), read=read, digest=digest, total=sum(p.total for p in parts), unit=parts[0].unit, sketch=sketch,
        cut=lambda: [shard for part in parts for shard in part.shards()],
    )  # fmt: skip
