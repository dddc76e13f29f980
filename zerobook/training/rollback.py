"""Carry out measures against a spike: leave samples out, roll back to a checkpoint, lower the rate, or stop the run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerobook.checkpoint import store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.monitor.policy import EXIT_CODE, LEAD, RecoveryAction, joined, ranges
from zerobook.monitor.spike_monitor import SpikeMonitor
from zerobook.runlog.lifecycle import write_page
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.training.state import RunState
from zerobook.utils.bars import tqdm
from zerobook.utils.units import counted


class Recovery:
    """Carries out the measures of the spike monitor. Call the methods on every rank.

    Args:
        state: its step, sample order and learning rate are changed.
        manager: loads the checkpoint.
        monitor: forgets the steps that are given up.
        log: the runlog, on rank 0 only.
    """

    def __init__(
        self, state: RunState, strategy: Strategy, manager: CheckpointManager, monitor: SpikeMonitor, log: RunLog | None
    ):
        self.state, self.strategy, self.manager, self.monitor, self.log = state, strategy, manager, monitor, log

    def checked(self, measure: RecoveryAction) -> RecoveryAction:
        """Return ``measure``, or a measure that stops the run if ``measure`` would leave no samples to train on."""
        left_out = self._samples_of(measure)
        if left_out and self.state.data.train.skipping(joined(self.state.progress.skip_ranges, left_out)).is_empty:
            return replace(measure, kind="stop", rule="all samples of the data would be left out")
        return measure

    def act(self, measure: RecoveryAction) -> None:
        """Carry out ``measure``, whose kind is not ``stop``. It is logged before it is carried out."""
        state, log, cause = self.state, self.log, self.monitor.seq
        left_out = self._samples_of(measure)
        skip_ranges = joined(state.progress.skip_ranges, left_out)
        cut = [measure.to_step, measure.rate_factor, state.config.rollback_lr_steps] if measure.rate_factor else None
        intent = None
        if log:
            if measure.goes_back:
                cause = intent = log.event(
                    "rollback", phase="intent", parent=cause, measure=measure.kind, from_step=state.progress.step,
                    to_step=measure.to_step, why=measure.reason,
                )  # fmt: skip
            if left_out and measure.steps:
                count = sum(b - a for a, b in left_out)
                log.event("skip", parent=cause, ranges=left_out, samples=count, steps=measure.steps, why=measure.reason)
                tqdm.write(
                    f"  left out from now on: {counted(count, 'sample')} of steps {measure.steps[0]} to {measure.steps[1]}"
                )
            if cut:
                log.event("lr_change", parent=cause, cut=cut, why=measure.reason)
                tqdm.write(f"  the learning rate goes on at {cut[1]:g} of its schedule, and is back on it after {cut[2]} steps")
        if measure.goes_back:
            self.go_back(measure, intent, skip_ranges, [*state.progress.rate_cuts, *([cut] if cut else [])])
        else:
            state.progress.skip_ranges = skip_ranges
            state.build_loader()
        if log and left_out and state.end_step < state.total_steps:
            tqdm.write(f"  the run ends at step {state.end_step}; its schedule is still that of {state.total_steps} steps")

    def go_back(
        self, measure: RecoveryAction, intent: int | None, skip_ranges: list[list[int]], rate_cuts: list[list[Any]]
    ) -> None:
        """Restore weights, optimizer state, schedule, sample order, random numbers, loss scale and detector."""
        to_step = measure.to_step
        assert to_step is not None
        state, manager, log = self.state, self.manager, self.log
        start, progress = time.monotonic(), state.progress
        manager.finish(log)  # a save in progress belongs to the steps that are given up
        state.drop_loader()
        loaded, bytes_read = manager.load(to_step)
        # after loading: if that fails, a restart still finds the later checkpoints
        aside = self.strategy.on_main(lambda: store.set_aside(manager.folder, to_step, manager.skipped))
        given_up = progress.step - loaded.step
        kept = {"skip_ranges": skip_ranges, "rate_cuts": rate_cuts, "redone": progress.redone + given_up,
                "total_steps": progress.total_steps, "world_size": progress.world_size,
                "global_batch": progress.global_batch}  # fmt: skip
        vars(progress).update(vars(loaded) | kept)
        if state.data.held_out:
            # The checkpoint may be from before a resume with other held-out data.
            progress.use_held_out_data(state.data.held_out_fingerprint)
        losses = self.monitor.back(measure, loaded.detector, intent)
        if measure.rate_factor:  # after the first update at the lower rate, losses differ
            losses = {step: loss for step, loss in losses.items() if step == to_step + 1}
        state.earlier_losses = losses
        state.build_loader()
        verified, differing = state.verify(loaded.following)
        seconds = time.monotonic() - start
        if log:
            log.branch += 1
            log.event(
                "rollback", phase="outcome", parent=intent, step=progress.step, steps_given_up=given_up,
                seconds=round(seconds, 3), bytes_read=bytes_read, set_aside=[str(folder) for folder in aside],
                verified=verified, differing=differing,
            )  # fmt: skip
            tqdm.write(f"  back at step {progress.step} after {seconds:.1f} s; given up: {counted(given_up, 'step')}")

    def protect_before(self, measure: RecoveryAction) -> None:
        """Protect the newest checkpoint from before the spike from being pruned by the next save."""
        if self.log:
            checkpoint = self._before(measure)
            self.manager.protect(*([] if checkpoint is None else [store.step_of(checkpoint)]))

    def hand_over(self, measure: RecoveryAction) -> None:
        """Set aside what was saved since the spike began, and write a report of the spike and of what was tried.

        ``auto`` then resumes from before the spike. The caller ends the process with `EXIT_CODE`.
        """
        log, step, config, manager = self.log, self.state.progress.step, self.state.config, self.manager
        manager.finish(log)
        if log is None:
            return
        checkpoint = self._before(measure)
        last_good_step = 0 if checkpoint is None else store.step_of(checkpoint)
        aside = store.set_aside(manager.folder, last_good_step, manager.skipped)
        log.event(
            "stop",
            parent=self.monitor.seq,
            step=step,
            rule=measure.rule,
            why=measure.reason,
            exit_code=EXIT_CODE,
            go_on_from=None if checkpoint is None else str(checkpoint),
            set_aside=[str(folder) for folder in aside],
        )
        way_on = "Go on from there with --resume_from_checkpoint auto and"
        if checkpoint is None:
            way_on = "There is nothing to go back to, so start again with"
        since = f" Saved since it began: {', '.join(map(str, aside))}." if aside else ""
        tqdm.write(
            f"STOPPED at step {step}: {measure.reason}.\n  {measure.rule}. The last checkpoint before it: "
            f"{checkpoint or 'none'}.{since}\n  {way_on} a lower --learning_rate than {config.learning_rate}, "
            f"more --num_warmup_steps, or other data; or with --on_spike log. `zerobook runlog why {config.output_dir}` "
            "tells the whole story."
        )
        write_page(log)

    def _before(self, measure: RecoveryAction) -> Path | None:
        """Return the newest complete checkpoint from before the spike. Rank 0."""
        return self.manager.before(measure.onset - LEAD + 1)

    def _samples_of(self, measure: RecoveryAction) -> list[list[int]]:
        """Return [start, end) ranges of the samples that ``measure`` leaves out: all samples in the rows of its steps."""
        if measure.kind == "stop" or not measure.steps:
            return []
        loader, global_batch = self.state.loader, self.state.layout.global_batch
        rows = [loader.order.take(a, global_batch, b)[0] for a, b in self.monitor.cursors(*measure.steps)]
        return ranges([sample for ids in rows for row in ids.tolist() for sample in loader.part.samples_of(row)])
