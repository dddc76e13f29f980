"""The spike detector for a log of which nothing but its points is known: it may hold several runs, and other schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerobook.monitor.detector import Detector
from zerobook.monitor.excursion import Excursion
from zerobook.monitor.finding import Finding, Point
from zerobook.monitor.settings import Settings

RECENT_RATES = 32
"""Points whose learning rates are remembered."""
BEGINNING_POINTS = 8
"""Points at the beginning of the log that are kept, to recognise a run that starts again from its first losses."""


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    """Settings of `LogDetector`."""

    step_of_raised_rate: float = 0.75
    """largest rise to a new level that a raised learning rate explains, as a share of the loss; a rate that is too high causes
    a larger one"""
    step_of_unknown_rate: float = 0.1
    """the same if the log has no learning rates, as a share of the fall of the loss since the start of the log"""


class LogDetector(Detector):
    """Finds spikes in a log. A loss that begins again is a new run there, and the schedule is guessed from the rates.

    In a live run, a loss that begins again means that the weights were lost, and `SpikeMonitor` knows the schedule.

    Attributes:
        beginning: the first losses of the log.
        rates: the newest learning rates. Those of the first warm-up are left out, since they do not explain a step of the loss.
        is_warming_up: whether the first rise of the learning rate goes on.
    """

    settings: LogSettings

    def __init__(self, settings: LogSettings | None = None):
        super().__init__(settings or LogSettings())
        self.beginning: list[float] = []
        self.rates: list[float] = []
        self.is_warming_up = True

    def update(self, point: Point) -> list[Finding]:
        is_usable = point.is_finite and not self.is_dead(point)
        if is_usable and len(self.beginning) < BEGINNING_POINTS:
            self.beginning.append(point.loss)
        if is_usable and point.learning_rate is not None:
            self._see_rate(point.learning_rate)
        return super().update(point)

    def _see_rate(self, rate: float) -> None:
        last = self.rates[-1] if self.rates else None
        # A rate of 0 is the first step of a warm-up.
        self.is_warming_up = self.is_warming_up and (last is None or last == 0.0 or rate > last)
        if self.is_warming_up:
            self.rates = [rate]
        else:
            self.rates = [*self.rates[-RECENT_RATES + 1 :], rate]

    def see_new_run(self, excursion: Excursion, point: Point) -> list[Finding]:
        # The first losses of the log are not a repetition of themselves.
        if self.seen < 3 * BEGINNING_POINTS or not _repeats(excursion.losses, self.beginning):
            return []
        self.close_excursion(excursion.losses[-1:])
        reason = f"from {excursion.base:.4g} back to {excursion.peak:.4g}, as at the beginning of the run"
        return [self.finding_of("reset", point, excursion, reason)]

    def explain_large_rise(self, previous_level: float, new_level: float, rise: float) -> str | None:
        reference = self.loss.reference_loss(previous_level)
        if self.rates:
            if self._rate_was_raised() and rise < self.settings.step_of_raised_rate * reference:
                return "the learning rate was raised"
            return None
        # The log has no learning rates. A raised rate is assumed if the rise undoes little of the fall since the start.
        assert self.loss.first is not None
        fall = self.loss.first - previous_level
        if new_level - previous_level < min(reference, self.settings.step_of_unknown_rate * fall):
            return "the learning rate, which is not known, may have been raised"
        return None

    def _rate_was_raised(self) -> bool:
        """Return whether the learning rate was raised by a fifth after the first warm-up, as far as it is remembered."""
        lowest = math.inf
        for rate in self.rates:
            lowest = min(lowest, rate)
            if rate > 1.2 * lowest:
                return True
        return False


def _repeats(losses: list[float], beginning: list[float]) -> bool:
    """Return whether the losses repeat those at the beginning of a log, so that another run begins."""
    ratios = []
    compared = []
    for loss, first_loss in zip(losses, beginning, strict=False):
        if loss > 0 and first_loss > 0:
            compared.append(loss)
            # Do not take the logarithm of the ratio, which can be rounded to 0.
            ratios.append(abs(math.log(loss) - math.log(first_loss)))
    # The loss has halved. On bad data it may start at that of an untrained model, too, but it does not fall as fast.
    if len(compared) >= 3 and compared[-1] < 0.5 * compared[0] and max(ratios) < 0.15:
        return True
    # A run that learns slowly at first repeats itself point by point. One point may be off.
    if len(compared) < BEGINNING_POINTS:
        return False
    return sorted(ratios)[-2] < 0.05 and max(compared) <= 1.05 * compared[0]
