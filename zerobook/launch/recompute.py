"""Activation checkpointing that a strategy file turns on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerobook.config_sources import ConfigDraft
    from zerobook.strategy.launch_plan import LaunchPlan


def request(plan: LaunchPlan, file: str, key: str, mode: str, draft: ConfigDraft[Any]) -> None:
    """Set the draft's ``activation_checkpointing`` to ``mode``, or add a problem if the user chose a mode that does less.

    Args:
        file: the strategy file.
        key: the key of the file that turns activation checkpointing on.
        mode: ``full``; or ``offload``, which also keeps the inputs of layers in host memory.
    """
    current = draft.config.activation_checkpointing
    # offload includes full.
    if current in (mode, "offload"):
        return
    # The mode of the file may extend the user's choice of full, but must not replace another choice.
    if current == "full" or not draft.sources.is_set("activation_checkpointing"):
        draft.set(file, activation_checkpointing=mode)
    else:
        plan.problems.append(
            f"{file}: {key} is true, but activation_checkpointing is {current} (from "
            f"{draft.sources['activation_checkpointing']}). Pass --activation_checkpointing {mode}, or write false there."
        )
