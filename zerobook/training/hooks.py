"""Hooks: code of a user, or of this project, that a run calls at fixed points.

A hook is a subclass of `Hook`. ``--hooks FILE.py:Class`` (or ``module:Class``) adds one to any recipe; the class is called
without arguments. The trainer's own console, trackers and runlog are hooks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from zerobook import user_code
from zerobook.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from zerobook.checkpoint.keeper import Keeper
    from zerobook.config import RecipeConfig
    from zerobook.data.prepare import PreparedData
    from zerobook.progress import Progress
    from zerobook.runlog.policy import Measure
    from zerobook.runlog.records import EvaluationRecord, StepRecord
    from zerobook.runlog.watch import Watch
    from zerobook.runlog.writer import RunLog
    from zerobook.strategy import Strategy
    from zerobook.training.evaluator import Evaluator
    from zerobook.training.pace import Pace
    from zerobook.training.recipe import Collator, Scorer
    from zerobook.training.state import RunState


class TrainerView(Protocol):
    """What a hook may use of the trainer, `zerobook.training.trainer.Trainer`."""

    config: RecipeConfig
    strategy: Strategy
    data: PreparedData
    collate: Collator
    scorers: Sequence[Scorer]
    save_results: bool
    """False where no checkpoint and no model is written, for programs that measure a few steps"""
    state: RunState
    """the progress, the sample order and the learning rate"""
    keeper: Keeper
    evaluator: Evaluator
    evaluation: dict[str, Any] | None
    """what the evaluation of the present step measured"""
    watch: Watch
    """the spike monitor"""
    pace: Pace
    log: RunLog | None
    """rank 0's"""

    @property
    def progress(self) -> Progress: ...

    def add_metric(self, name: str, value: SupportsFloat) -> None:
        """Add a value to the record of the step that is under way; the runlog and trackers get it.

        Args:
            value: the same on every rank. A tensor with one element is read at the log point, so nothing waits for it here.
        """


class Hook:
    """Does nothing at every point; override what is needed.

    Every rank calls every method at the same place, so each of them may use collectives, if all ranks do. Methods are called
    in the order in which they stand here. An exception ends the run. Unless a method says otherwise, losses and norms in
    records are floats, and reading a tensor waits for the device: a run is fastest if this happens at log points only.
    """

    def before_prepare(self, trainer: TrainerView, model: nn.Module) -> None:
        """Run first of all, before the strategy spreads ``model``, which is as the recipe made it.

        Of the trainer there are ``config``, ``strategy``, ``data``, ``collate`` and ``scorers``; they may be replaced here.
        """

    def on_start(self, trainer: TrainerView) -> None:
        """Run before the first step of this process. The model is prepared, and a checkpoint is loaded."""

    def before_step(self, trainer: TrainerView, step: int) -> None:
        """Run before the first micro-batch of optimizer step ``step``, counted from 1."""

    def around_loss(self, trainer: TrainerView, batch: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss of one training micro-batch; the backward pass is behind it.

        Args:
            batch: as the collator made it, before it is moved to the device.
        """
        return nullcontext()

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        """Run behind the last backward pass of a step: gradients are reduced over ranks, and nothing is applied yet.

        `Strategy.gradients` yields them. `TrainerView.add_metric` adds a value to the step's record.
        """

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        """Run behind every optimizer step. The record's loss and norm are still on the device."""

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> Measure | None:
        """Run at every log point with the steps since the last one. Their tensors have been read.

        Returns:
            What is to be done, such as a rollback, where the spike monitor asks for nothing; the same on every rank.
        """
        return None

    def on_alert(self, trainer: TrainerView, messages: Sequence[str]) -> None:
        """Run at a log point at which the spike monitor found or decided something; rank 0 alone has the sentences."""

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        """Run behind every evaluation."""

    def on_save(self, trainer: TrainerView, folder: Path) -> None:
        """Run behind every save. ``folder`` is the complete checkpoint; with ``--async_save`` it may still be written."""

    def on_rollback(self, trainer: TrainerView, action: Measure) -> None:
        """Run behind what was done about a spike.

        The run has gone back to the checkpoint of ``action.to_step``, and its progress is the one of that time. Where
        ``to_step`` is None, samples are left out from now on.
        """

    def on_end(self, trainer: TrainerView) -> None:
        """Run where training ends in order: after its last step, after a warning signal, or stopped for a person to decide.

        Everything is saved by then. Hooks end in reverse order.
        """


class Hooks:
    """Calls hooks one after another, those alone that override the method.

    The trainer's own come first. An error in one of the user's is given the hook's name.
    """

    def __init__(self, user: Sequence[Hook]):
        self._own: list[Hook] = []
        self._user = [*user]

    def add(self, *own: Hook) -> None:
        """Add the trainer's own."""
        self._own += own

    def __call__(self, name: str, *given: Any) -> list[Any]:
        """Call the method ``name`` of every hook and return what is not None."""
        hooks = self._overriding(name)
        found = []
        for hook in reversed(hooks) if name == "on_end" else hooks:
            with self._named(hook, name):
                found.append(getattr(hook, name)(*given))
        return [value for value in found if value is not None]

    @contextmanager
    def around_loss(self, trainer: TrainerView, batch: dict[str, Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self._overriding("around_loss"):
                with self._named(hook, "around_loss"):
                    stack.enter_context(hook.around_loss(trainer, batch))
            yield

    def _overriding(self, name: str) -> list[Hook]:
        return [hook for hook in (*self._own, *self._user) if getattr(type(hook), name) is not getattr(Hook, name)]

    @contextmanager
    def _named(self, hook: Hook, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if hook in self._user:
                error.add_note(f"This was raised by the hook {type(hook).__module__}:{type(hook).__qualname__}, in {method}.")
            raise


def load_hooks(specs: Sequence[str]) -> list[Hook]:
    """Make the hooks that ``--hooks`` names.

    Args:
        specs: ``FILE.py:Class`` or ``module:Class`` each.

    Raises:
        ConfigError: one of them is not there, or is no hook.
    """
    hooks = []
    for spec in specs:
        made: Callable[[], Hook] = user_code.load("hooks", spec)
        if not (isinstance(made, type) and issubclass(made, Hook)):
            raise ConfigError(f"hooks: {spec}: {made!r} is no hook. Derive the class from zerobook.training.hooks.Hook.")
        hooks.append(made())
    return hooks
