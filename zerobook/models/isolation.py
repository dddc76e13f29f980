"""Measure whether samples that share a row, or padding, change each other's logits in the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from zerobook.data.collate import CausalCollator, PackedCollator, to_device
from zerobook.errors import ConfigError
from zerobook.models.load import absolute_positions
from zerobook.models.vocabulary import embedding_rows
from zerobook.strategy import Strategy
from zerobook.utils.dtypes import compute_dtype
from zerobook.utils.terminal import say

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from zerobook.head import LossHead

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]

# Tokens of a sample in the measured rows.
_LENGTH = 12
# Largest difference that counts as rounding, in units of the noise of `measure_influence`. Models without experts have no
# noise. Random models with experts, of 24 and 48 layers in bf16, with a rounding error added to every expert's output, had 0.6
# to 2.1 times their noise if they kept samples apart, and 7 to 130 times their noise if they did not.
_NOISE = 4.0


def choose_isolating_collator(
    strategy: Strategy,
    collate: Collate,
    *,
    keep_mask: bool = False,
    supervised: bool = False,
    flag: str | None = None,
    chooses_attention: bool = False,
    trains: bool = True,
) -> Collate:
    """Return the cheapest form of ``collate`` under which the prepared model isolates samples and padding. Collective.

    A few tiny forward passes decide, in evaluation mode. A collator of another class is returned as it is.

    Args:
        keep_mask: the objective needs the mask of padded rows.
        supervised: the objective needs the list of the positions that have a target.
        flag: name of the flag by which samples share a row, for the error.
        chooses_attention: see `choose_packed_collator`.
        trains: see `choose_packed_collator`.

    Raises:
        ConfigError: samples that share a row see each other in every form: see `choose_packed_collator`.
    """
    if isinstance(collate, PackedCollator):
        # In a joined row, no mask covers the padding on the right, and the padding would count as load of the experts.
        if keep_mask and collate.flatten:
            collate = replace(collate, pad_to_multiple_of=1)
        collate = choose_packed_collator(
            strategy, collate, flag or "packing", chooses_attention=chooses_attention, trains=trains
        )
    elif isinstance(collate, CausalCollator) and not keep_mask:
        collate = choose_padded_collator(strategy, collate)
    # A subclass may pad again, which would move the positions that have a target.
    if supervised and type(collate) in (CausalCollator, PackedCollator):
        return replace(cast("CausalCollator | PackedCollator", collate), supervised=True)
    return collate


def choose_padded_collator(strategy: Strategy, collate: CausalCollator) -> CausalCollator:
    """Return a collator without an attention mask, if padding does not change the logits of the tokens before it. Collective.

    In a model with causal attention, no token attends to the padding on its right, and the labels of padding are ignored. So
    loss and gradients are the same without a mask. A mask costs time: with it, SDPA uses no flash kernel, and the host waits
    for the device to check whether it masks anything. The mask is kept for models in which padding changes logits.

    Raises:
        ConfigError: the model fails with a batch of text.
    """
    # A recipe may have a model of its own, with other names of arguments, which cannot be tested.
    if not hasattr(strategy.unwrapped, "get_input_embeddings"):
        return collate
    # The fastest collator comes first. The last one is the original: it is right if the model runs with it at all.
    maskless = replace(collate, mask=False, lengths="flash" in _attention_name(strategy))
    candidates = [*_with_no_cache(strategy, maskless), maskless, collate]
    failure: Exception | None = None
    for candidate in candidates:
        try:
            influence_of_padding, noise = measure_influence(strategy, *_make_padded_batches(candidate, strategy))
        # A lack of memory says nothing about the candidate.
        except torch.OutOfMemoryError:
            raise
        # Architectures raise different errors for arguments that they do not take.
        except Exception as error:
            failure = error
            continue
        if candidate is collate or influence_of_padding <= _NOISE * noise:
            return candidate
    # A recipe's own collator may need arrays that the rows of this test do not have.
    if type(collate) is not CausalCollator:
        return collate
    raise ConfigError(
        f"model_name_or_path: {type(strategy.unwrapped).__name__} fails with a batch of text "
        f"({type(failure).__name__}: {failure})."
    )


def choose_packed_collator(
    strategy: Strategy,
    collate: PackedCollator,
    flag: str = "packing",
    *,
    chooses_attention: bool = False,
    trains: bool = True,
) -> PackedCollator:
    """Return a collator under which the prepared model keeps a row's samples apart. Collective.

    Most models of transformers take the samples' borders from ``position_ids``, and flash attention from the lengths in
    the batch. Some models ignore the positions (Falcon before transformers 5.24) and need a full mask. A measurement decides.

    Args:
        chooses_attention: the user has not named the attention. If the GPU cannot run flex attention, another one takes its
            place.
        trains: the model also gets backward passes.

    Raises:
        ConfigError: no form isolates the samples. Recurrent models never isolate them, Bloom takes no full mask (it counts
            positions in a mask of padding), and Falcon's attention with ALiBi depends on the position in the row.
    """
    attention = _attention_name(strategy)
    has_flash = "flash" in attention
    dependence = _find_row_position_dependence(strategy.unwrapped, is_joined=collate.flatten, uses_model_masks=not has_flash)
    if dependence is not None:
        raise ConfigError(
            f"{flag}: {type(strategy.unwrapped).__name__} has {dependence}, which counts tokens from the start of the row "
            f"and not of the sample. Pass --{flag} false."
        )
    # A joined row holds all rows of a batch, so there is no other row whose change shows the noise. Measure separate rows.
    if collate.flatten and not has_flash:
        separate_rows = choose_packed_collator(strategy, replace(collate, flatten=False), flag)
        return replace(separate_rows, flatten=True)

    # Measure the forms from the cheapest to the most expensive, and take the first that isolates.
    failures = []
    for candidate, marker in _list_packed_forms(strategy, collate):
        try:
            failure = _find_mixing(strategy, candidate, marker, trains=trains)
        # A lack of memory says nothing about the candidate.
        except torch.OutOfMemoryError:
            raise
        # Architectures raise different errors for inputs that they do not take.
        except Exception as error:
            # The GPUs of a launch are equal, so either all ranks call these collectives, or none.
            if attention == "flex_attention" and chooses_attention:
                _replace_flex_attention(strategy, error)
                return choose_packed_collator(strategy, collate, flag)
            failure = f"the model fails with {marker} ({type(error).__name__}: {error})"
        if failure is None:
            return candidate
        failures.append(failure)
    raise ConfigError(
        f"{flag}: in {type(strategy.unwrapped).__name__} with attn_implementation {attention}, samples that share a row see "
        f"each other: {'; '.join(failures)}. Pass --{flag} false (and --group_by_length to pad less), or another "
        "--attn_implementation."
    )


def _find_mixing(strategy: Strategy, candidate: PackedCollator, marker: str, *, trains: bool) -> str | None:
    """Return how samples that share a row change each other's logits; None if they do not. Collective.

    Args:
        marker: the input that shows the model the samples' borders in this form of the collator, for the message.
    """
    tests_backward = trains and _attention_name(strategy) == "flex_attention"
    with _flex_backward() if tests_backward else nullcontext():
        influence_of_others, noise = measure_influence(strategy, *_make_packed_batches(candidate, strategy))
        # False if either is NaN.
        is_isolated = influence_of_others <= _NOISE * noise
        if is_isolated and keeps_positions(strategy, candidate):
            return None
    if is_isolated:
        return f"with {marker}, a sample's positions do not begin anew"
    return (
        f"with {marker}, another first sample changes the second one's logits by {influence_of_others:.1e}, and a change in "
        f"another row by {noise:.1e}"
    )


def _replace_flex_attention(strategy: Strategy, error: Exception) -> None:
    """Let the model use SDPA, or eager attention if it has no SDPA, and print the ``error`` of flex attention."""
    model = cast("PreTrainedModel", strategy.unwrapped)
    other = "sdpa" if model._supports_sdpa else "eager"
    if strategy.is_main:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        say(f"WARNING: flex attention does not run on this device, so {other} takes its place ({reason})")
    model.set_attn_implementation(other)


@contextmanager
def _flex_backward() -> Iterator[None]:
    """Return a context in which every forward pass of flex attention is followed by its backward pass.

    The kernel of the backward pass needs more of a GPU's shared memory than that of the forward pass. If it needs too much,
    training fails in its first step, so a measurement has to run it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend: Any = ALL_ATTENTION_FUNCTIONS["flex_attention"]

    def attend_and_differentiate(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        # Detach the inputs from the model: its wrapper would take a backward pass through weights for part of a training step.
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            output, _ = attend(module, *inputs, *args, **kwargs)
            torch.autograd.grad(output, inputs, torch.ones_like(output))
        return output.detach(), None

    ALL_ATTENTION_FUNCTIONS["flex_attention"] = attend_and_differentiate
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["flex_attention"] = attend


def _list_packed_forms(strategy: Strategy, collate: PackedCollator) -> list[tuple[PackedCollator, str]]:
    """Return pairs (a form of ``collate``, the input that shows the model the samples' borders in it), the cheapest first."""
    attention = _attention_name(strategy)
    forms = []
    if "flash" in attention:
        with_lengths = replace(collate, lengths=True)
        for form in (*_with_no_cache(strategy, with_lengths), with_lengths):
            forms.append((form, "the samples' lengths"))
    forms.append((collate, "position_ids"))
    # A full mask would replace the mask of a sliding window. Flash and flex attention take no mask.
    has_window = getattr(strategy.unwrapped.config, "sliding_window", None)
    if attention in ("sdpa", "eager") and not has_window:
        mask = torch.bool if attention == "sdpa" else compute_dtype(strategy.plan.precision)
        forms.append((replace(collate, mask=mask), "a mask of the samples"))
    return forms


@torch.no_grad()
def measure_influence(strategy: Strategy, batches: tuple[dict[str, Any], ...], compared: slice) -> tuple[float, float]:
    """Measure the effect of tokens that must not be seen on the logits of others. Collective.

    No tolerance for rounding is needed. The batches have one shape, so the same kernels sum the same numbers in the same order:
    if the tokens are not seen, logits are equal to the last bit. Models with experts are the exception, since other tokens are
    grouped in another way for the experts. So the logits are also compared after a change in another row, which no model sees:
    this difference is the noise.

    Args:
        batches: three batches of one shape, as collators make them. The second has other tokens where they must not be seen;
            the third has other tokens in another row.
        compared: range of the tokens of the first row whose logits are compared.

    Returns:
        (difference by the second batch, difference by the third): root mean squares, divided by that of the logits, and
        averaged over all ranks.
    """
    logits, changed_by_unseen, changed_by_row = _compute_logits(strategy, batches, compared)
    differences = torch.stack([(changed_by_unseen - logits).norm(), (changed_by_row - logits).norm()])
    differences /= logits.norm().clamp_min(1e-6)
    # All ranks decide by the mean, so they decide the same. A difference or a NaN on one rank shows in it.
    by_unseen, by_row = (strategy.sum_over_ranks(differences) / strategy.world_size).tolist()
    return by_unseen, by_row


@torch.no_grad()
def keeps_positions(strategy: Strategy, collate: PackedCollator) -> bool:
    """Return whether the positions of a row's second sample begin at 0 again, as in a row of its own. Collective.

    This matters in models with a table of positions. There, the sample's logits in the row may differ from those of the sample
    alone by at most half as much as later positions change them.
    """
    if absolute_positions(cast("PreTrainedModel", strategy.unwrapped)) is None:
        return True
    # The second sample is computed in the row, alone, and alone with later positions.
    first, second = draw_random_tokens(strategy, 2 * _LENGTH).reshape(2, -1)
    positions = np.arange(_LENGTH)
    packed_batch = collate([_make_row(np.concatenate([first, second]), np.tile(positions, 2))])
    batch_alone = collate([_make_row(second, positions)])
    batch_later = collate([_make_row(second, positions + _LENGTH)])
    [packed] = _compute_logits(strategy, (packed_batch,), slice(_LENGTH, 2 * _LENGTH))
    alone, later = _compute_logits(strategy, (batch_alone, batch_later), slice(_LENGTH))
    # A comparison with NaN is False.
    is_near = (packed - alone).norm() <= (later - alone).norm() / 2
    return strategy.sum_over_ranks(is_near.float().reshape(1)).item() == strategy.world_size


def _find_row_position_dependence(model: nn.Module, *, is_joined: bool, uses_model_masks: bool) -> str | None:
    """Return the part of the model whose effect depends on the position of a token in its row; None if there is none.

    The short rows of `measure_influence` do not show such an effect.

    Args:
        is_joined: all rows of a batch are joined to one.
        uses_model_masks: the attention uses masks that the model makes. Flash attention uses none.
    """
    config = cast("PreTrainedModel", model).config.get_text_config()
    # Falcon: transformers rounds the biases of ALiBi to bf16. Far from the start of a row, those of adjacent tokens are equal.
    # With 64 heads, the logits of a sample at token 1900 differed by 11 % from those of the sample alone.
    # Llama 4: the borders of attention chunks and the temperature follow the position in the row.
    keys = ("alibi", "attention_chunk_size", "attn_temperature_tuning") if is_joined else ("alibi",)
    for key in keys:
        if getattr(config, key, None):
            return f"{key} in its config"
    positions = getattr(config, "max_position_embeddings", None)
    # GPT-Neo cuts its mask from a buffer of ``max_position_embeddings`` positions, and a joined row may be longer than that.
    for name, buffer in model.named_buffers():
        if is_joined and uses_model_masks and positions and tuple(buffer.shape[-2:]) == (positions, positions):
            return f"the mask {name}"
    return None


def _make_padded_batches(collate: CausalCollator, strategy: Strategy) -> tuple[tuple[dict[str, Any], ...], slice]:
    """Return (three batches, the range of the short row's tokens), as `measure_influence` takes them, to test the padding.

    The first batch has a short row and a long one. The second has other tokens in the padding of the short row. The third has
    another long row.
    """
    short, long, other = np.split(draw_random_tokens(strategy, 5 * _LENGTH), [_LENGTH, 3 * _LENGTH])
    batches = [collate([_make_row(short), _make_row(tokens)]) for tokens in (long, long, other)]
    # The short row must not see the tokens in its padding.
    batches[1]["input_ids"][0, _LENGTH : 2 * _LENGTH] = torch.as_tensor(other[:_LENGTH])
    return tuple(batches), slice(_LENGTH)


def _make_packed_batches(collate: PackedCollator, strategy: Strategy) -> tuple[tuple[dict[str, Any], ...], slice]:
    """Return the arguments of `measure_influence` after ``strategy``, to measure the influence of samples in the same row.

    The batches are: two rows of two samples each; another first sample in the first row; another first sample in the second.
    """
    a, b, c, d, other = draw_random_tokens(strategy, 5 * _LENGTH).reshape(5, -1)
    positions = np.tile(np.arange(_LENGTH), 2)
    batches = []
    for rows in (((a, b), (c, d)), ((other, b), (c, d)), ((a, b), (other, d))):
        batches.append(collate([_make_row(np.concatenate(samples), positions) for samples in rows]))
    return tuple(batches), slice(_LENGTH, 2 * _LENGTH)


def _make_row(ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, np.ndarray]:
    row = {"input_ids": ids, "labels": ids}
    if positions is not None:
        row["position_ids"] = positions
    return row


def draw_random_tokens(strategy: Strategy, count: int) -> np.ndarray:
    """Return ids of the model's vocabulary, int64 [count], the same on every rank."""
    vocabulary_size = embedding_rows(cast("PreTrainedModel", strategy.unwrapped))
    # The first ids are often special tokens. A fixed seed gives all ranks the same ids.
    return np.random.default_rng(0).integers(3, min(vocabulary_size, 1000), count)


def _compute_logits(strategy: Strategy, batches: tuple[dict[str, Any], ...], where: slice) -> list[torch.Tensor]:
    """Return each batch's logits of the first row's tokens in the range ``where``, fp32 [tokens, vocabulary]. Collective.

    The model runs in evaluation mode.
    """
    model = strategy.model
    # Rows may be padded to the length of rows in training. To save memory, a model with a `LossHead` computes only the logits
    # of ``where``. Of these, all are kept.
    head: LossHead | None = getattr(strategy.unwrapped, "loss_head", None)
    kept = where if head is None else slice(None)
    was_training = model.training
    model.eval()
    try:
        rows = []
        for batch in batches:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            with nullcontext() if head is None else head.keeping(where):
                logits = model(**to_device(inputs, strategy.device)).logits
            rows.append(logits[0, kept].to(torch.float32, copy=True))
            # Free the logits of all other tokens before the next forward pass.
            del logits
        return rows
    finally:
        model.train(was_training)
        # Do so after an error, too: the next forward pass must not begin with weights that are still gathered.
        strategy.release_gathered_parameters()


def _with_no_cache(strategy: Strategy, collate: Any) -> Iterator[Any]:
    """Yield ``collate`` with a `NoCache`, or nothing if activations are recomputed: transformers then warns and removes it."""
    if not any(getattr(module, "gradient_checkpointing", False) for module in strategy.unwrapped.modules()):
        yield replace(collate, no_cache=True)


# Return the name of the model's attention, such as sdpa or flash_attention_2, or "None" if its config has no name.
def _attention_name(strategy: Strategy) -> str:
    return str(getattr(getattr(strategy.unwrapped, "config", None), "_attn_implementation", None))
