"""A user's mistake is one named error, never a traceback from inside a library, and leaves no half of a run."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.harness import ROOT, alone, launch, run_here, words_of


def run(recipe: str, output, **flags) -> subprocess.CompletedProcess:
    return alone(recipe, {"output_dir": output, **flags}, {"HF_HUB_OFFLINE": "1"})


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Files that are wrong in one way each."""
    from transformers import AutoTokenizer

    target = tmp_path_factory.mktemp("bad")
    (target / "empty.jsonl").touch()
    (target / "mute.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    (target / "short.txt").write_text("a few words")
    (target / "questions.csv").write_text("headline,body\na,b\n")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(target / "no_pad")
    (target / "half_a_model").mkdir()
    (target / "half_a_model" / "config.json").write_text(json.dumps({"model_type": "llama"})[:-3])
    return target


CASES = {
    "an empty dataset": ({"train_file": "empty.jsonl"}, "DataError", "the dataset is empty"),
    "no assistant": ({"train_file": "mute.jsonl"}, "DataError", "mute.jsonl, line 1: "),
    "nothing left": ({"train_file": "mute.jsonl", "on_bad_sample": "skip"}, "DataError", "not one sample can be used"),
    "too little text": ({"train_file": "short.txt"}, "DataError", "fewer than one block of 512"),
    "unknown columns": ({"train_file": "questions.csv"}, "DataError", "columns body, headline, which fit no known format"),
    "no such dataset": ({"dataset_name": "nobody/nothing"}, "DataError", "there is no such file or folder here"),
    "no such model": ({"model_name_or_path": "nobody/nothing"}, "ConfigError", "nobody/nothing is no folder here"),
    "a broken model": ({"model_name_or_path": "half_a_model"}, "ConfigError", "half_a_model is a folder here, but"),
}


@pytest.mark.parametrize("case", CASES)
def test_mistake_is_named(tiny, folder, tmp_path, monkeypatch, capsys, case):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given, kind, message = CASES[case]
    flags = {"model_name_or_path": tiny / "llama", "block_size": 512, "max_train_steps": 2, "cache_dir": tmp_path / "cache"}
    if "dataset_name" not in given:
        flags["train_file"] = tiny / "chats.jsonl"
    for key, value in given.items():
        flags[key] = folder / value if (folder / str(value)).exists() else value
    flags["output_dir"] = tmp_path / "run"

    code, text = run_here(ROOT / "recipes" / "causal_lm.py", words_of(flags), monkeypatch, capsys)

    assert code == 2, text[-3000:]
    assert f"{kind}: " in text and message in text
    assert "Traceback" not in text
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.launch
def test_a_tokenizer_without_a_pad_token_is_a_stated_fallback(tiny, folder, tmp_path):
    flags = {"model_name_or_path": tiny / "llama", "tokenizer_name": folder / "no_pad", "train_file": tiny / "chats.jsonl"}
    result = run("causal_lm", tmp_path / "run", block_size=64, max_train_steps=2, max_eval_samples=4, **flags)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the tokenizer has no pad token; its end-of-text token '<|im_end|>' pads, masked everywhere" in result.stdout


@pytest.mark.launch
def test_a_run_that_diverges_stops_and_saves_nothing_over(tiny, tmp_path):
    run = launch(
        "ddp", 2, "causal_lm", tmp_path / "run", expect=1, model_name_or_path=tiny / "llama", learning_rate=1e30,
        train_file=tiny / "chats.jsonl", block_size=64, max_train_steps=12, per_device_train_batch_size=2, logging_steps=4,
        max_grad_norm=0, save_steps=3,
    )  # fmt: skip
    stop = run.event("stop")
    assert (stop["exit_code"], stop["go_on_from"]) == (76, None) and "exitcode  : 76" in run.text
    assert "STOPPED at step" in run.text and "rate was 1e+30" in run.text and "start again with a lower" in run.text
    assert "there is no checkpoint from before" in run.text and "was not finite in 4 steps in a row" in run.text
    assert not list((run.output / "checkpoints").glob("step-*")), "what is not finite is not saved"
    saves = [(event["step"], event["state"]) for event in run.events if event["type"] == "checkpoint"]
    assert saves[0] == (3, "not_saved") and {state for _, state in saves} == {"not_saved"}
    assert run.steps[-1]["step"] <= 8, "a log point after the fourth"
