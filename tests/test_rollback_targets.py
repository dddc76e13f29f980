"""The checkpoint that a rollback loads is whole and still there. Whole runs in one process."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace

import pytest

from tests.alone import train
from zerobook.checkpoint import manager as manager
from zerobook.checkpoint import save, store
from zerobook.checkpoint.recovery_state import RecoveryState
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.data import files
from zerobook.errors import CheckpointError
from zerobook.monitor.finding import Finding
from zerobook.monitor.policy import RecoveryAction
from zerobook.runlog.jsonl import stream
from zerobook.training.hooks import Hook


def flags(tiny):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=10, per_device_train_batch_size=2, learning_rate=1e-3, save_steps=2, logging_steps=1,
    )  # fmt: skip


class Diverging(Hook):
    """Once, step 9 says that the run diverges since ``onset``."""

    onset = 9

    def __init__(self):
        self.done = False

    def before(self, manager): ...

    def on_log(self, trainer, records):
        if records[-1].step != 9 or self.done:
            return None
        self.done = True
        self.before(trainer.manager)
        finding = Finding(kind="divergence", step=9, onset=self.onset, points=1, base=3.0, peak=9.0, reason="a test")
        return trainer.spikes.decide(finding)


class DivergingSinceSeven(Diverging):
    onset = 7


class DivergingSinceThree(Diverging):
    onset = 3


class DivergingBesideDamage(Diverging):
    def before(self, manager):
        (file,) = (manager.folder / "step-000006").glob("tensors-*.safetensors")
        content = bytearray(file.read_bytes())
        content[-2] ^= 0x40
        file.write_bytes(content)


def test_a_run_does_not_go_back_to_damaged_bytes(tiny, tmp_path, capfd):
    whole = train(tmp_path / "whole", **flags(tiny))
    # So short a run is not replayed by itself.
    run = train(tmp_path / "run", hooks=f"{__name__}:DivergingBesideDamage", policy="replay", **flags(tiny))
    assert run.event("decision")["to_step"] == 4 and run.event("decision")["policy"]["rollbacks"] == 1
    assert run.event("rollback")["step"] == 4
    assert "step-000006" in capfd.readouterr().out
    assert {s["step"]: s["loss"] for s in run.steps} == {s["step"]: s["loss"] for s in whole.steps}
    names = {c.name for c in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert names == {f"step-{n:06d}" for n in (2, 4, 6, 8, 10)} | {"step-000006.unreadable", "step-000008.abandoned"}


def test_a_save_under_way_prunes_before_the_run_decides_where_to_go_back_to(tiny, tmp_path, monkeypatch):
    write = save.write_pieces

    def slowly(folder, *rest):
        if "000008" in folder.name:
            time.sleep(2)
        return write(folder, *rest)

    monkeypatch.setattr(save, "write_pieces", slowly)
    kept = flags(tiny) | {"hooks": f"{__name__}:DivergingSinceSeven", "async_save": True, "save_total_limit": 2}
    run = train(tmp_path / "run", **kept)
    assert run.event("decision")["action"] == "none", "what it would go back to is pruned"
    assert not store.list_aside(store.folder_of(run.output), "abandoned")


class EndsAfterItsRollback(Diverging):
    def on_log(self, trainer, records):
        if self.done and records[-1].step == 7:
            raise InterruptedError
        return super().on_log(trainer, records)


@pytest.mark.parametrize("answer", [{"policy": "replay"}, {"on_spike": "lower_rate"}])
def test_a_resume_is_not_compared_with_what_a_rollback_abandoned(tiny, tmp_path, answer):
    with pytest.raises(InterruptedError):
        train(tmp_path / "run", hooks=f"{__name__}:EndsAfterItsRollback", **flags(tiny) | answer)
    run = train(tmp_path / "run", resume_from_checkpoint="auto", **flags(tiny) | {"logging_steps": 4})
    check = [event for event in run.events if event["type"] == "verify" and event["after"] == "steps done again"][-1]
    assert check["attempt"] == 2 and check["steps"] == [7, 7], "steps 8 and 9 are of the abandoned branch"


class LeavesAllOut(Hook):
    def on_log(self, trainer, records):
        if records[-1].step != 8:
            return None
        return RecoveryAction(kind="leave_out", rule="a test", reason="a test", options=(), onset=8, noticed=8, steps=(1, 8))


class LeavesLittleOut(LeavesAllOut):
    def on_log(self, trainer, records):
        action = super().on_log(trainer, records)
        return action and replace(action, steps=(8, 8))


def test_leaving_samples_out_opens_no_shard_of_a_stream_again(tiny, tmp_path, monkeypatch):
    lines = (tiny / "chats.jsonl").read_text().splitlines(keepends=True)
    folder = tmp_path / "shards"
    folder.mkdir()
    monkeypatch.setattr(files, "SHARD_BYTES", 1000)
    for shard in range(8):
        (folder / f"{shard}.jsonl").write_text("".join(lines[shard:24:8]))
    streamed = flags(tiny) | {"train_file": folder, "streaming": True, "save_steps": 0}

    run = train(tmp_path / "run", hooks=f"{__name__}:LeavesLittleOut", **streamed)

    assert run.event("skip")["samples"] == 2
    opened = [event["shard"] for event in run.events if event["type"] == "shard"]
    assert len(opened) == len(set(opened)) > 2


@pytest.mark.parametrize("shape", [{}, {"packing": True}, {"num_train_epochs": 5}])
def test_a_run_stops_before_it_leaves_all_samples_out(tiny, tmp_path, shape):
    few = flags(tiny) | {"train_file": tiny / "few.jsonl", "max_train_steps": 12} | shape
    if "num_train_epochs" in shape:
        del few["max_train_steps"]
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", hooks=f"{__name__}:LeavesAllOut", **few)
    assert left.value.code == 76
    events = list(stream(tmp_path / "run" / "runlog" / "events.jsonl"))
    assert "all samples" in next(e for e in events if e["type"] == "stop")["rule"]
    assert not [e for e in events if e["type"] == "skip"], "a run that goes on could not train on anything"
    again = train(tmp_path / "run", resume_from_checkpoint="auto", on_spike="log", **few)
    assert again.event("run_end")["progress"]["step"] >= 12


@pytest.mark.parametrize(("onset", "goes_on_from"), [(7, "step-000004"), (3, None)])
def test_a_stop_saves_its_state_aside_and_auto_resumes_from_before_the_spike(tiny, tmp_path, capfd, onset, goes_on_from):
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    stops = f"{__name__}:DivergingSince{'Seven' if onset == 7 else 'Three'}"
    few = flags(tiny) | {"save_steps": 4, "save_total_limit": 2, "on_spike": "stop"}

    with pytest.raises(SystemExit) as left:
        train(run, hooks=stops, **few)

    assert left.value.code == 76
    told = capfd.readouterr().out
    assert ("--resume_from_checkpoint auto" in told, "start again" in told.lower()) == (bool(goes_on_from), not goes_on_from)
    names = {c.name for c in store.list_all(checkpoints)}
    assert "step-000009.abandoned" in names, "the state at the stop is not lost"
    assert [c.name for c in store.list_complete(checkpoints)] == ([goes_on_from] if goes_on_from else [])
    if goes_on_from:
        assert resolve_resume(run, "auto").checkpoint == checkpoints / goes_on_from
    else:
        with pytest.raises(CheckpointError, match=r"step-000009\.abandoned"):
            resolve_resume(run, "auto")


def test_a_spike_with_nothing_to_go_back_to_is_a_warning_and_the_run_goes_on(tiny, tmp_path, capfd):
    run = train(tmp_path / "run", hooks=f"{__name__}:Diverging", **flags(tiny) | {"save_steps": 0})

    assert run.event("decision")["action"] == "none"
    assert "WARNING: decision: nothing is done" in capfd.readouterr().out
    assert run.event("run_end")["progress"]["step"] == 10


class Killed(Hook):
    def before_step(self, trainer, step):
        raise KeyboardInterrupt


class Counts(Hook):
    """Counts the steps of all attempts."""

    steps = 0

    def after_step(self, trainer, record):
        self.steps += 1

    def state_dict(self, trainer):
        return {"steps": self.steps}

    def load_state_dict(self, trainer, state):
        self.steps = state["steps"]


def test_hooks_get_their_state_from_a_checkpoint_that_was_abandoned(tiny, tmp_path):
    checkpoints = store.folder_of(tmp_path / "run")
    four = flags(tiny) | {"save_steps": 4, "max_train_steps": 8, "hooks": f"{__name__}:Counts"}
    train(tmp_path / "run", **four)
    train(tmp_path / "run", resume_from_checkpoint=checkpoints / "step-000004", **four)

    chosen = checkpoints / "step-000008.abandoned"
    train(tmp_path / "run", resume_from_checkpoint=chosen, **four | {"max_train_steps": 10})

    state = store.read_json(checkpoints / "step-000010" / "hooks.json")["Counts"]["values"]
    assert state == {"steps": 10}
    assert (checkpoints / "step-000008").is_dir(), "it has its name back"


def test_the_newest_proven_checkpoint_outlives_the_first_saves_after_a_resume(tiny, tmp_path):
    run = tmp_path / "run"
    train(run, **flags(tiny) | {"max_train_steps": 6})
    decisions = RecoveryState.read(run)
    decisions.proven = [2]
    decisions.write(run)

    train(run, resume_from_checkpoint="auto", save_total_limit=1, **flags(tiny))

    assert [store.step_of(c) for c in store.list_complete(store.folder_of(run))] == [2, 10]


class GoesBackBehindTheNewestProven(Hook):
    """Steps 4 and 8 are proven, and step 9 goes back to step 4."""

    done = False

    def on_log(self, trainer, records):
        step = records[-1].step
        if step in (5, 9) and not self.done:
            trainer.manager.proven = {4} if step == 5 else {4, 8}
            trainer.manager.protect()
        if step != 9 or self.done:
            return None
        self.done = True
        return RecoveryAction(kind="rollback", rule="a test", reason="a test", options=(), onset=11, noticed=9, to_step=4)


def test_the_proven_checkpoint_that_a_rollback_leaves_outlives_the_next_saves(tiny, tmp_path):
    hook = {"hooks": f"{__name__}:GoesBackBehindTheNewestProven"}
    run = train(tmp_path / "run", save_total_limit=1, **flags(tiny) | hook)
    assert run.event("rollback")["step"] == 4
    assert [store.step_of(c) for c in store.list_complete(run.output / "checkpoints")] == [4, 10]


class Warned(Hook):
    def after_step(self, trainer, record):
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_restart_stays_on_the_branch_that_was_chosen(tiny, tmp_path):
    """Three branches behind step 4: the last one goes on from the first one's given-up step 8, and is killed."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    four = flags(tiny) | {"save_steps": 4, "max_train_steps": 8}
    train(run, **four)
    store.pin(checkpoints / "step-000008")
    train(run, resume_from_checkpoint=checkpoints / "step-000004", **four)
    other = (checkpoints / "step-000008" / store.MANIFEST).read_bytes()
    chosen = checkpoints / "step-000008.abandoned"
    mine = (chosen / store.MANIFEST).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        train(run, resume_from_checkpoint=chosen, hooks=f"{__name__}:Killed", **four | {"max_train_steps": 10})
    found = resolve_resume(run, "auto", thorough=True).checkpoint
    assert found == checkpoints / "step-000008" and (found / store.MANIFEST).read_bytes() == mine and store.is_pinned(found)
    assert (checkpoints / "step-000008.abandoned-2" / store.MANIFEST).read_bytes() == other, "nor is the other one lost"
    assert not store.is_pinned(checkpoints / "step-000008.abandoned-2")


def test_a_warned_run_saves_the_step_behind_which_it_leaves(tiny, tmp_path):
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", hooks=f"{__name__}:Warned", **flags(tiny))

    assert left.value.code == 75
    told = [e for e in stream(tmp_path / "run" / "runlog" / "events.jsonl") if e["type"] == "preempted"]
    assert [e["saved"] for e in told] == [True]
    assert [store.step_of(c) for c in store.list_complete(tmp_path / "run" / "checkpoints")] == [2, 3]


def test_a_warned_run_does_not_say_that_it_saved_what_it_could_not(tiny, tmp_path, monkeypatch, capfd):
    publish = store.publish

    def full(staging, at, *rest):
        if at == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(staging))
        publish(staging, at, *rest)

    monkeypatch.setattr(store, "publish", full)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", on_save_error="continue", hooks=f"{__name__}:Warned", **flags(tiny))
    assert left.value.code == 75
    told = [e for e in stream(tmp_path / "run" / "runlog" / "events.jsonl") if e["type"] == "preempted"]
    assert [e["saved"] for e in told] == [False] and "step 3 was not saved" in capfd.readouterr().out


def test_a_save_that_fails_ends_the_run_as_a_failure_that_is_started_again(tiny, tmp_path, monkeypatch):
    """And not as a wrong command line, after which the scripts for clusters do not start it again."""

    def full(staging, *rest):
        raise OSError(errno.EIO, "Input/output error", str(staging))

    monkeypatch.setattr(store, "publish", full)
    with pytest.raises(CheckpointError, match="Input/output error") as ended:
        train(tmp_path / "run", **flags(tiny))
    assert ended.value.exit_code == 1
    best = {"final_model": "best", "save_steps": 0, "validation_file": tiny / "few.jsonl"}
    with pytest.raises(CheckpointError, match="Input/output error"):
        train(tmp_path / "best", **flags(tiny) | best)
    assert (tmp_path / "best" / "model" / "config.json").is_file(), "the weights of the last step are not lost"


def test_the_last_step_is_the_best_model_although_its_save_failed(tiny, tmp_path, monkeypatch, capfd):
    publish = store.publish

    def full(staging, at, *rest):
        if at == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(staging))
        publish(staging, at, *rest)

    monkeypatch.setattr(store, "publish", full)
    best = {"final_model": "best", "eval_steps": 2, "validation_file": tiny / "few.jsonl", "max_train_steps": 4}
    run = train(tmp_path / "run", on_save_error="continue", **flags(tiny) | best)
    losses = {event["step"]: event["loss"] for event in run.events if event["type"] == "eval"}
    assert losses[4] < losses[2] and not (run.output / "checkpoints" / "step-000004").exists()
    assert ", step 4\n" in (run.output / "model" / "README.md").read_text()
    assert "is the lowest held-out loss" not in capfd.readouterr().out


@pytest.mark.parametrize("changed", [{"per_device_train_batch_size": 1}, {"learning_rate": 1e-2}])
def test_a_resume_with_other_samples_or_another_rate_is_not_compared_with_earlier_losses(tiny, tmp_path, changed):
    run = train(tmp_path / "run", **flags(tiny))
    step_4 = run.output / "checkpoints" / "step-000004"
    again = train(run.output, resume_from_checkpoint=step_4, **flags(tiny) | changed)
    assert again.steps[-1]["step"] == 10 and not [event for event in again.events if event["type"] == "verify"]


@pytest.mark.parametrize("under_torchrun, limit", [(True, None), (False, None), (True, "3600")])
def test_a_save_that_torchrun_would_not_wait_for_is_said_once(tiny, tmp_path, monkeypatch, capfd, under_torchrun, limit):
    monkeypatch.setattr(manager, "TORCHRUN_S", 0)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if limit is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", limit)
    run = train(tmp_path / "run", **flags(tiny) | {"max_train_steps": 4})
    assert len([e for e in run.events if e["type"] == "checkpoint"]) == 2
    assert capfd.readouterr().out.count("WARNING: this save took") == (under_torchrun and limit is None)
