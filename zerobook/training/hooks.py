"""Hooks: code that a run calls at fixed points.

A hook is a subclass of `Hook`. ``--hooks FILE.py:Class`` (or ``module:Class``) adds one to any recipe; the class is called
without arguments. The trainer's own console, trackers and runlog are hooks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from zerobook.utils import user_code

if TYPE_CHECKING:
    from torch import nn

    from zerobook.checkpoint.manager import CheckpointManager
    from zerobook.checkpoint.progress import Progress
    from zerobook.config import RecipeConfig
    from zerobook.data.prepare import PreparedData
    from zerobook.monitor.policy import RecoveryAction
    from zerobook.runlog.records import EvaluationRecord, StepRecord
    from zerobook.runlog.writer import RunLog
    from zerobook.strategy import Strategy
    from zerobook.training.evaluator import Evaluator
    from zerobook.training.pace import Pace
    from zerobook.training.recipe import Collator, Scorer
    from zerobook.training.spikes import SpikeHandler
    from zerobook.training.state import RunState


class TrainerView(Protocol):
    """The part of `zerobook.training.trainer.Trainer` that hooks may use."""

    config: RecipeConfig
    strategy: Strategy
    data: PreparedData
    collate: Collator
    scorers: Sequence[Scorer]
    save_results: bool
    """False if no checkpoint and no model is written, for programs that measure a few steps"""
    state: RunState
    """the progress, the sample order and the learning rate"""
    manager: CheckpointManager
    evaluator: Evaluator
    evaluation: dict[str, Any] | None
    """result of the current step's evaluation"""
    spikes: SpikeHandler
    """finds spikes and decides on recovery actions"""
    pace: Pace
    log: RunLog
    """the runlog; on all ranks but 0, one that writes nothing"""
    recipe_file: Path | None
    """the file of the recipe; None where it is not known"""

    @property
    def progress(self) -> Progress: ...

    def add_metric(self, name: str, value: SupportsFloat) -> None:
        """Add a value to the record of the current step. The runlog and the trackers write it.

        Call it in a method from `Hook.before_step` to `Hook.after_step`; a value added elsewhere is lost.

        Args:
            value: the same on every rank. A tensor with one element is read at the log point, so nothing waits for it here.
        """


class Hook:
    """Base class of all hooks. Every method does nothing; override those that are needed.

    Unless a method says otherwise, every rank calls it at the same place, so it may use collectives if it does so on all
    ranks. An exception ends the run. Reading a tensor as a number waits for the device. The trainer waits at log points only,
    so read tensors in `on_log`.
    """

    def before_prepare(self, trainer: TrainerView, model: nn.Module) -> None:
        """Run first, before the strategy distributes ``model``. The model is as the recipe made it.

        The trainer has ``config``, ``strategy``, ``data``, ``collate``, ``scorers`` and ``save_results`` at this point. All of
        them but ``config`` may be replaced here.
        """

    def on_start(self, trainer: TrainerView) -> None:
        """Run before the first step of this process. The model is prepared, and a checkpoint is loaded."""

    def before_step(self, trainer: TrainerView, step: int) -> None:
        """Run before the first micro-batch of optimizer step ``step``, counted from 1."""

    def around_loss(self, trainer: TrainerView, batch: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss of one training micro-batch. It ends before the backward pass.

        Args:
            batch: as the collator made it, before it is moved to the device.
        """
        return nullcontext()

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        """Run after the last backward pass of a step. Gradients are reduced over the ranks, and no update is applied yet.

        `Strategy.gradients` yields them. `TrainerView.add_metric` adds a value to the step's record.
        """

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        """Run after every optimizer step. The record's loss and norm are tensors, and the loss is this rank's part."""

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> RecoveryAction | None:
        """Run at every log point with the steps since the last one. Losses, norms and metrics are numbers now.

        Returns:
            A recovery action to carry out, such as a rollback. It is used only if the spike monitor asks for none. Return the
                same action on every rank.
        """
        return None

    def on_alert(self, trainer: TrainerView, messages: Sequence[str]) -> None:
        """Run at a log point where the spike monitor found or decided something. Rank 0 only: use no collectives.

        Args:
            messages: sentences that describe it.
        """

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        """Run after every evaluation. The record holds numbers."""

    def on_save(self, trainer: TrainerView, folder: Path) -> None:
        """Run after every save.

        Args:
            folder: the complete checkpoint. With ``--async_save`` it may not be there yet; after a failed save with
                ``--on_save_error continue`` it is missing.
        """

    def on_rollback(self, trainer: TrainerView, action: RecoveryAction) -> None:
        """Run after a recovery action was carried out.

        The run has gone back to the checkpoint of ``action.to_step``, and ``trainer.progress`` is that of the checkpoint. If
        ``to_step`` is None, the run goes on from where it was, without some samples.
        """

    def on_end(self, trainer: TrainerView) -> None:
        """Run at the end of training: after the last step, after a warning signal, or when a spike stops the run.

        All saves of checkpoints have ended. A final model is written later. An exception that ends the run skips this method.
        Hooks are called in reverse order here.
        """


class Hooks:
    """A list of hooks, called one after another. The trainer's own hooks come first.

    An error in a user's hook gets a note with the hook's name.
    """

    def __init__(self, user: Sequence[Hook]):
        self._trainer_hooks: list[Hook] = []
        self._user_hooks = [*user]
        self._by_method: dict[str, list[Hook]] = {}

    def add(self, *hooks: Hook) -> None:
        """Add the trainer's own hooks."""
        self._trainer_hooks += hooks
        self._by_method.clear()

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method ``name`` of every hook that overrides it; return the results that are not None."""
        hooks = self._overriding(name)
        if name == "on_end":
            hooks = hooks[::-1]
        results = []
        for hook in hooks:
            try:
                result = getattr(hook, name)(*arguments)
            except Exception as error:
                self._note(error, hook, name)
                raise
            if result is not None:
                results.append(result)
        return results

    def around_loss(self, trainer: TrainerView, batch: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return one context of the contexts of all hooks."""
        hooks = self._overriding("around_loss")
        if not hooks:
            return nullcontext()
        # If a hook fails, the contexts that were entered before are left again.
        with ExitStack() as stack:
            for hook in hooks:
                try:
                    stack.enter_context(hook.around_loss(trainer, batch))
                except Exception as error:
                    self._note(error, hook, "around_loss")
                    raise
            return stack.pop_all()

    def _overriding(self, name: str) -> list[Hook]:
        """Return the hooks that have a method ``name`` of their own: most have few, and some run at every step."""
        if name not in self._by_method:
            hooks = (*self._trainer_hooks, *self._user_hooks)
            self._by_method[name] = [hook for hook in hooks if getattr(type(hook), name) is not getattr(Hook, name)]
        return self._by_method[name]

    def _note(self, error: Exception, hook: Hook, method: str) -> None:
        """Add to the error which of the user's hooks raised it."""
        if hook in self._user_hooks:
            error.add_note(f"The error was raised by the hook {type(hook).__module__}:{type(hook).__qualname__}, in {method}.")


def load_hooks(specs: Sequence[str]) -> list[Hook]:
    """Make the hooks that ``--hooks`` names.

    Args:
        specs: ``FILE.py:Class`` or ``module:Class`` each.

    Raises:
        ConfigError: a class is not found, or is no subclass of `Hook`.
    """
    return [user_code.load_class("hooks", spec, Hook)() for spec in specs]
