"""The trainer of every recipe under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch import nn

from zerobook import head
from zerobook.checkpoint import store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import bytes_of_state
from zerobook.config import AUTOMATIC, ConfigSources, RecipeConfig
from zerobook.data.batch_loader import StepPlan
from zerobook.data.collate import to_device
from zerobook.data.prepare import PreparedData
from zerobook.errors import CheckpointError, ConfigError, DivergenceError
from zerobook.health import stragglers
from zerobook.health.judge import describe
from zerobook.health.position import during, enter, log_point
from zerobook.health.stragglers import Slow
from zerobook.health.watch import Watch
from zerobook.launch.fast import FAST
from zerobook.launch.process import leave
from zerobook.models.compiled import compile_layers
from zerobook.models.isolation import settled
from zerobook.models.load import pin_rotary
from zerobook.models.save import bytes_of_result
from zerobook.models.whole_rows import check_split
from zerobook.monitor import policy
from zerobook.monitor.policy import RecoveryAction
from zerobook.monitor.preemption import EXIT_CODE, Preemption
from zerobook.objective import Metrics, Objective
from zerobook.runlog.lifecycle import hang, last_words
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import NullRunLog, RunLog
from zerobook.strategy import Strategy
from zerobook.training import resume
from zerobook.training.console import Console
from zerobook.training.evaluator import Evaluator
from zerobook.training.hooks import Hook, Hooks, load_hooks
from zerobook.training.intervals import WRITE_SPEED, AutomaticEvaluations, AutomaticSaves, Measured, SaveClock, Schedule
from zerobook.training.logbook import Logbook, MemoryRecord
from zerobook.training.pace import Pace
from zerobook.training.profiling import Profiler
from zerobook.training.recipe import Collator, Scorer
from zerobook.training.rollback import Recovery
from zerobook.training.setup import first_state
from zerobook.training.spikes import SpikeHandler
from zerobook.training.state import seed_generators, step_seed
from zerobook.training.trackers import Trackers
from zerobook.training.utilization import model_flops, peak_flops
from zerobook.training.watching import naming_the_missing
from zerobook.utils.host_memory import freed_blocks_returned
from zerobook.utils.units import counted


class Trainer:
    """Trains ``model`` on ``data`` with the settings of ``config``, distributed by ``strategy``.

    The loss of a step is the objective's loss, summed over the rows of all ranks and micro-batches, divided by the sum of their
    loss weights. That sum is known from the sample ids before the step, so it needs no communication.
    Between log points the trainer does not wait for the device. DeepSpeed itself waits in each step, and so does FSDP2 if it
    keeps gradients in host memory. transformers waits in each forward pass of an encoder-decoder (3 times for BART and
    BlenderBot, twice for T5) to check whether the mask hides any token.

    Args:
        collate: list of rows -> the model's arguments by name (mostly tensors), including ``labels``. The collator of a
            causal recipe is replaced by its cheapest form for the prepared model: see `zerobook.models.isolation.settled`.
        objective: the loss, and the weights that it is divided by.
        scorers: measure more than the loss at every evaluation.
        hooks: hooks besides those in ``config.hooks``.
        watch: the watch of this run, whose findings go into the runlog.
        recipe_file: the file of the recipe, whose git commit is recorded.

    Attributes:
        state: the progress, the sample order and the learning rate.
        evaluation: result of the current step's evaluation; None if there was none.
        save_results: False if no checkpoint and no model is written, for programs that measure a few steps.
    """

    def __init__(
        self,
        config: RecipeConfig,
        sources: ConfigSources,
        strategy: Strategy,
        model: nn.Module,
        data: PreparedData,
        *,
        collate: Collator,
        objective: Objective,
        scorers: Sequence[Scorer] = (),
        hooks: Sequence[Hook] = (),
        watch: Watch | None = None,
        recipe_file: Path | None = None,
    ):
        self.config = config
        self.strategy = strategy
        self.data = data
        self.collate = collate
        self.objective = objective
        self.scorers = scorers
        self.recipe_file = recipe_file
        self.save_results = True
        self.hooks = Hooks([*load_hooks(config.hooks), *hooks])
        self.hooks("before_prepare", self, model)
        # A hook may have replaced them.
        strategy = self.strategy
        data = self.data
        # Only now: a hook may have replaced the collator.
        if config.padding_free and not getattr(self.collate, "flatten", False):
            raise ConfigError(
                f"padding_free: the recipe makes its batches by {type(self.collate).__name__}, which pads. Drop --padding_free."
            )

        # The run's folder, locked, and the checkpoint to resume from.
        self.pace = Pace(strategy.device)
        self.console = Console(silent=not strategy.is_main)
        self.manager = CheckpointManager(strategy, config)
        self.log: RunLog = NullRunLog(config.output_dir)
        strategy.on_main(self._open_log)
        self.watch = watch
        if watch:
            watch.report = lambda verdict, text: hang(self.log, config.output_dir, strategy.rank, describe(verdict), text)

        # The state, without weights: new, or the checkpoint's with what was decided after it.
        say = self.console.say
        self.state, policy_state = first_state(config, strategy, self.manager, self.log, model, data, self.collate, say)
        progress = self.progress
        self.spikes = SpikeHandler(
            config, strategy, self.manager, self.log, say, detector=progress.detector, policy=policy_state
        )

        # The model, distributed.
        has_own_head = self._prepare_model(model)
        # Steps of the last checkpoint and of the last evaluation, which are not done again at the end.
        self._saved: int | None = progress.step if self.manager.resumes_in_place else None
        self._evaluated: int | None = None
        if self.save_results:
            self.manager.check_space(
                self.state.end_step - progress.step, bytes_of_result(strategy, config), has_held_out=bool(data.held_out)
            )
        strategy.model.train()
        check_split(strategy, self.objective)
        self._settle_collator(has_own_head)
        if config.torch_compile:
            self._compile(sources)

        # What works on the model.
        self.recovery = Recovery(self.state, strategy, self.manager, self.spikes, self.log, say)
        self.evaluator = Evaluator(
            config,
            strategy,
            data,
            self.scorers,
            self.collate,
            summed_loss=lambda batch: self._loss(batch)[0],
            has_perplexity=self.objective.is_cross_entropy,
        )
        self.evaluation: dict[str, Any] | None = None
        # Steps since the last log point, whose losses are tensors, and what was added to the current step.
        self._pending: list[StepRecord] = []
        self._metrics: dict[str, SupportsFloat] = {}
        self._add_own_hooks(sources)
        self._load_checkpoint()
        self._plan_saves()
        # After the load, which logs the checkpoint's values beside these.
        progress.total_steps = self.state.total_steps
        progress.global_batch = self.state.layout.global_batch
        progress.world_size = strategy.world_size

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def _prepare_model(self, model: nn.Module) -> bool:
        """Distribute the model. Return whether its output layer computes the loss itself."""
        has_own_head = head.install(model) is not None
        # Whole weights are freed while they are sharded. Without this, the allocator would keep them.
        with freed_blocks_returned():
            self.strategy.prepare(model, self.config, self.state.total_steps)
        longest_sample = max(rows.longest_sample for rows in (self.data.train, *self.data.held_out.values()))
        note = pin_rotary(self.strategy.unwrapped, longest_sample)
        if note:
            self.console.say(f"  note: {note}")
        return has_own_head

    def _settle_collator(self, has_own_head: bool) -> None:
        """Replace the collator by its cheapest form for the prepared model.

        Args:
            has_own_head: the model's output layer computes the loss itself, so it can leave out positions without a label.
        """
        strategy = self.strategy
        self.collate = settled(
            strategy,
            self.collate,
            keep_mask=self.objective.needs_attention_mask(strategy.model),
            supervised=has_own_head and self.objective.takes_positions and strategy.token_split is None,
            flag=self.config.rows_shared_by,
        )
        self.state.collate = self.collate

    def _compile(self, sources: ConfigSources) -> None:
        """Compile the model's layers. A model without layers is an error only if a person asked for it, not ``--fast``."""
        model = self.strategy.unwrapped
        count = compile_layers(model)
        name = type(model).__name__
        if not count and sources["torch_compile"] != FAST:
            raise ConfigError(f"torch_compile: {name} has no layers that transformers names. Leave the flag out.")
        self.console.say(f"torch_compile: {counted(count, 'layer')} of {name}, compiled at the first run")

    def _load_checkpoint(self) -> None:
        """Load the checkpoint to resume from, if there is one, and its evaluation. Collective."""
        step = self.progress.step
        if self.manager.checkpoint:
            resume.load(self.state, self.manager, self.strategy, self.log, self.console.say)
            # The last attempt may have ended before it proved this checkpoint good.
            self.spikes.saved(step)
            self.evaluation = self.strategy.on_main(lambda: resume.evaluation_of(self.log, self.progress))
            self._evaluated = None if self.evaluation is None else step
        elif self.config.resume_from_checkpoint:
            self.console.say(f"nothing to resume in {self.config.output_dir}: starting at step 0")

    def _plan_saves(self) -> None:
        """Decide when the run evaluates and saves. Where that is automatic, measured times change it later."""
        config = self.config
        total_steps = self.state.total_steps
        save_seconds = bytes_of_state(self.strategy) / WRITE_SPEED
        self._save_clock = SaveClock(save_seconds)
        self._steps_of_attempt = 0
        self._step_seconds = 0.0
        self._automatic_saves: AutomaticSaves | None = None
        if self.config.save_steps == AUTOMATIC and self.save_results:
            self._automatic_saves = AutomaticSaves(
                step=self.progress.step,
                resumed=self.manager.resumes_in_place,
                total_steps=total_steps,
                save_seconds=save_seconds,
            )
        self._automatic_evaluations: AutomaticEvaluations | None = None
        if config.eval_steps == AUTOMATIC and (self.data.held_out or self.scorers):
            held_out_rows = sum(len(part) for part in self.data.held_out.values())
            self._automatic_evaluations = AutomaticEvaluations(
                step=self.progress.step,
                total_steps=total_steps,
                batches=held_out_rows / self.state.layout.global_batch,
            )
        self._evaluations = Schedule(config.eval_steps, total_steps)
        self._saves = Schedule(self.config.save_steps, total_steps)

    def _open_log(self) -> None:
        # Not returned: what `Strategy.on_main` returns is sent to all ranks, and a log cannot be.
        self.log = RunLog(self.config.output_dir)

    def _add_own_hooks(self, sources: ConfigSources) -> None:
        """Add the hooks that record and show the run. The start of the attempt is logged before anything else."""
        hooks: list[Hook] = [MemoryRecord(self.log), self.console]
        if self.config.report_to:
            hooks.append(Trackers(self.strategy, self.config, resumed=self.manager.resumes_in_place))
        self.logbook = Logbook(self.log) if self.strategy.is_main else None
        if self.logbook:
            self.logbook.begin(self, sources)
            self.hooks.add(self.logbook, resume.ResumeCheck(self.log))
        self.console.introduce(self)
        steps = self.config.profiled_steps
        if steps is not None:
            hooks.append(Profiler(*steps, Path(self.config.output_dir) / "runlog"))
        self.hooks.add(*hooks)

    # --- training
    def run(self, save_result: Callable[[], Any] = lambda: None) -> Progress:
        """Train to the end, with evaluations and checkpoints, and return the final `Progress`. Collective.

        Args:
            save_result: writes the trained model. The run counts as finished when it has returned; one that is killed in it
                resumes at its end, and writes the model then.
        """
        progress = self.progress
        strategy = self.strategy
        self.preemption = Preemption(strategy, settle=self._wait_for_device)
        # Counted here: the operations depend on the prepared model.
        self.pace.flops = model_flops(strategy)
        self.pace.peak = peak_flops(strategy)
        self.pace.devices = strategy.world_size
        self.pace.start()
        if self.config.early_stopping_patience and not self.data.held_out:
            raise ConfigError("early_stopping_patience: there is no held-out data. Give --validation_split_percentage above 0.")
        with last_words(self.log, self.config.output_dir, strategy.rank), naming_the_missing(self.watch):
            self.hooks("on_start", self)
            if self.config.eval_on_start and progress.step == 0:
                self.evaluate()
            strategy.model.train()
            # A spike interrupts the training. It goes on after the recovery action, or the process ends in `_recover`.
            action = self._train_until_action()
            while action is not None:
                self._recover(action)
                action = self._train_until_action()
            self.console.close()
            if self._out_of_patience() and progress.step < self.state.end_step:
                self._stop_early()
            # Before the last save: the checkpoint records its held-out loss.
            if self._evaluated != progress.step:
                self.evaluate()
            failure = self._save_last()
            self.hooks("on_end", self)
            if self.save_results:
                enter("export")
                save_result()
            # Only now, when the model is written.
            if failure is not None:
                raise failure
        # The event that the run has ended comes after the model.
        if self.logbook:
            self.logbook.finish(self)
        return progress

    def _save_last(self) -> CheckpointError | None:
        """Save the end of the run. Return why that failed: the model is smaller than a checkpoint, and may still fit."""
        try:
            if self._saved != self.progress.step:
                self.save()
            self.manager.finish(self.log)
        except CheckpointError as error:
            return error
        return None

    def close(self) -> None:
        """Close the runlog, unlock the run's folder and restore the signal handlers, for a process that goes on."""
        self.log.close()
        store.unlock(self.manager.folder)
        if hasattr(self, "preemption"):
            self.preemption.restore()

    def _wait_for_device(self) -> None:
        """Wait until the device has done the steps that were given to it, by reading the loss of the last one."""
        if self._pending:
            float(self._pending[-1].loss)

    def _train_until_action(self) -> RecoveryAction | None:
        """Train until the end, or until a spike needs a recovery action. Return the action; None at the end."""
        config = self.config
        progress = self.progress
        state = self.state
        steps = iter(state.loader)
        while progress.step < state.end_step and not self._out_of_patience():
            enter("data", progress.step + 1)
            with self.pace.waiting():
                planned_step = next(steps, None)
            if planned_step is None:
                break
            plan, micro_batches = planned_step
            passes_before = progress.epoch
            self._pending.append(self.train_step(plan, micro_batches))
            step = progress.step
            is_last = step >= state.end_step

            # Log: losses and norms are known now, and a spike is seen before it is saved.
            if not is_last:
                self._measure_first_steps()
            evaluates = self._evaluations.is_due(step, passes_before, progress.epoch)
            saves = self._is_save_due(passes_before, evaluates)
            if is_last or evaluates or saves or step % config.logging_steps == 0:
                action = self._log_point()
                if action is not None:
                    return action

            # Evaluate and save. Again: the log point has measured how long steps and saves take.
            saves = saves and self._is_save_due(passes_before, evaluates)
            # Before the save: the checkpoint records its held-out loss.
            if is_last or evaluates or (saves and self._is_evaluation_due()):
                self.evaluate()
            if saves:
                # A copy of the weights that has come to differ must not be saved.
                action = self.spikes.check_replicas(step)
                if action is not None and action.kind != "none":
                    return action
                # `run` saves the end.
                if not is_last:
                    self.save()
            # Saves in the background end at any time.
            if config.async_save and self.strategy.is_main:
                self.manager.report(self.log)
            if not is_last and self.preemption.due(step):
                self._leave_early()
        return None

    def _is_save_due(self, passes_before: float, evaluates: bool) -> bool:
        """Return whether the run saves after this step. Same on every rank.

        Args:
            passes_before: passes over the data before the step.
            evaluates: ``--eval_steps`` names the step.
        """
        if self._automatic_saves is not None:
            return self._automatic_saves.is_due(self.progress.step, evaluates=evaluates)
        return self._saves.is_due(self.progress.step, passes_before, self.progress.epoch)

    def _is_evaluation_due(self) -> bool:
        """Return whether the checkpoint of this step is evaluated by itself. Same on every rank."""
        automatic = self._automatic_evaluations
        return automatic is not None and automatic.is_due(self.progress.step, self._step_seconds)

    def _measure_first_steps(self) -> None:
        """Let all ranks know how long a step takes before the first log point, which slow steps reach late. Collective once.

        The first step of an attempt is left out: much of its time is spent on compiling and allocating.
        """
        self._steps_of_attempt += 1
        if self._steps_of_attempt == 1:
            self._save_clock.start(self.progress.step)
        elif self._steps_of_attempt == 2 and self._automatic_saves is not None:
            self._take_measured(*self.strategy.on_main(lambda: list(self._save_clock.read(self.progress.step))))

    def _take_measured(self, step_seconds: float, save_seconds: float) -> None:
        """Take over what rank 0 has measured. Call with the same values on every rank."""
        self._step_seconds = step_seconds
        if self._automatic_saves is not None:
            self._automatic_saves.measured(Measured(step_seconds, save_seconds))

    def _out_of_patience(self) -> bool:
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
        state = self.state
        progress = self.progress
        self._metrics = {}
        self.hooks("before_step", self, progress.step + 1)
        # Also within a group that shares a row: its processes drop out different tokens' activations.
        seed_generators(step_seed(progress.seed, progress.step, strategy.mesh.token_parallel_rank))
        rate = state.rate()
        # Forward and backward passes.
        total_loss: torch.Tensor | None = None
        sums: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(micro_batches):
            # Where the strategy can, it reduces gradients over the ranks in the last micro-batch only.
            with strategy.micro_batch(last=index == state.layout.accumulation - 1):
                enter("forward")
                with self.hooks.around_loss(self, batch):
                    loss, metrics = self._loss(batch)
                # The divisor is of the global batch, so that the loss does not depend on how it is cut.
                loss = loss / plan.tokens
                enter("backward")
                strategy.backward(loss)
            enter("data")
            detached_loss = loss.detach().float()
            total_loss = detached_loss if total_loss is None else total_loss + detached_loss
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0) + value.detach() / plan.tokens
        assert total_loss is not None, "a step has at least one micro-batch"

        # The update.
        enter("optimizer")
        self.hooks("on_gradients_ready", self)
        norm = strategy.optimizer_step(rate)
        cursor_before = progress.cursor
        progress.step += 1
        progress.eval_loss = None
        progress.cursor = plan.cursor
        progress.epoch = state.loader.order.epoch(plan.cursor)
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
        """Return the objective's loss and metrics of a micro-batch, summed over this rank's rows, or its tokens of them."""
        with self.strategy.split_tokens(to_device(batch, self.strategy.device)) as rank_batch:
            result = self.objective.loss(self.strategy.model, rank_batch)
        return result if isinstance(result, tuple) else (result, {})

    def add_metric(self, name: str, value: SupportsFloat) -> None:
        """See `zerobook.training.hooks.TrainerView.add_metric`."""
        self._metrics[name] = value

    def _log_point(self) -> RecoveryAction | None:
        """Read losses and norms, and run the hooks and the spike monitor. Return the recovery action to carry out, if any.

        The trainer waits for the device here only.
        """
        records = self._pending
        self._pending = []
        if not records:
            return None
        enter("reduce")
        self._read(records)
        self.pace.measure(log_point(self.progress.step))
        # Ranks are compared once their devices have done the same steps.
        if self.watch:
            for slow in self.watch.take_slow():
                self._report_slow(slow)
        hook_actions = self.hooks("on_log", self, records)
        action = self.spikes.see(records)
        messages = self.spikes.take_messages()
        if messages:
            self.hooks("on_alert", self, messages)
        if action is None and self.spikes.monitor.has_lost_weights:
            raise DivergenceError(self._describe_broken_model(records[-1]))
        # An action of the spike monitor comes before those of hooks.
        if action is not None:
            return action
        return next((hook_action for hook_action in hook_actions if hook_action.kind != "none"), None)

    def _describe_broken_model(self, record: StepRecord) -> str:
        """Return the error message for a model whose losses are not finite. Collective."""
        way_on = "There is no checkpoint: start again with"
        if self.strategy.on_main(lambda: bool(store.list_complete(self.manager.folder))):
            way_on = "Go on with --resume_from_checkpoint auto and"
        return (
            f"step {record.step}: the loss is {record.loss}, and none was finite for a while; nothing was saved "
            f"since. {way_on} a lower --learning_rate than {self.config.learning_rate}, or "
            "more --num_warmup_steps."
        )

    def _report_slow(self, slow: Slow) -> None:
        self.log.event("straggler", durable=False, **slow._asdict())
        self.console.say(f"WARNING: step {self.progress.step}: {stragglers.describe(slow)}")

    def _read(self, records: list[StepRecord]) -> None:
        """Convert tensors to numbers, and sum losses over ranks. Every rank gets the same bits, since all decide from them."""
        losses = torch.stack([torch.as_tensor(record.loss) for record in records]).float()
        norms = torch.stack([torch.as_tensor(record.grad_norm, device=losses.device).float() for record in records])
        mesh = self.strategy.mesh
        # Every rank has the same norms. The sum over the ranks takes the first rank's.
        if mesh.rank != 0:
            norms = torch.zeros_like(norms)
        names = sorted(records[0].sums)
        for record in records:
            if sorted(record.sums) != names:
                raise ConfigError(
                    f"{type(self.objective).__name__}.loss returned the metrics {names} in one step and {sorted(record.sums)} "
                    "in another. It has to return the same metrics for every batch, since they are summed over the ranks; a "
                    "metric may be 0."
                )
        sums = []
        for name in names:
            sums.append(torch.stack([record.sums[name] for record in records]).float())
        # One more row carries what rank 0 has measured, so that all ranks decide the same about saves without a collective.
        clock = losses.new_zeros(2 + len(sums))
        if mesh.rank == 0:
            clock[:2] = torch.tensor(self._save_clock.read(self.progress.step))
        values = torch.cat([torch.stack([losses, norms, *sums], dim=1), clock[None]])
        *step_rows, clock_row = mesh.sum_over_samples(values).tolist()
        self._take_measured(clock_row[0], clock_row[1])
        for record, (loss, norm, *metric_values) in zip(records, step_rows, strict=True):
            record.loss = loss
            record.grad_norm = norm
            record.sums = {}
            record.metrics = {name: float(value) for name, value in record.metrics.items()}
            record.metrics |= dict(zip(names, metric_values, strict=True))

    def _stop_early(self) -> None:
        """Write that early stopping ends the run."""
        step = self.progress.step
        best = self.progress.best_eval_loss
        count = self.progress.evaluations_without_progress
        self.log.event("early_stop", step=step, evaluations=count, best=best, steps_left=self.state.end_step - step)
        self.console.say(
            f"early stopping at step {step}: {counted(count, 'evaluation')} without a lower held-out loss than {best:.4f}"
        )

    def _recover(self, action: RecoveryAction) -> None:
        """Carry out a recovery action. Call on every rank with the same ``action``."""
        action = self.recovery.checked(action)
        if action.kind == "stop":
            # The process ends here.
            self._save_before_stop(action)
            self.console.close()
            self.recovery.hand_over(action)
            self._leave(policy.EXIT_CODE)
        with during("roll back"):
            self.recovery.act(action)
        if action.goes_back:
            # What was evaluated and saved belongs to steps that were given up.
            self._evaluated = None
            self._saved = None
            self._save_clock.start(self.progress.step)
            if self._automatic_saves is not None:
                self._automatic_saves.went_back(self.progress.step)
            if self._automatic_evaluations is not None:
                self._automatic_evaluations.went_back(self.progress.step)
            self.strategy.model.train()
            self.pace.start()
        self.hooks("on_rollback", self, action)

    # --- evaluation, checkpoints, the end
    def evaluate(self) -> dict[str, Any] | None:
        """Measure the loss on the held-out data, and run the scorers. Collective.

        Returns:
            The `zerobook.runlog.records.EvaluationRecord.result`; None without held-out data and scorers.
        """
        self._evaluated = self.progress.step
        self.evaluation = None
        with during("evaluate", self.progress.step), self.pace.apart():
            record = self.evaluator.evaluate(self.progress.step)
        if record is None:
            return None
        if self._automatic_evaluations is not None:
            # Rank 0's clock, so that all ranks decide the same about the next evaluation. Collective.
            seconds = self.strategy.on_main(lambda: record.seconds)
            self._automatic_evaluations.evaluated(self.progress.step, seconds)
        self.hooks("on_evaluate", self, record)
        if "loss" in record.result:
            self.progress.evaluated(record.result["loss"])
        self.evaluation = record.result
        return record.result

    def save(self) -> None:
        """Save a checkpoint of this step, if its loss and gradient were finite. Otherwise a good one might be pruned for it."""
        if not self.save_results:
            return
        step = self.progress.step
        if not self.spikes.monitor.last_is_finite:
            self.log.event("checkpoint", state="not_saved", step=step, reason="its loss or gradient was not finite")
            return
        self._saved = step
        self.spikes.saved(step)
        # What a resumed run needs besides weights and optimizer state.
        self.progress.detector = self.spikes.monitor.detector.state()
        self.progress.scaler = self.strategy.scaler_state()
        self.progress.stream = self.state.loader.order.passed
        self.progress.following = self.state.expected_next_step()
        with during("save", step), self.pace.apart(), self._save_clock.saving():
            self.manager.save(self.progress, self.log)
        self._save_clock.start(step)
        if self._automatic_saves is not None:
            self._automatic_saves.saved(step)
        self.hooks("on_save", self, self.manager.folder / store.name_of(step))

    def _save_before_stop(self, action: RecoveryAction) -> None:
        """Save the state that a spike stops the run in, and set it aside: ``auto`` is to resume from before the spike.

        Copies of the weights that differ between the ranks would make a checkpoint of a mixture, so they are not saved.
        """
        self.manager.finish(self.log)
        self.recovery.protect_before(action)
        if self._saved != self.progress.step and self.strategy.differing_replicas() is None:
            self.save()
            self.manager.finish(self.log)

    def _leave_early(self) -> None:
        """Save, and end the process with `preemption.EXIT_CODE`. A state that needs a rollback is not saved."""
        step = self.progress.step
        reason = self.preemption.received
        # The log point sees a spike in the steps since the last one.
        if self._log_point() is None and self._saved != step:
            self.save()
        self.manager.finish(self.log)
        self.console.close()
        if self.logbook:
            self.logbook.preempted(self, reason)
        self._leave(EXIT_CODE)

    def _leave(self, code: int) -> None:
        """End this process after all ranks have reached this point."""
        self.hooks("on_end", self)
        # A rank that ended earlier would make the launcher kill the others. Collective.
        self.strategy.barrier()
        leave(code)
