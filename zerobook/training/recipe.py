"""Recipes: a config class, and the parts of a training that differ from recipe to recipe.

A recipe's file declares one subclass of `Recipe` and ends with ``run(ThatClass)``. The defaults are defined here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigT
from zerobook.objective import NextToken, Objective, TargetTokens

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from zerobook.data.prepare import PreparedData
    from zerobook.data.templates import Encoder
    from zerobook.strategy import Strategy

# Rows (int64 arrays by name) to a batch: tensors by name, ``labels`` among them. The objective gets the batch.
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
# (strategy, prepared model, step) -> (metrics by name, table of samples). Called on every rank at every evaluation.
Scorer = Callable[["Strategy", "nn.Module", int], tuple[dict[str, float], list[dict[str, Any]]]]


class BatchShape(NamedTuple):
    """The shape of a micro-batch: rows, and the tokens of each row's source (or text) and target (0 if there is none).

    ``padded``: some tokens are padding, for which an encoder-decoder needs a mask.
    """

    rows: int
    source: int
    target: int
    padded: bool


class Recipe(ABC, Generic[ConfigT]):
    """Base class of recipes. The strategies, the training loop, checkpoints and the planner work with any recipe.

    A run calls the methods on every rank, in the order of their definitions; `quantization` is called by `model`. The last two,
    `batch_shape` and `example_batch`, are for the planner.
    """

    config_class: ClassVar[type[RecipeConfig]]
    """The class of ``config``, with the fields that become flags and YAML keys."""
    encoder_decoder: ClassVar[bool] = False
    """True if the model is an encoder-decoder, False for a decoder."""

    def __init__(self, config: ConfigT):
        self.config = config

    def check_model_config(self, model_config: PreTrainedConfig) -> None:
        """Raise `ConfigError` if the model does not fit the config. Called before any data is prepared.

        Args:
            model_config: transformers' config of the model.
        """

    def objective(self) -> Objective:
        """Return the objective that the run minimises."""
        return TargetTokens() if self.encoder_decoder else NextToken(self.config.router_aux_loss_coef)

    @abstractmethod
    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """Return the encoder, which turns samples into token ids and labels."""

    def model(self, tokenizer: PreTrainedTokenizerBase, strategy: Strategy) -> PreTrainedModel:
        """Load the model, without adapters. ZeRO-3 shards it while it is loaded."""
        from zerobook.models.load import load_model

        quantization = self.quantization(strategy.plan.precision)
        return load_model(self.config, strategy, encoder_decoder=self.encoder_decoder, quantization=quantization)

    def quantization(self, precision: str) -> BitsAndBytesConfig | None:
        """Return transformers' quantisation config of the frozen weights; None if they are not quantised.

        Args:
            precision: precision of the run: ``no``, ``bf16`` or ``fp16``.
        """
        return None

    def adapt(self, model: PreTrainedModel) -> nn.Module:
        """Return the model to train: set ``requires_grad`` on its trained weights, and add the adapters of the config."""
        from zerobook.models.adapters import adapt_model

        if not self.config.trains_adapters:
            return model
        return adapt_model(model, self.config.model_dump(), revision=self.config.model_revision)

    def reference_model(self, tokenizer: PreTrainedTokenizerBase, strategy: Strategy) -> PreTrainedModel | None:
        """Return a second model, which is not trained, or None. `Objective.reference_model` is this model, prepared.

        The base class's `model` loads one with the weights that the run starts from.
        """
        return None

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> Collator:
        """Return the collator, which makes a batch from rows."""
        from zerobook.data.collate import choose_causal_collator

        return choose_causal_collator(
            tokenizer, model, packed=self.config.packing, padding_free=self.config.padding_free, length=self.config.row_length
        )

    def scorers(
        self, tokenizer: PreTrainedTokenizerBase, model: nn.Module, data: PreparedData, collate: Collator
    ) -> Sequence[Scorer]:
        """Return the scorers, which measure more than the loss at every evaluation."""
        from zerobook.evaluation.scorers import task_scorers

        return task_scorers(self.config, tokenizer, model, "causal")

    # --- for the planner, which runs the model on fake tensors
    def batch_shape(self) -> BatchShape:
        """Return the shape of the largest possible micro-batch."""
        config = self.config
        # Running text is cut into blocks, which need no padding; chats and pairs do.
        are_blocks = not config.trains_adapters and config.format in (None, "text")
        padded = not (are_blocks or config.rows_shared_by)
        return BatchShape(config.per_device_train_batch_size, config.row_length, 0, padded=padded)

    def example_batch(self, shape: BatchShape) -> dict[str, Tensor]:
        """Return a batch of ``shape`` as the collator would make it, with arbitrary contents."""
        import torch

        # Flash and flex attention compute each sample of a joined or packed row by itself. Others read a mask of the borders.
        has_borders = self.config.attn_implementation not in ("flash_attention_2", "flex_attention")
        is_joined = self.config.padding_free and has_borders
        if is_joined:
            ids = torch.zeros(1, shape.rows * shape.source, dtype=torch.int64)
        else:
            ids = torch.zeros(shape.rows, shape.source, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if is_joined or (self.config.packing and has_borders):
            batch["position_ids"] = ids.clone()
        return batch
