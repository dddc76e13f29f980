"""Measures of the spike monitor at log points: proven checkpoints, pins, and replays."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from types import SimpleNamespace

import pytest

from zerobook.monitor.finding import Point
from zerobook.monitor.policy import LEAD
from zerobook.monitor.spike_monitor import SpikeMonitor
from zerobook.runlog.jsonl import stream
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import RunLog
from zerobook.training.spikes import SpikeHandler


class FakeKeeper:
    """Checkpoints by step, as rank 0 knows them."""

    def __init__(self):
        self.whole, self.proven, self.protected = [], [], ()
        self.saver = SimpleNamespace(writing_step=None)

    def finish(self, log): ...

    def report(self, log): ...

    def is_undamaged(self, step):
        return True

    def steps(self):
        return self.proven, [step for step in self.whole if step not in self.proven]

    def prove(self, steps, log):
        self.proven += steps

    def protect(self, *steps):
        self.protected = steps

    def make_weight_reader(self, step):
        return None

    def remember(self, **values):
        self.decisions = values


class Run:
    """Steps of noise, with losses and masks put in; saves every 10 steps and looks every 5."""

    def __init__(self, tmp_path, **config):
        self.manager = FakeKeeper()
        self.log = RunLog(tmp_path)
        self.replicas = None
        strategy = SimpleNamespace(
            is_main=True,
            plan=SimpleNamespace(precision=config.pop("precision", "no")), on_main=lambda work: work(),
            find_differing_replicas=lambda: self.replicas,
        )  # fmt: skip
        config = SimpleNamespace(
            **{
                "on_spike": "rollback",
                "max_rollbacks": 8,
                "rollback_lr_factor": 0.5,
                "policy": None,
                "expect": [],
                "learning_rate": 1e-3,
            }
            | config
        )
        self.spikes = SpikeHandler(config, strategy, self.manager, self.log, print, detector={}, policy={})
        self.monitor = self.spikes.monitor
        self.states = {}

    def go(self, first, last, **put):
        """Steps ``first`` to ``last``; ``put`` as ``s40=(loss, norm)``. Returns the first measure."""
        block = []
        for step in range(first, last + 1):
            loss, norm = put.get(f"s{step}", (2 + random.Random(step).gauss(0, 0.04), 1.0))
            cursor = (step * 4 - 4, step * 4)
            block.append(
                StepRecord(
                    step=step, loss=loss, grad_norm=norm, learning_rate=1e-3, tokens=4, cursor=cursor, ids=range(*cursor)
                )
            )
            if step % 5 == 0 or step == last:
                measure = self.spikes.see(block)
                block = []
                if measure is not None:
                    return measure
            if step % 10 == 0:
                self.spikes.note_save(step)
                self.manager.whole.append(step)
                self.states[step] = self.monitor.detector.state()
        return None

    def back(self, measure):
        return self.spikes.forget_abandoned(measure, self.states[measure.to_step], None)

    def events(self, kind):
        return [e for e in stream(self.log.folder / "events.jsonl") if e["type"] == kind]


HIGH = {f"s{step}": (6.0, 1.0) for step in range(62, 80)}


def test_a_checkpoint_is_good_once_training_went_on_well_from_it(tmp_path):
    run = Run(tmp_path)
    run.go(1, 29)
    assert run.manager.proven == [10], "20 has had no ten steps yet"
    run.go(30, 45)
    assert run.manager.proven == [10, 20, 30]


def test_a_checkpoint_that_takes_long_to_write_is_proven_once_it_is_complete(tmp_path):
    run = Run(tmp_path)
    run.go(1, 10)
    run.manager.saver.writing_step = 10
    run.go(11, 25)
    assert run.manager.proven == []
    run.manager.saver.writing_step = None
    run.go(26, 29)
    assert run.manager.proven == [10]


def test_a_loss_that_rises_evenly_lowers_the_rate_from_before_the_rise(tmp_path):
    run = Run(tmp_path)
    curve = {}
    for step in range(1, 151):
        falling = 1.2 + 2 * math.exp(-step / 10) + random.Random(step).gauss(0, 0.1)
        curve[f"s{step}"] = (falling + 0.024 * max(0, step - 40), 1.0)
    announced = Run(tmp_path / "announced", expect=["50 the mixture changes"])
    assert announced.go(1, 100, **curve) is None, "a rise that was announced is an alarm alone"
    measure = run.go(1, 150, **curve)
    assert measure.kind == "lower_rate" and measure.to_step < measure.onset <= 45 and measure.steps is None
    assert run.monitor.detector.seen == measure.noticed
    run.back(measure)
    assert run.monitor.detector.seen == measure.to_step


@pytest.mark.parametrize("stopped_after", [61, 64])
def test_a_resumed_run_remembers_what_was_announced(stopped_after, tmp_path):
    """A resume a few steps after an announced step of the loss, before or after the first high point."""
    noise = random.Random(0)
    losses = [2 + noise.gauss(0, 0.04) + 0.9 * (step > 62) for step in range(1, 101)]

    def monitor(state):
        return SpikeMonitor("rollback", max_rollbacks=8, rate_factor=0.5, detector=state, policy={})

    def needs_action(one, first, last):
        points = [Point(step=step, loss=losses[step - 1], grad_norm=1.0) for step in range(first, last + 1)]
        return any(finding.needs_action for point in points for finding in one.update(point).findings)

    def resumed(announces):
        stopped = monitor({})
        if announces:
            stopped.expected.add(60, "the mixture changes")
        assert not needs_action(stopped, 1, stopped_after)
        return monitor(json.loads(json.dumps(stopped.state())))

    assert needs_action(resumed(announces=False), stopped_after + 1, 100)
    assert not needs_action(resumed(announces=True), stopped_after + 1, 100)


def test_what_was_saved_inside_or_right_before_a_spike_is_never_good(tmp_path):
    run = Run(tmp_path, on_spike="log")
    assert run.go(1, 110, **{f"s{s}": (6.0, 1.0) for s in range(42, 56)}) is None
    assert run.manager.proven == [10, 20, 30, 60, 70, 80, 90, 100] and 50 in run.manager.whole


def test_no_checkpoint_is_proven_while_the_detector_is_armed(tmp_path):
    run = Run(tmp_path)
    run.go(1, 54, s48=(2.0, 40.0))
    assert run.manager.proven == [10, 20, 30], "40 has had ten steps"
    run.go(55, 65)
    assert run.manager.proven[-1] > 30


def test_a_spike_that_comes_again_is_known_at_its_first_high_step(tmp_path):
    run = Run(tmp_path)
    measure = run.go(1, 80, **HIGH)
    assert (measure.kind, measure.to_step, measure.onset, measure.noticed) == ("replay", 50, 62, 69)
    must_come_back = run.back(measure)
    assert sorted(must_come_back) == list(range(51, 61)), "the losses before what is suspect"
    again = run.go(51, 80, **HIGH)
    assert (again.kind, again.to_step, again.steps) == ("skip", 50, (61, 69))
    assert [(e["step"], e["reproduced"]) for e in run.events("verify")] == [(62, True)], "before it was confirmed again"
    assert run.spikes.list_cursors(*again.steps) == [(step * 4 - 4, step * 4) for step in range(61, 70)], (
        "also of steps not done again"
    )
    run.back(again)
    assert run.go(51, 100) is None


def test_a_dead_run_that_is_dead_again_is_not_called_cured(tmp_path):
    run = Run(tmp_path)
    dead = {f"s{step}": (0.0, 1.0) for step in range(62, 81)}
    run.back(run.go(1, 80, **dead))
    assert run.go(51, 80, **dead).kind == "skip"
    assert run.events("verify") == []


def test_a_spike_that_does_not_come_again_costs_no_data(tmp_path):
    run = Run(tmp_path)
    run.back(run.go(1, 80, **HIGH))
    assert run.go(51, 120) is None
    (verify,) = run.events("verify")
    assert verify["reproduced"] is False and verify["step"] == 69


def test_usual_losses_behind_a_precursor_prove_nothing(tmp_path):
    """A gradient arms five steps ahead; done again, those steps come back bit for bit, and the fault does not."""
    run = Run(tmp_path)
    measure = run.go(1, 80, s57=(2.0, 40.0), **HIGH)
    assert measure.onset == 57
    run.back(measure)
    assert run.go(51, 120) is None and [e["reproduced"] for e in run.events("verify")] == [False]
    again = Run(tmp_path / "again")
    again.back(again.go(1, 80, s57=(2.0, 40.0), **HIGH))
    assert again.go(51, 80, s57=(2.0, 40.0), **HIGH).kind == "skip" and again.events("verify")[-1]["step"] == 62


def test_a_decision_counts_the_steps_up_to_the_log_point(tmp_path):
    run = Run(tmp_path)
    measure = run.go(1, 80, **HIGH)
    assert measure.noticed < 70 and f"{70 - measure.to_step} steps abandoned" in measure.rule


def test_a_step_is_decided_on_once(tmp_path):
    """An absurd loss asks by itself at the very step at which the replay sees it come again."""
    run = Run(tmp_path)
    absurd = {f"s{step}": (1e9, 1.0) for step in range(62, 66)}
    run.back(run.go(1, 80, **absurd))
    assert run.go(51, 80, **absurd).kind == "skip"
    assert [e["action"] for e in run.events("decision")] == ["replay", "skip"]


def test_gradients_that_are_not_finite_four_times_and_again(tmp_path):
    run = Run(tmp_path)
    bad = {f"s{step}": (2.0, math.nan) for step in range(62, 70)}
    measure = run.go(1, 80, **bad)
    assert (measure.kind, measure.onset) == ("replay", 62)
    run.back(measure)
    assert run.go(51, 80, **bad).kind == "skip"
    fresh = Run(tmp_path / "fp16", precision="fp16")
    assert fresh.go(1, 80, **bad) is None, "fp16's scaler overflows by design"
    lost = Run(tmp_path / "lost", precision="fp16")
    overflows = {f"s{step}": (2.0, math.inf) for step in range(62, 150)}
    assert lost.go(1, 150, **overflows).kind == "replay", "no update is applied any more"


def test_a_loss_that_is_not_finite_is_not_applied_under_fp16_either(tmp_path):
    run = Run(tmp_path, precision="fp16")
    assert run.go(1, 60, s45=(math.nan, math.nan)) is None
    measure = run.go(61, 70, **{f"s{step}": (math.nan, math.nan) for step in range(62, 68)})
    assert (measure.kind, measure.onset) == ("replay", 62)


def test_steps_after_one_whose_samples_are_left_out_are_seen(tmp_path):
    run = Run(tmp_path, on_spike="skip")
    measure = run.go(1, 80, **HIGH)
    assert (measure.kind, measure.goes_back) == ("leave_out", False)
    assert len(run.spikes.list_cursors(1, 80)) == run.monitor.detector.last_step == 70
    decisions = [event["leaves_out_steps"] for event in run.events("decision")]
    assert list(measure.steps) == [decisions[0][0], decisions[-1][1]], "the samples of all decisions are left out"


def test_odd_data_and_a_nan_or_two_do_nothing(tmp_path):
    run = Run(tmp_path)
    assert run.go(1, 100, s40=(9.0, 1.0), s60=(2.0, math.inf), s61=(math.nan, math.nan)) is None
    assert run.manager.proven[-1] == 90 and run.events("decision") == []


def test_replicas_that_differ_are_named_and_tried_twice(tmp_path):
    run = Run(tmp_path)
    run.replicas = SimpleNamespace(describe=lambda read: "rank 1's copy of w differs from those of the other ranks")
    measure = run.go(1, 80, **HIGH)
    assert measure.kind == "replay" and "rank 1's copy" in measure.reason
    assert run.events("decision")[0]["hardware"] == "rank 1's copy of w differs from those of the other ranks"


def test_replicas_are_compared_before_a_save(tmp_path):
    run = Run(tmp_path)
    run.go(1, 40)
    assert run.spikes.check_replicas(40) is None
    run.replicas = SimpleNamespace(describe=lambda read: "rank 1's copy of w differs from those of the other ranks")
    measure = run.spikes.check_replicas(50)
    assert (measure.kind, measure.to_step) == ("replay", 30) and run.events("spike")[-1]["step"] == 50
    assert run.events("decision")[-1]["parent"] == run.events("spike")[-1]["seq"]
    run.back(measure)
    run.go(31, 60)
    assert run.events("verify") == [], "no loss shows whether the copies differ again"


def test_weights_that_are_lost_are_given_up(tmp_path):
    run = Run(tmp_path, on_spike="log")
    run.go(1, 60, **{f"s{step}": (math.nan, math.nan) for step in range(51, 61)})
    assert run.monitor.has_lost_weights
    run.go(61, 65)
    assert not run.monitor.has_lost_weights


def test_a_run_that_ends_far_above_its_best_says_so_whatever_was_found(tmp_path):
    run = Run(tmp_path, on_spike="log")
    run.go(1, 100)
    assert run.monitor.far_above_best(held_out=2.02, best_held_out=2.0) == {}
    far = run.monitor.far_above_best(held_out=2.6, best_held_out=2.0)
    assert far == {"held-out loss": [2.6, 2.0]}
    run.go(101, 200, **{f"s{step}": (2.0 + 0.02 * (step - 100), 1.0) for step in range(101, 201)})
    ((name, (value, best)),) = run.monitor.far_above_best(None, None).items()
    assert name == "loss" and value > 3.9 and 1.9 < best < 2.1
    run.go(201, 208, **{f"s{step}": (math.nan, math.nan) for step in range(201, 209)})
    assert run.monitor.far_above_best(None, None)["loss"][0] == math.inf
    falling = Run(tmp_path / "falling")
    falling.go(1, 20, **{f"s{step}": (2.5 - 0.06 * step, 1.0) for step in range(1, 21)})
    assert falling.monitor.far_above_best(None, None) == {}
    young = Run(tmp_path / "young")
    young.go(1, 3, s2=(9.0, 1.0), s3=(9.0, 1.0))
    assert young.monitor.far_above_best(9.0, 9.0) == {}, "three points have no level"


def test_the_ladder_goes_on_in_another_process(tmp_path):
    run = Run(tmp_path)
    run.go(1, 80, **HIGH)
    state = run.events("decision")[-1]["policy"]
    assert state["rollbacks"] == 1
    assert state["trouble"] == {"onset": 62, "last": 69, "tried": ["replay"], "to_step": 50}
    assert run.manager.decisions == {"policy": state} and run.monitor.policy.state() == state


def test_nothing_to_go_back_to(tmp_path):
    run = Run(tmp_path)
    run.manager.steps = lambda: ([], [])
    assert run.go(1, 80, **{f"s{step}": (6 - 0.18 * (step - 62), 1.0) for step in range(62, 80)}) is None
    (decision,) = run.events("decision")
    assert decision["action"] == "none" and f"no checkpoint from before step {62 - LEAD + 1}" in decision["rule"]
    diverged = Run(tmp_path / "divergence")
    diverged.manager.steps = lambda: ([], [])
    assert diverged.go(1, 80, **HIGH) is None, "its weights are finite, and may recover"
    lost = Run(tmp_path / "lost")
    lost.manager.steps = lambda: ([], [])
    assert lost.go(1, 80, **{f"s{step}": (math.nan, math.nan) for step in range(62, 80)}).kind == "stop"


@pytest.mark.full  # growth
def test_memory_does_not_grow_with_the_length_of_a_run(tmp_path):
    run, held = Run(tmp_path), []
    tracemalloc.start()
    try:
        for first in (1, 12_001, 24_001):
            assert run.go(first, first + 11_999) is None
            run.states.clear()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[2] < 1.05 * held[1], "12,000 more steps"
