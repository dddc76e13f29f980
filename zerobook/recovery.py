"""Carry out what was decided about a spike: leave samples out, go back to a checkpoint, lower the rate, or stop."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from zerobook.bars import tqdm
from zerobook.checkpoint import store
from zerobook.runlog.attempt import write_page
from zerobook.runlog.policy import EXIT_CODE, LEAD, Measure, joined, ranges

if TYPE_CHECKING:
    from zerobook.loop import TrainingLoop


class Recovery:
    """Carries out on a training loop what its watch decided. Every rank calls it alike."""

    def __init__(self, loop: TrainingLoop):
        self.loop = loop

    def act(self, measure: Measure) -> None:
        """Carry out what was decided. The log has it before it is done."""
        loop, log, cause = self.loop, self.loop.log, self.loop.watch.seq
        if measure.kind == "stop":
            self._hand_over(measure)
        left_out = self._samples_of(*measure.steps) if measure.steps else []
        skip_ranges = joined(loop.progress.skip_ranges, left_out)
        if left_out and loop.data.train.skipping(skip_ranges).is_empty:
            self._hand_over(replace(measure, kind="stop", rule="all samples of the data would be left out"))
        cut = [measure.to_step, measure.rate_factor, loop.config.rollback_lr_steps] if measure.rate_factor else None
        intent = None
        if log:
            if measure.goes_back:
                cause = intent = log.event(
                    "rollback", phase="intent", parent=cause, measure=measure.kind, from_step=loop.progress.step,
                    to_step=measure.to_step, why=measure.reason,
                )  # fmt: skip
            if left_out:
                count = sum(b - a for a, b in left_out)
                log.event("skip", parent=cause, ranges=left_out, samples=count, steps=measure.steps, why=measure.reason)
                tqdm.write(f"  {count} samples of steps {measure.steps[0]} to {measure.steps[1]} are left out from now on")
            if cut:
                log.event("lr_change", parent=cause, cut=cut, why=measure.reason)
                tqdm.write(f"  the learning rate goes on at {cut[1]:g} of its schedule, and is back on it after {cut[2]} steps")
        if measure.goes_back:
            self.go_back(measure, intent, skip_ranges, [*loop.progress.rate_cuts, *([cut] if cut else [])])
        else:
            loop.progress.skip_ranges = skip_ranges
            loop.feed = loop.training_feed()
        if log and left_out and loop.end_step < loop.total_steps:
            tqdm.write(f"  the run ends at step {loop.end_step}; its schedule stays laid out for {loop.total_steps} steps")

    def go_back(self, measure: Measure, intent: int | None, skip_ranges: list, rate_cuts: list) -> None:
        """Restore weights, moments, schedule, sample order, random numbers, loss scale and detector from the checkpoint."""
        assert measure.to_step is not None
        loop, log = self.loop, self.loop.log
        start, progress, strategy = time.monotonic(), loop.progress, loop.strategy
        keeper = loop.keeper
        keeper.finish(log)  # a save under way is of what is given up
        del loop.feed
        loaded, bytes_read = keeper.load(measure.to_step)
        # only now: where it cannot be loaded, a restart still finds what was saved later
        aside = strategy.on_main(lambda: store.set_aside(keeper.folder, measure.to_step, keeper.passed_over))
        given_up = progress.step - loaded.step
        kept = {"skip_ranges": skip_ranges, "rate_cuts": rate_cuts, "redone": progress.redone + given_up,
                "total_steps": progress.total_steps, "world_size": progress.world_size,
                "global_batch": progress.global_batch}  # fmt: skip
        vars(progress).update(vars(loaded) | kept)
        losses = loop.watch.back(measure, loaded.detector, intent)
        if measure.rate_factor:  # behind the first update with the lower rate, the losses are others
            losses = {step: loss for step, loss in losses.items() if step == measure.to_step + 1}
        loop.went_back(losses)
        verified, differing = loop.verify(loaded.following)
        seconds = time.monotonic() - start
        if log:
            log.branch += 1
            log.event(
                "rollback", phase="outcome", parent=intent, step=progress.step, steps_given_up=given_up,
                seconds=round(seconds, 3), bytes_read=bytes_read, set_aside=[str(folder) for folder in aside],
                verified=verified, differing=differing,
            )  # fmt: skip
            tqdm.write(f"  back at step {progress.step} after {seconds:.1f} s; {given_up} steps were given up")

    def _samples_of(self, first: int, last: int) -> list[list[int]]:
        """[start, end) of the samples that these steps took, through packs."""
        feed, global_batch = self.loop.feed, self.loop.layout.global_batch
        rows = [feed.order.take(a, global_batch, b)[0] for a, b in self.loop.watch.cursors(first, last)]
        return ranges([sample for ids in rows for row in ids.tolist() for sample in feed.part.samples_of(row)])

    def _hand_over(self, measure: Measure) -> None:
        """Stop, and say to people what was seen and tried."""
        loop, log, step = self.loop, self.loop.log, self.loop.progress.step
        loop.keeper.finish(log)
        loop.bar.close()
        if log:
            best = loop.keeper.before(measure.onset - LEAD + 1)
            log.event("stop", parent=loop.watch.seq, step=step, rule=measure.rule, why=measure.reason, exit_code=EXIT_CODE,
                      go_on_from=str(best) if best else None)  # fmt: skip
            tqdm.write(
                f"STOPPED at step {step}: {measure.reason}.\n  {measure.rule}. The last checkpoint before it: "
                f"{best or 'none'}.\n  Go on from there with a lower --learning_rate than {loop.config.learning_rate}, more "
                f"--num_warmup_steps, or other data; or with --on_spike log. `zerobook runlog why {loop.config.output_dir}` "
                "tells all of it."
            )
            write_page(log)
        loop.leave(EXIT_CODE)
