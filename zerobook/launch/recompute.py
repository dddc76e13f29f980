"""Activation checkpointing that a strategy file asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerobook.config_sources import ConfigDraft
    from zerobook.strategy.launch_plan import LaunchPlan


def request(plan: LaunchPlan, file: str, key: str, mode: str, draft: ConfigDraft[Any]) -> None:
    """Set the draft's ``activation_checkpointing``, or add a problem if a person chose one that does less.

    Args:
        file: the strategy file.
        key: its key that asks for it.
        mode: ``full`` or ``offload``, which is full with the inputs of layers in host memory.
    """
    current = draft.config.activation_checkpointing
    # offload does what full does, and more.
    if current in (mode, "offload"):
        return
    if current == "full" or not draft.sources.is_set("activation_checkpointing"):
        draft.set(file, activation_checkpointing=mode)
    else:
        plan.problems.append(
            f"{file}: {key} is true, but activation_checkpointing is {current} (from "
            f"{draft.sources['activation_checkpointing']}). Pass --activation_checkpointing {mode}, or write false there."
        )
