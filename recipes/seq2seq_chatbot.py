r"""Finetune an encoder-decoder model to answer: a source text goes in, a target text is learnt and generated.

On GPUs, here two, as published for BlenderBot-400M:

    accelerate launch --config_file accelerate_configs/published/zero2.yaml --num_processes 2 recipes/seq2seq_chatbot.py \
        --config recipes/configs/seq2seq_blenderbot.yaml

On a laptop's CPU, two processes, with any encoder-decoder model from a folder or the hub:

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/seq2seq_chatbot.py \
        --model_name_or_path google-t5/t5-small --dataset_name embedded:chatterbot --max_source_length 64 \
        --max_target_length 32 --per_device_train_batch_size 4 --max_train_steps 20 --num_beams 2 --output_dir outputs/seq2seq
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from pydantic import Field
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from zerobook.data.collate import DecoderInput, Seq2SeqCollator, get_length_multiple
from zerobook.data.templates import Seq2SeqEncoder
from zerobook.models.adapters import AdapterConfig
from zerobook.strategy import Strategy
from zerobook.training.recipe import BatchShape, Recipe, Scorer
from zerobook.training.run import run

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from zerobook.data.prepare import PreparedData
    from zerobook.training.recipe import Collator


class Seq2SeqConfig(AdapterConfig):
    length_key: ClassVar[str] = "max_source_length"

    source_prefix: str = Field("", description="text before every source; kept with the saved model")
    max_source_length: int = Field(1024, ge=2, description="tokens that a source may have; longer ones are cut")
    max_target_length: int = Field(128, ge=2, description="tokens that a target may have; longer ones are cut")
    pad_to_max_length: bool = Field(
        False, description="always pad to the maximum lengths, not to the longest sample of the batch"
    )
    num_beams: int = Field(1, ge=1, description="beams of the search; 1 is greedy")
    no_repeat_ngram_size: int | None = Field(
        None, ge=0, description="n: no sequence of n tokens is generated twice in a text; 0: no limit; unset: the model's own"
    )
    encoder_no_repeat_ngram_size: int | None = Field(
        None, ge=0, description="n: no sequence of n tokens of the source is generated; 0: no limit; unset: the model's own"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description="above 1: lowers scores of tokens that a text already has; 1: no change; unset: the model's own"
    )
    length_penalty: float | None = Field(
        None, description="beams are ranked by score / length^penalty: above 0 favours long texts; unset: the model's own"
    )
    val_max_target_length: int | None = Field(
        None, ge=1, description="maximum number of generated tokens; unset: max_target_length"
    )
    val_min_target_length: int = Field(0, ge=0, description="minimum number of generated tokens before the end token")
    n_val_batch_generations: int | None = Field(
        None, ge=1, description="evaluation batches per process for which texts are generated; unset: all"
    )

    @property
    def max_generated(self) -> int:
        return self.val_max_target_length or self.max_target_length

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.model_name_or_path is None:
            problems.append("model_name_or_path: no model is named. Give a hub name or a folder with an encoder-decoder model.")
        if self.rows_shared_by is not None:
            problems.append(
                f"{self.rows_shared_by}: sources and targets have rows of their own here. Drop it, or use --group_by_length."
            )
        if self.val_min_target_length >= self.max_generated:
            problems.append(
                f"val_min_target_length: {self.val_min_target_length} tokens at least do not fit into "
                f"val_max_target_length={self.max_generated}. Lower one or raise the other."
            )
        if self.length_penalty is not None and self.num_beams == 1:
            problems.append(
                f"length_penalty: {self.length_penalty} ranks beams, and num_beams is 1. Raise num_beams, or drop it."
            )
        return problems


class Seq2SeqChatbot(Recipe[Seq2SeqConfig]):
    """Trains an encoder-decoder, all weights or adapters, and generates texts at every evaluation."""

    config_class = Seq2SeqConfig
    encoder_decoder = True

    def check_model_config(self, model_config: PreTrainedConfig) -> None:
        from zerobook.models.load import check_positions

        config = self.config
        longest = max(config.max_source_length, config.max_target_length, config.max_generated)
        check_positions(model_config, str(config.model_name_or_path), longest)

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Seq2SeqEncoder:
        config = self.config
        return Seq2SeqEncoder(
            tokenizer,
            prefix=config.source_prefix,
            max_source_length=config.max_source_length,
            max_target_length=config.max_target_length,
        )

    def model(self, tokenizer: PreTrainedTokenizerBase, strategy: Strategy) -> PreTrainedModel:
        from zerobook.models.generation_config import RULES, save_decoding_settings

        # The generation settings and the prefix are saved with the model, so that it later generates as in the evaluation.
        model = super().model(tokenizer, strategy)
        config = self.config
        save_decoding_settings(
            model,
            tokenizer,
            source_prefix=config.source_prefix,
            num_beams=config.num_beams,
            max_tokens=config.max_generated,
            min_tokens=config.val_min_target_length,
            **{name: getattr(config, name) for name in RULES},
        )
        return model

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> Seq2SeqCollator:
        config = self.config
        return Seq2SeqCollator(
            tokenizer.pad_token_id,
            DecoderInput(model),
            pad_to_multiple_of=get_length_multiple(model),
            source_length=config.max_source_length if config.pad_to_max_length else 0,
            target_length=config.max_target_length if config.pad_to_max_length else 0,
        )

    def scorers(
        self, tokenizer: PreTrainedTokenizerBase, model: nn.Module, data: PreparedData, collate: Collator
    ) -> Sequence[Scorer]:
        from zerobook.evaluation.generation import GenerationScorer
        from zerobook.evaluation.scorers import task_scorers

        config = self.config
        scorers: list[Scorer] = [*task_scorers(config, tokenizer, model, "seq2seq")]
        if data.held_out:
            datasets = cast("list[Dataset[dict[str, Any]]]", [*data.held_out.values()])
            rows: ConcatDataset[dict[str, Any]] = ConcatDataset(datasets)
            scorers.append(
                GenerationScorer(
                    rows,
                    tokenizer,
                    cast("Seq2SeqCollator", collate),
                    decoding=cast("GenerationConfig", model.generation_config),
                    batch_size=config.per_device_eval_batch_size,
                    batches=config.n_val_batch_generations,
                )
            )
        return scorers

    def batch_shape(self) -> BatchShape:
        config = self.config
        return BatchShape(config.per_device_train_batch_size, config.max_source_length, config.max_target_length, padded=True)

    def example_batch(self, shape: BatchShape) -> dict[str, torch.Tensor]:
        batch = super().example_batch(shape)
        labels = torch.zeros(shape.rows, shape.target, dtype=torch.int64)
        batch |= {"labels": labels, "decoder_input_ids": labels.clone()}
        if shape.padded:
            batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
        return batch


if __name__ == "__main__":
    run(Seq2SeqChatbot)
