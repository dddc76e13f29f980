"""Stand-in until `zerobook.data.prepare` takes an encoder and an objective: delete with its import."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from zerobook.data import prepare as room
from zerobook.data import sources
from zerobook.data.feed import IGNORE
from zerobook.data.tokenize import Tokenized


class Seq2SeqEncoder:
    def __init__(self, tokenizer: Any, *, max_source_length: int, max_target_length: int, prefix: str = ""):
        self.tokenizer, self.prefix = tokenizer, prefix
        self.lengths = (max_source_length, max_target_length)

    def __call__(self, row: dict[str, Any], columns: tuple[str | None, str | None]) -> dict[str, list[int]]:
        if "messages" in row:
            source, target = row["messages"][-2]["content"], row["messages"][-1]["content"]
        else:
            names = list(row)
            source, target = row[columns[0] or names[0]], row[columns[1] or names[1]]
        ids = self.tokenizer(self.prefix + source)["input_ids"][: self.lengths[0]]
        labels = [*self.tokenizer(target, add_special_tokens=False)["input_ids"][: self.lengths[1] - 1]]
        labels.append(self.tokenizer.eos_token_id)
        return {"input_ids": ids, "labels": labels}


def prepare(config: Any, tokenizer: Any, strategy: Any, *, encoder: Seq2SeqEncoder, objective: Any) -> room.PreparedData:
    folder = Path(config.output_dir) / "data"
    names = ("train", "held_out")
    if strategy.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        limits = (config.max_train_samples, config.max_eval_samples)
        for name, rows, limit in zip(names, sources.load(config), limits, strict=True):
            rows = [rows[i] for i in range(min(len(rows), limit or len(rows)))]
            encoded = [encoder(row, (config.text_column, config.summary_column)) for row in rows]
            if encoded:
                room._save(Tokenized(rows=encoded), folder / name)
    strategy.barrier()
    parts = {}
    for name in names:
        if (folder / name).exists():
            part = room._open(folder / name)
            counts = [sum(label != IGNORE for label in row["labels"]) for row in part.rows]
            parts[name] = room.Part(rows=part.rows, supervised=np.array(counts), fingerprint=part.fingerprint)
    held_out = {k: v for k, v in parts.items() if k == "held_out"}
    return room.PreparedData(train=parts["train"], held_out=held_out, report={})
