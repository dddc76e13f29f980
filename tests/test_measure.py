"""``zerobook eval RUN --file``: the loss of the run's own evaluation, and answers."""

from __future__ import annotations

import json
import shutil
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from recipes.causal_lm import CausalLM
from recipes.lora_finetune import LoraFinetune
from recipes.seq2seq_chatbot import Seq2SeqChatbot
from tests.alone import train
from tests.harness import ROOT
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.training.measure import evaluate_on_file
from zerobook.training.recipe_file import recipe_class

CASES = {
    "chats": (CausalLM, "llama", {"block_size": 64}),
    "all tokens": (CausalLM, "llama", {"block_size": 64, "assistant_only_loss": False}),
    "text": (CausalLM, "llama", {"block_size": 32}),
    "packed": (CausalLM, "llama", {"block_size": 64, "packing": True}),
    "adapter": (LoraFinetune, "llama", {"max_seq_length": 64, "lora_r": 4}),
    "template": (LoraFinetune, "llama", {"max_seq_length": 64, "lora_r": 4, "chat_template": "other.jinja"}),
    "new tokens": (LoraFinetune, "llama", {"max_seq_length": 64, "lora_r": 4, "new_tokens": "sapient"}),
    "4 bits": (LoraFinetune, "llama", {"max_seq_length": 64, "lora_r": 4, "load_in_4bit": True}),
    "pairs": (Seq2SeqChatbot, "t5", {"max_source_length": 32, "max_target_length": 16}),
}
"""Name -> recipe, model, flags."""


def measured(capsys, *words):
    AcceleratorState._reset_state(reset_partial_state=True)
    capsys.readouterr()
    try:
        assert main(["eval", *map(str, words), "--json"]) == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_on_a_file_is_that_of_the_runs_own_evaluation(tiny, tmp_path, capsys, monkeypatch, case):
    recipe, model, flags = CASES[case]
    file = tiny / ("text.txt" if case == "text" else "few.jsonl")
    # From another folder, and with the recipe's file that the run names.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}")
    run = train(
        tmp_path / "run", recipe, model_name_or_path=tiny / model, train_file=tiny / "chats.jsonl", validation_file=file,
        max_train_steps=3, learning_rate=3e-3, per_device_train_batch_size=2, cache_dir=tmp_path / "cache", **flags,
    )  # fmt: skip
    own = run.event("eval")

    found = measured(capsys, "run", "--file", file)

    assert found["held_out"]["tokens"] == own["tokens"]
    assert found["held_out"]["loss"] == pytest.approx(own["loss"], rel=1e-6)
    # Rows of which all is learnt have no prompts.
    assert bool(found["samples"]) == (case not in ("text", "all tokens"))
    assert all(set(sample) >= {"prediction"} or set(sample) >= {"answer"} for sample in found["samples"])
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    if case == "adapter":
        assert measured(capsys, newest, "--file", file)["held_out"] == pytest.approx(found["held_out"])
        fewer = measured(capsys, "run/adapter", "--file", file, "--limit", "1")
        assert 0 < fewer["held_out"]["tokens"] < own["tokens"] and len(fewer["samples"]) == 1


def test_a_run_of_an_earlier_version_needs_no_record_of_its_code(tiny):
    with pytest.raises(ConfigError, match="its recipe is recipe"):
        evaluate_on_file(str(ROOT / "tests/fixtures/before/run"), str(tiny / "few.jsonl"), rows=None, trust_remote_code=False)


def test_rows_longer_than_the_models_positions_are_refused(tiny, tmp_path):
    """The run's own rows are shorter than its limit for them."""
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}))
    words = " ".join(map(str, range(200)))
    long = tmp_path / "long.jsonl"
    long.write_text(short.read_text().replace("Hello", words))
    train(
        tmp_path / "run", model_name_or_path=tiny / "gpt2", train_file=short, validation_split_percentage=0, block_size=512,
        max_train_steps=1, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)

    with pytest.raises(ConfigError, match="128 positions"):
        evaluate_on_file(str(tmp_path / "run"), str(long), rows=None, trust_remote_code=False)


def test_a_folder_without_a_run_and_a_missing_file_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="there is no run"):
        evaluate_on_file(str(tiny / "llama"), str(tiny / "few.jsonl"), rows=None, trust_remote_code=False)
    with pytest.raises(SystemExit):
        main(["eval", str(ROOT)])


def test_the_best_model_is_written_measured_and_exported_by_the_runs_name(tiny, tmp_path, capsys):
    """The rate is so high that the held-out loss rises after a few steps."""
    data = {"train_file": tiny / "few.jsonl", "validation_file": tiny / "chats.jsonl", "max_eval_samples": 4}
    run = train(
        tmp_path / "run", model_name_or_path=tiny / "llama", block_size=64, learning_rate=5e-2, lr_scheduler_type="constant",
        max_train_steps=3, eval_steps=1, save_steps=1, on_spike="log", final_model="best", cache_dir=tmp_path / "cache", **data,
    )  # fmt: skip
    losses = {event["step"]: event["loss"] for event in run.events if event["type"] == "eval"}
    words = ("--file", tiny / "chats.jsonl", "--limit", 4)
    assert min(losses.values()) < losses[3]

    for name, more, loss in (
        (run.output, [], min(losses.values())),
        (run.output, ["--checkpoint", "best"], min(losses.values())),
        (run.output, ["--checkpoint", "auto"], losses[3]),
    ):
        assert measured(capsys, name, *words, *more)["held_out"]["loss"] == pytest.approx(loss, rel=1e-5)

    # A chat answers by the same checkpoints.
    for which, step in (("best", min(losses, key=losses.__getitem__)), ("auto", 3)):
        with mock.patch("zerobook.cli.chat.load_result", side_effect=ConfigError("stop")) as load:
            assert main(["chat", str(run.output), "--checkpoint", which]) == 2
        assert load.call_args.args == (str(run.output / "checkpoints" / f"step-{step:06d}"),)

    assert main(["export", str(run.output), "--output", str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    written = load_file(run.output / "model" / "model.safetensors")
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], written[name]) for name in written)


RECIPE = """
from recipes.causal_lm import CausalLM
from zerobook.objective import NextToken
from zerobook.training.run import run


class Doubled(NextToken):
    def loss(self, model, batch):
        return 2 * super().loss(model, batch)


class Mine(CausalLM):
    def objective(self):
        return Doubled()


if __name__ == "__main__":
    run(Mine)
"""


def test_a_recipe_of_ones_own_is_loaded_from_where_the_run_was_started(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    run = train(
        tmp_path / "run", recipe_class("recipe.py"), model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl",
        validation_file=tiny / "few.jsonl", block_size=64, max_train_steps=1, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    found = measured(capsys, "run", "--file", tiny / "few.jsonl", "--trust_remote_code")
    assert found["held_out"] == pytest.approx({key: run.event("eval")[key] for key in ("loss", "tokens")})

    # A runlog from elsewhere may name any file: nothing of it runs without the user's word.
    (tmp_path / "recipe.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match="--trust_remote_code"):
        evaluate_on_file("run", str(tiny / "few.jsonl"), rows=None, trust_remote_code=False)

    (tmp_path / "recipe.py").unlink()
    with pytest.raises(ConfigError, match=r"recipe"):
        evaluate_on_file("run", str(tiny / "few.jsonl"), rows=None, trust_remote_code=True)


def test_a_recipe_in_the_working_folder_with_a_shipped_ones_name_is_not_run(tiny, tmp_path, monkeypatch):
    train(
        tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", block_size=64, max_train_steps=1,
        validation_split_percentage=0, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "causal_lm.py").write_text("raise SystemExit('it ran')")

    with pytest.raises(ConfigError, match="--trust_remote_code"):
        evaluate_on_file("run", str(tiny / "few.jsonl"), rows=None, trust_remote_code=False)


def test_the_optimizer_of_the_run_is_not_loaded(tiny, tmp_path, capsys):
    optimizer = tmp_path / "mine.py"
    optimizer.write_text("from zerobook.optimizer import SGD\n\n\nclass Mine(SGD):\n    pass\n")
    run = train(
        tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", block_size=64, max_train_steps=1,
        validation_file=tiny / "few.jsonl", optimizer=f"{optimizer}:Mine", momentum=0.5, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    optimizer.write_text("raise SystemExit('it ran')")

    found = measured(capsys, run.output, "--file", tiny / "few.jsonl")

    assert found["held_out"]["loss"] == pytest.approx(run.event("eval")["loss"], rel=1e-6)


def test_a_run_of_another_machine_is_measured_without_its_folders(tiny, tmp_path, capsys):
    there = tmp_path / "there"
    run = train(
        there / "run", model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", validation_file=tiny / "few.jsonl",
        block_size=64, max_train_steps=1, cache_dir=there / "cache",
    )  # fmt: skip
    (there / "run").rename(tmp_path / "here")
    shutil.rmtree(there)
    there.write_text("Nobody can make a folder in a file.")

    found = measured(capsys, tmp_path / "here", "--file", tiny / "few.jsonl")

    assert found["held_out"]["loss"] == pytest.approx(run.event("eval")["loss"], rel=1e-6)


def test_the_best_model_needs_held_out_data(tiny, tmp_path):
    with pytest.raises(ConfigError, match="final_model"):
        train(
            tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", validation_split_percentage=0,
            block_size=64, max_train_steps=1, final_model="best", cache_dir=tmp_path / "cache",
        )  # fmt: skip
