"""A checkpoint and a runlog of an earlier version are read, continued and reported.

The files under tests/fixtures/before were written by the version before recipes, objectives, optimizers and hooks became
classes: 6 steps of a tiny Llama in one process, saved after step 3. The checkpoint of step 6 is left out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.alone import train
from tests.harness import Run, reseal
from zerobook.cli.main import main
from zerobook.runlog.check import problems

BEFORE = Path(__file__).parent / "fixtures" / "before"


@pytest.fixture
def before(tmp_path: Path) -> Run:
    shutil.copytree(BEFORE / "run", tmp_path / "run")
    return Run(tmp_path / "run").read()


def test_an_earlier_run_is_continued_as_it_went_on_by_itself(tiny, tmp_path, before):
    run = train(
        before.output, resume_from_checkpoint="auto", config_name=BEFORE / "model", tokenizer_name=tiny / "llama",
        train_file=tiny / "chats.jsonl", cache_dir=tmp_path / "cache", validation_split_percentage=20, block_size=32,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, num_warmup_steps=2, max_train_steps=6,
        save_steps=3, eval_steps=3, logging_steps=1, seed=7,
    )  # fmt: skip
    resumed = run.event("resume")
    assert resumed["step"] == 3 and not resumed["differing"]
    assert resumed["verified"] == ["learning rate", "random numbers", "samples"]
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    for again, earlier in zip(run.steps[6:], before.steps[3:], strict=True):
        assert again["ids"] == earlier["ids"] and again["learning_rate"] == earlier["learning_rate"]
        assert again["loss"] == pytest.approx(earlier["loss"], rel=1e-6)
        assert again["grad_norm"] == pytest.approx(earlier["grad_norm"], rel=1e-5)
    evaluations = [event["loss"] for event in run.events if event["type"] == "eval"]
    assert evaluations[2] == pytest.approx(evaluations[1], rel=1e-6), "of step 6, by both versions"
    assert run.event("verify")["largest_relative_difference"] < 1e-6
    assert problems(run.output / "runlog")[0] == []


def test_an_earlier_runs_files_are_read_by_the_commands(before, tmp_path, capsys):
    run = str(before.output)
    assert main(["runlog", "status", run]) == 0 and "Finished: step 6 of 6" in capsys.readouterr().out
    assert main(["runlog", "verify", run]) == 0
    assert main(["runlog", "report", run]) == 0 and (before.output / "runlog" / "report.html").stat().st_size > 10_000
    assert main(["checkpoint", "verify", run]) == 0
    assert main(["checkpoint", "inspect", f"{run}/checkpoints/step-000003"]) == 0
    assert "eval_loss" in capsys.readouterr().out


def test_a_warm_up_that_an_earlier_version_began_goes_on_at_the_rate_of_this_one(tiny, tmp_path):
    """Earlier versions trained the k-th of W warm-up steps at (k - 1)/W of the rate, and recorded that for the next step."""
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        per_device_train_batch_size=2, learning_rate=1e-2, num_warmup_steps=6, max_train_steps=8, save_steps=3, logging_steps=1,
    )  # fmt: skip
    whole = train(tmp_path / "run", **flags)
    checkpoint = whole.output / "checkpoints" / "step-000003"
    progress = json.loads((checkpoint / "progress.json").read_text())
    progress["following"]["learning rate"] = 1e-2 * 3 / 6
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    reseal(checkpoint)

    run = train(tmp_path / "again", resume_from_checkpoint=checkpoint, **flags)

    rates = [step["learning_rate"] for step in run.steps]
    assert rates == [step["learning_rate"] for step in whole.steps[3:]]
    assert rates == pytest.approx([1e-2 * 4 / 6, 1e-2 * 5 / 6, 1e-2, 1e-2, 1e-2 / 2])
    assert run.losses == whole.losses[3:]
    assert set(run.event("resume")["differing"]) == {"learning rate"}
