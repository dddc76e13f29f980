"""Events that a run announces: they explain a step of the loss and of its noise, and nothing else."""

from __future__ import annotations

import random

import pytest

from tests.alone import train
from zerobook.monitor.finding import Point
from zerobook.monitor.spike_monitor import SpikeMonitor
from zerobook.training.hooks import Hook

CHANGE = 120
SEEDS = range(20)


def monitor_of(*events, peak_rate=1e-3):
    monitor = SpikeMonitor("rollback", max_rollbacks=8, rate_factor=0.5, peak_rate=peak_rate, detector={}, policy={})
    for step, what in events:
        monitor.expected.add(step, what)
    return monitor


def findings_on(monitor, seed, *, shift=lambda after: 0.0, noise=1.0, rate=lambda step: None, norm=1.0, steps=220):
    """Findings on a loss around 2 with noise, to which ``shift`` of the steps since `CHANGE` is added."""
    rng = random.Random(seed)
    findings = []
    for step in range(1, steps + 1):
        after = step - CHANGE
        changed = after >= 0
        loss = 2 + 0.04 * rng.gauss(0, 1) * (noise if changed else 1) + (shift(after) if changed else 0)
        point = Point(step=step, loss=loss, grad_norm=norm if changed else 1.0, learning_rate=rate(step))
        findings += monitor.update(point).findings
    return findings


def actions(make, **curve):
    """Number of seeds on which something has to be done."""
    count = 0
    for seed in SEEDS:
        count += any(finding.needs_action for finding in findings_on(make(), seed, **curve))
    return count


@pytest.mark.parametrize("rise", [0.15, 0.3, 1.0])
def test_an_announced_step_of_the_level_is_the_new_level(rise):
    def make():
        return monitor_of((CHANGE, "the mixture changes"))

    assert actions(make, shift=lambda after: rise) == 0
    found = findings_on(make(), 0, shift=lambda after: rise)
    shifts = [finding for finding in found if finding.kind == "level_shift"]
    if rise >= 0.3:
        assert len(shifts) == 1 and "the mixture changes" in shifts[0].reason
    assert not [finding for finding in found if finding.step > CHANGE + 30 and finding.alarm], "it is calm afterwards"
    if rise == 1.0:
        assert actions(monitor_of, shift=lambda after: rise) == 20, "nobody has announced it"


def test_a_huge_loss_is_damage_whatever_was_announced():
    monitor = monitor_of((CHANGE, "an epoch begins"))
    found = findings_on(monitor, 0, shift=lambda after: 300.0 if after < 2 else 0.0)
    assert [finding.kind for finding in found if finding.needs_action] == ["divergence"]


def test_a_restart_of_the_rate_announces_itself():
    def rate(step):
        return 1e-3 if step >= CHANGE else 1e-5

    def restart(after):
        return 0.6 * max(0.3, 1 - after / 100)

    assert actions(monitor_of, shift=restart, rate=rate) == 0
    assert actions(monitor_of, shift=restart, rate=lambda step: 1e-3) >= 10


def test_a_rate_above_the_schedule_is_not_expected():
    def rate(step):
        return 1e-2 if step >= CHANGE else 1e-3

    planned, unplanned = monitor_of(peak_rate=1e-2), monitor_of(peak_rate=1e-3)
    findings_on(planned, 0, rate=rate)
    findings_on(unplanned, 0, rate=rate)
    assert planned.expected.at(CHANGE) is not None and unplanned.expected.at(CHANGE) is None


def test_a_smaller_batch_may_have_more_noise():
    assert actions(lambda: monitor_of((CHANGE, "the batch is smaller")), noise=4.0) == 0


@pytest.mark.parametrize(
    "curve",
    [
        {"shift": lambda after: 0.15 * after},
        {"shift": lambda after: 0.05 * 1.3**after if after < 20 else 9.0},
        {"shift": lambda after: 5.0},
        {"shift": lambda after: 1.0, "norm": 30.0},
    ],
    ids=["it rises", "it rises faster and faster", "it is destroyed", "the gradients are 30 times larger"],
)
def test_no_event_explains_a_divergence(curve):
    assert actions(lambda: monitor_of((CHANGE, "the mixture changes")), **curve) == 20


def test_a_loss_that_is_not_finite_is_never_expected():
    monitor = monitor_of((CHANGE, "the mixture changes"))
    found = findings_on(monitor, 0, shift=lambda after: float("nan"), steps=CHANGE + 4)
    assert [finding for finding in found if finding.needs_action]


def test_an_event_explains_what_begins_in_its_window_only():
    assert actions(lambda: monitor_of((CHANGE - 40, "an earlier change")), shift=lambda after: 1.0) == 20
    assert actions(lambda: monitor_of((CHANGE + 20, "a later change")), shift=lambda after: 1.0) == 20


class Announcer(Hook):
    """Announces an event, and keeps what was announced at the end of the run."""

    announced = None

    def on_start(self, trainer):
        trainer.spikes.expect(30, "a hook changes something")

    def on_end(self, trainer):
        expected = trainer.spikes.monitor.expected
        events = {step: expected.at(step) for step in range(1, 41)}
        type(self).announced = {step: None if event is None else event.what for step, event in events.items()}


def test_a_run_announces_its_epochs_and_what_it_is_told(tiny, tmp_path):
    train(
        tmp_path / "run", model_name_or_path=tiny / "gpt2", dataset_name="embedded:chatterbot", block_size=64,
        max_train_steps=40, per_device_train_batch_size=4, max_train_samples=80, max_eval_samples=4, expect="7 other data",
        hooks=f"{__name__}:Announcer",
    )  # fmt: skip
    whats = Announcer.announced
    assert whats[6] is None and whats[7] == "other data" and whats[30] == "a hook changes something"
    assert "an epoch begins" in whats.values(), "an epoch has fewer than 40 steps"
