"""Tensor and expert parallelism: read from the Accelerate YAML, and checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerobook.config import ConfigDraft
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils.environment import is_true

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WAYS = {
    "tp": ("tensor", "tensor parallelism", "processes that share every weight matrix", "fsdp_tensor"),
    "ep": ("experts", "expert parallelism", "processes that share the experts of each layer", "fsdp_experts"),
}
"""Key of a size -> (field of `LaunchPlan`, name, what it counts, strategy file)."""
_EXPERTS_OF_A_LAYER = ("num_local_experts", "num_experts", "n_routed_experts")


def read(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read the sizes into ``plan``. Call it after the rest of the strategy file was read."""
    if not is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        return
    for key, (field, way, counts, file) in _WAYS.items():
        size = environ.get(f"PARALLELISM_CONFIG_{key.upper()}_SIZE", "1")
        where = f"parallelism_config.parallelism_config_{key}_size: {size}"
        if size == "1":
            continue
        if not size.isdigit() or size == "0":
            plan.problems.append(f"{where}, expected the number of {counts}. Write 1 or more.")
        elif plan.kind != "fsdp":
            plan.problems.append(
                f"{where}; {way} runs under FSDP2, and this launch is {plan.name}. Launch with accelerate_configs/{file}.yaml, "
                "or set it to 1."
            )
        elif plan.world_size % int(size):
            fitting = -(-plan.world_size // int(size)) * int(size)
            plan.problems.append(
                f"{where}; groups of {size} do not divide {plan.world_size} processes. Pass --num_processes {fitting}, or "
                "write a size that does."
            )
        else:
            setattr(plan, field, int(size))
    if plan.loaded_in_parts:
        plan.shard = plan.world_size // plan.tensor
        _check_combination(plan)


def _check_combination(plan: LaunchPlan) -> None:
    is_combined_with = {
        f"expert parallelism ({plan.experts})": plan.experts > 1 and plan.tensor > 1,
        f"context parallelism ({plan.context})": plan.context > 1,
        f"{plan.replicate} replicas": plan.replicate > 1,
        "fsdp_offload_params": plan.offload_param != "none",
    }
    combined = [setting for setting, is_used in is_combined_with.items() if is_used]
    if combined:
        plan.problems.append(
            f"parallelism_config: {plan.name} together with {' and '.join(combined)} is not supported. Keep one of them."
        )


def check(plan: LaunchPlan, draft: ConfigDraft[Any], facts: Mapping[str, Any] | None) -> None:
    """Add problems if the recipe, or a model whose config.json is on this machine, cannot be trained in parts.

    Args:
        facts: the model's config.json; None if it is not on this machine.
    """
    if not plan.loaded_in_parts:
        return
    if draft.config.trains_adapters:
        plan.problems.append(
            f"{plan.name}: adapters are not supported: peft 0.21.2 adds whole matrices to layers that hold a part. Launch with "
            "accelerate_configs/fsdp.yaml or zero3.yaml, or train all weights with recipes/causal_lm.py."
        )
    if plan.precision == "fp16":
        plan.problems.append(
            f"mixed_precision: fp16 (from {plan.precision_source}) is not supported under {plan.name}: torch unscales "
            "gradients of one kind of sharding only. Use bf16 or no."
        )
    if facts:
        plan.problems += _indivisible(plan, facts)


def _indivisible(plan: LaunchPlan, facts: Mapping[str, Any]) -> list[str]:
    """Return a problem for each size of parts that does not divide what the model has."""
    facts = {**facts, **(facts.get("text_config") or {})}
    if facts.get("is_encoder_decoder"):
        return [f"model: it is an encoder-decoder, and {plan.name} trains decoders only. Use another strategy file."]
    heads = {key: facts[key] for key in ("num_attention_heads", "num_key_value_heads") if facts.get(key)}
    experts = {key: facts[key] for key in _EXPERTS_OF_A_LAYER if facts.get(key)}
    problems = []
    for key, size, counts in (("tp", plan.tensor, heads), ("ep", plan.experts, experts)):
        indivisible = ", ".join(f"{name} {count}" for name, count in counts.items() if count % size)
        if indivisible:
            problems.append(
                f"parallelism_config_{key}_size: {size} processes do not divide {indivisible}. Set a size that does."
            )
    return problems


def unfit_for_parts(plan: LaunchPlan, config: PreTrainedConfig) -> list[str]:
    """Return why a model cannot be trained in parts.

    Args:
        config: transformers' config of the model, which says how its weights are divided.
    """
    if not plan.loaded_in_parts:
        return []
    problems = _indivisible(plan, config.to_dict())
    if problems:
        return problems
    from transformers import __version__

    text = config.get_text_config(decoder=True)
    key = "tp" if plan.tensor > 1 else "ep"
    styles: dict[str, str] = getattr(text, f"base_model_{key}_plan") or {}
    packed = sorted(name for name, style in styles.items() if key == "tp" and style.startswith("packed"))
    if not styles:
        problems.append(
            f"model: transformers {__version__} has no base_model_{key}_plan for {config.model_type} models, by which "
            f"{plan.name} divides the weights. Launch with accelerate_configs/fsdp.yaml or zero3.yaml."
        )
    elif packed:
        problems.append(
            f"model: {plan.name} would cut {', '.join(packed)} into parts of several ranges, which checkpoints cannot hold. "
            "Launch with accelerate_configs/fsdp_experts.yaml if it is a mixture of experts, else fsdp.yaml or zero3.yaml."
        )
    return problems
