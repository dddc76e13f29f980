"""Special tokens that a run adds, and modules that it trains whole beside adapters, through real launches."""

from __future__ import annotations

import json

import pytest
import torch

from tests.distributed.test_adapter_runs import assert_exports_to_the_same
from tests.distributed.test_parity import TOLERANCE, largest_difference
from tests.harness import launch, sampled
from zerobook.models.result import load_result

TOKENS = ["<tool>", "</tool>"]
SHARDED = [
    (strategy, recipe, kind)
    for strategy in ("zero3", "fsdp")
    for recipe in ("lora_finetune", "causal_lm")
    for kind in ("tied", "untied")
]
CASES = [*SHARDED, ("ddp", "lora_finetune", "tied"), ("zero2", "causal_lm", "untied")]
"""Every pair under those that shard weights; the others hold whole ones, as one process does."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"how is day {day}"},
                      {"role": "assistant", "content": f"<tool>weather {day}</tool> fine"}]}
        for day in range(12)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """A model whose input embeddings are its output embeddings, and one with both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "untied"
    model = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(1).clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "llama").save_pretrained(folder)
    return {"tied": tiny / "llama", "untied": folder, "seq2seq": tiny / "t5"}


@pytest.fixture(scope="module")
def train(models, chats, tmp_path_factory):
    made = {}

    def train(strategy, kind, recipe, **flags):
        key = strategy, kind, recipe, *sorted(flags.items())
        if key not in made:
            processes = 1 if strategy == "single" else 2
            lengths = {"causal_lm": {"block_size": 64}, "lora_finetune": {"max_seq_length": 64}}
            given = {
                "model_name_or_path": models[kind], "train_file": chats, "new_tokens": TOKENS,
                "per_device_train_batch_size": 4 // processes, "adam_epsilon": 1e-6, "logging_steps": 1, "save_steps": 2,
                "validation_split_percentage": 20, "max_train_steps": 4, "learning_rate": 1e-3,
                **lengths.get(recipe, {"max_source_length": 32, "max_target_length": 32}), **flags,
            }  # fmt: skip
            given = {name: value for name, value in given.items() if value is not None}
            made[key] = launch(strategy, processes, recipe, tmp_path_factory.mktemp(strategy) / "run", **given)
        return made[key]

    return train


def assert_alike(run, alone):
    assert largest_difference(run.losses, alone.losses) < TOLERANCE
    assert largest_difference(run.norms, alone.norms) < TOLERANCE


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, recipe, kind", sampled(CASES, ("zero3", "lora_finetune", "untied"), ("fsdp", "causal_lm", "tied"))
)
def test_new_tokens_under_every_strategy(train, tmp_path, strategy, recipe, kind):
    run, alone = train(strategy, kind, recipe), train("single", kind, recipe)
    assert_alike(run, alone)
    assert run.losses[-1] < run.losses[0]
    loaded = load_result(run.output)
    ids = loaded.tokenizer.convert_tokens_to_ids(TOKENS)
    rows = loaded.model.get_input_embeddings()
    assert rows.num_embeddings == len(loaded.tokenizer) == max(ids) + 1
    weight = getattr(rows, "modules_to_save", {"default": rows})["default"].weight
    assert not torch.equal(weight[ids[0]], weight[ids[1]]), "trained, each from its own texts"
    assert_exports_to_the_same(run, tmp_path)


@pytest.mark.launch
@pytest.mark.parametrize("recipe", sampled(["lora_finetune", "causal_lm"], "causal_lm"))
def test_a_checkpoint_with_new_tokens_goes_on_under_another_strategy(train, recipe):
    alone = train("single", "tied", recipe)
    (checkpoint,) = (alone.output / "checkpoints").glob("step-*2")
    run = train("fsdp", "tied", recipe, resume_from_checkpoint=checkpoint)
    assert len(run.losses) == 2
    assert largest_difference(run.losses, alone.losses[2:]) < TOLERANCE


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["zero3", "fsdp"], "zero3"))
def test_an_adapter_with_new_tokens_is_trained_further(train, tmp_path, strategy):
    """Its tokenizer and its embeddings have the tokens already."""
    before = train("single", "untied", "lora_finetune")
    flags = dict(model_name_or_path=before.output, new_tokens=None)
    run, alone = train(strategy, "untied", "lora_finetune", **flags), train("single", "untied", "lora_finetune", **flags)
    assert_alike(run, alone)
    assert run.losses[0] < before.losses[0]
    assert len(load_result(run.output).tokenizer) == len(load_result(before.output).tokenizer)
    assert_exports_to_the_same(run, tmp_path)


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["zero3", "fsdp"], "fsdp"))
def test_new_tokens_of_an_encoder_decoder(train, tmp_path, strategy):
    run = train(strategy, "seq2seq", "seq2seq_chatbot")
    assert_alike(run, train("single", "seq2seq", "seq2seq_chatbot"))
    assert_exports_to_the_same(run, tmp_path, decoder_input_ids=torch.arange(3, 27)[None])
