"""One process tokenizes, all map the result from disk."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerobook.config import RecipeConfig
from zerobook.data import sources
from zerobook.data.tokenize import Tokenized, supervised_tokens, tokenize
from zerobook.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokenized samples, mapped from disk. ``supervised`` is int64 [len(rows)]."""

    rows: Any
    supervised: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """``held_out`` by dataset; empty where nothing is held out. ``report`` says what became of the samples."""

    train: Part
    held_out: dict[str, Part]
    report: dict[str, dict[str, int]]


def prepare(config: RecipeConfig, tokenizer: Any, strategy: Strategy, *, length: int) -> PreparedData:
    """Tokenize on rank 0 into ``output_dir/data`` and open the result on every rank.

    Raises:
        DataError: on every rank, where rank 0 met one.
    """
    folder = Path(config.output_dir) / "data"
    error: Exception | None = None
    report: dict[str, dict[str, int]] = {}
    if strategy.is_main:
        try:
            train, held_out = sources.load(config)
            shutil.rmtree(folder, ignore_errors=True)
            parts = (("train", train, config.max_train_samples), ("held_out", held_out, config.max_eval_samples))
            for name, rows, limit in parts:
                if len(rows):
                    tokenized = tokenize(rows, tokenizer, length=length, limit=limit, progress=True)
                    report[name] = tokenized.report
                    _save(tokenized, folder / name)
        except Exception as caught:
            error = caught
    error, report = strategy.from_main((error, report))
    if error is not None:
        raise error
    return PreparedData(
        train=_open(folder / "train"),
        held_out={"held_out": _open(folder / "held_out")} if (folder / "held_out").exists() else {},
        report=report,
    )


def _save(tokenized: Tokenized, folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    digest = hashlib.sha256()
    for row in tokenized.rows:
        digest.update(np.asarray(row["input_ids"], np.int64).tobytes() + np.asarray(row["labels"], np.int64).tobytes())
    columns = {key: [row[key] for row in tokenized.rows] for key in ("input_ids", "labels")}
    columns["supervised"] = supervised_tokens(tokenized.rows).tolist()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    (folder / "fingerprint").write_text(digest.hexdigest()[:16])


def _open(folder: Path) -> Part:
    import datasets

    datasets.disable_progress_bars()
    saved = datasets.load_from_disk(str(folder))
    return Part(
        rows=saved.select_columns(["input_ids", "labels"]),
        supervised=np.asarray(saved["supervised"], dtype=np.int64),
        fingerprint=(folder / "fingerprint").read_text(),
    )
