"""The config.json of a run's model, where it is on this machine, and what a strategy cannot do with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import hub


def model_facts(config: RecipeConfig) -> dict[str, Any] | None:
    """Return the config.json of the model; None if it is not on this machine. Downloads nothing."""
    name = config.model_name_or_path or config.initialised_from
    try:
        folder = (embedded.converted(name) or hub.folder(name, config.model_revision)) if name else None
        if folder is None:
            return None
        found = json.loads((folder / "config.json" if folder.is_dir() else folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no such model, or no such file: `load_config` says so
    return found if isinstance(found, dict) else None


def unfit_for_zero3(plan: LaunchPlan, facts: Mapping[str, Any]) -> list[str]:
    """Return why a model cannot be trained under ZeRO-3, as far as its config says.

    Args:
        facts: the model's config.json.
    """
    noise = facts.get("router_jitter_noise")
    if plan.zero_stage != 3 or not noise:
        return []
    return [
        f"model: its config asks for router_jitter_noise {noise:g}, by which transformers 5.23 multiplies in place. torch "
        f"forbids that on the outputs of layers that DeepSpeed 0.19.8 wraps, under {plan.name}. Set it to 0 in the model's "
        "config.json, or launch with accelerate_configs/fsdp.yaml."
    ]
