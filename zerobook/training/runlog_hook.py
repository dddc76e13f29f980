"""Hooks that write the runlog. The events of checkpoints, resumes and spikes are written by the modules that handle these."""

import atexit
import sys
import time
from collections.abc import Sequence
from typing import Any

from zerobook.config_sources import ConfigSources
from zerobook.launch.accelerate_cli import command_to_resume
from zerobook.monitor.preemption import EXIT_CODE
from zerobook.runlog.formatting import far_above_best
from zerobook.runlog.lifecycle import begin, code_state, write_page
from zerobook.runlog.machine import sample
from zerobook.runlog.records import EvaluationRecord, StepRecord
from zerobook.runlog.writer import RunLog
from zerobook.training.hooks import Hook, TrainerView
from zerobook.utils.bars import tqdm
from zerobook.utils.versions import versions


class RunlogHook(Hook):
    """Writes steps, log points and evaluations. Rank 0 alone has one."""

    def __init__(self, log: RunLog):
        self.log = log
        self._start = time.monotonic()

    def begin(self, trainer: TrainerView, sources: ConfigSources) -> None:
        """Write the first events of the attempt."""
        data = trainer.data
        begin(
            self.log,
            config=trainer.config.model_dump(),
            versions=versions(),
            code=code_state(trainer.recipe_file) if trainer.recipe_file else {},
            step=trainer.state.progress.step,
            argv=sys.argv,
            sources=dict(sources),
            plan=trainer.strategy.plan.record(),
            live=trainer.strategy.describe(),
            batch=trainer.state.layout.arithmetic,
            total_steps=trainer.state.total_steps,
            data={
                "train": len(data.train),
                "report": data.report,
                "formats": data.formats,
                "bad_samples": data.bad_samples,
            },
        )

    def on_start(self, trainer: TrainerView) -> None:
        self._start = time.monotonic()

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        # A streamed dataset reports the shards that it has begun.
        for facts in trainer.state.loader.order.take_reached_shards():
            self.log.event("shard", **facts)
        self.log.steps([record.to_json() for record in records])
        last = records[-1]
        pace = trainer.pace
        # One reading of the loss is noisy, so people compare the mean of the steps since the last log point.
        mean_loss = sum(float(record.loss) for record in records) / len(records)
        metrics: dict[str, Any] = {"metrics": last.metrics} if last.metrics else {}
        self.log.event(
            "metrics",
            durable=False,
            steps=[records[0].step, last.step],
            loss=last.loss,
            mean_loss=mean_loss,
            grad_norm=last.grad_norm,
            learning_rate=last.learning_rate,
            tokens_per_second=round(pace.tokens_per_second, 1),
            all_tokens_per_second=round(pace.all_tokens_per_second, 1),
            data_wait=round(pace.data_wait, 4),
            mfu=_round_known(pace.mfu, 4),
            tflops=_round_known(pace.tflops, 6),
            seconds={phase: round(seconds, 4) for phase, seconds in pace.seconds.items()},
            **metrics,
        )

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        # Losses of different data are not compared, so the event says of which data this one is.
        facts = dict(record.result)
        if "loss" in facts:
            facts["held_out_fingerprint"] = trainer.progress.held_out_fingerprint
        self.log.event("eval", step=record.step, seconds=record.seconds, samples=record.samples, **facts)

    def write_preempted(self, trainer: TrainerView, reason: str | None) -> None:
        """Write that a warning signal ended the attempt."""
        step = trainer.progress.step
        proven, unproven = trainer.manager.steps()
        is_saved = step in (*proven, *unproven)
        self.log.event("preempted", step=step, signal=reason, exit_code=EXIT_CODE, saved=is_saved)
        outcome = f"saved at step {step}" if is_saved else f"step {step} was not saved"
        tqdm.write(f"{'Ctrl-C' if reason == 'SIGINT' else reason}: {outcome}. To go on:\n  {command_to_resume()}")

    def finish(self, trainer: TrainerView) -> None:
        """Write the ``run_end`` event, and the report. The model is on the disk."""
        evaluation = round(trainer.evaluator.seconds, 3)
        training = round(time.monotonic() - self._start - trainer.evaluator.seconds, 3)
        far = trainer.spikes.monitor.far_above_best(trainer.progress.eval_loss, trainer.progress.best_eval_loss)
        # Record the peak of the memory once more: a short run has no other such sample from after its first step.
        self.log.event("machine", durable=False, **sample())
        self.log.event(
            "run_end",
            progress=trainer.progress.to_json(),
            learning_rate_after=trainer.state.rate(),
            eval=trainer.evaluation,
            seconds={"training": training, "evaluation": evaluation},
            far_above_best=far,
        )
        tqdm.write(f"{training:.1f} s training (saving included), {evaluation:.1f} s evaluation")
        write_page(self.log)
        # Print the warning at exit, so that it is the last line.
        if far:
            atexit.register(tqdm.write, f"WARNING: {far_above_best(far)}")


# Return None for a value that is not known.
def _round_known(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


class MemoryRecord(Hook):
    """Records the bytes that each rank holds in the first step.

    Gradients are counted before the update, and optimizer state after it. Of the two counts of weights, the larger is recorded.
    """

    def __init__(self, log: RunLog):
        self.log = log
        self._before_update: dict[str, int] = {}

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        # Only the first step is measured. ``progress.step`` counts the steps that are done.
        if trainer.progress.step == 0:
            self._before_update = trainer.strategy.memory()

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        if record.step != 1:
            return
        strategy = trainer.strategy
        # The update has made the optimizer state and freed the gradients, so take these from the count before it.
        sizes = strategy.memory()
        sizes["gradients"] = self._before_update["gradients"]
        sizes["parameters"] = max(sizes["parameters"], self._before_update["parameters"])
        per_rank = strategy.gather(sizes)
        trained = sum(strategy.shape(parameter).numel() for _, parameter in strategy.trainable())
        self.log.event("memory", per_rank_bytes=per_rank, trained_parameters=trained)
