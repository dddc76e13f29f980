"""Measurement, on the model itself, of whether tokens see others that they must not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from zerobook.data.collate import CausalCollator, PackedCollator, to_device
from zerobook.errors import ConfigError
from zerobook.models.load import absolute_positions
from zerobook.strategy import Strategy
from zerobook.utils.dtypes import compute_dtype

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]

_LENGTH = 12
_NOISE = 4.0
"""A difference above this multiple of the model's own noise is not noise. Models without experts have no noise. Random
models with experts, of 24 and 48 layers in bf16, with a rounding error added to every expert's output, had 0.6 to 2.1 times
their noise where they kept samples apart, and 7 to 130 times where they did not."""


def settled(
    strategy: Strategy, collate: Collate, *, keep_mask: bool = False, supervised: bool = False, flag: str | None = None
) -> Collate:
    """Return the cheapest form of ``collate`` under which the prepared model isolates samples and padding. Collective.

    A few tiny forward passes decide, in evaluation mode. A collator of another class is returned as it is.

    Args:
        keep_mask: the objective needs the mask of padded rows.
        supervised: the objective takes the positions that have a target.
        flag: name of the flag by which samples share a row, for the error.

    Raises:
        ConfigError: samples that share a row see each other in every form: see `isolating`.
    """
    known = type(collate) in (CausalCollator, PackedCollator)  # a subclass may pad again, which moves the positions
    if isinstance(collate, PackedCollator):
        if keep_mask and collate.flatten:  # padding on the right, which has no mask, would count as load of the experts
            collate = replace(collate, pad_to_multiple_of=1)
        collate = isolating(strategy, collate, flag or "packing")
    elif isinstance(collate, CausalCollator) and not keep_mask:
        collate = unmasked(strategy, collate)
    return replace(cast("CausalCollator | PackedCollator", collate), supervised=True) if known and supervised else collate


def unmasked(strategy: Strategy, collate: CausalCollator) -> CausalCollator:
    """Return a collator without an attention mask, where padding changes nothing for the tokens before it. Collective.

    In a model with causal attention no token sees the padding on its right, and the labels of padding are ignored, so loss
    and gradients are the same. A mask costs time: SDPA uses no flash kernel with it, and the host waits for the device to
    check whether it masks anything. A model that sees the padding keeps its mask.

    Raises:
        ConfigError: the model computes nothing from text alone.
    """
    # A recipe's own model may take its arguments by other names.
    if not hasattr(strategy.unwrapped, "get_input_embeddings"):
        return collate
    flash = "flash" in _attention(strategy)
    bare = replace(collate, mask=False, lengths=flash)
    failure: Exception | None = None
    for way in (*_without_looking(strategy, bare), bare, collate):
        try:
            strangers, noise = influence(strategy, _padded(way, strategy))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # architectures raise different errors for arguments that they do not take
            failure = error
            continue
        if way is collate or strangers <= _NOISE * noise:
            return way
    # A recipe's own collator may need arrays that the rows of this test do not have.
    if type(collate) is not CausalCollator:
        return collate
    name = type(strategy.unwrapped).__name__
    raise ConfigError(f"model_name_or_path: {name} fails with a batch of text ({type(failure).__name__}: {failure}).")


def isolating(strategy: Strategy, collate: PackedCollator, flag: str = "packing") -> PackedCollator:
    """Return a collator under which the prepared model keeps a row's samples apart. Collective.

    Most models of transformers take the samples' borders from ``position_ids``, and flash attention from the lengths in
    the batch. Some models ignore the positions (Falcon) and need a full mask. A measurement decides.

    Raises:
        ConfigError: no form isolates the samples, as in recurrent models, or the model takes no full mask, as models with
            ALiBi that count positions in a mask of padding (Bloom).
    """
    config, attention = strategy.unwrapped.config, _attention(strategy)
    if collate.flatten:
        if part := _counts_places(strategy.unwrapped, masked="flash" not in attention):
            raise ConfigError(
                f"{flag}: {type(strategy.unwrapped).__name__} has {part}, which counts tokens from the start of the row and "
                f"not of the sample. Pass --{flag} false."
            )
        if "flash" not in attention:
            # in a joined row no token is certainly unseen, so noise can be measured only on rows that are not joined
            return replace(isolating(strategy, replace(collate, flatten=False), flag), flatten=True)
    ways = [(collate, "position_ids")]
    if "flash" in attention:
        with_lengths = replace(collate, lengths=True)
        cheaper = [*_without_looking(strategy, with_lengths), with_lengths]
        ways = [*((way, "the samples' lengths") for way in cheaper), *ways]
    # a full mask would replace a sliding window; flash and flex attention take none
    if attention in ("sdpa", "eager") and not getattr(config, "sliding_window", None):
        half = compute_dtype(strategy.plan.precision)
        ways.append((replace(collate, mask=torch.bool if attention == "sdpa" else half), "a mask of the samples"))
    found = []
    for way, by in ways:
        try:
            strangers, noise = influence(strategy, _packed(way, strategy))
            misplaced = strangers <= _NOISE * noise and not keeps_positions(strategy, way)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # architectures raise different errors where they take no such mask
            found.append(f"the model fails with {by} ({type(error).__name__}: {error})")
            continue
        if strangers <= _NOISE * noise and not misplaced:
            return way
        if misplaced:
            found.append(f"with {by}, a sample's positions do not begin anew")
        else:
            found.append(
                f"with {by}, another first sample changes the second one's logits by {strangers:.1e}, and a change in another "
                f"row by {noise:.1e}"
            )
    raise ConfigError(
        f"{flag}: in {type(strategy.unwrapped).__name__} with attn_implementation {attention}, samples that share a row see "
        f"each other: {'; '.join(found)}. Pass --{flag} false (and --group_by_length to pad less), or another "
        "--attn_implementation."
    )


@torch.no_grad()
def influence(strategy: Strategy, batches: tuple[tuple[dict[str, Any], ...], slice]) -> tuple[float, float]:
    """Measure the effect of tokens that must not be seen on the logits of others. Collective.

    No bound for rounding is needed. The batches have one shape, so the same kernels sum the same numbers in the same order:
    where nothing is seen, logits are equal to the last bit. Experts are the exception, since other tokens are grouped
    differently. So the logits are also compared after a change in another row, which no model sees: this is the noise.

    Args:
        batches: three of one shape, as collators make them, and the range of the first row's logits to compare. The second has
            other tokens where they must not be seen; the third has other tokens in another row.

    Returns:
        (difference by the second batch, difference by the third), root mean squares as shares of the logits' own; the mean
        over all ranks.
    """
    same, strangers, other_row = _logits(strategy, *batches)
    found = torch.stack([(logits - same).norm() / same.norm().clamp_min(1e-6) for logits in (strangers, other_row)])
    # all ranks decide by the mean: it keeps a difference on one rank, and a NaN
    by_strangers, by_other_row = (strategy.sum_over_ranks(found) / strategy.world_size).tolist()
    return by_strangers, by_other_row


@torch.no_grad()
def keeps_positions(strategy: Strategy, collate: PackedCollator) -> bool:
    """Return whether a row's second sample has the positions that it has alone, in a model with a table of them. Collective.

    Its logits in the row may differ from those of the sample alone by at most half as much as later positions change them.
    """
    if absolute_positions(cast("PreTrainedModel", strategy.unwrapped)) is None:
        return True
    first, second = random_tokens(strategy, 2 * _LENGTH).reshape(2, -1)
    begun, late = np.arange(_LENGTH), np.arange(_LENGTH, 2 * _LENGTH)
    [packed] = _logits(strategy, (collate([_row(np.r_[first, second], np.tile(begun, 2))]),), slice(_LENGTH, 2 * _LENGTH))
    alone, shifted = _logits(strategy, tuple(collate([_row(second, where)]) for where in (begun, late)), slice(_LENGTH))
    kept = (packed - alone).norm() <= (shifted - alone).norm() / 2  # False where either is NaN
    return strategy.sum_over_ranks(kept.float().reshape(1)).item() == strategy.world_size


def _counts_places(model: nn.Module, *, masked: bool) -> str | None:
    """Return what in the model depends on the place of a token in its row, which `influence` sees in long rows only.

    Args:
        masked: attention uses the model's own masks.
    """
    config = cast("PreTrainedModel", model).config.get_text_config()
    for key in ("attention_chunk_size", "attn_temperature_tuning"):
        if getattr(config, key, None):
            return f"{key} in its config"
    positions = getattr(config, "max_position_embeddings", None)
    for name, buffer in model.named_buffers():
        if masked and positions and tuple(buffer.shape[-2:]) == (positions, positions):
            return f"the mask {name}"
    return None


def _padded(collate: CausalCollator, strategy: Strategy) -> tuple[tuple[dict[str, Any], ...], slice]:
    """Return three batches: a short row beside a long one; other tokens in its padding; another long row."""
    short, long, other = np.split(random_tokens(strategy, 5 * _LENGTH), [_LENGTH, 3 * _LENGTH])
    batches = [collate([_row(short), _row(tokens)]) for tokens in (long, long, other)]
    batches[1]["input_ids"][0, _LENGTH : 2 * _LENGTH] = torch.as_tensor(other[:_LENGTH])
    return tuple(batches), slice(_LENGTH)


def _packed(collate: PackedCollator, strategy: Strategy) -> tuple[tuple[dict[str, Any], ...], slice]:
    """Return three batches: two rows of two samples each; another first sample in the first row; in the second row."""
    a, b, c, d, other = random_tokens(strategy, 5 * _LENGTH).reshape(5, -1)
    positions = np.tile(np.arange(_LENGTH), 2)
    rows = [((a, b), (c, d)), ((other, b), (c, d)), ((a, b), (other, d))]
    batches = (collate([_row(np.concatenate(samples), positions) for samples in pair]) for pair in rows)
    return tuple(batches), slice(_LENGTH, 2 * _LENGTH)


def _row(ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return {"input_ids": ids, "labels": ids} | ({} if positions is None else {"position_ids": positions})


def random_tokens(strategy: Strategy, count: int) -> np.ndarray:
    """Return ids of the model's vocabulary, int64 [count], the same on every rank."""
    model = cast("PreTrainedModel", strategy.unwrapped)
    words = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    return np.random.default_rng(0).integers(3, min(words, 1000), count)


def _logits(strategy: Strategy, batches: tuple[dict[str, Any], ...], where: slice) -> list[torch.Tensor]:
    """Return the first row's logits at ``where``, in evaluation mode, fp32 [tokens, vocabulary] of each batch. Collective."""
    model = strategy.model
    was_training = model.training
    model.eval()
    try:
        given = ({key: value for key, value in batch.items() if key != "labels"} for batch in batches)
        return [model(**to_device(batch, strategy.device)).logits[0, where].to(torch.float32, copy=True) for batch in given]
    finally:
        model.train(was_training)
        strategy.release_gathered_parameters()  # also after an error: the next forward must not find weights still gathered


def _without_looking(strategy: Strategy, collate: Any) -> Iterator[Any]:
    """Yield the collator with a `NoCache`, unless activations are recomputed: transformers then removes it, with a warning."""
    if not any(getattr(module, "gradient_checkpointing", False) for module in strategy.unwrapped.modules()):
        yield replace(collate, no_cache=True)


def _attention(strategy: Strategy) -> str:
    return str(getattr(getattr(strategy.unwrapped, "config", None), "_attn_implementation", None))
