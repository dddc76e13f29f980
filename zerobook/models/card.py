"""The model card of a saved or exported folder, in the hub's format: https://huggingface.co/docs/hub/model-cards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zerobook.checkpoint import store
from zerobook.errors import RunLogError
from zerobook.runlog.facts import code_version, data_names, model_name, training_method
from zerobook.runlog.history import History, time_spent
from zerobook.utils.units import counted, duration

# Name of a library -> code that loads a model which the library saved.
LOADING_CODE = {
    "peft": """from peft import AutoPeftModelFor{task}
from transformers import AutoTokenizer

model = AutoPeftModelFor{task}.from_pretrained("FOLDER_OR_NAME")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")""",
    "transformers": """from transformers import AutoModelFor{task}, AutoTokenizer

model = AutoModelFor{task}.from_pretrained("FOLDER_OR_NAME")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")""",
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Facts on the training of a model for its card, besides the run's config."""

    run: Path
    """the run's output_dir"""
    progress: Mapping[str, Any]
    """content of a checkpoint's progress.json"""
    strategy: str
    world_size: int

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> Training:
        """Return the training up to ``checkpoint``."""
        progress = store.read_json(checkpoint / store.PROGRESS)
        written_by = store.read_json(checkpoint / "tensors.json")["written_by"]
        run = checkpoint.parents[1]
        return cls(run=run, progress=progress, strategy=written_by["strategy"], world_size=written_by["world_size"])


def format_card(
    config: Mapping[str, Any], training: Training, *, seq2seq: bool, adapter: bool, notes: Sequence[str] = ()
) -> str:
    """Return the card: base and data of the model, its training, the run's figures and events, and code that loads the model.

    The card names no path of this machine: of local files and folders, it has only the last part.

    Args:
        config: the run's config. A config of an earlier version lacks newer keys.
        seq2seq: the model is an encoder-decoder.
        adapter: the folder holds an adapter, and not the complete model.
        notes: limits for people, each a sentence without a capital letter and a full stop.
    """
    # The hub reads the header, and links the model to its base and its data.
    library = "peft" if adapter else "transformers"
    header: dict[str, Any] = {"library_name": library, "tags": ["zerobook", training_method(config)]}
    if _is_on_hub(config["model_name_or_path"]):
        header["base_model"] = config["model_name_or_path"]
    hub_datasets = [name for name in data_names(config) if _is_on_hub(name)]
    if hub_datasets:
        header["datasets"] = hub_datasets

    lines = ["---", yaml.safe_dump(header, sort_keys=False).rstrip(), "---", ""]
    lines += [f"# {training.run.resolve().name}, step {training.progress['step']}", "", "| | |", "|---|---|"]
    rows = _describe_training(config, training, adapter) | _describe_run(training.run)
    # A setting without a value gets no row.
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
    task = "Seq2SeqLM" if seq2seq else "CausalLM"
    lines += ["", "## Use", "", "```python", LOADING_CODE[library].format(task=task), "```", "", "## Limits", ""]
    lines += ["The licences of the base model and of the data apply. Nothing but what the table says was measured."]
    lines += [f"{note[0].upper()}{note[1:]}." for note in notes]
    return "\n".join(lines) + "\n"


def _describe_training(config: Mapping[str, Any], training: Training, adapter: bool) -> dict[str, Any]:
    """Return the rows of the table on model, data, settings and progress: name -> value."""
    progress = training.progress
    trained_from = _public_name(model_name(config))
    if _is_on_hub(config["model_name_or_path"]):
        trained_from += f", revision {config.get('model_revision')}"
    held_out_loss = "not measured at this step"
    loss = progress.get("eval_loss")
    if loss is not None and math.isfinite(loss):
        held_out_loss = f"{loss:.4f}"
    return {
        "trained from": trained_from,
        "trained on": ", ".join(map(_public_name, data_names(config))),
        "dataset revision": config.get("dataset_revision"),
        "method": training_method(config),
        "adapter rank": config.get("lora_r") if adapter else None,
        "steps": f"{progress['step']:,}",
        "samples seen": f"{progress['samples']:,}",
        "supervised tokens seen": f"{progress['tokens']:,}",
        "global batch": progress["global_batch"],
        "optimizer": config.get("optimizer", "adamw"),
        "learning rate": f"{config['learning_rate']}, {config['lr_scheduler_type']}",
        "held-out loss": held_out_loss,
        "strategy": f"{training.strategy}, {counted(training.world_size, 'process')}",
        "data fingerprint": progress["data_fingerprint"],
    }


def _describe_run(folder: Path) -> dict[str, Any]:
    """Return the rows on the run's time, hardware, code and events: name -> value. An empty dictionary without a runlog."""
    try:
        history = History.read(folder)
    except RunLogError:
        return {}
    rows: dict[str, Any] = {"time": duration(time_spent(history).total)}
    environments = history.of("env")
    starts = history.of("run_start")
    if environments:
        # Attempts may have run on different hardware. The row names that of the last one.
        gpus = environments[-1]["gpus"]
        rows["hardware"] = f"{environments[-1]['cpus']} CPU cores"
        if gpus:
            rows["hardware"] = f"{len(gpus)} x {gpus[0]}"
    if starts:
        versions = starts[-1]["versions"]
        libraries = [name for name in ("torch", "transformers", "accelerate", "deepspeed") if name in versions]
        rows["code"] = code_version(starts[-1])
        rows["versions"] = ", ".join(f"{name} {versions[name]}" for name in libraries)
    alarms = sum(event["alarm"] for event in history.of("spike"))
    # A rollback has two events: its beginning and its outcome.
    rollbacks = sum(event["phase"] == "outcome" for event in history.of("rollback"))
    skipped = sum(event["samples"] for event in history.of("skip"))
    counts = {"attempts": len(starts), "alarms": alarms, "rollbacks": rollbacks, "samples left out": skipped}
    rows["events"] = ", ".join(f"{count} {noun}" for noun, count in counts.items())
    return rows


def _is_on_hub(name: str | None) -> bool:
    """Return whether a name is one of the hub: USER/NAME, and neither a local path nor ``embedded:NAME``."""
    return name is not None and ":" not in name and not Path(name).expanduser().exists() and name.count("/") <= 1


def _public_name(name: str) -> str:
    """Return the name of a model or dataset; of a local path the last part only."""
    return name if _is_on_hub(name) or ":" in name else Path(name).name
