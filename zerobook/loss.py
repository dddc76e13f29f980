"""The loss: a sum over supervised tokens, never a mean over a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from zerobook.data.feed import IGNORE


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of predicting each supervised token from those before it, in fp32 nats.

    Args:
        logits: float [rows, length, vocabulary].
        labels: int64 [rows, length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, where nothing is supervised.
    """
    vocabulary = logits.size(-1)
    predicted = logits[:, :-1].reshape(-1, vocabulary).float()
    return cross_entropy(predicted, labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="sum")


def seq2seq_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of each supervised target token, in fp32 nats.

    Nothing is shifted here: the decoder's input was (see `zerobook.data.collate.Seq2SeqCollator`).

    Args:
        logits: float [rows, target length, vocabulary].
        labels: int64 [rows, target length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, where nothing is supervised.
    """
    predicted = logits.reshape(-1, logits.size(-1)).float()
    return cross_entropy(predicted, labels.reshape(-1), ignore_index=IGNORE, reduction="sum")


@dataclass(frozen=True)
class Objective:
    """What is learnt: the loss, and which labels it counts.

    ``loss`` is (logits, labels) -> summed loss over supervised tokens, a scalar. ``shifted``: position i is predicted
    from those before it, so a row's first label counts nothing.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    shifted: bool


CAUSAL = Objective(causal_lm_loss, shifted=True)
SEQ2SEQ = Objective(seq2seq_loss, shifted=False)
