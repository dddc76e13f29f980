r"""Finetune a chat model with LoRA or QLoRA; the loss is on the assistant's turns only.

On GPUs, here eight; chats.jsonl has one chat per line, see docs/guides/data.md:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 recipes/lora_finetune.py \
        --model_name_or_path HuggingFaceTB/SmolLM2-1.7B-Instruct --train_file chats.jsonl --mixed_precision bf16 \
        --output_dir outputs/lora_1.7b

The same on a laptop's CPU, two processes:

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/lora_finetune.py \
        --model_name_or_path embedded:smollm2 --dataset_name embedded:chatterbot --max_seq_length 128 \
        --per_device_train_batch_size 2 --max_train_steps 20 --learning_rate 2e-4 --output_dir outputs/lora
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from torch import nn

from zerobook.config import RecipeConfig
from zerobook.data.templates import CausalEncoder
from zerobook.models.adapters import add_lora
from zerobook.models.quantise import int8, nf4
from zerobook.training.recipe import Recipe
from zerobook.training.run import run

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase


class LoraConfig(RecipeConfig):
    trains_adapters: ClassVar[bool] = True
    length_key: ClassVar[str] = "max_seq_length"

    max_seq_length: int = Field(1024, ge=2, description="tokens that a chat may have; longer ones are cut")
    lora_r: int = Field(16, ge=1, description="rank of the adapters")
    lora_alpha: float = Field(32, gt=0, description="scale of the adapters; their output is multiplied by alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    lora_target_modules: list[str] = Field(["all-linear"], description="modules that get adapters")
    load_in_4bit: bool = Field(False, description="QLoRA: NF4 base weights with double quantisation")
    load_in_8bit: bool = Field(False, description="int8 base weights with a scale for each row; excludes load_in_4bit")

    @property
    def base_format(self) -> str | None:
        return "nf4" if self.load_in_4bit else "int8" if self.load_in_8bit else None

    def problems(self) -> list[str]:
        found = super().problems()
        if self.model_name_or_path is None:
            found.append("model_name_or_path: adapters need a model to adapt. Give a hub name, a folder or embedded:smollm2.")
        if self.load_in_4bit and self.load_in_8bit:
            found.append("load_in_8bit: load_in_4bit is set too, and the base has one format. Drop one of the two.")
        return found


class LoraFinetune(Recipe[LoraConfig]):
    """Trains low-rank adapters beside the linear layers. Everything else is inherited from `Recipe`."""

    config_class = LoraConfig

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> CausalEncoder:
        # Only the assistant's text and its end of turn are supervised.
        return CausalEncoder(tokenizer, length=self.config.max_seq_length)

    def quantization(self, precision: str) -> BitsAndBytesConfig | None:
        if self.config.base_format == "int8":
            return int8()
        return nf4(precision) if self.config.base_format == "nf4" else None

    def adapt(self, model: PreTrainedModel) -> nn.Module:
        config = self.config
        return add_lora(
            model,
            rank=config.lora_r,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            targets=config.lora_target_modules,
            seed=config.seed,
            revision=config.model_revision,
        )


if __name__ == "__main__":
    run(LoraFinetune)
