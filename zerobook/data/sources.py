"""Sources of samples: a hub name, a file, a folder, a saved dataset, or an embedded one.

A `Source` is read from its beginning, one sample at a time, so that memory does not grow with its size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.data import embedded
from zerobook.data.arrow_rows import without_padding
from zerobook.data.files import (
    JSON_LINES,
    KNOWN,
    TABLE,
    TEXT,
    file_source,
    join_small,
    read_digest,
    read_errors_named,
    read_sketch,
    suffix_of,
)
from zerobook.data.folders import CONFIG_FLAG, find_splits, listing, same_split
from zerobook.data.source import Item, Source, Splits, digest_of, take_samples
from zerobook.errors import DataError, SourceError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# Rows of a stream's shard, if the source is a dataset in memory.
SHARD_ROWS = 50_000
_TRAINING = re.compile(r"train(ing)?([-_.]|$)")
# Names of splits to hold out, in the order of preference. Test splits come late: they are meant for the final figure.
_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
# Groups of file types that are read together. The first two are preferred in this order; of the others, the one with the most
# files.
_KINDS = (JSON_LINES, (".parquet",), (".json",), TABLE, TEXT)


def open_source(
    path: str, *, config_name: str | None = None, revision: str | None = None, split: str | None = None, streaming: bool = False
) -> Splits:
    """Find the dataset that ``path`` names, without reading its samples.

    Args:
        path: a local file or folder, ``embedded:NAME``, or a hub name.
        config_name: the configuration of a hub dataset, or of a folder that was downloaded from there.
        revision: branch, tag or commit on the hub.
        split: train on this split, or on some of its rows, as in ``train[:10%]``, and hold out no other split. None: train on
            the split ``train``, and hold out another one if there is one.
        streaming: do not download a hub dataset, but read its shards from there.

    Raises:
        DataError: nothing of that name, an unknown file type, a split that is not there.
    """
    split_name, bracket, rows = (split or "").partition("[")
    splits = _open_splits(path, config_name, revision, split_name or None, streaming=streaming)
    if bracket:
        if not rows.endswith("]"):
            raise DataError(f"{path}: split is {split!r}, and a range of rows ends with a bracket, as in train[:1000].")
        train_name = f"[{rows} of {splits.train_name or path}"
        splits = replace(splits, train=_take_range(splits.train, rows.removesuffix("]")), train_name=train_name)
    return splits


# As `open_source`, for a split without a range of rows.
def _open_splits(path: str, config_name: str | None, revision: str | None, split: str | None, *, streaming: bool) -> Splits:
    if path.startswith(embedded.PREFIX):
        name = path.removeprefix(embedded.PREFIX)
        rows = embedded.rows(name)
        _refuse_split(path, split)
        return Splits(train=_from_rows(path, rows, lambda: digest_of(f"{name} {rows}".encode(errors="replace"))))
    # A local file or folder comes before a hub name of the same spelling.
    local = Path(os.path.expanduser(path))
    if local.is_file():
        _refuse_split(path, split)
        return Splits(train=file_source(local))
    if local.is_dir():
        return _open_folder(local, config_name, split)
    if not is_on_hub(path):
        raise DataError(f"{path}: there is no such file or folder.")
    return _hub(path, config_name, revision, split, streaming=streaming)


def is_on_hub(path: str) -> bool:
    """Return whether a path that `open_source` takes is the name of a dataset on the hub.

    >>> is_on_hub("OWNER/NAME"), is_on_hub("embedded:chats"), is_on_hub("data/train.jsonl.gz"), is_on_hub("./data")
    (True, False, False, False)
    """
    local = Path(os.path.expanduser(path))
    # No dataset on the hub has such a beginning. A name with the suffix of a data file is taken for a file.
    is_local = path.startswith((embedded.PREFIX, ".", "/", "~")) or suffix_of(local) in KNOWN
    return not (is_local or local.exists())


def _take_range(source: Source, rows: str) -> Source:
    """Return a range of a source's rows.

    Args:
        rows: the bounds as `datasets` writes them, such as ``1000:``, ``10%:20%`` or ``:-100``.
    """
    bounds = re.fullmatch(r"(-?\d+%?)?:(-?\d+%?)?", rows)
    if bounds is None or source.lone_text:
        raise DataError(
            f"{source.name}: [{rows}] of split is not a range of rows. Write it as train[:1000] or train[10%:20%]. A text file "
            "has no rows: it is one text."
        )
    # The total of a file is in bytes, so its rows have to be counted. Only parts of a long text have an attribute ``ends``.
    count = source.total if source.unit == " samples" else sum(getattr(row, "ends", True) for _, row, _ in source.read())
    numbers: list[Any] = []
    for bound in bounds.groups():
        number = int(bound.removesuffix("%")) if bound else None
        if number is not None and bound.endswith("%"):
            # Rounded as datasets does it, so that the rows are the same.
            number = round(number * count / 100)
        numbers.append(number)
    # Python's slices give missing, negative and too large bounds their usual meaning.
    start, stop, _ = slice(*numbers).indices(count)
    # Without a sketch, the content itself is compared. Without cuts, a stream reads the range as one shard.
    return replace(
        source,
        read=lambda: take_samples(source.read(), start, stop),
        digest=lambda: digest_of(source.digest().encode(), rows.encode()),
        sketch=None,
        cut=None,
    )


def open_held_out(path: str) -> Source:
    """Return the data that ``--validation_file`` names: its held-out split if it has one, else all of it."""
    try:
        splits = open_source(path)
    except DataError:
        # A folder may have only splits that are usually held out, and no training split. Take the first of them.
        for split in _HELD_OUT_SPLITS if Path(os.path.expanduser(path)).is_dir() else ():
            with suppress(DataError):
                return replace(open_source(path, split=split).train, is_held_out=True)
        raise
    return replace(splits.held_out or splits.train, is_held_out=True)


# Raise `DataError` if the user named another split than train of data that has no splits.
def _refuse_split(path: str, split: str | None) -> None:
    if split not in (None, "train"):
        raise DataError(f"{path}: it has no splits, and split is {split!r}. Name the file of that split, or drop split.")


# Return rows in memory as a source, which can be cut into ranges of rows.
def _from_rows(name: str, rows: Sequence[object], digest: Callable[[], str], sketch: Callable[[], str] | None = None) -> Source:
    # Return the rows ``start`` to ``stop`` as a source.
    def make_source(start: int, stop: int, digest: Callable[[], str]) -> Source:
        def read() -> Iterator[Item]:
            for index in range(start, stop):
                yield f"sample {index}", without_padding(rows[index]), 1

        return Source(name=name, read=read, digest=digest, total=stop - start, unit=" samples", sketch=sketch, cut=cut)

    def cut() -> list[Source]:
        starts = range(0, len(rows), SHARD_ROWS)
        # For the digest of a shard, only the sketch is read, and not the whole content.
        return [make_source(start, min(start + SHARD_ROWS, len(rows)), sketch or digest) for start in starts]

    return make_source(0, len(rows), digest)


# --- folders and the hub


# Return the splits of a dataset on the hub. Download it, unless it is streamed.
def _hub(name: str, config_name: str | None, revision: str | None, split: str | None, *, streaming: bool) -> Splits:
    import datasets

    make_source: Callable[[str, Any], Source] = _make_cached_source
    try:
        builder = datasets.load_dataset_builder(name, config_name, revision=revision)
        if streaming:
            loaded = builder.as_streaming_dataset()
            # A stream has no fingerprint of its content, so its version is the builder's config and hash.
            make_source = partial(_make_streamed_source, version=f"{builder.config_id} {builder.hash}")
        else:
            builder.download_and_prepare()
            loaded = builder.as_dataset()
    # The hub client has many types of errors without a common base class.
    except Exception as error:
        # A dataset with several configs has none by default. Its error lists their names.
        if "Config name is missing" in str(error):
            raise DataError(f"{name}: {' '.join(str(error).split())} Choose one with {CONFIG_FLAG}.") from error
        reason = str(error).partition("\n")[0] or "no message"
        advice = ""
        if "/" not in name:
            advice = " The hub loads no dataset without its owner's name any more: give OWNER/NAME, as on the dataset's page."
        # A stream needs the network at each start, and the network may work again at the next start.
        is_of_network = streaming and isinstance(error, (ConnectionError, TimeoutError))
        error_type = SourceError if is_of_network else DataError
        raise error_type(
            f"{name}: there is no such file or folder here, and it could not be loaded from the hub "
            f"({type(error).__name__}: {reason}).{advice}"
        ) from error
    # If the hub does not answer, `datasets` uses the newest commit in its cache, whatever commit was requested.
    if re.fullmatch("[0-9a-f]{40}", revision or "") and builder.hash != revision:
        raise SourceError(
            f"{name}: the hub does not give commit {revision}, and the cache of datasets on this machine has {builder.hash}. "
            "Start again when the hub answers, or copy that commit into the cache."
        )
    return _make_splits(name, loaded, split, make_source)


def _make_splits(name: str, loaded: Mapping[str, Any], split: str | None, make_source: Callable[[str, Any], Source]) -> Splits:
    """Return the splits of a loaded dataset. ``make_source`` takes a name for messages and a split."""
    train, held_out = _choose_splits(name, list(loaded), split)
    unused = [f"split {split_name}" for split_name in loaded if split_name not in (train, held_out)]
    splits = Splits(train=make_source(f"{name} {train}", loaded[train]), train_name=f"split {train}", unused=tuple(unused))
    if held_out is None:
        return splits
    return replace(
        splits,
        held_out=replace(make_source(f"{name} held out", loaded[held_out]), is_held_out=True),
        held_out_name=f"split {held_out}",
    )


def _choose_splits(name: str, available: Sequence[str], request: str | None) -> tuple[str, str | None]:
    """Return (the split to train on, the split to hold out or None).

    Args:
        request: the split that the user named; nothing of the dataset is held out beside it.

    Raises:
        DataError: there is no such split, no training split, or several.
    """
    if request is not None:
        # Try the name as the user spelled it, and then as `datasets` spells it.
        for split in (request, same_split(request)):
            if split in available:
                return split, None
        raise DataError(f"{name}: there is no split {request!r}, only {', '.join(available)}. Name one with split.")
    # Datasets for several methods of training have training splits such as train_sft.
    training = [split for split in available if _TRAINING.match(split)]
    if "train" in available:
        training = ["train"]
    if len(training) != 1:
        reason = "several training splits" if training else "no split 'train'"
        raise DataError(
            f"{name}: it has {reason}; its splits are {', '.join(available)}. Name the one to train on with split, in an entry "
            "under datasets in the YAML."
        )
    # Prefer a held-out split of the same method, such as test_sft for train_sft.
    suffix = training[0].removeprefix("training").removeprefix("train")
    candidates = [split + suffix for split in _HELD_OUT_SPLITS]
    candidates += _HELD_OUT_SPLITS
    held_out = next((split for split in candidates if split in available), None)
    return training[0], held_out


def _make_cached_source(name: str, dataset: Dataset) -> Source:
    """Return a downloaded split as a source. Its fingerprint changes with the dataset's commit."""
    return _from_rows(name, dataset, lambda: str(dataset._fingerprint))


def _make_saved_source(name: str, dataset: Dataset) -> Source:
    """Return a split that ``save_to_disk`` wrote as a source. Its digest is of its files.

    The fingerprint of `datasets` is of the functions that made the split, and stays the same if code that they call changes.
    """
    files = [Path(file["filename"]) for file in dataset.cache_files]

    def digest(read: Callable[[Path], str]) -> str:
        return digest_of(*[read(file).encode() for file in files])

    # The format of the dataset, which is saved with it, may leave out columns, and makes tensors of values.
    rows = dataset.with_format(None)
    return _from_rows(name, rows, partial(digest, read_digest), partial(digest, read_sketch))


def _make_streamed_source(name: str, dataset: IterableDataset, version: str) -> Source:
    """Return a source whose rows are read from the hub when they are needed. Its shards are the dataset's files there."""

    # Return the whole dataset or one shard as a source. ``prefix`` names the shard in messages, and is in its digest.
    def make_source(rows: IterableDataset, prefix: str) -> Source:
        def read() -> Iterator[Item]:
            for index, row in enumerate(rows):
                yield f"{prefix}sample {index}", without_padding(row), 1

        return Source(name=name, read=read, digest=lambda: f"{version} {name} {prefix}", total=0, unit=" samples", cut=cut)

    def cut() -> list[Source]:
        count = dataset.num_shards
        return [make_source(dataset.shard(num_shards=count, index=i), f"shard {i}, ") for i in range(count)]

    return make_source(dataset, "")


# Return the splits of a folder: of a saved dataset, or of data files.
def _open_folder(path: Path, config_name: str | None, split: str | None) -> Splits:
    # ``save_to_disk`` writes the first file for several splits, and the second one for a single split.
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        # A dataset that is kept in memory has no list of its files, which the digest needs.
        with read_errors_named(path):
            saved = datasets.load_from_disk(str(path), keep_in_memory=False)
        if isinstance(saved, datasets.DatasetDict):
            return _make_splits(str(path), saved, split, _make_saved_source)
        _refuse_split(str(path), split)
        return Splits(train=_make_saved_source(str(path), saved))
    layout = find_splits(path, config_name)
    files = layout.splits
    if not files:
        # As in `datasets`, all files of a folder without splits are the training split.
        _refuse_split(str(path), split)
        split = None
    # If the splits come from the names of files, and none is a training split, train on the files that have no split.
    if not layout.declared and split is None and not any(map(_TRAINING.match, files)):
        return _make_splits_without_train(path, files, layout.rest)
    train, held_out = _choose_splits(str(path), list(files), split)
    unused = [_describe_split(name, members) for name, members in files.items() if name not in (train, held_out)]
    unused += _describe_rest(layout.rest)
    return Splits(
        train=_join_split(path, train, files[train]),
        train_name=_describe_split(train, files[train]),
        **_describe_held_out(path, files, held_out),
        unused=tuple(unused),
    )


def _make_splits_without_train(path: Path, splits: Mapping[str, list[Path]], rest: Sequence[Path]) -> Splits:
    """Return the splits of a folder in which no file is named after a training split. Files without a split are trained on.

    Only files of one kind are: JSON lines, else Parquet, else the kind with the most files.

    Args:
        splits: the files of each split.
        rest: the files without a split.
    """
    files_by_kind: list[list[Path]] = []
    for suffixes in _KINDS:
        files_by_kind.append([file for file in rest if suffix_of(file) in suffixes])
    # The first two kinds are JSON lines and Parquet.
    chosen = files_by_kind[0] or files_by_kind[1] or max(files_by_kind[2:], key=len)
    if not chosen:
        raise _nothing_to_train_on(path, splits)
    held_out = next((name for name in _HELD_OUT_SPLITS if name in splits), None)
    unused = [_describe_split(name, members) for name, members in splits.items() if name != held_out]
    unused += _describe_rest(set(rest) - set(chosen))
    # If all files of the folder are trained on, there is no choice to describe.
    train_name = _count_files(len(chosen)) if splits or unused else ""
    train = _join_files(path, chosen)
    return Splits(train=train, train_name=train_name, **_describe_held_out(path, splits, held_out), unused=tuple(unused))


def _describe_held_out(path: Path, splits: Mapping[str, list[Path]], split: str | None) -> dict[str, Any]:
    """Return the fields of `Splits` for the split that is held out."""
    if split is None:
        return {}
    source = replace(_join_split(path, "held out", splits[split]), is_held_out=True)
    return {"held_out": source, "held_out_name": _describe_split(split, splits[split])}


# Return the error for a folder without a file to train on.
def _nothing_to_train_on(path: Path, splits: Mapping[str, list[Path]]) -> DataError:
    if not splits:
        return DataError(
            f"{path}: found neither a saved dataset, nor files to train on ({', '.join(KNOWN)}). Name a file with --train_file."
        )
    files = [file.relative_to(path) for members in splits.values() for file in members]
    return DataError(
        f"{path}: its files are named after {', '.join(splits)}, and none after train. {listing(files)} Name the file "
        "to train on with --train_file, or the split with split, in an entry under datasets in the YAML."
    )


def _count_files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _describe_split(split: str, files: Sequence[Path]) -> str:
    return f"split {split} ({_count_files(len(files))})"


def _describe_rest(files: Collection[Path]) -> list[str]:
    """Return the entry of `Splits.unused` for files without a split; an empty list if there are none."""
    kinds = sorted(set(map(suffix_of, files)))
    return [f"{_count_files(len(files))} beside them ({', '.join(kinds)})"] if files else []


def _join_split(folder: Path, split: str, files: list[Path]) -> Source:
    """Return the files of one split as one source. Raises `DataError` if they are of several kinds."""
    kinds = sorted(set(map(suffix_of, files)))
    if len(kinds) > 1:
        raise DataError(f"{folder}: files of the split {split} are of several kinds: {', '.join(kinds)}. Keep one kind.")
    return _join_files(folder, files)


def _join_files(folder: Path, files: list[Path]) -> Source:
    """Return files of a folder as one source, read one after another."""
    sources = [file_source(file) for file in files]
    # Keep the source of a single file as it is. If the file is a text, only this source has `Source.lone_text` set.
    if len(sources) == 1:
        return sources[0]

    def read() -> Iterator[Item]:
        for source in sources:
            for location, row, cost in source.read():
                yield f"{Path(source.name).relative_to(folder)}, {location}", row, cost

    def digest() -> str:
        # One line for each file, so that a file can be found that two sources have in common. Empty files have no samples.
        return "\n".join(source.digest() for source in sources if source.total)

    def sketch() -> str:
        """Return a digest of the files' names and sketches. Unlike `digest`, it does not read large files as a whole."""
        sketches = []
        for source in sources:
            make_sketch = source.sketch or source.digest
            sketches.append(f"{Path(source.name).name}:{make_sketch()}".encode())
        return digest_of(*sketches)

    def cut() -> list[Source]:
        shards = []
        for numbers in join_small(source.total for source in sources):
            # Small files share a shard. Each shard needs a process that prepares it, and if running text is cut into blocks of
            # equal length, the tokens at the end of a shard that do not fill a block are dropped.
            if len(numbers) == 1:
                shards += sources[numbers[0]].shards()
            else:
                shards.append(_join_files(folder, [files[number] for number in numbers]))
        return shards

    total = sum(source.total for source in sources)
    return Source(name=str(folder), read=read, digest=digest, total=total, unit="B", sketch=sketch, cut=cut)
