"""When a run saves and evaluates, for those who set nothing and for those who set an interval."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes.causal_lm import CausalLMConfig
from tests.alone import train
from zerobook.checkpoint import store
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.config_sources import parse
from zerobook.errors import ConfigError
from zerobook.training.intervals import (
    FIRST_STEP,
    LONGEST_S,
    SHORTEST_S,
    AutomaticEvaluations,
    AutomaticSaves,
    FixedSteps,
    Measured,
    SaveClock,
    Timetable,
)

SECONDS = st.floats(1e-4, 7200)


def saved_steps(total, step_seconds, save_seconds, *, start=0, resumed=False):
    """The steps that a run with constant times saves, its end left out."""
    saves = AutomaticSaves(step=start, resumed=resumed, total_steps=total, save_seconds=save_seconds)
    saves.set_measured(Measured(step_seconds, save_seconds))
    steps = []
    # A run looks after each step; between two saves, nothing changes here.
    while saves.next_step < total:
        steps.append(saves.next_step)
        assert saves.is_due(steps[-1]) and not saves.is_due(steps[-1] - 1)
        saves.note_save(steps[-1])
    return steps


ROWS = st.sampled_from([3, 10, 1000, 100_000])
DEFAULTS = CausalLMConfig(model_name_or_path="m", dataset_name="d")


def steps_over(rows):
    """The steps of a run with default flags on so many rows, in one process."""
    trained = rows * (1 - DEFAULTS.validation_split_percentage / 100)
    return math.ceil(trained * DEFAULTS.num_train_epochs / DEFAULTS.per_device_train_batch_size)


@settings(max_examples=20)
@given(rows=ROWS, step=SECONDS, save=SECONDS)
@example(rows=3, step=1.0, save=1.0)
@example(rows=10, step=600.0, save=1.0)
@example(rows=1000, step=2.0, save=30.0)
@example(rows=100_000, step=1.0, save=600.0)
def test_automatic_saves_keep_to_half_an_hour_then_to_5_percent_then_to_ten_a_run(rows, step, save):
    total = steps_over(rows)
    steps = saved_steps(total, step, save)

    gaps = [(after - before) * step for before, after in pairwise([0, *steps, total])]
    assert max(gaps) <= max(LONGEST_S, step) * 1.001, "a killed run loses half an hour at most"
    cost, training = len(steps) * save, total * step
    is_slow_to_save = save * 0.95 > 0.05 * (LONGEST_S - step)
    if not is_slow_to_save:
        assert cost <= 0.0501 * (training + cost)
    if save * 19 <= training and total > FIRST_STEP:
        assert steps[0] <= FIRST_STEP, "a spike in the first tenth can be rolled back"
    if training / 10 > max(SHORTEST_S, 19 * save) + step:
        assert len(steps) + 1 >= 10, "the end is saved too"


@pytest.mark.parametrize("total, first", [(9, None), (20, 10), (24, 5), (60, 6), (99, 9), (150, 10), (5000, 10)])
def test_a_short_run_saves_early_enough_to_be_rolled_back(total, first):
    steps = saved_steps(total, 1.0, 0.1)
    assert (steps[0] if steps else None) == first


@settings(max_examples=20)
@given(rows=ROWS, step=st.floats(0.01, 60), slower=st.floats(1, 20), save=st.floats(0.01, 600))
def test_steps_that_become_slower_do_not_stretch_the_half_hour(rows, step, slower, save):
    total = steps_over(rows)
    saves = AutomaticSaves(step=0, resumed=False, total_steps=total, save_seconds=save)
    unsaved = longest = 0.0
    for number in range(1, total):
        seconds = step if number < total / 2 else step * slower
        unsaved += seconds
        saves.set_measured(Measured(unsaved / (number - saves.last_save), save))
        if saves.is_due(number):
            saves.note_save(number)
            longest, unsaved = max(longest, unsaved), 0.0

    assert max(longest, unsaved) <= LONGEST_S + 2 * step * slower


@pytest.mark.parametrize(
    ("total", "step_seconds", "save_seconds", "expected"),
    [
        (9, 0.01, 0.01, []),
        (100, 0.01, 0.01, [10]),
        (100, 60.0, 1.0, [*range(10, 100, 10)]),
        (100, 600.0, 1.0, [3, *range(6, 100, 3)]),
        (1000, 2.0, 60.0, [10, 910]),
        (1000, 2.0, 110.0, [900]),
    ],
)
def test_a_run_saves_early_and_then_as_often_as_it_pays(total, step_seconds, save_seconds, expected):
    assert saved_steps(total, step_seconds, save_seconds) == expected


def test_a_resumed_run_has_its_early_checkpoint_already():
    assert saved_steps(100, 60.0, 1.0, start=40, resumed=True) == [50, 60, 70, 80, 90]
    assert saved_steps(100, 0.01, 1.0, start=40, resumed=True) == []


def test_without_a_measured_step_only_the_early_save_is_due():
    saves = AutomaticSaves(step=0, resumed=False, total_steps=1000, save_seconds=1.0)

    assert saves.next_step == FIRST_STEP
    saves.note_save(FIRST_STEP)
    assert saves.next_step is None and not saves.is_due(999)


@given(step_seconds=SECONDS, evaluation=SECONDS, total=st.integers(10, 5000), batches=st.floats(0, 1000))
def test_automatic_evaluations_take_at_most_5_percent_of_the_time_after_the_first(step_seconds, evaluation, total, batches):
    evaluations = AutomaticEvaluations(step=0, total_steps=total, batches=batches)
    evaluated = []
    for step in range(1, total):
        if evaluations.is_due(step, step_seconds):
            evaluations.note_evaluation(step, evaluation)
            evaluated.append(step)

    assert not evaluated or evaluated[0] >= 0.09 * total, "what scorers take is known only after the first one"
    later = evaluated[1:]
    if later:
        training = (later[-1] - evaluated[0]) * step_seconds
        assert len(later) * evaluation <= 0.0501 * (training + len(later) * evaluation)


def test_automatic_evaluations_wait_for_a_measured_step():
    assert not AutomaticEvaluations(step=0, total_steps=10, batches=0).is_due(9, 0.0)


def test_an_evaluation_step_is_saved_as_soon_as_the_cost_allows():
    saves = AutomaticSaves(step=0, resumed=False, total_steps=100_000, save_seconds=1.0)
    saves.note_save(100)
    saves.set_measured(Measured(step_seconds=1.0, save_seconds=1.0))

    assert [saves.is_due(step, evaluates=True) for step in (110, 118, 119)] == [False, False, True]
    assert not saves.is_due(119)


@given(rows=ROWS, batch=st.integers(1, 64), epochs=st.integers(1, 5))
def test_each_epoch_has_one_step_that_ends_it(rows, batch, epochs):
    passes = [min(epochs, step * batch / rows) for step in range(math.ceil(rows * epochs / batch) + 1)]
    schedule = FixedSteps("epoch", len(passes) - 1)

    due = [step for step in range(1, len(passes)) if schedule.is_due(step, passes[step - 1], passes[step])]

    assert len(due) == min(epochs, len({math.ceil(epoch * rows / batch) for epoch in range(1, epochs + 1)}))
    assert due[-1] == len(passes) - 1


@given(share=st.integers(2, 50), total=st.integers(50, 5000))
def test_a_share_of_the_run_is_due_that_often(share, total):
    schedule = FixedSteps(1 / share, total)

    due = [step for step in range(1, total + 1) if schedule.is_due(step, 0, 0)]

    assert due[0] == total // share and len(due) >= share


def test_an_epoch_is_due_at_the_step_that_ends_it():
    passes = [0, 0.4, 0.8, 1.2, 1.6, 2.0]
    schedule = FixedSteps("epoch", 5)

    assert [step for step in range(1, 6) if schedule.is_due(step, passes[step - 1], passes[step])] == [3, 5]


@pytest.mark.parametrize(
    ("text", "value"), [("10", 10), ("0", 0), ("0.1", 0.1), ("epoch", "epoch"), ("auto", "auto"), ("20.0", 20)]
)
def test_save_steps_takes_steps_shares_epochs_and_words(text, value):
    config, _, _ = parse(CausalLMConfig, ["--model_name_or_path", "m", "--dataset_name", "d", "--save_steps", text])

    assert config.save_steps == value and type(config.save_steps) is type(value)


@pytest.mark.parametrize(
    "flag", ["--save_steps=-1", "--save_steps=1.5", "--save_steps=never", "--eval_steps=-1", "--eval_steps=1.5"]
)
def test_other_intervals_are_refused_with_what_is_possible(flag):
    with pytest.raises(ConfigError, match="epoch"):
        parse(CausalLMConfig, ["--model_name_or_path", "m", "--dataset_name", "d", flag])


def flags(tiny, **more):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", block_size=64, per_device_train_batch_size=2,
        max_train_steps=14, max_eval_samples=2,
    ) | more  # fmt: skip


def checkpoints_of(run):
    return [store.step_of(c) for c in store.list_complete(store.folder_of(run.output))]


@pytest.fixture
def quick_saves(monkeypatch):
    """Times of which saves are a small share. On a busy machine, saves of a tiny model may be a large one."""
    monkeypatch.setattr(SaveClock, "read", lambda clock, step: Measured(step_seconds=1.0, save_seconds=0.01))


def test_a_run_without_flags_says_when_it_saves_and_has_a_checkpoint_before_its_end(tiny, tmp_path, quick_saves, capfd):
    run = train(tmp_path / "run", **flags(tiny))

    said = capfd.readouterr().out
    assert checkpoints_of(run) == [10, 14]
    assert "checkpoints: by step 10" in said and "kept: 2" in said


@pytest.mark.parametrize(
    ("room", "kept", "words"),
    [
        (4.5, [10, 14], "kept: 2"),
        (3.5, [14], "kept: 1"),
        (2.5, [14], "cannot be rolled back"),
        (1.5, [14], "saves at its end only"),
    ],
)
def test_on_a_tight_disk_automatic_saves_keep_fewer_and_say_what_is_lost(
    tiny, tmp_path, quick_saves, monkeypatch, capfd, checkpoint_bytes, room, kept, words
):
    leave_room(monkeypatch, room, checkpoint_bytes)

    run = train(tmp_path / "run", **flags(tiny, validation_split_percentage=0))

    said = capfd.readouterr().out
    assert words in said and ("warning: output_dir" in said) == (room < 4)
    assert checkpoints_of(run) == kept and (run.output / "model").is_dir()


def test_a_disk_without_room_for_one_checkpoint_is_refused_with_what_cannot_work(tiny, tmp_path, monkeypatch, checkpoint_bytes):
    leave_room(monkeypatch, 0.9, checkpoint_bytes)

    with pytest.raises(ConfigError, match=r"could not resume.*rolled back.*on_low_disk warn"):
        train(tmp_path / "run", **flags(tiny))


def test_a_resumed_run_on_a_tight_disk_keeps_the_checkpoint_that_it_has(tiny, tmp_path, monkeypatch, capfd, checkpoint_bytes):
    train(tmp_path / "run", **flags(tiny))
    store.prune(store.folder_of(tmp_path / "run"), 1)

    leave_room(monkeypatch, 0.9, checkpoint_bytes)
    with pytest.raises(ConfigError, match="one checkpoint of"):
        train(tmp_path / "run", **flags(tiny, resume_from_checkpoint="auto", max_train_steps=30))
    leave_room(monkeypatch, 1.5, checkpoint_bytes)
    run = train(tmp_path / "run", **flags(tiny, resume_from_checkpoint="auto", max_train_steps=30))

    assert checkpoints_of(run) == [30] and "kept: 1" in capfd.readouterr().out


def test_a_limit_that_a_person_set_is_not_changed_on_a_tight_disk(tiny, tmp_path, monkeypatch, checkpoint_bytes):
    leave_room(monkeypatch, 2.5, checkpoint_bytes)

    with pytest.raises(ConfigError, match="--save_total_limit"):
        train(tmp_path / "run", **flags(tiny, save_total_limit=2))


@pytest.mark.parametrize("save_steps", ["epoch", 0.25])
def test_a_resumed_run_needs_space_for_the_checkpoints_that_are_left_alone(
    tiny, tmp_path, monkeypatch, checkpoint_bytes, save_steps
):
    four = flags(tiny, num_train_epochs=4, save_steps=save_steps, validation_split_percentage=0)
    del four["max_train_steps"]
    train(tmp_path / "run", **four)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000048")

    leave_room(monkeypatch, 2.5, checkpoint_bytes)
    run = train(tmp_path / "run", **four, resume_from_checkpoint="auto")

    assert checkpoints_of(run) == [12, 24, 36, 48]


@pytest.fixture(scope="module")
def checkpoint_bytes(tiny, tmp_path_factory):
    """The bytes of the tensors in a checkpoint of these runs."""
    run = train(tmp_path_factory.mktemp("measured") / "run", **flags(tiny, max_train_steps=1, save_steps=0))
    return sum(4 * tensor.numel() for tensor in run.state().values())


def leave_room(monkeypatch, checkpoints, one):
    """Let the disk have room for so many checkpoints of ``one`` bytes each, and for the model."""
    usage = shutil.disk_usage("/")
    model = one / 3  # a checkpoint has weights and two moments
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(checkpoints * one + model)))


def test_saves_that_are_turned_off_are_said_with_what_cannot_work(tiny, tmp_path, capfd):
    run = train(tmp_path / "run", **flags(tiny, save_steps=0))

    said = capfd.readouterr().out
    assert checkpoints_of(run) == [14]
    assert "cannot resume" in said and "cannot be rolled back" in said


def test_epochs_and_shares_are_saved_and_evaluated(tiny, tmp_path):
    # 24 samples without a held-out share: an epoch is 12 steps of 2
    run = train(tmp_path / "run", **flags(tiny, save_steps="epoch", eval_steps=0.5, validation_file=tiny / "few.jsonl"))

    assert checkpoints_of(run) == [12, 14]
    assert [event["step"] for event in run.events if event["type"] == "eval"] == [7, 14]


def test_a_run_without_flags_evaluates_its_checkpoints_so_that_one_is_the_best(tiny, tmp_path, quick_saves, capfd):
    run = train(tmp_path / "run", **flags(tiny, validation_file=tiny / "few.jsonl"))

    evaluated = {event["step"]: event["loss"] for event in run.events if event["type"] == "eval"}
    assert checkpoints_of(run) == [10, 14] == [*evaluated]
    assert store.step_of(resolve_resume(run.output, "best").checkpoint) == min(evaluated, key=evaluated.get)
    assert "evaluations: at checkpoints" in capfd.readouterr().out


def test_automatic_saves_come_at_the_evaluations_that_a_person_set(tiny, tmp_path, quick_saves):
    run = train(tmp_path / "run", **flags(tiny, eval_steps=4, validation_file=tiny / "few.jsonl"))

    assert [event["step"] for event in run.events if event["type"] == "eval"] == [4, 8, 12, 14]
    assert [event["step"] for event in run.events if event["type"] == "checkpoint"] == [4, 8, 12, 14]


def test_auto_without_a_checkpoint_says_that_it_starts_at_step_0(tiny, tmp_path, capfd):
    train(tmp_path / "run", **flags(tiny, max_train_steps=2, resume_from_checkpoint="auto"))

    assert f"nothing to resume in {tmp_path / 'run'}: starting at step 0" in capfd.readouterr().out


def test_automatic_saves_prune_no_checkpoint_that_a_person_asked_for(tiny, tmp_path):
    train(tmp_path / "run", **flags(tiny, save_steps=2, max_train_steps=6))
    run = train(tmp_path / "run", **flags(tiny, max_train_steps=8, resume_from_checkpoint="auto"))
    run = train(tmp_path / "run", **flags(tiny, max_train_steps=10, resume_from_checkpoint="auto"))
    run = train(tmp_path / "run", **flags(tiny, max_train_steps=12, resume_from_checkpoint="auto"))

    assert checkpoints_of(run) == [2, 4, 6, 10, 12]


def test_automatic_saves_prune_no_abandoned_checkpoint_that_a_person_asked_for(tiny, tmp_path):
    checkpoints = store.folder_of(tmp_path / "run")
    train(tmp_path / "run", **flags(tiny, save_steps=2, max_train_steps=6))
    resumed = flags(tiny, max_train_steps=7)
    train(tmp_path / "run", **resumed, resume_from_checkpoint=checkpoints / "step-000002")
    train(tmp_path / "run", **resumed | {"max_train_steps": 9}, resume_from_checkpoint="auto")
    train(tmp_path / "run", **resumed | {"max_train_steps": 11}, resume_from_checkpoint="auto")

    names = {checkpoint.name for checkpoint in store.list_all(checkpoints)}
    assert names == {f"step-{step:06d}" for step in (2, 9, 11)} | {"step-000004.abandoned", "step-000006.abandoned"}


def test_the_first_measured_step_is_that_of_the_device(monkeypatch):
    """A GPU works on a step for 600 s, which the host has issued in no time. So the run saves soon."""
    now = 0.0
    monkeypatch.setattr("zerobook.training.intervals.time", SimpleNamespace(monotonic=lambda: now))
    strategy = SimpleNamespace(on_main=lambda work: work())
    timetable = Timetable(
        strategy, step=0, total_steps=1000, resumed=False, eval_steps="auto", save_steps="auto", save_seconds=1.0,
        held_out_batches=None, saves=True,
    )  # fmt: skip

    def settle():
        nonlocal now
        now += 600

    for step in (1, 2):
        timetable.measure_first_steps(step, settle=settle)
    assert timetable.read_clock(2).step_seconds == 600
    assert any(timetable.is_save_due(step, 0, 0, evaluates=False) for step in (3, 4))
