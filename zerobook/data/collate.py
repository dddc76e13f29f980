"""Collators: turn rows into padded tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from zerobook.constants import IGNORE
from zerobook.head import SUPERVISED
from zerobook.objective import shifted
from zerobook.utils.model_config import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def pad_sequences(sequences: Sequence[Sequence[int]], fill: int, *, multiple: int = 1, min_length: int = 0) -> torch.Tensor:
    """Pad sequences of ids on the right with ``fill``. Return int64 [rows, length].

    The length is that of the longest sequence, at least ``min_length``, rounded up to a multiple of ``multiple``.
    """
    longest = max(min_length, *map(len, sequences))
    batch = torch.full((len(sequences), -(-longest // multiple) * multiple), fill, dtype=torch.long)
    for row, ids in zip(batch, sequences, strict=True):
        row[: len(ids)] = torch.as_tensor(ids)
    return batch


def attention_mask(sequences: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """Return 1 on ids and 0 on padding, int64 [rows, length], by the lengths: a real token may have the pad token's id."""
    sizes = torch.tensor(list(map(len, sequences)))
    return (torch.arange(length) < sizes[:, None]).long()


class NoCache:
    """A key-value cache that keeps nothing, for ``past_key_values``.

    Without a mask and a cache, a model of transformers copies the positions to the host in every forward pass, to check
    whether the rows are packed. With a cache it does not.
    """

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values: none are stored."""
        return keys, values

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return (number of keys, position of the first)."""
        return length, 0


class SampleMask:
    """A block-diagonal causal mask that ``to`` builds on the device.

    Only one int32 per token is copied to the device. The mask itself has one number for each pair of tokens.

    Args:
        samples: int32 [rows, length], the number of each token's sample in its row.
        dtype: torch.bool (True attends) or a floating dtype (0 attends, the lowest number does not).

    >>> SampleMask(torch.tensor([[1, 1, 2]], dtype=torch.int32), torch.bool).to("cpu").int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """

    def __init__(self, samples: torch.Tensor, dtype: torch.dtype):
        self.samples = samples
        self.dtype = dtype

    def to(self, device: torch.device | str, non_blocking: bool = False) -> torch.Tensor:
        """Return the mask, ``dtype`` [rows, 1, length, length], on ``device``."""
        samples = self.samples.to(device, non_blocking=non_blocking)
        # A token attends to itself and to the earlier tokens of its sample.
        attends = (samples[:, None, :, None] == samples[:, None, None, :]).tril_()
        if self.dtype is torch.bool:
            return attends
        # A mask of numbers is added to the attention scores.
        mask = torch.zeros(attends.shape, dtype=self.dtype, device=attends.device)
        return mask.masked_fill_(attends.logical_not_(), torch.finfo(self.dtype).min)

    def pin_memory(self) -> SampleMask:
        """Return a copy in pinned memory. The DataLoader calls this method."""
        return SampleMask(self.samples.pin_memory(), self.dtype)


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a collator's batch with its tensors and masks on ``device``; numbers stay on the host."""
    moved = {}
    for key, value in batch.items():
        moved[key] = value.to(device, non_blocking=True) if hasattr(value, "to") else value
    return moved


def sequence_lengths(position_ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of variable-length flash attention, under the names that transformers gives them.

    Without them, transformers derives them from the positions in every layer, and each time the host waits for the device.

    Args:
        position_ids: int64 [rows, length], on the host. A sample begins at the start of each row, and at each position
            that is not the previous position plus 1.

    Returns:
        ``cu_seq_lens_q``, ``cu_seq_lens_k``: int32 [samples + 1], the start of each sample in the flattened rows, and
        the end; ``max_length_q``, ``max_length_k``: int, tokens of the longest sample.

    >>> sequence_lengths(torch.tensor([[0, 1, 2, 0, 1]]))["cu_seq_lens_q"].tolist()
    [0, 3, 5]
    """
    # A sample begins where a position is not the previous one plus 1.
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1
    ends = torch.tensor([position_ids.numel()])
    borders = torch.cat([begins.flatten().nonzero().flatten(), ends]).to(torch.int32)
    longest = int(borders.diff().max())
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def supervised_positions(labels: torch.Tensor) -> torch.Tensor:
    """Return the positions of the flattened rows that predict a supervised token, int64 [supervised].

    Call it on the host, before the labels are copied: on a device, the host would have to wait for the number of positions.

    Args:
        labels: int64 [rows, length]; IGNORE where nothing is supervised.

    >>> supervised_positions(torch.tensor([[5, -100, 7], [-100, 8, -100]])).tolist()
    [1, 3]
    """
    return (shifted(labels).flatten() != IGNORE).nonzero().flatten()


@dataclass(frozen=True)
class _Collator:
    """Options that the collators of padded and of packed rows have in common, and what these options add to a batch."""

    pad_token_id: int
    pad_to_multiple_of: int = 1
    lengths: bool = field(default=False, kw_only=True)
    no_cache: bool = field(default=False, kw_only=True)
    supervised: bool = field(default=False, kw_only=True)

    def with_extras(self, batch: dict[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Return ``batch`` with what the options add. ``positions``: of each token in its sample, int64 [rows, length]."""
        if self.lengths:
            batch |= sequence_lengths(positions)
        if self.no_cache:
            batch["past_key_values"] = NoCache()
        if self.supervised:
            batch[SUPERVISED] = supervised_positions(batch["labels"])
        return batch


@dataclass(frozen=True)
class CausalCollator(_Collator):
    """Pads a list of rows on the right.

    Args:
        pad_token_id: id that fills ``input_ids``. It is masked from the loss, and no token before it sees it, so any id works.
        pad_to_multiple_of: round the length up to this (8 suits tensor cores); 1 pads to the longest row.
        mask: add an attention mask. A model with causal attention needs none: see
            `zerobook.models.isolation.choose_isolating_collator`.
        lengths: add the `sequence_lengths`, for flash attention.
        no_cache: add a `NoCache`.
        supervised: add `zerobook.head.SUPERVISED`, the positions that have a target.

    Returns (by calling):
        ``input_ids``, ``labels``: int64 [rows, length]; with ``mask`` also ``attention_mask``, int64 [rows, length]; with
        ``lengths``, ``no_cache`` and ``supervised`` also what they add.

    >>> batch = CausalCollator(0)([{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6], [7, 0]], [[-100, 6], [7, -100]], [[1, 1], [1, 0]])
    """

    mask: bool = field(default=True, kw_only=True)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [row["input_ids"] for row in rows]
        batch: dict[str, Any] = {
            "input_ids": pad_sequences(ids, self.pad_token_id, multiple=self.pad_to_multiple_of),
            "labels": pad_sequences([row["labels"] for row in rows], IGNORE, multiple=self.pad_to_multiple_of),
        }
        count, length = batch["input_ids"].shape
        if self.mask:
            batch["attention_mask"] = attention_mask(ids, length)
        return self.with_extras(batch, torch.arange(length).expand(count, -1))


@dataclass(frozen=True)
class PackedCollator(_Collator):
    """Pads rows of several samples each, or of one. ``position_ids`` restart at 0 with every sample.

    Without ``mask`` there is no attention mask: transformers' masks, and its variable-length flash attention, take the
    samples' borders from the positions. Padding on the right is a sample of its own, which is not supervised.

    Args:
        pad_token_id: id that fills ``input_ids``.
        pad_to_multiple_of: round the length up to this.
        flatten: join all rows into one, without padding between them, as variable-length flash attention needs. The first
            token of a row is then not supervised: no token of its sample predicts it.
        mask: dtype of a block-diagonal causal mask, for models that ignore the positions: torch.bool (True attends) or a
            floating dtype (0 attends, the lowest number does not).
        min_length: pad every row to at least this many tokens. With the packs' capacity, all batches have one shape, and flex
            attention compiles once.
        lengths: add the `sequence_lengths`, for flash attention.
        no_cache: add a `NoCache`, with ``lengths`` only: the model then does not search for borders itself.

    Returns (by calling):
        ``input_ids``, ``position_ids``, ``labels``: int64 [rows, length], or [1, tokens] flattened; with ``mask`` also
        ``attention_mask``, a `SampleMask` that is [rows, 1, length, length] on a device; with ``lengths`` and ``no_cache``
        also the arguments that they add.

    >>> row = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "position_ids": [0, 1, 0]}
    >>> batch = PackedCollator(0, pad_to_multiple_of=4)([row])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist()
    ([[5, 6, 7, 0]], [[-100, 6, -100, -100]], [[0, 1, 0, 0]])
    """

    flatten: bool = False
    mask: torch.dtype | None = None
    min_length: int = field(default=0, kw_only=True)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        padding_values = {"input_ids": self.pad_token_id, "labels": IGNORE, "position_ids": 0}
        # A row without positions, such as one of running text, is one sample.
        rows = [{"position_ids": np.arange(len(row["input_ids"]))} | row for row in rows]
        if self.flatten:
            joined = {}
            for key in padding_values:
                joined[key] = np.concatenate([row[key] for row in rows])
            # The first token of a sample has no preceding token that could predict it.
            joined["labels"][joined["position_ids"] == 0] = IGNORE
            rows = [joined]
        batch: dict[str, Any] = {}
        for key, padding_value in padding_values.items():
            arrays = [row[key] for row in rows]
            batch[key] = pad_sequences(arrays, padding_value, multiple=self.pad_to_multiple_of, min_length=self.min_length)
        # Padding is a sample of its own, so its positions begin at 0.
        for row, positions in zip(rows, batch["position_ids"], strict=True):
            positions[len(row["input_ids"]) :] = torch.arange(len(positions) - len(row["input_ids"]))
        if self.mask is not None:
            # Positions start at 0 in every sample, so the number of zeros up to a token is the number of its sample.
            samples = (batch["position_ids"] == 0).cumsum(-1, dtype=torch.int32)
            batch["attention_mask"] = SampleMask(samples, self.mask)
        return self.with_extras(batch, batch["position_ids"])


def get_length_multiple(model: nn.Module) -> int:
    """Return the multiple to which lengths of batches are rounded up: 8 on a GPU, which suits tensor cores, and 1 elsewhere.

    It is also 1 if the model's number of positions is not a multiple of 8: the longest rows would be padded beyond them.
    """
    positions = getattr(text_config(model.config), "max_position_embeddings", None) or 0
    return 8 if torch.cuda.is_available() and positions % 8 == 0 else 1


def choose_causal_collator(
    tokenizer: PreTrainedTokenizerBase, model: nn.Module, *, packed: bool, padding_free: bool = False, length: int
) -> CausalCollator | PackedCollator:
    """Return the collator for ``model``, by its device and its attention implementation.

    Args:
        packed: rows hold several samples.
        padding_free: rows hold one sample each, and the rows of a micro-batch are joined.
        length: maximum number of tokens in a row.
    """
    multiple = get_length_multiple(model)
    if padding_free:
        return PackedCollator(tokenizer.pad_token_id, multiple, flatten=True)
    if not packed:
        return CausalCollator(tokenizer.pad_token_id, multiple)
    attention = str(cast("PreTrainedModel", model).config._attn_implementation)
    # Flex attention is compiled again for each new length, so all batches get the same length.
    min_length = length if attention == "flex_attention" else 0
    return PackedCollator(tokenizer.pad_token_id, multiple, flatten="flash" in attention, min_length=min_length)


class DecoderInput:
    """Computes the decoder input for labels, by the rule of a seq2seq model but without its weights.

    The rule is a method that reads only the config, so it runs on an empty instance of the model's class. This instance
    has a few kilobytes to send to a DataLoader worker, and does not change when the model is sharded.

    Args:
        model: an encoder-decoder model of transformers, before it is wrapped.

    Call it with labels, int64 [rows, target length] with IGNORE at padding; it returns ids of the same shape.
    """

    def __init__(self, model: nn.Module):
        # Do not call the model's __init__, which would allocate the weights.
        self.empty_model = cast("PreTrainedModel", type(model).__new__(type(model)))
        nn.Module.__init__(self.empty_model)
        self.empty_model.config = cast("PreTrainedModel", model).config

    def __call__(self, labels: torch.Tensor) -> torch.Tensor:
        config = self.empty_model.config
        # mBART, PLBart and FSMT move the last token of the labels to the front, and fail for a row without tokens, such as the
        # rows that fill up the last batch. So give these rows a token. It has no effect, since nothing in them is supervised.
        is_empty = ((labels == IGNORE) | (labels == config.pad_token_id)).all(dim=1)
        labels = labels.clone()
        labels[is_empty, 0] = 0 if config.pad_token_id != 0 else 1
        prepare_decoder_ids = getattr(self.empty_model, "prepare_decoder_input_ids_from_labels", None)
        if prepare_decoder_ids is not None:
            return prepare_decoder_ids(labels)
        # BlenderBot has no such method; its forward calls this function of its module.
        shift = sys.modules[type(self.empty_model).__module__].shift_tokens_right
        return shift(labels, config.pad_token_id, config.decoder_start_token_id)


@dataclass(frozen=True)
class Seq2SeqCollator:
    """Pads sources and targets on the right, each to its own length, and makes the decoder's input.

    Args:
        pad_token_id: id that fills ``input_ids``. Padding is masked from attention, so any id works.
        decoder_input: labels -> decoder input ids, both int64 [rows, target length]: `DecoderInput` of the model.
        pad_to_multiple_of: round both lengths up to this (8 suits tensor cores); 1 pads to the longest row.
        source_length: pad every source to this many tokens, so that all batches have one shape; 0: pad to the longest.
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

    pad_token_id: int
    decoder_input: Callable[[torch.Tensor], torch.Tensor]
    pad_to_multiple_of: int = 1
    source_length: int = field(default=0, kw_only=True)
    target_length: int = field(default=0, kw_only=True)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        targets = [row["labels"] for row in rows]
        labels = pad_sequences(targets, IGNORE, multiple=self.pad_to_multiple_of, min_length=self.target_length)
        return {
            **self.sources(rows),
            "labels": labels,
            "decoder_input_ids": self.decoder_input(labels),
        }

    def sources(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return only ``input_ids`` and ``attention_mask``, the inputs of generation."""
        ids = [row["input_ids"] for row in rows]
        batch = pad_sequences(ids, self.pad_token_id, multiple=self.pad_to_multiple_of, min_length=self.source_length)
        return {"input_ids": batch, "attention_mask": attention_mask(ids, batch.size(1))}
