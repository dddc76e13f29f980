"""The trainer's own hooks, which record and show a run."""

from collections.abc import Sequence
from pathlib import Path

from zerobook.health import stragglers
from zerobook.health.watch import Watch
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import RunLog
from zerobook.training.console import Console
from zerobook.training.hooks import Hook, TrainerView
from zerobook.training.profiling import Profiler
from zerobook.training.resume import ResumeCheck
from zerobook.training.runlog_hook import MemoryRecord, RunlogHook
from zerobook.training.trackers import Trackers


class StragglerReport(Hook):
    """Reports the slow ranks that the watch finds."""

    def __init__(self, watch: Watch, log: RunLog, console: Console):
        self._watch = watch
        self._log = log
        self._console = console

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        for slow in self._watch.take_slow():
            self._log.event("straggler", durable=False, **slow._asdict())
            self._console.say(f"WARNING: step {trainer.progress.step}: {stragglers.describe(slow)}")


def make_own_hooks(trainer: TrainerView, console: Console, runlog_hook: RunlogHook | None, watch: Watch | None) -> list[Hook]:
    """Return the trainer's own hooks, in the order in which they are called.

    Args:
        runlog_hook: writes the runlog; None on all ranks but 0.
        watch: finds slow ranks; None if ranks do not watch each other.
    """
    config = trainer.config
    hooks: list[Hook] = []
    # Report slow ranks first, so that their warnings are printed before the line of the log point.
    if watch is not None:
        hooks.append(StragglerReport(watch, trainer.log, console))
    if runlog_hook is not None:
        hooks += [runlog_hook, ResumeCheck(trainer.log)]
    hooks += [MemoryRecord(trainer.log), console]
    if config.report_to:
        hooks.append(Trackers(trainer.strategy, config, resumed=trainer.manager.resumes_in_place))
    if config.profiled_steps is not None:
        hooks.append(Profiler(*config.profiled_steps, Path(config.output_dir) / "runlog"))
    return hooks
