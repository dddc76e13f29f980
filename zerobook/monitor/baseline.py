"""The level of a series, and the size of its usual noise."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

Q95_OF_NORMAL = 1.645
"""95th percentile of normal noise, in standard deviations"""
MEDIAN_OF_NORMAL = 1.4826
"""standard deviation of normal noise, in medians of its absolute values"""


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
        state = state or {"near": [], "excess": [], "first": None}
        self.accepted = RollingQuantiles(level_points, state["near"])
        self.residuals = RollingQuantiles(unit_points, state["excess"])
        self.residual_sizes = RollingQuantiles(4 * level_points, map(abs, state["excess"]))
        self.first: float | None = state["first"]

    def level(self) -> float:
        return self.accepted.quantile(0.5)

    def unit(self, smallest: float, smallest_at_start: float) -> float:
        """Return what one standard deviation is to normal noise.

        Args:
            smallest: smallest unit, as a share of the level.
            smallest_at_start: the same without history; it shrinks over the first ``level_points`` points.
        """
        level = self.level()
        assert self.first is not None
        # A level near zero is no scale: a share of the way that the series has come stands for it.
        scale = max(abs(level), 0.02 * abs(self.first - level), 1e-12)
        missing_history = 1 - len(self.residuals) / self.level_points
        units = [smallest * scale, smallest_at_start * scale * missing_history]
        if len(self.residuals) > 0:
            units.append(self.upper_unit())
            # From both sides: a unit from upper residuals alone, once too small, would reject the points that could correct it.
            units.append(MEDIAN_OF_NORMAL * self.residual_sizes.quantile(0.5))
        return max(units)

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
            self.learn(middle - median(around))

    def learn(self, residual: float) -> None:
        """Add a residual, without changing the level."""
        self.residuals.add(residual)
        self.residual_sizes.add(abs(residual))

    def move(self, values: list[float]) -> None:
        """Set the level to that of ``values``, without changing the residuals."""
        self.accepted = RollingQuantiles(self.level_points, values)

    def state(self) -> dict[str, Any]:
        return {"near": list(self.accepted.values), "excess": list(self.residuals.values), "first": self.first}
