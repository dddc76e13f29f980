"""What is done about a spike: samples left out, a lower rate, the way back to a checkpoint, or the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tqdm import tqdm

from zerobook.checkpoint import store
from zerobook.runlog.attempt import write_page
from zerobook.runlog.policy import EXIT_CODE, LEAD, Measure, joined, ranges

if TYPE_CHECKING:
    from zerobook.loop import TrainingLoop


class Recovery:
    """Carries out, on a training loop, what its watch has decided. On every rank alike."""

    def __init__(self, loop: TrainingLoop):
        self.loop = loop

    def act(self, measure: Measure) -> None:
        """Carry out what was decided. The log has it before it is done."""
        loop, log, cause = self.loop, self.loop.log, self.loop.watch.seq
        if measure.kind == "stop":
            self._hand_over(measure)
        left_out = self._samples_of(*measure.steps) if measure.steps else []
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
        skip_ranges = joined(loop.progress.skip_ranges, left_out)
        if measure.goes_back:
            self.go_back(measure, intent, skip_ranges, [*loop.progress.rate_cuts, *([cut] if cut else [])])
        else:
            loop.progress.skip_ranges = skip_ranges
            loop.feed = loop.training_feed()

    def go_back(self, measure: Measure, intent: int | None, skip_ranges: list, rate_cuts: list) -> None:
        """Weights, moments, schedule, sample order, random numbers, loss scale and detector, as the checkpoint has them."""
        assert measure.to_step is not None
        loop, log = self.loop, self.loop.log
        start, progress, strategy = time.monotonic(), loop.progress, loop.strategy
        loop.keeper.finish(log)  # a save under way is of what is given up
        aside = strategy.on_main(lambda: store.set_aside(loop.keeper.folder, measure.to_step))
        del loop.feed
        loaded, bytes_read = loop.keeper.load(measure.to_step)
        given_up = progress.step - loaded.step
        kept = {"skip_ranges": skip_ranges, "rate_cuts": rate_cuts, "redone": progress.redone + given_up,
                "total_steps": progress.total_steps, "world_size": progress.world_size,
                "global_batch": progress.global_batch}  # fmt: skip
        vars(progress).update(vars(loaded) | kept)
        loop.went_back(losses=self.loop.watch.back(measure, loaded.detector, intent))
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
