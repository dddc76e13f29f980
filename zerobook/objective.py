"""Objectives: the loss of a batch as a sum over its rows, and the divisor of the sum.

A mean over a batch would depend on how the batch is cut into micro-batches and ranks, so nothing here is a mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from zerobook.constants import IGNORE
from zerobook.head import SUPERVISED, LossHead
from zerobook.utils.model_config import text_config

Metrics = Mapping[str, torch.Tensor]

# Name of the `shifted` labels in a batch, if the strategy has split rows. It is transformers' and DeepSpeed's name.
TARGETS = "shift_labels"

# Number of logits that a loss without a gradient converts to fp32 at once: 32 MiB, and as much for their log-probabilities.
FP32_LOGITS = 2**23


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of predicting each supervised token from those before it, in fp32 nats.

    Args:
        logits: float [rows, length, vocabulary].
        labels: int64 [rows, length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, if nothing is supervised.
    """
    # The labels are shifted, not the logits: leaving out each row's last position would copy all other logits.
    return _sum_cross_entropy(logits, shifted(labels))


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return the token that each position predicts: the label of the next one, IGNORE at each row's end. int64 [rows, length].

    >>> shifted(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return pad(labels[:, 1:], (0, 1), value=IGNORE)


def _sum_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy summed over all positions, a scalar in fp32.

    If no gradient is needed, at most `FP32_LOGITS` logits are converted to fp32 at once, to save memory. Otherwise all are
    converted at once, since autograd keeps the log-probabilities of every position anyway.

    Args:
        logits: float [rows, length, vocabulary].
        targets: int64 [rows, length]; IGNORE where nothing is predicted.
    """
    vocabulary = logits.size(-1)
    logits = logits.reshape(-1, vocabulary)
    targets = targets.reshape(-1)
    chunk_length = len(targets) if logits.requires_grad else max(1, FP32_LOGITS // vocabulary)
    sums = []
    for chunk_logits, chunk_targets in zip(logits.split(chunk_length), targets.split(chunk_length), strict=True):
        sums.append(cross_entropy(chunk_logits.float(), chunk_targets, ignore_index=IGNORE, reduction="sum"))
    return torch.stack(sums).sum()


def model_loss(model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
    """Run the model. Return (summed cross-entropy of ``targets`` in fp32 nats, the model's output).

    If the output layer can, it computes the loss itself: see `zerobook.head`. The output then has no logits.

    Args:
        inputs: the model's arguments, and `zerobook.head.SUPERVISED`, the positions that have a target, if they are known.
        targets: int64 [rows, length]; IGNORE where nothing is predicted.
        options: further arguments of the model.
    """
    positions = inputs.pop(SUPERVISED, None)
    head: LossHead | None = getattr(unwrap(model), "loss_head", None)
    if head is None:
        output = model(**inputs, **options)
        return _sum_cross_entropy(output.logits, targets), output
    with head.computing(targets, positions):
        output = model(**inputs, **options)
    return output.logits, output


class Objective(ABC):
    """The loss that a run minimises: ``loss(model, batch)``, summed over rows, divided by the sum of ``weight(row)``.

    The weights are counted once, when the data is prepared. The divisor of a step, over all ranks and micro-batches, is
    therefore known on every rank without communication, and the training does not depend on how a batch is cut.

    All blocks of running text have the same weight: ``weight`` is called once, with a row of their length and arbitrary ids.

    A batch with too few rows is filled up with rows in which every array whose name ends with ``labels`` contains only
    `IGNORE`. ``loss`` must be 0 for them.

    An objective is sent to the processes that prepare data, so it must be picklable.
    """

    reference_model: nn.Module | None = None
    """The frozen model of `Recipe.reference_model`, as the strategy prepared it: call it under ``torch.no_grad``. None while
    the data is prepared, and in ``zerobook plan``, which has no second model."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, Metrics]:
        """Return the loss of this rank's micro-batch, summed over its rows and not averaged.

        Args:
            model: as the strategy prepared it. Call it; do not call its parts.
            batch: what the collator returned, on the model's device.

        Returns:
            A scalar tensor with a gradient, alone or with metrics: name -> scalar tensor, also summed over rows. Metrics are
            summed over micro-batches and ranks, divided by the same weights, and logged beside the loss.
        """

    @abstractmethod
    def weight(self, row: Mapping[str, np.ndarray]) -> int:
        """Return how much ``row`` counts in the divisor, an integer of at least 0. A row that weighs 0 is dropped.

        Args:
            row: one prepared row, ``input_ids`` and ``labels`` (int [tokens]) and further arrays of the encoder.
        """

    def needs_attention_mask(self, model: nn.Module) -> bool:
        """Return whether the loss depends on the attention mask of rows that are padded on the right.

        Without one, causal models compute the same for all tokens before the padding, and faster.

        Args:
            model: as the strategy prepared it, in training mode.
        """
        return False

    @property
    def is_cross_entropy(self) -> bool:
        """Return whether `loss` is the cross-entropy of tokens in nats, so that e to the mean loss is a perplexity."""
        return False

    @property
    def takes_positions(self) -> bool:
        """Return whether `loss` takes the positions with a target, `zerobook.head.SUPERVISED`, of a causal model's batch."""
        return False

    def splits_tokens(self, model: nn.Module) -> bool:
        """Return whether `loss` can be computed for a part of each row's tokens.

        It can if the loss is a sum over tokens, and each term depends only on the logits and the target of its token. The batch
        of such a part has `TARGETS`, and no ``labels``: see `with_targets`. Strategies that split rows refuse other objectives.

        Args:
            model: as the strategy prepared it, in training mode.
        """
        return False


class NextToken(Objective):
    """Cross-entropy of each supervised token, predicted from the tokens before it. Weight: supervised tokens.

    A mixture of experts also has a loss that balances the load of its experts (Fedus et al., 2021, section 2.2). It is added
    if the model's config asks for it (``output_router_logits``), or if ``router_weight`` is given. The model returns it as an
    average over tokens, so each micro-batch multiplies it by its number of supervised tokens; for a step, this gives the
    weighted mean. Evaluations leave it out. Metrics: ``router_aux_loss``, and `expert_load` if the model's config says how
    many experts a token takes.

    Args:
        router_weight: factor of that loss, instead of the one in the model's config; 0 leaves it out.
    """

    shifted = True
    """A row's first label has no token before it, so it is not counted."""

    def __init__(self, router_weight: float | None = None):
        self.router_weight = router_weight

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, Metrics]:
        inputs, targets = with_targets(batch)
        balance_factor = self._balance_factor(model)
        if balance_factor == 0:
            return model_loss(model, inputs, targets)[0]
        loss, output = model_loss(model, inputs, targets, output_router_logits=True)
        supervised_count = (targets != IGNORE).sum()
        # Also without supervised tokens: the backward passes of all ranks must run the same modules.
        router_loss = output.aux_loss.to(loss.device) * supervised_count
        metrics = {"router_aux_loss": router_loss.detach()}
        experts_taken = experts_per_token(unwrap(model).config)
        if experts_taken:
            load = expert_load(output.router_logits, experts_taken, inputs.get("attention_mask"))
            metrics["expert_load"] = load.to(router_loss.device) * supervised_count
        return loss + balance_factor * router_loss, metrics

    def needs_attention_mask(self, model: nn.Module) -> bool:
        # Without a mask, transformers counts padding as load of the experts.
        return self._balance_factor(model) != 0

    @property
    def is_cross_entropy(self) -> bool:
        # A subclass may have another loss.
        return type(self).loss is NextToken.loss

    @property
    def takes_positions(self) -> bool:
        # A subclass may pass the batch to the model as it is.
        return type(self).loss is NextToken.loss

    def splits_tokens(self, model: nn.Module) -> bool:
        # A subclass may have another loss. The balancing loss depends on all tokens of a micro-batch, not on those of a part.
        return type(self).loss is NextToken.loss and self._balance_factor(model) == 0

    def _balance_factor(self, model: nn.Module) -> float:
        """Return the factor of the loss that balances experts; 0 if this loss is left out."""
        config = getattr(unwrap(model), "config", None)
        coefficient = router_coefficient(config)
        # The model's config has no such factor, as without experts, or this is an evaluation.
        if coefficient is None or not model.training:
            return 0.0
        if self.router_weight is not None:
            return self.router_weight
        return float(coefficient) if getattr(text_config(config), "output_router_logits", False) else 0.0

    def weight(self, row: Mapping[str, np.ndarray]) -> int:
        return int(np.count_nonzero(row["labels"][1:] != IGNORE))


def router_coefficient(config: Any) -> float | None:
    """Return the factor of the loss that balances experts, from a model's config; None for models without one."""
    config = text_config(config)
    # JetMoe calls it aux_loss_coef, and DBRX moe_loss_weight in a config of its own.
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        coefficient = getattr(config, name, None)
        if coefficient is not None:
            return coefficient
    return getattr(getattr(config, "ffn_config", None), "moe_loss_weight", None)


def experts_per_token(config: Any) -> int | None:
    """Return the number of experts that a token takes, from a model's config; None if it does not say so."""
    config = text_config(config)
    experts = getattr(config, "num_experts_per_tok", None)
    # DBRX has a config of its own for its experts.
    return experts if experts is not None else getattr(getattr(config, "ffn_config", None), "moe_top_k", None)


@contextmanager
def router_outputs_off(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model does not return the logits of its routers.

    While a model generates, transformers would compare the routers' logits of the last tokens with the mask of all tokens, and
    raise an error.
    """
    config = text_config(getattr(unwrap(model), "config", None))
    returns_logits = getattr(config, "output_router_logits", False)
    if returns_logits:
        config.output_router_logits = False
    try:
        yield
    finally:
        if returns_logits:
            config.output_router_logits = True


def expert_load(router_logits: Sequence[torch.Tensor], experts_taken: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the load of the busiest expert of a micro-batch, as a multiple of an equal share: 1 is balanced.

    It is a scalar, the mean over layers.

    Args:
        router_logits: for each layer, float [tokens, experts] or [rows, length, experts].
        experts_taken: experts that a token takes.
        attention_mask: int [rows, length], 0 for padding, which is left out; None if there is none.

    >>> expert_load([torch.tensor([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0]])], 1, None).item()
    3.0
    """
    loads = []
    for logits in router_logits:
        experts = logits.size(-1)
        chosen_experts = logits.detach().reshape(-1, experts).topk(experts_taken).indices
        # 1 for each choice of a token, and 0 for those of padding.
        is_token = torch.ones_like(chosen_experts)
        if attention_mask is not None:
            is_token = attention_mask.reshape(-1, 1).to(chosen_experts).expand_as(chosen_experts)
        tokens_of_expert = torch.zeros(experts, dtype=torch.int64, device=chosen_experts.device)
        tokens_of_expert.scatter_add_(0, chosen_experts.flatten(), is_token.flatten())
        # The clamp avoids 0 / 0 if all tokens are padding.
        loads.append(tokens_of_expert.max() * experts / tokens_of_expert.sum().clamp(min=1))
    return torch.stack(loads).mean()


class TargetTokens(Objective):
    """Cross-entropy of each target token of an encoder-decoder. Weight: target tokens.

    The labels are not shifted, since the decoder's input is (see `zerobook.data.collate.Seq2SeqCollator`).
    """

    # Every label is a target, also the first.
    shifted = False

    @property
    def is_cross_entropy(self) -> bool:
        # A subclass may have another loss.
        return type(self).loss is TargetTokens.loss

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, Metrics]:
        inputs, labels = without_labels(batch)
        return model_loss(model, inputs, labels)[0]

    def weight(self, row: Mapping[str, np.ndarray]) -> int:
        return int(np.count_nonzero(row["labels"] != IGNORE))


def without_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return (the model's inputs, labels). With labels among its inputs, a model would compute a loss of its own."""
    inputs = dict(batch)
    return inputs, inputs.pop("labels")


def with_targets(batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return (the model's inputs, the token that each position predicts), of whole rows or of a part of their tokens."""
    inputs = dict(batch)
    if TARGETS in inputs:
        # The strategy has shifted the labels before it split the rows.
        return inputs, inputs.pop(TARGETS)
    return inputs, shifted(inputs.pop("labels"))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP's or DeepSpeed's wrapper."""
    while hasattr(model, "module"):
        model = cast("nn.Module", model.module)
    return model
