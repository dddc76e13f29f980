"""Records of a run's steps and evaluations, as hooks get them and the runlog keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, SupportsFloat


@dataclass(kw_only=True)
class StepRecord:
    """One optimizer step.

    ``loss``, ``grad_norm`` and ``metrics`` are tensors until the log point: reading one as a float waits for the device, and
    ``loss`` is this rank's part of it. From the log point on they are floats, and ``loss`` is the sum over the ranks.
    """

    step: int
    """optimizer steps done, from 1"""
    loss: SupportsFloat
    """nats per supervised token"""
    grad_norm: SupportsFloat
    """global 2-norm before clipping"""
    learning_rate: float
    """learning rate of this step"""
    tokens: int
    """supervised tokens, over all ranks"""
    cursor: tuple[int, int]
    """position in the sample order before the step, and after it"""
    ids: Iterable[int]
    """the step's rows, in the sample order: the number of each in the training data. With ``--packing``, a row is a pack. Hooks
    also get a number below 0 for each row that only fills up the batch"""
    metrics: dict[str, SupportsFloat] = field(default_factory=dict)
    """what hooks and the objective add"""
    sums: dict[str, Any] = field(default_factory=dict)
    """the objective's metrics until the log point: tensors, this rank's part of them; empty from then on"""

    def to_json(self) -> dict[str, Any]:
        """Return the line of ``steps.jsonl``. Call it from the log point on, when the values are floats."""
        line: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "cursor": [*self.cursor],
            "ids": [int(sample) for sample in self.ids if sample >= 0],
        }
        if self.metrics:
            line["metrics"] = self.metrics
        return line


@dataclass(kw_only=True)
class EvaluationRecord:
    """One evaluation.

    ``result`` holds ``loss`` (nats per supervised token, over all ranks and datasets), ``tokens``, and ``perplexity`` if the
    loss is a cross-entropy. If there are several datasets, ``datasets`` holds the same values of each, by name. ``metrics``
    holds the values of the scorers.
    """

    step: int
    seconds: float
    result: dict[str, Any]
    samples: list[dict[str, Any]]
    """the scorers' tables"""
