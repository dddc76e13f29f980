"""Estimate the level of a series and the size of its usual noise, which is called its *unit*."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

# 95th percentile of normal noise, in standard deviations.
Q95_OF_NORMAL = 1.645
# Ratio of the standard deviation to the median of the absolute values, for normal noise.
MEDIAN_OF_NORMAL = 1.4826
# Number of newest points whose median is the level of a loss that falls fast.
NEWEST_POINTS = 7
# A first loss below this counts as zero, such as a KL term before the first update.
ZERO = 1e-6
# Largest number of points of a dip. If a loss stays lower for longer, that is its new level.
DIP_POINTS = 128
# Number of accepted points for which a dip is remembered.
DIP_MEMORY = 512
# Largest unit that dips can cause, as a share of the level. With it, a loss that rises by half is high in spite of dips.
MAX_UNIT_OF_DIPS = 0.1


class RollingQuantiles:
    """The last ``size`` numbers of a series, with a sorted copy from which quantiles are read."""

    def __init__(self, size: int, values: Iterable[float] = ()):
        self.size = size
        self.values: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        self.values.append(value)
        insort(self._sorted, value)
        # Drop the oldest number if there are too many.
        if len(self.values) > self.size:
            oldest = self.values.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def quantile(self, share: float) -> float:
        """Return the number below which ``share`` of the numbers lie, by linear interpolation."""
        position = share * (len(self._sorted) - 1)
        below = int(position)
        above = min(below + 1, len(self._sorted) - 1)
        return self._sorted[below] + (self._sorted[above] - self._sorted[below]) * (position - below)


class Baseline:
    """The level of a series, and the residuals of its values from their trend.

    The trend at a value is the median of the values around it.

    Args:
        level_points: number of newest accepted points whose median is the level.
        unit_points: number of newest residuals from which the unit is computed.
        state: what `state` returned; None for a new series.

    Attributes:
        first: the first accepted value.
    """

    def __init__(self, level_points: int, unit_points: int, state: dict[str, Any] | None = None):
        self.level_points = level_points
        state = state or {}
        self.accepted = RollingQuantiles(level_points, state.get("near", []))
        # States of earlier versions have the key "excess", with residuals in units of the series.
        self.residuals = RollingQuantiles(unit_points, state.get("residuals", state.get("excess", [])))
        self.first: float | None = state.get("first")

    def level(self) -> float:
        return self.accepted.quantile(0.5)

    def upper_unit(self) -> float:
        """Return the standard deviation that normal noise with the same 95th percentile of residuals would have."""
        return self.residuals.quantile(0.95) / Q95_OF_NORMAL

    def accept(self, value: float) -> None:
        """Add a value to the level. Then add the residual of the middle one of the newest values.

        The trend at a value can be computed only when the values after it are known.
        """
        if self.first is None:
            self.first = value
        self.accepted.add(value)
        width = self.level_points // 2 + 1
        newest = list(self.accepted.values)[-width:]
        # While there are fewer values than the width, the middle one stays the same at every second call. Do not add its
        # residual twice.
        if len(newest) == width or len(newest) % 2 == 1:
            middle = newest[len(newest) // 2]
            trend = median(newest)
            self.learn(middle - trend, trend)

    def learn(self, residual: float, trend: float) -> None:
        """Add a residual, without changing the level. A subclass may relate it to ``trend``, from which it was measured."""
        self.residuals.add(residual)

    def move(self, values: list[float]) -> None:
        """Compute the level from ``values`` instead of the accepted ones, without changing the residuals."""
        self.accepted = RollingQuantiles(self.level_points, values)

    # The keys keep their names, since checkpoints of earlier versions have them.
    def state(self) -> dict[str, Any]:
        return {"near": list(self.accepted.values), "residuals": list(self.residuals.values), "first": self.first}


class LossBaseline(Baseline):
    """The level of a loss, and its unit: the size of its noise.

    Residuals are stored as shares of the loss, since the noise of a loss falls together with it.

    A *dip* is a range of values far below the level, after which the loss is back at this level. Training does not undo what
    it has learnt, so a dip is noise. For example, if a log has the mean loss since the beginning of the epoch, it jumps at each
    epoch, as often down as up. After a dip, a smaller rise counts as noise, too.

    Args:
        smallest_unit: smallest unit, as a share of the level.
        smallest_unit_at_start: smallest unit without residuals, as a share of the level. With the first ``level_points``
            residuals, it shrinks to 0.

    Attributes:
        residual_sizes: absolute values of the newest residuals, as shares of the loss.
        noise: absolute values of the newest residuals, in nats as the loss.
        excesses: differences of the newest accepted values from the level that they were compared with.
        dip: values since the loss fell far below the level; empty while it is at its level.
        dip_level: the level before the dip.
        dip_depths: for each of the newest accepted values, the depth of the dip that ended there, as a share of the loss. It
            is 0 for most values.
    """

    def __init__(
        self,
        level_points: int,
        unit_points: int,
        smallest_unit: float,
        smallest_unit_at_start: float,
        state: dict[str, Any] | None = None,
    ):
        super().__init__(level_points, unit_points, state)
        self.smallest_unit = smallest_unit
        self.smallest_unit_at_start = smallest_unit_at_start
        state = state or {}
        # A state of an earlier version has residuals in nats. Turn them into shares of the loss.
        if "residuals" not in state and len(self.accepted) > 0:
            reference = self.reference_loss(self.accepted.quantile(0.5))
            self.residuals = RollingQuantiles(unit_points, [residual / reference for residual in self.residuals.values])
        # The next two hold fewer points than the residuals, so they show a change of the noise sooner.
        self.residual_sizes = RollingQuantiles(4 * level_points, map(abs, self.residuals.values))
        self.noise = RollingQuantiles(4 * level_points, state.get("noise", []))
        self.excesses = RollingQuantiles(unit_points, state.get("excesses", []))
        self.dip: list[float] = state.get("dip", [])
        self.dip_level: float = state.get("dip_level", 0.0)
        self.dip_depths = RollingQuantiles(DIP_MEMORY, state.get("dip_depths", []))

    @property
    def is_young(self) -> bool:
        """True for about the first 60 points of a run, as long as few residuals are known."""
        return len(self.residuals) < 2 * self.level_points

    def level(self) -> float:
        level = self.accepted.quantile(0.5)
        if not self.is_young:
            return level
        # The first steps of a run fall so fast that the median of many points lags far behind them.
        values = list(self.accepted.values)[-NEWEST_POINTS:]
        newest_level = median(values)
        if _falls_steadily(values):
            newest_level = median(values[-4:])
        if self.has_no_noise:
            return min(level, newest_level)
        is_falling = level - newest_level > 1.5 * self.residual_scale(newest_level) * self.upper_unit()
        return newest_level if is_falling else level

    @property
    def has_no_noise(self) -> bool:
        """True until seven points are accepted. Fewer have too few residuals to measure the noise."""
        return len(self.residuals) < 4

    def reference_loss(self, level: float) -> float:
        """Return the loss of which shares are taken at ``level``: the level itself, or something larger if it is near zero."""
        # Near zero, a fiftieth of the fall since the start replaces the level.
        first = level if self.first is None else self.first
        fall = abs(first - level)
        if abs(first) < ZERO:
            # The first loss does not show how large the losses of this run are. 1 nat is assumed.
            fall = 1.0
        return max(abs(level), 0.02 * fall, 1e-12)

    def residual_scale(self, level: float) -> float:
        """Return the number by which a residual at ``level`` is divided: the reference loss, plus five times the noise."""
        # If the noise is larger than the loss, as near zero, a share of the loss alone would be huge.
        noise = self.noise.quantile(0.5) if len(self.noise) > 0 else 0.0
        return self.reference_loss(level) + 5 * noise

    def unit(self) -> float:
        """Return the unit: an estimate of the noise that corresponds to one standard deviation. It is the largest of three."""
        units = [self.residual_unit()]
        # If neighbouring points have similar noise, the trend follows the noise, and residuals from it are too small.
        if len(self.excesses) >= self.level_points:
            units.append(1.3 * self.excesses.quantile(0.95) / Q95_OF_NORMAL)
        # A point is high from three units on. With a third of the deepest dip, a smaller rise than that dip is not high.
        if len(self.dip_depths) > 0:
            deepest = self.dip_depths.quantile(1.0)
            units.append(min(deepest / 3, MAX_UNIT_OF_DIPS) * self.reference_loss(self.level()))
        return max(units)

    def residual_unit(self) -> float:
        """Return the unit from the residuals, and in a young run also from the largest rise.

        After that, a loss that rises slowly does not make the unit a larger share of the level.
        """
        level = self.level()
        reference = self.reference_loss(level)
        # A loss is high from three units above the level. Before the noise is known, this is twice the level.
        if self.has_no_noise:
            return reference / 3
        missing_history = 1 - len(self.residuals) / self.level_points
        scale = self.residual_scale(level)
        units = [
            self.smallest_unit * reference,
            self.smallest_unit_at_start * reference * missing_history,
            scale * self.upper_unit(),
            # From residuals of both signs. With positive ones alone, a unit that is too small would stay too small: it would
            # reject the high points that could make it larger.
            scale * MEDIAN_OF_NORMAL * self.residual_sizes.quantile(0.5),
        ]
        # Quantiles of few points are not reliable. `_largest_rise` looks at the newest 13 points if ``level_points`` is 24.
        # With normal noise, the largest rise among 13 points is about 3 standard deviations.
        if self.is_young:
            units.append(self._largest_rise() / 3)
        return max(units)

    def _largest_rise(self) -> float:
        """Return the largest rise from one of the newest values to a later one."""
        width = self.level_points // 2 + 1
        lowest = math.inf
        rise = 0.0
        for value in list(self.accepted.values)[-width:]:
            lowest = min(lowest, value)
            rise = max(rise, value - lowest)
        return rise

    def accept(self, value: float) -> None:
        # The median of a short history is not a level yet.
        if len(self.accepted) >= self.level_points:
            self.excesses.add(value - self.accepted.quantile(0.5))
        if not self.is_young:
            self.dip_depths.add(self._follow_dip(value))
        super().accept(value)

    def _follow_dip(self, value: float) -> float:
        """Return the depth of the dip that ends with this value, as a share of the loss; 0 if none ends here."""
        # Outside of a dip: a dip begins with this value if the value is far below the level.
        if not self.dip:
            level = self.accepted.quantile(0.5)
            # Compare with the smallest unit first, since the unit itself takes longer to compute.
            is_possible = level - value > 3 * self.smallest_unit * self.reference_loss(level)
            if is_possible and level - value > 3 * self.residual_unit():
                self.dip = [value]
                self.dip_level = level
            return 0.0
        # Inside a dip: it goes on as long as the values are below its level by more than the noise.
        if value < self.dip_level - self.residual_unit():
            self.dip.append(value)
            # The loss has stayed low for too long for a dip: it has fallen to a new level.
            if len(self.dip) > DIP_POINTS:
                self.dip = []
            return 0.0
        # The loss is back. The depth is that of the second lowest value, since a single batch may have a much lower loss.
        second_lowest = sorted([*self.dip, self.dip_level])[1]
        self.dip = []
        return (self.dip_level - second_lowest) / self.reference_loss(self.dip_level)

    def learn(self, residual: float, trend: float) -> None:
        self.noise.add(abs(residual))
        share = residual / self.residual_scale(trend)
        super().learn(share, trend)
        self.residual_sizes.add(abs(share))

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "noise": list(self.noise.values),
            "excesses": list(self.excesses.values),
            "dip": list(self.dip),
            "dip_level": self.dip_level,
            "dip_depths": list(self.dip_depths.values),
        }


def _falls_steadily(values: Sequence[float]) -> bool:
    """Return whether in at most one pair of values the later one is not lower.

    This is Kendall's test for a trend ("Rank Correlation Methods", 1948). One in 700 random orders of seven values passes it.
    """
    rising_pairs = 0
    for i, earlier in enumerate(values):
        for later in values[i + 1 :]:
            rising_pairs += later >= earlier
    return rising_pairs <= 1
