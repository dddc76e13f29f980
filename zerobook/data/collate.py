"""Rows to padded tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
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


class PackedCollator:
    """Rows of several samples each, told apart by ``position_ids`` that begin anew with every sample.

    Without ``mask`` there is no attention mask: transformers' masks, and its variable-length flash attention, take the
    samples' borders from the positions. Padding on the right is a sample of its own that nothing supervises.

    Args:
        pad_token_id: fills ``input_ids``.
        pad_to_multiple_of: round the length up to this.
        flatten: join all rows into one, without padding between; variable-length flash attention needs it so.
        mask: for models that do not look at the positions, a block-diagonal causal mask: torch.bool (True attends) or a
            floating dtype (0 attends, the lowest number does not).

    Returns (by calling):
        ``input_ids``, ``position_ids``, ``labels``: int64 [rows, length], or [1, tokens] flattened; with ``mask`` also
        ``attention_mask`` [rows, 1, length, length].

    >>> row = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "position_ids": [0, 1, 0]}
    >>> batch = PackedCollator(0, pad_to_multiple_of=4)([row])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist()
    ([[5, 6, 7, 0]], [[-100, 6, -100, -100]], [[0, 1, 0, 0]])
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int = 1, flatten: bool = False, mask: torch.dtype | None = None):
        self.fill = {"input_ids": pad_token_id, "labels": IGNORE, "position_ids": 0}
        self.multiple = pad_to_multiple_of
        self.flatten = flatten
        self.mask = mask

    def masking(self, dtype: torch.dtype) -> PackedCollator:
        """The same collator with an explicit mask."""
        return PackedCollator(self.fill["input_ids"], self.multiple, self.flatten, dtype)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if self.flatten:
            rows = [{key: np.concatenate([_with_positions(row)[key] for row in rows]) for key in self.fill}]
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.multiple) * self.multiple
        batch = {key: torch.full((len(rows), length), fill, dtype=torch.long) for key, fill in self.fill.items()}
        for i, row in enumerate(rows):
            size = len(row["input_ids"])
            for key, tensor in batch.items():
                tensor[i, :size] = torch.as_tensor(_with_positions(row)[key])
            batch["position_ids"][i, size:] = torch.arange(length - size)
        if self.mask is not None:
            batch["attention_mask"] = _block_diagonal(batch["position_ids"], self.mask)
        return batch


def _block_diagonal(position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    sample = (position_ids == 0).cumsum(-1)
    attends = (sample[:, None, :, None] == sample[:, None, None, :]).tril()
    if dtype is torch.bool:
        return attends
    return torch.zeros(attends.shape, dtype=dtype).masked_fill_(~attends, torch.finfo(dtype).min)


def _with_positions(row: dict[str, Any]) -> dict[str, Any]:
    """A row of running text among packed ones is one sample."""
    return row if "position_ids" in row else row | {"position_ids": np.arange(len(row["input_ids"]))}


def causal_collator(tokenizer: Any, model: Any, *, packed: bool) -> CausalCollator | PackedCollator:
    """The collator that suits ``model``, where it is and how it attends."""
    multiple = 8 if torch.cuda.is_available() else 1  # what tensor cores like
    if not packed:
        return CausalCollator(tokenizer.pad_token_id, multiple)
    flatten = "flash" in str(model.config._attn_implementation)
    return PackedCollator(tokenizer.pad_token_id, multiple, flatten)
