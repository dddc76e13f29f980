"""A range of high points of a loss, until the loss has come back or is at a new level."""

from dataclasses import dataclass, field
from statistics import median

MAX_EXCURSION_POINTS = 512
"""Points of an excursion that are remembered from its onset on, besides the newest one."""


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
