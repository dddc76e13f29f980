"""Early stopping: on all ranks at the same evaluation, and not undone by a resume."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from tests.harness import launch, read_tensors
from zerobook.checkpoint.progress import Progress


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_run_ends_when_its_held_out_loss_no_longer_falls(tiny, tmp_path, strategy):
    """The rate is so high that the held-out loss rises after a few steps."""
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", validation_file=tiny / "chats.jsonl",
        max_eval_samples=4, block_size=64, per_device_train_batch_size=2, learning_rate=5e-2, lr_scheduler_type="constant",
        max_train_steps=60, logging_steps=2, eval_steps=2, save_steps=2, on_spike="log", early_stopping_patience=3,
        final_model="best",
    )  # fmt: skip
    run = launch(strategy, 2, "causal_lm", tmp_path / "run", **flags)
    losses = {event["step"]: event["loss"] for event in run.events if event["type"] == "eval"}
    best = min(losses, key=losses.__getitem__)
    stopped = run.event("early_stop")
    assert stopped["step"] == max(losses) == run.steps[-1]["step"] == best + 6 < 60
    assert stopped["best"] == losses[best] and stopped["steps_left"] == 60 - stopped["step"]
    assert run.event("run_end")["progress"]["evaluations_without_progress"] == 3
    assert f"early stopping at step {stopped['step']}" in run.text and (run.output / "model").is_dir()
    kept = [event["step"] for event in run.events if event["type"] == "checkpoint" and event["state"] == "complete"]
    assert best in kept
    written = safetensors.torch.load_file(run.output / "model" / "model.safetensors")
    saved = read_tensors(run.output / "checkpoints" / f"step-{best:06d}")
    for name in written:
        torch.testing.assert_close(written[name], saved[f"weight/{name}"], rtol=0, atol=0)
    assert f"the model of step {best} is written" in run.text
    assert f", step {best}\n" in (run.output / "model" / "README.md").read_text()
    again = launch(strategy, 2, "causal_lm", run.output, resume_from_checkpoint="auto", **flags)
    assert len(again.steps) == len(run.steps), "no step was added"
    longer = launch("single", 1, "causal_lm", run.output, resume_from_checkpoint="auto", **flags | {
        "early_stopping_patience": 4, "per_device_train_batch_size": 4})  # fmt: skip
    assert longer.steps[-1]["step"] >= stopped["step"] + 2


def test_what_counts_as_a_lower_loss():
    progress, counts = Progress(), []
    for loss in (2.0, 1.9, 1.9, float("nan"), 1.95, 1.7):
        progress.evaluated(loss)
        counts.append(progress.evaluations_without_progress)
    assert counts == [0, 0, 1, 2, 3, 0] and progress.best_eval_loss == 1.7


def test_a_record_of_an_earlier_version_is_read():
    record = Progress(step=3).to_json()
    del record["evaluations_without_progress"]
    assert Progress.from_json(record).step == 3
