"""Groups of processes that share the tokens of a row: read from the Accelerate YAML, and checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zerobook.config import ConfigDraft
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils.environment import is_true

_WAYS = {
    "sp": ("deepspeed", "DeepSpeed-Ulysses", "DeepSpeed ZeRO", "zero3_sequence"),
    "cp": ("fsdp", "context parallelism", "FSDP2", "fsdp_context"),
}
"""Key of accelerate's sizes -> (kind of strategy, name, what it runs under, strategy file)."""
_IN_JSON = "sequence_parallel_size"


def read(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read the sizes of the groups into ``plan``. Call it after the rest of the strategy file was read."""
    size_in_json = (plan.deepspeed_config or {}).get(_IN_JSON)
    if is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        _read_sizes(plan, environ)
    if size_in_json not in (None, plan.sequence):
        plan.problems.append(
            f"{plan.config_file}: {_IN_JSON} is {json.dumps(size_in_json)}, and parallelism_config_sp_size of the Accelerate "
            f"YAML is {plan.sequence}. Remove it from the JSON; the YAML's size is used."
        )
    if plan.deepspeed_config is not None and plan.sequence > 1:
        # ZeRO-3 reads it while the model is loaded, before there are groups.
        plan.deepspeed_config[_IN_JSON] = plan.sequence
    _check_combination(plan)


def _read_sizes(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    for key, (kind, way, under, file) in _WAYS.items():
        size = int(environ.get(f"PARALLELISM_CONFIG_{key.upper()}_SIZE", 1))
        where = f"parallelism_config.parallelism_config_{key}_size: {size}"
        if size == 1:
            continue
        if size < 1:
            plan.problems.append(f"{where}, expected the number of processes that share a row. Write 1 or more.")
        elif plan.kind != kind:
            plan.problems.append(
                f"{where}; {way} runs under {under}, and this launch is {plan.name}. Launch with "
                f"accelerate_configs/{file}.yaml, or set it to 1."
            )
        elif plan.world_size % size:
            fitting = -(-plan.world_size // size) * size
            plan.problems.append(
                f"{where}; groups of {size} do not divide {plan.world_size} processes. Pass --num_processes {fitting}, or "
                "write a size that does."
            )
        elif key == "sp":
            plan.sequence = size
        else:
            plan.context = size


def _check_combination(plan: LaunchPlan) -> None:
    zero = (plan.deepspeed_config or {}).get("zero_optimization", {})
    if plan.sequence > 1 and plan.zero_stage == 3 and zero.get("reduce_scatter") is False:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.reduce_scatter is false with sequence {plan.sequence}; DeepSpeed 0.19.8 "
            "then averages the gradients of large and small tensors differently. Remove it."
        )
    if plan.sequence > 1 and (plan.secondary > 1 or zero.get("zero_quantized_gradients")):
        plan.problems.append(
            f"{plan.config_file}: ZeRO++ (zero_hpz_partition_size, zero_quantized_gradients) with sequence {plan.sequence} is "
            "not supported. Remove ZeRO++ from the JSON, or set parallelism_config_sp_size to 1."
        )
    if plan.context > 1 and plan.replicate > 1:
        plan.problems.append(
            f"parallelism_config: {plan.replicate} replicas with context {plan.context} are not supported. Set "
            "parallelism_config_dp_replicate_size or parallelism_config_cp_size to 1."
        )


def check(plan: LaunchPlan, draft: ConfigDraft[Any], facts: Mapping[str, Any] | None) -> None:
    """Add problems if the recipe, or a model whose config.json is on this machine, cannot train on a part of each row's tokens.

    Args:
        facts: the model's config.json; None if it is not on this machine.
    """
    config = draft.config
    size = plan.sequence * plan.context
    if size == 1:
        return
    flag = config.rows_shared_by
    if flag:
        plan.problems.append(
            f"{flag}: {plan.name} splits rows among {size} processes without masks, so samples that share a row would see "
            f"each other. Pass --{flag} false (and --group_by_length to pad less)."
        )
    if config.attn_implementation not in ("auto", "sdpa"):
        plan.problems.append(
            f"attn_implementation: {config.attn_implementation} (from {draft.sources['attn_implementation']}), and {plan.name} "
            "splits rows under sdpa only, which runs the flash kernels on GPUs. Use auto or sdpa."
        )
    elif config.attn_implementation == "auto":
        draft.set(f"{plan.name}: auto", attn_implementation="sdpa")
    if facts:
        plan.problems += unfit_for_split(plan, facts)
    multiple = 2 * size if plan.context > 1 else size
    plan.notes.append(f"{size} processes share the tokens of each row, which is padded to a multiple of {multiple}")


def unfit_for_split(plan: LaunchPlan, facts: Mapping[str, Any], *, complete: bool = False) -> list[str]:
    """Return why a model cannot train on a part of each row's tokens, as far as its config says.

    Args:
        facts: the model's config.json.
        complete: they are all values of transformers' config, which fills in what a config.json lacks.
    """
    if plan.sequence * plan.context == 1:
        return []
    problems = []
    facts = {**facts, **(facts.get("text_config") or {})}
    if facts.get("is_encoder_decoder"):
        problems.append(f"model: it is an encoder-decoder, and {plan.name} splits the rows of decoders only. Use another file.")
    kinds = set(facts.get("layer_types") or []) - {"full_attention"}
    if not facts.get("layer_types") and facts.get("sliding_window") and facts.get("use_sliding_window", True):
        kinds.add(f"sliding window of {facts['sliding_window']} tokens")
    if kinds:
        problems.append(
            f"model: it has attention other than full ({', '.join(sorted(kinds))}), and {plan.name} has no masks for split "
            "rows. Use a strategy file that does not split rows."
        )
    heads = {key: facts[key] for key in ("num_attention_heads", "num_key_value_heads") if facts.get(key)}
    indivisible = ", ".join(f"{key} {count}" for key, count in heads.items() if count % plan.sequence)
    if indivisible:
        problems.append(
            f"parallelism_config_sp_size: {plan.sequence * plan.context} processes share the heads of each layer, and do not "
            f"divide {indivisible}. Set a size that does, or use accelerate_configs/fsdp_context.yaml, which does not split "
            "heads."
        )
    if complete and plan.sequence > 1 and len(heads) < 2:
        problems.append(
            f"model: DeepSpeed 0.19.8 splits heads by num_attention_heads and num_key_value_heads, which the config of a "
            f"{facts.get('model_type')} model does not have. Use accelerate_configs/fsdp_context.yaml, which does not split "
            "heads."
        )
    dropout = max(float(facts.get("attention_dropout") or 0), float(facts.get("attn_pdrop") or 0))
    if plan.context > 1 and dropout:
        problems.append(
            f"model: its config asks for attention dropout of {dropout:g}, which {plan.name} does not have. Set it to 0 in the "
            "model's config.json."
        )
    return problems
