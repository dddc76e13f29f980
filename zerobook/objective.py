"""Objectives: the loss of a batch as a sum over its rows, and the divisor of the sum.

A mean over a batch would depend on how the batch is cut into micro-batches and ranks, so nothing here is a mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from zerobook.constants import IGNORE

Metrics = Mapping[str, torch.Tensor]

TARGETS = "shift_labels"
"""Name of the `shifted` labels in a batch, where the strategy has split rows. It is transformers' and DeepSpeed's name."""

FP32_LOGITS = 2**23
"""Number of logits that a loss without a gradient converts to fp32 at once: 32 MiB, and as much for their log-probabilities."""


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of predicting each supervised token from those before it, in fp32 nats.

    Args:
        logits: float [rows, length, vocabulary].
        labels: int64 [rows, length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, where nothing is supervised.
    """
    # The labels are shifted, not the logits: leaving out each row's last position would copy all other logits.
    return _summed(logits, shifted(labels))


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return the token that each position predicts: the label of the next one, IGNORE at each row's end. int64 [rows, length].

    >>> shifted(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return pad(labels[:, 1:], (0, 1), value=IGNORE)


def seq2seq_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of each supervised target token, in fp32 nats.

    The labels are not shifted, since the decoder's input is (see `zerobook.data.collate.Seq2SeqCollator`).

    Args:
        logits: float [rows, target length, vocabulary].
        labels: int64 [rows, target length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, where nothing is supervised.
    """
    return _summed(logits, labels)


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy over positions, in fp32.

    Without a gradient, `FP32_LOGITS` are converted at a time, and no chunk is kept. With a gradient, all at once, since
    autograd keeps the log-probabilities of every position anyway.

    Args:
        logits: float [rows, length, vocabulary].
        targets: int64 [rows, length]; IGNORE where nothing is predicted.
    """
    vocabulary = logits.size(-1)
    logits, targets = logits.reshape(-1, vocabulary), targets.reshape(-1)
    positions = len(targets) if logits.requires_grad else max(1, FP32_LOGITS // vocabulary)
    parts = zip(logits.split(positions), targets.split(positions), strict=True)
    sums = [cross_entropy(part.float(), wanted, ignore_index=IGNORE, reduction="sum") for part, wanted in parts]
    return torch.stack(sums).sum()


class Objective(ABC):
    """The loss that a run minimises: ``loss(model, batch)``, summed over rows, divided by the sum of ``weight(row)``.

    The weights are counted once, when the data is prepared. The divisor of a step, over all ranks and micro-batches, is
    therefore known on every rank without communication, and the training does not depend on how a batch is cut.

    All blocks of running text have one weight: ``weight`` is asked about a row of that length, whose ids mean nothing.

    A batch that lacks rows is filled up with rows in which every array whose name ends with ``labels`` is `IGNORE`
    throughout. ``loss`` must be 0 for them.

    An objective is sent to the processes that prepare data, so it must be picklable.
    """

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

    def splits_tokens(self, model: nn.Module) -> bool:
        """Return whether `loss` takes a part of each row's tokens: a sum over tokens, each by its own logits and target.

        The batch of such a part has `TARGETS`, and no ``labels``: see `with_targets`. Strategies that split rows refuse
        objectives that return False.

        Args:
            model: as the strategy prepared it, in training mode.
        """
        return False


class NextToken(Objective):
    """Cross-entropy of each supervised token, predicted from the tokens before it. Weight: supervised tokens.

    A mixture of experts also has a loss that balances the load of its experts (Fedus et al., 2021, section 2.2). It is added
    if the model's config asks for it (``output_router_logits``), or if ``router_weight`` is given. The model returns it as an
    average over tokens, so each micro-batch multiplies it by its number of supervised tokens; for a step, this gives the
    weighted mean. Evaluations leave it out.

    Args:
        router_weight: factor of that loss, instead of ``router_aux_loss_coef`` in the model's config; 0 leaves it out.
    """

    shifted = True
    """A row's first label has no token before it, so it is not counted."""

    def __init__(self, router_weight: float | None = None):
        self.router_weight = router_weight

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, Metrics]:
        inputs, targets = with_targets(batch)
        balance = self._balance(model)
        if balance == 0:
            return _summed(model(**inputs).logits, targets)
        output = model(**inputs, output_router_logits=True)
        # also if no token is supervised: the backward passes of all ranks must run the same modules
        router = output.aux_loss.to(output.logits.device) * (targets != IGNORE).sum()
        return _summed(output.logits, targets) + balance * router, {"router_aux_loss": router.detach()}

    def needs_attention_mask(self, model: nn.Module) -> bool:
        return self._balance(model) != 0  # transformers counts padding as load where no mask says that it is padding

    def splits_tokens(self, model: nn.Module) -> bool:
        # a subclass may have another loss; and the load of experts is one of a whole micro-batch
        return type(self).loss is NextToken.loss and self._balance(model) == 0

    def _balance(self, model: nn.Module) -> float:
        """Return the factor of the loss that balances experts; 0 where it is left out."""
        config = getattr(unwrap(model), "config", None)
        own = getattr(config, "router_aux_loss_coef", None)
        if own is None or not model.training:
            return 0.0
        if self.router_weight is not None:
            return self.router_weight
        return float(own) if getattr(config, "output_router_logits", False) else 0.0

    def weight(self, row: Mapping[str, np.ndarray]) -> int:
        return int(np.count_nonzero(row["labels"][1:] != IGNORE))


class TargetTokens(Objective):
    """Cross-entropy of each target token of an encoder-decoder. Weight: target tokens."""

    shifted = False

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, Metrics]:
        inputs, labels = without_labels(batch)
        return seq2seq_loss(model(**inputs).logits, labels)

    def weight(self, row: Mapping[str, np.ndarray]) -> int:
        return int(np.count_nonzero(row["labels"] != IGNORE))


def without_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return (the model's inputs, labels). With labels among its inputs, a model would compute a loss of its own."""
    inputs = dict(batch)
    return inputs, inputs.pop("labels")


def with_targets(batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return (the model's inputs, the token that each position predicts), of whole rows or of a part of their tokens."""
    inputs = dict(batch)
    return (inputs, inputs.pop(TARGETS)) if TARGETS in inputs else (inputs, shifted(inputs.pop("labels")))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP's or DeepSpeed's wrapper."""
    while hasattr(model, "module"):
        model = cast("nn.Module", model.module)
    return model
