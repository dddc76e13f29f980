"""Where samples come from: a hub name, a file, a folder, a saved dataset, or an embedded one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.errors import DataError

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".py": "text"}

Rows = Sequence[dict[str, Any]]


def load(config: RecipeConfig) -> tuple[Rows, Rows]:
    """Raw (training, held-out) samples, as the config names and splits them.

    Where the data has no validation split, the last ``validation_split_percentage`` of a
    seeded shuffle is held out, at least one sample unless the share is 0. Of a single text the last lines are.

    Raises:
        DataError: a file or dataset that cannot be read, or that is empty.
    """
    if config.dataset_name:
        train, held_out = _named(config.dataset_name, config.dataset_config_name)
    else:
        assert config.train_file is not None
        train, held_out = _file(Path(config.train_file)), None
    if config.validation_file:
        held_out = _file(Path(config.validation_file))
    if not len(train):
        raise DataError(f"{config.dataset_name or config.train_file}: the dataset is empty, there is nothing to train on.")
    if held_out is None:
        train, held_out = _split(train, config.validation_split_percentage / 100, config.seed)
    return train, held_out


def _named(name: str, configuration: str | None) -> tuple[Rows, Rows | None]:
    if name.startswith(embedded.PREFIX):
        return embedded.rows(name.removeprefix(embedded.PREFIX)), None
    path = Path(name).expanduser()
    if path.is_file():
        return _file(path), None
    if path.is_dir():
        return _folder(path)
    import datasets

    try:
        loaded = datasets.load_dataset(name, configuration)
    except Exception as error:  # the hub client raises many kinds
        raise DataError(
            f"{name}: there is no such file or folder here, and it could not be loaded from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})."
        ) from error
    if "train" not in loaded:
        raise DataError(f"{name}: the dataset has no train split, only {', '.join(loaded)}.")
    return loaded["train"], loaded.get("validation", loaded.get("test"))


def _folder(path: Path) -> tuple[Rows, Rows | None]:
    import datasets

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            return saved["train"], saved.get("validation", saved.get("test"))
        return saved, None
    named = {split: sorted(path.glob(f"{split}.*")) for split in ("train", "validation")}
    if named["train"]:
        held_out = _file(named["validation"][0]) if named["validation"] else None
        return _file(named["train"][0]), held_out
    files = sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md", ".py") and f.is_file())
    if not files:
        raise DataError(
            f"{path}: found neither a saved dataset, nor train.jsonl (or .json, .csv, .parquet, .txt), nor text files."
        )
    return [{"text": _read_text(f)} for f in files], None


def _file(path: Path) -> Rows:
    path = path.expanduser()
    if path.is_dir():
        return _folder(path)[0]
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path}: unknown file type {path.suffix!r}. Known: {', '.join(sorted(_READERS))}.")
    if reader == "text":
        text = _read_text(path)
        return [{"text": text}] if text.strip() else []
    if not path.stat().st_size:
        return []
    import datasets

    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train")
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(f"{path}: cannot be read as {reader}: {str(cause).splitlines()[0]}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason}). Convert it first.") from None


def _split(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    import numpy as np

    if len(rows) == 1 and "text" in rows[0]:
        lines = rows[0]["text"].splitlines(keepends=True)
        cut = len(lines) - round(len(lines) * share)
        head, tail = "".join(lines[:cut]), "".join(lines[cut:])
        return [{"text": head}], [{"text": tail}] if tail else []
    held = 0 if share == 0 else min(max(1, round(len(rows) * share)), len(rows) - 1)
    if held == 0:
        return rows, _pick(rows, [])
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    return _pick(rows, sorted(order[held:])), _pick(rows, sorted(order[:held]))


def _pick(rows: Rows, indices: Any) -> Rows:
    return rows.select(indices) if hasattr(rows, "select") else [rows[i] for i in indices]
