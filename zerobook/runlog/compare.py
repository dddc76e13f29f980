"""Differences between two attempts, of one run or of two runs: settings, launch, versions, first step whose loss differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Field of a launch plan that is compared -> its name for people. The other fields follow from these or are in the config.
LAUNCH = {
    "name": "strategy",
    "world_size": "processes",
    "device": "device",
    "backend": "backend",
    "precision": "precision",
    "config_file": "config_file",
}


def launch(run_start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the launch of a ``run_start`` event as name -> value: strategy, processes, device, precision, DeepSpeed's keys."""
    plan = run_start.get("plan") or {}
    live = run_start.get("live") or {}
    facts = {LAUNCH[key]: plan[key] for key in LAUNCH if key in plan}
    # The field ``live`` has the strategy of a run that was started without a launch plan.
    if "strategy" not in facts and "strategy" in live:
        facts["strategy"] = live["strategy"]
    return facts | _flatten("deepspeed", plan.get("deepspeed_config") or {})


# Return nested values as one dictionary: ``prefix.key.key`` -> value.
def _flatten(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(path, value)
        else:
            flat[path] = value
    return flat


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return key -> [before, now] of all keys that differ. A tuple equals the list that JSON makes of it."""
    differing = {}
    for key in sorted(set(before) | set(now)):
        if _tuple_as_list(before.get(key)) != _tuple_as_list(now.get(key)):
            differing[key] = [before.get(key), now.get(key)]
    return differing


def _tuple_as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def first_differing_step(losses: Mapping[int, float | None], other_losses: Mapping[int, float | None]) -> int | None:
    """Return the first step that both have and whose losses are not equal bit for bit; None if all losses are equal."""
    for step in sorted(set(losses) & set(other_losses)):
        if losses[step] != other_losses[step]:
            return step
    return None
