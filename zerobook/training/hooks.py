"""Hooks: code that a run calls at fixed points.

A hook is a subclass of `Hook`. ``--hooks FILE.py:Class`` (or ``module:Class``) adds one to any recipe; the class is called
without arguments. The trainer's own console, trackers and runlog are hooks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    """the file of the recipe; None if it is not known"""

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

    The order of the calls is

        before_prepare, load_state_dict (when a run is resumed), on_start
        each step: before_step, around_loss for each micro-batch, on_gradients_ready, after_step
        then, where they are due: on_log, on_alert, before_evaluate, after_evaluate, on_evaluate, state_dict, on_save
        a rollback: load_state_dict, on_rollback
        the end: on_end, and close when the model is written; after an error: on_error, close

    The trainer's own hooks come first, then those of the user in their order. Methods that end something (`after_evaluate`,
    `on_end`, `close`) are called in reverse order.
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

    def before_evaluate(self, trainer: TrainerView) -> None:
        """Run before every evaluation, for example to give the model other weights (`Strategy.swapped_weights`)."""

    def after_evaluate(self, trainer: TrainerView) -> None:
        """Run after every evaluation, before its record is used. It is left out if the evaluation fails."""

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        """Run after `after_evaluate`, if something was evaluated. The record holds numbers."""

    def state_dict(self, trainer: TrainerView) -> dict[str, Any]:
        """Return the state that a checkpoint keeps for this hook. It is loaded under any strategy and number of ranks.

        Each value is one of two kinds:

        - what JSON can hold, the same on every rank;
        - a dict of tensors, name -> tensor, like the shards that `Strategy.shards` yields on this rank, for all weights.
        """
        return {}

    def load_state_dict(self, trainer: TrainerView, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned when the loaded checkpoint was saved. Weights and optimizer are loaded already.

        It is not called if the checkpoint has no state of this hook. A hook's state goes by the name of its class.
        """

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
        """

    def on_error(self, trainer: TrainerView, error: Exception) -> None:
        """Run when an exception ends the training, after `on_start` has begun. Only the ranks that raise it call this.

        Use no collectives, and read no tensors: other ranks may be gone. The exception is raised again.
        """

    def close(self, trainer: TrainerView) -> None:
        """Run last, once, for every hook whose `on_start` could be called: when the model is written, or after `on_error`.

        Close files and connections here; use no collectives. If it raises after an error, the first error is the one that
        ends the run.
        """


# Methods that end what another method began.
_REVERSED = {"after_evaluate", "on_end", "close"}


class Hooks:
    """A list of hooks, called one after another. The trainer's own hooks come first.

    An error in a user's hook gets a note with the hook's name.
    """

    def __init__(self, user_hooks: Sequence[Hook]):
        self._trainer_hooks: list[Hook] = []
        self._user_hooks = [*user_hooks]
        self._by_method: dict[str, list[Hook]] = {}
        self._are_closed = False

    def add(self, *hooks: Hook) -> None:
        """Add the trainer's own hooks."""
        self._trainer_hooks += hooks
        self._by_method.clear()

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method ``name`` of every hook that overrides it; return the results that are not None."""
        results = []
        for hook in self._list_overriding(name):
            result = self._call(hook, name, *arguments)
            if result is not None:
                results.append(result)
        return results

    def _call(self, hook: Hook, name: str, *arguments: Any) -> Any:
        """Call a method of one hook. An error in a user's hook gets a note with its name."""
        try:
            return getattr(hook, name)(*arguments)
        except Exception as error:
            self._add_note(error, hook, name)
            raise

    @contextmanager
    def closing(self, trainer: TrainerView) -> Iterator[None]:
        """Return a context for the training. At its end all hooks are closed; after an error, ``on_error`` is called first."""
        try:
            yield
        except BaseException as error:
            # Ctrl-C and the exit after a stop are not errors of the training. An error of a hook's `close` is none either.
            if isinstance(error, Exception) and not self._are_closed:
                self._call_all("on_error", trainer, error, first_error=error)
            self.close(trainer, first_error=error)
            raise
        self.close(trainer)

    def close(self, trainer: TrainerView, first_error: BaseException | None = None) -> None:
        """Close all hooks, once. Errors are added to ``first_error`` as notes; without one, the first of them is raised."""
        if not self._are_closed:
            # Set this first. The trainer calls this method inside of the context of `closing`, too. If a hook's `close` then
            # raises an error, `closing` calls it again.
            self._are_closed = True
            self._call_all("close", trainer, first_error=first_error)

    def _call_all(self, name: str, *arguments: Any, first_error: BaseException | None) -> None:
        """Call a method of every hook, also after an error of another hook.

        Errors are added to ``first_error`` as notes. If that is None, the first of them is raised at the end.
        """
        raises = first_error is None
        for hook in self._list_overriding(name):
            try:
                self._call(hook, name, *arguments)
            except Exception as error:
                if first_error is None:
                    first_error = error
                else:
                    first_error.add_note(f"The hook {_format_path(hook)} failed in {name}: {error!r}")
        if raises and first_error is not None:
            raise first_error

    def state_dicts(self, trainer: TrainerView) -> dict[str, dict[str, Any]]:
        """Return hook's name -> its state, without empty states. Call on every rank."""
        states = {}
        for name, hook in self._name_hooks().items():
            state = self._call(hook, "state_dict", trainer)
            if state:
                states[name] = state
        return states

    def load_state_dicts(self, trainer: TrainerView, states: dict[str, dict[str, Any]]) -> None:
        """Give each hook the state of its name. Call on every rank."""
        for name, hook in self._name_hooks().items():
            if name in states:
                self._call(hook, "load_state_dict", trainer, states[name])

    def _name_hooks(self) -> dict[str, Hook]:
        """Return name -> hook, for the hooks that override ``state_dict``. The second hook of a class is named ``Class-2``."""
        # Name hooks by their class and not by their position, since a resumed run may have further hooks.
        named: dict[str, Hook] = {}
        counts: Counter[str] = Counter()
        for hook in self._list_overriding("state_dict"):
            class_name = type(hook).__name__
            counts[class_name] += 1
            number = counts[class_name]
            named[class_name if number == 1 else f"{class_name}-{number}"] = hook
        return named

    def around_loss(self, trainer: TrainerView, batch: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return one context that contains the contexts of all hooks."""
        hooks = self._list_overriding("around_loss")
        if not hooks:
            return nullcontext()
        # If a hook fails, the stack leaves the contexts that were entered before.
        with ExitStack() as stack:
            for hook in hooks:
                try:
                    stack.enter_context(hook.around_loss(trainer, batch))
                except Exception as error:
                    self._add_note(error, hook, "around_loss")
                    raise
            # Move the contexts to a new stack, which the caller leaves. This one would leave them here.
            return stack.pop_all()

    def _list_overriding(self, name: str) -> list[Hook]:
        """Return the hooks that override the method ``name``, in the order of the calls."""
        # Look the methods up only once, since some are called at every step.
        if name not in self._by_method:
            hooks = [*self._trainer_hooks, *self._user_hooks]
            if name in _REVERSED:
                hooks.reverse()
            self._by_method[name] = [hook for hook in hooks if getattr(type(hook), name) is not getattr(Hook, name)]
        return self._by_method[name]

    def _add_note(self, error: Exception, hook: Hook, method: str) -> None:
        """Add a note to the error that names the hook, if it is one of the user's."""
        if hook in self._user_hooks:
            error.add_note(f"The error was raised by the hook {_format_path(hook)}, in {method}.")


def _format_path(hook: Hook) -> str:
    """Return the module and the class of a hook."""
    return f"{type(hook).__module__}:{type(hook).__qualname__}"


def load_hooks(specs: Sequence[str]) -> list[Hook]:
    """Make the hooks that ``--hooks`` names.

    Args:
        specs: ``FILE.py:Class`` or ``module:Class`` each.

    Raises:
        ConfigError: a class is not found, or is not a subclass of `Hook`.
    """
    return [user_code.load_class("hooks", spec, Hook)() for spec in specs]
