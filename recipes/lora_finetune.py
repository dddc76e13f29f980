r"""Finetune a chat model with LoRA or QLoRA; the loss is on the assistant's turns only.

Written for GPUs, here eight (not run on any yet); chats.jsonl holds a line a chat, see docs/data.md:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 recipes/lora_finetune.py \
        --model_name_or_path HuggingFaceTB/SmolLM2-1.7B-Instruct --train_file chats.jsonl --mixed_precision bf16 \
        --output_dir outputs/lora_1.7b

The same on a laptop's CPU, two processes:

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/lora_finetune.py \
        --model_name_or_path embedded:smollm2 --dataset_name embedded:chatterbot --max_seq_length 128 \
        --per_device_train_batch_size 2 --max_train_steps 20 --learning_rate 2e-4 --output_dir outputs/lora
"""

from typing import ClassVar

from pydantic import Field

from zerobook.config import RecipeConfig, parse
from zerobook.launch import build, plan_for_this_process
from zerobook.recipe import announce, print_dry_run, run_recipe, save_model


class LoraConfig(RecipeConfig):
    trains_adapters: ClassVar[bool] = True

    max_seq_length: int = Field(1024, ge=2, description="tokens that a chat may have; longer ones are cut")
    lora_r: int = Field(16, ge=1, description="rank of the adapters")
    lora_alpha: float = Field(32, gt=0, description="scale of the adapters; the update is weighed by alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    lora_target_modules: list[str] = Field(["all-linear"], description="modules that get adapters")
    load_in_4bit: bool = Field(False, description="QLoRA: NF4 base weights with double quantisation")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.model_name_or_path is None:
            found.append("model_name_or_path: adapters need a model to adapt. Give a hub name, a folder or embedded:smollm2.")
        return found


def main() -> None:
    # What to train (flags and YAML) and how it is spread (what accelerate launch handed over).
    config, sources, dry_run = parse(LoraConfig)
    plan = plan_for_this_process(config, sources)
    if dry_run:
        return print_dry_run(config, sources, plan)
    announce(plan)

    from zerobook.adapters import add_lora, nf4
    from zerobook.data.collate import causal_collator
    from zerobook.data.prepare import prepare
    from zerobook.data.templates import CausalEncoder
    from zerobook.evaluation.tasks import task_scorers
    from zerobook.loss import CAUSAL
    from zerobook.modeling import check_fit, load_causal_lm, load_tokenizer
    from zerobook.training.trainer import Trainer

    strategy = build(config, plan)
    tokenizer = load_tokenizer(config, strategy)

    # Only what the assistant says, and its end of turn, is supervised.
    encoder = CausalEncoder(tokenizer, length=config.max_seq_length)
    data = prepare(config, tokenizer, strategy, encoder=encoder, objective=CAUSAL)

    # The base is frozen (in 4 bits for QLoRA); small matrices beside every linear layer are trained.
    model = load_causal_lm(config, strategy, quantization=nf4(plan.precision) if config.load_in_4bit else None)
    check_fit(model, tokenizer, data)
    model = add_lora(
        model,
        rank=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=config.lora_target_modules,
        seed=config.seed,
        revision=config.model_revision,
    )
    collate = causal_collator(tokenizer, model, packed=config.packing, length=config.max_seq_length)
    scorers = task_scorers(config, tokenizer, model, "causal")
    trainer = Trainer(config, sources, strategy, model, data, collate=collate, objective=CAUSAL, scorers=scorers)
    trainer.run()
    if trainer.save_results:
        save_model(strategy, tokenizer, config, name="adapter")


if __name__ == "__main__":
    run_recipe(main)
