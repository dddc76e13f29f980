"""The trainer of every recipe under every strategy."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.constants import STOPPED
from zerobook.data.batch_loader import BatchLayout, StepPlan
from zerobook.data.collate import to_device
from zerobook.data.prepare import PreparedData
from zerobook.errors import CheckpointError, ConfigError, DivergenceError
from zerobook.health.position import during, enter
from zerobook.health.watch import Watch
from zerobook.launch.process import launched, leave
from zerobook.monitor import preemption
from zerobook.monitor.events import EPOCH_WINDOW
from zerobook.monitor.policy import RecoveryAction
from zerobook.objective import Metrics, Objective
from zerobook.runlog.lifecycle import log_failure
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import NullRunLog, RunLog
from zerobook.strategy import Strategy
from zerobook.training import resume, setup
from zerobook.training.commands import OperatorCommands
from zerobook.training.console import Console
from zerobook.training.evaluator import Evaluator
from zerobook.training.hooks import Hook, Hooks, TrainerView, load_hooks
from zerobook.training.intervals import Timetable
from zerobook.training.log_point import describe_divergence, reduce_records
from zerobook.training.own_hooks import make_own_hooks
from zerobook.training.pace import Pace
from zerobook.training.recipe import Collator, Scorer
from zerobook.training.rollback import Recovery
from zerobook.training.runlog_hook import RunlogHook
from zerobook.training.spikes import SpikeHandler
from zerobook.training.state import seed_generators, step_seed
from zerobook.training.watching import telling_ranks_of_errors
from zerobook.utils.units import counted


class Trainer(TrainerView):
    """Trains ``model`` on ``data`` with the settings of ``config``, distributed by ``strategy``.

    The loss of a step is the objective's loss, summed over the rows of all ranks and micro-batches, divided by the sum of their
    loss weights. That sum is known from the sample ids before the step, so it needs no communication.
    Between log points the trainer does not wait for the device. DeepSpeed itself waits in each step, and so does FSDP2 if it
    keeps gradients in host memory. transformers waits in each forward pass of an encoder-decoder (3 times for BART and
    BlenderBot, twice for T5) to check whether the mask hides any token.

    Args:
        collate: list of rows -> the model's arguments by name (mostly tensors), including ``labels``. The collator of a
            causal recipe is replaced by its cheapest form for the prepared model: see
            `zerobook.models.isolation.choose_isolating_collator`.
        objective: the loss, and the weights that it is divided by.
        scorers: measure more than the loss at every evaluation.
        hooks: hooks besides those in ``config.hooks``.
        reference_model: a second model, which is not trained, for the objective.
        watch: the watch of this run, whose findings go into the runlog.
        recipe_file: the file of the recipe, whose git commit is recorded.

    Attributes: those of `zerobook.training.hooks.TrainerView`, which hooks may use, and those below.
    """

    console: Console
    log: RunLog
    evaluation: dict[str, Any] | None
    runlog_hook: RunlogHook | None
    """writes the steps and evaluations into the runlog; None on all ranks but 0"""
    recovery: Recovery
    commands: OperatorCommands
    timetable: Timetable
    preemption: preemption.Preemption
    """the handlers of signals, such as SIGTERM; set by `run`"""
    result: Progress
    """progress of the model that is written; set at the end of the training"""
    _saved_step: int | None
    """step of the last checkpoint, so that it is not saved again at the end"""
    _evaluated_step: int | None
    """step of the last evaluation, so that it is not evaluated again at the end"""
    _pending: list[StepRecord]
    """steps since the last log point; their losses are still tensors"""
    _metrics: dict[str, SupportsFloat]
    """values that hooks have added to the current step"""

    def __init__(
        self,
        config: RecipeConfig,
        sources: ConfigSources,
        strategy: Strategy,
        model: torch.nn.Module,
        data: PreparedData,
        *,
        collate: Collator,
        objective: Objective,
        scorers: Sequence[Scorer] = (),
        hooks: Sequence[Hook] = (),
        reference_model: torch.nn.Module | None = None,
        watch: Watch | None = None,
        recipe_file: Path | None = None,
    ):
        self.config = config
        self.strategy = strategy
        self.data = data
        self.collate = collate
        self.objective = objective
        self.scorers = scorers
        self.watch = watch
        self.recipe_file = recipe_file
        self.save_results = True
        self.evaluation = None
        self._pending = []
        self._metrics = {}
        # Call the hooks first, so that they can replace what is used below.
        self.hooks = Hooks([*load_hooks(config.hooks), *hooks])
        self.hooks("before_prepare", self, model)
        self._check_settings()
        try:
            policy_state = self._open_run(model)
            self._prepare_models(model, reference_model, sources)
            self._build_parts(policy_state)
            self._record_start(sources)
            self._load_checkpoint()
        except BaseException:
            # A script or a notebook goes on, and may train in this folder again.
            if not launched():
                self.close()
            raise
        if self.progress.step and self.progress.global_batch != self.state.layout.global_batch:
            self.spikes.expect(self.progress.step + 1, "a step has another number of samples than before the resume")
        # Set these after the load, which logs the checkpoint's values beside the new ones.
        self.progress.total_steps = self.state.total_steps
        self.progress.global_batch = self.state.layout.global_batch
        self.progress.world_size = self.strategy.world_size

    # Hooks may have replaced the collator and the data, so these checks come after `before_prepare`.
    def _check_settings(self) -> None:
        if self.config.padding_free and not getattr(self.collate, "flatten", False):
            raise ConfigError(
                f"padding_free: the recipe makes its batches by {type(self.collate).__name__}, which pads. Drop --padding_free."
            )
        if self.config.early_stopping_patience and not self.data.held_out:
            raise ConfigError("early_stopping_patience: there is no held-out data. Give --validation_split_percentage above 0.")
        if self.config.final_model == "best" and not self.data.held_out:
            raise ConfigError("final_model: best needs held-out data. Give --validation_split_percentage above 0.")

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def _open_run(self, model: torch.nn.Module) -> dict[str, Any]:
        """Lock the run's folder, open the runlog, and make the run's state, without weights. Collective.

        The state is new, or that of the checkpoint to resume from, with the decisions that were made after it.

        Returns:
            The state of the recovery policy.
        """
        strategy = self.strategy
        self.pace = Pace(strategy.device)
        self.console = Console(silent=not strategy.is_main)
        self.log = NullRunLog(self.config.output_dir)
        self.manager = CheckpointManager(strategy, self.config)
        strategy.on_main(self._open_log)
        self.runlog_hook = RunlogHook(self.log) if strategy.is_main else None
        if self.watch:
            setup.report_hangs(self.watch, self.log, self.config, strategy.rank, self.pace.clock)
        layout = BatchLayout.from_plan(self.config, strategy.plan, strategy.mesh.data_parallel_rank)
        self.state, policy_state = setup.make_first_state(
            self.config, strategy, self.manager, self.log, model, self.data, self.collate, layout, self.console.say
        )
        self._saved_step = self.progress.step if self.manager.resumes_in_place else None
        self._evaluated_step = None
        return policy_state

    def _open_log(self) -> None:
        # Do not return the log: `Strategy.on_main` sends what it returns to all ranks, and a log cannot be sent.
        self.log = RunLog(self.config.output_dir)

    def _prepare_models(self, model: torch.nn.Module, reference_model: torch.nn.Module | None, sources: ConfigSources) -> None:
        """Distribute the models over the ranks, and choose the collator's cheapest form for the prepared model."""
        self.collate, notes = setup.prepare_models(
            self.config, sources, self.state, self.strategy, self.objective, model, reference_model
        )
        self.state.collate = self.collate
        self.state.build_loader()
        for note in notes:
            self.console.say(note)

    def _build_parts(self, policy_state: dict[str, Any]) -> None:
        """Make the parts of the trainer that need the prepared model. Collective."""
        strategy = self.strategy
        self.spikes = SpikeHandler(
            self.config,
            strategy,
            self.manager,
            self.log,
            self.console.say,
            detector=self.progress.detector,
            policy=policy_state,
            total_steps=self.state.total_steps,
        )
        # Check the space before the first step, so that no training is lost on a disk that is too small.
        if self.save_results:
            setup.check_space(self.manager, strategy, self.state)
        self.recovery = Recovery(self.state, strategy, self.manager, self.spikes, self.log, self.console.say)
        self.commands = OperatorCommands(
            self.state, strategy, self.manager, self.spikes, self.recovery, self.log, self.console.say
        )
        self.evaluator = Evaluator(
            self.config,
            strategy,
            self.data,
            self.scorers,
            self.collate,
            summed_loss=lambda batch: self._loss(batch)[0],
            has_perplexity=self.objective.is_cross_entropy,
        )
        self.timetable = setup.make_timetable(
            self.manager, strategy, self.state, evaluates=bool(self.data.held_out or self.scorers), saves=self.save_results
        )

    def _record_start(self, sources: ConfigSources) -> None:
        """Log the start of the attempt, print the introduction, and add the trainer's own hooks."""
        if self.runlog_hook:
            self.runlog_hook.begin(self, sources)
        self.console.introduce(self)
        self.hooks.add(*make_own_hooks(self, self.console, self.runlog_hook, self.watch))

    def _load_checkpoint(self) -> None:
        """Load the checkpoint to resume from, if there is one, and its evaluation. Collective."""
        if self.manager.checkpoint:
            resume.load(self.state, self.manager, self.strategy, self.log, self.console.say)
            self.hooks.load_state_dicts(self, self.manager.load_hook_states())
            # A checkpoint that was set aside gets its name back, after every rank has read it.
            self.strategy.barrier()
            self.strategy.on_main(self.manager.restore_name)
            # The last attempt may have ended before it proved this checkpoint good.
            self.spikes.note_save(self.progress.step)
            self.evaluation = self.strategy.on_main(lambda: resume.find_evaluation(self.log, self.progress))
            self._evaluated_step = None if self.evaluation is None else self.progress.step
        elif self.config.resume_from_checkpoint:
            self.console.say(f"nothing to resume in {self.config.output_dir}: starting at step 0")

    # --- training
    def run(self, save_result: Callable[[], Any] = lambda: None) -> Progress:
        """Train to the end, with evaluations and checkpoints, and return the final `Progress`. Collective.

        Args:
            save_result: writes the trained model. The run counts as finished when this has returned. A run that is killed
                before that resumes after its last step, and writes the model then.
        """
        # The last context ends first: an error is told to the other ranks, then logged, then given to the hooks.
        logged = log_failure(self.log, self.config.output_dir, self.strategy.rank)
        with self.hooks.closing(self), logged, telling_ranks_of_errors(self.watch):
            self._start()
            self._train()
            failure = self._evaluate_and_save_last()
            # Hooks may upload the result. The watch allows the phase ``export`` more time than the phases of a step.
            enter("export")
            self.result = self.progress
            if self.config.final_model == "best" and self.save_results:
                self._load_best()
            self.hooks("on_end", self)
            if self.save_results:
                save_result()
            # Raise the error of the last checkpoint only now, when the model is written.
            if failure is not None:
                raise failure
            self.hooks.close(self)
        self.commands.refuse_waiting("the run has ended")
        # Log the end of the run only when the model is written.
        if self.runlog_hook:
            self.runlog_hook.finish(self)
        return self.progress

    def _start(self) -> None:
        """Install the signal handlers, start the clocks, and evaluate the model before its first step if ``eval_on_start``."""
        self.preemption = preemption.Preemption(self.strategy, settle=self._wait_for_device)
        self.pace.measure_model(self.strategy)
        self.pace.start()
        self.hooks("on_start", self)
        if self.config.eval_on_start and self.progress.step == 0:
            self.evaluate()
        self.strategy.model.train()

    def _train(self) -> None:
        """Train to the last step, or until early stopping ends the run."""
        # A recovery action interrupts the training. `_recover` returns when it is carried out, or ends the process.
        action = self._train_until_action()
        while action is not None:
            self._recover(action)
            action = self._train_until_action()
        self.console.close_bar()
        if self._is_out_of_patience() and self.progress.step < self.state.end_step:
            self._stop_early()

    def _evaluate_and_save_last(self) -> CheckpointError | None:
        """Evaluate and save the last step; each only if it was not done already.

        Returns:
            The error if the checkpoint could not be saved; None otherwise. It is not raised here, since the model, which is
                smaller, may still fit on the disk.
        """
        # Evaluate before the save: the checkpoint records its held-out loss.
        if self._evaluated_step != self.progress.step:
            self.evaluate()
        try:
            if self._saved_step != self.progress.step:
                self.save()
            self.manager.finish(self.log)
        except CheckpointError as error:
            return error
        return None

    def _load_best(self) -> None:
        """Load the checkpoint with the lowest held-out loss, so that its model is written. Collective."""
        step = resume.find_best_step(self.manager, self.strategy, self.progress)
        if step is None:
            self.console.say("WARNING: no undamaged checkpoint has a held-out loss, so the model of the last step is written")
        elif step != self.progress.step:
            self.result, _ = self.manager.load(step)
            self.hooks.load_state_dicts(self, self.manager.load_hook_states(step))
            self.console.say(f"the model of step {step} is written: {self.result.eval_loss:.4f} is the lowest held-out loss")

    def close(self) -> None:
        """Close the runlog, unlock the run's folder and restore the signal handlers, for a process that goes on."""
        self.log.close()
        store.unlock(store.folder_of(self.config.output_dir))
        if hasattr(self, "preemption"):
            self.preemption.restore()

    def _wait_for_device(self) -> None:
        """Wait until the device has done the steps that were given to it, by reading the loss of the last one."""
        if self._pending:
            float(self._pending[-1].loss)

    def _train_until_action(self) -> RecoveryAction | None:
        """Train until the end, or until a recovery action interrupts the training. Return the action; None at the end."""
        progress = self.progress
        state = self.state
        steps = iter(state.loader)
        while progress.step < state.end_step and not self._is_out_of_patience():
            enter("data", progress.step + 1)
            plan, micro_batches = next(steps)
            passes_before = progress.epoch
            self._pending.append(self.train_step(plan, micro_batches))
            step = progress.step
            is_last = step >= state.end_step
            if int(progress.epoch) > int(passes_before):
                self._announce_epoch(passes_before)
            if not is_last:
                self.timetable.measure_first_steps(step, settle=self._wait_for_device)

            # Make a log point before every evaluation and save, so that a spike is noticed before it is saved.
            evaluates = self.timetable.is_evaluation_set(step, passes_before, progress.epoch)
            saves = self.timetable.is_save_due(step, passes_before, progress.epoch, evaluates=evaluates)
            action = None
            if is_last or evaluates or saves or step % self.config.logging_steps == 0:
                action = self._log_point(takes_command=True)
                if action is not None and action.goes_on:
                    # The action has replaced the loader. This step is still evaluated and saved below.
                    self._recover(action)
                    steps = iter(state.loader)
                    action = None
                if action is not None and action.kind != "save":
                    return action

            # Ask again whether a save is due: the log point has measured how long steps and saves take.
            saves = saves and self.timetable.is_save_due(step, passes_before, progress.epoch, evaluates=evaluates)
            # Any action that is left asks for a save.
            action = self._evaluate_and_save(is_last=is_last, evaluates=evaluates, saves=saves or action is not None)
            if action is not None:
                return action
            # A save in the background may have ended since the last step.
            if self.config.async_save and self.strategy.is_main:
                self.manager.report(self.log)
            if not is_last and self.preemption.due(step + progress.redone):
                self._leave_early()
        return None

    def _announce_epoch(self, passes_before: float) -> None:
        """Announce that an epoch begins: the loss of rows that were seen before changes at once.

        Args:
            passes_before: passes over the data before the last step.
        """
        steps_of_epoch = 1 / (self.progress.epoch - passes_before)
        # The window ends long before the next epoch.
        window = min(EPOCH_WINDOW, int(steps_of_epoch / 4))
        self.spikes.expect(self.progress.step, "an epoch begins", window=window)

    def _evaluate_and_save(self, *, is_last: bool, evaluates: bool, saves: bool) -> RecoveryAction | None:
        """Evaluate and save the current step where that is due. Collective.

        Returns:
            An action, instead of a save, if the ranks' copies of the weights differ and the policy acts on it; None otherwise.
        """
        # Evaluate before the save: the checkpoint records its held-out loss. Some checkpoints are evaluated although
        # ``--eval_steps`` does not name their step.
        if is_last or evaluates or (saves and self.timetable.is_evaluation_due(self.progress.step)):
            self.evaluate()
        if saves or is_last or self._is_out_of_patience():
            # If the ranks' copies of the weights differ, act instead of saving. They are saved only if the policy does nothing,
            # as with ``--on_spike log``.
            action = self.spikes.check_replicas(self.progress.step)
            if action is not None and action.kind != "none":
                return action
            # The last step is saved by `_evaluate_and_save_last`.
            if not is_last:
                self.save()
        return None

    def _is_out_of_patience(self) -> bool:
        """Return whether early stopping ends the run. Every rank has the same held-out loss, and so the same answer."""
        patience = self.config.early_stopping_patience
        return patience is not None and self.progress.evaluations_without_progress >= patience

    def train_step(self, plan: StepPlan, micro_batches: Iterable[dict[str, Any]]) -> StepRecord:
        """Take one optimizer step. Collective.

        Args:
            plan: the samples of the step over all ranks, and the sum of their loss weights.
            micro_batches: micro-batches of this rank.
        """
        strategy = self.strategy
        progress = self.progress
        self._metrics = {}
        self.hooks("before_step", self, progress.step + 1)
        # The processes that share a row also need different random numbers, since they apply dropout to different tokens.
        seed_generators(step_seed(progress.seed, progress.step, strategy.mesh.token_parallel_rank))
        rate = self.state.rate()
        # Forward and backward passes.
        total_loss = torch.zeros((), dtype=torch.float32, device=strategy.device)
        sums: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(micro_batches):
            # A strategy that can do so reduces the gradients over the ranks only once, in the last micro-batch.
            with strategy.micro_batch(last=index == self.state.layout.accumulation - 1):
                enter("forward")
                with self.hooks.around_loss(self, batch):
                    loss, metrics = self._loss(batch)
                # Divide by the weights of the global batch, so that the loss does not depend on the number of micro-batches.
                loss = loss / plan.tokens
                enter("backward")
                strategy.backward(loss)
            enter("data")
            total_loss += loss.detach().float()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0) + value.detach() / plan.tokens

        # The update.
        enter("optimizer")
        self.hooks("on_gradients_ready", self)
        norm = strategy.optimizer_step(rate)
        cursor_before = progress.cursor
        progress.step += 1
        progress.eval_loss = None
        progress.cursor = plan.cursor
        progress.epoch = self.state.loader.order.epoch(plan.cursor)
        progress.samples += plan.samples
        progress.tokens += plan.tokens
        self.pace.count(plan.tokens, plan.all_tokens, plan.samples)
        record = StepRecord(
            step=progress.step,
            loss=total_loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=plan.tokens,
            ids=plan.ids,
            cursor=(cursor_before, plan.cursor),
            metrics=self._metrics,
            sums=sums,
        )
        self.hooks("after_step", self, record)
        return record

    def _loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Metrics]:
        """Return the objective's loss and metrics of a micro-batch, summed over this rank's rows.

        If ranks share rows, the sums are over this rank's tokens of them.
        """
        with self.strategy.split_tokens(to_device(batch, self.strategy.device)) as rank_batch:
            result = self.objective.loss(self.strategy.model, rank_batch)
        return result if isinstance(result, tuple) else (result, {})

    def add_metric(self, name: str, value: SupportsFloat) -> None:
        """See `zerobook.training.hooks.TrainerView.add_metric`."""
        self._metrics[name] = value

    def _log_point(self, *, takes_command: bool = False) -> RecoveryAction | None:
        """Read losses and norms, and run the hooks and the spike monitor. Collective.

        The trainer waits for the device here only.

        Args:
            takes_command: take a waiting command, if nothing else is to be done.

        Returns:
            The recovery action to carry out; None if there is none.
        """
        records = self._pending
        self._pending = []
        if not records:
            return None
        enter("reduce")
        clock, has_command = reduce_records(
            records,
            self.strategy.mesh,
            self.timetable.read_clock(self.progress.step),
            type(self.objective).__name__,
            has_command=self.commands.is_waiting(),
        )
        self.timetable.set_measured(clock)
        self.pace.measure(self.progress.step)
        hook_actions = self.hooks("on_log", self, records)
        action = self.spikes.see(records)
        messages = self.spikes.take_messages()
        if messages:
            self.hooks("on_alert", self, messages)
        if action is None and self.spikes.monitor.has_lost_weights:
            raise DivergenceError(describe_divergence(records[-1], self.config, self.manager))
        # An action of the spike monitor has priority, then the first one of a hook, then a command.
        if action is None:
            action = next((hook_action for hook_action in hook_actions if hook_action.kind != "none"), None)
        if action is None and has_command and takes_command:
            action = self.commands.take()
        return action

    def _stop_early(self) -> None:
        """Log and print that early stopping ends the run."""
        step = self.progress.step
        best = self.progress.best_eval_loss
        count = self.progress.evaluations_without_progress
        self.log.event("early_stop", step=step, evaluations=count, best=best, steps_left=self.state.end_step - step)
        # ``best`` is None if no loss was finite.
        lowest = "" if best is None else f" than {best:.4f}"
        self.console.say(f"early stopping at step {step}: {counted(count, 'evaluation')} without a lower held-out loss{lowest}")

    def _recover(self, action: RecoveryAction) -> None:
        """Carry out a recovery action. Call on every rank with the same ``action``."""
        action = self.recovery.check_samples_left(action)
        if action.kind == "stop":
            self._save_before_stop(action)
            self.console.close_bar()
            self.recovery.set_aside_and_report(action)
            # This ends the process.
            self._leave(STOPPED)
        with during("roll back"):
            self.recovery.carry_out(action)
        if action.goes_back:
            # Load the state of hooks too. A hook's average of the weights, for example, contains weights of the spike.
            self.hooks.load_state_dicts(self, self.manager.load_hook_states(action.to_step))
            # The last evaluation was made at a step that is now abandoned.
            self._evaluated_step = None
            self._saved_step = self.progress.step
            self.timetable.note_rollback(self.progress.step)
            self.strategy.model.train()
            self.pace.start()
        self.hooks("on_rollback", self, action)

    # --- evaluation, checkpoints, the end
    def evaluate(self) -> dict[str, Any] | None:
        """Measure the loss on the held-out data, and run the scorers. Collective.

        Returns:
            The `zerobook.runlog.records.EvaluationRecord.result`; None without held-out data and scorers.
        """
        self._evaluated_step = self.progress.step
        self.evaluation = None
        with during("evaluate", self.progress.step), self.pace.paused():
            self.hooks("before_evaluate", self)
            record = self.evaluator.evaluate(self.progress.step)
            self.hooks("after_evaluate", self)
        if record is None:
            return None
        self.timetable.note_evaluation(self.progress.step, record.seconds)
        self.hooks("on_evaluate", self, record)
        if "loss" in record.result:
            self.progress.evaluated(record.result["loss"])
        self.evaluation = record.result
        return record.result

    def save(self) -> None:
        """Save a checkpoint of this step if its loss and gradient were finite. Collective.

        A step that was not finite is not saved, since an undamaged checkpoint might be pruned in its favour.
        """
        if not self.save_results:
            return
        step = self.progress.step
        if not self.spikes.monitor.last_is_finite:
            self.log.event("checkpoint", state="not_saved", step=step, reason="its loss or gradient was not finite")
            return
        self._saved_step = step
        self.spikes.note_save(step)
        # Record what a resumed run needs besides weights and optimizer state.
        self.progress.detector = self.spikes.monitor.state()
        self.progress.scaler = self.strategy.scaler_state()
        self.progress.stream = self.state.loader.order.passed
        self.progress.following = self.state.expected_next_step()
        with during("save", step), self.pace.paused():
            with self.timetable.saving(step):
                self.manager.save(self.progress, self.log, self.hooks.state_dicts(self))
            # A hook may send the checkpoint elsewhere, which takes as long as the save.
            self.hooks("on_save", self, self.manager.path_of(step))

    def _save_before_stop(self, action: RecoveryAction) -> None:
        """Save the state in which the run stops, unless the ranks' copies of the weights differ. Collective.

        The caller sets this checkpoint aside afterwards if it is from after the beginning of a spike.
        """
        self.manager.finish(self.log)
        self.recovery.protect_before(action)
        if self._saved_step != self.progress.step and self.strategy.find_differing_replicas() is None:
            self.save()
            self.manager.finish(self.log)

    def _leave_early(self) -> None:
        """Save, and end the process with `preemption.EXIT_CODE`. A state that needs a rollback is not saved."""
        reason = self.preemption.received
        # The log point may find a spike. Its action is recorded as taken, so carry it out before the process ends.
        action = self._log_point()
        if action is None or action.kind in ("none", "save"):
            # Nothing else prevents the save below. Copies of the weights that differ must not be saved.
            action = self.spikes.check_replicas(self.progress.step)
        if action is not None and action.kind != "none":
            self._recover(action)
        if self._saved_step != self.progress.step:
            self.save()
        self.manager.finish(self.log)
        self.console.close_bar()
        if self.runlog_hook:
            self.runlog_hook.write_preempted(self, reason)
        self._leave(preemption.EXIT_CODE)

    def _leave(self, code: int) -> None:
        """End this process with the exit code ``code``, after all ranks have reached this point. Collective."""
        self.commands.refuse_waiting("the run has ended")
        enter("export")
        self.hooks("on_end", self)
        self.hooks.close(self)
        # If one rank ended earlier, the launcher would kill the others.
        self.strategy.barrier()
        # From this phase on, the watch does not report the ranks that have left already.
        enter("ended")
        leave(code)
