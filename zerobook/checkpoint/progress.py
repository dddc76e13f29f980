"""The progress of a run: a record that a checkpoint holds beside the weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from zerobook.errors import CheckpointError

# Fields that checkpoints of earlier versions lack. They then have their defaults.
_NEW_FIELDS = {"evaluations_without_progress", "held_out_fingerprint"}


@dataclass(kw_only=True)
class Progress:
    """State of a run after an optimizer step. It does not depend on the strategy and the world size.

    The random numbers of dropout are seeded by (seed, step, rank) at every step. So ``seed`` and ``step`` are their state, and
    a resumed run uses the same random numbers as an uninterrupted one.
    """

    step: int = 0
    """optimizer steps done"""
    cursor: int = 0
    """position in the sample order, over all epochs and processes"""
    samples: int = 0
    """samples trained on, without skipped ones and without the rows of weight 0 that fill the last batch"""
    tokens: int = 0
    """supervised tokens trained on"""
    epoch: float = 0.0
    """passes over the data, cursor / samples per epoch"""
    seed: int = 0
    """seed of the sample order and the random numbers"""
    total_steps: int = 0
    """length of the learning-rate schedule, in optimizer steps"""
    global_batch: int = 0
    """samples per optimizer step"""
    world_size: int = 0
    """number of processes of the run that wrote this record"""
    data_size: int = 0
    """samples per epoch; 0 for a stream"""
    data_fingerprint: str = ""
    """fingerprint of the tokenized training data; a run resumes only on the same data"""
    stream: list[list[int]] | None = None
    """for each dataset of a stream: the number of rows of each shard that was reached so far, in the order of reading"""
    skip_ranges: list[list[int]] = field(default_factory=list)
    """[start, end) of sample ids left out of every epoch"""
    rate_cuts: list[list[float]] = field(default_factory=list)
    """[step, factor, steps until the full rate is reached again] of each reduction of the learning rate"""
    redone: int = 0
    """steps that were done and abandoned. ``step + redone`` counts all steps done, so it never becomes smaller"""
    detector: dict[str, Any] = field(default_factory=dict)
    """state of the spike detector"""
    scaler: dict[str, Any] | None = None
    """the fp16 loss scaler's state"""
    held_out_fingerprint: str = ""
    """fingerprint of the held-out data of ``best_eval_loss`` and ``eval_loss``; empty if there are no held-out data"""
    best_eval_loss: float | None = None
    """lowest held-out loss so far, nats per supervised token"""
    evaluations_without_progress: int = 0
    """evaluations since the held-out loss last became lower, for early stopping"""
    following: dict[str, Any] = field(default_factory=dict)
    """inputs of the next step (learning rate, sample ids, random numbers), which a resumed run compares with its own"""
    eval_loss: float | None = None
    """held-out loss at this step; None if it was not evaluated at this step, or is not finite"""

    def evaluated(self, loss: float) -> None:
        """Record the held-out loss of this step. A loss that is not finite is not recorded, so it is never the best."""
        best = self.best_eval_loss
        # Records of earlier versions may hold a NaN, and each comparison with NaN is false. With ``not best <= loss``, a loss
        # counts as better than NaN.
        is_best = best is None or not best <= loss
        if math.isfinite(loss):
            self.eval_loss = loss
        if is_best and math.isfinite(loss):
            self.best_eval_loss = loss
            self.evaluations_without_progress = 0
        else:
            self.evaluations_without_progress += 1

    def use_held_out_data(self, fingerprint: str) -> bool:
        """Record the held-out data that the next losses are measured on, and forget losses of other data.

        Returns:
            True if losses were forgotten.
        """
        has_losses = self.best_eval_loss is not None or self.evaluations_without_progress > 0
        is_other = fingerprint != self.held_out_fingerprint
        if is_other:
            self.held_out_fingerprint = fingerprint
            self.best_eval_loss = None
            self.eval_loss = None
            self.evaluations_without_progress = 0
        return is_other and has_losses

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Progress:
        """Return the progress that ``record``, of `to_json`, holds. Raises `CheckpointError` if keys are missing or unknown."""
        names = {field.name for field in fields(cls)}
        missing = names - set(record) - _NEW_FIELDS
        unknown = set(record) - names
        if missing or unknown:
            raise CheckpointError(
                f"the progress record does not match this version: missing {sorted(missing)}, unknown {sorted(unknown)}."
            )
        return cls(**record)
