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

FIRST_STEP = 10
"""Step by which a new run saves for the first time. A spike can be rolled back only to a checkpoint from before it."""
FIRST_STEP_OF_SHORT = 5
"""The same of a run of 24 to 50 steps, in which step 10 would be late. Up to 100 steps, it is a tenth of the run."""
SHORT_STEPS = 24
"""Steps of the shortest run with such a save. In fewer, a spike is hardly told from noise."""
SAVES_A_RUN = 10
LONGEST_S = 1800.0
"""Seconds of work that a killed run loses at most."""
SHORTEST_S = 60.0
"""Seconds between two saves at least: less work than that is soon done again."""
SHARE = 0.05
"""Share of the run's time that saves may take."""
WRITE_SPEED = 0.5e9
"""Bytes a second of a save that was not measured yet."""
_ROUNDING = 1e-6
"""Keeps a quotient that is a whole number from being rounded to its neighbour."""


def automatic_interval(step_seconds: float, save_seconds: float, total_steps: int) -> int:
    """Return the steps between two automatic saves.

    There are ten saves in a run, and fewer where they would be less than a minute apart or take more than 5 % of the time.
    Half an hour is the longest interval, whatever a save takes.

    >>> automatic_interval(step_seconds=2.0, save_seconds=3.0, total_steps=1000)  # ten a run
    100
    >>> automatic_interval(step_seconds=2.0, save_seconds=30.0, total_steps=1000)  # 5 % of the time
    285
    >>> automatic_interval(step_seconds=2.0, save_seconds=3.0, total_steps=100_000)  # half an hour
    900
    """
    shortest = max(steps_to_earn(save_seconds, step_seconds), _steps_of(SHORTEST_S, step_seconds))
    return max(1, min(_longest(step_seconds), max(total_steps // SAVES_A_RUN, shortest)))


def steps_to_earn(seconds: float, step_seconds: float) -> int:
    """Return the steps of which ``seconds`` beside them are 5 % of the time."""
    return _steps_of(seconds * (1 - SHARE) / SHARE, step_seconds)


def _longest(step_seconds: float) -> int:
    """Return the most steps between two saves."""
    return int(LONGEST_S / step_seconds + _ROUNDING)


def _steps_of(seconds: float, step_seconds: float) -> int:
    """Return the least number of steps that take ``seconds``."""
    return math.ceil(seconds / step_seconds - _ROUNDING)


class Measured(NamedTuple):
    """Measurements of rank 0; every rank decides from the same values."""

    step_seconds: float
    """of a step with the evaluations, without saves; 0 if it is not known yet"""
    save_seconds: float


class SaveClock:
    """Measures the seconds of a step and of a save, on the host.

    Args:
        save_seconds: an estimate, until the first save is measured.
    """

    def __init__(self, save_seconds: float) -> None:
        self._save_seconds = save_seconds
        self._step_seconds = 0.0
        self._first_step: int | None = None
        self._begun = 0.0

    def start(self, step: int) -> None:
        """Start a measurement after ``step``."""
        self._first_step = step
        self._begun = time.monotonic()

    def read(self, step: int) -> Measured:
        """Return the mean since the last start, or the one before if no step was done since."""
        if self._first_step is not None and step > self._first_step:
            self._step_seconds = (time.monotonic() - self._begun) / (step - self._first_step)
        return Measured(self._step_seconds, self._save_seconds)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save. Use it as a context manager."""
        begun = time.monotonic()
        yield
        self._save_seconds = time.monotonic() - begun


class AutomaticSaves:
    """Decides when a run saves, from measured times. Every rank gets the same values, and so decides the same.

    Args:
        step: steps that are done at the start of the attempt.
        resumed: there is a checkpoint of ``step``, so no early save is needed.
        total_steps: of the run.
        save_seconds: an estimate.
    """

    def __init__(self, *, step: int, resumed: bool, total_steps: int, save_seconds: float):
        self.total_steps = total_steps
        self.last_save = step
        self._first_step = step
        self._saves = 0
        first_step = FIRST_STEP
        if total_steps >= SHORT_STEPS:
            first_step = min(FIRST_STEP, max(FIRST_STEP_OF_SHORT, total_steps // SAVES_A_RUN))
        self._early = None if resumed else step + first_step
        self._measured = Measured(0.0, save_seconds)

    @property
    def next_step(self) -> int | None:
        """The step after which the run saves next; None if no time of a step is known yet, and none is due by count."""
        # No time is known yet: only the first save, which is due by count, can be.
        if self._measured.step_seconds == 0:
            return self._early
        due = self.last_save + automatic_interval(*self._measured, self.total_steps)
        # An early save takes time that the run earns later: the next one waits for that, but not longer than half an hour.
        due = max(due, min(self._earned_step(), self.last_save + _longest(self._measured.step_seconds)))
        # A save that the run cannot earn any more is not made early.
        if self._early is None or self._earned_step() > self.total_steps:
            return due
        return min(due, self._early)

    def _earned_step(self) -> int:
        """Return the step from which one more save keeps the saves of this attempt within 5 % of its time."""
        step_seconds, save_seconds = self._measured
        return self._first_step + steps_to_earn((self._saves + 1) * save_seconds, step_seconds)

    def measured(self, values: Measured) -> None:
        """Take over what rank 0 has measured."""
        self._measured = values

    def saved(self, step: int) -> None:
        """Note a save of ``step``."""
        self.went_back(step)
        self._saves += 1

    def went_back(self, step: int) -> None:
        """Note a rollback to ``step``: there is a checkpoint of it."""
        self.last_save = step
        self._early = None

    def is_due(self, step: int, *, evaluates: bool = False) -> bool:
        """Return whether the run saves after ``step``.

        Args:
            evaluates: ``--eval_steps`` names this step. It is saved as soon as the cost allows: `best` is one of those that
                were saved.
        """
        if self.next_step is not None and step >= self.next_step:
            return True
        # A step that is evaluated is saved earlier than it would be due, if the run has earned it.
        if not evaluates or self._measured.step_seconds == 0:
            return False
        step_seconds, save_seconds = self._measured
        return step >= max(self._earned_step(), self.last_save + steps_to_earn(save_seconds, step_seconds))


class AutomaticEvaluations:
    """Decides at which checkpoints a run evaluates: where evaluations take at most 5 % of the time.

    Args:
        step: steps that are done at the start of the attempt.
        total_steps: of the run.
        batches: of the held-out data, each as large as a training step's.
    """

    def __init__(self, *, step: int, total_steps: int, batches: float):
        self.last_evaluation = step
        # A forward pass takes a third of a training step. What scorers take is not known: a tenth of the run comes first.
        self._estimated_steps = max(batches / 3, SHARE * total_steps / SAVES_A_RUN)
        self._seconds: float | None = None

    def evaluated(self, step: int, seconds: float) -> None:
        """Note an evaluation of ``step`` that took ``seconds``, the same value on every rank."""
        self.last_evaluation = step
        self._seconds = seconds

    def went_back(self, step: int) -> None:
        """Note a rollback to ``step``."""
        self.last_evaluation = step

    def is_due(self, step: int, step_seconds: float) -> bool:
        """Return whether the checkpoint of ``step`` is evaluated. Its time follows from ``step_seconds``, 0 if not known."""
        if step_seconds == 0:
            return False
        # The last evaluation's time, or an estimate before the first one.
        cost = self._estimated_steps * step_seconds if self._seconds is None else self._seconds
        # The evaluation is to take 5 % of the time since the last one, its own included.
        return SHARE * (step - self.last_evaluation) * step_seconds >= (1 - SHARE) * cost


class Schedule:
    """The steps at which something is due, for a value of ``eval_steps`` or ``save_steps``.

    Args:
        interval: steps, a share of the run, or ``epoch``; never for 0 and ``auto``, see `AutomaticSaves`.
        total_steps: of the run.
    """

    def __init__(self, interval: Interval | str, total_steps: int):
        self._at_epochs = interval == "epoch"
        self._every = 0
        if isinstance(interval, float):
            # The sum keeps a product that is a whole number from being rounded down.
            self._every = max(1, int(interval * total_steps + 1e-6))
        elif isinstance(interval, int):
            self._every = interval

    def is_due(self, step: int, passes_before: float, passes: float) -> bool:
        """Return whether it is due after ``step``, which took the passes over the data from ``passes_before`` to ``passes``."""
        if self._at_epochs:
            return int(passes) > int(passes_before)
        return self._every > 0 and step % self._every == 0


class Timetable:
    """Decides after which steps a run evaluates and saves, and measures what that takes. Every rank decides the same.

    Args:
        resumed: there is a checkpoint of the first step.
        save_seconds: an estimate, until the first save is measured.
        held_out_batches: of the held-out data, each as large as a training step's; None if nothing is evaluated.
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
        self._evaluations = Schedule(eval_steps, total_steps)
        self._saves = Schedule(save_steps, total_steps)
        # Each is None if the user has set the steps.
        self._automatic_saves: AutomaticSaves | None = None
        if save_steps == AUTOMATIC and saves:
            self._automatic_saves = AutomaticSaves(
                step=step, resumed=resumed, total_steps=total_steps, save_seconds=save_seconds
            )
        self._automatic_evaluations: AutomaticEvaluations | None = None
        if eval_steps == AUTOMATIC and held_out_batches is not None:
            self._automatic_evaluations = AutomaticEvaluations(step=step, total_steps=total_steps, batches=held_out_batches)

    def is_evaluation_set(self, step: int, passes_before: float, passes: float) -> bool:
        """Return whether ``--eval_steps`` names the step, which took the passes over the data from one number to the other."""
        return self._evaluations.is_due(step, passes_before, passes)

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the checkpoint of a step is evaluated by itself."""
        automatic = self._automatic_evaluations
        return automatic is not None and automatic.is_due(step, self._step_seconds)

    def is_save_due(self, step: int, passes_before: float, passes: float, *, evaluates: bool) -> bool:
        """Return whether the run saves after a step. ``evaluates``: ``--eval_steps`` names it."""
        # A step that is evaluated is a good one to save: `best` is one of those that were saved.
        if self._automatic_saves is not None:
            return self._automatic_saves.is_due(step, evaluates=evaluates)
        return self._saves.is_due(step, passes_before, passes)

    def measure_first_steps(self, step: int, *, settle: Callable[[], None]) -> None:
        """Let all ranks know how long a step takes before the first log point, which slow steps reach late. Collective once.

        The first step of an attempt is left out: much of its time is spent on compiling and allocating.

        Args:
            settle: waits until the device has done the steps that it was given. A host may be steps ahead of it.
        """
        self._steps_of_attempt += 1
        if self._steps_of_attempt <= 2:
            settle()
        if self._steps_of_attempt == 1:
            self._clock.start(step)
        elif self._steps_of_attempt == 2 and self._automatic_saves is not None:
            self.set_measured(Measured(*self._strategy.on_main(lambda: list(self.read_clock(step)))))

    def read_clock(self, step: int) -> Measured:
        """Return what this rank has measured. Rank 0's values count: see `set_measured`."""
        return self._clock.read(step)

    def set_measured(self, values: Measured) -> None:
        """Take over what rank 0 has measured. Call with the same values on every rank."""
        self._step_seconds = values.step_seconds
        if self._automatic_saves is not None:
            self._automatic_saves.measured(values)

    def evaluated(self, step: int, seconds: float) -> None:
        """Note an evaluation that took ``seconds`` on this rank. Collective."""
        if self._automatic_evaluations is not None:
            # Rank 0's clock, so that all ranks decide the same about the next evaluation.
            self._automatic_evaluations.evaluated(step, self._strategy.on_main(lambda: seconds))

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Return a context for a save."""
        with self._clock.saving():
            yield
        # The time of a step is measured without saves.
        self._clock.start(step)
        if self._automatic_saves is not None:
            self._automatic_saves.saved(step)

    def went_back(self, step: int) -> None:
        """Note a rollback to ``step``."""
        self._clock.start(step)
        for automatic in (self._automatic_saves, self._automatic_evaluations):
            if automatic is not None:
                automatic.went_back(step)


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
    """Return a line that says when the run saves, and what cannot work if it does not."""
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
