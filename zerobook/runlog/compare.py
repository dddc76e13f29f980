"""Differences between two attempts, of one run or of two: settings, launch, versions, and the first step whose loss differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAUNCH = ("name", "world_size", "device", "backend", "precision", "config_file")
"""Fields of a launch plan that are compared; the others follow from them, or are in the config."""


def launch(run_start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the launch of a ``run_start`` event as flat facts: strategy, processes, device, precision, DeepSpeed's keys."""
    plan, live = run_start.get("plan") or {}, run_start.get("live") or {}
    found = {"strategy" if name == "name" else name: plan[name] for name in LAUNCH if name in plan}
    if "world_size" in found:
        found["processes"] = found.pop("world_size")
    if "strategy" not in found and "strategy" in live:
        found["strategy"] = live["strategy"]
    return found | _flat("deepspeed", plan.get("deepspeed_config") or {})


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(f"{prefix}.{key}", value) if isinstance(value, Mapping) else {f"{prefix}.{key}": value}
    return found


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return key -> [before, now] of all keys that differ. A tuple equals the list that JSON makes of it."""
    keys = sorted(set(was) | set(now))
    return {key: [was.get(key), now.get(key)] for key in keys if _json(was.get(key)) != _json(now.get(key))}


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def first_apart(was: Mapping[int, float | None], now: Mapping[int, float | None]) -> int | None:
    """Return the first step that both have and whose loss is not the same, bit for bit; None where all are."""
    return next((step for step in sorted(set(was) & set(now)) if was[step] != now[step]), None)
