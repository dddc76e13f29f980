"""Console output of rank 0: lines at the start and after evaluations, and the progress bar."""

import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.data.prepare import PreparedData
from zerobook.evaluation import held_out
from zerobook.monitor.policy import RecoveryAction
from zerobook.runlog.records import EvaluationRecord, StepRecord
from zerobook.training.hooks import Hook, TrainerView
from zerobook.training.intervals import describe_evaluations, describe_saves
from zerobook.training.resume import describe_size
from zerobook.utils.bars import tqdm
from zerobook.utils.terminal import plain
from zerobook.utils.units import counted

# Format of the progress bar. In a terminal of 80 columns, the bar itself has 20 or more.
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# If this share of a batch's tokens or more is padding, the run names flags against it.
MUCH_PADDING = 0.5
# Number of samples of an evaluation that are printed; the page of the runlog has all.
SAMPLES = 3
# Maximum number of lines of each text of a sample.
SAMPLE_LINES = 3


class Console(Hook):
    """Prints the progress of a run on rank 0. The other ranks have a silent console."""

    def __init__(self, *, silent: bool):
        self.silent = silent
        self.bar: tqdm
        """the progress bar; `on_start` creates it"""

    def say(self, line: str) -> None:
        if not self.silent:
            tqdm.write(line)

    def introduce(self, trainer: TrainerView) -> None:
        """Print the strategy, the batch, the number of steps and the data."""
        if self.silent:
            return
        config = trainer.config
        state = trainer.state
        data = trainer.data
        self.say(f"watch it: zerobook runlog report {shlex.quote(config.output_dir)}")
        # The description is of the live objects, and not of the strategy file.
        live = trainer.strategy.describe()
        processes = "" if live["strategy"] == "one process" else f", {counted(live['world_size'], 'process')}"
        self.say(f"running: {live['strategy']}{processes}, master weights in {live['master_dtype']}")
        self.say(f"{state.layout.arithmetic}; {counted(state.total_steps, 'step')} over {describe_size(len(data.train))}")
        if trainer.save_results:
            self.say(describe_saves(trainer.manager.save_steps, trainer.manager.saver.keep))
            if data.held_out:
                self.say(describe_evaluations(config.eval_steps))
        # The strategy knows the shapes of complete weights. A rank may hold only parts of them.
        trained = sum(trainer.strategy.shape(parameter).numel() for _, parameter in trainer.strategy.trainable())
        self.say(f"trained parameters: {trained:,}")
        # A ratio counts only if the user has set it: recipes for adapters have one by default.
        sets_warm_up = config.num_warmup_steps or ("warmup_ratio" in config.model_fields_set and config.warmup_ratio)
        if config.lr_scheduler_type == "constant" and sets_warm_up:
            self.say("  note: lr_scheduler_type constant has no warm-up; constant_with_warmup has one")
        elif config.num_warmup_steps > state.total_steps:
            self.say(
                f"  note: {config.num_warmup_steps} warm-up steps are more than the run has; the rate stays below its peak"
            )
        self._introduce_data(data)
        if data.held_out:
            self._introduce_evaluation(config, trainer.evaluator.rows_at_once)
        # A finished run that is started again has no batch whose padding could be counted.
        if state.progress.step < state.end_step:
            self._introduce_padding(trainer)
        else:
            self.say(
                f"step {state.progress.step} was the last one; nothing is left to train (a higher --max_train_steps or "
                "--num_train_epochs trains on)"
            )

    def _introduce_data(self, data: PreparedData) -> None:
        """Print for each dataset its format, its counts, and the columns that are not read."""
        for name, counts in data.report.items():
            facts = [f"{count:,} {what}" for what, count in counts.items() if count]
            if name not in data.formats:
                self.say(f"{name}: {', '.join(facts)}")
                continue
            format_name, ignored = data.formats[name]
            self.say(f"{name}: {', '.join([f'format {format_name}', *facts])}")
            if ignored:
                self.say(f"  note: columns of {name} that are not read: {', '.join(ignored)}")

    def _introduce_evaluation(self, config: RecipeConfig, rows: int) -> None:
        """Print a note if an evaluation takes fewer rows at once, ``rows``, than ``per_device_eval_batch_size``."""
        requested = config.per_device_eval_batch_size
        if rows >= requested:
            return
        # Either `RecipeConfig.eval_batch_size` or the evaluator has lowered the number.
        if rows == config.eval_batch_size:
            why = "would make longer rows than training does (padding_free)"
        else:
            why = f"could have more than {held_out.LOGITS:,} logits"
        rows_at_once = counted(rows, "row")
        self.say(f"  note: an evaluation takes {rows_at_once} at once; {requested}, as per_device_eval_batch_size asks, {why}")

    def _introduce_padding(self, trainer: TrainerView) -> None:
        """Print which share of a batch is padding, and flags against it if the share is large."""
        padding = 0.0 if trainer.config.padding_free else trainer.state.loader.padding()
        self.say(f"{padding:.1%} of a batch's tokens are padding")
        if padding >= MUCH_PADDING:
            is_seq2seq = getattr(trainer.strategy.unwrapped.config, "is_encoder_decoder", False)
            self.say(f"  note: {_advise_against_padding(trainer.config, is_seq2seq)}")

    def on_start(self, trainer: TrainerView) -> None:
        # A bar overwrites itself, which a file cannot show. There, only the lines of `on_log` are written.
        self.bar = tqdm(
            total=trainer.state.total_steps,
            initial=trainer.progress.step,
            bar_format=BAR,
            disable=self.silent or not sys.stderr.isatty(),
            mininterval=1,
            dynamic_ncols=True,
        )

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        self.bar.update(1)

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        # The bar shows the figures of the last step. In addition, each log point prints a line, which stays.
        last = records[-1]
        figures = f"loss {last.loss:.4f}, {trainer.pace.tokens_per_second:,.0f} tok/s"
        self.bar.set_postfix_str(figures)
        self.say(
            f"step {last.step} of {trainer.state.total_steps}: {figures}, gradient norm {float(last.grad_norm):.3g}, "
            f"rate {last.learning_rate:.3g}"
        )

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        self.say(f"step {record.step}: " + held_out.describe(record.result))
        for sample in record.samples[:SAMPLES]:
            self.say(describe_sample(sample, shutil.get_terminal_size().columns))
        more = len(record.samples) - SAMPLES
        if more > 0:
            self.say(f"  ({counted(more, 'more sample')} on the page of zerobook runlog report)")

    def on_rollback(self, trainer: TrainerView, action: RecoveryAction) -> None:
        self.bar.n = trainer.progress.step
        self.bar.refresh()

    def close_bar(self) -> None:
        """Close the progress bar, so that later lines are printed after it."""
        self.bar.close()


def describe_sample(sample: dict[str, Any], width: int) -> str:
    """Return a row of a scorer's table, such as a prompt with its answer, as lines of at most ``width`` columns."""
    label_width = max(map(len, sample)) + 2
    lines: list[str] = []
    for name, value in sample.items():
        # A text from a model or a data file may have newlines, which would look like lines of the program.
        text = plain(str(value), lines=False)
        text_width = max(width - label_width - 2, 20)
        text_lines = textwrap.wrap(text, text_width, max_lines=SAMPLE_LINES, placeholder=" ...") or [""]
        # The label stands before the first line only.
        label = name
        for line in text_lines:
            lines.append(f"  {label:<{label_width}}{line}")
            label = ""
    return "\n".join(lines)


def _advise_against_padding(config: RecipeConfig, is_seq2seq: bool) -> str:
    """Return a note on the flags that reduce the padding of a batch."""
    flags = []
    if not is_seq2seq:
        flags.append("--packing puts several samples into a row")
    if not config.group_by_length:
        flags.append("--group_by_length puts rows of similar length into a batch")
    return f"most of the time is spent on padding. {', and '.join(flags) or 'A smaller batch would have less'}"
