"""Quantised base weights that a strategy can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerobook.strategy.launch_plan import LaunchPlan


def refused_base(plan: LaunchPlan, said: str, base: str, storage: str = "float") -> str | None:
    """Return why a strategy cannot train beside a quantised base, and the way out; None if it can.

    Args:
        said: the config key and value that ask for it, at the beginning of the message.
        base: ``nf4`` or ``int8``.
        storage: dtype that 4-bit weights are packed in.
    """
    return None
