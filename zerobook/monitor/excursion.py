"""A range of high points of a loss, until the loss has come back or is at a new level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MAX_EXCURSION_POINTS = 512
"""Points of an excursion that are remembered from its onset on, besides the newest one."""
BEGINNING_POINTS = 8
"""Points at the beginning of a run that are kept, to recognise a run that starts again from its first losses."""


@dataclass
class Excursion:
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

    def is_worse_than_judged(self, patience: int) -> bool:
        """Return whether the loss has left the course that it was judged by: it rises again, or is twice as high."""
        if len(self.losses) < 2 * patience:
            return False
        late = median(self.losses[-3:])
        was_coming_down = self.judged == "damage" or self.touched
        if was_coming_down:
            return late > self.peak_then
        return late - self.base > 2 * (self.peak_then - self.base)

    def begins_as(self, beginning: Sequence[float]) -> bool:
        """Return whether the losses repeat those at the beginning of a run, so that weights were initialised anew."""
        ratios = []
        losses = []
        for loss, first_loss in zip(self.losses, beginning, strict=False):
            if loss > 0 and first_loss > 0:
                losses.append(loss)
                # Do not take the logarithm of the ratio, which can be rounded to 0.
                ratios.append(abs(math.log(loss) - math.log(first_loss)))
        # The loss has halved. On bad data it may start at that of an untrained model, too, but it does not fall as fast.
        if len(losses) >= 3 and losses[-1] < 0.5 * losses[0] and max(ratios) < 0.15:
            return True
        # A run that learns slowly at first repeats itself point by point. One point may be off.
        if len(losses) < BEGINNING_POINTS:
            return False
        return sorted(ratios)[-2] < 0.05 and max(losses) <= 1.05 * losses[0]
