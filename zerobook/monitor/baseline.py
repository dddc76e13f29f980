"""The level of a series, and the size of its usual noise."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

Q95_OF_NORMAL = 1.645
"""95th percentile of normal noise, in standard deviations."""
MEDIAN_OF_NORMAL = 1.4826
"""Ratio of the standard deviation to the median of the absolute values, for normal noise."""
NEWEST_POINTS = 7
"""Number of newest points whose median is the level of a loss that falls fast."""
ZERO = 1e-6
"""A first loss that is smaller is zero, as that of a KL term before the first update."""
DIP_POINTS = 128
"""Largest number of points of a dip. A loss that stays lower for longer is a new level."""
DIP_MEMORY = 512
"""Accepted points for which a dip is remembered."""
MAX_UNIT_OF_DIPS = 0.1
"""Largest unit because of dips, as a share of the level, so that a loss that rises by half is always high."""


class RollingQuantiles:
    """The last ``size`` numbers of a series, with quantiles in O(log size)."""

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
    """The level of a series, and the residuals from its trend.

    Args:
        level_points: accepted points whose median is the level.
        unit_points: residuals that give the unit.
        state: as `state` returned it; None for a new series.

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
        """Return the unit from the 95th percentile of the residuals."""
        return self.residuals.quantile(0.95) / Q95_OF_NORMAL

    def accept(self, value: float) -> None:
        """Add a value to the level, and the residual of an earlier value from the trend around it."""
        if self.first is None:
            self.first = value
        self.accepted.add(value)
        width = self.level_points // 2 + 1
        around = list(self.accepted.values)[-width:]
        # A short history has a new middle with every second point only.
        if len(around) == width or len(around) % 2 == 1:
            middle = around[len(around) // 2]
            trend = median(around)
            self.learn(middle - trend, trend)

    def learn(self, residual: float, trend: float) -> None:
        """Add a residual from ``trend``, without changing the level."""
        self.residuals.add(residual)

    def move(self, values: list[float]) -> None:
        """Set the level to that of ``values``, without changing the residuals."""
        self.accepted = RollingQuantiles(self.level_points, values)

    def state(self) -> dict[str, Any]:
        return {"near": list(self.accepted.values), "residuals": list(self.residuals.values), "first": self.first}


class LossBaseline(Baseline):
    """The level of a loss, and the size of its noise.

    Residuals are kept as shares of the loss. Its noise falls with it, so those of the first steps say little otherwise.

    A *dip* is a range of values far below the level, after which the loss is back at this level. Training does not undo what
    it has learnt, so a dip is noise: for example, a log of the mean since the epoch began jumps at each epoch, as often down
    as up. The loss may then also rise as far as it fell in the deepest dip.

    Args:
        smallest_unit: smallest unit, as a share of the level.
        smallest_unit_at_start: smallest unit without history, as a share of the level. It shrinks over the first
            ``level_points`` residuals.

    Attributes:
        noise: sizes of the newest residuals, in units of the loss.
        excesses: distances of the newest accepted values above the level that they were compared with.
        dip: values since the loss fell far below the level; empty while it is at its level.
        dip_level: the level before these.
        dip_depths: for each of the newest accepted values the depth of the dip that ended there, as a share of the loss. It
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
        # The residuals of such an earlier state become shares of the loss.
        if "residuals" not in state and len(self.accepted) > 0:
            loss_size = self.size(self.accepted.quantile(0.5))
            self.residuals = RollingQuantiles(unit_points, [residual / loss_size for residual in self.residuals.values])
        # These two hold fewer points than the residuals, so they follow a change of the noise sooner.
        self.residual_sizes = RollingQuantiles(4 * level_points, map(abs, self.residuals.values))
        self.noise = RollingQuantiles(4 * level_points, state.get("noise", []))
        self.excesses = RollingQuantiles(unit_points, state.get("excesses", []))
        self.dip: list[float] = state.get("dip", [])
        self.dip_level: float = state.get("dip_level", 0.0)
        self.dip_depths = RollingQuantiles(DIP_MEMORY, state.get("dip_depths", []))

    @property
    def is_young(self) -> bool:
        """True for about the first 60 points of a run, while few residuals are known."""
        return len(self.residuals) < 2 * self.level_points

    def level(self) -> float:
        level = self.accepted.quantile(0.5)
        if not self.is_young:
            return level
        # The first steps of a run fall so fast that the median of many points lags far behind them.
        values = list(self.accepted.values)[-NEWEST_POINTS:]
        newest = median(values)
        if _falls_steadily(values):
            newest = median(values[-4:])
        if self.has_no_noise:
            return min(level, newest)
        is_falling = level - newest > 1.5 * self.scale(newest) * self.upper_unit()
        return newest if is_falling else level

    @property
    def has_no_noise(self) -> bool:
        """True for the first six points: they have too few residuals to measure noise."""
        return len(self.residuals) < 4

    def size(self, level: float) -> float:
        """Return the loss that shares refer to at ``level``. It is the level itself, unless that is near zero."""
        # Near zero, a fiftieth of the fall since the start replaces the level.
        first = level if self.first is None else self.first
        fall = abs(first - level)
        if abs(first) < ZERO:
            # Nothing says how large such a loss is, so it is taken for nats.
            fall = 1.0
        return max(abs(level), 0.02 * fall, 1e-12)

    def scale(self, level: float) -> float:
        """Return what a residual around ``level`` is divided by."""
        # The noise may be larger than the level. A share of the level alone would then be too small.
        noise = self.noise.quantile(0.5) if len(self.noise) > 0 else 0.0
        return self.size(level) + 5 * noise

    def unit(self) -> float:
        """Return the estimate of the noise that corresponds to one standard deviation."""
        units = [self.residual_unit()]
        # Noise whose points resemble their neighbours moves the trend too, so residuals from it are too small.
        if len(self.excesses) >= self.level_points:
            units.append(1.3 * self.excesses.quantile(0.95) / Q95_OF_NORMAL)
        # Three units are the smallest excess of a high point.
        if len(self.dip_depths) > 0:
            deepest = self.dip_depths.quantile(1.0)
            units.append(min(deepest / 3, MAX_UNIT_OF_DIPS) * self.size(self.level()))
        return max(units)

    def residual_unit(self) -> float:
        """Return the estimate of the noise around the trend. A loss that rises slowly does not make it larger."""
        level = self.level()
        size = self.size(level)
        # Before the noise is known, only a loss of twice the level is high.
        if self.has_no_noise:
            return size / 3
        missing_history = 1 - len(self.residuals) / self.level_points
        scale = self.scale(level)
        units = [
            self.smallest_unit * size,
            self.smallest_unit_at_start * size * missing_history,
            scale * self.upper_unit(),
            # From both sides: a unit from upper residuals alone, once too small, would reject the points that could correct it.
            scale * MEDIAN_OF_NORMAL * self.residual_sizes.quantile(0.5),
        ]
        # For few points, the largest rise among them says more than quantiles. It is about 3 standard deviations for 13 points.
        if self.is_young:
            units.append(self._largest_rise() / 3)
        return max(units)

    def _largest_rise(self) -> float:
        """Return how far one of the newest points lies above an earlier one, at most."""
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
        if not self.dip:
            level = self.accepted.quantile(0.5)
            # The unit takes longer to compute than this, so it is asked for only if a dip is possible.
            is_possible = level - value > 3 * self.smallest_unit * self.size(level)
            if is_possible and level - value > 3 * self.residual_unit():
                self.dip = [value]
                self.dip_level = level
            return 0.0
        if value < self.dip_level - self.residual_unit():
            self.dip.append(value)
            # The loss has fallen for good.
            if len(self.dip) > DIP_POINTS:
                self.dip = []
            return 0.0
        # The loss is back. A single batch may have a much lower loss than others, so the second lowest value decides.
        second_lowest = sorted([*self.dip, self.dip_level])[1]
        self.dip = []
        return (self.dip_level - second_lowest) / self.size(self.dip_level)

    def learn(self, residual: float, trend: float) -> None:
        self.noise.add(abs(residual))
        share = residual / self.scale(trend)
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
    """Return whether at most one pair of the values rises (Kendall's test for a trend, "Rank Correlation Methods", 1948).

    Seven values in random order do so once in 700 times.
    """
    rising_pairs = 0
    for i, earlier in enumerate(values):
        for later in values[i + 1 :]:
            rising_pairs += later >= earlier
    return rising_pairs <= 1
