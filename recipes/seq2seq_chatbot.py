r"""Finetune an encoder-decoder model to answer: a source text goes in, a target text is learnt and generated.

Written for GPUs, here two (not run on any yet), as published for BlenderBot-400M:

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/seq2seq_chatbot.py \
        --config recipes/configs/seq2seq_blenderbot.yaml --mixed_precision fp16

On a laptop's CPU, two processes, with any encoder-decoder model from a folder or the hub:

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/seq2seq_chatbot.py \
        --model_name_or_path google-t5/t5-small --dataset_name embedded:chatterbot --max_source_length 64 \
        --max_target_length 32 --per_device_train_batch_size 4 --max_train_steps 20 --num_beams 2 --output_dir outputs/seq2seq
"""

from pydantic import Field

from zerobook.config import RecipeConfig, parse
from zerobook.launch import build, plan_for_this_process
from zerobook.recipe import announce, print_dry_run, run_recipe, save_model


class Seq2SeqConfig(RecipeConfig):
    source_prefix: str = Field("", description="text before every source; kept in the saved model's config.json")
    max_source_length: int = Field(1024, ge=2, description="tokens that a source may have; longer ones are cut")
    max_target_length: int = Field(128, ge=2, description="tokens that a target may have; longer ones are cut")
    pad_to_max_length: bool = Field(False, description="pad to these lengths always, not to the batch's longest")
    num_beams: int = Field(1, ge=1, description="beams of the search; 1 is greedy")
    val_max_target_length: int | None = Field(None, ge=1, description="tokens generated at most; unset: max_target_length")
    val_min_target_length: int = Field(0, ge=0, description="tokens generated before the end at least")
    n_val_batch_generations: int | None = Field(
        None, ge=1, description="generate for so many evaluation batches of every process; unset: for all"
    )

    @property
    def max_generated(self) -> int:
        return self.val_max_target_length or self.max_target_length

    def problems(self) -> list[str]:
        found = super().problems()
        if self.model_name_or_path is None:
            found.append("model_name_or_path: no model is named. Give a hub name or a folder with an encoder-decoder model.")
        if self.packing:
            found.append("packing: sources and targets have rows of their own here. Drop it, or use --group_by_length.")
        if self.val_min_target_length >= self.max_generated:
            found.append(
                f"val_min_target_length: {self.val_min_target_length} tokens at least do not fit into "
                f"val_max_target_length={self.max_generated}. Lower one or raise the other."
            )
        return found


def main() -> None:
    # What to train (flags and YAML) and how it is spread (what accelerate launch handed over).
    config, sources, dry_run = parse(Seq2SeqConfig)
    plan = plan_for_this_process(config, sources)
    if dry_run:
        return print_dry_run(config, sources, plan)
    announce(plan)

    from torch.utils.data import ConcatDataset

    from zerobook.data.collate import DecoderInput, Seq2SeqCollator, length_multiple
    from zerobook.data.prepare import prepare
    from zerobook.data.templates import Seq2SeqEncoder
    from zerobook.evaluation.generation import GenerationScorer, answer_as_measured
    from zerobook.evaluation.tasks import task_scorers
    from zerobook.loss import SEQ2SEQ
    from zerobook.modeling import check_fit, check_positions, load_seq2seq_lm, load_tokenizer
    from zerobook.training.trainer import Trainer

    strategy = build(config, plan)
    tokenizer = load_tokenizer(config, strategy)
    model = load_seq2seq_lm(config, strategy)
    longest = max(config.max_source_length, config.max_target_length, config.max_generated)
    check_positions(model, str(config.model_name_or_path), longest)

    # Source and target keep their own lengths; the decoder reads the target one token late.
    lengths = {"max_source_length": config.max_source_length, "max_target_length": config.max_target_length}
    encoder = Seq2SeqEncoder(tokenizer, prefix=config.source_prefix, **lengths)
    data = prepare(config, tokenizer, strategy, encoder=encoder, objective=SEQ2SEQ)
    check_fit(model, tokenizer, data)
    collate = Seq2SeqCollator(
        tokenizer.pad_token_id,
        DecoderInput(model),
        pad_to_multiple_of=length_multiple(model),
        source_length=config.max_source_length if config.pad_to_max_length else 0,
        target_length=config.max_target_length if config.pad_to_max_length else 0,
    )

    # What the evaluation generates with, and the prefix, are saved with the model: it then answers as it was measured.
    answer_as_measured(
        model,
        tokenizer,
        source_prefix=config.source_prefix,
        num_beams=config.num_beams,
        max_tokens=config.max_generated,
        min_tokens=config.val_min_target_length,
    )
    scorers: list = task_scorers(config, tokenizer, model, "seq2seq", prefix=config.source_prefix)
    if data.held_out:
        rows = ConcatDataset(list(data.held_out.values()))
        scorer = GenerationScorer(
            rows, tokenizer, collate, decoding=model.generation_config, batch_size=config.per_device_eval_batch_size,
            batches=config.n_val_batch_generations,
        )  # fmt: skip
        scorers.append(scorer)
    trainer = Trainer(config, sources, strategy, model, data, collate=collate, objective=SEQ2SEQ, scorers=scorers)
    trainer.run()
    if trainer.save_results:
        save_model(strategy, tokenizer, config)


if __name__ == "__main__":
    run_recipe(main)
