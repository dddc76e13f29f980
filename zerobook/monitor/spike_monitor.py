"""The spike monitor of a run: feed the detector, log its findings, and decide on measures.

Every rank has a `SpikeMonitor` and feeds it the same reduced values, so all ranks decide on the same measure. Rank 0 alone
knows which checkpoints are complete, and sends that to the other ranks when a decision needs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from zerobook.monitor.detector import Detector, Finding, Point, Settings
from zerobook.monitor.policy import LEAD, RecoveryAction, RecoveryPolicy
from zerobook.runlog.records import StepRecord
from zerobook.utils.bars import tqdm

if TYPE_CHECKING:
    from zerobook.checkpoint.manager import CheckpointManager
    from zerobook.config import RecipeConfig
    from zerobook.runlog.writer import RunLog
    from zerobook.strategy import Strategy
    from zerobook.strategy.replicas import Replicas

_HISTORY = 10_000
"""steps whose losses and samples stay in memory, 380 bytes each, to compare with when they are done again"""
_EVENT = {"armed": "anomaly", "outlier": "anomaly", "spike_end": "spike_end"}


class Done(NamedTuple):
    """A step that was done. ``cursor``: positions in the sample order before and after it."""

    step: int
    loss: float
    masked: bool
    cursor: tuple[int, int]


class _Replay(NamedTuple):
    """Steps that are done again with nothing changed, to see whether the spike comes again."""

    onset: int
    last: int
    before: dict[int, Done]
    base: float
    high: float
    """excess above ``base`` from which a loss was high"""
    seq: int | None


class SpikeMonitor:
    """The spike monitor of a run; `see` takes the steps.

    Args:
        detector: state of the detector in the checkpoint; empty for a new run.
        ladder: state of the ladder, as `RecoveryPolicy.state` returned it; empty for a new run.
    """

    def __init__(
        self,
        config: RecipeConfig,
        strategy: Strategy,
        manager: CheckpointManager,
        log: RunLog,
        *,
        detector: dict[str, Any],
        ladder: dict[str, Any],
    ):
        self.strategy, self.manager, self.log = strategy, manager, log
        self.settings = Settings()
        self.detector = Detector(self.settings, detector)
        self.ladder = RecoveryPolicy(
            config.on_spike, max_rollbacks=config.max_rollbacks, rate_factor=config.rollback_lr_factor,
            state=ladder,
        )  # fmt: skip
        self.history: deque[Done] = deque(maxlen=_HISTORY)
        self._cursors: dict[int, tuple[int, int]] = {}  # kept over rollbacks: a step's samples stay in place
        self._messages: list[str] = []
        self.seq: int | None = None
        """seq of the event that led to the measure which `see` returned"""
        self._fp16 = strategy.plan.precision == "fp16"
        self._replay: _Replay | None = None
        self._saved: list[int] = []  # steps saved while the detector was calm; not proven yet
        self._held: int | None = None

    def point(self, record: StepRecord) -> Point:
        """Return the detector's point. Under fp16, none is masked: its scaler skips steps with an overflow, by design."""
        norm, loss = float(record.grad_norm), float(record.loss)
        masked = not self._fp16 and not (math.isfinite(norm) and math.isfinite(loss))
        return Point(step=record.step, loss=loss, grad_norm=norm, learning_rate=record.learning_rate, masked=masked)

    def take_messages(self) -> list[str]:
        """Return the sentences for experiment trackers since the last call; on rank 0 only."""
        messages = self._messages
        self._messages = []
        return messages

    def see(self, records: Sequence[StepRecord]) -> RecoveryAction | None:
        """Process the steps since the last log point; return a measure, mostly None. Collective if it is not None.

        Steps after one that leads to a rollback are not processed: they will be done again.
        """
        for record in records:
            point = self.point(record)
            done = Done(point.step, point.loss, point.masked, record.cursor)
            findings = self.detector.update(point)
            self.history.append(done)
            self._cursors[done.step] = done.cursor
            if len(self._cursors) > _HISTORY:
                del self._cursors[next(iter(self._cursors))]
            again = self._compare(done)
            if again is not None and (measure := self.decide(again)).kind != "none":
                return measure  # one decision per step: the ladder has moved on
            for finding in findings:
                answer = self._found(finding)
                if answer is not None and answer.kind != "none":
                    return answer
        self._prove(records[-1].step)
        return None

    def dead(self) -> bool:
        """Return whether the loss has not been finite for so many steps that the weights cannot be."""
        lost = [done for done in list(self.history)[-self.settings.patience :] if not math.isfinite(done.loss)]
        return len(lost) == self.settings.patience

    def far_above_best(self, held_out: float | None, best_held_out: float | None) -> dict[str, list[float | None]]:
        """Return which losses end far above their best, whether or not a spike was found: name -> [value, best].

        For the loss, the median of the last points is compared with the lowest level; for the held-out loss, the last
        evaluation with the best one.
        """
        last = [done.loss if math.isfinite(done.loss) else math.inf for done in self.history][-self.settings.patience :]
        pairs = {"loss": (median(last) if last else None, self.detector.best), "held-out loss": (held_out, best_held_out)}
        return {
            name: [value, best]
            for name, (value, best) in pairs.items()
            if value is not None and best is not None and self.detector.far_above(value, best)
        }

    def _found(self, finding: Finding) -> RecoveryAction | None:
        facts = {key: getattr(finding, key) for key in ("step", "onset", "points", "base", "peak", "reason")}
        if self.strategy.is_main:
            kind = _EVENT.get(finding.kind, "spike")
            self.seq = self.log.event(kind, kind=finding.kind, alarm=finding.alarm, **facts)
            if finding.kind != "armed":
                self._say(f"step {finding.step}: {finding.kind.replace('_', ' ')}: {finding.reason}")
        if finding.kind == "armed":
            self._hold()
        if finding.kind == "spike":  # a checkpoint saved shortly before may hold the cause
            self._saved = [step for step in self._saved if step < finding.onset - LEAD]
        return self.decide(finding) if finding.asks else None

    def replicas(self, step: int) -> RecoveryAction | None:
        """Return a measure if ranks that should hold the same weights do not; call it before a save. Collective.

        A checkpoint takes a share from each rank, so it would hold a mixture. The loss may never show such a fault.
        """
        differing = self.strategy.differing_replicas()
        if differing is None:
            return None
        level = self.detector.loss.level()
        words = "the ranks' copies of the weights differ"
        self.seq = None
        if self.strategy.is_main:
            self.seq = self.log.event("spike", kind="divergence", alarm=True, step=step, onset=step, points=1, base=level,
                                      peak=level, reason=words)  # fmt: skip
        finding = Finding(kind="divergence", step=step, onset=step, points=1, base=level, peak=level, reason=words)
        return self.decide(finding, differing)

    def decide(self, finding: Finding, differing: Replicas | None = None) -> RecoveryAction:
        """Decide on a measure against ``finding``, and log it. Collective.

        Args:
            differing: the difference between the ranks' copies of the weights, if it is known.
        """
        strategy, manager = self.strategy, self.manager
        differing = differing or strategy.differing_replicas()
        hardware = strategy.on_main(lambda: differing.describe(manager.reads_before(finding.onset))) if differing else None
        onset = min(finding.onset, self.detector.onset() or finding.onset)
        manager.finish(self.log)  # a save in progress may prune the checkpoint to go back to
        good, others = strategy.on_main(manager.steps)
        finding, before = replace(finding, onset=onset), self.ladder.state()
        measure = self.ladder.decide(finding, good, others, hardware)
        while measure.to_step is not None and not manager.is_whole(measure.to_step):
            good, others = ([step for step in steps if step != measure.to_step] for steps in (good, others))
            self.ladder.restore(before)
            measure = self.ladder.decide(finding, good, others, hardware)
        if self.strategy.is_main:
            self.seq = self.log.event(
                "decision", parent=self.seq, measure=measure.kind, rule=measure.rule, why=measure.reason,
                options=measure.options, to_step=measure.to_step, leaves_out_steps=measure.steps, hardware=hardware,
                ladder=self.ladder.state(),
            )  # fmt: skip
            if hardware:
                tqdm.write(f"  {hardware}")
            done = measure.kind if measure.kind != "none" else "nothing is done"
            # A spike that nobody asked to leave alone, and that stays in the weights, must be seen.
            warning = "WARNING: " if measure.kind == "none" and self.ladder.on_spike != "log" else ""
            self._say(f"  {warning}decision: {done} ({measure.rule})")
        return measure

    def _say(self, sentence: str) -> None:
        tqdm.write(sentence)
        self._messages.append(sentence.strip())

    # --- checkpoints
    def saved(self, step: int) -> None:
        """Record that a save of this step has begun."""
        if self.detector.calm:
            self._saved.append(step)

    def _prove(self, step: int) -> None:
        """Mark checkpoints as proven good, after training has gone on from them for a while without a finding."""
        if not self.detector.calm:
            return
        self._release()
        proven = [saved for saved in self._saved if step - saved >= self.settings.patience + LEAD]
        self._saved = [saved for saved in self._saved if saved not in proven]
        if proven and self.strategy.is_main:
            self.manager.prove(proven, self.log)

    def _hold(self) -> None:
        if self.strategy.is_main and self._held is None and (good := self.manager.steps()[0]):
            self._held = max(good)
            self.manager.protect(self._held)
            self.log.event("checkpoint", state="pinned", step=self._held, parent=self.seq)

    def _release(self) -> None:
        if self.strategy.is_main and self._held is not None:
            self.manager.protect()
            self.log.event("checkpoint", state="unpinned", step=self._held)
            self._held = None

    # --- steps done again
    def back(self, measure: RecoveryAction, detector: dict[str, Any], finding_seq: int | None) -> dict[int, float]:
        """Reset to ``measure.to_step`` after a rollback. Return step -> loss of the steps whose losses must be the same."""
        assert measure.to_step is not None
        before = {done.step: done for done in self.history if done.step > measure.to_step}
        excursion = self.detector.excursion
        base, high = (excursion.base, self.settings.high * excursion.unit) if excursion else (math.nan, math.nan)
        while self.history and self.history[-1].step > measure.to_step:
            self.history.pop()
        self.detector = Detector(self.settings, detector)
        self._saved = [step for step in self._saved if step <= measure.to_step]
        self._replay = None
        if measure.kind == "replay":
            self._replay = _Replay(measure.onset, measure.noticed, before, base, high, finding_seq)
        first = measure.onset - LEAD + 1 if measure.steps is None else measure.steps[0]
        return {step: done.loss for step, done in before.items() if step < first and math.isfinite(done.loss)}

    def cursors(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the positions in the sample order before and after each of these steps, as far as they are in memory."""
        return [self._cursors[step] for step in range(first, last + 1) if step in self._cursors]

    def _compare(self, done: Done) -> Finding | None:
        """Return a finding if a replayed step is high again, without waiting until the detector confirms it; else None."""
        replay = self._replay
        if replay is None or done.step < replay.onset:
            return None
        was = replay.before.get(done.step)
        if was is not None and _high_again(was, done, replay):
            self._replay = None
            words = (
                "it happened again when the steps were repeated from the same state: the cause is the data or the learning "
                "rate, not the hardware"
            )
            if self.strategy.is_main:
                self.seq = self.log.event("verify", after="replay", parent=replay.seq, step=done.step, reproduced=True,
                                          loss=done.loss, loss_before=was.loss)  # fmt: skip
                self._say(f"step {done.step}: {words}")
            return Finding(
                kind="divergence",
                step=replay.last,
                onset=replay.onset,
                points=1,
                base=replay.base,
                peak=done.loss,
                reason=words,
            )
        if done.step >= replay.last:  # a precursor may be steps ahead of the first high loss
            self._replay = None
            if self.strategy.is_main:
                self.log.event("verify", after="replay", parent=replay.seq, step=done.step, reproduced=False,
                               loss=done.loss, loss_before=was.loss if was else None)  # fmt: skip
                self._say(
                    f"step {done.step}: it did not happen again when the steps were repeated from the same state; no data is "
                    "left out"
                )
        return None


def _high_again(was: Done, now: Done, replay: _Replay) -> bool:
    """Return whether a step that was high, or not applied, is so again. Steps that were normal prove nothing."""
    if was.masked or not math.isfinite(was.loss):
        return now.masked or not math.isfinite(now.loss)
    excess = was.loss - replay.base
    return excess >= replay.high and not now.loss - replay.base <= excess / 2
