"""Rows to padded tensors."""

from __future__ import annotations

from typing import Any

import torch

from zerobook.data.feed import IGNORE


class CausalCollator:
    """Pads a list of rows on the right.

    Args:
        pad_token_id: id that fills ``input_ids``; it is masked from attention and loss, so any id serves.
        pad_to_multiple_of: round the length up to this (8 suits tensor cores); 1 pads to the longest row.

    Returns (by calling):
        ``input_ids``, ``attention_mask``, ``labels``: int64 [rows, length].

    >>> batch = CausalCollator(0)([{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6], [7, 0]], [[-100, 6], [7, -100]], [[1, 1], [1, 0]])
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int = 1):
        self.pad_token_id = pad_token_id
        self.multiple = pad_to_multiple_of

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.multiple) * self.multiple
        shape = (len(rows), length)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id, dtype=torch.long),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "labels": torch.full(shape, IGNORE, dtype=torch.long),
        }
        for i, row in enumerate(rows):
            size = len(row["input_ids"])
            batch["input_ids"][i, :size] = torch.as_tensor(row["input_ids"])
            batch["labels"][i, :size] = torch.as_tensor(row["labels"])
            batch["attention_mask"][i, :size] = 1
        return batch
