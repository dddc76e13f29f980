"""Sources of samples: a hub name, a file, a folder, a saved dataset, or an embedded one.

A `Source` is read from its beginning, one sample at a time, so that memory does not grow with its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
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
from zerobook.data.source import Item, Source, Splits, digest_of
from zerobook.errors import DataError, SourceError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHARD_ROWS = 50_000
"""Rows of a stream's shard, if the source is a dataset in memory."""
_TRAINING = re.compile(r"train(ing)?([-_.]|$)")
_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
"""Names of splits to hold out, the first that is there. A test split comes last: it is meant for the final figure."""
_KINDS = (JSON_LINES, (".parquet",), (".json",), TABLE, TEXT)
"""File types that are read together, in the order of preference."""


def open_source(
    path: str, *, config_name: str | None = None, revision: str | None = None, split: str | None = None, streaming: bool = False
) -> Splits:
    """Find the dataset that ``path`` names, without reading its samples.

    Args:
        path: a local file or folder, ``embedded:NAME``, or a hub name.
        config_name: the configuration of a hub dataset, or of a folder that was downloaded from there.
        revision: branch, tag or commit on the hub.
        split: take only this split, or some of its rows as ``train[:10%]``, for training; else the split ``train``, and one to
            hold out.
        streaming: do not download a hub dataset, but read its shards from there.

    Raises:
        DataError: nothing of that name, an unknown file type, a split that is not there.
    """
    split_name, has_rows, rows = (split or "").partition("[")
    splits = _open(path, config_name, revision, split_name or None, streaming=streaming)
    if has_rows:
        train_name = f"[{rows} of {splits.train_name or path}"
        splits = replace(splits, train=_take_range(splits.train, rows.removesuffix("]")), train_name=train_name)
    return splits


def _open(path: str, config_name: str | None, revision: str | None, split: str | None, *, streaming: bool) -> Splits:
    if path.startswith(embedded.PREFIX):
        name = path.removeprefix(embedded.PREFIX)
        rows = embedded.rows(name)
        _only_train(path, split)
        return Splits(train=_from_rows(path, rows, lambda: digest_of(f"{name} {rows}".encode(errors="replace"))))
    # A local file or folder comes before a hub name of the same spelling.
    local = Path(path).expanduser()
    if local.is_file():
        _only_train(path, split)
        return Splits(train=file_source(local))
    if local.is_dir():
        return _folder(local, config_name, split)
    if not is_on_hub(path):
        raise DataError(f"{path}: there is no such file or folder.")
    return _hub(path, config_name, revision, split, streaming=streaming)


def is_on_hub(path: str) -> bool:
    """Return whether a path that `open_source` takes is the name of a dataset on the hub.

    >>> is_on_hub("OWNER/NAME"), is_on_hub("embedded:chats"), is_on_hub("data/train.jsonl.gz"), is_on_hub("./data")
    (True, False, False, False)
    """
    local = Path(path).expanduser()
    # The hub has no such names.
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
    # The total of a file is in bytes, so its rows are counted.
    count = source.total if source.unit == " samples" else sum(1 for _ in source.read())
    numbers: list[Any] = []
    for bound in bounds.groups():
        number = int(bound.removesuffix("%")) if bound else None
        if number is not None and bound.endswith("%"):
            # Rounded as datasets does it, so that the rows are the same.
            number = round(number * count / 100)
        numbers.append(number)
    # A slice knows what missing, negative and too large bounds mean.
    start, stop, _ = slice(*numbers).indices(count)
    # Without a sketch, the content itself is compared. Without cuts, a stream reads the range as one shard.
    return replace(
        source,
        read=lambda: islice(source.read(), start, stop),
        digest=lambda: digest_of(source.digest().encode(), rows.encode()),
        sketch=None,
        cut=None,
    )


def open_held_out(path: str) -> Source:
    """Return the data that ``--validation_file`` names: its held-out split if it has one, else all of it."""
    try:
        splits = open_source(path)
    except DataError:
        # A folder of held-out data may have no training split.
        for split in _HELD_OUT_SPLITS if Path(path).expanduser().is_dir() else ():
            with suppress(DataError):
                return replace(open_source(path, split=split).train, is_held_out=True)
        raise
    return replace(splits.held_out or splits.train, is_held_out=True)


def _only_train(path: str, split: str | None) -> None:
    if split not in (None, "train"):
        raise DataError(f"{path}: it has no splits, and split is {split!r}. Name the file of that split, or drop split.")


def _from_rows(name: str, rows: Sequence[object], digest: Callable[[], str], sketch: Callable[[], str] | None = None) -> Source:
    def make_source(start: int, stop: int, digest: Callable[[], str]) -> Source:
        def read() -> Iterator[Item]:
            for index in range(start, stop):
                yield f"sample {index}", without_padding(rows[index]), 1

        return Source(name=name, read=read, digest=digest, total=stop - start, unit=" samples", sketch=sketch, cut=cut)

    def cut() -> list[Source]:
        starts = range(0, len(rows), SHARD_ROWS)
        # The whole content is not read for each shard.
        return [make_source(start, min(start + SHARD_ROWS, len(rows)), sketch or digest) for start in starts]

    return make_source(0, len(rows), digest)


# --- folders and the hub
def _hub(name: str, config_name: str | None, revision: str | None, split: str | None, *, streaming: bool) -> Splits:
    import datasets

    make_source: Callable[[str, Any], Source] = _of_cached
    try:
        builder = datasets.load_dataset_builder(name, config_name, revision=revision)
        if streaming:
            loaded = builder.as_streaming_dataset()
            # A stream has no fingerprint of its content, so its version is the builder's config and hash.
            make_source = partial(_of_iterable, version=f"{builder.config_id} {builder.hash}")
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
        # A run that reads a stream needs the network at each start, and it may be up again at the next one.
        is_of_network = streaming and isinstance(error, (ConnectionError, TimeoutError))
        error_type = SourceError if is_of_network else DataError
        raise error_type(
            f"{name}: there is no such file or folder here, and it could not be loaded from the hub "
            f"({type(error).__name__}: {reason}).{advice}"
        ) from error
    # If the hub does not answer, `datasets` takes the newest commit that it has in its cache.
    if re.fullmatch("[0-9a-f]{40}", revision or "") and builder.hash != revision:
        raise SourceError(
            f"{name}: the hub does not give commit {revision}, and the cache of datasets on this machine has {builder.hash}. "
            "Start again when the hub answers, or copy that commit into the cache."
        )
    return _of_dataset(name, loaded, split, make_source)


def _of_dataset(name: str, loaded: Mapping[str, Any], split: str | None, make_source: Callable[[str, Any], Source]) -> Splits:
    """Return the splits of a loaded dataset. ``make_source`` makes a source of one of them and its name."""
    train, held_out = _choose(name, list(loaded), split)
    unused = [f"split {split_name}" for split_name in loaded if split_name not in (train, held_out)]
    splits = Splits(train=make_source(f"{name} {train}", loaded[train]), train_name=f"split {train}", unused=tuple(unused))
    if held_out is None:
        return splits
    return replace(
        splits,
        held_out=replace(make_source(f"{name} held out", loaded[held_out]), is_held_out=True),
        held_out_name=f"split {held_out}",
    )


def _choose(name: str, available: Sequence[str], request: str | None) -> tuple[str, str | None]:
    """Return (the split to train on, the split to hold out or None).

    Args:
        request: the split that the user named; nothing of the dataset is held out beside it.

    Raises:
        DataError: there is no such split, no training split, or several.
    """
    if request is not None:
        # First the name as the user spelled it, then as datasets does.
        for split in (request, same_split(request)):
            if split in available:
                return split, None
        raise DataError(f"{name}: there is no split {request!r}, only {', '.join(available)}. Name one with split.")
    # Datasets for several methods of training have splits such as train_sft.
    training = [split for split in available if _TRAINING.match(split)]
    if "train" in available:
        training = ["train"]
    if len(training) != 1:
        reason = "several training splits" if training else "no split 'train'"
        raise DataError(
            f"{name}: it has {reason}; its splits are {', '.join(available)}. Name the one to train on with split, in an entry "
            "under datasets in the YAML."
        )
    # The held-out split of the same method comes first: test_sft beside train_sft.
    suffix = training[0].removeprefix("training").removeprefix("train")
    candidates = [split + suffix for split in _HELD_OUT_SPLITS]
    candidates += _HELD_OUT_SPLITS
    held_out = next((split for split in candidates if split in available), None)
    return training[0], held_out


def _of_cached(name: str, dataset: Dataset) -> Source:
    """Return a split that was downloaded. Its fingerprint is of the commit."""
    return _from_rows(name, dataset, lambda: str(dataset._fingerprint))


def _of_saved(name: str, dataset: Dataset) -> Source:
    """Return a split that ``save_to_disk`` wrote.

    Its fingerprint is of the functions that made it, and stays the same if code changes that they call.
    """
    files = [Path(file["filename"]) for file in dataset.cache_files]

    def digest(read: Callable[[Path], str]) -> str:
        return digest_of(*[read(file).encode() for file in files])

    # A format, which is saved too, leaves out columns and makes tensors.
    rows = dataset.with_format(None)
    return _from_rows(name, rows, partial(digest, read_digest), partial(digest, read_sketch))


def _of_iterable(name: str, dataset: IterableDataset, version: str) -> Source:
    """Return a source that reads a dataset from the hub during use. Its shards are the dataset's files on the hub."""

    def make_source(rows: IterableDataset, prefix: str) -> Source:
        def read() -> Iterator[Item]:
            for index, row in enumerate(rows):
                yield f"{prefix}sample {index}", without_padding(row), 1

        return Source(name=name, read=read, digest=lambda: f"{version} {name} {prefix}", total=0, unit=" samples", cut=cut)

    def cut() -> list[Source]:
        count = dataset.num_shards
        return [make_source(dataset.shard(num_shards=count, index=i), f"shard {i}, ") for i in range(count)]

    return make_source(dataset, "")


def _folder(path: Path, config_name: str | None, split: str | None) -> Splits:
    # ``save_to_disk`` writes the first file for several splits, and the second one for a single split.
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        # A dataset in memory does not name its files.
        with read_errors_named(path):
            saved = datasets.load_from_disk(str(path), keep_in_memory=False)
        if isinstance(saved, datasets.DatasetDict):
            return _of_dataset(str(path), saved, split, _of_saved)
        _only_train(str(path), split)
        return Splits(train=_of_saved(str(path), saved))
    layout = find_splits(path, config_name)
    files = layout.splits
    if not files:
        # As in `datasets`, the files of a folder without splits are the training split.
        _only_train(str(path), split)
        split = None
    # If a README declares the splits, they are used, even if none of them is called train.
    if not layout.declared and split is None and not any(map(_TRAINING.match, files)):
        return _without_train(path, files, layout.rest)
    train, held_out = _choose(str(path), list(files), split)
    unused = [_describe_split(name, members) for name, members in files.items() if name not in (train, held_out)]
    unused += _others(layout.rest)
    return Splits(
        train=_all_of(path, train, files[train]),
        train_name=_describe_split(train, files[train]),
        **_held_out(path, files, held_out),
        unused=tuple(unused),
    )


def _without_train(path: Path, splits: Mapping[str, list[Path]], rest: Sequence[Path]) -> Splits:
    """Return the splits of a folder without a file that is named after a training split: files of no split are trained on.

    Of several kinds of files, one is taken: JSON lines, else Parquet, else the one with the most files.
    """
    by_kind: list[list[Path]] = []
    for suffixes in _KINDS:
        by_kind.append([file for file in rest if suffix_of(file) in suffixes])
    chosen = by_kind[0] or by_kind[1] or max(by_kind[2:], key=len)
    if not chosen:
        raise _nothing_to_train_on(path, splits)
    held_out = next((name for name in _HELD_OUT_SPLITS if name in splits), None)
    unused = [_describe_split(name, members) for name, members in splits.items() if name != held_out]
    unused += _others(set(rest) - set(chosen))
    # If all files of the folder are trained on, there is no choice to describe.
    train_name = _files(len(chosen)) if splits or unused else ""
    train = _join_files(path, chosen)
    return Splits(train=train, train_name=train_name, **_held_out(path, splits, held_out), unused=tuple(unused))


def _held_out(path: Path, splits: Mapping[str, list[Path]], split: str | None) -> dict[str, Any]:
    """Return the fields of `Splits` for the split that is held out."""
    if split is None:
        return {}
    source = replace(_all_of(path, "held out", splits[split]), is_held_out=True)
    return {"held_out": source, "held_out_name": _describe_split(split, splits[split])}


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


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _describe_split(split: str, files: Sequence[Path]) -> str:
    return f"split {split} ({_files(len(files))})"


def _others(files: Collection[Path]) -> list[str]:
    """Return one entry for files that are not read, or none."""
    kinds = sorted(set(map(suffix_of, files)))
    return [f"{_files(len(files))} beside them ({', '.join(kinds)})"] if files else []


def _all_of(folder: Path, split: str, files: list[Path]) -> Source:
    """Return one split's files as one source."""
    kinds = sorted(set(map(suffix_of, files)))
    if len(kinds) > 1:
        raise DataError(f"{folder}: files of the split {split} are of several kinds: {', '.join(kinds)}. Keep one kind.")
    return _join_files(folder, files)


def _join_files(folder: Path, files: list[Path]) -> Source:
    """Return files of a folder as one source, read one after another."""
    sources = [file_source(file) for file in files]
    # A single text stays one, of which the end is held out.
    if len(sources) == 1:
        return sources[0]

    def read() -> Iterator[Item]:
        for source in sources:
            for location, row, cost in source.read():
                yield f"{Path(source.name).relative_to(folder)}, {location}", row, cost

    def digest() -> str:
        # One line for each file, so that a file which two sources have in common is found. Empty files have no samples.
        return "\n".join(source.digest() for source in sources if source.total)

    def sketch() -> str:
        """Return a digest of the files' names and sketches. Unlike `digest`, it does not read large files as a whole."""
        sketches = []
        for source in sources:
            # Only small files have no sketch.
            make_sketch = source.digest if source.sketch is None else source.sketch
            sketches.append(f"{Path(source.name).name}:{make_sketch()}".encode())
        return digest_of(*sketches)

    def cut() -> list[Source]:
        shards = []
        for numbers in join_small(source.total for source in sources):
            # Each shard loses an incomplete block, and takes a process to prepare. So small files share one.
            if len(numbers) == 1:
                shards += sources[numbers[0]].shards()
            else:
                shards.append(_join_files(folder, [files[number] for number in numbers]))
        return shards

    total = sum(source.total for source in sources)
    return Source(name=str(folder), read=read, digest=digest, total=total, unit="B", sketch=sketch, cut=cut)
