"""Resume from a checkpoint: check that data and model are the same, restore earlier decisions, compare losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from zerobook.checkpoint import origin, store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.config import OrderSettings, RecipeConfig
from zerobook.data.prepare import PreparedData
from zerobook.errors import CheckpointError
from zerobook.monitor.policy import joined
from zerobook.runlog.compare import differences, first_apart
from zerobook.runlog.history import last_of
from zerobook.runlog.jsonl import backwards
from zerobook.runlog.lifecycle import Decided, decided
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import EVENTS, STEPS, RunLog
from zerobook.strategy import Strategy
from zerobook.training.hooks import Hook, TrainerView
from zerobook.training.state import RunState
from zerobook.utils.bars import tqdm
from zerobook.utils.terminal import plain
from zerobook.utils.units import counted


def check_data(checkpoint: Path | None, progress: Progress, data: PreparedData, config: RecipeConfig) -> None:
    """Refuse training data that differ from the checkpoint's, in contents or order. Records the data in ``progress``.

    Raises:
        CheckpointError: with both values.
    """
    train = data.train
    if checkpoint and (progress.data_fingerprint, progress.data_size) != (train.fingerprint, len(train)):
        raise CheckpointError(
            f"{checkpoint}: it was trained on {amount(progress.data_size)} with fingerprint {progress.data_fingerprint}; "
            f"the data is now {amount(len(train))} with fingerprint {train.fingerprint}. {_why_other_data(checkpoint, config)} "
            "Or start a new run from the exported model."
        )
    progress.data_size = len(train)
    progress.data_fingerprint = train.fingerprint
    if checkpoint is not None:
        _check_order(checkpoint, config.order_settings)


def _check_order(checkpoint: Path, settings: OrderSettings) -> None:
    """Refuse settings by which the samples would come in another order than the checkpoint's run has begun."""
    saved = OrderSettings.from_config(store.read_json(checkpoint / "config.json")["config"])
    for field in fields(OrderSettings):
        before = getattr(saved, field.name)
        now = getattr(settings, field.name)
        if before != now:
            raise CheckpointError(
                f"{checkpoint}: the order of its samples depends on {field.name}, which was {before} and is {now} now; samples "
                "would be used twice or never. Restore the old value, or start a new run from the exported model."
            )


def compare_held_out_data(progress: Progress, data: PreparedData, log: RunLog | None) -> None:
    """Forget the held-out losses of the checkpoint where they were measured on other data. Rank 0 warns."""
    if not data.held_out:
        return
    earlier, fingerprint = progress.held_out_fingerprint, data.held_out_fingerprint
    if progress.use_held_out_data(fingerprint) and log:
        names = ", ".join(data.held_out)
        known = f"fingerprint {earlier}" if earlier else "data that the checkpoint does not name"
        tqdm.write(
            f"WARNING: the held-out data ({names}, fingerprint {fingerprint}) is not what the earlier losses were measured on "
            f"({known}). Losses of different data are not compared: the best checkpoint and early stopping go by the losses "
            "from here on."
        )


DATA_SETTINGS = frozenset({
    "model_name_or_path", "tokenizer_name", "model_revision", "dataset_name", "dataset_config_name", "datasets", "train_file",
    "validation_file", "validation_split_percentage", "streaming", "max_train_samples", "format", "text_column",
    "summary_column", "chat_template", "on_bad_sample", "packing", "seed", "new_tokens",
})  # fmt: skip
"""Settings of every recipe that decide which samples a run trains on. A recipe's own settings may do so too."""


def _why_other_data(checkpoint: Path, config: RecipeConfig) -> str:
    """Return the settings about data that differ from the checkpoint's, in words."""
    saved, now = store.read_json(checkpoint / "config.json")["config"], config.model_dump(mode="json")
    own = type(config).model_fields.keys() - RecipeConfig.model_fields.keys()
    kept = {key for key in now if key in saved and (key in own or key in DATA_SETTINGS)}
    found = differences({key: saved[key] for key in kept}, {key: now[key] for key in kept})
    if not found:
        return "The settings are the same: a data file, a dataset or the tokenizer has other content. Bring it back."
    return f"Changed: {', '.join(f'{key} {was} -> {here}' for key, (was, here) in found.items())}. Restore these values."


def check_base(checkpoint: Path | None, config: RecipeConfig, model: nn.Module) -> None:
    """Refuse a checkpoint whose weights would compute another function here: with another base model, config or LoRA setting.

    A branch on the hub can move while a run is stopped, and a folder can get other content.

    Raises:
        CheckpointError: with both values.
    """
    if checkpoint is None:
        return
    kept, values = store.read_json(checkpoint / "config.json"), config.model_dump()
    facts, adapts = getattr(model, "base_facts", None), config.trains_adapters
    for key in ("adapter", "lora_r", "lora_alpha", "lora_target_modules", "modules_to_save") if adapts else ():
        before, here = kept["config"].get(key), values[key]
        if before is not None and (set(before) != set(here) if isinstance(here, list) else before != here):
            raise CheckpointError(
                f"{checkpoint}: the output of its adapters depends on {key}, which was {before} and is {here} now. Restore "
                "the old value, or start a new run from the exported model."
            )
    recorded, found = ((part or {}).get("adapter") or {} for part in (kept.get("base"), facts))
    for key in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save"):
        if recorded.get(key) != found.get(key):
            raise CheckpointError(
                f"{checkpoint}: its adapter was continued from one whose {key} was {recorded.get(key)}, and --adapter_path "
                f"{values.get('adapter_path')} has {found.get(key)}. Bring that adapter back."
            )
    was, now = kept.get("base_commit"), getattr(model, "base_commit", None)
    if adapts and was and now and was != now:
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained beside commit {was} of {config.model_name_or_path}, and "
            f"--model_revision {config.model_revision} is commit {now} now. Pass --model_revision {was}."
        )
    origin.check(checkpoint, kept, facts, weights=not (was and now))


def earlier_decisions(progress: Progress, manager: CheckpointManager, strategy: Strategy, log: RunLog | None) -> dict[str, Any]:
    """Apply what earlier attempts decided after the checkpoint was written. Collective.

    Without a checkpoint the run starts from the beginning, and only the number of steps that trackers have seen is kept.

    Returns:
        The state of the earlier attempts' ladder of measures.
    """
    before = Decided(**strategy.on_main(lambda: decided(log.folder)._asdict()))  # type: ignore[union-attr]  # rank 0 has a log
    progress.redone = max(progress.redone, before.redone + max(0, before.step - progress.step))
    if manager.checkpoint is None:
        return {}
    progress.skip_ranges = joined(progress.skip_ranges, before.skips)
    for cut in before.cuts:  # the same cut may occur twice
        if progress.rate_cuts.count(cut) < before.cuts.count(cut):
            progress.rate_cuts.append(cut)
    manager.proven = set(before.proven)
    return before.ladder


def schedule_steps(state: RunState, checkpoint: Path | None, log: RunLog | None) -> int:
    """Return the length of the learning-rate schedule, in steps.

    A resumed run keeps the length that the checkpoint records: samples left out since then shorten the run, not the
    schedule. The length changes only if a person asks for another number of steps or epochs, or another global batch.
    """
    if checkpoint is None:
        return state.end_step
    progress, config = state.progress, state.config
    saved = store.read_json(checkpoint / "config.json")["config"]
    before = saved["max_train_steps"] or (saved["num_train_epochs"], progress.global_batch)
    now = config.max_train_steps or (config.num_train_epochs, state.layout.global_batch)
    if now == before:
        return progress.total_steps
    if log and state.end_step != progress.total_steps:
        tqdm.write(f"  the learning-rate schedule is computed again: {state.end_step} steps, {progress.total_steps} before")
    return state.end_step


def load(state: RunState, manager: CheckpointManager, strategy: Strategy, log: RunLog | None) -> None:
    """Load the checkpoint to resume from, and compare the inputs of the next step with the recorded ones. Collective."""
    for reason in manager.skipped.values():
        tqdm.write(plain(f"passed over: {reason}"))
    _, bytes_read = manager.load()
    progress = state.progress
    verified, differing = state.verify(progress.following)
    if log is None:
        return
    tqdm.write(f"resumed {manager.checkpoint} at step {progress.step}")
    aside = store.set_aside(manager.folder, progress.step, manager.skipped)
    manager.take_back()
    log.event(
        "resume", checkpoint=str(manager.checkpoint), step=progress.step, cursor=progress.cursor, samples=progress.samples,
        world_size={"before": progress.world_size, "now": strategy.world_size},
        global_batch={"before": progress.global_batch, "now": state.layout.global_batch},
        set_aside=[str(folder) for folder in aside], passed_over=[*manager.skipped.values()],
        bytes_read=bytes_read, verified=verified, differing=differing,
    )  # fmt: skip
    tqdm.write(f"  as recorded: {', '.join(verified)}")
    for key, (was, now) in differing.items():
        tqdm.write(f"  differs from the checkpoint's record: {key} of the next step is {now}; recorded: {was}")
    if "learning rate" in differing and _is_of_earlier_warm_up(state, *differing["learning rate"]):
        tqdm.write("  an earlier version wrote the checkpoint; its warm-up was one step behind this one's")
    state.earlier_losses = _losses_behind(log, progress.step)


def _is_of_earlier_warm_up(state: RunState, recorded: float, now: float) -> bool:
    """Return whether the recorded rate is that of versions whose warm-up began at 0: after k steps, k of W parts, not k + 1."""
    step = state.progress.step
    in_warm_up = step < state.config.warmup_steps(state.total_steps)
    return in_warm_up and math.isclose(recorded * (step + 1), now * step)


def evaluation_of(log: RunLog | None, progress: Progress) -> dict[str, Any] | None:
    """Return the evaluation of the state that ``progress`` describes, if it is the last one in the log. Rank 0."""
    assert log is not None
    found = last_of(log.folder / EVENTS, ["eval"]).get("eval")
    # The checkpoint names its own loss: a branch that was given up may have been evaluated at the same step.
    if found is None or (found["step"], found.get("loss")) != (progress.step, progress.eval_loss):
        return None
    return {key: found[key] for key in ("loss", "perplexity", "tokens", "datasets", "metrics") if key in found}


class ResumeCheck(Hook):
    """Compares the first losses after a checkpoint was loaded with earlier losses of the same steps, once. Rank 0 only."""

    def __init__(self, log: RunLog):
        self.log = log

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        before, trainer.state.earlier_losses = trainer.state.earlier_losses, {}
        pairs = {record.step: (float(record.loss), before[record.step]) for record in records if record.step in before}
        if pairs:
            largest = max(abs(loss - was) / max(abs(was), 1e-30) for loss, was in pairs.values())
            apart = first_apart(
                {step: was for step, (_, was) in pairs.items()}, {step: loss for step, (loss, _) in pairs.items()}
            )
            first, last = min(pairs), max(pairs)
            self.log.event("verify", after="steps done again", steps=[first, last], largest_relative_difference=largest,
                           first_apart=apart)  # fmt: skip
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            tqdm.write(f"{steps} done again: the largest relative difference of the losses is {largest:.1e}")


def amount(samples: int) -> str:
    """Return the amount of data as text."""
    return counted(samples, "sample") if samples else "a stream"


def _losses_behind(log: RunLog, step: int) -> dict[int, float]:
    """Return step -> loss that earlier attempts recorded after ``step``, from the newest part of the log."""
    found: dict[int, float] = {}
    for record in backwards(log.folder / STEPS):
        if record is None or record["step"] <= step:
            break
        if record["loss"] is not None:
            found.setdefault(record["step"], record["loss"])
    return found
