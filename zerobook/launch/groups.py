"""Groups of processes that share the tokens of a row, each weight matrix, or the experts of a layer.

Their sizes are read from the Accelerate YAML, and checked before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from zerobook.config_sources import ConfigDraft
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils.environment import is_true
from zerobook.utils.model_config import auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GroupKind(NamedTuple):
    """A kind of group.

    Attributes:
        field: the field of `LaunchPlan` for the size.
        strategy: the kind of strategy that the groups need.
        requirement: a clause that says so.
        file: the name of a shipped strategy file with such groups.
    """

    field: str
    strategy: str
    requirement: str
    file: str


# Abbreviation in the YAML's key of a size -> the kind of group. accelerate itself does not know ep.
_GROUP_KINDS = {
    "sp": GroupKind("sequence", "deepspeed", "DeepSpeed-Ulysses runs under DeepSpeed ZeRO", "zero3_sequence"),
    "cp": GroupKind("context", "fsdp", "context parallelism runs under FSDP2", "fsdp_context"),
    "tp": GroupKind("tensor", "fsdp", "tensor parallelism runs under FSDP2", "fsdp_tensor"),
    "ep": GroupKind("experts", "fsdp", "expert parallelism runs under FSDP2", "fsdp_experts"),
}
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SEQUENCE_KEY_OF_JSON = "sequence_parallel_size"


def read(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read the sizes of the groups into ``plan``. Call it after the rest of the strategy file was read."""
    size_in_json = (plan.deepspeed_config or {}).get(_SEQUENCE_KEY_OF_JSON)
    if is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        for key, group_kind in _GROUP_KINDS.items():
            _read_size(plan, key, group_kind, environ.get(f"PARALLELISM_CONFIG_{key.upper()}_SIZE", "1"))
    # Only the YAML sets the size.
    if size_in_json not in (None, plan.sequence):
        plan.problems.append(
            f"{plan.config_file}: {_SEQUENCE_KEY_OF_JSON} is {json.dumps(size_in_json)}, and parallelism_config_sp_size of the "
            f"Accelerate YAML is {plan.sequence}. Remove it from the JSON; the YAML's size is used."
        )
    if plan.deepspeed_config is not None and plan.sequence > 1:
        # ZeRO-3 reads the size while the model is loaded, before the groups are made.
        plan.deepspeed_config[_SEQUENCE_KEY_OF_JSON] = plan.sequence
    if plan.is_loaded_in_parts:
        plan.shard = plan.world_size // plan.tensor
    _check_combination(plan)


def _read_size(plan: LaunchPlan, key: str, group_kind: GroupKind, size: str) -> None:
    """Write the size of the groups of one kind into ``plan``, or add a problem. ``key`` is a key of `_GROUP_KINDS`."""
    where = f"parallelism_config.parallelism_config_{key}_size: {size}"
    if size == "1":
        return
    if not size.isdigit() or size == "0":
        plan.problems.append(f"{where}, expected the number of processes of a group. Write 1 or more.")
    elif plan.kind != group_kind.strategy:
        plan.problems.append(
            f"{where}; {group_kind.requirement}, and this launch is {plan.name}. Launch with "
            f"accelerate_configs/{group_kind.file}.yaml, or set it to 1."
        )
    elif plan.world_size % int(size):
        # The next larger number of processes that can be divided into groups of this size.
        fitting = -(-plan.world_size // int(size)) * int(size)
        plan.problems.append(
            f"{where}; groups of {size} do not divide {plan.world_size} processes. Pass --num_processes {fitting}, or "
            "write a size that does."
        )
    else:
        setattr(plan, group_kind.field, int(size))


def _check_combination(plan: LaunchPlan) -> None:
    """Add problems if the groups cannot be combined with each other or with other settings of the strategy."""
    zero = (plan.deepspeed_config or {}).get("zero_optimization", {})
    if plan.sequence > 1 and plan.zero_stage == 3 and zero.get("reduce_scatter") is False:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.reduce_scatter is false with sequence {plan.sequence}; DeepSpeed 0.19.8 "
            "then averages the gradients of large and small tensors differently. Remove it."
        )
    uses_zero_plus_plus = plan.secondary > 1 or bool(zero.get("zero_quantized_gradients"))
    # Setting -> whether groups are combined with it that do not support it.
    is_combined_with = {
        "ZeRO++ (zero_hpz_partition_size, zero_quantized_gradients)": plan.sequence > 1 and uses_zero_plus_plus,
        f"expert parallelism ({plan.experts})": plan.experts > 1 and plan.tensor > 1,
        f"context parallelism ({plan.context})": plan.context > 1 and plan.is_loaded_in_parts,
        f"{plan.replicate} replicas": plan.replicate > 1 and (plan.is_loaded_in_parts or plan.context > 1),
        "fsdp_offload_params": plan.offload_param != "none" and plan.is_loaded_in_parts,
        # transformers frees the gathered weights after each layer, whatever the file says.
        "fsdp_reshard_after_forward false": not plan.reshards and plan.is_loaded_in_parts,
    }
    if plan.is_loaded_in_parts:
        from transformers.distributed import DistributedConfig

        # Versions without this field load a model in parts in another way than `ModelParallelStrategy` expects.
        if "ep_size" not in DistributedConfig.__dataclass_fields__:
            plan.problems.append(
                f"{plan.config_file}: {plan.name} needs transformers 5.20 or newer, and {version('transformers')} is here. "
                "Install a newer one (pip install --upgrade transformers), or launch with accelerate_configs/fsdp.yaml."
            )
    settings = [setting for setting, is_combined in is_combined_with.items() if is_combined]
    if settings:
        plan.problems.append(
            f"parallelism_config: {plan.name} together with {' and '.join(settings)} is not supported. Keep one of them."
        )


def check(plan: LaunchPlan, draft: ConfigDraft[Any], facts: Mapping[str, Any] | None) -> None:
    """Add problems if the recipe or the model cannot be trained in the groups of ``plan``.

    Args:
        facts: the model's config.json; None if it is not on this machine.
    """
    config = draft.config
    if plan.sequence > 1 or plan.context > 1:
        _check_split_rows(plan, draft)
    if plan.is_loaded_in_parts and config.trains_adapters:
        plan.problems.append(
            f"{plan.name}: adapters are not supported: peft 0.21.2 adds complete matrices to layers of which each rank holds "
            "a part. Launch with accelerate_configs/fsdp.yaml or zero3.yaml, or train all weights with recipes/causal_lm.py."
        )
    if plan.is_loaded_in_parts and plan.precision == "fp16":
        plan.problems.append(
            f"mixed_precision: fp16 (from {plan.precision_source}) is not supported under {plan.name}: torch unscales "
            "gradients of one kind of sharding only. Use bf16 or no."
        )
    if facts:
        plan.problems += find_group_problems(plan, facts)


def _check_split_rows(plan: LaunchPlan, draft: ConfigDraft[Any]) -> None:
    """Add problems if the recipe cannot be trained on rows that several processes share.

    Choose sdpa if its attention is auto.
    """
    config = draft.config
    # The number of processes that share a row. At most one of the two sizes is above 1.
    size = plan.sequence * plan.context
    # Packed rows need masks that isolate their samples from each other.
    flag = config.rows_shared_by
    if flag:
        plan.problems.append(
            f"{flag}: {plan.name} splits rows among {size} processes without masks, so samples that share a row would see "
            f"each other. Pass --{flag} false (and --group_by_length to pad less)."
        )
    if config.attn_implementation not in ("auto", "sdpa"):
        plan.problems.append(
            f"attn_implementation: {config.attn_implementation} (from {draft.sources['attn_implementation']}), and "
            f"{plan.name} splits rows under sdpa only, which runs the flash kernels on GPUs. Use auto or sdpa."
        )
    elif config.attn_implementation == "auto":
        draft.set(f"{plan.name}: auto", attn_implementation="sdpa")
    # Context parallelism gives each process two parts of a row.
    multiple = 2 * size if plan.context > 1 else size
    plan.notes.append(f"{size} processes share the tokens of each row, which is padded to a multiple of {multiple}")


def find_group_problems(plan: LaunchPlan, facts: Mapping[str, Any]) -> list[str]:
    """Return the reasons in a model's config why the model cannot be trained in the groups of ``plan``.

    Args:
        facts: the model's config.json, or all values of transformers' config, which fills in what a config.json lacks.
    """
    splits_rows = plan.sequence * plan.context > 1
    if not splits_rows and not plan.is_loaded_in_parts:
        return []
    # Of a composite model, only the text model is trained.
    facts = {**facts, **(facts.get("text_config") or {})}
    if facts.get("is_encoder_decoder"):
        return [f"model: it is an encoder-decoder, and {plan.name} trains decoders only. Use another strategy file."]
    problems = []
    heads = {key: facts[key] for key in _HEAD_COUNTS if facts.get(key)}
    experts = {key: facts[key] for key in _EXPERT_COUNTS if facts.get(key)}
    # Sequence and tensor parallelism divide the heads among the processes, and expert parallelism divides the experts.
    for key, size, counts in (("sp", plan.sequence, heads), ("tp", plan.tensor, heads), ("ep", plan.experts, experts)):
        indivisible = ", ".join(f"{name} {count}" for name, count in counts.items() if count % size)
        if indivisible:
            problems.append(
                f"parallelism_config_{key}_size: {size} processes do not divide {indivisible}. Set a size that does."
            )
    if not splits_rows:
        return problems
    # Attention to a window or a chunk of the tokens needs a mask, and split rows have no masks.
    kinds = set(facts.get("layer_types") or []) - {"full_attention", "mlp", "moe"}
    if not facts.get("layer_types") and facts.get("sliding_window") and facts.get("use_sliding_window", True):
        kinds.add(f"sliding window of {facts['sliding_window']} tokens")
    if kinds:
        problems.append(
            f"model: it has attention other than full ({', '.join(sorted(kinds))}), and {plan.name} has no masks for split "
            "rows. Use a strategy file that does not split rows."
        )
    dropout = max(float(facts.get("attention_dropout") or 0), float(facts.get("attn_pdrop") or 0))
    if plan.context > 1 and dropout:
        problems.append(
            f"model: its config asks for attention dropout of {dropout:g}, which {plan.name} does not have. Set it to 0 in the "
            "model's config.json."
        )
    return problems


def find_config_problems(plan: LaunchPlan, config: PreTrainedConfig) -> list[str]:
    """Return the reasons why a model cannot be trained in the groups of ``plan``.

    Args:
        config: transformers' config of the model. Unlike config.json, it says how the weights can be divided.
    """
    text_config = config.get_text_config(decoder=True)
    facts = config.to_dict()
    # The config of a recurrent model computes layer_types, which to_dict leaves out.
    facts["text_config"] = (facts.get("text_config") or {}) | {"layer_types": getattr(text_config, "layer_types", None)}
    problems = find_group_problems(plan, facts)
    model_class = auto_class(type(config), encoder_decoder=False)._model_mapping.get(type(config), None)
    has_sdpa = getattr(model_class, "_supports_sdpa", True) and hasattr(text_config, "num_attention_heads")
    if plan.sequence * plan.context > 1 and not has_sdpa:
        problems.append(
            f"model: transformers has no sdpa attention with num_attention_heads for {config.model_type} models, and "
            f"{plan.name} splits rows under it only. Use a strategy file that does not split rows."
        )
    elif plan.sequence > 1 and not all(getattr(text_config, key, None) for key in _HEAD_COUNTS):
        problems.append(
            f"model: DeepSpeed 0.19.8 splits heads by {' and '.join(_HEAD_COUNTS)}, which the config of a {config.model_type} "
            "model does not have. Use accelerate_configs/fsdp_context.yaml, which does not split heads."
        )
    # transformers divides the weights under tensor and expert parallelism only.
    if plan.is_loaded_in_parts and not problems:
        problems += _find_division_problems(plan, config.model_type, text_config)
    return problems


def _find_division_problems(plan: LaunchPlan, model_type: str, text_config: PreTrainedConfig) -> list[str]:
    """Return the reasons why transformers cannot divide the weights of a model for tensor or expert parallelism."""
    from transformers import __version__

    key = "tp" if plan.tensor > 1 else "ep"
    # Pattern of names of weights -> how transformers divides them.
    styles: dict[str, str] = getattr(text_config, f"base_model_{key}_plan") or {}
    if not styles:
        return [
            f"model: transformers {__version__} has no base_model_{key}_plan for {model_type} models, by which "
            f"{plan.name} divides the weights. Launch with accelerate_configs/fsdp.yaml or zero3.yaml."
        ]
    packed_weights = sorted(name for name, style in styles.items() if key == "tp" and style.startswith("packed"))
    if packed_weights:
        return [
            f"model: {plan.name} would cut {', '.join(packed_weights)} into parts of several ranges, which checkpoints cannot "
            "hold. Launch with accelerate_configs/fsdp_experts.yaml if it is a mixture of experts, else fsdp.yaml or "
            "zero3.yaml."
        ]
    return []
