"""The loss: a sum over supervised tokens, never a mean over a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, pad

from zerobook.data.feed import IGNORE

FP32_LOGITS = 2**23
"""fp32 logits that a loss without a gradient makes at once; the log-probabilities beside them are as many. 32 MiB each."""


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of predicting each supervised token from those before it, in fp32 nats.

    Args:
        logits: float [rows, length, vocabulary].
        labels: int64 [rows, length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, where nothing is supervised.
    """
    # The labels are shifted, not the logits: to leave out each row's last position would copy all others.
    return _summed(logits, pad(labels[:, 1:], (0, 1), value=IGNORE))


def seq2seq_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of each supervised target token, in fp32 nats.

    Nothing is shifted here: the decoder's input was (see `zerobook.data.collate.Seq2SeqCollator`).

    Args:
        logits: float [rows, target length, vocabulary].
        labels: int64 [rows, target length]; IGNORE where nothing is supervised.

    Returns:
        Scalar. 0, with a gradient of 0, where nothing is supervised.
    """
    return _summed(logits, labels)


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy over positions, in fp32.

    Where no gradient is asked for, `FP32_LOGITS` at a time: nothing of a chunk is kept. With a gradient all at once, since
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
