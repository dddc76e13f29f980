"""Model, data and results of a run, read from its log: for the page, for model cards and for comparisons of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerobook.runlog.events import Event
from zerobook.runlog.history import History


def data_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's training data. ``config`` may be one of an earlier version, which lacks newer keys."""
    names = [config.get("dataset_name") or config.get("train_file")]
    names += [spec["path"] for spec in config.get("datasets") or []]
    return [name for name in names if name]


def model_name(config: Mapping[str, Any]) -> str:
    """Return the model that a run begins with, or the architecture that it trains from scratch."""
    return str(config.get("model_name_or_path") or config.get("config_name") or "")


def trains_adapters(config: Mapping[str, Any]) -> bool:
    """Return whether a run trains adapters. ``config`` may be one of an earlier version."""
    # Earlier versions had no key ``adapter``. Their configs had ``lora_r`` if adapters were trained.
    return bool(config.get("adapter", "lora_r" in config) or config.get("adapter_path"))


def training_method(config: Mapping[str, Any]) -> str:
    """Return how the weights are trained: ``full finetuning``, or the adapters and the format of the weights beside them."""
    if not trains_adapters(config):
        return "full finetuning"
    adapter = config.get("adapter") or "lora"
    return f"{adapter} on 4-bit weights" if config.get("load_in_4bit") else adapter


def run_facts(history: History) -> dict[str, str]:
    """Return what the newest attempt trains: label -> text for people. Nothing before the run began to train."""
    starts = history.of("run_start")
    if not starts:
        return {}
    config = starts[-1]["config"]
    # The key has a default, so a config has a rank even if no adapters are trained.
    adapter_rank = config.get("lora_r") if trains_adapters(config) else None
    facts = {
        "model": model_name(config),
        "data": ", ".join(data_names(config)),
        "method": training_method(config),
        "adapter rank": str(adapter_rank or ""),
        "learning rate": f"{config['learning_rate']:g}" if "learning_rate" in config else "",
        "batch": str(starts[-1].get("batch") or ""),
        "code": code_version(starts[-1]),
    }
    return {label: text for label, text in facts.items() if text}


def code_version(run_start: Event) -> str:
    """Return the recipe's file with the git commit that it was run from, as far as the event has them; else an empty text."""
    code = run_start.get("code") or {}
    if not code.get("commit"):
        return str(code.get("file") or "")
    changed = " with local changes" if code["changed_files"] else ""
    return f"{code['file']}, commit {code['commit'][:12]}{changed}"


def run_results(history: History) -> dict[str, Any]:
    """Return the results of a run by name. A value that was not measured or is not finite is None.

    ``state`` is the ending of the newest attempt. ``loss`` and ``best_loss`` are the last and the lowest held-out loss, in nats
    per supervised token. ``held_out_fingerprint`` is that of the data on which both were measured. ``tokens_per_second`` is the
    median of the log points. ``memory`` is the peak of rank 0, in bytes: of torch's allocator on a GPU, or else of the process
    and its data workers. The other values are ``step``, ``total_steps``, ``best_step`` and ``trained_parameters``.
    """
    evaluations = [event for event in history.current_evaluations() if "loss" in event]
    fingerprint = evaluations[-1].get("held_out_fingerprint") if evaluations else None
    # After a resume with other held-out data, earlier losses are not comparable.
    losses = {event["step"]: event["loss"] for event in evaluations if event.get("held_out_fingerprint") == fingerprint}
    results: dict[str, Any] = dict.fromkeys(
        ("step", "total_steps", "loss", "best_loss", "best_step", "tokens_per_second", "memory", "trained_parameters")
    )
    results["state"] = history.ending(history.attempts()[-1]) if history.events else "not begun"
    results["held_out_fingerprint"] = fingerprint
    if losses:
        # A loss that is not finite is recorded as null. It can be the best one only if all losses are null.
        best_step = min(losses, key=lambda step: float("inf") if losses[step] is None else losses[step])
        results.update(loss=losses[max(losses)], best_step=best_step, best_loss=losses[best_step])
    starts = history.of("run_start")
    if starts:
        results["total_steps"] = starts[-1]["total_steps"]
    metrics = history.of("metrics")
    if metrics:
        # ``steps`` of a log point is (first step, last step).
        results["step"] = metrics[-1]["steps"][1]
        speeds = [event["tokens_per_second"] for event in metrics]
        # The first log point contains the slow start of the run. It counts only if there is no other one.
        results["tokens_per_second"] = statistics.median(speeds[1:] or speeds)
    machine_events = history.of("machine")
    if machine_events:
        results["memory"] = max(map(_peak_memory, machine_events))
    # The event ``memory`` also has the number of trained parameters.
    memory_events = history.of("memory")
    if memory_events:
        results["trained_parameters"] = memory_events[-1]["trained_parameters"]
    return results


# Return the peak of rank 0 up to a ``machine`` event, in bytes.
def _peak_memory(machine: Event) -> int:
    allocator = machine.get("allocator")
    return allocator["reserved_peak"] if allocator else machine["own"]


def short_name(name: str, most_characters: int = 24) -> str:
    """Return a name, or only the last part if it is a long path.

    >>> short_name("outputs/run"), short_name("/data/of/a/long/name/train.jsonl")
    ('outputs/run', '.../train.jsonl')
    """
    return f".../{Path(name).name}" if len(name) > most_characters and "/" in name else name
