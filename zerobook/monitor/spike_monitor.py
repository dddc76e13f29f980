"""The spike monitor of a run: it is given the measurements of each step, and decides. It carries out nothing."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from zerobook.config import OnSpike, PolicyAction
from zerobook.monitor.detector import Detector
from zerobook.monitor.events import ExpectedEvents
from zerobook.monitor.finding import Finding, Point
from zerobook.monitor.policy import LEAD, RecoveryAction, RecoveryPolicy
from zerobook.monitor.settings import Settings

RAISED_RATE = 1.1
"""A learning rate counts as raised if it is more than this times the rate of the step before."""
NEW_LEVEL_POINTS = 6
"""Points of an excursion that show whether the loss has a new level or still rises."""
MOST_NORM = 20.0
"""A gradient norm of more than this times its usual level means damage, whatever was announced. In public logs, the median
factor was 21 at divergences, and 1.2 at restarts of the learning rate."""
HISTORY_STEPS = 10_000
"""Number of the last steps that stay in memory. A step that is repeated is compared with them."""


class ReplayOutcome(NamedTuple):
    """Whether a spike came again when its steps were repeated with nothing changed.

    ``finding`` is the spike; None if it did not come again. ``loss_before`` is the loss of ``step`` before the rollback.
    """

    step: int
    loss: float
    loss_before: float | None
    finding: Finding | None


class Observation(NamedTuple):
    """Findings of a step, and the outcome of a replay if this step decides it."""

    findings: list[Finding]
    replay: ReplayOutcome | None


class _Replay(NamedTuple):
    """The steps from ``onset`` to ``last``, which are repeated.

    ``before`` has these steps as they were before the rollback. ``base`` is the level of the loss before them, and a loss is
    high if it is at least ``high`` above that.
    """

    onset: int
    last: int
    before: dict[int, Point]
    base: float
    high: float


class SpikeMonitor:
    """Finds spikes and decides on recovery actions. It depends only on its arguments, so all ranks decide the same.

    Args:
        on_spike, max_rollbacks, rate_factor, order, total_steps: see `RecoveryPolicy`.
        peak_rate: highest learning rate of the schedule.
        detector: `state` in the checkpoint; empty for a new run.
        policy: state of the policy, as `RecoveryPolicy.state` returned it; empty for a new run.

    Attributes:
        expected: what the run has announced.
    """

    def __init__(
        self,
        on_spike: OnSpike,
        *,
        max_rollbacks: int,
        rate_factor: float,
        order: Sequence[PolicyAction] | None = None,
        total_steps: int | None = None,
        peak_rate: float = math.inf,
        detector: dict[str, Any],
        policy: dict[str, Any],
    ):
        self.settings = Settings()
        self.detector = Detector(self.settings, detector)
        self.policy = RecoveryPolicy(
            on_spike,
            max_rollbacks=max_rollbacks,
            rate_factor=rate_factor,
            order=order,
            total_steps=total_steps,
            state=policy,
        )
        self._history: deque[Point] = deque(maxlen=HISTORY_STEPS)
        self._replay: _Replay | None = None
        self.expected = ExpectedEvents(detector.get("expected", []))
        # Rounding may put a rate above the peak.
        self._peak_rate = 1.001 * peak_rate

    @property
    def last_is_finite(self) -> bool:
        """True if the loss and the gradient of the last step were finite, or there was no step."""
        return not self._history or self._history[-1].is_finite

    @property
    def has_lost_weights(self) -> bool:
        """True if the loss has not been finite in the last ``patience`` steps, so that the weights cannot be finite."""
        newest = list(self._history)[-self.settings.patience :]
        not_finite = [point for point in newest if not math.isfinite(point.loss)]
        return len(not_finite) == self.settings.patience

    def state(self) -> dict[str, Any]:
        """Return the state of the detector with the announced events, JSON-ready."""
        return {**self.detector.state(), "expected": self.expected.state(self.detector.last_step or 0)}

    def update(self, point: Point) -> Observation:
        """Take in the next step."""
        self._expect_raised_rate(point)
        findings = self.detector.update(point)
        self._history.append(point)
        findings = [self._explain(finding, point) for finding in findings]
        replay = self._compare_with_replay(point)
        # A fault without an excursion, such as losses of exactly 0, is found again by the detector alone.
        if replay is not None and replay.finding is None and any(finding.needs_action for finding in findings):
            replay = None
        return Observation(findings, replay)

    def _expect_raised_rate(self, point: Point) -> None:
        """Announce an event if the schedule raises the learning rate, such as at a warm restart."""
        rate = point.learning_rate
        # In its first steps a new run is in its warm-up, which is no event.
        is_new = self.detector.seen < self.settings.level_points
        last_rate = self.detector.last_rate
        if is_new or rate is None or last_rate is None:
            return
        # A rate above the schedule's peak may do harm, so it is not announced.
        if RAISED_RATE * last_rate < rate <= self._peak_rate:
            self.expected.add(point.step, f"the learning rate was raised from {last_rate:.3g} to {rate:.3g}")

    def _explain(self, finding: Finding, point: Point) -> Finding:
        """Return the finding, with the announced event that may have caused it.

        If the event explains the finding completely, a new level of the loss is returned instead, which needs no action.
        """
        event = self.expected.at(finding.onset)
        if finding.is_slow:
            event = self.expected.during(finding.onset, finding.step)
        is_explicable = finding.alarm or finding.kind == "level_shift"
        # No event makes a loss infinite without damage.
        if event is None or not is_explicable or not finding.finite:
            return finding
        if finding.needs_action and self._is_harmless_step(finding):
            return self.detector.accept_level(point, f"from {finding.base:.4g} to {point.loss:.4g}, as announced: {event.what}")
        reason = f"{finding.reason} (announced: {event.what})"
        # A slow rise that at most doubles the loss stays an alarm, without an action.
        is_moderate = finding.is_slow and finding.peak - finding.base < abs(finding.base)
        return replace(finding, kind="slow_rise" if is_moderate else finding.kind, reason=reason)

    def _is_harmless_step(self, finding: Finding) -> bool:
        """Return whether the loss has risen to a new level by a moderate amount, so that an announced event can explain it."""
        excursion = self.detector.excursion
        # After a shock, the weights may be damaged whatever was announced. Few points show no new level.
        if excursion is None or len(excursion.losses) < NEW_LEVEL_POINTS or self.detector.shock is not None:
            return False
        norms = [past.grad_norm for past in self._history if past.step >= finding.onset and past.grad_norm is not None]
        # The detector has logarithms of norms.
        has_level = len(self.detector.norm.accepted) > 0
        if norms and has_level and max(norms) > MOST_NORM * math.exp(self.detector.norm.level()):
            return False
        newest_level = median(excursion.losses[-3:])
        rise = newest_level - excursion.base
        # A loss that still rises has no new level. The last three points are then above the three before them by more than the
        # noise, and by more than a quarter of the rise.
        still_rises = newest_level - median(excursion.losses[-NEW_LEVEL_POINTS:-3]) > max(2.5 * excursion.unit, rise / 4)
        # A moderate rise at most doubles the loss. A loss near 0 is measured in units of its noise.
        return rise < max(abs(excursion.base), 10 * excursion.unit) and not still_rises

    def decide(
        self, finding: Finding, proven: Sequence[int], unproven: Sequence[int], hardware: str | None, step: int = 0
    ) -> RecoveryAction:
        """Return the action against a finding; the arguments are those of `RecoveryPolicy.decide`.

        Pass the action to ``policy.record`` if it is taken.
        """
        # A gradient norm may have armed the detector before the first high loss. Then the spike began with it.
        onset = self.detector.onset()
        if onset is not None and onset < finding.onset:
            finding = replace(finding, onset=onset)
        return self.policy.decide(finding, proven, unproven, hardware, step)

    def go_back(self, action: RecoveryAction, detector: dict[str, Any]) -> dict[int, float]:
        """Forget the steps after ``action.to_step``. Return step -> loss of those that must have the same loss when repeated.

        Args:
            detector: state of the detector in the checkpoint.
        """
        assert action.to_step is not None
        # The bounds of a high loss are in the state of the detector, which is replaced below.
        excursion = self.detector.excursion
        base = math.nan
        high = math.nan
        if excursion is not None:
            base = excursion.base
            high = self.settings.high * excursion.unit
        before: dict[int, Point] = {}
        while self._history and self._history[-1].step > action.to_step:
            point = self._history.pop()
            # If a step was done several times, the newest time counts.
            before.setdefault(point.step, point)
        # Without a disturbance, as where copies of the weights differ, the losses do not show whether it comes again.
        is_disturbed = self.detector.onset() is not None
        self.detector = Detector(self.settings, detector)
        self._replay = None
        if action.kind == "replay" and is_disturbed:
            self._replay = _Replay(action.onset, action.noticed, before, base, high)

        # Losses are the same up to the first step that is suspect, or whose samples are left out.
        first = action.onset - LEAD + 1 if action.steps is None else action.steps[0]
        losses: dict[int, float] = {}
        for step, point in sorted(before.items()):
            if step < first and math.isfinite(point.loss):
                losses[step] = point.loss
        return losses

    def far_above_best(self, held_out: float | None, best_held_out: float | None) -> dict[str, list[float | None]]:
        """Return the losses that are far above their best at the end, with or without a finding: name -> [value, best].

        For the loss, the median of the last points is compared with the lowest level; for the held-out loss, the last
        evaluation with the best one. The last three points count too: a loss that falls until the end lies below its median.
        """
        losses = []
        for point in list(self._history)[-self.settings.patience :]:
            # The median needs an order, and NaN has none.
            losses.append(point.loss if math.isfinite(point.loss) else math.inf)
        loss = min(median(losses), median(losses[-3:])) if losses else None
        pairs = {"loss": (loss, self.detector.best), "held-out loss": (held_out, best_held_out)}
        far: dict[str, list[float | None]] = {}
        for name, (value, best) in pairs.items():
            if value is not None and best is not None and self.detector.far_above(value, best):
                far[name] = [value, best]
        return far

    def _compare_with_replay(self, point: Point) -> ReplayOutcome | None:
        """Return the outcome of a replay if this step decides it, without waiting until the detector confirms a spike."""
        replay = self._replay
        if replay is None or point.step < replay.onset:
            return None
        before = replay.before.get(point.step)
        # The history may be too short to have the step.
        loss_before = None if before is None else before.loss
        if before is not None and _is_high_again(before, point, replay):
            self._replay = None
            finding = Finding(
                kind="divergence",
                step=replay.last,
                onset=replay.onset,
                points=1,
                base=replay.base,
                peak=point.loss,
                reason="it happened again when the steps were repeated from the same state: the cause is the data or the "
                "learning rate, not the hardware",
            )
            return ReplayOutcome(point.step, point.loss, loss_before, finding)
        # The spike may still come: the first high loss can be several steps after the onset.
        if point.step < replay.last:
            return None
        self._replay = None
        return ReplayOutcome(point.step, point.loss, loss_before, None)


def _is_high_again(before: Point, now: Point, replay: _Replay) -> bool:
    """Return whether a step that was high or not finite is so again. A step that was normal before gives False."""
    if not before.is_finite:
        return not now.is_finite
    # The losses need not be equal, since sums over the ranks may be rounded in another order. More than half the excess counts.
    # The comparison is negated, so that NaN counts, too.
    excess = before.loss - replay.base
    return excess >= replay.high and not now.loss - replay.base <= excess / 2
