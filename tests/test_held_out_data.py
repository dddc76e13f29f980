"""Held-out data: none at all is an error or a warning, and losses of different held-out data are never compared."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from recipes.causal_lm import CausalLM
from tests.alone import train
from tests.harness import staged
from zerobook.checkpoint import store
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.cli.inspect_data import inspect
from zerobook.cli.main import main
from zerobook.errors import DataError
from zerobook.evaluation import held_out
from zerobook.runlog import figures
from zerobook.runlog.facts import run_results
from zerobook.runlog.history import History


def write_chat(file: Path, question: str, answer: str = "So.") -> Path:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    return file


@pytest.fixture
def run(tiny, tmp_path):
    """Train a tiny model for a few steps."""

    def start(output: str = "run", **flags):
        defaults = {
            "model_name_or_path": tiny / "llama",
            "train_file": tiny / "few.jsonl",
            "cache_dir": tmp_path / "cache",
            "block_size": 64,
            "max_train_steps": 1,
            "per_device_train_batch_size": 2,
            "num_warmup_steps": 0,
        }
        return train(tmp_path / output, CausalLM, **(defaults | flags))

    return start


def inspect_with(tiny: Path, *arguments: object) -> int:
    return inspect([*map(str, arguments), "--model", str(tiny / "llama"), "--max_seq_length", "64"])


TOO_LONG = "why " * 300
"""A question that fills the 64 tokens of a row, so that nothing of the answer is left."""


# --- nothing is held out
def test_a_validation_file_without_a_supervised_token_is_refused(tiny, tmp_path, run):
    file = write_chat(tmp_path / "held_out.jsonl", TOO_LONG)

    with pytest.raises(DataError, match=r"held_out.*supervised token"):
        run(validation_file=file)
    with pytest.raises(DataError, match=r"held_out.*supervised token"):
        inspect_with(tiny, tiny / "few.jsonl", "--validation_file", file)


def test_a_validation_text_shorter_than_a_block_is_refused(tiny, tmp_path, run):
    file = tmp_path / "held_out.txt"
    file.write_text("Too short.\n")

    with pytest.raises(DataError, match=r"held_out.*one block of 64"):
        run(validation_file=file)
    with pytest.raises(DataError, match=r"held_out.*one block of 64"):
        inspect_with(tiny, tiny / "text.txt", "--validation_file", file)


def test_a_split_of_the_data_that_comes_out_empty_is_refused(tmp_path, run):
    folder = tmp_path / "data"
    folder.mkdir()
    write_chat(folder / "train.jsonl", "Why?")
    write_chat(folder / "test.jsonl", TOO_LONG)

    with pytest.raises(DataError, match=r"test\.jsonl.*supervised token"):
        run(train_file=folder)


def test_a_share_of_less_than_a_row_warns_and_names_what_does_not_work(tiny, tmp_path, run, capsys):
    text = tmp_path / "small.txt"
    text.write_text((tiny / "text.txt").read_text()[:1000])

    finished = run(train_file=text)

    warning = capsys.readouterr().out
    assert "WARNING" in warning and "small.txt" in warning
    assert "early_stopping_patience" in warning and "best checkpoint" in warning
    assert not [event for event in finished.events if event["type"] == "eval"]
    assert inspect_with(tiny, text) == 0
    assert "early_stopping_patience" in capsys.readouterr().err


def test_inspect_warns_of_no_share_where_no_sample_can_be_used(tiny, tmp_path, capsys):
    file = write_chat(tmp_path / "bad.jsonl", "")

    assert inspect_with(tiny, file) == 2
    assert "is held out" not in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{"validation_split_percentage": 0}, {"validation_split_percentage": 25}])
def test_a_share_that_is_wanted_or_not_warns_of_nothing(run, capsys, flags):
    run(**flags)

    assert "is held out" not in capsys.readouterr().out


# --- held-out data that changes
EVERY_STEP = {"eval_steps": 1, "save_steps": 1, "learning_rate": 1e-8, "early_stopping_patience": 9}


def evaluations(finished) -> list[dict]:
    return [event for event in finished.events if event["type"] == "eval"]


def newest_progress(finished) -> dict:
    return store.read_json(store.list_complete(store.folder_of(finished.output))[-1] / store.PROGRESS)


def test_a_resume_with_other_held_out_data_warns_and_compares_the_new_losses_alone(tiny, tmp_path, run, capsys):
    easy = tiny / "chats.jsonl"
    hard = write_chat(tmp_path / "hard.jsonl", "Zq xj?", answer="Vk qz wx jq.")
    run(validation_file=easy, **EVERY_STEP | {"max_train_steps": 2})
    capsys.readouterr()

    after = run(validation_file=hard, resume_from_checkpoint="auto", **EVERY_STEP | {"max_train_steps": 4})

    output = capsys.readouterr().out
    losses = {event["step"]: event["loss"] for event in evaluations(after)}
    fingerprints = {event["step"]: event["held_out_fingerprint"] for event in evaluations(after)}
    lowest = min((3, 4), key=losses.__getitem__)
    assert max(losses[1], losses[2]) < losses[lowest], "the losses on the easy data would be the lowest"
    assert "WARNING" in output and fingerprints[2] in output and fingerprints[3] in output
    assert fingerprints[1] == fingerprints[2] != fingerprints[3] == fingerprints[4]
    assert newest_progress(after)["held_out_fingerprint"] == fingerprints[4]
    assert newest_progress(after)["best_eval_loss"] == losses[lowest]
    assert store.step_of(resolve_resume(after.output, "best").checkpoint) == lowest
    results = run_results(History.read(after.output))
    assert (results["best_step"], results["best_loss"]) == (lowest, losses[lowest])
    assert {name: set(curve) for name, curve in figures.held_out_curves(History.read(after.output)).items()} == {
        "other data held out": {1, 2}, "held out": {3, 4},
    }  # fmt: skip


def test_the_same_held_out_data_under_another_name_is_the_same(tiny, tmp_path, run, capsys):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(tiny / "chats.jsonl", copy)
    run(validation_file=tiny / "chats.jsonl", **EVERY_STEP)
    capsys.readouterr()

    after = run(validation_file=copy, resume_from_checkpoint="auto", **EVERY_STEP | {"max_train_steps": 2})

    first, second = evaluations(after)
    assert "WARNING" not in capsys.readouterr().out
    assert first["held_out_fingerprint"] == second["held_out_fingerprint"]
    assert newest_progress(after)["best_eval_loss"] == min(first["loss"], second["loss"])


def test_runs_with_other_seeds_and_the_same_validation_file_are_compared(tiny, tmp_path, run, capsys):
    for seed in (1, 2):
        run(f"seed{seed}", validation_file=tiny / "chats.jsonl", seed=seed)
    run("other", validation_file=tiny / "few.jsonl")
    outputs = {name: str(tmp_path / name) for name in ("seed1", "seed2", "other")}
    capsys.readouterr()

    main(["runlog", "compare", outputs["seed1"], outputs["seed2"]])
    assert "lowest held-out loss: " in capsys.readouterr().out
    main(["runlog", "compare", *outputs.values()])
    assert "lowest held-out loss: " not in capsys.readouterr().out


def test_the_best_checkpoint_is_one_of_the_newest_held_out_data(tmp_path):
    losses = {1: ("old", 1.0), 2: ("new", 3.0), 3: ("new", 2.0), 4: ("new", 2.5), 5: ("new", None)}
    for step, (fingerprint, loss) in losses.items():
        progress = Progress(step=step, eval_loss=loss, held_out_fingerprint=fingerprint)
        with staged(tmp_path, step) as staging:
            (staging / store.PROGRESS).write_text(json.dumps(progress.to_json()))
    checkpoints = store.folder_of(tmp_path)

    best = resolve_resume(tmp_path, "best").checkpoint
    store.prune(checkpoints, 1)

    assert store.step_of(best) == 3
    assert [store.step_of(checkpoint) for checkpoint in store.list_complete(checkpoints)] == [3, 5]


def test_losses_and_patience_are_of_one_held_out_data():
    progress = Progress(best_eval_loss=1.0, evaluations_without_progress=2, held_out_fingerprint="old")

    assert not progress.use_held_out_data("old")
    assert (progress.best_eval_loss, progress.evaluations_without_progress) == (1.0, 2)
    assert progress.use_held_out_data("new")
    assert (progress.best_eval_loss, progress.evaluations_without_progress) == (None, 0)


def test_a_record_without_a_fingerprint_is_read():
    record = Progress(step=3).to_json()
    del record["held_out_fingerprint"]

    assert Progress.from_json(record).held_out_fingerprint == ""


# --- no loss that could be the lowest
def test_a_run_whose_held_out_losses_are_not_finite_stops_early_and_writes_its_last_model(run, monkeypatch):
    monkeypatch.setattr(held_out, "losses", lambda *arguments: {"loss": math.nan, "tokens": 3})

    finished = run(**EVERY_STEP | {"early_stopping_patience": 2, "max_train_steps": 4, "final_model": "best"})

    assert (finished.event("early_stop")["step"], finished.event("early_stop")["best"]) == (2, None)
    assert (finished.output / "model" / "config.json").is_file()
