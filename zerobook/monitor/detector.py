"""Find and classify loss spikes. The detector gets one logged point at a time. It reports findings and takes no action.

*   Level: the median of the last `Settings.level_points` accepted points. Excess of a point: ``(loss - level) / unit``.
*   Unit: an estimate of the noise, ``max(q95(r) / 1.645, 1.4826 median(|r|), min_unit * level)``. For normally distributed
    noise, the first two terms are the standard deviation. A residual ``r`` is the distance of an accepted point from the median
    of the ``level_points // 2 + 1`` points around it (Tukey's running median, "Exploratory Data Analysis", 1977). The level is
    not used for residuals, since it lags behind a falling loss. So a steep descent does not make the unit large. Heavy tails,
    noise with two modes and periodic data do. High points change neither the level nor the unit.
*   Evidence: the sum over points of the excess, at most `Settings.evidence_cap`, minus `Settings.drift` (one-sided CUSUM: Page,
    "Continuous inspection schemes", Biometrika 1954). An alarm also needs high points over more steps than odd data has.
*   Shape: the loss is normal again at once, falls back slowly, stays at a new level, rises, or repeats the run's beginning.
*   Shock: a gradient norm of `Settings.shock_factor` times its level, which may damage the weights. The level before the shock
    is kept for eight times `Settings.patience` points. Meanwhile it does not follow a slow rise, and no new level is accepted.

The defaults were chosen on public logs. docs/guides/detector.md has the results, and `scripts/detector.py` computes them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from zerobook.monitor.baseline import Baseline

BEGINNING_POINTS = 8
"""Points at the beginning of the run that are kept, to recognise a run that starts again from its first losses."""
RECENT_RATES = 32
"""Points whose learning rates are remembered."""
MAX_EXCURSION_POINTS = 512
"""Points of an excursion that are remembered from its onset on, besides the newest one."""
CHRONIC_POINTS = 1000
"""Points within which spikes are counted for a ``chronic`` finding."""
LONG_PATIENCE = 8
"""Factor on the patience after a shock, and until a loss that stays high is taken as the new level."""
MIN_NORM_UNIT = 0.1
"""Smallest unit of the logarithm of the gradient norm. A logarithm is a ratio already, so its level is no part of it: a tenfold
norm must look the same in every run."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the detector. Points are logged points; excesses are in units of the usual residual."""

    level_points: int = 24
    """accepted points whose median is the level"""
    unit_points: int = 128
    """accepted points whose residuals give the unit"""
    min_unit: float = 0.02
    """smallest unit, as a share of the level"""
    min_unit_at_start: float = 0.15
    """smallest unit without history, as a share of the level; shrinks over the first ``level_points`` points"""
    high: float = 3.0
    """excess of a point that may belong to a spike and is kept out of the baseline"""
    drift: float = 1.5
    """evidence subtracted at each point"""
    evidence_cap: float = 4.0
    """evidence that one point can add, before the drift"""
    evidence: float = 5.0
    """sum of evidence that raises an alarm"""
    outlier_steps: int = 3
    """odd data lasts this many steps at most"""
    patience: int = 8
    """points that a spike may take to come back before it counts as damage"""
    absurd_factor: float = 100.0
    """factor above the level, or above the run's first loss, that no data causes with sound weights"""
    precursor: float = 8.0
    """excess of a gradient norm that arms the detector"""
    shock_factor: float = 1000.0
    """a gradient norm of this factor times its level is a shock, whatever the loss is at that step"""
    chronic_spikes: int = 3
    """spikes within 1000 points that make a ``chronic`` finding"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One logged point, all values reduced over ranks."""

    step: int
    loss: float
    """nats per supervised token; any finite number, or not finite"""
    grad_norm: float | None = None
    learning_rate: float | None = None
    is_skipped: bool = False
    """the update was not applied, since a gradient was not finite"""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and not self.is_skipped


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An observation on the curve. ``kind`` is one of

    ``armed``        a gradient norm or a first high loss that may announce a spike
    ``outlier``      high for as long as odd data lasts, and back
    ``spike``        an alarm: high for longer than odd data lasts
    ``spike_end``    the loss came back
    ``damage``       the loss did not come back in time
    ``divergence``   the loss rises, stays high without coming down, or is not finite
    ``level_shift``  a moderate step to a new level, which is the baseline now
    ``reset``        the run's own beginning again: weights were initialised anew
    ``chronic``      spikes so often that the learning rate is the cause
    """

    kind: str
    step: int
    """step at which it was noticed"""
    onset: int
    """step at which it began"""
    points: int
    """logged points since the onset"""
    base: float
    """level before the onset"""
    peak: float
    reason: str
    """reason in words"""
    finite: bool = True
    """False where a loss or a gradient was not finite"""

    @property
    def alarm(self) -> bool:
        return self.kind in ("spike", "damage", "divergence")

    @property
    def needs_action(self) -> bool:
        """True if something has to be done about it: the weights are, or will be, damaged."""
        return self.kind in ("damage", "divergence")


@dataclass
class _Excursion:
    """A range of high points that has not come back to the level yet."""

    onset: int
    base: float
    unit: float
    losses: list[float] = field(default_factory=list)
    high: int = 0
    """points above `Settings.high`"""
    back: int = 0
    """points in a row that were at the base again"""
    confirmed: bool = False
    judged: str | None = None
    """``damage`` or ``divergence``, once reported"""
    peak_then: float = 0.0
    """the peak at that report"""
    touched: bool = False
    """a point was at the base again since that report"""
    extended: int = 0
    """number of extensions of the patience, while the loss was coming back"""
    rate: float | None = None
    """learning rate at the onset"""

    @property
    def peak(self) -> float:
        return max(self.losses)

    @property
    def points(self) -> int:
        """Points from the onset to the last one that was not back at the base."""
        return len(self.losses) - self.back

    def add(self, loss: float) -> None:
        self.losses.append(loss)
        del self.losses[MAX_EXCURSION_POINTS:-1]

    def judge(self, kind: str) -> None:
        """Remember a verdict, and the peak at that moment."""
        self.judged = kind
        self.peak_then = self.peak


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
        evidence: sum of the evidence for a spike.
        beginning: the first losses of the run.
        rates: the newest learning rates.
        armed: step with a very high loss or gradient norm, after which a spike is likely; None if there is none.
        armed_at: value of ``seen`` at that step.
        shock: level of the loss before the last shock; None if there is none.
        best: the lowest level so far.
        not_finite: steps of the newest points, if their loss or gradient was not finite.
        spikes: values of ``seen`` at the newest alarms.
        chronic: whether the ``chronic`` finding was reported.
    """

    def __init__(self, settings: Settings | None = None, state: dict[str, Any] | None = None):
        self.settings = settings or Settings()
        state = state or {}
        self.loss = self._baseline(state.get("loss"))
        self.norm = self._baseline(state.get("norm"))
        self.seen: int = state.get("seen", 0)
        self.last_step: int | None = state.get("last_step")
        self.evidence: float = state.get("evidence", 0.0)
        self.beginning: list[float] = state.get("beginning", [])
        self.rates: list[float] = state.get("rates", [])
        self.armed: int | None = state.get("armed")
        self.armed_at: int = state.get("armed_at", 0)
        self.shock: float | None = state.get("shock")
        self.best: float | None = state.get("best")
        self.not_finite: list[int] = state.get("masked", [])
        self.spikes: list[int] = state.get("spikes", [])
        self.chronic: bool = state.get("chronic", False)
        self.excursion: _Excursion | None = None
        if state.get("excursion"):
            excursion = dict(state["excursion"])
            # Earlier versions wrote the steps of the losses too.
            excursion.pop("steps", None)
            self.excursion = _Excursion(**excursion)

    def state(self) -> dict[str, Any]:
        """Return the complete state, JSON-ready."""
        return {
            "loss": self.loss.state(),
            "norm": self.norm.state(),
            "seen": self.seen,
            "last_step": self.last_step,
            "evidence": self.evidence,
            "beginning": list(self.beginning),
            "rates": list(self.rates),
            "armed": self.armed,
            "armed_at": self.armed_at,
            "shock": self.shock,
            "best": self.best,
            "masked": list(self.not_finite),
            "spikes": list(self.spikes),
            "chronic": self.chronic,
            "excursion": None if self.excursion is None else asdict(self.excursion),
        }

    @property
    def calm(self) -> bool:
        """True if the detector is neither armed nor inside an excursion, and the last point was finite."""
        return self.armed is None and self.excursion is None and not self.not_finite

    @property
    def has_level(self) -> bool:
        return len(self.loss.accepted) > 0

    def onset(self) -> int | None:
        """Return the first step of the current disturbance, which is its precursor if there was one; None when calm."""
        # Only before the earliest of these steps were the weights undamaged.
        steps = self.not_finite[:1]
        if self.armed is not None:
            steps.append(self.armed)
        if self.excursion is not None:
            steps.append(self.excursion.onset)
        return min(steps, default=None)

    def level(self) -> float:
        """Return what the next loss is compared with."""
        level = self.loss.level() if self.excursion is None else self.excursion.base
        # After a shock, a level that slowly rises is not followed.
        if self.shock is not None:
            level = min(level, self.shock)
        return level

    def unit(self) -> float:
        """Return the usual residual of the loss: what one standard deviation is to normal noise."""
        return self.loss.unit(self.settings.min_unit, self.settings.min_unit_at_start)

    def far_above(self, value: float, best: float) -> bool:
        """Return whether ``value`` is at least `Settings.high` units above ``best``, or is not a number."""
        # Negated, so that a NaN is far above.
        return self.has_level and not value - best < self.settings.high * self.unit()

    def update(self, point: Point) -> list[Finding]:
        """Process the next point, and return its findings, mostly none."""
        self.seen += 1
        stride = 1
        if self.last_step is not None:
            stride = max(1, point.step - self.last_step)
        self.last_step = point.step
        if not point.is_finite:
            return self._see_not_finite(point)
        self.not_finite.clear()
        if len(self.beginning) < BEGINNING_POINTS:
            self.beginning.append(point.loss)
        if point.learning_rate is not None:
            self.rates = [*self.rates[-RECENT_RATES + 1 :], point.learning_rate]
        # The norm first: a shock at this step changes what its loss is compared with.
        findings = self._see_norm(point) + self._see_loss(point, stride)
        # A few points have no level yet that a later loss could be compared with.
        if len(self.loss.accepted) >= self.settings.patience:
            level = self.loss.level()
            self.best = level if self.best is None else min(self.best, level)
        return findings

    def finish(self) -> list[Finding]:
        """End the series, and judge an excursion that has not come back."""
        excursion = self.excursion
        if excursion is None or not excursion.confirmed or excursion.judged is not None or self.not_finite:
            return []
        assert self.last_step is not None
        return self._judge(excursion, Point(step=self.last_step, loss=excursion.losses[-1]), at_end=True)

    def accept_level(self, point: Point, reason: str) -> Finding:
        """End the excursion, whose losses are the new level and the new noise, for a reason that the caller knows."""
        excursion = self.excursion
        assert excursion is not None
        losses = excursion.losses[-self.settings.level_points :]
        self._close(losses)
        level = self.loss.level()
        for loss in losses:
            self.loss.learn(loss - level)
        # What comes is not compared with the time before.
        self.best = None
        return self._finding_of("level_shift", point, excursion, reason)

    # --- not finite
    def _see_not_finite(self, point: Point) -> list[Finding]:
        self.not_finite.append(point.step)
        count = len(self.not_finite)
        # The update was applied although the loss is not finite, so the weights are damaged.
        if not point.is_skipped:
            return [self._finding("divergence", point, "the loss is not finite")]
        # The optimizer skipped the update, so a single such step changes nothing.
        if count == 1:
            return [self._finding("outlier", point, "the gradient is not finite; the step was not applied")]
        # A longer series is reported once, at its first step that odd data cannot explain.
        if count == self.settings.outlier_steps + 1:
            return [self._finding("divergence", point, f"the gradient was not finite in {count} steps in a row")]
        return []

    # --- the gradient norm, which often moves first
    def _see_norm(self, point: Point) -> list[Finding]:
        settings = self.settings
        # Armed for nothing: calm down. The level before a shock is remembered for longer.
        patience = settings.patience
        if self.shock is not None:
            patience *= LONG_PATIENCE
        if self.armed is not None and self.excursion is None and self.seen - self.armed_at > patience:
            self._disarm()
        norm = point.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return []
        log_norm = math.log(norm)
        # The first norms have nothing to be compared with.
        if len(self.norm.accepted) < settings.level_points:
            self.norm.accept(log_norm)
            return []
        excess = log_norm - self.norm.level()
        if excess < settings.precursor * max(self.norm.upper_unit(), MIN_NORM_UNIT):
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
            self.shock = self.level()
        return findings

    def _arm(self, point: Point, reason: str) -> Finding:
        self.armed = point.step
        self.armed_at = self.seen
        return self._finding("armed", point, reason)

    def _disarm(self) -> None:
        self.armed = None
        self.shock = None

    # --- the loss
    def _see_loss(self, point: Point, stride: int) -> list[Finding]:
        excursion = self.excursion
        if not self.has_level:
            self.loss.accept(point.loss)
            return []
        # A spike that was judged may rise as it likes: it is reported once.
        is_judged = excursion is not None and excursion.judged is not None
        if self._is_absurd(point.loss) and not is_judged:
            return [self._see_absurd(point)]
        if excursion is None or not excursion.confirmed:
            return self._see_unconfirmed(point, stride)
        return self._see_spike(excursion, point)

    def _is_absurd(self, loss: float) -> bool:
        assert self.loss.first is not None
        return loss > self.settings.absurd_factor * max(abs(self.loss.level()), abs(self.loss.first), 1.0)

    def _see_absurd(self, point: Point) -> Finding:
        excursion = self._extend_excursion(point)
        excursion.confirmed = True
        excursion.judge("divergence")
        reason = f"a loss of {point.loss:.4g}: no data does that to sound weights"
        return self._finding_of("divergence", point, excursion, reason)

    def _extend_excursion(self, point: Point) -> _Excursion:
        """Return the excursion, which begins here if there is none, with this point."""
        if self.excursion is None:
            rate = self.rates[-1] if self.rates else None
            self.excursion = _Excursion(onset=point.step, base=self.level(), unit=self.unit(), rate=rate)
        self.excursion.add(point.loss)
        return self.excursion

    # --- no alarm yet
    def _see_unconfirmed(self, point: Point, stride: int) -> list[Finding]:
        settings = self.settings
        excursion = self.excursion
        base = self.level()
        unit = self.unit() if excursion is None else excursion.unit
        excess = (point.loss - base) / unit
        self.evidence = max(0.0, self.evidence + min(excess, settings.evidence_cap) - settings.drift)

        # A high point.
        if excess >= settings.high:
            excursion = self._extend_excursion(point)
            excursion.high += 1
            # Odd data lasts a number of steps. Where points are far apart, fewer of them span it.
            needed_points = math.ceil(settings.outlier_steps / stride) + 1
            if self.evidence >= settings.evidence and excursion.high >= needed_points:
                return self._confirm(excursion, point, excess)
            if self.armed is None and excess >= settings.evidence_cap:
                return [self._arm(point, f"loss {point.loss:.4g} where {base:.4g} was usual")]
            return []

        # A usual point.
        if excursion is None:
            self.loss.accept(point.loss)
            return []
        excursion.add(point.loss)
        # The evidence of the high points has to be used up by usual ones.
        if self.evidence > 0.0:
            return []
        return self._end_as_outlier(excursion, point)

    def _end_as_outlier(self, excursion: _Excursion, point: Point) -> list[Finding]:
        """End an excursion that came back at once."""
        settings = self.settings
        self.excursion = None
        # Damage by a shock may show later.
        if self.shock is None:
            self.armed = None
        findings = []
        # Smaller excursions are noise, and not worth a line.
        if excursion.peak - excursion.base >= settings.evidence_cap * excursion.unit:
            plural = "s" if excursion.high > 1 else ""
            cause = "the data, not the weights"
            if self.shock is not None:
                cause = "the gradient norm was far too high, so the weights may be damaged"
            reason = (
                f"{excursion.high} point{plural} up to {excursion.peak:.4g} where {excursion.base:.4g} is usual, and back at "
                f"once: {cause}"
            )
            findings.append(self._finding_of("outlier", point, excursion, reason))
        # High points do not change the level. But if one point in twenty is as high, that is normal for this data.
        for loss in excursion.losses:
            residual = loss - excursion.base
            if residual < settings.high * excursion.unit:
                self.loss.accept(loss)
            else:
                self.loss.learn(residual)
        return findings

    def _confirm(self, excursion: _Excursion, point: Point, excess: float) -> list[Finding]:
        """Raise the alarm."""
        excursion.confirmed = True
        recent_spikes = [spike for spike in self.spikes if self.seen - spike < CHRONIC_POINTS]
        self.spikes = [*recent_spikes, self.seen]
        reason = (
            f"loss {excursion.base:.4g} -> {excursion.peak:.4g}: {excursion.high} high points since step {excursion.onset}, "
            f"the last {excess:.0f} times the usual excess of {excursion.unit:.2g}"
        )
        findings = [self._finding_of("spike", point, excursion, reason)]
        if len(self.spikes) >= self.settings.chronic_spikes and not self.chronic:
            self.chronic = True
            reason = f"{len(self.spikes)} spikes within {CHRONIC_POINTS} points: the rate is too high"
            findings.append(self._finding_of("chronic", point, excursion, reason))
        return findings + self._judge(excursion, point)

    # --- inside a confirmed spike
    def _see_spike(self, excursion: _Excursion, point: Point) -> list[Finding]:
        settings = self.settings
        base = excursion.base
        excursion.add(point.loss)
        if self._begins_again(excursion):
            self._close(excursion.losses[-1:])
            reason = f"from {base:.4g} back to {excursion.peak:.4g}, and down again as at the beginning of the run"
            return [self._finding_of("reset", point, excursion, reason)]

        # Back at the base, for one point or for two.
        rise = excursion.peak - base
        # A high spike does not come back to the last digit.
        tolerance = max(2 * excursion.unit, min(0.1 * rise, 0.25 * abs(base)))
        if point.loss - base < tolerance:
            excursion.back += 1
            excursion.touched = excursion.judged is not None
            if excursion.back < 2:
                return []
            # The level begins anew with what is certain: the base, and the points that came back to it.
            self._close([base, *excursion.losses[-2:]], is_settled=False)
            reason = f"back at {point.loss:.4g} after {excursion.points} points; it peaked at {excursion.peak:.4g}"
            return [self._finding_of("spike_end", point, excursion, reason)]
        excursion.back = 0

        # Still high.
        if excursion.judged is None:
            return self._judge(excursion, point)
        count = len(excursion.losses)
        was_coming_down = excursion.judged == "damage" or excursion.touched
        if was_coming_down and count >= 2 * settings.patience and median(excursion.losses[-3:]) > excursion.peak_then:
            excursion.judge("divergence")
            excursion.touched = False
            reason = f"from {base:.4g} to {point.loss:.4g} in {count} points: it was coming down, and rises again"
            return [self._finding_of("divergence", point, excursion, reason)]
        if count >= LONG_PATIENCE * settings.patience:
            self._close(excursion.losses[-settings.level_points :])
            reason = f"still {self.loss.level():.4g} after {count} points, {base:.4g} before: taken as the new level"
            return [self._finding_of("level_shift", point, excursion, reason)]
        return []

    def _judge(self, excursion: _Excursion, point: Point, *, at_end: bool = False) -> list[Finding]:
        """Judge an excursion after the patience: coming back, a new level, damage or divergence."""
        base = excursion.base
        losses = excursion.losses
        count = len(losses)
        if count < self.settings.patience * (1 + excursion.extended) and not at_end:
            return []
        # Medians of three, so that a single point does not decide.
        medians = [median(losses[first : first + 3]) for first in range(max(1, count - 2))]
        top = max(medians)
        late = median(losses[-3:])
        regained = (top - late) / (top - base)
        # Nearly back: wait for another patience.
        if regained >= 2 / 3 and excursion.extended < 3:
            excursion.extended += 1
            return []

        # A new level: a small step, that does not come down either, and that a raised learning rate can explain.
        assert self.loss.first is not None
        learnt = self.loss.first - base
        lost = (late - base) / learnt if learnt > 0 else math.inf
        is_small = lost < 0.1 and late < base + abs(base)
        if is_small and regained < 0.5 and self.shock is None and self._rate_explains(excursion):
            self._close(losses[-self.settings.level_points :])
            reason = f"from {base:.4g} to {late:.4g}, {lost:.0%} of all that was learnt, and level since"
            return [self._finding_of("level_shift", point, excursion, reason)]

        # It is coming down, but too slowly.
        if regained >= 0.2:
            excursion.judge("damage")
            reason = f"{count} points after step {excursion.onset} it is {late:.4g}; it was {base:.4g}"
            return [self._finding_of("damage", point, excursion, reason)]
        excursion.judge("divergence")
        reason = f"from {base:.4g} to {late:.4g} in {count} points, and not coming down"
        return [self._finding_of("divergence", point, excursion, reason)]

    def _begins_again(self, excursion: _Excursion) -> bool:
        """Return whether the losses repeat the beginning of the run."""
        ratios = []
        losses = []
        for loss, first_loss in zip(excursion.losses, self.beginning, strict=False):
            if loss > 0 and first_loss > 0:
                losses.append(loss)
                ratios.append(abs(math.log(loss / first_loss)))
        # Halved: on bad data, the loss may start at that of an untrained model too, but it does not fall as fast.
        return len(losses) >= 3 and losses[-1] < 0.5 * losses[0] and max(ratios) < 0.15

    def _rate_explains(self, excursion: _Excursion) -> bool:
        """Return whether a raised learning rate can explain a step to a new level; True if the rate is not known."""
        return excursion.rate is None or not self.rates or max(self.rates) > 1.2 * min(self.rates)

    def _close(self, level: list[float], *, is_settled: bool = True) -> None:
        """End the excursion, and set the level to that of some losses.

        Args:
            is_settled: the level is final, so a shock is over too.
        """
        self.loss.move(level)
        self.excursion = None
        self.evidence = 0.0
        if is_settled or self.shock is None:
            self._disarm()

    # --- findings
    def _finding(self, kind: str, point: Point, reason: str) -> Finding:
        """Return a finding about a point that belongs to no excursion."""
        # A point that is not finite belongs to those right before it.
        steps = self.not_finite or [point.step]
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

    def _finding_of(self, kind: str, point: Point, excursion: _Excursion, reason: str) -> Finding:
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

    def _baseline(self, state: dict[str, Any] | None) -> Baseline:
        return Baseline(self.settings.level_points, self.settings.unit_points, state)
