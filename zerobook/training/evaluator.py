"""Evaluation during training: the loss on held-out data, and the scorers' metrics."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from zerobook.config import RecipeConfig
from zerobook.data.prepare import PreparedData
from zerobook.errors import ConfigError
from zerobook.evaluation import held_out
from zerobook.objective import router_outputs_off
from zerobook.runlog.records import EvaluationRecord
from zerobook.strategy import Strategy
from zerobook.training.recipe import Collator, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Evaluator:
    """Evaluates the model in its current state.

    Args:
        collate: list of rows -> batch.
        summed_loss: batch -> the objective's loss, summed over its rows.
        has_perplexity: whether that loss is a cross-entropy.

    Attributes:
        seconds: time spent on all evaluations so far.
    """

    def __init__(
        self,
        config: RecipeConfig,
        strategy: Strategy,
        data: PreparedData,
        scorers: Sequence[Scorer],
        collate: Collator,
        summed_loss: Callable[[dict[str, torch.Tensor]], torch.Tensor],
        has_perplexity: bool,
    ):
        self.config = config
        self.strategy = strategy
        self.data = data
        self.scorers = scorers
        self.collate = collate
        self.summed_loss = summed_loss
        self.has_perplexity = has_perplexity
        self.seconds = 0.0

    @property
    def rows_at_once(self) -> int:
        """Rows per forward pass of a process; 0 without held-out data."""
        if not self.data.held_out:
            return 0
        # Logits limit the number of rows. There are none if the output layer computes the loss itself.
        if getattr(self.collate, "supervised", False):
            return self.config.eval_batch_size
        most_labels = max(rows.most_labels for rows in self.data.held_out.values())
        vocabulary = held_out.vocabulary(cast("PreTrainedModel", self.strategy.unwrapped).config)
        return held_out.rows_at_once(self.config.eval_batch_size, most_labels, vocabulary)

    def evaluate(self, step: int) -> EvaluationRecord | None:
        """Evaluate the model and return the record; None if there are neither held-out data nor scorers. Collective."""
        strategy = self.strategy
        if not self.data.held_out and not self.scorers:
            return None
        start = time.monotonic()
        # Turn off dropout.
        strategy.model.eval()
        # Turn off ``output_router_logits`` of models with experts. Scorers may generate texts, and with it, this fails.
        with router_outputs_off(strategy.unwrapped):
            result: dict[str, Any] = {}
            if self.data.held_out:
                result = held_out.losses(
                    strategy,
                    self.data.held_out,
                    self.rows_at_once,
                    self.collate,
                    self.summed_loss,
                    self.has_perplexity,
                )
            metrics: dict[str, float] = {}
            samples: list[dict[str, Any]] = []
            for scorer in self.scorers:
                new_metrics, scorer_samples = scorer(strategy, strategy.model, step)
                duplicates = metrics.keys() & new_metrics.keys()
                if duplicates:
                    raise ConfigError(
                        f"two scorers measure {', '.join(sorted(duplicates))}, and only one value could be logged. Give each "
                        "scorer names of its own."
                    )
                metrics |= new_metrics
                samples += scorer_samples
        strategy.model.train()
        # Forward passes without a backward pass can leave weights gathered. Collective.
        strategy.release_gathered_parameters()
        if metrics:
            result["metrics"] = metrics
        seconds = round(time.monotonic() - start, 3)
        self.seconds += seconds
        return EvaluationRecord(step=step, seconds=seconds, result=result, samples=samples)
