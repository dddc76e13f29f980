"""Carry out recovery actions against a spike: leave samples out, roll back to a checkpoint, lower the rate, or stop the run."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerobook.checkpoint import store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.constants import STOPPED
from zerobook.monitor.policy import LEAD, RecoveryAction
from zerobook.runlog.formatting import next_step_after_stop
from zerobook.runlog.lifecycle import write_page
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.training import resume
from zerobook.training.spikes import SpikeHandler
from zerobook.training.state import RunState
from zerobook.utils.ranges import joined, ranges
from zerobook.utils.units import counted


class Recovery:
    """Carries out recovery actions: those of the spike monitor, of hooks and of commands. Call the methods on every rank.

    Args:
        state: the run's state. A recovery action changes its progress, sample order and learning rate.
        manager: loads the checkpoint to go back to.
        spikes: forgets the abandoned steps.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        state: RunState,
        strategy: Strategy,
        manager: CheckpointManager,
        spikes: SpikeHandler,
        log: RunLog,
        say: Callable[[str], None],
    ):
        self.state = state
        self.strategy = strategy
        self.manager = manager
        self.spikes = spikes
        self.log = log
        self.say = say
        # The last step after which samples were left out without going back. Steps from before it that are repeated may have
        # other samples than the first time.
        self._reordered_step = 0

    def check_samples_left(self, action: RecoveryAction) -> RecoveryAction:
        """Return ``action``; an action that stops the run instead if ``action`` would leave no samples to train on."""
        left_out = self._samples_to_leave_out(action)
        if left_out:
            skip_ranges = joined(self.state.progress.skip_ranges, left_out)
            if self.state.data.train.without_samples(skip_ranges).is_empty:
                return replace(action, kind="stop", rule="all samples of the data would be left out")
        return action

    def carry_out(self, action: RecoveryAction) -> None:
        """Log ``action``, whose kind is not ``stop``, and then carry it out."""
        state = self.state
        progress = state.progress
        left_out = self._samples_to_leave_out(action)
        skip_ranges = joined(progress.skip_ranges, left_out)
        # A cut of the learning rate is [first step, share of the scheduled rate, steps until the rate is back on its schedule],
        # here as in the files.
        cut: list[Any] | None = None
        if action.rate_factor:
            first_step = progress.step if action.to_step is None else action.to_step
            cut = [first_step, action.rate_factor, state.config.rollback_lr_steps]
        # All cuts of the run. A rollback needs them, since the checkpoint's progress lacks those that were made after it.
        rate_cuts = list(progress.rate_cuts)
        if cut is not None:
            rate_cuts.append(cut)
        rollback_event = self._announce(action, left_out, cut)
        # Write the decision before anything is changed. If this attempt is killed, the next one finishes the action.
        self.manager.remember(skip_ranges=skip_ranges, rate_cuts=rate_cuts, rollback_to=action.to_step)
        if action.goes_back:
            self.go_back(action, rollback_event, skip_ranges, rate_cuts)
        else:
            progress.skip_ranges = skip_ranges
            progress.rate_cuts = rate_cuts
            if left_out:
                self._reordered_step = progress.step
            # The new order of a stream opens only the shards that the old one has not passed.
            progress.stream = state.loader.order.passed
            # The new loader reads the changed order from the next step on.
            state.build_loader()
        if left_out and state.end_step < state.total_steps:
            self.say(f"  the run ends at step {state.end_step}; its schedule is still that of {state.total_steps} steps")

    def _announce(self, action: RecoveryAction, left_out: list[list[int]], cut: list[Any] | None) -> int | None:
        """Log what will be done, and print it. Return the number of the event of a rollback; None without a rollback.

        Args:
            left_out: [start, end) ranges of the samples that are left out.
            cut: the cut of the learning rate; None if there is none.
        """
        cause = self.spikes.cause
        rollback_event = None
        if action.goes_back:
            rollback_event = self.log.event(
                "rollback",
                phase="intent",
                parent=cause,
                action=action.kind,
                from_step=self.state.progress.step,
                to_step=action.to_step,
                why=action.reason,
            )
            # The events below are consequences of the rollback.
            cause = rollback_event
        if left_out and action.steps:
            count = sum(end - start for start, end in left_out)
            self.log.event("skip", parent=cause, ranges=left_out, samples=count, steps=action.steps, why=action.reason)
            self.say(f"  left out from now on: {counted(count, 'sample')} of steps {action.steps[0]} to {action.steps[1]}")
        if cut is not None:
            self.log.event("lr_change", parent=cause, cut=cut, why=action.reason)
            _, share, steps = cut
            self.say(f"  the learning rate goes on at {share:g} of its schedule, and is back on it after {steps} steps")
        return rollback_event

    def go_back(
        self, action: RecoveryAction, rollback_event: int | None, skip_ranges: list[list[int]], rate_cuts: list[list[Any]]
    ) -> None:
        """Restore weights, optimizer state, schedule, sample order, random numbers, loss scale and detector.

        Args:
            rollback_event: number of the event that announced the rollback.
            skip_ranges: ranges of the samples that are left out from now on, those of ``action`` included.
            rate_cuts: all cuts of the learning rate, that of ``action`` included.
        """
        to_step = action.to_step
        assert to_step is not None
        state = self.state
        progress = state.progress
        manager = self.manager
        start = time.monotonic()

        # Finish a save in progress and free the memory of the loader's processes, then load the checkpoint.
        manager.finish(self.log)
        state.drop_loader()
        loaded, bytes_read = manager.load(to_step)
        # A checkpoint that was imported from another trainer has no position in the data.
        if not loaded.data_fingerprint:
            resume.set_data_position(loaded, state.data, state.config)
        # Set the later checkpoints aside only now: if the load had failed, a restart would still find them. `manager.skipped`
        # has those that are known to be damaged.
        new_paths = self.strategy.on_main(lambda: store.set_aside(manager.folder, to_step, manager.skipped))
        # The newest proven checkpoint may have been set aside, so protect the newest of those that are left.
        self.strategy.on_main(manager.protect)
        abandoned_steps = progress.step - loaded.step
        self._take_progress(loaded, skip_ranges, rate_cuts)

        # Keep the losses of the abandoned steps before the first one that is suspect or has other samples. If these steps have
        # other losses when they are repeated, the restored state is wrong.
        losses = self.spikes.forget_abandoned(action, loaded.detector, rollback_event)
        if action.rate_factor:
            # Only the first loss must be the same: it is computed before the first update at the lower rate.
            losses = {step: loss for step, loss in losses.items() if step == to_step + 1}
        elif to_step < self._reordered_step:
            # The repeated steps have other samples.
            losses = {}
        state.earlier_losses = losses
        state.build_loader()
        # Compare the inputs of the next step with those that the checkpoint recorded.
        verified, differing = state.compare_next_step(loaded.following)
        seconds = time.monotonic() - start
        self.log.branch += 1
        self.log.event(
            "rollback",
            phase="outcome",
            parent=rollback_event,
            step=progress.step,
            steps_given_up=abandoned_steps,
            seconds=round(seconds, 3),
            bytes_read=bytes_read,
            set_aside=[str(path) for path in new_paths],
            verified=verified,
            differing=differing,
        )
        # The rollback is complete. ``redone`` counts the abandoned steps that were logged before the branch that begins here.
        manager.remember(rollback_to=None, redone=progress.redone, counted_from=[self.log.attempt, self.log.branch])
        self.say(f"  back at step {progress.step} after {seconds:.1f} s; abandoned: {counted(abandoned_steps, 'step')}")

    def _take_progress(self, loaded: Progress, skip_ranges: list[list[int]], rate_cuts: list[list[Any]]) -> None:
        """Replace the progress by the checkpoint's, except for later decisions and for the facts of this attempt."""
        progress = self.state.progress
        vars(progress).update(
            vars(loaded)
            | {
                "skip_ranges": skip_ranges,
                "rate_cuts": rate_cuts,
                "redone": progress.redone + progress.step - loaded.step,
                "total_steps": progress.total_steps,
                "world_size": progress.world_size,
                "global_batch": progress.global_batch,
            }
        )
        if self.state.data.held_out:
            # The run may have resumed with other held-out data since the checkpoint.
            progress.use_held_out_data(self.state.data.held_out_fingerprint)

    def protect_before(self, action: RecoveryAction) -> None:
        """Protect the newest checkpoint from before the spike, so that the next save does not prune it."""
        if self.strategy.is_main:
            checkpoint = self._find_checkpoint_before(action)
            # Without such a checkpoint, only the newest proven one and those of explicit saves are protected.
            self.manager.protect(*([] if checkpoint is None else [store.step_of(checkpoint)]))

    def set_aside_and_report(self, action: RecoveryAction) -> None:
        """Set aside the checkpoints that may hold the spike or its cause, and write the report of the run. Collective.

        ``auto`` then resumes from before the spike. The caller ends the process with `STOPPED`.
        """
        step = self.state.progress.step
        # All ranks finish a save in progress. The rest is the work of rank 0.
        self.manager.finish(self.log)
        if not self.strategy.is_main:
            return
        checkpoint = self._find_checkpoint_before(action)
        checkpoint_path = None
        # Without a checkpoint from before the spike, every checkpoint of the run is set aside.
        last_step_before = 0
        if checkpoint is not None:
            checkpoint_path = str(checkpoint)
            last_step_before = store.step_of(checkpoint)
        new_paths = store.set_aside(self.manager.folder, last_step_before, self.manager.skipped)
        self.log.event(
            "stop",
            parent=self.spikes.cause,
            step=step,
            rule=action.rule,
            why=action.reason,
            exit_code=STOPPED,
            go_on_from=checkpoint_path,
            set_aside=[str(path) for path in new_paths],
            by=action.by,
        )
        next_step = self._describe_next_step(action, checkpoint, new_paths)
        self.say(f"STOPPED at step {step}: {action.reason}.\n  {action.rule}. {next_step}")
        self.say(f"  `zerobook runlog show {self.state.config.output_dir} decisions` lists the decisions.")
        write_page(self.log)

    def _describe_next_step(self, action: RecoveryAction, checkpoint: Path | None, new_paths: list[Path]) -> str:
        """Return what a user can do after a stop.

        Args:
            checkpoint: the newest checkpoint from before the spike; None if there is none.
            new_paths: the paths of the checkpoints that were set aside.
        """
        # A person asked for the stop, so there is no spike to describe.
        if action.by is not None:
            return "Go on with --resume_from_checkpoint auto." if checkpoint else "No checkpoint was saved."
        saved_since = f" Saved since it began: {', '.join(map(str, new_paths))}." if new_paths else ""
        return f"{saved_since}\n  {next_step_after_stop(checkpoint)} The learning rate was {self.state.config.learning_rate}."

    def _find_checkpoint_before(self, action: RecoveryAction) -> Path | None:
        """Return the newest complete checkpoint from before the spike; None if there is none. Rank 0 only."""
        # Checkpoints of the `LEAD` - 1 steps before the onset may hold the cause.
        return self.manager.before(action.onset - LEAD + 1)

    def _samples_to_leave_out(self, action: RecoveryAction) -> list[list[int]]:
        """Return [start, end) ranges of the samples that ``action`` leaves out: all samples in the rows of its steps.

        If samples are packed, a row holds several of them.
        """
        if action.kind == "stop" or not action.steps:
            return []
        loader = self.state.loader
        samples: list[int] = []
        for start, end in self.spikes.list_cursors(*action.steps):
            rows, _ = loader.order.take(start, self.state.layout.global_batch, end)
            for row in rows.tolist():
                samples += loader.rows.samples_of(row)
        return ranges(samples)
