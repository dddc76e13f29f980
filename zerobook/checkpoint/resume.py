"""Check the run's folder and checkpoint before a start, and keep the global batch on another number of processes."""

from pathlib import Path
from typing import Any

from zerobook.checkpoint import store
from zerobook.checkpoint.resolution import describe_unusable, resolve_resume
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigDraft
from zerobook.errors import CheckpointError, ConfigError
from zerobook.optimizer import RESUMES, optimizer_name
from zerobook.utils.units import counted


def find_earlier_run(config: RecipeConfig) -> str | None:
    """Return the error message for a new run in the folder of an earlier one, or None if the folder is free.

    Two runs in one folder would leave checkpoints of both, and ``auto`` would take whichever has more steps.
    """
    if config.resume_from_checkpoint is not None:
        return None
    checkpoints = store.list_complete(store.folder_of(config.output_dir))
    if not checkpoints:
        problem = describe_unusable(config.output_dir)
        return None if problem is None else f"output_dir: {problem}"
    return (
        f"output_dir: {config.output_dir} holds {counted(len(checkpoints), 'checkpoint')} of an earlier run, the newest "
        f"{checkpoints[-1].name}. Resume from it with --resume_from_checkpoint auto, or give this run another --output_dir."
    )


def find_earlier_result(config: RecipeConfig) -> str | None:
    """Return the error message for a run that would overwrite the result of another run, or its own initial model; else None.

    A run that resumes from a checkpoint in its folder may replace the result of an earlier attempt.
    """
    result = Path(config.output_dir) / config.result
    base = config.model_name_or_path
    if base is not None and Path(base).exists() and Path(base).resolve().is_relative_to(result.resolve()):
        return (
            f"output_dir: the run ends by writing {result}, and that is model_name_or_path {base}, which it is trained from. "
            "Give another --output_dir, or move that model away and name its new place."
        )
    # There is nothing that could be overwritten.
    if not result.exists() or (result.is_dir() and not any(result.iterdir())):
        return None
    try:
        checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    except CheckpointError:
        # That no checkpoint can be resumed is another problem, which `zerobook.launch.resolve` reports.
        return None
    # If the run resumes in its folder, an earlier attempt of this run has written the result.
    if checkpoint is not None and checkpoint.resolve().parent == store.folder_of(config.output_dir).resolve():
        return None
    return (
        f"output_dir: {result} exists already, and this run, which does not resume from a checkpoint in {config.output_dir}, "
        "would overwrite it. Give another --output_dir, or move that folder away."
    )


def lock_run_folder(config: RecipeConfig) -> None:
    """Lock the run's folder until this process ends, and raise `ConfigError` if `find_earlier_run` finds a run in it.

    The launch has checked this before, without the lock. A run that was submitted twice may have saved checkpoints since.
    """
    store.lock_until_exit(store.folder_of(config.output_dir))
    earlier = find_earlier_run(config)
    if earlier:
        raise ConfigError(earlier)


def find_optimizer_mismatch(config: RecipeConfig) -> str | None:
    """Return the error message if the run's optimizer cannot use the state in the checkpoint to resume from; else None.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged, or there is none.
    """
    checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    if checkpoint is None:
        return None
    return compare_optimizer(checkpoint, optimizer_name(config.optimizer))


def compare_optimizer(checkpoint: Path, name: str) -> str | None:
    """Return the error message if the optimizer ``name`` cannot use the state in ``checkpoint``; else None."""
    # The first versions had AdamW only, and their checkpoints do not name the optimizer.
    saved_optimizer = store.read_json(checkpoint / "config.json").get("config", {}).get("optimizer", "adamw")
    if optimizer_name(saved_optimizer) == name or saved_optimizer in RESUMES.get(name, ()):
        return None
    return (
        f"{checkpoint}: it was written with the optimizer {saved_optimizer}, and this run's is {name}, which has another "
        f"state. Pass --optimizer {saved_optimizer} to resume, or start a new run from the exported model."
    )


def keep_global_batch(draft: ConfigDraft[Any], world_size: int) -> str | None:
    """Change the micro-batch and the accumulation in ``draft`` so that the global batch stays that of the checkpoint.

    The global batch decides the training (steps, schedule, noise); the number of processes must not. Nothing is changed if the
    user has changed the micro-batch or the accumulation since the checkpoint.

    Args:
        draft: has the values of flags, YAML and JSON together, as ``asked`` in the checkpoint's config.json.

    Returns:
        A sentence for the user on what was changed, or why it could not be; None if the global batch is the same.
    """
    config = draft.config
    checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    if checkpoint is None:
        return None
    earlier = store.read_json(checkpoint / "config.json")["asked"]
    earlier_batch = int(store.read_json(checkpoint / store.PROGRESS)["global_batch"])
    micro_batch = config.per_device_train_batch_size
    accumulation = config.gradient_accumulation_steps
    batch = micro_batch * accumulation * world_size
    # The global batch of a checkpoint that was imported from another trainer is not known, and recorded as 0.
    if earlier_batch in (0, batch):
        return None
    # The user has changed the sizes on purpose, and with them the global batch.
    earlier_sizes = (earlier["per_device_train_batch_size"], earlier["gradient_accumulation_steps"])
    if earlier_sizes != (micro_batch, accumulation):
        return (
            f"global batch: {batch} samples a step from here on, {earlier_batch} before {checkpoint.name} (sizes were changed)"
        )

    # Take the largest micro-batch by which the global batch can be divided. A larger one than before may not fit into memory.
    for size in range(micro_batch, 0, -1):
        if earlier_batch % (size * world_size) == 0:
            steps = earlier_batch // (size * world_size)
            source = f"{checkpoint.name}, to keep its global batch"
            draft.set(source, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
            return (
                f"global batch kept at {earlier_batch} on {counted(world_size, 'process')}: {size} x {steps} accumulation x "
                f"{world_size}"
            )
    return (
        f"global batch: {earlier_batch} samples cannot be divided among {world_size} processes; {batch} samples a step from "
        "here on"
    )
