r"""Train a causal language model: from scratch on a config, or continued from a model's weights.

Written for GPUs, here eight (not run on any yet):

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 recipes/causal_lm.py \
        --model_name_or_path tiiuae/falcon-7b --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-2-raw-v1 --block_size 1024 --mixed_precision bf16 --output_dir outputs/falcon

The same on a laptop's CPU, two processes:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 2 recipes/causal_lm.py \
        --model_name_or_path embedded:smollm2 --dataset_name embedded:stdlib --block_size 64 --max_eval_samples 16 \
        --per_device_train_batch_size 1 --max_train_steps 4 --output_dir outputs/causal_lm
"""

from pydantic import Field

from zerobook.config import RecipeConfig, parse
from zerobook.launch import build, plan_for_this_process
from zerobook.recipe import announce, print_dry_run, run_recipe, save_model


class CausalLMConfig(RecipeConfig):
    config_name: str | None = Field(None, description="architecture to train from scratch: hub name or local folder")
    block_size: int = Field(1024, ge=2, description="tokens per block of text, or the most a chat may have")

    def problems(self) -> list[str]:
        found = super().problems()
        if (self.model_name_or_path is None) == (self.config_name is None):
            found.append(
                f"model_name_or_path: it is {self.model_name_or_path!r} and config_name is {self.config_name!r}. Give one: "
                "--model_name_or_path to continue from weights, --config_name to start from scratch."
            )
        return found


def main() -> None:
    # What to train (flags and YAML) and how it is spread (what accelerate launch handed over).
    config, sources, dry_run = parse(CausalLMConfig)
    plan = plan_for_this_process(config, sources)
    if dry_run:
        return print_dry_run(config, sources, plan)
    announce(plan)

    from zerobook.data.collate import causal_collator
    from zerobook.data.prepare import prepare
    from zerobook.data.templates import CausalEncoder
    from zerobook.evaluation.tasks import task_scorers
    from zerobook.loss import CAUSAL
    from zerobook.modeling import check_fit, load_causal_lm, load_tokenizer
    from zerobook.training.trainer import Trainer

    strategy = build(config, plan)
    tokenizer = load_tokenizer(config, strategy)

    # Text becomes blocks of block_size tokens; chats keep their lengths.
    encoder = CausalEncoder(tokenizer, length=config.block_size)
    data = prepare(config, tokenizer, strategy, encoder=encoder, objective=CAUSAL)

    model = load_causal_lm(config, strategy)
    check_fit(model, tokenizer, data)
    collate = causal_collator(tokenizer, model, packed=config.packing, length=config.block_size)
    scorers = task_scorers(config, tokenizer, model, "causal")
    trainer = Trainer(config, sources, strategy, model, data, collate=collate, objective=CAUSAL, scorers=scorers)
    trainer.run()
    if trainer.save_results:
        save_model(strategy, tokenizer, config)


if __name__ == "__main__":
    run_recipe(main)
