"""Spikes: made-up curves whose answer is known, and rules that hold for any curve."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.detector import main, replay
from tests.calls import function_calls
from zerobook.monitor.detector import Detector
from zerobook.monitor.finding import Point

STEPS = 400


def noise(scale=0.03, seed=0, steps=STEPS, level=2.0, fall=6.0):
    """A curve that falls to ``level`` with normal noise of ``scale`` of it."""
    rng = random.Random(seed)
    return [(level + fall * math.exp(-i / 30)) * (1 + rng.gauss(0, scale)) for i in range(steps)]


def kinds(losses, first=1, stride=1, **columns):
    points = [
        Point(step=first + i * stride, loss=loss, **{name: column[i] for name, column in columns.items()})
        for i, loss in enumerate(losses)
    ]
    return [(f.kind, f.onset) for f in replay(points) if f.kind not in ("armed", "outlier", "chronic")]


def lifted(losses, start, shape):
    """``losses`` with ``shape`` (factors) from ``start`` on."""
    return [loss * (shape[i - start] if 0 <= i - start < len(shape) else 1) for i, loss in enumerate(losses)]


HEALTHY = {
    "smooth": noise(0.01),
    "noisy": noise(0.25),
    "two modes": [loss * random.Random(i).choice((1, 1.5)) for i, loss in enumerate(noise(0.02))],
    "rare second mode": [loss * (1.6 if random.Random(i).random() < 0.1 else 1) for i, loss in enumerate(noise(0.02))],
    "epoch stairs": [loss * 0.7 ** (i // 80) for i, loss in enumerate(noise(0.02))],
    "bf16": [round(loss * 64) / 64 for loss in noise(0.004)],
    "near zero": [max(1e-4, 0.002 * abs(random.Random(i).gauss(1, 0.8))) if i > 60 else 3 / (i + 1) for i in range(STEPS)],
    "negative": [loss - 5 for loss in noise(0.02)],
    "constant": [0.5] * STEPS,
    "plateau, then learning": [5.4 + random.Random(i).gauss(0, 0.05) - (i > 200) * (i - 200) * 0.02 for i in range(STEPS)],
    "a rise in warm-up": [3 + 0.2 * min(i, 12) / 12 + random.Random(i).gauss(0, 0.05) for i in range(60)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_curve_gives_no_alarm(name):
    assert kinds(HEALTHY[name]) == []


@pytest.mark.parametrize("points", [1, 2, 3])
def test_odd_data_is_noted_and_nothing_is_done(points):
    losses = lifted(noise(0.02), 200, [1.8] * points)
    (found,) = [f for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses)) if f.kind == "outlier"]
    assert (found.onset, found.points, found.needs_action) == (200, points, False) and kinds(losses) == []


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([1.6] * 5, [("spike", 201), ("spike_end", 201)]),
        ([2.5 - 1.4 * i / 16 for i in range(16)], [("spike", 201), ("damage", 201), ("spike_end", 201)]),
        (
            [1.2 * 1.05**i for i in range(50)] + [13.0] * 10,
            [("spike", 201), *[("divergence", 201)] * 4, ("spike_end", 201)],
        ),
        ([5.0] * 200, [("spike", 201), ("divergence", 201), ("level_shift", 201)]),
        ([1.15] * 200, [("spike", 201), ("level_shift", 201)]),
        ([3.0] * 20 + [1.0] + [5.0] * 20, [("spike", 201), ("divergence", 201), ("divergence", 201), ("spike_end", 201)]),
    ],
    ids=["benign", "damaging", "rising", "high for good", "a small step", "back once, and higher than before"],
)
def test_shapes_are_told_apart(shape, expected):
    assert kinds(lifted(noise(0.02), 200, shape)) == expected


def test_a_step_that_a_raised_rate_explains_is_accepted_and_one_that_nothing_explains_is_not():
    losses = lifted(noise(0.02), 200, [1.6] * 200)
    accepted, found = [("spike", 201), ("level_shift", 201)], [("spike", 201), ("divergence", 201)]
    raised = [1e-3 if i < 195 else 3e-3 for i in range(STEPS)]
    lowered = raised[::-1][STEPS - 390 :] + [1e-3] * (STEPS - 390)
    warmed_up = [1e-3 * min(1, (i + 1) / 210) for i in range(STEPS)]
    assert kinds(losses, learning_rate=raised) == accepted
    for rates in ([1e-3] * STEPS, lowered, warmed_up):
        assert kinds(losses, learning_rate=rates)[:2] == found


def test_losses_whose_ratio_is_rounded_to_0_are_compared():
    assert ("divergence", 62) in kinds([-5.0, 4.6e160, *[-5.0] * 60, *[1.1e-163] * 10], first=0)


def test_a_spike_ends_at_the_second_point_at_the_base():
    losses = lifted(noise(0.02), 200, [3.0] * 20)
    (end,) = [f for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses)) if f.kind == "spike_end"]
    assert end.step == 221, "steps 200 to 219 are high"


def test_weights_made_anew_are_a_reset():
    curves = [noise(0.02, seed=seed, fall=20, steps=2000)[::10] for seed in (0, 1)]
    assert kinds([*curves[0], *curves[1][:100]], stride=10)[-1] == ("reset", 2001)


def test_a_run_that_learns_slowly_at_first_is_recognised_when_it_begins_again():
    flat = [10.4 - 0.01 * min(i, 12) ** 2 - 0.05 * max(0, i - 12) for i in range(100)]
    twice = [*flat, *flat[:60]]
    assert kinds(twice) == [("spike", 101), ("reset", 101)]
    points = [Point(step=i, loss=loss) for i, loss in enumerate(twice)]
    assert [f.kind for f in replay(points, Detector()) if f.needs_action] == ["divergence"], "weights are lost"


def test_three_points_are_enough_where_points_are_far_apart():
    assert kinds(lifted(noise(0.02), 200, [2.0, 2.0]), first=0, stride=100) == []
    losses = lifted(noise(0.02), 200, [2.0, 2.0, 2.0])
    assert kinds(losses) == []
    assert kinds(losses, first=0, stride=100)[0] == ("spike", 20_000)


def test_a_loss_of_exactly_0_is_a_dead_run_and_one_such_batch_is_nothing():
    losses = noise(0.02)
    assert kinds([*losses[:40], 0.0, *losses[40:]]) == []
    died = [Point(step=i, loss=loss if i < 40 else 0.0, grad_norm=math.nan) for i, loss in enumerate(losses[:150])]
    assert [(f.kind, f.onset, f.step) for f in replay(died) if f.alarm] == [("divergence", 40, 43)]
    learnt = [3.0 * 0.8**i for i in range(60)] + [0.0] * 60
    assert kinds(learnt) == []


def test_a_level_that_creeps_up_without_a_spike_is_reported_and_not_rolled_back():
    rng = random.Random(0)
    losses = [2 + rng.gauss(0, 0.05) + min(1, max(0, (i - 80) / 400)) for i in range(500)]
    ((kind, onset),) = kinds(losses)[:1]
    assert kind == "slow_rise" and onset < 150 and not rolls_back(losses, 0)


@pytest.mark.parametrize("slope", [0.02, 0.04])
def test_a_loss_that_rises_evenly_in_a_short_run_is_rolled_back(slope):
    def rising(rng):
        return [1.2 + 2 * math.exp(-i / 10) + rng.gauss(0, 0.04) + slope * 1.2 * max(0, i - 40) for i in range(150)]

    assert seeds_with(lambda losses: rolls_back(losses, 41), rising) >= 18


def test_what_is_not_finite_is_a_divergence_at_once_and_skipped_updates_after_four():
    losses = noise(0.02)
    assert kinds([*losses[:50], math.inf, *losses[50:80]])[0] == ("divergence", 51)

    def skipped(count):
        points = [Point(step=i, loss=x, is_skipped=100 <= i < 100 + count) for i, x in enumerate(losses)]
        return [(f.kind, f.step) for f in replay(points)]

    assert skipped(3) == [("outlier", 100)]
    assert skipped(6) == [("outlier", 100), ("divergence", 103)]


def test_an_absurd_loss_is_a_divergence_at_once():
    assert kinds(lifted(noise(0.02), 200, [1e4])) == [("divergence", 201), ("spike_end", 201)]


def test_a_gradient_norm_arms_before_the_loss_moves():
    norms = [1.0 + 0.1 * random.Random(i).random() for i in range(STEPS)]
    norms[195] = 9.0
    points = [
        Point(step=i, loss=x, grad_norm=g)
        for i, (x, g) in enumerate(zip(lifted(noise(0.02), 200, [2] * 30), norms, strict=True))
    ]
    detector = Detector()
    found = [f for p in points[:215] for f in detector.update(p)]
    assert [(f.kind, f.step) for f in found][:2] == [("armed", 195), ("spike", 203)]
    assert detector.find_onset() == 195, "the trouble began with the gradient"
    quiet = Detector()
    for p in points[:196] + [Point(step=i, loss=2.0, grad_norm=1.0) for i in range(196, 210)]:
        quiet.update(p)
    assert quiet.is_calm, "armed for nothing, it calms down"


def test_three_spikes_are_a_pattern():
    losses = noise(0.02)
    for start in (150, 250, 350):
        losses = lifted(losses, start, [2.0] * 6)
    found = [f.kind for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses))]
    assert found.count("spike") == 3 and found.count("chronic") == 1


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=32), st.sampled_from([0.0, 1e-30, 1e30, -1.0, 2.0, math.nan, math.inf])
)


@given(
    st.lists(st.tuples(numbers, st.one_of(st.none(), numbers), st.booleans()), max_size=120),
    st.integers(0, 119),
    st.integers(1, 1000),
)
@settings(max_examples=150)
def test_any_curve_is_taken_and_a_stop_in_the_middle_changes_nothing(rows, cut, stride):
    points = [Point(step=i * stride, loss=a, grad_norm=b, is_skipped=m) for i, (a, b, m) in enumerate(rows)]
    whole, first = Detector(), Detector()
    expected = [repr(f) for p in points for f in whole.update(p)]
    found = [repr(f) for p in points[:cut] for f in first.update(p)]
    second = Detector(state=json.loads(json.dumps(first.state())))
    found += [repr(f) for p in points[cut:] for f in second.update(p)]
    assert found == expected
    assert repr(whole.state()) == repr(second.state())


@given(st.floats(1e-3, 1e3), st.integers(0, 20))
@settings(max_examples=30)
def test_the_unit_of_the_loss_does_not_matter(scale, seed):
    losses = lifted(noise(0.03, seed=seed), 250, [1.7, 1.6, 1.6, 1.5, 1.5, 1.4])
    assert kinds([loss * scale for loss in losses]) == kinds(losses) == [("spike", 251), ("spike_end", 251)]


def test_a_point_costs_little_and_memory_is_bounded():
    """In calls of functions, which another process does not change as it does seconds."""
    detector = Detector()
    points = [Point(step=i, loss=loss, grad_norm=1.0) for i, loss in enumerate(noise(0.1, steps=5000))]

    def update(part):
        for point in part:
            detector.update(point)

    early, _ = function_calls(update, points[1000:2000])
    late, _ = function_calls(update, points[2000:])
    assert early / 1000 < 300
    assert late / 3000 < 1.05 * early / 1000, "a point costs no more after many"
    assert len(json.dumps(detector.state())) < 20_000


# --- behind a steep descent
FALLS, PLATEAUS, DAMAGES, SEEDS = (25, 40, 100), (5, 10, 20, 40, 100), (1.5, 2, 3, "rise"), range(20)


def descent(fall, plateau, damage, seed, scale=0.05, straight=True):
    """Make a curve that falls from 10.8 to 3.4 within ``fall`` points, stays there for ``plateau`` points, and is then damaged:
    the loss times ``damage``, or a ``rise`` of 0.3 a point; with None, 200 more points. One point in twenty has three times
    the noise."""
    rng = random.Random(f"{fall} {plateau} {damage} {seed} {scale} {straight}")
    losses = []
    for i in range(fall + plateau + (40 if damage else 200)):
        left = max(0.0, 1 - i / fall) if straight else math.exp(-4 * i / fall)
        behind = i - fall - plateau + 1
        lifted_by = 0 if damage is None or behind <= 0 else 0.3 * behind if damage == "rise" else 3.4 * (damage - 1)
        losses.append(3.4 + 7.4 * left + lifted_by + rng.gauss(0, scale) * (3 if rng.random() < 0.05 else 1))
    return losses


def rolls_back(losses, first):
    points = [Point(step=i, loss=x) for i, x in enumerate(losses)]
    return any(f.needs_action and f.step >= first for f in replay(points, Detector()))


def alarms(losses):
    return any(f.alarm for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses)))


def assert_bounds(falls, plateaus, damages, **shape):
    for fall, plateau in itertools.product(falls, plateaus):
        for damage in damages:
            found = sum(rolls_back(descent(fall, plateau, damage, seed, **shape), fall + plateau) for seed in SEEDS)
            assert found >= 18, f"{found} of 20: fall {fall}, plateau {plateau}, {damage}, {shape}"
        false = sum(alarms(descent(fall, plateau, None, seed, **shape)) for seed in SEEDS)
        assert false <= 1, f"{false} of 20 false: fall {fall}, plateau {plateau}, {shape}"


def test_damage_right_behind_a_steep_descent_is_found():
    assert_bounds((25, 100), (10,), (2, "rise"))


@pytest.mark.full
@pytest.mark.parametrize("straight", [True, False], ids=["straight", "exponential"])
@pytest.mark.parametrize("scale", [0.03, 0.1])
def test_the_whole_grid_of_descents(scale, straight):
    assert_bounds(FALLS, PLATEAUS, DAMAGES, scale=scale, straight=straight)


def test_a_state_with_residuals_in_units_of_the_loss_loads():
    """Checkpoints of earlier versions have such a state."""
    losses = lifted(noise(0.02), 300, [1.8] * 40)
    points = [Point(step=i, loss=loss, grad_norm=1 + 0.1 * (i % 3)) for i, loss in enumerate(losses)]
    first = Detector()
    for point in points[:200]:
        first.update(point)
    state = json.loads(json.dumps(first.state()))
    level = first.loss.level()
    for name, unit in (("loss", level), ("norm", 1.0)):
        series = state[name]
        shares = series.pop("residuals")
        state[name] = {"near": series["near"], "excess": [share * unit for share in shares], "first": series["first"]}
    second = Detector(state=state)
    assert second.unit() == pytest.approx(first.unit(), rel=0.2)
    found = [f.kind for point in points[200:] for f in second.update(point) if f.alarm]
    assert found == ["spike", "divergence"]


# --- young runs, and curves whose noise is no normal noise
def seeds_with(question, make):
    """Return for how many of twenty seeds ``question`` is true of the losses that ``make`` makes."""
    return sum(question(make(random.Random(seed))) for seed in SEEDS)


def finetune(rng, at=None, factor=1.0):
    """60 losses of a finetune that falls from 3.2 to 1.2, times ``factor`` from point ``at`` on."""
    losses = [1.2 + 2 * math.exp(-i / 6) + rng.gauss(0, 0.04) for i in range(60)]
    return losses if at is None else lifted(losses, at, [factor] * 60)


@pytest.mark.parametrize(("at", "factor", "least"), [(10, 1.5, 16), (12, 1.5, 16), (20, 1.3, 16), (40, 1.3, 17)])
def test_a_short_run_is_protected_from_its_first_steps_on(at, factor, least):
    assert seeds_with(lambda losses: rolls_back(losses, at), lambda rng: finetune(rng, at, factor)) >= least
    assert seeds_with(alarms, finetune) == 0


def test_first_updates_that_overshoot_after_a_steep_fall_are_no_damage():
    def swinging(rng):
        return [1e6 * (math.exp(-i / 9) * math.cos(i / 4)) ** 2 + rng.uniform(10, 20) for i in range(100)]

    assert seeds_with(lambda losses: any(step <= 24 for _, step in kinds(losses)), swinging) == 0


def test_a_loss_that_is_destroyed_at_its_second_step_is_found():
    assert kinds([1.6, 11.8, 11.6, *[10.4] * 8])[:2] == [("spike", 2), ("divergence", 2)]
    detector = Detector()
    for step, loss in enumerate([0.68, 0.66, 0.67, 0.65, *[4.39] * 8]):
        detector.update(Point(step=step, loss=loss))
    assert detector.is_far_above(4.39, detector.best), "the warning at the end needs no long history"


def correlated(rng, share=0.8):
    """500 losses that fall to 2, with noise of a standard deviation of 0.1 whose points resemble the ones before."""
    losses, deviation = [], 0.0
    for i in range(500):
        deviation = share * deviation + rng.gauss(0, 0.1 * math.sqrt(1 - share**2))
        losses.append(2 + 1.5 * math.exp(-i / 60) + deviation)
    return losses


def test_noise_whose_points_resemble_their_neighbours_is_noise():
    assert seeds_with(alarms, correlated) <= 2


def test_noise_around_zero_is_noise():
    losses_near_0 = lambda rng: [0.5 * math.exp(-i / 60) + rng.gauss(0, 0.1) for i in range(500)]  # noqa: E731
    assert seeds_with(alarms, losses_near_0) == 0


@pytest.mark.parametrize("low", [0.3, 0.1])
@pytest.mark.parametrize("points", [4, 8, 11])
def test_a_short_stretch_of_easy_data_is_no_level(low, points):
    def with_easy_data(rng):
        return lifted([2.0 + rng.gauss(0, 0.05) for _ in range(300)], 200, [low] * points)

    assert seeds_with(alarms, with_easy_data) == 0


def test_a_spike_that_falls_back_soon_but_not_wholly_is_found():
    def spiked(rng):
        return lifted([2.0 + rng.gauss(0, 0.03) for _ in range(100)], 60, [1.4, 1.3, 1.2, 1.055, 1.055, 1.02])

    assert seeds_with(alarms, spiked) >= 15


def mean_since_the_epoch_began(rng):
    """The losses of a log with the mean of the losses since the epoch began, for 20 epochs of 66 steps."""
    losses = []
    for _ in range(20):
        total = 0.0
        for step in range(1, 67):
            total += rng.gauss(1.0, 0.15)
            losses.append(total / step)
    return losses


def test_the_restarts_of_a_mean_are_noise_and_damage_among_them_is_found():
    # The first ten epochs show how far the mean jumps.
    settled = 10 * 66

    def late_alarms(losses):
        points = [Point(step=step, loss=loss) for step, loss in enumerate(losses)]
        return any(finding.alarm and finding.onset >= settled for finding in replay(points))

    def damaged(rng):
        return [loss * (1 if step < 900 else 1.6) for step, loss in enumerate(mean_since_the_epoch_began(rng))]

    assert seeds_with(late_alarms, mean_since_the_epoch_began) <= 6
    assert seeds_with(late_alarms, damaged) == 20


def test_single_high_points_among_usual_ones_are_noise():
    def with_other_batches(rng):
        losses = [2.0 + rng.gauss(0, 0.03) for _ in range(400)]
        for step in range(300, 340, 3):
            losses[step] += 0.25
        return losses

    assert seeds_with(alarms, with_other_batches) <= 1


def restarted(rng, height):
    """500 losses and rates of a cosine schedule with a restart every 125 steps, each of which lifts the loss by ``height``."""
    points = []
    for i in range(500):
        rate = 1e-6 + 1e-4 * (1 + math.cos(math.pi * (i % 125) / 125)) / 2
        lift = height * math.exp(-(i % 125) / 25) if i >= 125 else 0
        points.append(Point(step=i, loss=2 + 1.5 * math.exp(-i / 60) + rng.gauss(0, 0.05) + lift, learning_rate=rate))
    return points


def test_restarts_of_the_rate_and_small_steps_of_the_data_are_not_rolled_back():
    acts = lambda points: any(f.needs_action for f in replay(points))  # noqa: E731
    assert seeds_with(acts, lambda rng: restarted(rng, 0.6)) <= 1

    def mixture(rng):
        return [2 + 1.5 * math.exp(-i / 60) + rng.gauss(0, 0.05) + 0.3 * (i >= 250) for i in range(500)]

    assert seeds_with(lambda losses: rolls_back(losses, 0), mixture) <= 1


# --- a gradient norm that is evidence against the weights
def shocked(rise, norm=1.3e6):
    """A descent, at steps 40 and 41 losses of 9.3 and 11.3 with gradient norms of ``norm``, then ``rise`` a step."""
    rng = random.Random(1)
    points = []
    for i in range(160):
        loss = 3.4 + 7.4 * max(0.0, 1 - i / 25) + rng.gauss(0, 0.03) + max(0, i - 41) * rise
        points.append(Point(step=i, loss=loss, grad_norm=1 + 0.2 * rng.random()))
    points[40], points[41] = (replace(p, loss=x, grad_norm=norm) for p, x in zip(points[40:42], (9.3, 11.3), strict=True))
    return points


def test_a_slow_rise_behind_a_huge_gradient_norm_is_no_noise():
    """The losses of a launched run, whose noise is a tenth of the loss: each one of the rise is as near to the one before."""
    falling = [20.2, 17.8, 15.1, 13.6, 12.8, 12.2, 11.8, 11.9, 11.1, 10.7, 8.7, 9.4, 10.6, 8.8, 9.8, 9.6, 9.3, 8.8, 8.7, 8.5]
    falling += [8.6, 7.0, 7.1, 8.1, 9.1, 8.0, 7.6, 7.4, 6.9, 7.2, 6.9, 7.5, 5.9]
    shock = [15.4, 12.5]
    rising = [6.9, 6.6, 7.9, 8.0, 8.0, 8.9, 9.2, 9.3, 9.2, 8.9, 9.4, 9.7, 10.3, 10.4, 10.0, 10.0, 10.0, 10.4, 10.5, 10.0, 11.4]
    norms = [1.5] * len(falling) + [8e6, 6e6] + [7.0] * len(rising)
    detector = Detector()
    kinds = set()
    for step, (loss, norm) in enumerate(zip(falling + shock + rising, norms, strict=True)):
        kinds |= {finding.kind for finding in detector.update(Point(step=step, loss=loss, grad_norm=norm))}
    assert "divergence" in kinds


def test_a_rise_behind_a_huge_gradient_norm_is_damage_of_that_step():
    for rise, last in ((0.07, 60), (0.01, 104)):
        detector = Detector()
        for point in shocked(rise):
            found = detector.update(point)
            assert not [f for f in found if "the data, not the weights" in f.reason]
            if [f for f in found if f.needs_action]:
                break
        assert 45 < point.step < last and detector.find_onset() == 40
        stopped = Detector(state=json.loads(json.dumps(detector.state())))
        assert stopped.find_onset() == 40 and stopped.state() == detector.state()
        assert stopped.is_far_above(4.0, stopped.best) and not stopped.is_far_above(3.4, stopped.best)
    assert not [f for f in replay(shocked(0.01, norm=1.1)) if f.needs_action], "with usual norms, so slow a rise is followed"


def test_a_huge_gradient_norm_with_nothing_behind_it_calms_down_and_does_not_blind():
    detector = Detector()
    calm_at = []
    for point in shocked(0):
        assert not [f for f in detector.update(point) if f.alarm]
        calm_at += [point.step] if detector.is_calm else []
    assert calm_at[-1] == 159 and not [step for step in calm_at if 40 <= step < 100], "watched for 64 points"
    jump = [replace(p, loss=p.loss * (1.3 if p.step >= 48 else 1)) for p in shocked(0)]
    assert [f.onset for f in replay(jump) if f.needs_action] == [48]


def test_a_state_from_before_the_shock_was_known_loads():
    first, points = Detector(), shocked(0.07)
    for point in points[:41]:
        first.update(point)
    state = first.state()
    del state["shock"], state["excursion"]["touched"]
    second = Detector(state=json.loads(json.dumps(state)))
    assert [f.kind for p in points[41:] for f in second.update(p) if f.needs_action]


def test_nothing_here_needs_torch():
    import subprocess

    modules = "zerobook.cli.runlog, zerobook.runlog.report, zerobook.monitor.policy"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True, timeout=60)


def test_sets_of_curves_are_judged_with_each_point_as_a_step(tmp_path, capsys):
    diverges = lifted(noise(0.02), 200, [5.0] * 200)
    (tmp_path / "curves").mkdir()
    for name, losses in {"a.csv": noise(0.02), "b.csv": diverges}.items():
        rows = "".join(f"{i * 50},{x}\n" for i, x in enumerate(losses))
        (tmp_path / "curves" / name).write_text(f"step,loss\n{rows}")
    event = {"onset": 200 * 50, "points": 200, "recovered": None, "kind": "divergence"}
    labels = {
        "a.csv": {"label": "healthy", "source_repo": "a/a", "events": []},
        "b.csv": {"label": "divergence", "source_repo": "b/b", "events": [event]},
    }
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    assert main(["sets", str(tmp_path)]) == 0
    assert "| 2 | 800 | 1/1 | 0/0 | 0/0 | 0/0 | 0/1 | 0/1 |" in capsys.readouterr().out


def first_is_low(rng):
    """A noisy loss whose first point is a third of its level."""
    return [0.4, *(1.2 + 0.3 * rng.gauss(0, 1) for _ in range(60))]


def around_zero(rng):
    return [0.01 * rng.gauss(0, 1) for _ in range(60)]


def grown_from_zero(rng):
    """The loss of a KL term: zero before the first update, and tiny later."""
    return [0.0, *(1e-5 * step * math.exp(0.3 * rng.gauss(0, 1)) for step in range(1, 61))]


@pytest.mark.parametrize("curve", [first_is_low, around_zero, grown_from_zero])
def test_noise_is_no_damage_in_the_first_steps(curve):
    def is_acted_on(seed):
        points = (Point(step=step, loss=loss) for step, loss in enumerate(curve(random.Random(seed)), start=1))
        return any(finding.needs_action for finding in replay(points))

    assert sum(map(is_acted_on, range(20))) <= 1


@pytest.mark.parametrize("start", [[2.0, 2.1, 3.5, 7.5, 7.4, 7.3], [1.2, 1.25, 2.0, 4.6, 4.5, 4.6]])
def test_a_run_that_is_destroyed_in_its_first_steps_is_found_soon(start):
    rng = random.Random(0)
    losses = start + [start[-1] + 0.01 * rng.gauss(0, 1) for _ in range(30)]
    found = [f.step for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses, 1)) if f.needs_action]
    assert found and found[0] <= 12


def test_a_run_that_dies_after_one_batch_without_labels_is_dead():
    losses = [*noise(0.03)[:100], 0.0, *noise(0.03)[:100], *[0.0] * 10]
    found = [f for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses)) if "exactly 0" in f.reason]
    assert [f.step for f in found] == [204]


@pytest.mark.parametrize(("norm", "zeros", "is_dead"), [(0.5, 45, True), (0.5, 39, False), (0.004, 45, False)])
def test_a_run_whose_gradients_stay_exactly_zero_is_dead(norm, zeros, is_dead):
    losses = noise(0.03)[:100]
    points = [Point(step=i, loss=x, grad_norm=0.0 if 30 <= i < 30 + zeros else norm) for i, x in enumerate(losses)]
    found = [(f.kind, f.onset, f.step) for f in replay(points) if "gradient was exactly 0" in f.reason]
    assert found == [("divergence", 30, 69)] * is_dead


def test_a_loss_that_is_often_exactly_zero_is_not_dead():
    rng = random.Random(0)
    losses = [max(0.0, 1 - step / 100 + rng.gauss(0, 0.7)) for step in range(200)]
    assert losses.count(0.0) > 60
    assert not [f for f in replay(Point(step=i, loss=x) for i, x in enumerate(losses)) if "exactly 0" in f.reason]
