"""Find and classify loss spikes. The detector gets one logged point at a time. It reports findings and takes no action.

*   Level: the median of the last `Settings.level_points` accepted points. While a run is young and its loss falls fast, it is
    the median of the last 7. Excess of a point: ``(loss - level) / unit``.
*   Unit: an estimate of the noise, ``max(q95(r) / 1.645, 1.4826 median(|r|), 1.3 q95(e) / 1.645, min_unit * level)``. For
    normally distributed noise, the first two terms are the standard deviation. A residual ``r`` is the distance of an accepted
    point from the median of the ``level_points // 2 + 1`` points around it (Tukey's running median, "Exploratory Data
    Analysis", 1977), as a share of the loss. The level is not used for residuals, since it lags behind a falling loss. So a
    steep descent does not inflate the unit; heavy-tailed, bimodal and periodic noise does. ``e`` is the distance of an
    accepted point above the level: it is larger than ``r`` if neighbouring points have similar noise. High points change
    neither the level nor the unit.
*   Evidence: the sum over points of the excess, at most `Settings.evidence_cap`, minus `Settings.drift` (one-sided CUSUM: Page,
    "Continuous inspection schemes", Biometrika 1954). An alarm also needs high points over more steps than an outlier, and
    at least half of the points must be high.
*   Dip: a range of points far below the level, after which the loss is back at it. It is noise too: the loss may then also
    rise as far as it fell in the deepest dip.
*   Excursion: the points from a high one on, until the loss is back at the level or at a new one. Its shape decides what it
    is: the loss is normal again at once, falls back slowly, stays at a new level, or rises.
*   Slow rise: the level stays far above its lowest value, although no point was high.
*   Shock: a gradient norm of `Settings.shock_factor` times its level, which may damage the weights. The level before the shock
    and its unit are kept for eight times `Settings.patience` points. During this time a slow rise changes neither of them, and
    no new level is accepted.

The defaults were chosen on public logs. docs/guides/detector.md has the results, and `scripts/detector.py` computes them.
"""

import math
from dataclasses import asdict
from statistics import median
from typing import Any

from zerobook.monitor.baseline import Baseline, LossBaseline
from zerobook.monitor.excursion import Excursion
from zerobook.monitor.finding import Finding, Point
from zerobook.monitor.settings import Settings

# Points within which spikes are counted for a ``chronic`` finding.
CHRONIC_POINTS = 1000
# Among the first seven points, only a loss of this many times the level is high: after one, two, and three or more accepted
# points. From three points on, their median is not a single low loss.
EARLY_FACTORS = (4.0, 4.0, 3.0)
# Smallest level that counts in this comparison. Losses around 0 can have any ratio to each other.
EARLY_LEVEL = 1 / 3
# If the loss falls by this factor within its first points, the first updates may overshoot. The loss of a language model does
# not fall as fast.
STEEP_FALL = 20
# After an overshoot, the loss is still smaller than the first loss by more than this factor.
SMALL_RETURN = 8
# After so many series of at most three zeros, zeros are usual in this data. Batches without supervised tokens are rarer.
USUAL_SERIES = 3
# After so many gradients of exactly 0 in a row, a run is dead. Healthy runs in public logs have at most seven.
STILL_STEPS = 40
# If the usual gradient norm is smaller than this, a log may have rounded a norm to 0.
ROUNDED_NORM = 0.01
# A loss of exactly 0 right after a level above this is a fault: the loss of a model that has learnt everything falls to 0 step
# by step.
DEAD_LEVEL = 0.02


class Detector:
    """Finds spikes in a loss curve. Pass points to `update`; `state` and ``Detector(settings, state)`` save and restore it.

    >>> detector = Detector()
    >>> findings = [f for step in range(60) for f in detector.update(Point(step=step, loss=2.0 + (step in (40, 41)) * 3))]
    >>> [(f.kind, f.onset, f.points) for f in findings if f.kind != "armed"]
    [('outlier', 40, 2)]

    Attributes:
        loss: level and unit of the loss.
        norm: level and unit of the logarithm of the gradient norm.
        seen: number of points so far.
        last_step: step of the newest point.
        evidence: sum of the evidence for a spike.
        last_rate: the newest learning rate.
        armed: step with a very high loss or gradient norm, after which a spike is likely; None if there is none.
        armed_at: value of ``seen`` at that step.
        shock: level of the loss before the last shock; None if there is none.
        shock_unit: unit of the loss at that time.
        best: the lowest level so far.
        lowest: the lowest level since the last new level.
        lowest_at: step of that level.
        risen: number of points in a row at which the level was far above ``lowest``.
        zeros: steps of the series of losses of exactly 0 that goes on; no longer than needed for a finding.
        zero_series: number of short series of zeros that other losses have followed, as in hinge losses.
        still: steps of the series of gradients of exactly 0 that goes on; no longer than needed for a finding.
        not_finite: steps of the series of losses or gradients that are not finite, if it goes on.
        spikes: values of ``seen`` at the newest alarms.
        chronic: whether the ``chronic`` finding was reported.
        excursion: the excursion that goes on; None if there is none.
    """

    def __init__(self, settings: Settings | None = None, state: dict[str, Any] | None = None):
        self.settings = settings or Settings()
        state = state or {}
        self.loss = LossBaseline(
            self.settings.level_points,
            self.settings.unit_points,
            self.settings.min_unit,
            self.settings.min_unit_at_start,
            state.get("loss"),
        )
        self.norm = Baseline(self.settings.level_points, self.settings.unit_points, state.get("norm"))
        self.seen: int = state.get("seen", 0)
        self.last_step: int | None = state.get("last_step")
        self.last_rate: float | None = state.get("last_rate")
        self.evidence: float = state.get("evidence", 0.0)
        self.armed: int | None = state.get("armed")
        self.armed_at: int = state.get("armed_at", 0)
        self.shock: float | None = state.get("shock")
        self.shock_unit: float | None = state.get("shock_unit")
        self.best: float | None = state.get("best")
        self.lowest: float | None = state.get("lowest")
        self.lowest_at: int = state.get("lowest_at", 0)
        self.risen: int = state.get("risen", 0)
        self.zeros: list[int] = state.get("zeros", [])
        self.zero_series: int = state.get("zero_series", 0)
        self.still: list[int] = state.get("still", [])
        self.not_finite: list[int] = state.get("masked", [])
        self.spikes: list[int] = state.get("spikes", [])
        self.chronic: bool = state.get("chronic", False)
        self.excursion: Excursion | None = None
        if state.get("excursion"):
            excursion = dict(state["excursion"])
            # States of earlier versions have two more keys.
            excursion.pop("steps", None)
            excursion.pop("rate", None)
            self.excursion = Excursion(**excursion)

    def state(self) -> dict[str, Any]:
        """Return the complete state, JSON-ready. Keys keep their names, since checkpoints of earlier versions have them."""
        return {
            "loss": self.loss.state(),
            "norm": self.norm.state(),
            "seen": self.seen,
            "last_step": self.last_step,
            "last_rate": self.last_rate,
            "evidence": self.evidence,
            "armed": self.armed,
            "armed_at": self.armed_at,
            "shock": self.shock,
            "shock_unit": self.shock_unit,
            "best": self.best,
            "lowest": self.lowest,
            "lowest_at": self.lowest_at,
            "risen": self.risen,
            "zeros": list(self.zeros),
            "zero_series": self.zero_series,
            "still": list(self.still),
            "masked": list(self.not_finite),
            "spikes": list(self.spikes),
            "chronic": self.chronic,
            "excursion": None if self.excursion is None else asdict(self.excursion),
        }

    @property
    def is_calm(self) -> bool:
        """True if the detector is neither armed nor in an excursion, and the last loss and gradient were finite and not 0."""
        is_sound = not self.not_finite and not self.zeros and not self.still
        return self.armed is None and self.excursion is None and is_sound

    @property
    def has_level(self) -> bool:
        return len(self.loss.accepted) > 0

    def find_onset(self) -> int | None:
        """Return the step from which on the weights may be damaged; None if the detector is calm (see `is_calm`).

        It is the earliest of the step that armed the detector, the onset of the excursion, and the first step of a series of
        losses or gradients that are 0 or not finite.
        """
        steps = []
        for series in (self.not_finite, self.zeros, self.still):
            steps += series[:1]
        if self.armed is not None:
            steps.append(self.armed)
        if self.excursion is not None:
            steps.append(self.excursion.onset)
        return min(steps, default=None)

    def level(self) -> float:
        """Return the level with which the next loss is compared."""
        level = self.loss.level() if self.excursion is None else self.excursion.base
        # After a shock, a slow rise of the loss does not raise the level.
        if self.shock is not None:
            level = min(level, self.shock)
        return level

    def unit(self) -> float:
        """Return the unit of the loss: an estimate of its noise that corresponds to one standard deviation."""
        unit = self.loss.unit()
        # Nor does a slow rise after a shock make the unit larger.
        if self.shock_unit is not None:
            unit = min(unit, self.shock_unit)
        return unit

    def is_far_above(self, value: float, best: float) -> bool:
        """Return whether ``value`` is at least `Settings.high` units above ``best``, or is NaN."""
        # A comparison with NaN is false. With ``not <`` instead of ``>=``, NaN counts as far above.
        return self.has_level and not value - best < self.settings.high * self.unit()

    def update(self, point: Point) -> list[Finding]:
        """Process the next point, and return its findings. For most points there are none."""
        self.seen += 1
        # Steps since the last point.
        stride = 1
        if self.last_step is not None:
            stride = max(1, point.step - self.last_step)
        self.last_step = point.step
        if not point.is_finite:
            return self._process_not_finite(point)
        self.not_finite.clear()
        if self.is_dead(point):
            return self._process_zero(point)
        # The loss has come back from a short series of zeros, so zeros may be usual in this data.
        if 0 < len(self.zeros) <= self.settings.outlier_steps:
            self.zero_series += 1
        self.zeros.clear()
        if point.learning_rate is not None:
            self.last_rate = point.learning_rate
        # Process the norm before the loss: a shock at this step changes what its loss is compared with.
        findings = self._process_zero_gradient(point) + self._process_norm(point)
        return findings + self._process_loss(point, stride) + self._process_level(point)

    def finish(self) -> list[Finding]:
        """End the series: judge a spike that has not come back. Return the findings."""
        excursion = self.excursion
        if excursion is None or not excursion.confirmed or excursion.judged is not None or self.not_finite:
            return []
        assert self.last_step is not None
        return self._judge(excursion, Point(step=self.last_step, loss=excursion.losses[-1]), at_end=True)

    def accept_level(self, point: Point, reason: str) -> Finding:
        """End the excursion, and take its losses as the new level and noise. ``reason`` explains why they are harmless."""
        excursion = self.excursion
        assert excursion is not None
        losses = excursion.losses[-self.settings.level_points :]
        self.close_excursion(losses)
        level = self.loss.level()
        # Their distances from the new level are its noise.
        for loss in losses:
            self.loss.learn(loss - level, level)
        # Do not compare later losses with the best level from before the new one.
        self.best = None
        return self.finding_of("level_shift", point, excursion, reason)

    # --- not finite
    def _process_not_finite(self, point: Point) -> list[Finding]:
        self.not_finite.append(point.step)
        count = len(self.not_finite)
        # The update was applied although the loss is not finite, so the weights are damaged.
        if not point.is_skipped:
            return [self._make_finding("divergence", point, "the loss is not finite")]
        # The optimizer skipped the update, so a single such step changes nothing.
        if count == 1:
            return [self._make_finding("outlier", point, "the gradient is not finite; the step was not applied")]
        # A longer series is reported once, when it is too long for an outlier.
        if count == self.settings.outlier_steps + 1:
            return [self._make_finding("divergence", point, f"the gradient was not finite in {count} steps in a row")]
        return []

    def is_dead(self, point: Point) -> bool:
        """Return whether the loss is exactly 0 after a level far above 0, and zeros are not usual in this data."""
        if self.zero_series >= USUAL_SERIES or point.loss != 0.0:
            return False
        return self.has_level and self.loss.level() > DEAD_LEVEL

    def _process_zero(self, point: Point) -> list[Finding]:
        """Process a loss of exactly 0: of a batch without supervised tokens, or a NaN that a trainer has logged as 0."""
        needed_points = self.settings.outlier_steps + 1
        # The finding was reported already.
        if len(self.zeros) == needed_points:
            return []
        self.zeros.append(point.step)
        if len(self.zeros) < needed_points:
            return []
        reason = f"the loss was exactly 0 at {needed_points} points in a row, where {self.loss.level():.4g} was usual"
        return [self._make_finding("divergence", point, reason)]

    def _process_zero_gradient(self, point: Point) -> list[Finding]:
        """Report a long series of gradients of exactly 0: the weights are destroyed, and do not learn any more."""
        has_norms = len(self.norm.accepted) > 0 and self.norm.level() > math.log(ROUNDED_NORM)
        if point.grad_norm != 0.0 or point.loss <= DEAD_LEVEL or not has_norms:
            self.still.clear()
            return []
        # The finding was reported already.
        if len(self.still) == STILL_STEPS:
            return []
        self.still.append(point.step)
        if len(self.still) < STILL_STEPS:
            return []
        return [self._make_finding("divergence", point, f"the gradient was exactly 0 at {STILL_STEPS} points in a row")]

    # --- the gradient norm, which often rises before the loss
    # Arm the detector if the gradient norm is far too high, and keep the level of the loss before a shock. Other norms are
    # accepted into the level of the norm. Disarm the detector after a while without a spike.
    def _process_norm(self, point: Point) -> list[Finding]:
        settings = self.settings
        # Disarm if no spike has followed. This also forgets the level before a shock, so wait longer after one.
        patience = settings.patience
        if self.shock is not None:
            patience *= settings.long_patience
        if self.armed is not None and self.excursion is None and self.seen - self.armed_at > patience:
            self._disarm()
        norm = point.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return []
        log_norm = math.log(norm)
        # The first norms have no level to be compared with.
        if len(self.norm.accepted) < settings.level_points:
            self.norm.accept(log_norm)
            return []
        # The logarithm of the ratio of the norm to its level. A usual excess is below `Settings.precursor` units of the noise.
        excess = log_norm - self.norm.level()
        if excess < settings.precursor * max(self.norm.upper_unit(), settings.min_norm_unit):
            self.norm.accept(log_norm)
            return []

        # The norm is far too high.
        is_shock = excess >= math.log(settings.shock_factor) and self.shock is None and self.has_level
        findings = []
        if is_shock or (self.armed is None and self.excursion is None):
            usual = math.exp(self.norm.level())
            reason = f"gradient norm {norm:.3g}, {norm / usual:.3g} times the usual {usual:.3g}"
            findings.append(self._arm(point, reason))
        if is_shock:
            # These two are of the loss.
            self.shock = self.level()
            self.shock_unit = self.unit()
        return findings

    def _arm(self, point: Point, reason: str) -> Finding:
        self.armed = point.step
        self.armed_at = self.seen
        return self._make_finding("armed", point, reason)

    def _disarm(self) -> None:
        self.armed = None
        self.shock = None
        self.shock_unit = None

    # --- the loss
    def _process_loss(self, point: Point, stride: int) -> list[Finding]:
        excursion = self.excursion
        # The first loss has no level to be compared with.
        if not self.has_level:
            self.loss.accept(point.loss)
            return []
        if excursion is None and (self._is_early_noise(point.loss) or self._is_overshoot(point.loss)):
            self.loss.accept(point.loss)
            return []
        # A spike that was judged already is not reported again, however high it rises.
        is_judged = excursion is not None and excursion.judged is not None
        if self._is_absurd(point.loss) and not is_judged:
            return [self._report_absurd(point)]
        if excursion is None or not excursion.confirmed:
            return self._process_unconfirmed(point, stride)
        return self._process_spike(excursion, point)

    def _is_early_noise(self, loss: float) -> bool:
        """Return whether the loss of one of the first points is usual. The level may be several times too low by chance."""
        # The last factor is for all later points, too.
        factor = EARLY_FACTORS[min(len(self.loss.accepted), len(EARLY_FACTORS)) - 1]
        return self.loss.has_no_noise and loss < factor * max(abs(self.loss.level()), EARLY_LEVEL)

    def _is_overshoot(self, loss: float) -> bool:
        """Return whether the first updates have removed nearly all of the loss, and went too far, so that it rises again."""
        assert self.loss.first is not None
        is_start = self.seen <= self.settings.level_points
        return is_start and STEEP_FALL * abs(self.loss.level()) < self.loss.first and SMALL_RETURN * loss < self.loss.first

    def _is_absurd(self, loss: float) -> bool:
        assert self.loss.first is not None
        # It is also compared with 1 nat, since losses near 0 can have any ratio to each other.
        return loss > self.settings.absurd_factor * max(abs(self.loss.level()), abs(self.loss.first), 1.0)

    # Reports a divergence at once. No later points are needed for this verdict.
    def _report_absurd(self, point: Point) -> Finding:
        excursion = self._extend_excursion(point)
        excursion.confirmed = True
        excursion.judge("divergence")
        reason = f"a loss of {point.loss:.4g}: no data does that to sound weights"
        return self.finding_of("divergence", point, excursion, reason)

    def _extend_excursion(self, point: Point) -> Excursion:
        """Add a point to the excursion, and return it. If there is none, it begins here."""
        if self.excursion is None:
            self.excursion = Excursion(onset=point.step, base=self.level(), unit=self.unit())
        self.excursion.add(point.loss)
        return self.excursion

    # --- no alarm yet
    # Processes a loss while no alarm is raised. Raises the alarm if there is enough evidence for a spike.
    def _process_unconfirmed(self, point: Point, stride: int) -> list[Finding]:
        settings = self.settings
        excursion = self.excursion
        base = self.level()
        unit = self.unit() if excursion is None else excursion.unit
        excess = (point.loss - base) / unit
        self.evidence = max(0.0, self.evidence + min(excess, settings.evidence_cap) - settings.drift)

        # A high point. After the first high points of an excursion, a somewhat lower point counts as high too.
        is_begun = excursion is not None and excursion.high >= settings.min_high_points
        needed_excess = settings.still_high if is_begun else settings.high
        if excess >= needed_excess:
            excursion = self._extend_excursion(point)
            excursion.high += 1
            # A spike has more high points than an outlier can have. If the points are several steps apart, these are fewer.
            needed_points = max(settings.min_high_points, math.ceil(settings.outlier_steps / stride) + 1)
            # Single high points among usual ones are noise of another shape, and no spike.
            are_most_high = 2 * excursion.high >= len(excursion.losses)
            if self.evidence >= settings.evidence and excursion.high >= needed_points and are_most_high:
                return self._confirm(excursion, point, excess)
            if self.armed is None and excess >= settings.evidence_cap:
                return [self._arm(point, f"loss {point.loss:.4g} where {base:.4g} was usual")]
            return []

        # A usual point.
        if excursion is None:
            self.loss.accept(point.loss)
            return []
        excursion.add(point.loss)
        # Usual points reduce the evidence. The excursion ends when none is left.
        if self.evidence > 0.0:
            return []
        return self._end_as_outlier(excursion, point)

    def _end_as_outlier(self, excursion: Excursion, point: Point) -> list[Finding]:
        """End an excursion that came back at once. Report it if it was high enough."""
        settings = self.settings
        self.excursion = None
        # After a shock the detector stays armed, since damage may appear later.
        if self.shock is None:
            self.armed = None
        findings = []
        # Smaller excursions are noise, and not reported.
        if excursion.peak - excursion.base >= settings.evidence_cap * excursion.unit:
            plural = "s" if excursion.high > 1 else ""
            cause = "the data, not the weights"
            if self.shock is not None:
                cause = "the gradient norm was far too high, so the weights may be damaged"
            reason = (
                f"{excursion.high} point{plural} up to {excursion.peak:.4g} where {excursion.base:.4g} is usual, and back at "
                f"once: {cause}"
            )
            findings.append(self.finding_of("outlier", point, excursion, reason))
        # High points do not change the level, but they make the unit larger: if one point in twenty is as high, that is normal
        # for this data.
        for loss in excursion.losses:
            residual = loss - excursion.base
            if residual < settings.high * excursion.unit:
                self.loss.accept(loss)
            else:
                self.loss.learn(residual, excursion.base)
        return findings

    def _confirm(self, excursion: Excursion, point: Point, excess: float) -> list[Finding]:
        """Raise the alarm."""
        excursion.confirmed = True
        recent_spikes = [spike for spike in self.spikes if self.seen - spike < CHRONIC_POINTS]
        self.spikes = [*recent_spikes, self.seen]
        reason = (
            f"loss {excursion.base:.4g} -> {excursion.peak:.4g}: {excursion.high} high points since step {excursion.onset}; "
            f"the last one, {point.loss:.4g}, exceeds the level by {excess:.0f} times the noise ({excursion.unit:.2g})"
        )
        findings = [self.finding_of("spike", point, excursion, reason)]
        if len(self.spikes) >= self.settings.chronic_spikes and not self.chronic:
            self.chronic = True
            reason = f"{len(self.spikes)} spikes within {CHRONIC_POINTS} points: the rate is too high"
            findings.append(self.finding_of("chronic", point, excursion, reason))
        return findings + self._judge(excursion, point)

    # --- inside a confirmed spike
    # Processes a loss after the alarm: finds out whether the spike ends, is damage or a divergence, or is a new level.
    def _process_spike(self, excursion: Excursion, point: Point) -> list[Finding]:
        settings = self.settings
        base = excursion.base
        excursion.add(point.loss)
        new_run = self.see_new_run(excursion, point)
        if new_run:
            return new_run

        # Two points in a row that are back at the base end the spike. After a high spike, they need not be as close to it.
        tolerance = max(2 * excursion.unit, min(0.1 * (excursion.peak - base), 0.25 * abs(base)))
        if point.loss - base < tolerance:
            excursion.back += 1
            excursion.touched = excursion.judged is not None
            if excursion.back < 2:
                return []
            # The level is computed anew from the base and the points that came back to it.
            self.close_excursion([base, *excursion.losses[-2:]], is_settled=False)
            reason = f"back at {point.loss:.4g} after {excursion.points} points; it peaked at {excursion.peak:.4g}"
            return [self.finding_of("spike_end", point, excursion, reason)]
        excursion.back = 0

        # The loss is still high.
        if excursion.judged is None:
            return self._judge(excursion, point)
        count = len(excursion.losses)
        if excursion.is_worse_than_judged(settings.patience):
            excursion.judge("divergence")
            excursion.touched = False
            reason = f"from {base:.4g} to {point.loss:.4g} in {count} points: it is higher than when it was judged"
            return [self.finding_of("divergence", point, excursion, reason)]
        if count >= settings.long_patience * settings.patience:
            self.close_excursion(excursion.losses[-settings.level_points :])
            reason = f"still {self.loss.level():.4g} after {count} points, {base:.4g} before: taken as the new level"
            return [self.finding_of("level_shift", point, excursion, reason)]
        return []

    def _judge(self, excursion: Excursion, point: Point, *, at_end: bool = False) -> list[Finding]:
        """Judge an excursion when the patience is over: it is coming back, a new level, damage or a divergence.

        Args:
            at_end: the log ends here, so judge it even if the patience is not over.
        """
        base = excursion.base
        losses = excursion.losses
        count = len(losses)
        if count < self.settings.patience * (1 + excursion.extended) and not at_end:
            return []
        # Compare medians of three losses, so that no single loss decides.
        top = max(median(losses[first : first + 3]) for first in range(max(1, count - 2)))
        late = median(losses[-3:])
        # The share of the rise by which the loss has come down again.
        regained = (top - late) / (top - base)
        # The loss is nearly back. Wait for another patience, at most three times.
        if regained >= 2 / 3 and excursion.extended < 3:
            excursion.extended += 1
            return []

        new_run = self.see_new_run(excursion, point)
        if new_run:
            return new_run
        # The loss stays high for a harmless reason.
        cause = self._explain_rise(excursion, late)
        if regained < 0.5 and cause is not None:
            self.close_excursion(losses[-self.settings.level_points :])
            reason = f"from {base:.4g} to {late:.4g}, and level since: {cause}"
            return [self.finding_of("level_shift", point, excursion, reason)]

        # The loss is coming down, but too slowly.
        if regained >= 0.2:
            excursion.judge("damage")
            reason = (
                f"in {count} points since step {excursion.onset}, the loss has fallen back only to {late:.4g} (median of the "
                f"last 3); before, it was {base:.4g}"
            )
            return [self.finding_of("damage", point, excursion, reason)]
        # The loss is not coming down.
        excursion.judge("divergence")
        reason = f"from {base:.4g} to {late:.4g} in {count} points, and not coming down"
        return [self.finding_of("divergence", point, excursion, reason)]

    def see_new_run(self, excursion: Excursion, point: Point) -> list[Finding]:
        """End the excursion if another run begins here. A log may have several runs; a live run is one, so nothing happens."""
        return []

    def _explain_rise(self, excursion: Excursion, new_level: float) -> str | None:
        """Return a harmless explanation for a rise of the loss to ``new_level``, in words; None if there is none."""
        # A shock may have damaged the weights, so no rise after it is harmless.
        if self.shock is not None:
            return None
        previous_level = excursion.base
        reference = self.loss.reference_loss(previous_level)
        settings = self.settings
        # Several small rises add up to a large one, so compare with the lowest level since the last rise that was accepted.
        lowest_level = previous_level if self.lowest is None else min(previous_level, self.lowest)
        # The level of a young run lags behind a falling loss, so the true rise is larger, and half of it is allowed.
        max_share = settings.small_rise / 2 if self.loss.is_young else settings.small_rise
        if new_level - lowest_level < max_share * reference:
            return "a small rise, as other data cause"
        return self.explain_large_rise(previous_level, new_level, new_level - lowest_level)

    def explain_large_rise(self, previous_level: float, new_level: float, rise: float) -> str | None:
        """Return a harmless explanation for a rise that is not small, in words; None if there is none.

        There is none here: in a live run, `SpikeMonitor` knows the announced events. A detector for logs overrides this.

        Args:
            rise: of the new level above the lowest one since the last accepted rise.
        """
        return None

    def close_excursion(self, losses: list[float], *, is_settled: bool = True) -> None:
        """End the excursion, and compute the level anew from ``losses``.

        Args:
            is_settled: whether the level is final, so that a shock is over too.
        """
        self.loss.move(losses)
        self.excursion = None
        self.evidence = 0.0
        if is_settled or self.shock is None:
            self._disarm()
        if is_settled:
            self.lowest = None
            self.risen = 0

    # --- the level
    def _process_level(self, point: Point) -> list[Finding]:
        """Remember the lowest level, and report a level that has slowly risen far above it."""
        # The median of two points is no reliable level yet.
        if len(self.loss.accepted) < 3:
            return []
        level = self.loss.level()
        self.best = level if self.best is None else min(self.best, level)
        if self.lowest is None or level < self.lowest:
            self.lowest = level
            self.lowest_at = point.step
        # A spike is judged by other rules, and the level after a spike is the median of few points.
        settings = self.settings
        if self.excursion is not None or len(self.loss.accepted) < settings.level_points:
            return []
        rise = level - self.lowest
        is_far = (
            rise > settings.slow_rise * self.loss.reference_loss(self.lowest)
            and rise > settings.high * self.loss.residual_unit()
        )
        # Count points in a row: a point that is not far above starts the count again.
        if is_far:
            self.risen += 1
        else:
            self.risen = 0
        if self.risen < settings.level_points:
            return []
        # A change in the training data may cause a slow rise, but not one of twice the reported size.
        is_divergence = rise > 2 * settings.slow_rise * self.loss.reference_loss(self.lowest)
        finding = Finding(
            kind="divergence" if is_divergence else "slow_rise",
            step=point.step,
            onset=self.lowest_at,
            points=self.risen,
            base=self.lowest,
            peak=level,
            is_slow=True,
            reason=f"the level has risen from {self.lowest:.4g} to {level:.4g} since step {self.lowest_at}, without a spike",
        )
        self.lowest = level
        self.risen = 0
        return [finding]

    # --- findings
    def _make_finding(self, kind: str, point: Point, reason: str) -> Finding:
        """Return a finding about a point that belongs to no excursion."""
        # If the loss or the gradient is not finite or 0, the finding is about the series of such points that ends here.
        steps = self.not_finite or self.zeros or self.still or [point.step]
        base = self.loss.level() if self.has_level else point.loss
        return Finding(
            kind=kind,
            step=point.step,
            onset=steps[0],
            points=len(steps),
            base=base,
            peak=point.loss,
            reason=reason,
            finite=point.is_finite,
        )

    def finding_of(self, kind: str, point: Point, excursion: Excursion, reason: str) -> Finding:
        """Return a finding about an excursion."""
        return Finding(
            kind=kind,
            step=point.step,
            onset=excursion.onset,
            points=excursion.high if kind == "outlier" else excursion.points,
            base=excursion.base,
            peak=excursion.peak,
            reason=reason,
        )
