"""Saving in the background, warning signals, full disks: in real launched runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest
import torch

from tests.distributed.test_parity import largest_difference
from tests.harness import launch, seen, sequence

STEPS = 12


def flags(tiny):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=STEPS, per_device_train_batch_size=2, learning_rate=3e-3, weight_decay=0.1, save_steps=4,
        logging_steps=3, save_total_limit=2,
    )  # fmt: skip


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy",
    [
        "zero2",
        pytest.param("fsdp", marks=pytest.mark.full),
        pytest.param("ddp", marks=pytest.mark.full),
        pytest.param("zero3", marks=pytest.mark.full),
    ],
)
def test_saving_in_the_background_saves_the_same(tiny, tmp_path, strategy):
    here = launch(strategy, 2, "causal_lm", tmp_path / "here", **flags(tiny))
    behind = launch(strategy, 2, "causal_lm", tmp_path / "behind", async_save=True, **flags(tiny))
    assert behind.losses == here.losses
    for run in (here, behind):
        saved = [e for e in run.events if e["type"] == "checkpoint"]
        assert [e["step"] for e in saved] == [4, 8, 12]
    mine, theirs = behind.state(), here.state()
    assert set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
    names = sorted(f.name for f in (here.output / "checkpoints" / "step-000012").glob("tensors-*.safetensors"))
    assert {name.split("-")[1] for name in names} == {"00000", "00001"}, "each rank writes its share"


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.full), pytest.param("fsdp", marks=pytest.mark.full)]
)
def test_a_warning_to_one_rank_saves_on_all_and_a_restart_goes_on(tiny, tmp_path, strategy):
    whole = launch(strategy, 2, "causal_lm", tmp_path / "whole", spy={}, **flags(tiny))
    warned = {"signal": "SIGUSR1", "signal_at_step": 6, "signal_rank": 1}
    run = launch(strategy, 2, "causal_lm", tmp_path / "run", spy=warned, expect=1, **flags(tiny))
    told = run.event("preempted")
    assert told["signal"] == "SIGUSR1" and told["exit_code"] == 75 and "exitcode  : 75" in run.text
    assert 6 <= told["step"] <= 9, "two steps behind the furthest rank"
    assert run.event("checkpoint")["step"] == told["step"]
    first = sequence(seen(run.output), 1, told["step"])
    for file in run.output.glob("spy-*"):
        file.unlink()
    again = launch("single", 1, "causal_lm", run.output, spy={}, resume_from_checkpoint="auto", **flags(tiny))
    resumed = again.event("resume")
    assert resumed["step"] == told["step"] and resumed["differing"] == {}
    assert resumed["verified"] == ["learning rate", "random numbers", "samples"]
    assert first + sequence(seen(again.output), told["step"] + 1, STEPS) == sequence(seen(whole.output), 1, STEPS)
    mine = [s for s in again.steps if s["attempt"] == 2]
    assert largest_difference([s["loss"] for s in mine], whole.losses[told["step"] :]) < 1e-5

    launcher = ["--config_file", f"accelerate_configs/{strategy}.yaml", "--max_restarts", "1"]
    alone = launch(launcher, 2, "causal_lm", tmp_path / "restarted", spy=warned | {"signal_attempt": 0},
                   resume_from_checkpoint="auto", **flags(tiny))  # fmt: skip
    assert [e["attempt"] for e in alone.events if e["type"] == "run_start"] == [1, 2]
    assert alone.event("run_end")["progress"]["step"] == STEPS
    last = {s["step"]: s["loss"] for s in alone.steps}
    assert largest_difference([last[step] for step in sorted(last)], whole.losses) < 1e-5


@pytest.mark.launch
@pytest.mark.full
def test_a_launcher_that_ignores_a_warning_leaves_its_ranks_the_time_to_save(tiny, tmp_path):
    """A scheduler signals every process of a job. A launcher that took the signal would kill its ranks within 30 s."""
    warned = {"signal": "SIGUSR1", "signal_at_step": 6, "signal_rank": 1, "signal_launcher": 1}
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as ``trap '' USR1``; a launcher inherits it
    try:
        run = launch("ddp", 2, "causal_lm", tmp_path / "run", spy=warned, expect=1, **flags(tiny))
    finally:
        signal.signal(signal.SIGUSR1, before)
    told = run.event("preempted")
    assert told["signal"] == "SIGUSR1" and run.event("checkpoint")["step"] == told["step"] and "exitcode  : 75" in run.text


@pytest.mark.launch
def test_one_process_alone_leaves_too(tiny, tmp_path):
    warned = {"signal": "SIGTERM", "signal_at_step": 6, "signal_rank": 0}
    run = launch("single", 1, "causal_lm", tmp_path / "run", spy=warned, expect=1, **flags(tiny))
    told = run.event("preempted")
    assert (told["step"], told["signal"]) == (6, "SIGTERM") and "exit status 75" in run.text
    assert [e["step"] for e in run.events if e["type"] == "checkpoint"] == [4, 6] and run.steps[-1]["step"] == 6


@pytest.mark.launch
def test_a_full_disk_stops_the_run_or_is_trained_through(tiny, tmp_path):
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    one = launch("ddp", 2, "causal_lm", tmp_path / "one", **flags(tiny))
    size = sum(f.stat().st_size for f in (one.output / "checkpoints" / "step-000012").iterdir())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", str(folder)], check=True)
    try:
        refused = launch("ddp", 2, "causal_lm", folder / "run", expect=1, **flags(tiny))
        assert "checkpoints of" in refused.text and "free. Lower --save_total_limit" in refused.text
        shutil.rmtree(folder / "run")
        tight = flags(tiny) | {"on_low_disk": "warn"}
        stopped = launch("ddp", 2, "causal_lm", folder / "run", expect=1, **tight)
        assert "No space left on device" in stopped.text and "the last complete one is step-000004" in stopped.text
        assert stopped.event("save_failed")["step"] == 8
        through = launch("ddp", 2, "causal_lm", folder / "run", resume_from_checkpoint="auto",
                         on_save_error="continue", **tight)  # fmt: skip
        assert through.event("resume")["checkpoint"].endswith("step-000004")
        assert [s["step"] for s in through.steps if s["attempt"] == 2] == list(range(5, STEPS + 1)), "it trained to the end"
        assert "Training continues without it" in through.text
    finally:
        subprocess.run(["umount", str(folder)], check=True)
