"""Hooks: when they are called, what they can do, and what becomes of their errors."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from recipes.causal_lm import CausalLMConfig
from tests.alone import train
from tests.harness import read_tensors
from zerobook.checkpoint import store
from zerobook.checkpoint.recovery_state import RecoveryState
from zerobook.checkpoint.save import Saver
from zerobook.config_sources import parse
from zerobook.errors import ConfigError
from zerobook.health import position
from zerobook.monitor import preemption
from zerobook.monitor.policy import RecoveryAction
from zerobook.runlog.check import problems
from zerobook.runlog.jsonl import stream
from zerobook.training.hooks import Hook, load_hooks
from zerobook.utils import user_code

CALLS: list = []


def flags(tiny, hook, **more):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=2, hooks=f"{__name__}:{hook}",
    ) | more  # fmt: skip


def train_with(output, instances, **more):
    """Train with instances of hooks, besides those of the flags."""
    with mock.patch("zerobook.training.trainer.load_hooks", lambda specs: instances):
        return train(output, **more)


def model_vocabulary(tiny):
    return json.loads((tiny / "llama" / "config.json").read_text())["vocab_size"]


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


class Diary(Hook):
    """Notes every call, and asks at step 4 for a rollback to step 2, once."""

    def before_prepare(self, trainer, model):
        self.trainer = trainer
        CALLS.append(("before_prepare", trainer.strategy.model))

    def note(self, name, *what):
        CALLS.append((name, self.trainer.progress.step, *what))

    def on_start(self, trainer):
        self.note("on_start")

    def before_step(self, trainer, step):
        self.note("before_step", step)

    @contextmanager
    def around_loss(self, trainer, batch):
        self.note("loss begins", "labels" in batch)
        yield
        self.note("loss ends", next(trainer.strategy.model.parameters()).grad is None)

    def on_gradients_ready(self, trainer):
        self.note("on_gradients_ready", next(trainer.strategy.model.parameters()).grad is None)

    def after_step(self, trainer, record):
        self.note("after_step", record.step)

    def on_log(self, trainer, records):
        self.note("on_log", [record.step for record in records], all(isinstance(record.loss, float) for record in records))
        if records[-1].step != 4 or any(call[0] == "on_rollback" for call in CALLS):
            return None
        return RecoveryAction(kind="replay", rule="a test", reason="a test", options=(), onset=4, noticed=4, to_step=2)

    def before_evaluate(self, trainer):
        self.note("before_evaluate")

    def after_evaluate(self, trainer):
        self.note("after_evaluate")

    def on_evaluate(self, trainer, record):
        self.note("on_evaluate", record.step, "loss" in record.result)

    def state_dict(self, trainer):
        self.note("state_dict")
        return {"step": trainer.progress.step}

    def load_state_dict(self, trainer, state):
        self.note("load_state_dict", state)

    def on_save(self, trainer, folder):
        self.note("on_save", folder.name, (folder / "progress.json").is_file())

    def on_rollback(self, trainer, action):
        self.note("on_rollback", action.to_step)

    def on_end(self, trainer):
        self.note("on_end")

    def close(self, trainer):
        self.note("close", (Path(trainer.config.output_dir) / "model" / "config.json").is_file())


def step(number):
    done = number - 1
    return [
        ("before_step", done, number),
        *[("loss begins", done, True), ("loss ends", done, True)],
        *[("on_gradients_ready", done, False), ("after_step", number, number)],
    ]


def evaluated(number):
    return [("before_evaluate", number), ("after_evaluate", number), ("on_evaluate", number, number, True)]


def test_every_point_is_called_in_its_order(tiny, tmp_path):
    plan = {"validation_file": tiny / "few.jsonl", "max_eval_samples": 2, "eval_steps": 4, "save_steps": 2}
    run = train(tmp_path / "run", **flags(tiny, "Diary", **plan))
    log = ("on_log", 4, [3, 4], True)
    saved = [("state_dict", 2), ("on_save", 2, "step-000002", True)]
    first = ("before_prepare", None)
    ending = [*evaluated(4), ("state_dict", 4), ("on_save", 4, "step-000004", True), ("on_end", 4), ("close", 4, True)]
    first_two = [first, ("on_start", 0), *step(1), *step(2), ("on_log", 2, [1, 2], True), *saved]
    assert first_two == CALLS[: len(first_two)]
    back = [("load_state_dict", 2, {"step": 2}), ("on_rollback", 2, 2)]
    assert [*step(3), *step(4), log, *back, *step(3), *step(4), log, *ending] == CALLS[len(first_two) :]
    assert [event["phase"] for event in run.events if event["type"] == "rollback"] == ["intent", "outcome"]

    CALLS.clear()
    CALLS.append(("on_rollback",))
    train(tmp_path / "run", **flags(tiny, "Diary", max_train_steps=5, resume_from_checkpoint="auto", **plan))
    assert CALLS[1:] == [
        first,
        ("load_state_dict", 4, {"step": 4}),
        ("on_start", 4),
        *step(5),
        ("on_log", 5, [5], True),
        *evaluated(5),
        ("state_dict", 5),
        ("on_save", 5, "step-000005", True),
        ("on_end", 5),
        ("close", 5, True),
    ]


class SavesAtTheWarning(Hook):
    """Asks for a save at the log point, which a warning to the process brings forward."""

    def after_step(self, trainer, record):
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_log(self, trainer, records):
        return RecoveryAction(kind="save", rule="a test", reason="a test", options=(), onset=3, noticed=3)


def test_a_hook_that_asks_for_a_save_does_not_take_the_place_of_the_save_at_a_warning(tiny, tmp_path):
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", **flags(tiny, "SavesAtTheWarning", logging_steps=100, max_train_steps=6))
    assert ended.value.code == preemption.EXIT_CODE
    assert [folder.name for folder in store.list_complete(tmp_path / "run" / "checkpoints")] == ["step-000003"]


class CutsTheRateAtTheWarning(SavesAtTheWarning):
    def on_log(self, trainer, records):
        return RecoveryAction(
            kind="cut_rate", rule="a test", reason="a test", options=(), onset=3, noticed=3, rate_factor=0.5
        )  # fmt: skip


def test_an_action_after_which_a_run_goes_on_is_carried_out_before_the_save_at_a_warning(tiny, tmp_path):
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", **flags(tiny, "CutsTheRateAtTheWarning", logging_steps=100, max_train_steps=6))
    assert ended.value.code == preemption.EXIT_CODE
    (checkpoint,) = store.list_complete(tmp_path / "run" / "checkpoints")
    progress = json.loads((checkpoint / "progress.json").read_text())
    assert (progress["step"], [cut[:2] for cut in progress["rate_cuts"]]) == (3, [[3, 0.5]])


class GoesBackAtTheWarning(SavesAtTheWarning):
    def on_log(self, trainer, records):
        if records[-1].step == 3:
            return RecoveryAction(
                kind="skip", rule="a test", reason="a test", options=(), onset=3, noticed=3, to_step=2, steps=(3, 3)
            )  # fmt: skip


class StopsAtTheWarning(SavesAtTheWarning):
    def on_log(self, trainer, records):
        if records[-1].step == 3:
            return RecoveryAction(kind="stop", rule="a test", reason="a test", options=(), onset=3, noticed=3)


@pytest.mark.parametrize("hook, code, left_out", [("GoesBackAtTheWarning", 75, 2), ("StopsAtTheWarning", 76, 0)])
def test_an_action_against_a_spike_is_carried_out_before_the_run_leaves_at_a_warning(tiny, tmp_path, hook, code, left_out):
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", **flags(tiny, hook, logging_steps=100, save_steps=2, max_train_steps=6))

    decisions = RecoveryState.read(tmp_path / "run")
    assert ended.value.code == code
    assert sum(end - start for start, end in decisions.skip_ranges) == left_out
    assert "step-000003" not in [folder.name for folder in store.list_complete(tmp_path / "run" / "checkpoints")]


class ComparesCopies(Hook):
    """Notes the steps at which the ranks' copies of the weights are compared, and receives a warning at step 3."""

    warns = True

    def on_start(self, trainer):
        trainer.spikes.check_replicas = CALLS.append

    def after_step(self, trainer, record):
        if record.step == 3 and self.warns:
            os.kill(os.getpid(), signal.SIGUSR1)


class ComparesCopiesAtTheEnd(ComparesCopies):
    warns = False


def test_copies_of_the_weights_are_compared_before_the_last_save_too(tiny, tmp_path):
    held_out = {"validation_file": tiny / "few.jsonl", "eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 1e9}
    train(tmp_path / "end", **flags(tiny, "ComparesCopiesAtTheEnd", save_steps=0))
    stopped = train(tmp_path / "stopped", **flags(tiny, "ComparesCopiesAtTheEnd", save_steps=0, on_spike="log", **held_out))
    with pytest.raises(SystemExit):
        train(tmp_path / "warned", **flags(tiny, "ComparesCopies", save_steps=0))

    assert [4, stopped.event("early_stop")["step"], 3] == CALLS


class Counts(Hook):
    def state_dict(self, trainer):
        return {"step": trainer.progress.step}

    def load_state_dict(self, trainer, state):
        CALLS.append(state["step"])


def test_a_run_that_resumes_from_an_abandoned_checkpoint_has_its_hooks_state(tiny, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    train(tmp_path / "run", **flags(tiny, "Counts", save_steps=2))
    train(tmp_path / "run", **flags(tiny, "Counts", save_steps=2, resume_from_checkpoint=checkpoints / "step-000002"))
    abandoned = checkpoints / "step-000004.abandoned"

    train(tmp_path / "run", **flags(tiny, "Counts", resume_from_checkpoint=abandoned, max_train_steps=5))

    assert CALLS == [2, 4]


class Sends(Hook):
    """Notes where the watch sees the run while a hook sends a checkpoint or a result elsewhere."""

    def on_save(self, trainer, folder):
        CALLS.append(("on_save", position.here().phase))

    def on_end(self, trainer):
        CALLS.append(("on_end", position.here().phase))

    def close(self, trainer):
        CALLS.append(("close", position.here().phase))


def test_hooks_that_send_results_elsewhere_have_the_time_of_a_save(tiny, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(Saver, "wait", lambda saver: waits.append(position.here().phase))
    train(tmp_path / "run", **flags(tiny, "Sends", max_train_steps=1))
    assert CALLS == [("on_save", "save"), ("on_end", "export"), ("close", "export")]
    assert set(waits) == {"save"}, "a save in the background may take as long at the end"


class Breaks(Hook):
    def on_gradients_ready(self, trainer):
        raise ZeroDivisionError("a mistake")


def test_an_error_in_a_hook_ends_the_run_with_the_hooks_name(tiny, tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        train(tmp_path / "run", **flags(tiny, "Breaks"))
    where = f"raised by the hook {__name__}:Breaks, in on_gradients_ready"
    assert where in "".join(raised.value.__notes__)
    crash = list(stream(tmp_path / "run" / "runlog" / "events.jsonl"))[-1]
    assert crash["type"] == "crash" and where in crash["reason"] and "a mistake" in crash["reason"]


class Closes(Hook):
    def on_start(self, trainer):
        self.trainer = trainer

    def on_error(self, trainer, error):
        CALLS.append(("on_error", type(error)))

    def close(self, trainer):
        CALLS.append(("close", trainer is self.trainer))


class Leaks(Closes):
    def close(self, trainer):
        super().close(trainer)
        raise FileNotFoundError("cannot be closed")


def test_hooks_hear_of_an_error_and_are_closed_and_the_first_error_stays(tiny, tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        train_with(tmp_path / "run", [Closes(), Leaks(), Breaks()], **flags(tiny, "Adds"))
    assert [("on_error", ZeroDivisionError)] * 2 + [("close", True)] * 2 == CALLS
    assert any("Leaks failed in close" in note for note in raised.value.__notes__)


def test_an_error_of_closing_alone_ends_the_run_after_all_are_closed(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot be closed"):
        train_with(tmp_path / "run", [Closes(), Leaks()], **flags(tiny, "Adds", max_train_steps=2))
    assert CALLS == [("close", True)] * 2
    assert list(stream(tmp_path / "run" / "runlog" / "events.jsonl"))[-1]["error"] == "FileNotFoundError"


class Remembers(Hook):
    """Keeps its first weights, and gives states that a checkpoint cannot hold where a test asks for them."""

    bad = None

    def on_start(self, trainer):
        self.weights = {name: shard.clone() for name, shard in trainer.strategy.shards()}

    def state_dict(self, trainer):
        first = next(iter(self.weights))
        bad_states = {
            "no JSON": {"function": len},
            "missing": {"weights": {first: self.weights[first]}},
            "shape": {"weights": {**self.weights, first: torch.zeros(3)}},
            "unknown": {"weights": {**self.weights, "another": torch.zeros(3)}},
        }
        return bad_states.get(self.bad, {"weights": self.weights, "count": 3})


@pytest.mark.parametrize(
    "bad, error", [("no JSON", TypeError), ("missing", ValueError), ("shape", ValueError), ("unknown", ValueError)]
)
def test_a_state_that_a_checkpoint_cannot_hold_ends_the_run(tiny, tmp_path, monkeypatch, bad, error):
    monkeypatch.setattr(Remembers, "bad", bad)
    with pytest.raises(error, match="state_dict of the hook Remembers"):
        train(tmp_path / "run", **flags(tiny, "Remembers", max_train_steps=1))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_holds_a_hooks_tensors_beside_the_weights(tiny, tmp_path, in_background):
    background = {"async_save": True} if in_background else {}
    run = train(tmp_path / "run", **flags(tiny, "Remembers", max_train_steps=2, save_steps=1, **background))
    checkpoint = store.list_complete(run.output / "checkpoints")[-1]
    saved = read_tensors(checkpoint)
    weights = {name.removeprefix("weight/"): tensor for name, tensor in saved.items() if name.startswith("weight/")}
    for name, weight in weights.items():
        assert saved[f"hooks.Remembers.weights/{name}"].shape == weight.shape
    assert not torch.equal(saved["hooks.Remembers.weights/model.norm.weight"], weights["model.norm.weight"])
    hooks = store.read_json(checkpoint / "hooks.json")
    assert hooks == {"Remembers": {"values": {"count": 3}, "tensors": ["weights"]}}


class Swaps(Hook):
    """Evaluates weights of zeros, and checks that the training's own come back."""

    def before_evaluate(self, trainer):
        self.before = {name: shard.clone() for name, shard in trainer.strategy.shards()}
        self.zeros = {name: torch.zeros_like(shard) for name, shard in self.before.items()}
        self.swap = trainer.strategy.swapped_weights(self.zeros)
        self.swap.__enter__()
        assert not any(shard.any() for _, shard in trainer.strategy.shards())

    def after_evaluate(self, trainer):
        self.swap.__exit__(None, None, None)
        for name, shard in trainer.strategy.shards():
            assert torch.equal(shard, self.before[name])
        assert not any(tensor.any() for tensor in self.zeros.values())
        CALLS.append("swapped")


def test_swapped_weights_are_evaluated_and_the_training_goes_on_as_without(tiny, tmp_path):
    plan = {"validation_file": tiny / "few.jsonl", "max_eval_samples": 2, "eval_steps": 2}
    run = train(tmp_path / "run", **flags(tiny, "Swaps", **plan))
    plain = train(tmp_path / "plain", **flags(tiny, "Adds", **plan))
    assert run.losses == plain.losses and CALLS == ["swapped"] * 2
    evaluations = [event["loss"] for event in run.events if event["type"] == "eval"]
    # A model of zeros finds all tokens equally likely.
    assert evaluations[0] == evaluations[1] == pytest.approx(math.log(model_vocabulary(tiny)), rel=1e-5)


class Adds(Hook):
    def on_gradients_ready(self, trainer):
        trainer.add_metric("largest", max(part.abs().max() for _, part in trainer.strategy.gradients()))

    def after_step(self, trainer, record):
        record.metrics["step twice"] = 2 * record.step


def test_a_hook_adds_to_the_record_of_a_step(tiny, tmp_path):
    from tests.test_rate_runs import tracked

    run = train(tmp_path / "run", **flags(tiny, "Adds", report_to="tensorboard"))
    assert [list(line["metrics"]) for line in run.steps] == [["largest", "step twice"]] * 4
    assert [line["metrics"]["step twice"] for line in run.steps] == [2, 4, 6, 8]
    assert all(0 < line["metrics"]["largest"] < line["grad_norm"] for line in run.steps)
    assert tracked(run, "train/largest") == pytest.approx({n: run.steps[n - 1]["metrics"]["largest"] for n in (2, 4)})
    assert problems(run.output / "runlog")[0] == []
    plain = train(tmp_path / "plain", **{key: value for key, value in flags(tiny, "Adds").items() if key != "hooks"})
    assert "metrics" not in plain.steps[0] and plain.losses == run.losses


class Unsaved(Hook):
    def before_prepare(self, trainer, model):
        trainer.save_results = False


def test_a_hook_can_let_nothing_be_saved(tiny, tmp_path):
    train(tmp_path / "run", **flags(tiny, "Unsaved", save_steps=2))
    assert not (tmp_path / "run" / "model").exists() and not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


FILE = """
from pathlib import Path
from zerobook.training.hooks import Hook
with Path(__file__).with_suffix(".runs").open("a") as file:
    file.write("x")
class First(Hook):
    pass
class Second(Hook):
    pass
class NoHook:
    pass
"""


def test_hooks_come_from_files_and_modules(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    hooks = load_hooks([f"{file}:First", f"{file}:Second", f"{__name__}:Diary"])
    assert [type(hook).__name__ for hook in hooks] == ["First", "Second", "Diary"] and type(hooks[2]) is Diary
    assert file.with_suffix(".runs").read_text() == "x", "a file is run once"


@pytest.mark.parametrize("spec, why", [
    ("{file}", "does not name a class. Write FILE.py:Class"),
    ("{file}:", "does not name a class"),
    ("{file}:Frist", "has no Frist. Did you mean First?"),
    ("{folder}/none.py:First", "there is no file"),
    ("{folder}/broken.py:First", "not valid Python"),
    ("no_such_module_at_all:First", "there is no module no_such_module_at_all"),
    ("no_such.module:First", "there is no module no_such.module"),
])  # fmt: skip
def test_a_wrong_name_is_a_problem_of_the_config(tmp_path, spec, why):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("class First(:")
    spec = spec.format(file=tmp_path / "mine.py", folder=tmp_path)
    line = ["--model_name_or_path", "x", "--train_file", str(tmp_path / "mine.py"), "--hooks", spec]
    with pytest.raises(ConfigError, match=r"^hooks: ") as raised:
        parse(CausalLMConfig, line)
    assert why in str(raised.value) and not (tmp_path / "mine.runs").exists(), "nothing is run"


def test_what_is_no_hook_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    for spec in (f"{file}:NoHook", f"{file}:file", f"{__name__}:flags"):
        assert user_code.problem("hooks", spec) is None
        with pytest.raises(ConfigError, match="does not derive from"):
            load_hooks([spec])
    with pytest.raises(ConfigError, match=f"{__name__} has no Dairy. Did you mean Diary?"):
        load_hooks([f"{__name__}:Dairy"])
