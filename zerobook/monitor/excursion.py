"""A range of high points of a loss, until the loss has come back or is at a new level."""

from dataclasses import dataclass, field
from statistics import median

# Number of the first points of an excursion that are remembered. Of the later points, only the newest one is.
MAX_EXCURSION_POINTS = 512


@dataclass
class Excursion:
    """A range of points that begins with a high one and has not come back to the level yet.

    Attributes:
        onset: step of its first point.
        base: level of the loss before it.
        unit: unit of the loss before it, see `zerobook.monitor.baseline.LossBaseline.unit`.
        losses: the losses since the onset, see `MAX_EXCURSION_POINTS`.
        high: number of high points.
        back: number of newest points that are at the base again.
        confirmed: whether the alarm was raised.
        judged: ``damage`` or ``divergence``, once reported.
        peak_then: the peak at that report.
        touched: whether a point was at the base again since that report.
        extended: number of times that the patience was extended, because the loss was coming back.
    """

    onset: int
    base: float
    unit: float
    losses: list[float] = field(default_factory=list)
    high: int = 0
    back: int = 0
    confirmed: bool = False
    judged: str | None = None
    peak_then: float = 0.0
    touched: bool = False
    extended: int = 0

    @property
    def peak(self) -> float:
        return max(self.losses)

    @property
    def points(self) -> int:
        """Points from the onset to the last one that was not back at the base."""
        return len(self.losses) - self.back

    def add(self, loss: float) -> None:
        self.losses.append(loss)
        # Keep the newest one, and drop the one before it if there are too many.
        del self.losses[MAX_EXCURSION_POINTS:-1]

    def judge(self, kind: str) -> None:
        """Remember a verdict, and the peak at that moment."""
        self.judged = kind
        self.peak_then = self.peak

    def is_worse_than_judged(self, patience: int) -> bool:
        """Return whether the loss has become worse since the verdict.

        A loss that was coming down is worse if it is above its peak at that time. One that was not is worse if its peak above
        the base has doubled.
        """
        if len(self.losses) < 2 * patience:
            return False
        late = median(self.losses[-3:])
        # The loss was coming down.
        if self.judged == "damage" or self.touched:
            return late > self.peak_then
        return late - self.base > 2 * (self.peak_then - self.base)
