"""Resume from a checkpoint: check that data and model are the same, restore earlier decisions, compare losses."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from zerobook.checkpoint import origin, store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.recovery_state import RecoveryState
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.config import OrderSettings, RecipeConfig
from zerobook.data.prepare import PreparedData
from zerobook.errors import CheckpointError
from zerobook.runlog.compare import differences, first_differing_step
from zerobook.runlog.history import last_of
from zerobook.runlog.jsonl import backwards
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import EVENTS, STEPS, RunLog
from zerobook.strategy import Strategy
from zerobook.training.hooks import Hook, TrainerView
from zerobook.training.state import RunState
from zerobook.utils.bars import tqdm
from zerobook.utils.ranges import joined
from zerobook.utils.units import counted


def check_data(checkpoint: Path | None, progress: Progress, data: PreparedData, config: RecipeConfig) -> None:
    """Refuse training data that differ from the checkpoint's in contents or order, and record the data in ``progress``.

    Raises:
        CheckpointError: the data differ. The message has both values.
    """
    train = data.train
    # A checkpoint that was imported from another trainer does not name its data.
    if checkpoint and not progress.data_fingerprint:
        set_data_position(progress, data, config)
        return
    if checkpoint and (progress.data_fingerprint, progress.data_size) != (train.fingerprint, len(train)):
        raise CheckpointError(
            f"{checkpoint}: it was trained on {describe_size(progress.data_size)} with fingerprint "
            f"{progress.data_fingerprint}; the data is now {describe_size(len(train))} with fingerprint {train.fingerprint}. "
            f"{_describe_changed_settings(checkpoint, config)} Or start a new run from the exported model."
        )
    progress.data_size = len(train)
    progress.data_fingerprint = train.fingerprint
    if checkpoint is not None:
        _check_order(checkpoint, config.order_settings)


def set_data_position(progress: Progress, data: PreparedData, config: RecipeConfig) -> None:
    """Give the progress of another trainer's checkpoint a position in this run's data, after the same number of passes.

    In an unfinished pass, the other trainer has used other samples than this run would have, but which ones is not known. The
    run goes on as if they were the first ones of its own order. A stream begins again.
    """
    progress.seed = config.seed
    progress.cursor = round(progress.epoch * len(data.train))
    progress.data_size = len(data.train)
    progress.data_fingerprint = data.train.fingerprint


def _check_order(checkpoint: Path, settings: OrderSettings) -> None:
    """Refuse settings that would change the order of the samples in the middle of a run."""
    saved = OrderSettings.from_config(store.read_json(checkpoint / "config.json")["config"])
    for field in fields(OrderSettings):
        before = getattr(saved, field.name)
        now = getattr(settings, field.name)
        if before != now:
            raise CheckpointError(
                f"{checkpoint}: the order of its samples depends on {field.name}, which was {before} and is {now} now; samples "
                "would be used twice or never. Restore the old value, or start a new run from the exported model."
            )


def compare_held_out_data(progress: Progress, data: PreparedData, say: Callable[[str], None]) -> None:
    """Forget the held-out losses of the checkpoint, with a warning, if they were measured on other data."""
    if not data.held_out:
        return
    earlier = progress.held_out_fingerprint
    fingerprint = data.held_out_fingerprint
    # This returns whether losses were forgotten.
    if progress.use_held_out_data(fingerprint):
        names = ", ".join(data.held_out)
        earlier_data = f"fingerprint {earlier}" if earlier else "data that the checkpoint does not name"
        say(
            f"WARNING: the held-out data ({names}, fingerprint {fingerprint}) is not what the earlier losses were measured on "
            f"({earlier_data}). Losses of different data are not compared: the best checkpoint and early stopping go by the "
            "losses from here on."
        )


# Settings of every recipe that change the fingerprint of the training data. A recipe's own settings may do so, too.
DATA_SETTINGS = frozenset(
    {
        "model_name_or_path",
        "tokenizer_name",
        "model_revision",
        "dataset_name",
        "dataset_config_name",
        "dataset_revision",
        "datasets",
        "train_file",
        "validation_file",
        "validation_split_percentage",
        "streaming",
        "max_train_samples",
        "max_eval_samples",
        "format",
        "text_column",
        "summary_column",
        "chat_template",
        "on_bad_sample",
        "packing",
        "seed",
        "new_tokens",
    }
)


def _describe_changed_settings(checkpoint: Path, config: RecipeConfig) -> str:
    """Return which settings about data differ from the checkpoint's, and what to do."""
    saved = store.read_json(checkpoint / "config.json")["config"]
    now = config.model_dump(mode="json")
    recipe_settings = type(config).model_fields.keys() - RecipeConfig.model_fields.keys()
    # Compare only what both have: a checkpoint of an earlier version of Zerobook lacks some settings.
    names = (DATA_SETTINGS | recipe_settings) & saved.keys() & now.keys()
    saved_settings = {name: saved[name] for name in names}
    changed = differences(saved_settings, {name: now[name] for name in names})
    if not changed:
        return "The settings are the same: a data file, a dataset or the tokenizer has other content. Bring it back."
    changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changed.items())
    return f"Changed: {changes}. Restore these values."


# Settings that decide what adapters compute.
ADAPTER_SETTINGS = ("adapter", "lora_r", "lora_alpha", "lora_target_modules", "modules_to_save")
# Keys with the same meaning in the config of an adapter (``--adapter_path``) that the run trains further.
ADAPTER_FACTS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")


def check_base(checkpoint: Path | None, config: RecipeConfig, model: nn.Module) -> None:
    """Refuse a checkpoint whose weights would compute other outputs here: with another base model, config or LoRA setting.

    A branch on the hub can move while a run is stopped, and a folder can get other content.

    Raises:
        CheckpointError: something differs. The message has both values.
    """
    if checkpoint is None:
        return
    saved = store.read_json(checkpoint / "config.json")
    values = config.model_dump()
    facts = getattr(model, "base_facts", None)

    # Compare the settings of new adapters.
    if config.trains_adapters:
        for name in ADAPTER_SETTINGS:
            before = saved["config"].get(name)
            now = values[name]
            is_same = before == now
            # Lists of modules have no order.
            if isinstance(now, list):
                is_same = set(before or ()) == set(now)
            if before is not None and not is_same:
                raise CheckpointError(
                    f"{checkpoint}: the output of its adapters depends on {name}, which was {before} and is {now} now. Restore "
                    "the old value, or start a new run from the exported model."
                )

    # Compare the config of the adapter that is trained further.
    saved_adapter = _adapter_facts(saved.get("base"))
    adapter = _adapter_facts(facts)
    for name in ADAPTER_FACTS:
        if saved_adapter.get(name) != adapter.get(name):
            raise CheckpointError(
                f"{checkpoint}: its adapter was continued from one whose {name} was {saved_adapter.get(name)}, and "
                f"--adapter_path {values.get('adapter_path')} has {adapter.get(name)}. Bring that adapter back."
            )

    # Compare the base model: its commit on the hub if both are known, and its weights otherwise.
    saved_commit = saved.get("base_commit")
    commit = getattr(model, "base_commit", None)
    if config.trains_adapters and saved_commit and commit and saved_commit != commit:
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained beside commit {saved_commit} of {config.model_name_or_path}, and "
            f"--model_revision {config.model_revision} is commit {commit} now. Pass --model_revision {saved_commit}."
        )
    origin.check(checkpoint, saved, facts, weights=not (saved_commit and commit))


def _adapter_facts(base_facts: dict[str, Any] | None) -> dict[str, Any]:
    """Return the config of the adapter among the facts of a base; nothing if there is none."""
    return (base_facts or {}).get("adapter") or {}


def restore_decisions(progress: Progress, manager: CheckpointManager, strategy: Strategy, log: RunLog) -> dict[str, Any]:
    """Apply what earlier attempts decided after the checkpoint was written. Collective.

    A run without a checkpoint begins again, without decisions. It keeps only ``redone``, the number of repeated steps, since
    trackers have seen those steps.

    Returns:
        The state of the recovery policy.
    """
    decisions = manager.decisions
    logged_step = strategy.on_main(lambda: _find_newest_step(log, decisions.counted_from))
    # The last attempt may have trained on after the checkpoint. The run repeats those steps, and ``redone`` lacks them so far.
    lost_steps = max(0, logged_step - progress.step)
    # If the file with the decisions was removed, the count in the checkpoint is the larger one.
    progress.redone = max(progress.redone, decisions.redone + lost_steps)
    if manager.checkpoint is None:
        decisions = RecoveryState()
    progress.skip_ranges = joined(progress.skip_ranges, decisions.skip_ranges)
    # The file has every cut of the learning rate, also those that the checkpoint has.
    progress.rate_cuts = decisions.rate_cuts or progress.rate_cuts
    manager.proven = set(decisions.proven)
    # From here on, a resume counts only the steps of this attempt and later ones.
    manager.remember(**vars(decisions) | {"redone": progress.redone, "counted_from": [log.attempt, log.branch]})
    return decisions.policy


def _find_newest_step(log: RunLog, counted_from: list[int]) -> int:
    """Return the newest step in the log; 0 if there is none, or if it is from before ``counted_from``, [attempt, branch]."""
    # `backwards` yields None for a damaged record.
    record = next(filter(None, backwards(log.folder / STEPS)), None)
    if record is None or [record["attempt"], record["branch"]] < counted_from:
        return 0
    return record["step"]


def choose_schedule_length(state: RunState, checkpoint: Path | None, say: Callable[[str], None]) -> int:
    """Return the length of the learning-rate schedule, in steps.

    A resumed run keeps the length that the checkpoint records: samples left out since then shorten the run, not the
    schedule. The length changes only if a person asks for another number of steps or epochs, or another global batch.
    """
    # A checkpoint that was imported from another trainer may lack the length.
    if checkpoint is None or not state.progress.total_steps:
        return state.end_step
    progress = state.progress
    saved = store.read_json(checkpoint / "config.json")["config"]
    # The user has set a number of steps, or the length follows from the epochs and the global batch.
    saved_request = saved["max_train_steps"] or (saved["num_train_epochs"], progress.global_batch)
    request = state.config.max_train_steps or (state.config.num_train_epochs, state.layout.global_batch)
    if request == saved_request:
        return progress.total_steps
    if state.end_step != progress.total_steps:
        say(f"  the learning-rate schedule is computed again: {state.end_step} steps, {progress.total_steps} before")
    return state.end_step


def load(state: RunState, manager: CheckpointManager, strategy: Strategy, log: RunLog, say: Callable[[str], None]) -> None:
    """Load the checkpoint to resume from, and compare the inputs of the next step with the recorded ones. Collective."""
    for reason in manager.skipped.values():
        say(f"skipped: {reason}")
    # Use the progress of ``state``, since it also has the decisions of later attempts. The loaded progress lacks them.
    loaded, bytes_read = manager.load()
    progress = state.progress
    verified, differing = state.compare_next_step(progress.following)
    if not strategy.is_main:
        return
    say(f"resumed {manager.checkpoint} at step {progress.step}")
    # A run at its end has no next step that could differ.
    if progress.step >= state.end_step:
        differing = {}
    # Set the later checkpoints aside only now: if the load had failed, a restart would still find them.
    new_paths = store.set_aside(manager.folder, progress.step, manager.skipped)
    # Protect checkpoints before the first save, which prunes.
    manager.protect()
    # A rollback that the last attempt did not finish has ended with this load.
    manager.remember(rollback_to=None)
    log.event(
        "resume",
        checkpoint=str(manager.checkpoint),
        step=progress.step,
        cursor=progress.cursor,
        samples=progress.samples,
        world_size={"before": progress.world_size, "now": strategy.world_size},
        global_batch={"before": progress.global_batch, "now": state.layout.global_batch},
        set_aside=[str(path) for path in new_paths],
        passed_over=list(manager.skipped.values()),
        bytes_read=bytes_read,
        verified=verified,
        differing=differing,
    )
    say(f"  as recorded: {', '.join(verified)}")
    for name, (recorded, now) in differing.items():
        say(f"  differs from the checkpoint's record: {name} of the next step is {now}; recorded: {recorded}")
    # Read the earlier losses, to compare them later, only if the repeated steps have the same samples as before: the samples
    # that are left out and the global batch have not changed.
    if progress.skip_ranges == loaded.skip_ranges and progress.global_batch == state.layout.global_batch:
        state.earlier_losses = _read_later_losses(log, progress.step, state.rate())


def find_best_step(manager: CheckpointManager, strategy: Strategy, last: Progress) -> int | None:
    """Return the step with the lowest held-out loss, of undamaged checkpoints and ``last``; None if none has one. Collective.

    Args:
        last: progress of the last step, which may not be saved.
    """

    def find() -> int | None:
        best = None
        # There may be no checkpoint with a finite loss. The model of the last step is written then.
        with suppress(CheckpointError):
            # Read every byte, so that no damaged checkpoint replaces the last step.
            best = resolve_resume(manager.folder.parent, "best", thorough=True).checkpoint
        lowest = None if best is None else store.eval_loss(best)
        if last.eval_loss is not None and (lowest is None or last.eval_loss <= lowest):
            return last.step
        return None if best is None else store.step_of(best)

    return strategy.on_main(find, takes_long=True)


def find_evaluation(log: RunLog, progress: Progress) -> dict[str, Any] | None:
    """Return the last evaluation in the log if it is that of the state ``progress``; None otherwise. Rank 0 only."""
    event = last_of(log.folder / EVENTS, ["eval"]).get("eval")
    # Compare the losses too, since an abandoned branch may have been evaluated at the same step.
    if event is None or (event["step"], event.get("loss")) != (progress.step, progress.eval_loss):
        return None
    return {name: event[name] for name in ("loss", "perplexity", "tokens", "datasets", "metrics") if name in event}


class ResumeCheck(Hook):
    """Compares the first losses after a checkpoint was loaded with earlier losses of the same steps, once. Rank 0 only."""

    def __init__(self, log: RunLog):
        self.log = log

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        recorded = trainer.state.earlier_losses
        # Compare the steps of one log point only.
        trainer.state.earlier_losses = {}
        losses: dict[int, float] = {}
        for record in records:
            if record.step in recorded:
                losses[record.step] = float(record.loss)
        if not losses:
            return
        largest = max(abs(loss - recorded[step]) / max(abs(recorded[step]), 1e-30) for step, loss in losses.items())
        first = min(losses)
        last = max(losses)
        self.log.event(
            "verify",
            after="steps done again",
            steps=[first, last],
            largest_relative_difference=largest,
            first_apart=first_differing_step(recorded, losses),
        )
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        tqdm.write(f"{steps} done again: the largest relative difference of the losses is {largest:.1e}")


def describe_size(samples: int) -> str:
    """Return the number of samples as text. A stream has no known number, which is given as 0."""
    return counted(samples, "sample") if samples else "a stream"


def _read_later_losses(log: RunLog, step: int, rate: float) -> dict[int, float]:
    """Return step -> loss of the steps after ``step`` that the last branch of the log has.

    Steps that a rollback abandoned are left out: their losses may be those of a spike.

    Args:
        rate: learning rate of the next step. If that step had another rate in the log, the losses cannot be the same, and none
            is returned.
    """
    losses: dict[int, float] = {}
    branches = set()
    for record in backwards(log.folder / STEPS):
        # Stop at a damaged record, since the steps before it may be of an older branch.
        if record is None or record["step"] <= step:
            break
        branches.add(record["branch"])
        if len(branches) > 1:
            break
        if record["step"] == step + 1 and record["learning_rate"] != rate:
            return {}
        if record["loss"] is not None:
            # Keep the newest loss of a step, which is read first.
            losses.setdefault(record["step"], record["loss"])
    return losses
