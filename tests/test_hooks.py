"""Hooks: when they are called, what they can do, and what becomes of their errors."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from recipes.causal_lm import CausalLMConfig
from tests.alone import train
from zerobook.config import parse
from zerobook.errors import ConfigError
from zerobook.monitor.policy import RecoveryAction
from zerobook.runlog.check import problems
from zerobook.runlog.jsonl import read
from zerobook.training.hooks import Hook, load_hooks
from zerobook.utils import user_code

CALLS: list = []


def flags(tiny, hook, **more):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=2, hooks=f"{__name__}:{hook}",
    ) | more  # fmt: skip


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

    def on_evaluate(self, trainer, record):
        self.note("on_evaluate", record.step, "loss" in record.result)

    def on_save(self, trainer, folder):
        self.note("on_save", folder.name, (folder / "progress.json").is_file())

    def on_rollback(self, trainer, action):
        self.note("on_rollback", action.to_step)

    def on_end(self, trainer):
        self.note("on_end")


def step(number):
    done = number - 1
    return [
        ("before_step", done, number),
        *[("loss begins", done, True), ("loss ends", done, True)],
        *[("on_gradients_ready", done, False), ("after_step", number, number)],
    ]


def test_every_point_is_called_in_its_order(tiny, tmp_path):
    plan = {"validation_file": tiny / "few.jsonl", "max_eval_samples": 2, "eval_steps": 4, "save_steps": 2}
    run = train(tmp_path / "run", **flags(tiny, "Diary", **plan))
    log = ("on_log", 4, [3, 4], True)
    saved, first = ("on_save", 2, "step-000002", True), ("before_prepare", None)
    ending = [("on_evaluate", 4, 4, True), ("on_save", 4, "step-000004", True), ("on_end", 4)]
    first_two = [first, ("on_start", 0), *step(1), *step(2), ("on_log", 2, [1, 2], True), saved]
    assert first_two == CALLS[: len(first_two)]
    assert [*step(3), *step(4), log, ("on_rollback", 2, 2), *step(3), *step(4), log, *ending] == CALLS[len(first_two) :]
    assert [event["phase"] for event in run.events if event["type"] == "rollback"] == ["intent", "outcome"]

    CALLS.clear()
    CALLS.append(("on_rollback",))
    train(tmp_path / "run", **flags(tiny, "Diary", max_train_steps=5, resume_from_checkpoint="auto", **plan))
    assert CALLS[1:] == [
        first, ("on_start", 4), *step(5), ("on_log", 5, [5], True), ("on_evaluate", 5, 5, True),
        ("on_save", 5, "step-000005", True), ("on_end", 5),
    ]  # fmt: skip


class Breaks(Hook):
    def on_gradients_ready(self, trainer):
        raise ZeroDivisionError("a mistake")


def test_an_error_in_a_hook_ends_the_run_with_the_hooks_name(tiny, tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        train(tmp_path / "run", **flags(tiny, "Breaks"))
    where = f"raised by the hook {__name__}:Breaks, in on_gradients_ready"
    assert where in "".join(raised.value.__notes__)
    crash = read(tmp_path / "run" / "runlog" / "events.jsonl")[-1]
    assert crash["type"] == "crash" and where in crash["reason"] and "a mistake" in crash["reason"]


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
