"""Console output of rank 0: lines at the start and after evaluations, and the progress bar."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from zerobook.evaluation import held_out
from zerobook.monitor.policy import RecoveryAction
from zerobook.runlog.records import EvaluationRecord, StepRecord
from zerobook.training.hooks import Hook, TrainerView
from zerobook.training.intervals import announcement
from zerobook.training.resume import amount
from zerobook.utils.bars import tqdm


class Console(Hook):
    """Prints the progress of a run on rank 0. The other ranks have a silent console."""

    def __init__(self, *, silent: bool):
        self.silent = silent
        self.bar: tqdm
        """from `on_start` on"""

    def say(self, line: str) -> None:
        if not self.silent:
            tqdm.write(line)

    def introduce(self, trainer: TrainerView) -> None:
        """Print the strategy, the batch, the number of steps and the data."""
        if self.silent:
            return
        config, state, data = trainer.config, trainer.state, trainer.data
        live = trainer.strategy.describe()
        self.say(f"watch it: zerobook runlog report {shlex.quote(config.output_dir)} --watch")
        self.say(f"running: {_live(live)}")
        self.say(f"{state.layout.arithmetic}; {state.total_steps} steps over {amount(len(data.train))}")
        if trainer.save_results:
            self.say(announcement(config.save_steps, config.kept_checkpoints))
        trained = sum(trainer.strategy.shape(parameter).numel() for _, parameter in trainer.strategy.trainable())
        self.say(f"trained parameters: {trained:,}")
        if config.num_warmup_steps > state.total_steps:
            self.say(
                f"  note: {config.num_warmup_steps} warm-up steps are more than the run has; the rate stays below its peak"
            )
        for part, report in data.report.items():
            known = [f"format {data.formats[part][0]}"] if part in data.formats else []
            self.say(f"{part}: " + ", ".join([*known, *(f"{number:,} {what}" for what, number in report.items() if number)]))
            if part in data.formats and (ignored := data.formats[part][1]):
                self.say(f"  note: columns of {part} that are not read: {', '.join(ignored)}")
        asked = config.per_device_eval_batch_size
        if data.held_out and (rows := trainer.evaluator.rows_at_once) < asked:
            logits = f"could have more than {held_out.LOGITS:,} logits"
            why = "would make longer rows than training does (padding_free)" if rows == config.eval_rows else logits
            self.say(f"  note: an evaluation takes {rows} row(s) at once; {asked}, as per_device_eval_batch_size asks, {why}")
        if state.progress.step < state.end_step:
            self.say(f"{0 if config.padding_free else state.loader.padding():.1%} of a batch's tokens are padding")
        else:
            self.say(f"all {state.progress.step} steps are done; nothing is left to train")

    def on_start(self, trainer: TrainerView) -> None:
        self.bar = tqdm(
            total=trainer.state.total_steps, initial=trainer.progress.step, desc="training", unit="step", disable=self.silent,
            mininterval=1 if sys.stderr.isatty() else 15,
        )  # fmt: skip

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        self.bar.update(1)

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        self.bar.set_postfix({"loss": f"{records[-1].loss:.4f}", "supervised tok/s": f"{trainer.pace.tokens_per_second:.0f}"})

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        self.say(f"step {record.step}: " + held_out.describe(record.result))

    def on_rollback(self, trainer: TrainerView, action: RecoveryAction) -> None:
        self.bar.n = trainer.progress.step
        self.bar.refresh()

    def close(self) -> None:
        """Close the progress bar, so that later lines are printed after it."""
        self.bar.close()


def _live(live: dict[str, Any]) -> str:
    count = live["world_size"]
    return f"{live['strategy']}, {count} process{'es' if count > 1 else ''}, master weights in {live['master_dtype']}"
