r"""Finetune a chat model with LoRA, another kind of adapter, or QLoRA; the loss is on the assistant's turns.

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

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from zerobook.data.templates import CausalEncoder
from zerobook.models.adapters import IA3_RATE, LORA_RATE, LORA_WARMUP, AdapterConfig, Method
from zerobook.models.quantise import int8, nf4
from zerobook.training.recipe import Collator, Recipe, Scorer
from zerobook.training.run import run

if TYPE_CHECKING:
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

    from zerobook.data.prepare import PreparedData


class LoraConfig(AdapterConfig):
    length_key: ClassVar[str] = "max_seq_length"

    max_seq_length: int = Field(1024, ge=2, description="tokens that a chat may have; longer ones are cut")
    assistant_only_loss: bool = Field(
        True,
        description="true: learn only the assistant's turns of a chat; false: learn all its tokens, except where the data "
        "itself says what to learn (a prompt with a completion, or a key such as train or weight)",
    )
    adapter: Method = Field("lora", description="kind of the adapters: lora, rslora, dora, pissa or ia3")
    learning_rate: float = Field(
        LORA_RATE, gt=0, description=f"peak learning rate; the default is {IA3_RATE:g} with adapter ia3"
    )
    warmup_ratio: float = Field(
        LORA_WARMUP,
        ge=0,
        lt=1,
        description="num_warmup_steps as a share of all steps; the default is 0 if num_warmup_steps is set",
    )
    load_in_4bit: bool = Field(False, description="QLoRA: NF4 base weights with double quantisation")
    load_in_8bit: bool = Field(False, description="int8 base weights with a scale for each row; excludes load_in_4bit")

    eval_samples: int = Field(0, ge=0, description="held-out prompts that are answered at every evaluation, for people to read")

    @property
    def base_format(self) -> str | None:
        if self.load_in_4bit:
            return "nf4"
        return "int8" if self.load_in_8bit else None

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.model_name_or_path is None:
            problems.append(
                "model_name_or_path: adapters need a model to adapt. Give a hub name, a folder or embedded:smollm2."
            )
        if self.eval_samples and not self.assistant_only_loss:
            problems.append(
                "eval_samples: a chat of which all is learnt has no prompt to answer. Drop it, or assistant_only_loss."
            )
        if self.load_in_4bit and self.load_in_8bit:
            problems.append("load_in_8bit: load_in_4bit is set too, and the base has one format. Drop one of the two.")
        return problems


class LoraFinetune(Recipe[LoraConfig]):
    """Trains adapters beside the linear layers. Everything else is inherited from `Recipe`."""

    config_class = LoraConfig

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> CausalEncoder:
        # Only the assistant's text and its end of turn are supervised, unless assistant_only_loss is false.
        config = self.config
        return CausalEncoder(tokenizer, length=config.max_seq_length, assistant_only_loss=config.assistant_only_loss)

    def scorers(
        self, tokenizer: PreTrainedTokenizerBase, model: nn.Module, data: PreparedData, collate: Collator
    ) -> Sequence[Scorer]:
        from zerobook.data.templates import end_tokens
        from zerobook.evaluation.answers import AnswerSampler

        scorers = [*super().scorers(tokenizer, model, data, collate)]
        if self.config.eval_samples and data.held_out:
            # The prompts are those of the first dataset.
            rows = next(iter(data.held_out.values()))
            ends = end_tokens(tokenizer)
            scorers.append(AnswerSampler(rows, tokenizer, count=self.config.eval_samples, ends=ends))
        return scorers

    def quantization(self, precision: str) -> BitsAndBytesConfig | None:
        if self.config.base_format == "int8":
            return int8()
        return nf4(precision) if self.config.base_format == "nf4" else None


if __name__ == "__main__":
    run(LoraFinetune)
