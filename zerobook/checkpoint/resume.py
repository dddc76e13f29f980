"""Checks of the run's folder and checkpoint before a start, and a resume on another number of processes."""

from pathlib import Path
from typing import Any

from zerobook.checkpoint import store
from zerobook.checkpoint.resolution import none_usable, resolve_resume
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
        problem = none_usable(config.output_dir)
        return None if problem is None else f"output_dir: {problem}"
    return (
        f"output_dir: {config.output_dir} holds {counted(len(checkpoints), 'checkpoint')} of an earlier run, the newest "
        f"{checkpoints[-1].name}. Resume from it with --resume_from_checkpoint auto, or give this run another --output_dir."
    )


def find_earlier_result(config: RecipeConfig) -> str | None:
    """Return the error message for a run that would overwrite an earlier result, or the model that it starts from; else None.

    A run that goes on from a checkpoint of its own folder may replace the result of its own earlier attempt.
    """
    result = Path(config.output_dir) / config.result
    base = config.model_name_or_path
    if base is not None and Path(base).exists() and Path(base).resolve().is_relative_to(result.resolve()):
        return (
            f"output_dir: the run ends by writing {result}, and that is model_name_or_path {base}, which it is trained from. "
            "Give another --output_dir, or move that model away and name its new place."
        )
    # Nothing is there that could be overwritten.
    if not result.exists() or (result.is_dir() and not any(result.iterdir())):
        return None
    try:
        checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    except CheckpointError:
        # A problem of its own, which `zerobook.launch.resolve` reports.
        return None
    # The result is this run's own, of an earlier attempt.
    if checkpoint is not None and checkpoint.resolve().parent == store.folder_of(config.output_dir).resolve():
        return None
    return (
        f"output_dir: {result} exists already, and this run, which does not resume from a checkpoint in {config.output_dir}, "
        "would overwrite it. Give another --output_dir, or move that folder away."
    )


def lock_run_folder(config: RecipeConfig) -> None:
    """Lock the run's folder until this process ends, and check it again: see `store.lock_until_exit` and `find_earlier_run`.

    The launch looked before it had the lock. A run that was submitted twice may have saved checkpoints there since then.
    """
    store.lock_until_exit(store.folder_of(config.output_dir))
    earlier = find_earlier_run(config)
    if earlier:
        raise ConfigError(earlier)


def other_optimizer(config: RecipeConfig) -> str | None:
    """Return the error message for a checkpoint of an optimizer whose state differs; None if it can be resumed.

    Raises:
        CheckpointError: there is no checkpoint to resume.
    """
    checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    if checkpoint is None:
        return None
    return differing_optimizer(checkpoint, optimizer_name(config.optimizer))


def differing_optimizer(checkpoint: Path, name: str) -> str | None:
    """Return the error message for ``checkpoint`` if it lacks state of the optimizer ``name``; else None."""
    # Checkpoints of the first versions, which had AdamW only, do not name it.
    saved_optimizer = store.read_json(checkpoint / "config.json").get("config", {}).get("optimizer", "adamw")
    if optimizer_name(saved_optimizer) == name or saved_optimizer in RESUMES.get(name, ()):
        return None
    return (
        f"{checkpoint}: it was written with the optimizer {saved_optimizer}, and this run's is {name}, which has another "
        f"state. Pass --optimizer {saved_optimizer} to resume, or start a new run from the exported model."
    )


def keep_global_batch(draft: ConfigDraft[Any], world_size: int) -> str | None:
    """Keep the checkpoint's global batch if only the number of processes changed.

    The global batch decides the training (steps, schedule, noise); the number of processes must not. A batch size or
    accumulation that a person changed, in any file, is kept. So the draft must hold the values of flags, YAML and JSON
    together, as ``asked`` in the checkpoint does.

    Returns:
        A note on what was changed or could not be, or None.
    """
    config = draft.config
    checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    if checkpoint is None:
        return None
    earlier = store.read_json(checkpoint / "config.json")["asked"]
    earlier_batch = int(store.read_json(checkpoint / store.PROGRESS)["global_batch"])
    micro = config.per_device_train_batch_size
    accumulation = config.gradient_accumulation_steps
    batch = micro * accumulation * world_size
    # The batch of another trainer's checkpoint is not known.
    if earlier_batch in (0, batch):
        return None
    # A person changed the sizes on purpose, and with them the global batch.
    earlier_sizes = (earlier["per_device_train_batch_size"], earlier["gradient_accumulation_steps"])
    if earlier_sizes != (micro, accumulation):
        return (
            f"global batch: {batch} samples a step from here on, {earlier_batch} before {checkpoint.name} (sizes were changed)"
        )

    # The largest micro-batch, up to the one that fits into memory, by which the global batch can be divided.
    for smaller in range(micro, 0, -1):
        if earlier_batch % (smaller * world_size) == 0:
            steps = earlier_batch // (smaller * world_size)
            source = f"{checkpoint.name}, to keep its global batch"
            draft.set(source, per_device_train_batch_size=smaller, gradient_accumulation_steps=steps)
            return (
                f"global batch kept at {earlier_batch} on {counted(world_size, 'process')}: {smaller} x {steps} accumulation x "
                f"{world_size}"
            )
    return (
        f"global batch: {earlier_batch} samples cannot be divided among {world_size} processes; {batch} samples a step from "
        "here on"
    )
