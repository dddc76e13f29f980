"""Find and classify loss spikes. The detector gets one logged point at a time, and carries out no measures.

*   Level: the median of the last ``near`` accepted points. Excess of a point: ``(loss - level) / unit``.
*   Unit: what one standard deviation is to normal noise, ``max(q95(r) / 1.645, 1.4826 median(|r|), least * level)``, where the
    residuals ``r`` are distances from the trend, not from the level, which lags behind it: each accepted point is compared
    with the median of the ``near // 2 + 1`` points around it (Tukey's running median, "Exploratory Data Analysis", 1977).
    A steep descent therefore does not make the unit large, and heavy tails, two-mode noise and periodic data do.
    Points judged high enter neither level nor unit.
*   Evidence: excesses, each at most ``cap``, are added up less ``drift`` (one-sided CUSUM: Page, "Continuous inspection
    schemes", Biometrika 1954). An alarm also needs high points over more steps than odd data lasts.
*   Shape: an excursion comes back at once, comes back slowly, steps to a new level, rises, or repeats the run's beginning.
*   Shock: a gradient norm ``shock`` times the usual is evidence against the weights. The level before it is
    kept for eight times ``patience`` points: a slow rise after it is not followed, and no new level is accepted.

The defaults were chosen on public logs; docs/guides/detector.md has the table, and `scripts/detector_table.py` makes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the detector. Points are logged points; excesses are in units of the usual residual."""

    near: int = 24
    """accepted points whose median is the level"""
    window: int = 128
    """accepted points whose residuals give the unit"""
    least: float = 0.02
    """smallest unit, as a share of the level"""
    young: float = 0.15
    """smallest unit without history, as a share of the level; shrinks over the first ``near`` points"""
    high: float = 3.0
    """excess of a point that may belong to a spike and is kept out of the baseline"""
    drift: float = 1.5
    """evidence subtracted at each point"""
    cap: float = 4.0
    """evidence that one point can add, before the drift"""
    evidence: float = 5.0
    """sum of evidence that raises an alarm"""
    outlier_steps: int = 3
    """odd data lasts this many steps at most"""
    patience: int = 8
    """points that a spike may take to come back before it counts as damage"""
    absurd: float = 100.0
    """factor above the level, or above the run's first loss, that no data causes with sound weights"""
    precursor: float = 8.0
    """excess of a gradient norm that arms the detector"""
    shock: float = 1000.0
    """factor above the usual gradient norm that is evidence against the weights, whatever the loss is at that step"""
    chronic: int = 3
    """spikes within 1000 points that make a ``chronic`` finding"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One logged point, all values reduced over ranks."""

    step: int
    loss: float
    """nats per supervised token; any finite number, or not finite"""
    grad_norm: float | None = None
    learning_rate: float | None = None
    masked: bool = False
    """the update was not applied, since a gradient was not finite"""


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
    def asks(self) -> bool:
        """True if the finding asks for a rollback."""
        return self.kind in ("damage", "divergence")


class _Rolling:
    """The last ``size`` numbers, and their quantiles in O(log size)."""

    def __init__(self, size: int, values: list[float] | None = None):
        self.size = size
        self.order: deque[float] = deque()
        self.sorted: list[float] = []
        for value in values or []:
            self.add(value)

    def __len__(self) -> int:
        return len(self.order)

    def add(self, value: float) -> None:
        self.order.append(value)
        insort(self.sorted, value)
        if len(self.order) > self.size:
            del self.sorted[bisect_left(self.sorted, self.order.popleft())]

    def quantile(self, share: float) -> float:
        place = share * (len(self.sorted) - 1)
        below = int(place)
        above = min(below + 1, len(self.sorted) - 1)
        return self.sorted[below] + (self.sorted[above] - self.sorted[below]) * (place - below)


class _Series:
    """The level of a series, and the residuals from its trend."""

    def __init__(self, settings: Settings, state: dict[str, Any] | None = None):
        self.settings = settings
        state = state or {"near": [], "excess": [], "first": None}
        self.near = _Rolling(settings.near, state["near"])
        self.excess = _Rolling(settings.window, state["excess"])
        self.size = _Rolling(4 * settings.near, [abs(value) for value in state["excess"]])
        self.first: float | None = state["first"]

    def level(self) -> float:
        return self.near.quantile(0.5)

    def unit(self) -> float:
        """Return the usual residual, which estimates the standard deviation of normal noise: from the 95th percentile above the
        trend, and from the median distance to it."""
        level, s = self.level(), self.settings
        assert self.first is not None
        scale = max(abs(level), 0.02 * abs(self.first - level), 1e-12)
        above = self.excess.quantile(0.95) / 1.645 if len(self.excess) else 0.0
        # from both sides: a unit from upper residuals alone, once too small, would reject the points that could correct it
        around = 1.4826 * self.size.quantile(0.5) if len(self.size) else 0.0
        return max(above, around, s.least * scale, s.young * scale * (1 - len(self.excess) / s.near))

    def accept(self, value: float) -> None:
        if self.first is None:
            self.first = value
        self.near.add(value)
        width = self.settings.near // 2 + 1
        around = list(self.near.order)[-width:]
        if len(around) == width or len(around) % 2:  # a short history has a new middle with every second point
            self.learn(around[len(around) // 2] - median(around))

    def learn(self, residual: float) -> None:
        """Add a residual, without changing the level."""
        self.excess.add(residual)
        self.size.add(abs(residual))

    def move(self, values: list[float]) -> None:
        """Set the level to that of ``values``, without changing the residuals."""
        self.near = _Rolling(self.settings.near, values)

    def state(self) -> dict[str, Any]:
        return {"near": list(self.near.order), "excess": list(self.excess.order), "first": self.first}


@dataclass
class _Excursion:
    """A stretch of high points that has not come back to the level yet."""

    onset: int
    base: float
    unit: float
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    high: int = 0
    """points above ``Settings.high``"""
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


_BEGINNING = 8
_RECENT = 32
_KEPT = 512


class Detector:
    """Finds spikes in a loss curve. Pass points to `update`; `state` and ``Detector(settings, state)`` save and restore it.

    >>> detector = Detector()
    >>> found = [f for step in range(60) for f in detector.update(Point(step=step, loss=2.0 + (step in (40, 41)) * 3))]
    >>> [(f.kind, f.onset, f.points) for f in found if f.kind != "armed"]
    [('outlier', 40, 2)]
    """

    def __init__(self, settings: Settings | None = None, state: dict[str, Any] | None = None):
        self.settings = settings or Settings()
        state = state or {}
        self.loss = _Series(self.settings, state.get("loss"))
        self.norm = _Series(self.settings, state.get("norm"))
        self.seen: int = state.get("seen", 0)
        self.last_step: int | None = state.get("last_step")
        self.evidence: float = state.get("evidence", 0.0)
        self.beginning: list[float] = state.get("beginning", [])
        self.rates: list[float] = state.get("rates", [])
        self.armed: int | None = state.get("armed")
        self.armed_at: int = state.get("armed_at", 0)
        self.shock: float | None = state.get("shock")
        """level before a gradient norm that is evidence against the weights"""
        self.best: float | None = state.get("best")
        """the lowest level so far"""
        self.masked: list[int] = state.get("masked", [])
        self.spikes: list[int] = state.get("spikes", [])
        self.chronic: bool = state.get("chronic", False)
        self.excursion = _Excursion(**state["excursion"]) if state.get("excursion") else None

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
            "masked": list(self.masked),
            "spikes": list(self.spikes),
            "chronic": self.chronic,
            "excursion": asdict(self.excursion) if self.excursion else None,
        }

    @property
    def calm(self) -> bool:
        """True if the detector is neither armed nor inside an excursion, and the last point was finite."""
        return self.armed is None and self.excursion is None and not self.masked

    def onset(self) -> int | None:
        """Return the first step of the current disturbance, which is its precursor if there was one; None when calm."""
        onset = self.excursion.onset if self.excursion else None
        begun = [s for s in (self.armed, onset, *self.masked[:1]) if s is not None]
        return min(begun) if begun else None

    def update(self, point: Point) -> list[Finding]:
        """Process the next point, and return its findings, mostly none."""
        found: list[Finding] = []
        self.seen += 1
        stride = max(1, point.step - self.last_step) if self.last_step is not None else 1
        self.last_step = point.step
        if not self._finite(point, found):
            return found
        loss = point.loss
        if len(self.beginning) < _BEGINNING:
            self.beginning.append(loss)
        if point.learning_rate is not None:
            self.rates = [*self.rates[-_RECENT + 1 :], point.learning_rate]
        self._watch_norm(point, found)
        if not len(self.loss.near):
            self.loss.accept(loss)
        elif self._absurd(loss) and not (self.excursion and self.excursion.judged):
            self.excursion = self.excursion or self._begin(point)
            self.excursion.confirmed, self.excursion.judged = True, "divergence"
            self._extend(point)
            self.excursion.peak_then = self.excursion.peak
            found.append(
                self._ended("divergence", point, self.excursion, f"a loss of {loss:.4g}: no data does that to sound weights")
            )
        elif self.excursion is None or not self.excursion.confirmed:
            self._calm_point(point, stride, found)
        else:
            self._spike_point(point, found)
        if len(self.loss.near) >= self.settings.patience:
            level = self.loss.level()
            self.best = level if self.best is None else min(self.best, level)
        return found

    def far_above(self, value: float, best: float) -> bool:
        """Return whether ``value`` is at least `Settings.high` units above ``best``, or is not a number."""
        return len(self.loss.near) > 0 and not value - best < self.settings.high * self.loss.unit()

    def finish(self) -> list[Finding]:
        """End the series, and judge an excursion that has not come back."""
        found: list[Finding] = []
        open_spike = self.excursion is not None and self.excursion.confirmed and self.excursion.judged is None
        if open_spike and not self.masked:
            assert self.excursion is not None
            point = Point(step=self.excursion.steps[-1], loss=self.excursion.losses[-1])
            self._judge(point, found, at_end=True)
        return found

    # --- not finite
    def _finite(self, point: Point, found: list[Finding]) -> bool:
        if math.isfinite(point.loss) and not point.masked:
            self.masked.clear()
            return True
        self.masked.append(point.step)
        count, loss = len(self.masked), "the gradient" if point.masked else "the loss"
        if not point.masked:
            found.append(self._finding("divergence", point, f"{loss} is not finite"))
        elif count == 1:
            found.append(self._finding("outlier", point, f"{loss} is not finite; the step was not applied"))
        elif count == self.settings.outlier_steps + 1:
            found.append(self._finding("divergence", point, f"{loss} was not finite in {count} steps in a row"))
        return False

    def _absurd(self, loss: float) -> bool:
        assert self.loss.first is not None
        return loss > self.settings.absurd * max(abs(self.loss.level()), abs(self.loss.first), 1.0)

    # --- the gradient norm, which often moves first
    def _watch_norm(self, point: Point, found: list[Finding]) -> None:
        s = self.settings
        lasts = s.patience * (1 if self.shock is None else 8)
        if self.armed is not None and self.excursion is None and self.seen - self.armed_at > lasts:
            self.armed = self.shock = None
        norm = point.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return
        value = math.log(norm)
        if len(self.norm.near) < s.near:
            self.norm.accept(value)
            return
        # the logarithm is a ratio already, so its level is no part of the unit: a tenfold norm must look the same in every run
        usual = max(self.norm.excess.quantile(0.95) / 1.645, 0.1)
        above = value - self.norm.level()
        if above < s.precursor * usual:
            self.norm.accept(value)
            return
        shocks = above >= math.log(s.shock) and self.shock is None and len(self.loss.near) > 0
        if shocks or (self.armed is None and self.excursion is None):
            before = math.exp(self.norm.level())
            self._arm(point, f"gradient norm {norm:.3g}, {norm / before:.3g} times the usual {before:.3g}", found)
        if shocks:
            self.shock = self.level()

    def level(self) -> float:
        """Return what the next loss is compared with."""
        level = self.excursion.base if self.excursion else self.loss.level()
        return level if self.shock is None else min(level, self.shock)

    def _arm(self, point: Point, reason: str, found: list[Finding]) -> None:
        self.armed, self.armed_at = point.step, self.seen
        found.append(self._finding("armed", point, reason))

    # --- no alarm yet
    def _calm_point(self, point: Point, stride: int, found: list[Finding]) -> None:
        s, loss = self.settings, point.loss
        base = self.level()
        unit = self.excursion.unit if self.excursion else self.loss.unit()
        excess = (loss - base) / unit
        self.evidence = max(0.0, self.evidence + min(excess, s.cap) - s.drift)
        if excess >= s.high:
            self.excursion = self.excursion or self._begin(point)
            self._extend(point)
            self.excursion.high += 1
            enough = math.ceil(s.outlier_steps / stride) + 1
            if self.evidence >= s.evidence and self.excursion.high >= enough:
                self._confirm(point, excess, found)
            elif self.armed is None and excess >= s.cap:
                self._arm(point, f"loss {loss:.4g} where {base:.4g} was usual", found)
            return
        if self.excursion is None:
            self.loss.accept(loss)
            return
        self._extend(point)
        if self.evidence == 0.0:
            gone, self.excursion = self.excursion, None
            if self.shock is None:
                self.armed = None
            if max(gone.losses) - gone.base >= s.cap * gone.unit:
                found.append(self._ended("outlier", point, gone, _outlier_words(gone, self.shock is not None)))
            # These points do not change the level. But if one point in twenty is as high, that is normal for this data.
            for value in gone.losses:
                if value - gone.base < s.high * gone.unit:
                    self.loss.accept(value)
                else:
                    self.loss.learn(value - gone.base)

    def _begin(self, point: Point) -> _Excursion:
        rate = self.rates[-1] if self.rates else None
        return _Excursion(onset=point.step, base=self.level(), unit=self.loss.unit(), rate=rate)

    def _extend(self, point: Point) -> None:
        assert self.excursion is not None
        self.excursion.steps.append(point.step)
        self.excursion.losses.append(point.loss)
        del self.excursion.steps[_KEPT:-1], self.excursion.losses[_KEPT:-1]

    def _confirm(self, point: Point, excess: float, found: list[Finding]) -> None:
        s, now = self.settings, self.excursion
        assert now is not None
        now.confirmed = True
        self.spikes = [*(at for at in self.spikes if self.seen - at < 1000), self.seen]
        found.append(
            self._ended(
                "spike", point, now,
                f"loss {now.base:.4g} -> {now.peak:.4g}: {now.high} high points since step {now.onset}, the last "
                f"{excess:.0f} times the usual excess of {now.unit:.2g}",
            )
        )  # fmt: skip
        if len(self.spikes) >= s.chronic and not self.chronic:
            self.chronic = True
            found.append(
                self._ended("chronic", point, now, f"{len(self.spikes)} spikes within 1000 points: the rate is too high")
            )
        self._judge(point, found)

    # --- inside a confirmed spike
    def _spike_point(self, point: Point, found: list[Finding]) -> None:
        now, s = self.excursion, self.settings
        assert now is not None
        self._extend(point)
        if self._begins_again(now):
            self._close(now.losses[-1:])
            words = f"from {now.base:.4g} back to {now.peak:.4g}, and down again as at the beginning of the run"
            found.append(self._ended("reset", point, now, words))
            return
        if point.loss - now.base < max(2 * now.unit, min(0.1 * (now.peak - now.base), 0.25 * abs(now.base))):
            now.back += 1
            now.touched = now.judged is not None
            if now.back == 2:
                points = len(now.losses) - now.back
                words = f"back at {point.loss:.4g} after {points} points; it peaked at {now.peak:.4g}"
                self._close([now.base, *now.losses[-2:]], settled=False)
                found.append(self._ended("spike_end", point, now, words))
            return
        now.back = 0
        if now.judged is None:
            self._judge(point, found)
        elif (
            (now.judged == "damage" or now.touched)
            and len(now.losses) >= 2 * s.patience
            and median(now.losses[-3:]) > now.peak_then
        ):
            now.judged, now.peak_then, now.touched = "divergence", now.peak, False
            words = f"from {now.base:.4g} to {point.loss:.4g} in {len(now.losses)} points: it was coming down, and rises again"
            found.append(self._ended("divergence", point, now, words))
        elif len(now.losses) >= 8 * s.patience:
            self._close(now.losses[-s.near :])
            level = self.loss.level()
            words = f"still {level:.4g} after {len(now.losses)} points, {now.base:.4g} before: taken as the new level"
            found.append(self._ended("level_shift", point, now, words))

    def _judge(self, point: Point, found: list[Finding], at_end: bool = False) -> None:
        """Judge an excursion after the patience: coming back, a new level, damage or divergence."""
        now, s = self.excursion, self.settings
        assert now is not None
        if len(now.losses) < s.patience * (1 + now.extended) and not at_end:
            return
        late = median(now.losses[-3:])
        top = max(median(now.losses[i : i + 3]) for i in range(max(1, len(now.losses) - 2)))
        regained = (top - late) / (top - now.base)
        assert self.loss.first is not None
        fall = self.loss.first - now.base
        lost = (late - now.base) / fall if fall > 0 else math.inf
        if regained >= 2 / 3 and now.extended < 3:
            now.extended += 1
        elif self.shock is None and self._explained(now) and lost < 0.1 and late < now.base + abs(now.base) and regained < 0.5:
            self._close(now.losses[-s.near :])
            words = f"from {now.base:.4g} to {late:.4g}, {lost:.0%} of all that was learnt, and level since"
            found.append(self._ended("level_shift", point, now, words))
        elif regained >= 0.2:
            now.judged, now.peak_then = "damage", now.peak
            words = f"{len(now.losses)} points after step {now.onset} it is {late:.4g}; it was {now.base:.4g}"
            found.append(self._ended("damage", point, now, words))
        else:
            now.judged, now.peak_then = "divergence", now.peak
            words = f"from {now.base:.4g} to {late:.4g} in {len(now.losses)} points, and not coming down"
            found.append(self._ended("divergence", point, now, words))

    def _begins_again(self, now: _Excursion) -> bool:
        pairs = [(a, b) for a, b in zip(now.losses, self.beginning, strict=False) if a > 0 and b > 0]
        # halved: on bad data, the loss may start at that of an untrained model too, but it does not fall as fast
        falls = len(pairs) >= 3 and pairs[-1][0] < 0.5 * pairs[0][0]
        return falls and max(abs(math.log(a / b)) for a, b in pairs) < 0.15

    def _explained(self, now: _Excursion) -> bool:
        """Return whether a raised learning rate can explain a step to a new level; True if the rate is not known."""
        return now.rate is None or not self.rates or max(self.rates) > 1.2 * min(self.rates)

    def _close(self, level: list[float], *, settled: bool = True) -> None:
        """End the excursion, and set the level. ``settled``: the level is final, so a shock is over too."""
        self.loss.move(level)
        self.excursion, self.evidence = None, 0.0
        if settled or self.shock is None:
            self.armed = self.shock = None

    # --- words
    def _finding(self, kind: str, point: Point, reason: str) -> Finding:
        base = self.loss.level() if len(self.loss.near) else point.loss
        onset = self.masked[0] if self.masked else point.step
        return Finding(
            kind=kind,
            step=point.step,
            onset=onset,
            points=max(1, len(self.masked)),
            base=base,
            peak=point.loss,
            reason=reason,
            finite=math.isfinite(point.loss) and not point.masked,
        )

    def _ended(self, kind: str, point: Point, now: _Excursion, reason: str) -> Finding:
        points = now.high if kind == "outlier" else len(now.losses) - now.back
        return Finding(kind=kind, step=point.step, onset=now.onset, points=points, base=now.base, peak=now.peak, reason=reason)


def _outlier_words(gone: _Excursion, shock: bool) -> str:
    count = f"{gone.high} point" + "s" * (gone.high > 1)
    cause = "the gradient norm was far too high, so the weights may be damaged" if shock else "the data, not the weights"
    return f"{count} up to {gone.peak:.4g} where {gone.base:.4g} is usual, and back at once: {cause}"
