"""The spike monitor of a run: it gets the measurements of each step, finds spikes, and decides on recovery actions.

The trainer carries the actions out.
"""

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

# A learning rate counts as raised if it is more than this factor times the rate of the step before.
RAISED_RATE = 1.1
# Number of points of an excursion that are needed to tell whether the loss has a new level or still rises.
NEW_LEVEL_POINTS = 6
# A gradient norm of more than this factor times its level means damage, whatever was announced. In public logs, the median
# factor was 21 at divergences, and 1.2 at restarts of the learning rate.
MOST_NORM = 20.0
# Number of the last steps that stay in memory, to compare repeated steps with.
HISTORY_STEPS = 10_000


class ReplayOutcome(NamedTuple):
    """Outcome of a replay: whether a spike came again when its steps were repeated with nothing changed.

    Attributes:
        step: the step that has decided it.
        loss: the loss of this step in the replay.
        loss_before: its loss before the rollback; None if it is not in memory any more.
        finding: the spike in the replay; None if it did not come again.
    """

    step: int
    loss: float
    loss_before: float | None
    finding: Finding | None


class Observation(NamedTuple):
    """Findings of a step, and the outcome of a replay; None if there is no replay, or if this step does not decide it."""

    findings: list[Finding]
    replay: ReplayOutcome | None


class _Replay(NamedTuple):
    """A replay of the steps from ``onset`` to ``last``.

    Attributes:
        before: step -> its point before the rollback.
        base: level of the loss before the spike.
        high: a loss was high if it was at least this much above ``base``.
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
        detector: what `state` returned, from the checkpoint; empty for a new run.
        policy: what `RecoveryPolicy.state` returned; empty for a new run.

    Attributes:
        expected: the announced events.
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
        # The factor allows for rounding, which may put a rate just above the peak.
        self._peak_rate = 1.001 * peak_rate

    @property
    def last_is_finite(self) -> bool:
        """True if the loss and the gradient of the last step were finite, or there was no step."""
        return not self._history or self._history[-1].is_finite

    @property
    def has_lost_weights(self) -> bool:
        """True if no loss of the last `Settings.patience` steps was finite, so that the weights cannot be finite."""
        newest = list(self._history)[-self.settings.patience :]
        not_finite = [point for point in newest if not math.isfinite(point.loss)]
        return len(not_finite) == self.settings.patience

    def state(self) -> dict[str, Any]:
        """Return the state of the detector with the announced events, JSON-ready."""
        return {**self.detector.state(), "expected": self.expected.state(self.detector.last_step or 0)}

    def update(self, point: Point) -> Observation:
        """Process the next step, and return its findings."""
        self._expect_raised_rate(point)
        findings = self.detector.update(point)
        self._history.append(point)
        findings = [self._explain(finding, point) for finding in findings]
        replay = self._compare_with_replay(point)
        # Only the detector recognises a fault without a high loss, such as losses of exactly 0. If it has found one in the
        # replay, the fault did come again.
        if replay is not None and replay.finding is None and any(finding.needs_action for finding in findings):
            replay = None
        return Observation(findings, replay)

    def _expect_raised_rate(self, point: Point) -> None:
        """Announce an event if the schedule raises the learning rate, such as at a warm restart."""
        rate = point.learning_rate
        # A new run is in its warm-up at first, which is no event.
        is_new = self.detector.seen < self.settings.level_points
        last_rate = self.detector.last_rate
        if is_new or rate is None or last_rate is None:
            return
        # A rate above the schedule's peak may do harm, so it is not announced.
        if RAISED_RATE * last_rate < rate <= self._peak_rate:
            self.expected.add(point.step, f"the learning rate was raised from {last_rate:.3g} to {rate:.3g}")

    def _explain(self, finding: Finding, point: Point) -> Finding:
        """Return the finding. If an announced event may have caused it, its reason names the event.

        If the event explains the finding completely, return a level shift instead, which needs no action.
        """
        event = self.expected.at(finding.onset)
        if finding.is_slow:
            event = self.expected.during(finding.onset, finding.step)
        is_explicable = finding.alarm or finding.kind == "level_shift"
        # An event cannot explain a loss or a gradient that is not finite.
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
        # A few points do not show a new level. After a shock, the weights may be damaged, whatever was announced.
        if excursion is None or len(excursion.losses) < NEW_LEVEL_POINTS or self.detector.shock is not None:
            return False
        norms = [past.grad_norm for past in self._history if past.step >= finding.onset and past.grad_norm is not None]
        # The detector has the level of the logarithm of the norm.
        has_level = len(self.detector.norm.accepted) > 0
        if norms and has_level and max(norms) > MOST_NORM * math.exp(self.detector.norm.level()):
            return False
        newest_level = median(excursion.losses[-3:])
        level_before = median(excursion.losses[-NEW_LEVEL_POINTS:-3])
        rise = newest_level - excursion.base
        # A loss that still rises has no new level. Its last three points are above the three before them by more than the
        # noise, and by more than a quarter of the rise.
        is_rising = newest_level - level_before > max(2.5 * excursion.unit, rise / 4)
        # A moderate rise is smaller than the loss before it. If that is near 0, the rise is compared with the noise instead.
        return rise < max(abs(excursion.base), 10 * excursion.unit) and not is_rising

    def decide(
        self, finding: Finding, proven: Sequence[int], unproven: Sequence[int], hardware: str | None, step: int = 0
    ) -> RecoveryAction:
        """Return the action against a finding; the arguments are those of `RecoveryPolicy.decide`.

        Pass the action to ``policy.record`` if it is taken.
        """
        # If a gradient norm has armed the detector before the first high loss, the spike began with this norm.
        onset = self.detector.find_onset()
        if onset is not None and onset < finding.onset:
            finding = replace(finding, onset=onset)
        return self.policy.decide(finding, proven, unproven, hardware, step)

    def go_back(self, action: RecoveryAction, detector: dict[str, Any]) -> dict[int, float]:
        """Return to the state after ``action.to_step``, and prepare to compare the repeated steps if the action is a replay.

        Args:
            detector: state of the detector in the checkpoint.

        Returns:
            Step -> loss, for those of the forgotten steps that must have the same loss when they are repeated.
        """
        assert action.to_step is not None
        # Read what a high loss is from the detector before it is replaced below.
        excursion = self.detector.excursion
        base = math.nan
        high = math.nan
        if excursion is not None:
            base = excursion.base
            high = self.settings.high * excursion.unit
        before: dict[int, Point] = {}
        while self._history and self._history[-1].step > action.to_step:
            point = self._history.pop()
            # If a step was done several times, keep its newest point, which comes first here.
            before.setdefault(point.step, point)
        # If the losses show no disturbance, as when only copies of the weights differ, they cannot show whether it comes again.
        is_disturbed = self.detector.find_onset() is not None
        self.detector = Detector(self.settings, detector)
        self._replay = None
        if action.kind == "replay" and is_disturbed:
            self._replay = _Replay(action.onset, action.noticed, before, base, high)

        # Losses must be the same before the first step that is suspect, or whose samples are left out.
        first_changed = action.onset - LEAD + 1 if action.steps is None else action.steps[0]
        losses: dict[int, float] = {}
        for step, point in sorted(before.items()):
            if step < first_changed and math.isfinite(point.loss):
                losses[step] = point.loss
        return losses

    def far_above_best(self, held_out: float | None, best_held_out: float | None) -> dict[str, list[float | None]]:
        """Return name -> [value, best] of the losses that are far above their best at the end of a run.

        The last losses are compared with the lowest level so far, and the held-out loss of the last evaluation with the best.
        """
        losses = []
        for point in list(self._history)[-self.settings.patience :]:
            # A median needs numbers that can be sorted, which NaN cannot.
            losses.append(point.loss if math.isfinite(point.loss) else math.inf)
        # The lower of two medians, since a loss that falls until the end has its last points below the median of more.
        loss = min(median(losses), median(losses[-3:])) if losses else None
        pairs = {"loss": (loss, self.detector.best), "held-out loss": (held_out, best_held_out)}
        far: dict[str, list[float | None]] = {}
        for name, (value, best) in pairs.items():
            if value is not None and best is not None and self.detector.is_far_above(value, best):
                far[name] = [value, best]
        return far

    def _compare_with_replay(self, point: Point) -> ReplayOutcome | None:
        """Return the outcome of a replay if this step decides it, else None.

        A single high loss decides, long before the detector would confirm a spike.
        """
        replay = self._replay
        if replay is None or point.step < replay.onset:
            return None
        before = replay.before.get(point.step)
        # The step is missing if the history is too short.
        loss_before = None if before is None else before.loss
        if before is not None and _is_high_again(before, point, replay):
            self._replay = None
            finding = Finding(
                kind="divergence",
                # The finding is of the same spike, so keep the step at which this was noticed before the rollback. A skip
                # leaves out samples up to this step.
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
    """Return whether a step was high or not finite before the rollback, and is so again in the replay."""
    if not before.is_finite:
        return not now.is_finite
    # The losses need not be equal, since sums over the ranks may be rounded differently. So more than half the excess suffices.
    # A comparison with NaN is false. With ``not <=`` instead of ``>``, NaN counts as high.
    excess = before.loss - replay.base
    return excess >= replay.high and not now.loss - replay.base <= excess / 2
