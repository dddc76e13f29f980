"""Turn a checkpoint of another trainer into a run, which any strategy can continue.

The run's folder has a checkpoint in Zerobook's format, and a runlog with the steps that the other trainer logged. It appears
only when it is complete. Weights and moments are read and written piece by piece.
"""

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Any

from zerobook.checkpoint import store
from zerobook.checkpoint.origin import facts
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import ADAM_STEPS, INDEX, complete, write_pieces
from zerobook.config import AUTOMATIC, RecipeConfig
from zerobook.errors import CheckpointError
from zerobook.interop.checkpoints.model_names import ADAPTER_CONFIG
from zerobook.interop.checkpoints.sharded import METADATA, MODEL_FOLDER, OPTIMIZER_FOLDER, read_sharded
from zerobook.interop.checkpoints.source import MOMENTS, Position, Source, read_json_object, read_position
from zerobook.interop.checkpoints.torch_files import find_optimizer_file, read_torch_files
from zerobook.interop.checkpoints.zero import list_rank_files, read_zero
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Piece
from zerobook.strategy.weights import unwrapped_name
from zerobook.utils import files
from zerobook.utils.reading import read_text

# Number of parts of a checkpoint that are read and written at the same time.
WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The result of an import."""

    checkpoint: Path
    source: Source
    position: Position

    @property
    def decays_vectors(self) -> bool:
        """Whether the other trainer also decayed norm gains and biases, which do not decay in Zerobook."""
        has_vectors = any(len(shape) < 2 for shape in self.source.shapes.values())
        return has_vectors and self.source.group_count == 1 and self.source.settings.get("weight_decay", 0) > 0


def import_checkpoint(folder: Path, output: Path) -> Imported:
    """Write the run ``output`` with the checkpoint in ``folder``.

    Files are mapped or read part by part, so each of the `WORKERS` threads holds at most one weight in memory.

    Raises:
        CheckpointError: ``folder`` holds no complete checkpoint that can be read.
        ConfigError: ``output`` holds something.
    """
    files.require_new(output, "--output")
    try:
        source = _read_source(folder)
        # Trainer's files, such as config.json, are beside DeepSpeed's folder.
        trainer_folder = folder.parent if folder.name.startswith("global_step") else folder
        position = read_position(trainer_folder, source.optimizer_steps)
        if position.step < 1:
            raise CheckpointError(f"{folder}: it was saved before the first step. Start a new run from the model.")
        with files.staged(output) as staged_run:
            _write_checkpoint(store.folder_of(staged_run), trainer_folder, source, position)
            _write_log(staged_run, trainer_folder, source, position)
    # A file of another program or version may have the right name and other content, which fails in many ways.
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: a file in it has not the content that transformers, DeepSpeed, accelerate or FSDP write under its name "
            f"({error!r}). Start a new run from the trained weights."
        ) from error
    return Imported(checkpoint=store.folder_of(output) / store.name_of(position.step), source=source, position=position)


def flags_of(source: Source, position: Position) -> dict[str, Any]:
    """Return flag -> value of the recorded settings that decide the next steps of an imported run."""
    settings = source.settings
    betas = settings.get("betas") or (None, None)
    flags = {
        "max_train_steps": position.total_steps or None,
        # ``initial_lr`` is the peak of a schedule. Without a schedule, ``lr`` is constant.
        "learning_rate": settings.get("initial_lr", settings.get("lr")),
        "weight_decay": settings.get("weight_decay"),
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_epsilon": settings.get("eps"),
    }
    return {name: value for name, value in flags.items() if value is not None}


def _read_source(folder: Path) -> Source:
    """Return the checkpoint in a folder, of any of the kinds that can be imported."""
    for candidate in _list_zero_folders(folder):
        if list_rank_files(candidate):
            return read_zero(candidate)
    if (folder / OPTIMIZER_FOLDER / METADATA).exists() or (folder / MODEL_FOLDER / METADATA).exists():
        return read_sharded(folder)
    optimizer_file = find_optimizer_file(folder)
    if optimizer_file is not None:
        return read_torch_files(folder, optimizer_file)
    raise CheckpointError(_explain_missing(folder))


def _list_zero_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders that may hold DeepSpeed's files of ranks."""
    yield folder
    # The file ``latest`` has the name of the newest of DeepSpeed's folders.
    latest = folder / "latest"
    if latest.is_file():
        yield folder / Path(read_text(latest).strip()).name
    elif folder.is_dir():
        steps = sorted(folder.glob("global_step*"))
        if len(steps) > 1:
            raise CheckpointError(f"{folder}: it holds {len(steps)} of DeepSpeed's folders. Name one, such as {steps[-1]}.")
        yield from steps
    # accelerate gives DeepSpeed's folder this name.
    yield folder / "pytorch_model"


def _explain_missing(folder: Path) -> str:
    """Return the error message for a folder without a checkpoint of another trainer."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder. Give the folder of a checkpoint, such as outputs/checkpoint-500."
    if (folder / store.MANIFEST).exists() or store.list_candidates(store.folder_of(folder)):
        return f"{folder}: this is a checkpoint or run of Zerobook already. Resume it with --resume_from_checkpoint {folder}."
    inner = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    if inner:
        return f"{folder}: it holds {len(inner)} checkpoints, and is none itself. Name one of them, such as {inner[-1]}."
    if (folder / "zero").is_dir():
        return f"{folder}: it is in DeepSpeed's universal format. Import the global_step folder that it was made from."
    if list(folder.glob("*.safetensors")):
        return (
            f"{folder}: it holds weights and no optimizer state, so nothing can be continued. Start a new run with "
            f"--model_name_or_path {folder}, or --adapter_path for an adapter."
        )
    return (
        f"{folder}: it holds no checkpoint with an optimizer's state: neither optimizer.pt, nor a global_step folder with "
        f"DeepSpeed's *_optim_states.pt, nor {OPTIMIZER_FOLDER} of FSDP. Give the folder "
        "that the trainer saved, such as checkpoint-500."
    )


def _write_checkpoint(checkpoints: Path, folder: Path, source: Source, position: Position) -> None:
    """Write the checkpoint in Zerobook's format into the folder ``checkpoints``.

    Args:
        folder: the other trainer's folder, for its config.
    """
    staging = store.staging_of(checkpoints, position.step)
    store.make_staging(staging)
    # A resumed run compares its next rate with this record.
    following = {"learning rate": float(source.settings["lr"])} if "lr" in source.settings else {}
    progress = Progress(
        step=position.step,
        epoch=position.epoch,
        total_steps=position.total_steps,
        world_size=source.ranks,
        scaler=source.scaler,
        following=following,
    )
    # The names of a compiled or wrapped model have prefixes, which Zerobook's do not have.
    weight_shapes = {unwrapped_name(name): shape for name, shape in source.shapes.items()}
    texts = {
        INDEX: {
            ADAM_STEPS: source.optimizer_steps,
            "written_by": {"strategy": source.trainer, "world_size": source.ranks},
            "shapes": weight_shapes,
        },
        store.PROGRESS: progress.to_json(),
        "config.json": _make_config(folder, flags_of(source, position)),
    }
    shapes = {}
    for name, shape in weight_shapes.items():
        for key in ("weight", *MOMENTS):
            shapes[f"{key}/{name}"] = shape
    with ThreadPoolExecutor(WORKERS) as pool:
        # Each part becomes a file of the checkpoint, numbered from 0.
        indices = list(pool.map(write_pieces, repeat(staging), count(), map(_unwrap_names, source.parts)))
    try:
        complete(staging, position.step, indices, shapes=shapes, texts=texts, buffers=source.buffers)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: its files do not make whole tensors ({error}). Copy the checkpoint again.") from None


def _unwrap_names(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces with the names that weights have in a model that is not compiled or wrapped."""
    for piece in pieces:
        yield piece._replace(name=unwrapped_name(piece.name))


def _make_config(folder: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the checkpoint's config.json: the defaults of recipes, and what is known of the other run.

    Args:
        folder: the other trainer's folder, with the config of the model or adapter.
        flags: the known settings of the other run.
    """
    config: dict[str, Any] = {}
    for name, model_field in RecipeConfig.model_fields.items():
        config[name] = None if model_field.is_required() else model_field.get_default(call_default_factory=True)
    config |= {"optimizer": "adamw", "save_steps": AUTOMATIC, **flags}
    base = None
    if (folder / ADAPTER_CONFIG).exists():
        adapter = read_json_object(folder / ADAPTER_CONFIG)
        start = str(adapter.get("init_lora_weights"))
        if start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            raise CheckpointError(
                f"{folder}: its adapter began with init_lora_weights={start}, for which peft changed the base weights, and "
                "these are not in the folder. Continue it with its trainer, or merge it there and start a new run from that."
            )
        method = adapter["peft_type"].lower()
        # rsLoRA and DoRA are switches of PEFT's LoRA.
        if adapter.get("use_rslora"):
            method = "rslora"
        elif adapter.get("use_dora"):
            method = "dora"
        config |= {
            "model_name_or_path": adapter.get("base_model_name_or_path"),
            "adapter": method,
            "lora_r": adapter.get("r"),
            "lora_alpha": adapter.get("lora_alpha"),
        }
    elif (folder / "config.json").exists():
        from transformers import AutoConfig

        config["model_name_or_path"] = str(folder.absolute())
        base = facts(AutoConfig.from_pretrained(folder), None)
        # Trainer writes the tokenizer's pad token into the config even if the model has none, so it tells nothing of the model.
        for model_config in (base["config"], base["config"].get("text_config") or {}):
            model_config.pop("pad_token_id", None)
    return {
        # The batch sizes of the other run are not known, so those of the resumed run are used.
        "asked": config | {"per_device_train_batch_size": None, "gradient_accumulation_steps": None},
        "config": config,
        "chat_template": None,
        "base_commit": None,
        "base": base,
    }


def _write_log(run: Path, folder: Path, source: Source, position: Position) -> None:
    """Write the runlog: the steps and evaluations that the other trainer logged, up to the checkpoint's step."""
    log = RunLog(run)
    records = []
    for entry in position.log_history:
        if "loss" in entry:
            records.append(
                {
                    "step": entry["step"],
                    "loss": _to_finite(entry["loss"]),
                    "grad_norm": _to_finite(entry.get("grad_norm")),
                    "learning_rate": entry.get("learning_rate"),
                    "tokens": 0,
                    "cursor": [0, 0],
                    "ids": [],
                }
            )
        elif "eval_loss" in entry:
            log.event("eval", step=entry["step"], seconds=entry.get("eval_runtime", 0), samples=[], loss=entry["eval_loss"])
    log.steps(records)
    log.event(
        "imported",
        folder=str(folder.absolute()),
        trainer=source.trainer,
        world_size=source.ranks,
        step=position.step,
        epoch=position.epoch,
    )
    log.close()


# A runlog has None for a value that is not finite.
def _to_finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
