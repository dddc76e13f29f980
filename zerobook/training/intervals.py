"""When a run evaluates and saves: every N steps, at each epoch's end, or by the measured time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from zerobook.config import AUTOMATIC, Interval

if TYPE_CHECKING:
    from zerobook.strategy import Strategy

# Step by which a new run saves for the first time. A spike can be rolled back only to a checkpoint from before it.
FIRST_STEP = 10
# Step of the first save in a run of `SHORT_STEPS` to 50 steps, in which step 10 would be late. In a run of 50 to 100 steps,
# the first save is at a tenth of the run.
FIRST_STEP_OF_SHORT = 5
# A run of fewer steps saves first at step 10 too: a spike can hardly be told from noise in it, so an earlier save is of no use.
SHORT_STEPS = 24
# The number of saves in a run, unless the limits below change it.
SAVES_A_RUN = 10
# Maximum seconds between two saves: a killed run loses no more work than this.
LONGEST_S = 1800.0
# Minimum seconds between two saves: less work than this is soon repeated.
SHORTEST_S = 60.0
# Share of the run's time that saves may take.
SHARE = 0.05
# Estimated bytes per second of a save, until the first one is measured.
WRITE_SPEED = 0.5e9
# Added or subtracted before rounding, so that 2.9999999 and 3.0000001 both become 3.
_ROUNDING = 1e-6


def automatic_interval(step_seconds: float, save_seconds: float, total_steps: int) -> int:
    """Return the steps between two automatic saves.

    A run has ten saves, or fewer if they would be less than a minute apart or take more than 5 % of the time. No interval is
    longer than half an hour, however long a save takes.

    >>> automatic_interval(step_seconds=2.0, save_seconds=3.0, total_steps=1000)  # ten a run
    100
    >>> automatic_interval(step_seconds=2.0, save_seconds=30.0, total_steps=1000)  # 5 % of the time
    285
    >>> automatic_interval(step_seconds=2.0, save_seconds=3.0, total_steps=100_000)  # half an hour
    900
    """
    shortest = max(steps_for_share(save_seconds, step_seconds), _count_steps(SHORTEST_S, step_seconds))
    interval = max(total_steps // SAVES_A_RUN, shortest)
    # A single step may take longer than half an hour, so the interval is at least 1.
    return max(1, min(interval, _longest_interval(step_seconds)))


def steps_for_share(save_seconds: float, step_seconds: float) -> int:
    """Return the number of steps beside which a save takes 5 % of the time of both."""
    return _count_steps(save_seconds * (1 - SHARE) / SHARE, step_seconds)


def _longest_interval(step_seconds: float) -> int:
    """Return the maximum number of steps between two saves."""
    return int(LONGEST_S / step_seconds + _ROUNDING)


def _count_steps(seconds: float, step_seconds: float) -> int:
    """Return the number of steps that take ``seconds``, rounded up."""
    return math.ceil(seconds / step_seconds - _ROUNDING)


class Measured(NamedTuple):
    """Measurements of rank 0; every rank decides from the same values."""

    step_seconds: float
    """mean seconds of a step, with the evaluations and without the saves; 0 if it is not known yet"""
    save_seconds: float
    """seconds of the last save, or an estimate"""


class SaveClock:
    """Measures the seconds of a step and of a save, on the host.

    Args:
        save_seconds: an estimate, which counts until the first save is measured.
    """

    def __init__(self, save_seconds: float) -> None:
        self._save_seconds = save_seconds
        self._step_seconds = 0.0
        self._first_step: int | None = None
        self._start_time = 0.0

    def start(self, step: int) -> None:
        """Start to measure the steps after ``step``."""
        self._first_step = step
        self._start_time = time.monotonic()

    def read(self, step: int) -> Measured:
        """Return the mean seconds of the steps from the last start to ``step``, and the seconds of the last save.

        If no step was done since the last start, the mean is that of the measurement before.
        """
        if self._first_step is not None and step > self._first_step:
            self._step_seconds = (time.monotonic() - self._start_time) / (step - self._first_step)
        return Measured(self._step_seconds, self._save_seconds)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context for a save, whose seconds it measures."""
        start_time = time.monotonic()
        yield
        self._save_seconds = time.monotonic() - start_time


class AutomaticSaves:
    """Decides when a run saves, from measured times. Every rank gets the same values, and so decides the same.

    Args:
        step: number of steps that are done at the start of the attempt.
        resumed: there is a checkpoint of ``step``, so no early save is needed.
        total_steps: number of steps of the run.
        save_seconds: estimated seconds of a save.
    """

    def __init__(self, *, step: int, resumed: bool, total_steps: int, save_seconds: float):
        self.total_steps = total_steps
        self.last_save = step
        self._start_step = step
        self._saves = 0
        steps_before_save = FIRST_STEP
        if total_steps >= SHORT_STEPS:
            steps_before_save = min(FIRST_STEP, max(FIRST_STEP_OF_SHORT, total_steps // SAVES_A_RUN))
        # The step of the early save, from which a first spike can be rolled back; None once there is a checkpoint.
        self._early_step = None if resumed else step + steps_before_save
        self._measured = Measured(0.0, save_seconds)

    @property
    def next_step(self) -> int | None:
        """The step after which the run saves next; None if the time of a step is not known and no early save is due."""
        # The step of the early save is a fixed number, which needs no measured time.
        if self._measured.step_seconds == 0:
            return self._early_step
        next_step = self.last_save + automatic_interval(*self._measured, self.total_steps)
        # The saves so far may have taken more than their share of the time. Then save later, when they and the next save are
        # within the share, but at most half an hour after the last save.
        latest_step = self.last_save + _longest_interval(self._measured.step_seconds)
        next_step = max(next_step, min(self._step_within_share(), latest_step))
        # Do without the early save if a save takes more than 5 % of the time of the whole run.
        if self._early_step is None or self._step_within_share() > self.total_steps:
            return next_step
        return min(next_step, self._early_step)

    def _step_within_share(self) -> int:
        """Return the step from which all saves of this attempt and one more take at most 5 % of its time."""
        step_seconds, save_seconds = self._measured
        return self._start_step + steps_for_share((self._saves + 1) * save_seconds, step_seconds)

    def set_measured(self, values: Measured) -> None:
        """Set the measurements of rank 0."""
        self._measured = values

    def note_save(self, step: int) -> None:
        """Note a save of ``step``."""
        self.note_rollback(step)
        self._saves += 1

    def note_rollback(self, step: int) -> None:
        """Note a rollback to ``step``, of which there is a checkpoint."""
        self.last_save = step
        self._early_step = None

    def is_due(self, step: int, *, evaluates: bool = False) -> bool:
        """Return whether the run saves after ``step``.

        Args:
            evaluates: the step is evaluated, since ``--eval_steps`` names it. Such a step is saved earlier, as soon as the cost
                allows, since only a saved step can be the best one.
        """
        if self.next_step is not None and step >= self.next_step:
            return True
        if not evaluates or self._measured.step_seconds == 0:
            return False
        step_seconds, save_seconds = self._measured
        return step >= max(self._step_within_share(), self.last_save + steps_for_share(save_seconds, step_seconds))


class AutomaticEvaluations:
    """Decides at which checkpoints a run evaluates: where evaluations take at most 5 % of the time.

    Args:
        step: number of steps that are done at the start of the attempt.
        total_steps: number of steps of the run.
        batches: number of batches of the held-out data, each as large as a training step's.
    """

    def __init__(self, *, step: int, total_steps: int, batches: float):
        self.last_evaluation = step
        # A forward pass takes a third of a training step. The time of scorers is not known, so the first evaluation comes after
        # about a tenth of the run at the earliest.
        self._estimated_steps = max(batches / 3, SHARE * total_steps / SAVES_A_RUN)
        self._seconds: float | None = None

    def note_evaluation(self, step: int, seconds: float) -> None:
        """Note an evaluation of ``step`` that took ``seconds``, the same value on every rank."""
        self.last_evaluation = step
        self._seconds = seconds

    def note_rollback(self, step: int) -> None:
        """Note a rollback to ``step``."""
        self.last_evaluation = step

    def is_due(self, step: int, step_seconds: float) -> bool:
        """Return whether the checkpoint of ``step`` is evaluated.

        Args:
            step_seconds: mean seconds of a step; 0 if they are not known yet.
        """
        if step_seconds == 0:
            return False
        # An evaluation takes as long as the last one. Before the first one, its seconds are estimated.
        evaluation_seconds = self._seconds
        if evaluation_seconds is None:
            evaluation_seconds = self._estimated_steps * step_seconds
        # It may take 5 % of the sum of its own time and that of the steps since the last evaluation.
        return SHARE * (step - self.last_evaluation) * step_seconds >= (1 - SHARE) * evaluation_seconds


class FixedSteps:
    """The steps that the user has set by ``eval_steps`` or ``save_steps``.

    Args:
        interval: a number of steps (int), a share of the run (float), or ``epoch``. With 0 and ``auto``, no step is due: of
            ``auto``, `AutomaticSaves` and `AutomaticEvaluations` decide.
        total_steps: number of steps of the run.
    """

    def __init__(self, interval: Interval | str, total_steps: int):
        self._at_epochs = interval == "epoch"
        self._every = 0
        if isinstance(interval, float):
            self._every = max(1, int(interval * total_steps + _ROUNDING))
        elif isinstance(interval, int):
            self._every = interval

    def is_due(self, step: int, passes_before: float, passes: float) -> bool:
        """Return whether ``step`` is one of the steps.

        Args:
            passes_before: passes over the data before the step.
            passes: passes over the data after it.
        """
        if self._at_epochs:
            return int(passes) > int(passes_before)
        return self._every > 0 and step % self._every == 0


class Timetable:
    """Decides after which steps a run evaluates and saves, and measures the seconds of both. Every rank decides the same.

    Args:
        step: number of steps that are done at the start of the attempt.
        resumed: there is a checkpoint of ``step``.
        save_seconds: estimated seconds of a save, which count until the first save is measured.
        held_out_batches: number of batches of the held-out data, each as large as a training step's; None if nothing is
            evaluated.
        saves: False for a run that saves nothing.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        step: int,
        total_steps: int,
        resumed: bool,
        eval_steps: Interval | str,
        save_steps: Interval | str,
        save_seconds: float,
        held_out_batches: float | None,
        saves: bool,
    ):
        self._strategy = strategy
        self._clock = SaveClock(save_seconds)
        self._steps_of_attempt = 0
        self._step_seconds = 0.0
        self._evaluations = FixedSteps(eval_steps, total_steps)
        self._saves = FixedSteps(save_steps, total_steps)
        # The attributes below are None if the user has set the steps.
        self._automatic_saves: AutomaticSaves | None = None
        if save_steps == AUTOMATIC and saves:
            self._automatic_saves = AutomaticSaves(
                step=step, resumed=resumed, total_steps=total_steps, save_seconds=save_seconds
            )
        self._automatic_evaluations: AutomaticEvaluations | None = None
        if eval_steps == AUTOMATIC and held_out_batches is not None:
            self._automatic_evaluations = AutomaticEvaluations(step=step, total_steps=total_steps, batches=held_out_batches)

    def is_evaluation_set(self, step: int, passes_before: float, passes: float) -> bool:
        """Return whether ``--eval_steps`` names the step. For the arguments, see `FixedSteps.is_due`."""
        return self._evaluations.is_due(step, passes_before, passes)

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the checkpoint of a step is evaluated although ``--eval_steps`` does not name the step."""
        return self._automatic_evaluations is not None and self._automatic_evaluations.is_due(step, self._step_seconds)

    def is_save_due(self, step: int, passes_before: float, passes: float, *, evaluates: bool) -> bool:
        """Return whether the run saves after a step. ``evaluates``: ``--eval_steps`` names the step."""
        if self._automatic_saves is not None:
            return self._automatic_saves.is_due(step, evaluates=evaluates)
        return self._saves.is_due(step, passes_before, passes)

    def measure_first_steps(self, step: int, *, settle: Callable[[], None]) -> None:
        """Measure the second step of the attempt. If saves are automatic, send rank 0's measurement to all ranks.

        Collective in that step, if saves are automatic.

        Call it after every step. Without this measurement, all ranks would know the time of a step only at the first log point,
        which a run of slow steps reaches late. The first step is not measured: it takes long, for compiling and allocating.

        Args:
            settle: waits until the device has done all steps that it was given. The host may be steps ahead of the device.
        """
        self._steps_of_attempt += 1
        if self._steps_of_attempt <= 2:
            settle()
        if self._steps_of_attempt == 1:
            self._clock.start(step)
        elif self._steps_of_attempt == 2 and self._automatic_saves is not None:
            self.set_measured(Measured(*self._strategy.on_main(lambda: list(self.read_clock(step)))))

    def read_clock(self, step: int) -> Measured:
        """Return this rank's measurements. Only rank 0's are used: see `set_measured`."""
        return self._clock.read(step)

    def set_measured(self, values: Measured) -> None:
        """Set the measurements of rank 0. Call this on every rank with the same values."""
        self._step_seconds = values.step_seconds
        if self._automatic_saves is not None:
            self._automatic_saves.set_measured(values)

    def note_evaluation(self, step: int, seconds: float) -> None:
        """Note an evaluation that took ``seconds`` on this rank. Collective."""
        if self._automatic_evaluations is not None:
            # Use rank 0's seconds on all ranks, so that all decide the same about the next evaluation.
            self._automatic_evaluations.note_evaluation(step, self._strategy.on_main(lambda: seconds))

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Return a context for a save of ``step``."""
        with self._clock.saving():
            yield
        # Start the measurement again, since the time of a step is measured without saves.
        self._clock.start(step)
        if self._automatic_saves is not None:
            self._automatic_saves.note_save(step)

    def note_rollback(self, step: int) -> None:
        """Note a rollback to ``step``."""
        self._clock.start(step)
        for automatic in (self._automatic_saves, self._automatic_evaluations):
            if automatic is not None:
                automatic.note_rollback(step)


def describe_evaluations(eval_steps: Interval | str) -> str:
    """Return a line that says when the run evaluates its held-out data."""
    if eval_steps == 0:
        return "evaluations: at the end only"
    if eval_steps == AUTOMATIC:
        return (
            f"evaluations: at checkpoints, in at most {SHARE:.0%} of the time, and at the end (--eval_steps N sets an interval)"
        )
    if eval_steps == "epoch":
        return "evaluations: at the end of each epoch"
    if isinstance(eval_steps, float):
        return f"evaluations: every {eval_steps:g} of the run, and at the end"
    return f"evaluations: every {eval_steps} steps, and at the end"


def describe_saves(save_steps: Interval | str, keep: int | None) -> str:
    """Return a line that says when the run saves.

    Args:
        keep: number of checkpoints that are kept; None for all.
    """
    if save_steps == 0:
        return (
            "checkpoints: at the end only. A run that is killed cannot resume, and starts again at step 0; a spike cannot be "
            "rolled back"
        )
    limit = f"kept: {keep or 'all'}"
    if save_steps == AUTOMATIC:
        return (
            f"checkpoints: by step {FIRST_STEP}, then {SAVES_A_RUN} a run or fewer, at most {LONGEST_S / 60:.0f} minutes "
            f"apart, in at most {SHARE:.0%} of the time; {limit} (--save_steps N sets an interval, 0 none)"
        )
    if save_steps == "epoch":
        return f"checkpoints: at the end of each epoch; {limit}"
    if isinstance(save_steps, float):
        return f"checkpoints: every {save_steps:g} of the run; {limit}"
    return f"checkpoints: every {save_steps} steps; {limit}"
