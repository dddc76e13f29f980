"""Splits of a folder of data files, by the rules of `datasets`: the README's ``configs``, else the names of files and folders.

A folder that was downloaded from the hub has the same splits here as ``datasets.load_dataset`` gives it, if that finds a
training split. Files are only matched against patterns, so a README cannot name files outside of its folder.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from zerobook.data.files import COMPRESSED, KNOWN, suffix_of
from zerobook.errors import DataError
from zerobook.utils.reading import read_text
from zerobook.utils.yaml_text import load_bounded

CARD = "README.md"
# Bytes. The header of a longer README is not read.
CARD_BYTES = 4 << 20
CONFIG_FLAG = "--dataset_config_name"
# Keys of a README's config that say which files belong to it.
FILE_KEYS = ("config_name", "data_files", "data_dir", "default")
# File types that `datasets` does not read as text. Their names are ordinary words, such as test_loss.py or train/loop.py.
PROSE = (".md", ".py")
# Files that an error lists; the others are counted.
LISTED = 12


@dataclass(frozen=True)
class FolderSplits:
    """The files of each split. ``rest``: data files without a split.

    ``declared``: the README defines the splits; otherwise the names of the files do.
    """

    splits: dict[str, list[Path]]
    rest: list[Path]
    declared: bool


def find_splits(folder: Path, config_name: str | None) -> FolderSplits:
    """Return the splits of a folder, by the README's ``configs``, or else by the names of its files and folders.

    Raises:
        DataError: the README cannot be read, names several configs and none is chosen, or names files that are not here; a
            file belongs to two splits, or is there twice, once compressed; the folder is a cache of the hub.
    """
    # The snapshots of several commits have files in common, which would be trained on several times.
    if (folder / "refs").is_dir() and (folder / "snapshots").is_dir():
        raise DataError(
            f"{folder}: it is a cache of the hub, which may hold several commits. Name one of them: {folder}/snapshots/COMMIT"
        )
    config = _choose_config(folder, config_name)
    # A config may have its files in a folder of its own.
    base = PurePosixPath(str(config.get("data_dir") or "."))
    names = [name for name in _list_data_files(folder) if name.is_relative_to(base)]
    # The README defines the splits. Without it, the names of folders do for texts, and those of files and folders for the rest.
    declared_splits = _declared_splits(folder, names, base, config)
    if declared_splits is not None:
        candidates = declared_splits
    elif all(suffix_of(Path(name)) in PROSE for name in names):
        candidates = _splits_by_top_folder(names, base)
    else:
        candidates = _splits_by_name([name for name in names if suffix_of(Path(name)) not in PROSE], base)
    _refuse_shared_files(folder, candidates)

    splits: dict[str, list[Path]] = {}
    for split, members in candidates.items():
        if members:
            splits[split] = [folder / name for name in members]
    rest = set(names).difference(*candidates.values())
    # Check all data files, since files without a split may be trained on too.
    _refuse_links_out_of(folder, [folder / name for name in names])
    return FolderSplits(splits, rest=[folder / name for name in sorted(rest)], declared=declared_splits is not None)


def _refuse_links_out_of(folder: Path, files: Sequence[Path]) -> None:
    """Raise `DataError` if a folder, which may come from elsewhere, has a link to a file that is not in it.

    A cache of the hub keeps a dataset's files in ``blobs``, beside the ``snapshots`` that link to them.
    """
    top = folder.resolve()
    allowed_folders = [top]
    # The folder may be a part of a snapshot.
    for parent in top.parents:
        if parent.name == "snapshots":
            allowed_folders.append(parent.parent / "blobs")
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(allowed) for allowed in allowed_folders):
            raise DataError(f"{file}: it is a link to {target}, which is not in {folder}. Name that file, or copy it there.")


def listing(files: Sequence[PurePosixPath | Path]) -> str:
    """Return a sentence that lists files."""
    if not files:
        return "It has no data files."
    more = f" and {len(files) - LISTED} more" if len(files) > LISTED else ""
    return f"Its data files: {', '.join(map(str, files[:LISTED]))}{more}."


def same_split(name: str) -> str:
    """Return the name that `datasets` gives a split, such as ``validation`` for ``dev``; an unknown name as it is."""
    for split, keywords in _keywords().items():
        if name in keywords:
            return str(split)
    return name


# Return the spellings of each split that `datasets` knows, by its name. The import takes long.
def _keywords() -> Mapping[Any, list[str]]:
    from datasets.data_files import SPLIT_KEYWORDS

    return SPLIT_KEYWORDS


def _list_data_files(folder: Path) -> list[PurePosixPath]:
    """Return the files of known types, relative to the folder and sorted. As in `datasets`, hidden ones are left out.

    Raises:
        DataError: a file is there twice, once compressed.
    """
    from datasets.data_files import FILES_TO_IGNORE

    names: list[PurePosixPath] = []
    copies: dict[PurePosixPath, PurePosixPath] = {}  # name without the suffix of a compression -> the file's name
    for file in sorted(folder.rglob("*")):
        name = PurePosixPath(file.relative_to(folder).as_posix())
        is_hidden = any(component.startswith(".") for component in name.parts)
        # __MACOSX and __pycache__ are not data.
        is_special = any(component.startswith("__") for component in name.parent.parts)
        # `datasets` ignores descriptions. Here, a README in a deeper folder is a text.
        is_description = name.name in FILES_TO_IGNORE and (name.name != CARD or str(name) == CARD)
        if file.is_file() and suffix_of(file) in KNOWN and not (is_hidden or is_special or is_description):
            names.append(name)
            # zstd and `gzip -k` leave the original file beside its compressed copy.
            other = copies.setdefault(name.with_suffix("") if name.suffix.lower() in COMPRESSED else name, name)
            if other != name:
                raise DataError(
                    f"{folder}: {name} seems to be a copy of {other.name}, and both would be used. Delete or move one of them."
                )
    return names


# --- the README
def _choose_config(folder: Path, config_name: str | None) -> dict[str, Any]:
    """Return the README's config of that name, or its default one; an empty one if the README has no configs."""
    configs = _card_configs(folder)
    if not configs:
        if config_name not in (None, "default"):
            raise DataError(f"{folder}: {CONFIG_FLAG} is {config_name!r}, and its {CARD} names no configs. Drop the flag.")
        return {}
    if config_name is None:
        try:
            config_name = configs.get_default_config_name()
        except ValueError as error:
            raise DataError(f"{folder / CARD}: {error} Choose one with {CONFIG_FLAG}.") from None
    if config_name is None:
        raise DataError(f"{folder}: its {CARD} names the configs {', '.join(configs)}. Choose one with {CONFIG_FLAG}.")
    if config_name not in configs:
        raise DataError(f"{folder}: there is no config {config_name!r}, only {', '.join(configs)}. Correct {CONFIG_FLAG}.")
    return configs[config_name]


def _card_configs(folder: Path) -> Any:
    """Return the ``configs`` in the header of the README (`datasets.utils.metadata.MetadataConfigs`), or None."""
    from datasets.utils.metadata import MetadataConfigs

    card = folder / CARD
    if not card.is_file() or card.stat().st_size > CARD_BYTES:
        return None
    header = _header(card)
    if not isinstance(header, dict) or not header.get("configs"):
        return None
    try:
        entries = []
        for entry in header["configs"]:
            entries.append({key: entry[key] for key in FILE_KEYS if key in entry})
        configs = MetadataConfigs.from_dataset_card_data({"configs": entries})
        # YAML reads names such as 2023 and no as values of other types.
        return MetadataConfigs({str(name): config for name, config in configs.items()})
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{card}: the configs in its header cannot be read: {reason:.300}") from None


def _header(card: Path) -> object:
    """Return the value of the YAML between the README's first two lines of three dashes; None if it can have no configs."""
    import yaml

    text = read_text(card, errors="replace")
    match = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", text, re.DOTALL)
    # Most headers have no configs, and need not be parsed, which takes long.
    if match is None or "configs:" not in match[1]:
        return None
    try:
        return load_bounded(match[1])
    # PyYAML raises ValueError for a date that does not exist, and for a number that Python cannot read.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"{card}: its header is not valid YAML: {' '.join(str(error).split()):.300}") from None


def _declared_splits(
    folder: Path, names: list[PurePosixPath], base: PurePosixPath, config: Mapping[str, Any]
) -> dict[str, list[PurePosixPath]] | None:
    """Return the files of the splits that the README's config declares; None if it declares none.

    Raises:
        DataError: the config cannot be read, or no split has any file.
    """
    from datasets.data_files import sanitize_patterns

    if config.get("data_files") is None:
        return None
    try:
        patterns = sanitize_patterns(config["data_files"])
    except ValueError as error:
        raise DataError(f"{CARD}: {error}") from None
    # As in `datasets`, a README is not data, in any folder.
    data_names = [name for name in names if name.name != CARD]
    splits = {}
    for split, split_patterns in patterns.items():
        splits[str(split)] = _matching(data_names, base, map(str, split_patterns))
    if not any(splits.values()):
        raise DataError(
            f"{folder}: its {CARD} names the splits {', '.join(splits)}, and no file here matches. {listing(names)} "
            "Download the data files too, or name a file with --train_file."
        )
    return splits


# --- names
def _splits_by_name(names: list[PurePosixPath], base: PurePosixPath) -> dict[str, list[PurePosixPath]]:
    """Return the splits by the names of files and folders, with the patterns of `datasets`.

    `datasets` has three kinds of patterns: names of shards such as ``train-00000-of-00005``, names of folders, and names of
    files. The next kind is used, for files that have no split yet, only as long as there is no training split.
    """
    from datasets.data_files import (
        DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME,
        DEFAULT_PATTERNS_SPLIT_IN_FILENAME,
        SPLIT_PATTERN_SHARDED,
    )

    by_split: dict[str, list[PurePosixPath]] = {}
    for name in _matching(names, base, [SPLIT_PATTERN_SHARDED.replace("{split}", "*")]):
        split = re.split(r"-\d{5}-of-\d{5}", name.name)[0]
        by_split.setdefault(split, []).append(name)
    for patterns in (DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME, DEFAULT_PATTERNS_SPLIT_IN_FILENAME):
        if any(members and split.startswith("train") for split, members in by_split.items()):
            break
        # If no training split is found, all files without a split are trained on. So all held-out files have to be found.
        assigned = set(chain.from_iterable(by_split.values()))
        names = [name for name in names if name not in assigned]
        for split, split_patterns in patterns.items():
            by_split.setdefault(str(split), []).extend(_matching(names, base, split_patterns))
    return by_split


def _splits_by_top_folder(names: list[PurePosixPath], base: PurePosixPath) -> dict[str, list[PurePosixPath]]:
    """Return the splits of a folder of texts: its top folders that are named after splits; none if none is ``train``."""
    splits: dict[str, list[PurePosixPath]] = {}
    keywords = set(map(str, _keywords()))
    for name in names:
        top, *inside = name.relative_to(base).parts
        split = same_split(top)
        if inside and split in keywords:
            splits.setdefault(split, []).append(name)
    return splits if "train" in splits else {}


def _matching(names: Sequence[PurePosixPath], base: PurePosixPath, patterns: Iterable[str]) -> list[PurePosixPath]:
    """Return the names that match one of the patterns relative to ``base``, in the order of the patterns, each once."""
    matches: dict[PurePosixPath, None] = {}  # a set that keeps its order
    for pattern in patterns:
        pattern_parts = (base / pattern).parts
        matches |= dict.fromkeys(name for name in names if _matches(name.parts, pattern_parts))
    return list(matches)


def _matches(name: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a path matches a pattern. Both are tuples of parts.

    The part ``**`` of a pattern matches any number of parts; at the end of the pattern, at least one.
    """

    # The cache compares each pair of parts once. Without it, a README could have a pattern that takes exponential time.
    @cache
    def matches_from(name_index: int, pattern_index: int) -> bool:
        if pattern_index == len(pattern):
            return name_index == len(name)
        if pattern[pattern_index] == "**":
            if pattern_index == len(pattern) - 1:
                return name_index < len(name)
            # The two stars match no part here, or this part and maybe more.
            if matches_from(name_index, pattern_index + 1):
                return True
            return name_index < len(name) and matches_from(name_index + 1, pattern_index)
        if name_index == len(name) or not fnmatchcase(name[name_index], pattern[pattern_index]):
            return False
        return matches_from(name_index + 1, pattern_index + 1)

    return matches_from(0, 0)


def _refuse_shared_files(folder: Path, splits: Mapping[str, Sequence[PurePosixPath]]) -> None:
    """Raise `DataError` if a file belongs to two splits, since held-out samples would be trained on."""
    owners: dict[PurePosixPath, str] = {}
    for split, files in splits.items():
        for name in files:
            if owners.setdefault(name, split) != split:
                raise DataError(
                    f"{folder}: {name} belongs to the splits {owners[name]} and {split} by its name. Rename it, or name the "
                    "file to train on with --train_file."
                )
