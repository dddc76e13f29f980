"""Whole runs in one process: the learning rate of a run that was stopped, and what trackers are told of its steps."""

from __future__ import annotations

import errno
import json
import shutil
from types import SimpleNamespace
from typing import ClassVar

import pytest
from accelerate import tracking

from scripts.other_logs import read_log
from tests.alone import train
from zerobook.checkpoint import store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.resume import keep_global_batch
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigDraft, ConfigSources
from zerobook.errors import CheckpointError, ConfigError
from zerobook.monitor.policy import RecoveryAction
from zerobook.runlog.history import History, time_spent
from zerobook.training.hooks import Hook
from zerobook.utils import hub

STEPS = 12  # two epochs of 24 samples in steps of 4


def flags(tiny):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-3, num_warmup_steps=2, save_steps=2,
        logging_steps=1,
    )  # fmt: skip


def asks(kind, step, **what):
    return RecoveryAction(kind=kind, rule="a test", reason="a test", options=(), onset=step, noticed=step, **what)


class LeavesOut(Hook):
    """Step 5 asks that the samples of the steps 4 and 5 are left out from then on."""

    def on_log(self, trainer, records):
        return asks("leave_out", 5, steps=(4, 5)) if records[-1].step == 5 else None


def told(run):
    return [(s["step"], s["learning_rate"], s["ids"], s["loss"]) for s in run.steps]


@pytest.mark.parametrize(
    ("scheduler", "warm_up", "is_noted"),
    [
        ("constant", {"num_warmup_steps": 2}, True),
        ("constant", {"num_warmup_steps": 0, "warmup_ratio": 0.1}, True),
        ("constant", {"num_warmup_steps": 0}, False),
        ("constant_with_warmup", {"num_warmup_steps": 2}, False),
    ],
)
def test_a_warm_up_that_a_constant_rate_does_not_have_is_noted(tiny, tmp_path, capfd, scheduler, warm_up, is_noted):
    train(tmp_path / "run", **flags(tiny) | {"lr_scheduler_type": scheduler, "save_steps": 0} | warm_up)

    assert ("constant has no warm-up" in capfd.readouterr().out) == is_noted


def test_a_run_that_goes_on_keeps_its_schedule_whatever_was_left_out(tiny, tmp_path, monkeypatch, capfd):
    whole = train(tmp_path / "whole", hooks=f"{__name__}:LeavesOut", **flags(tiny))
    assert "the run ends at step 10; its schedule is still that of 12 steps" in capfd.readouterr().out
    assert len(whole.steps) == STEPS - 2, "the second epoch lacks two steps' samples"
    decay = [1e-3 * (STEPS - k) / (STEPS - 2) for k in range(2, STEPS - 2)]
    assert [s["learning_rate"] for s in whole.steps] == pytest.approx([0.5e-3, 1e-3, *decay])

    saved = whole.output / "checkpoints" / "step-000006"
    again = train(tmp_path / "again", resume_from_checkpoint=saved, **flags(tiny))
    assert told(again) == told(whole)[6:]
    assert again.event("resume")["differing"] == {} and again.event("run_end")["progress"]["total_steps"] == STEPS
    assert "computed again" not in capfd.readouterr().out

    model_bytes = (whole.output / "model" / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=model_bytes))
    done = train(whole.output, resume_from_checkpoint="auto", **flags(tiny))
    assert len(done.steps) == len(whole.steps), "nothing is left to train, so the disk needs no room for a checkpoint"
    monkeypatch.undo()

    longer = train(tmp_path / "longer", resume_from_checkpoint=saved, **flags(tiny) | {"num_train_epochs": 3})
    assert len(longer.steps) == 4 + 4, "a third epoch, without what is left out"
    assert longer.event("run_end")["progress"]["total_steps"] == STEPS + 2
    assert "computed again: 14 steps, 12 before" in capfd.readouterr().out


def test_a_changed_byte_of_the_newest_checkpoint_neither_stops_a_run_nor_changes_it(tiny, tmp_path, capfd):
    short = flags(tiny) | {"max_train_steps": 4}
    del short["num_train_epochs"]
    before = train(tmp_path / "run", **short)
    newest = before.output / "checkpoints" / "step-000004"
    asks = ConfigDraft(
        RecipeConfig(output_dir=str(before.output), resume_from_checkpoint="auto", per_device_train_batch_size=4),
        ConfigSources(),
    )
    for name, old, new in (
        ("config.json", '"asked"', '"asket"'),
        ("config.json", "{", "\0"),
        ("progress.json", '"global_batch": 4', '"global_batch": 6'),
    ):
        whole = (newest / name).read_text()
        assert old in whole
        (newest / name).write_text(whole.replace(old, new))
        assert keep_global_batch(asks, 1) is None
        if "batch" not in new:
            (newest / name).write_text(whole)
    again = train(before.output, resume_from_checkpoint="auto", **short)
    said = capfd.readouterr().out
    assert f"skipped: {newest / 'progress.json'}: its content is damaged" in said and "global batch kept" not in said
    assert again.event("resume")["step"] == 2 and again.event("run_end")["progress"]["global_batch"] == 4
    assert again.losses[4:] == before.losses[2:4], "steps 3 and 4 again"


def test_another_order_of_the_samples_is_refused(tiny, tmp_path):
    mixture = tmp_path / "mixture.yaml"
    parts = [{"path": str(tiny / f"{name}.jsonl"), "weight": 1.0} for name in ("epoch24", "few")]
    mixture.write_text(json.dumps({"datasets": parts}))
    short = flags(tiny) | {"max_train_steps": 2}
    del short["num_train_epochs"], short["train_file"]
    train(tmp_path / "mixed", config=mixture, **short)
    again = {"resume_from_checkpoint": "auto", "max_train_steps": 4}
    with pytest.raises(CheckpointError, match="group_by_length, which was False and is True"):
        train(tmp_path / "mixed", config=mixture, **short | again, group_by_length=True)
    parts[1]["weight"] = 3.0
    mixture.write_text(json.dumps({"datasets": parts}))
    with pytest.raises(CheckpointError, match=r"was \{'epoch24': 1.0, 'few': 1.0\} and is \{'epoch24': 1.0, 'few': 3.0\}"):
        train(tmp_path / "mixed", config=mixture, **short | again)


class StoppedAtFive(Hook):
    def on_log(self, trainer, records):
        if records[-1].step == 5:
            raise KeyboardInterrupt


def test_the_evaluation_of_a_branch_that_was_given_up_is_not_taken_for_a_checkpoints(tiny, tmp_path):
    going_on = flags(tiny) | {
        "hooks": f"{__name__}:StoppedAtFive",
        "resume_from_checkpoint": "auto",
        "validation_split_percentage": 20,
    }
    for step, plan in ((2, {"save_steps": 2, "eval_steps": 4}), (4, {"save_steps": 4})):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", **going_on | plan)
        if step == 2:  # the run was stopped between the evaluation of step 4 and its save
            shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    run = train(tmp_path / "run", **going_on | {"max_train_steps": 4})
    starts = [e["attempt"] for e in run.events if e["type"] == "run_start"]
    assert [e["attempt"] for e in run.events if e["type"] == "eval"] == [starts[0], starts[2]]


def test_a_polynomial_run_of_warm_up_alone_ends_and_is_saved(tiny, tmp_path):
    short = flags(tiny) | {"num_train_epochs": 1, "num_warmup_steps": 6, "lr_scheduler_type": "polynomial", "save_steps": 6}
    run = train(tmp_path / "run", **short)
    assert [s["learning_rate"] for s in run.steps] == pytest.approx([1e-3 * k / 6 for k in range(1, 7)])
    assert run.event("checkpoint")["step"] == run.event("run_end")["progress"]["step"] == 6


class Lowers(Hook):
    """Step 6 asks once that the run goes back to step 2 and lowers the rate to a quarter."""

    def on_log(self, trainer, records):
        once = records[-1].step == 6 and not trainer.progress.rate_cuts
        return asks("lower_rate", 6, to_step=2, rate_factor=0.25) if once else None


LOWERED = {"rollback_lr_steps": 6, "logging_steps": 2}
RATES = [
    share * rate
    for share, rate in zip(
        [1] * 2 + [0.25 + 0.75 * k / 6 for k in range(6)] + [1] * 4,
        [0.5e-3, 1e-3] + [1e-3 * (STEPS - k) / (STEPS - 2) for k in range(2, STEPS)],
        strict=True,
    )
]


def test_a_lowered_rate_is_the_same_for_a_run_that_was_stopped(tiny, tmp_path):
    whole = train(tmp_path / "whole", hooks=f"{__name__}:Lowers", **flags(tiny) | LOWERED)
    living = whole.steps[:2] + whole.steps[6:]
    assert [s["step"] for s in living] == list(range(1, STEPS + 1))
    assert [s["learning_rate"] for s in living] == pytest.approx(RATES)
    compared = [e for e in whole.events if e["type"] == "verify"]
    assert [e["steps"] for e in compared] == [[3, 3]], "behind the first update the losses are others"

    saved = whole.output / "checkpoints" / "step-000006"
    again = train(tmp_path / "again", resume_from_checkpoint=saved, **flags(tiny) | LOWERED)
    assert told(again) == told(whole)[10:]


@pytest.fixture
def killed_while_it_goes_back(monkeypatch):
    load = CheckpointManager.load

    def killed(self, step=None):
        if step is not None:
            raise KeyboardInterrupt
        return load(self)

    monkeypatch.setattr(CheckpointManager, "load", killed)


def test_a_cut_outlives_a_stop_before_the_run_went_back(tiny, tmp_path, killed_while_it_goes_back):
    """The next attempt goes back in its place, and lowers the rate."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", hooks=f"{__name__}:Lowers", **flags(tiny) | LOWERED)
    run = train(tmp_path / "run", resume_from_checkpoint="auto", **flags(tiny) | LOWERED)
    assert run.event("resume")["step"] == 2
    assert [s["learning_rate"] for s in run.steps[6:]] == pytest.approx(RATES[2:])


def tracked(run, tag):
    """Step -> value of a scalar in all of the run's tensorboard files; a step that stands there twice fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = [
        (event.step, event.value)
        for file in sorted(run.output.glob("logs/zerobook/events.out.tfevents.*"))
        for event in EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload().Scalars(tag)
    ]
    assert len(dict(found)) == len(found), "a step stands there twice"
    return dict(found)


class StoppedThreeTimes(Hook):
    stops: ClassVar[list[int]] = []

    def __init__(self):
        self.went_back = False

    def on_rollback(self, trainer, action):
        self.went_back = True

    def on_log(self, trainer, records):
        step = records[-1].step
        if len(self.stops) == 1 and step == 7 and not self.went_back:
            return asks("replay", 7, to_step=4)
        if self.stops and step == self.stops[0]:
            self.stops.pop(0)
            raise KeyboardInterrupt
        return None


def test_trackers_and_reports_count_no_step_twice(tiny, tmp_path):
    """A run that is stopped three times: before its first save, behind it, and behind a rollback."""
    StoppedThreeTimes.stops[:] = [2, 5, 8]
    going_on = flags(tiny) | {
        "hooks": f"{__name__}:StoppedThreeTimes",
        "save_steps": 4,
        "report_to": "tensorboard",
        "resume_from_checkpoint": "auto",
    }
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", **going_on)
    run = train(tmp_path / "run", **going_on)

    done = [1, 2, *range(1, 6), 5, 6, 7, *range(5, 9), *range(5, STEPS + 1)]
    assert [s["step"] for s in run.steps] == done
    assert list(tracked(run, "step").items()) == [(n, step) for n, step in enumerate(done, 1)]
    assert list(tracked(run, "loss").values()) == pytest.approx([s["loss"] for s in run.steps])
    given_up = len(done) - STEPS
    assert run.event("run_end")["progress"]["redone"] == given_up

    history = History.read(run.output)
    assert [s["step"] for s in history.steps(current=True)] == list(range(1, STEPS + 1))
    assert sum(time_spent(history).abandoned_steps.values()) == given_up
    assert [record["step"] for record in read_log(run.output).records] == list(range(1, STEPS + 1))


def test_a_tracker_that_fails_or_cannot_be_reached_ends_no_run(tiny, tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    written: list[bool] = []

    def refuse(*arguments, **options):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def fill_disk(tracker, values, step=None, **options):
        if step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        log(tracker, values, step=step, **options)

    log = tracking.TensorBoardTracker.log
    monkeypatch.setattr(tracking.TensorBoardTracker, "log", fill_disk)
    finish = tracking.WandBTracker.finish

    def finish_late(tracker):
        written.append((tmp_path / "run" / "model").exists())
        finish(tracker)

    monkeypatch.setattr(tracking.WandBTracker, "finish", finish_late)
    monkeypatch.setattr(hub, "connect", refuse)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = train(tmp_path / "run", **flags(tiny), report_to="tensorboard,wandb")
    assert len(run.steps) == STEPS and list(tracked(run, "step")) == [1, 2]
    assert list(run.output.rglob("*.wandb"))
    assert written == [True], "W&B may wait for its uploads, so the model is written first"
    assert "No space left on device" in capsys.readouterr().out

    # A tracker that did not start has no id, so that the next attempt logs the config.
    monkeypatch.setattr(tracking.WandBTracker, "start", refuse)
    run = train(tmp_path / "other", **flags(tiny) | {"num_train_epochs": 1}, report_to="tensorboard,wandb")
    assert json.loads((run.output / "runlog" / "trackers.json").read_text()) == {"tensorboard": ""}


class GoesBack(Hook):
    def on_log(self, trainer, records):
        return asks("replay", 5, to_step=2) if records[-1].step == 5 else None


def test_a_rollback_that_a_kill_interrupts_is_finished_by_the_next_attempt(tiny, tmp_path, killed_while_it_goes_back, capfd):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", hooks=f"{__name__}:GoesBack", **flags(tiny))
    capfd.readouterr()
    run = train(tmp_path / "run", resume_from_checkpoint="auto", **flags(tiny))
    assert run.event("resume")["step"] == 2, "step 4 may hold the damage"
    assert "a rollback to step 2: set aside step-000004.abandoned" in capfd.readouterr().out
    (tmp_path / "run/checkpoints/step-000012").rename(tmp_path / "step-000012")
    run = train(tmp_path / "run", resume_from_checkpoint="auto", **flags(tiny))
    assert [e["step"] for e in run.events if e["type"] == "resume"] == [2, 10], "a rollback is finished once"


def test_the_checkpoint_that_a_run_goes_on_from_becomes_a_good_one(tiny, tmp_path):
    first = train(tmp_path / "run", **flags(tiny))
    for step in (8, 10, 12):
        shutil.rmtree(first.output / "checkpoints" / f"step-{step:06d}")
    run = train(tmp_path / "run", resume_from_checkpoint="auto", **flags(tiny) | {"num_train_epochs": 3})
    proven = [e["step"] for e in run.events if e["type"] == "checkpoint" and e["state"] == "proven_good"]
    assert proven == [2, 6, 8], "the first attempt proved 2"


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_run_that_was_submitted_twice_does_not_replace_the_first_ones_checkpoints(tiny, tmp_path, monkeypatch, from_scratch):
    """The second one looks at the folder before the first has saved anything, and gets its lock after that."""
    given = flags(tiny) | {"num_train_epochs": 1}
    if from_scratch:
        given |= {"config_name": tiny / "llama", "tokenizer_name": tiny / "llama"}
        del given["model_name_or_path"]
    train(tmp_path / "later", **given)
    for file in (tmp_path / "later").rglob("*lock*"):
        file.unlink()
    hold = store.lock_until_exit

    def first_is_done(checkpoints):
        hold(checkpoints)
        shutil.copytree(tmp_path / "later", checkpoints.parent, dirs_exist_ok=True)

    monkeypatch.setattr(store, "lock_until_exit", first_is_done)
    with pytest.raises(ConfigError, match=r"holds 3 checkpoints of an earlier run, the newest step-000006.*--output_dir"):
        train(tmp_path / "run", **given, seed=7)
    for file in (tmp_path / "later").rglob("*"):
        assert file.is_dir() or file.read_bytes() == (tmp_path / "run" / file.relative_to(tmp_path / "later")).read_bytes()
