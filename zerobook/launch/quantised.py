"""Strategies that cannot hold quantised base weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerobook.strategy.launch_plan import LaunchPlan


def explain_refused_base(plan: LaunchPlan, setting: str, base: str, storage: str = "float") -> str | None:
    """Return why a strategy cannot train adapters on a quantised base, with advice; None if it can.

    Args:
        setting: the beginning of the message, which says that the base is quantised.
        base: ``nf4`` or ``int8``.
        storage: dtype that 4-bit weights are packed in.
    """
    if base == "int8" and (plan.kind == "fsdp" or plan.zero_stage == 3):
        reason = "FSDP2 cannot make shards of bitsandbytes' int8 weights"
        if plan.kind == "deepspeed":
            reason = "bitsandbytes keeps int8 weights whole on every process beside the shards"
        return (
            f"{setting}, and {plan.name} does not support it: {reason} (seen with bitsandbytes 0.50.2). Use ZeRO-2 or DDP, or "
            "4-bit weights (load_in_4bit), which are sharded."
        )
    if plan.offload_param != "none" or plan.offload_optimizer == "nvme":
        return (
            f"{setting}, and {plan.name} moves parameters between devices and loses the quantisation state of the base "
            "weights. Use DDP, ZeRO-1, ZeRO-2 or FSDP without offload, or weights that are not quantised."
        )
    if base == "nf4" and plan.kind == "fsdp" and storage in ("uint8", "int8"):
        return (
            f"{setting}, packed in {storage} (bnb_4bit_quant_storage), and {plan.name} can only shard weights that are packed "
            "in a float dtype. Use ZeRO-3, ZeRO-2 or DDP, or take the model's version that is not quantised, with "
            "load_in_4bit."
        )
    return None
