"""Rows to padded tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from zerobook.data.feed import IGNORE


def padded(sequences: Sequence[Sequence[int]], fill: int, *, multiple: int = 1, at_least: int = 0) -> torch.Tensor:
    """Sequences of ids, padded on the right with ``fill``, as int64 [rows, length].

    The length is that of the longest (or ``at_least``), rounded up to a ``multiple``.
    """
    longest = max(at_least, *(len(ids) for ids in sequences))
    batch = torch.full((len(sequences), -(-longest // multiple) * multiple), fill, dtype=torch.long)
    for row, ids in zip(batch, sequences, strict=True):
        row[: len(ids)] = torch.as_tensor(ids)
    return batch


def attention_mask(sequences: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """1 on ids, 0 on padding: int64 [rows, length]. By position, since the pad token may be a real one too."""
    sizes = torch.tensor([len(ids) for ids in sequences])
    return (torch.arange(length) < sizes[:, None]).long()


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
        ids = [row["input_ids"] for row in rows]
        batch = padded(ids, self.pad_token_id, multiple=self.multiple)
        return {
            "input_ids": batch,
            "attention_mask": attention_mask(ids, batch.size(1)),
            "labels": padded([row["labels"] for row in rows], IGNORE, multiple=self.multiple),
        }


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
        rows = [_with_positions(row) for row in rows]
        if self.flatten:
            rows = [{key: np.concatenate([row[key] for row in rows]) for key in self.fill}]
        batch = {key: padded([row[key] for row in rows], fill, multiple=self.multiple) for key, fill in self.fill.items()}
        for row, positions in zip(rows, batch["position_ids"], strict=True):
            positions[len(row["input_ids"]) :] = torch.arange(len(positions) - len(row["input_ids"]))
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


class DecoderInput:
    """What a seq2seq model's decoder reads where it must predict ``labels``: the model's own rule, without its weights.

    The rule is a method that looks at the config only, so it runs on an empty shell of the model's class. The shell
    is a few kilobytes to send to a DataLoader worker, and stays as it is when the model is sharded.

    Args:
        model: an encoder-decoder model of transformers, before it is wrapped.

    Call it with labels, int64 [rows, target length] with IGNORE at padding; it returns ids of the same shape.
    """

    def __init__(self, model: nn.Module):
        self.shell = type(model).__new__(type(model))
        nn.Module.__init__(self.shell)
        self.shell.config = model.config

    def __call__(self, labels: torch.Tensor) -> torch.Tensor:
        own = getattr(self.shell, "prepare_decoder_input_ids_from_labels", None)
        if own is not None:
            return own(labels)
        # BlenderBot has no such method; its forward applies the function beside it in its module
        config = self.shell.config
        shift = sys.modules[type(self.shell).__module__].shift_tokens_right
        return shift(labels, config.pad_token_id, config.decoder_start_token_id)


class Seq2SeqCollator:
    """Pads sources and targets on the right, each to its own length, and makes the decoder's input.

    Args:
        pad_token_id: id that fills ``input_ids``; it is masked from attention, so any id serves.
        decoder_input: labels -> decoder input ids, both int64 [rows, target length]: `DecoderInput` of the model.
        pad_to_multiple_of: round both lengths up to this (8 suits tensor cores); 1 pads to the longest row.
        source_length: pad every source to this many tokens, so that all batches have one shape; 0: to the longest.
        target_length: the same for targets.

    Returns (by calling):
        ``input_ids``, ``attention_mask``: int64 [rows, source length];
        ``labels`` (IGNORE at padding), ``decoder_input_ids``: int64 [rows, target length].

    >>> def shift(labels):  # as BART does, with 2 to start and 0 to pad
    ...     before = torch.cat([torch.full((len(labels), 1), 2), labels[:, :-1]], dim=1)
    ...     return before.masked_fill(before == -100, 0)
    >>> rows = [{"input_ids": [5, 6, 7], "labels": [8, 9]}, {"input_ids": [4], "labels": [3]}]
    >>> batch = Seq2SeqCollator(0, shift)(rows)
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 7], [4, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    >>> batch["labels"].tolist(), batch["decoder_input_ids"].tolist()
    ([[8, 9], [3, -100]], [[2, 8], [2, 3]])
    """

    def __init__(
        self,
        pad_token_id: int,
        decoder_input: Callable[[torch.Tensor], torch.Tensor],
        pad_to_multiple_of: int = 1,
        *,
        source_length: int = 0,
        target_length: int = 0,
    ):
        self.pad_token_id = pad_token_id
        self.decoder_input = decoder_input
        self.multiple = pad_to_multiple_of
        self.source_length = source_length
        self.target_length = target_length

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = padded([row["labels"] for row in rows], IGNORE, multiple=self.multiple, at_least=self.target_length)
        return {
            **self.sources(rows),
            "labels": labels,
            "decoder_input_ids": self.decoder_input(labels),
        }

    def sources(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask`` alone: what generation reads."""
        ids = [row["input_ids"] for row in rows]
        batch = padded(ids, self.pad_token_id, multiple=self.multiple, at_least=self.source_length)
        return {"input_ids": batch, "attention_mask": attention_mask(ids, batch.size(1))}
