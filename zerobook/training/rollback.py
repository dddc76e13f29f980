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
    """Carries out the recovery actions of the spike monitor. Call the methods on every rank.

    Args:
        state: its step, sample order and learning rate are changed.
        manager: loads the checkpoint.
        spikes: forgets the steps that are abandoned.
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
        # The last step after which samples were left out without going back. Earlier steps may have other samples if repeated.
        self._reordered_step = 0

    def checked(self, action: RecoveryAction) -> RecoveryAction:
        """Return ``action``, or one that stops the run if ``action`` would leave no samples to train on."""
        left_out = self._samples_of(action)
        if left_out and self.state.data.train.without_samples(joined(self.state.progress.skip_ranges, left_out)).is_empty:
            return replace(action, kind="stop", rule="all samples of the data would be left out")
        return action

    def act(self, action: RecoveryAction) -> None:
        """Carry out ``action``, whose kind is not ``stop``. It is logged before it is carried out."""
        state = self.state
        progress = state.progress
        left_out = self._samples_of(action)
        skip_ranges = joined(progress.skip_ranges, left_out)
        # A cut is (first step, share of the scheduled rate, steps until the rate is back on its schedule), also in files.
        cut: list[Any] | None = None
        if action.rate_factor:
            first_step = progress.step if action.to_step is None else action.to_step
            cut = [first_step, action.rate_factor, state.config.rollback_lr_steps]
        # All cuts so far and the new one. The progress in the checkpoint has only those from before it.
        rate_cuts = list(progress.rate_cuts)
        if cut is not None:
            rate_cuts.append(cut)
        intent = self._log_intent(action, left_out, cut)
        # Write the decision before anything is changed. If this attempt is killed, the next one finishes the action.
        self.manager.remember(skip_ranges=skip_ranges, rate_cuts=rate_cuts, rollback_to=action.to_step)
        if action.goes_back:
            self.go_back(action, intent, skip_ranges, rate_cuts)
        else:
            progress.skip_ranges = skip_ranges
            progress.rate_cuts = rate_cuts
            if left_out:
                self._reordered_step = progress.step
            # A stream opens only the shards that it has not passed.
            progress.stream = state.loader.order.passed
            # A new loader takes the changed order from the next step on.
            state.build_loader()
        if left_out and state.end_step < state.total_steps:
            self.say(f"  the run ends at step {state.end_step}; its schedule is still that of {state.total_steps} steps")

    def _log_intent(self, action: RecoveryAction, left_out: list[list[int]], cut: list[Any] | None) -> int | None:
        """Log what is to be done, and say it. Return the number of the rollback's event; None for no rollback."""
        log = self.log
        cause = self.spikes.cause
        intent = None
        if action.goes_back:
            intent = log.event(
                "rollback",
                phase="intent",
                parent=cause,
                action=action.kind,
                from_step=self.state.progress.step,
                to_step=action.to_step,
                why=action.reason,
            )
            cause = intent
        if left_out and action.steps:
            count = sum(end - start for start, end in left_out)
            log.event("skip", parent=cause, ranges=left_out, samples=count, steps=action.steps, why=action.reason)
            self.say(f"  left out from now on: {counted(count, 'sample')} of steps {action.steps[0]} to {action.steps[1]}")
        if cut is not None:
            log.event("lr_change", parent=cause, cut=cut, why=action.reason)
            _, share, steps = cut
            self.say(f"  the learning rate goes on at {share:g} of its schedule, and is back on it after {steps} steps")
        return intent

    def go_back(
        self, action: RecoveryAction, intent: int | None, skip_ranges: list[list[int]], rate_cuts: list[list[Any]]
    ) -> None:
        """Restore weights, optimizer state, schedule, sample order, random numbers, loss scale and detector.

        Args:
            intent: number of the event that announced the rollback.
            skip_ranges: samples that are left out from now on, those of ``action`` included.
            rate_cuts: all cuts of the learning rate, that of ``action`` included.
        """
        to_step = action.to_step
        assert to_step is not None
        state = self.state
        progress = state.progress
        manager = self.manager
        start = time.monotonic()

        # Load the checkpoint, after a save in progress and without the loader, whose processes hold memory.
        manager.finish(self.log)
        state.drop_loader()
        loaded, bytes_read = manager.load(to_step)
        # A checkpoint that was imported from another trainer has no position in the data.
        if not loaded.data_fingerprint:
            resume.place_in_data(loaded, state.data, state.config)
        # The later checkpoints are set aside only now. If the load had failed, a restart would still find them.
        new_paths = self.strategy.on_main(lambda: store.set_aside(manager.folder, to_step, manager.skipped))
        # Of the checkpoints that are left, another one is the newest that is proven good.
        self.strategy.on_main(manager.protect)
        abandoned_steps = progress.step - loaded.step
        self._take_progress(loaded, skip_ranges, rate_cuts)

        # Losses of the abandoned branch that the repeated steps must have again: a difference means that the restored state is
        # wrong.
        losses = self.spikes.go_back(action, loaded.detector, intent)
        if action.rate_factor:
            # The first loss comes before the first update at the lower rate. Later ones differ.
            losses = {step: loss for step, loss in losses.items() if step == to_step + 1}
        elif to_step < self._reordered_step:
            losses = {}
        state.earlier_losses = losses
        state.build_loader()
        # Compare the inputs of the next step with those that the checkpoint recorded.
        verified, differing = state.verify(loaded.following)
        seconds = time.monotonic() - start
        self.log.branch += 1
        self.log.event(
            "rollback",
            phase="outcome",
            parent=intent,
            step=progress.step,
            steps_given_up=abandoned_steps,
            seconds=round(seconds, 3),
            bytes_read=bytes_read,
            set_aside=[str(path) for path in new_paths],
            verified=verified,
            differing=differing,
        )
        manager.remember(rollback_to=None, redone=progress.redone, counted_from=[self.log.attempt, self.log.branch])
        self.say(f"  back at step {progress.step} after {seconds:.1f} s; abandoned: {counted(abandoned_steps, 'step')}")

    def _take_progress(self, loaded: Progress, skip_ranges: list[list[int]], rate_cuts: list[list[Any]]) -> None:
        """Replace the progress by the checkpoint's, except for decisions made since then, and for facts on this attempt."""
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
        """Protect the newest checkpoint from before the spike from being pruned by the next save."""
        if self.strategy.is_main:
            checkpoint = self._before(action)
            steps = [] if checkpoint is None else [store.step_of(checkpoint)]
            self.manager.protect(*steps)

    def set_aside_and_report(self, action: RecoveryAction) -> None:
        """Set aside the checkpoints since the spike began, and write a report of the spike and of what was tried. Collective.

        ``auto`` then resumes from before the spike. The caller ends the process with `STOPPED`.
        """
        log = self.log
        manager = self.manager
        step = self.state.progress.step
        # All ranks take part in this. The other ranks return after it.
        manager.finish(log)
        if not self.strategy.is_main:
            return
        checkpoint = self._before(action)
        checkpoint_path = None
        # Without a checkpoint from before the spike, every checkpoint of the run is set aside.
        last_good_step = 0
        if checkpoint is not None:
            checkpoint_path = str(checkpoint)
            last_good_step = store.step_of(checkpoint)
        new_paths = store.set_aside(manager.folder, last_good_step, manager.skipped)
        log.event(
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
        write_page(log)

    def _describe_next_step(self, action: RecoveryAction, checkpoint: Path | None, new_paths: list[Path]) -> str:
        """Return what can be done after a stop.

        Args:
            checkpoint: the newest one from before the spike.
            new_paths: of the checkpoints that were saved since.
        """
        if action.by is not None:
            return "Go on with --resume_from_checkpoint auto." if checkpoint else "No checkpoint was saved."
        saved_since = f" Saved since it began: {', '.join(map(str, new_paths))}." if new_paths else ""
        next_step = next_step_after_stop(checkpoint)
        return f"{saved_since}\n  {next_step} The learning rate was {self.state.config.learning_rate}."

    def _before(self, action: RecoveryAction) -> Path | None:
        """Return the newest complete checkpoint from before the spike. Rank 0."""
        return self.manager.before(action.onset - LEAD + 1)

    def _samples_of(self, action: RecoveryAction) -> list[list[int]]:
        """Return [start, end) ranges of the samples that ``action`` leaves out: all samples in the rows of its steps."""
        if action.kind == "stop" or not action.steps:
            return []
        loader = self.state.loader
        samples: list[int] = []
        for start, end in self.spikes.cursors(*action.steps):
            rows, _ = loader.order.take(start, self.state.layout.global_batch, end)
            for row in rows.tolist():
                samples += loader.rows.samples_of(row)
        return ranges(samples)
