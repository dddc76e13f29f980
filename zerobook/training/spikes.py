"""Give the steps of a run to the spike monitor, and its findings to the runlog, the terminal and the checkpoints."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zerobook.checkpoint.manager import CheckpointManager
from zerobook.config import OnSpike, RecipeConfig
from zerobook.monitor.events import WINDOW
from zerobook.monitor.finding import Finding, Point
from zerobook.monitor.policy import LEAD, RecoveryAction
from zerobook.monitor.spike_monitor import HISTORY_STEPS, ReplayOutcome, SpikeMonitor
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.strategy.replicas import ReplicaDifference

# Steps in a row without a finite gradient that are usual under fp16, while the loss scaler searches for its scale. It halves
# the scale in each of these steps, and begins at 2^16 (torch 2.13, DeepSpeed 0.19.8) or, with some DeepSpeed JSONs, at 2^32.
MOST_OVERFLOWS = 40
# Kind of a finding -> type of its event; ``spike`` for all others.
_EVENTS = {"armed": "anomaly", "outlier": "anomaly", "spike_end": "spike_end"}


class SpikeHandler:
    """Gives each step to the `SpikeMonitor`, reports what it finds, and decides which checkpoints are proven good.

    Every rank has one, and gives its monitor the same reduced values, so all ranks decide on the same action. Rank 0 alone
    knows which checkpoints are complete, and sends that to the other ranks when a decision needs it.

    Args:
        say: prints a line on rank 0.
        detector: state of the detector in the checkpoint; empty for a new run.
        policy: state of the recovery policy; empty for a new run.
        total_steps: of the run; None if they are not known.

    Attributes:
        cause: number of the event that led to the last decision; None if there is none.
    """

    def __init__(
        self,
        config: RecipeConfig,
        strategy: Strategy,
        manager: CheckpointManager,
        log: RunLog,
        say: Callable[[str], None],
        *,
        detector: dict[str, Any],
        policy: dict[str, Any],
        total_steps: int | None = None,
    ):
        self.strategy = strategy
        self.manager = manager
        self.log = log
        self.say = say
        self.monitor = SpikeMonitor(
            config.on_spike,
            max_rollbacks=config.max_rollbacks,
            rate_factor=config.rollback_lr_factor,
            order=config.policy,
            total_steps=total_steps,
            peak_rate=config.learning_rate,
            detector=detector,
            policy=policy,
        )
        for entry in config.expect:
            step, _, what = entry.partition(" ")
            self.expect(int(step), what)
        self.cause: int | None = None
        self._messages: list[str] = []
        # Positions in the sample order before and after each step. A rollback does not change them.
        self._cursors: dict[int, tuple[int, int]] = {}
        # Steps of checkpoints that were saved while the detector was calm, and that are not proven good yet.
        self._unproven: list[int] = []
        # Number of the event of the last rollback, which began the replay.
        self._replay_cause: int | None = None
        # Steps in a row whose gradient was not finite.
        self._overflows = 0
        # The newest step that was processed.
        self._step = 0

    def expect(self, step: int, what: str, *, window: int = WINDOW) -> None:
        """Announce an event that may raise the loss from ``step`` on, such as another mixture.

        If the loss or its noise rises moderately in the ``window`` steps from then on, nothing is done against it. Call this on
        every rank, before that step is logged.

        Args:
            what: the event, in words.
        """
        self.monitor.expected.add(step, what, window=window)

    def see(self, records: Sequence[StepRecord]) -> RecoveryAction | None:
        """Process the steps since the last log point. Return a recovery action; None if nothing is to be done.

        A decision on an action is collective. Steps after one that leads to a rollback are not processed, since the run will
        repeat them.
        """
        combined = None
        self._step = records[-1].step
        for record in records:
            action = self._see_step(record)
            if action is None:
                continue
            if not action.goes_on:
                return action
            # The run goes on after each of these actions, so one action leaves out the samples of all.
            if combined is not None and combined.steps and action.steps:
                action = replace(action, steps=(combined.steps[0], action.steps[1]))
            combined = action
        self._prove_checkpoints(records[-1].step)
        return combined

    def take_messages(self) -> list[str]:
        """Return the sentences for experiment trackers since the last call. Only rank 0 has any."""
        messages = self._messages
        self._messages = []
        return messages

    def check_replicas(self, step: int) -> RecoveryAction | None:
        """Return an action if ranks that should hold the same weights hold different ones; None otherwise. Collective.

        Call it before a save. A checkpoint takes a share from each rank, so it would mix the different weights. The loss may
        never show such a fault.
        """
        differing = self.strategy.find_differing_replicas()
        if differing is None:
            return None
        self._step = step
        level = self.monitor.detector.loss.level()
        reason = "the ranks' copies of the weights differ"
        finding = Finding(kind="divergence", step=step, onset=step, points=1, base=level, peak=level, reason=reason)
        self._log_finding(finding)
        return self.decide(finding, differing)

    def decide(self, finding: Finding, differing: ReplicaDifference | None = None) -> RecoveryAction:
        """Decide on an action against ``finding``, and log it. Collective.

        Args:
            differing: the difference between the ranks' copies of the weights, if it is known.
        """
        manager = self.manager
        # If copies differ, a rank has computed wrongly: the hardware is at fault, and not the data or the learning rate.
        replicas = differing or self.strategy.find_differing_replicas()
        hardware = None
        if replicas is not None:
            hardware = self.strategy.on_main(lambda: replicas.describe(manager.make_weight_reader(finding.onset)))
        # A save in progress may prune the checkpoint to go back to.
        manager.finish(self.log)
        proven, unproven = self.strategy.on_main(manager.steps)
        action = self.monitor.decide(finding, proven, unproven, hardware, self._step)
        while action.to_step is not None and not manager.is_undamaged(action.to_step):
            # The checkpoint is damaged, so the decision is made without it.
            proven = [step for step in proven if step != action.to_step]
            unproven = [step for step in unproven if step != action.to_step]
            action = self.monitor.decide(finding, proven, unproven, hardware, self._step)
        self.monitor.policy.record(action)
        self._report_decision(action, hardware)
        return action

    def report_command(self, action: RecoveryAction, command_event: int) -> None:
        """Report an action that a person asked for. ``command_event`` is the number of the command's event."""
        self.cause = command_event
        self._report_decision(action, None)

    def change_policy(self, on_spike: OnSpike) -> None:
        """Set ``--on_spike`` to another value for the rest of the run."""
        policy = self.monitor.policy
        policy.on_spike = on_spike
        # Save the new policy: a later attempt uses it too, although its flags name the old one.
        self.manager.remember(policy=policy.state())

    def note_save(self, step: int) -> None:
        """Note that a save of ``step`` has begun. A checkpoint from a calm time may later be proven good."""
        if self.monitor.detector.is_calm:
            self._unproven.append(step)

    def forget_abandoned(self, action: RecoveryAction, detector: dict[str, Any], cause: int | None) -> dict[int, float]:
        """Forget the steps that a rollback abandons.

        Returns:
            step -> loss of the abandoned steps that must have the same loss when they are repeated.

        Args:
            detector: state of the detector in the checkpoint.
            cause: number of the rollback's event.
        """
        assert action.to_step is not None
        self._unproven = [step for step in self._unproven if step <= action.to_step]
        self._replay_cause = cause
        self._overflows = 0
        return self.monitor.go_back(action, detector)

    def list_cursors(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the positions in the sample order before and after each step from ``first`` to ``last``.

        Only the newest steps of this attempt are in memory. The result lacks all others.
        """
        return [self._cursors[step] for step in range(first, last + 1) if step in self._cursors]

    # --- one step
    # Give a step to the monitor, and report what it finds. Return a recovery action; None if nothing is to be done.
    def _see_step(self, record: StepRecord) -> RecoveryAction | None:
        self._cursors[record.step] = record.cursor
        if len(self._cursors) > HISTORY_STEPS:
            # Forget the oldest step.
            del self._cursors[next(iter(self._cursors))]
        observation = self.monitor.update(self._make_point(record))
        if observation.replay is not None:
            self._report_replay(observation.replay)
            if observation.replay.finding is not None:
                action = self.decide(observation.replay.finding)
                # A step leads to one action at most, since all its findings are of the same spike.
                if action.kind != "none":
                    return action
        for finding in observation.findings:
            self._report_finding(finding)
            if finding.needs_action:
                action = self.decide(finding)
                if action.kind != "none":
                    return action
        return None

    def _make_point(self, record: StepRecord) -> Point:
        """Return the detector's point of a step.

        The point is marked as skipped if the loss or the gradient is not finite. Under fp16, a few gradients that are not
        finite are usual, since the loss scaler tries larger scales regularly.
        """
        norm = float(record.grad_norm)
        loss = float(record.loss)
        self._overflows += 1
        if math.isfinite(norm):
            self._overflows = 0
        # Whether a gradient that is not finite is usual here.
        may_overflow = self.strategy.plan.precision == "fp16" and self._overflows <= MOST_OVERFLOWS
        is_skipped = not math.isfinite(loss) or not (math.isfinite(norm) or may_overflow)
        return Point(step=record.step, loss=loss, grad_norm=norm, learning_rate=record.learning_rate, is_skipped=is_skipped)

    # --- reports
    def _report_finding(self, finding: Finding) -> None:
        self._log_finding(finding)
        if finding.kind != "armed":
            self._tell(f"step {finding.step}: {finding.kind.replace('_', ' ')}: {finding.reason}")
        if finding.kind == "spike":
            # A checkpoint saved shortly before may hold the cause, so it will not be proven good.
            self._unproven = [step for step in self._unproven if step < finding.onset - LEAD]

    def _log_finding(self, finding: Finding) -> None:
        self.cause = self.log.event(
            _EVENTS.get(finding.kind, "spike"),
            kind=finding.kind,
            alarm=finding.alarm,
            step=finding.step,
            onset=finding.onset,
            points=finding.points,
            base=finding.base,
            peak=finding.peak,
            reason=finding.reason,
        )

    # A replay repeats the steps of a spike with the same samples. If the spike does not happen again, these did not cause it.
    def _report_replay(self, replay: ReplayOutcome) -> None:
        event_number = self.log.event(
            "verify",
            after="replay",
            parent=self._replay_cause,
            step=replay.step,
            reproduced=replay.finding is not None,
            loss=replay.loss,
            loss_before=replay.loss_before,
        )
        if replay.finding is not None:
            self.cause = event_number
            self._tell(f"step {replay.step}: {replay.finding.reason}")
        else:
            self._tell(
                f"step {replay.step}: it did not happen again when the steps were repeated from the same state; no data is "
                "left out"
            )

    # Log an action, record it as taken, and print it.
    def _report_decision(self, action: RecoveryAction, hardware: str | None) -> None:
        self.cause = self.log.event(
            "decision",
            parent=self.cause,
            action=action.kind,
            rule=action.rule,
            why=action.reason,
            options=action.options,
            to_step=action.to_step,
            leaves_out_steps=action.steps,
            hardware=hardware,
            policy=self.monitor.policy.state(),
        )
        # The action counts as taken even if this attempt is killed before it is carried out.
        self.manager.remember(policy=self.monitor.policy.state())
        if hardware:
            self.say(f"  {hardware}")
        if action.kind != "none":
            self._tell(f"  decision: {action.kind} ({action.rule})")
        elif self.monitor.policy.on_spike == "log":
            self._tell(f"  decision: nothing is done ({action.rule})")
        else:
            # The user did not ask to ignore spikes, and this one stays in the weights, so a warning is due.
            self._tell(f"  WARNING: decision: nothing is done ({action.rule})")

    def _tell(self, sentence: str) -> None:
        """Print a sentence, and keep it for the trackers. They are on rank 0."""
        self.say(sentence)
        if self.strategy.is_main:
            self._messages.append(sentence.strip())

    # --- checkpoints
    def _prove_checkpoints(self, step: int) -> None:
        """Mark checkpoints as proven good if enough steps have followed them without a finding. ``step``: the newest step."""
        if not self.monitor.detector.is_calm:
            return
        newest_proven = step - self.monitor.settings.patience - LEAD
        # A checkpoint that is still being written is proven at a later log point.
        step_in_writing = self.manager.saver.writing_step
        proven = [saved for saved in self._unproven if saved <= newest_proven and saved != step_in_writing]
        self._unproven = sorted(set(self._unproven) - set(proven))
        if proven and self.strategy.is_main:
            # Report ended saves first: the report of a step's save withdraws an earlier proof of that step.
            self.manager.report(self.log)
            self.manager.prove(proven, self.log)
