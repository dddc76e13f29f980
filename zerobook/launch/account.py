"""The account of a launch: the effect of each key of the Accelerate YAML and of the DeepSpeed JSON.

`zerobook doctor` and ``--dry-run`` print it if the launch has no problems. Keys that are unknown or refused are problems.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.launch import accelerate_file, deepspeed_json, deepspeed_keys
from zerobook.launch.accelerate_cli import typed_flags
from zerobook.launch.fsdp_settings import VERSION_1
from zerobook.launch.model_facts import list_modules
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils.terminal import make_table

USED = "used"
WRITTEN_BY_ZEROBOOK = "checkpoints and the final model are written by Zerobook"
# Keys of the Accelerate YAML that are never used -> why.
UNUSED = {
    "main_training_function": "it is for TPUs and notebooks",
    "downcast_bf16": "it is for TPUs",
    "tpu_use_cluster": "it is for TPUs",
    "tpu_use_sudo": "it is for TPUs",
    "fsdp_state_dict_type": WRITTEN_BY_ZEROBOOK,
    "zero3_save_16bit_model": WRITTEN_BY_ZEROBOOK,
    "parallelism_config_sp_attn_implementation": "Zerobook splits the attention of the recipe's attn_implementation",
    **VERSION_1,
}
# Settings of ``zero_optimization`` that are never used -> why.
UNUSED_IN_ZERO = {
    "load_from_fp32_weights": WRITTEN_BY_ZEROBOOK,
    "stage3_gather_16bit_weights_on_model_save": WRITTEN_BY_ZEROBOOK,
    "stage3_gather_fp16_weights_on_model_save": WRITTEN_BY_ZEROBOOK,
    "gather_16bit_weights_on_model_save": WRITTEN_BY_ZEROBOOK,
}
# Settings of ``zero_optimization`` that stage 3 alone reads, beside those that begin with ``stage3_``.
STAGE_3_KEYS = {
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
}
# Settings of ``zero_optimization`` that stages 1 and 2 alone read.
STAGES_1_AND_2_KEYS = {
    "allgather_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "ignore_unused_parameters",
    "round_robin_gradients",
    "parameter_alignment",
}
# Settings of an offload section that have an effect with NVMe only.
NVME_KEYS = {"nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"}
# Root keys of a DeepSpeed JSON that have an effect only if processes share the tokens of a row.
SEQUENCE_PARALLEL_KEYS = ("sequence_parallel_size", "seq_parallel_communication_data_type")
# Key of strategy files -> the recipe's key for the same setting.
RECIPE_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}
# Section of the Accelerate YAML -> the kind of strategy that reads it.
STRATEGY_OF_SECTION = {"deepspeed_config": "deepspeed", "fsdp_config": "fsdp"}


class Entry(NamedTuple):
    """The effect of one setting.

    Attributes:
        source: the file that has the setting.
        key: the dotted path of its key.
        value: as written in the file.
        effect: a text that begins with ``used``, ``filled in``, ``overridden`` or ``no effect``.
    """

    source: str
    key: str
    value: Any
    effect: str


def entries(plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources, *, flags: list[str] | None) -> list[Entry]:
    """Return an entry for each setting in the files of a launch.

    Args:
        plan: the resolved launch. Its list of problems must be empty.
        config: the resolved config of the recipe.
        sources: where each value of the config comes from.
        flags: arguments of ``accelerate launch``, with the script; None if another launcher started the processes.
    """
    account: list[Entry] = []
    yaml_file = accelerate_file.path_in_flags(flags)
    if yaml_file is not None:
        typed = typed_flags(flags or [])
        for path, value in _iterate_leaves(accelerate_file.load(yaml_file)):
            effect = _find_effect_in_yaml(path, value, plan, config, sources, typed)
            account.append(Entry(yaml_file, ".".join(path), value, effect))
    if plan.config_file is not None and Path(plan.config_file).is_file():
        # Read the file again, since the values in ``plan.deepspeed_config`` are filled in already.
        for path, value in _iterate_leaves(deepspeed_keys.load(plan.config_file, [])):
            effect = _find_effect_in_json(path, value, plan, config, sources)
            account.append(Entry(plan.config_file, ".".join(path), value, effect))
    return account


def table(entries: list[Entry]) -> Table:
    """Return the account as a table with a section for each file."""
    rows = make_table("settings of the strategy", ("key", "value", "effect"))
    styles = {"no": "dim", "overridden:": "yellow"}
    for source in dict.fromkeys(entry.source for entry in entries):
        rows.add_section()
        rows.add_row(source, "", "", style="bold")
        for entry in entries:
            if entry.source == source:
                # Other first words, such as used and filled, have no style.
                style = styles.get(entry.effect.split()[0], "")
                rows.add_row(f"  {entry.key}", json.dumps(entry.value, default=str), entry.effect, style=style)
    return rows


def _iterate_leaves(content: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of each key of nested objects whose value is not an object with keys."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _iterate_leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _is_equal(value: object, other: object) -> bool:
    """Return whether two settings have the same text, apart from upper case."""
    return str(value).lower() == str(other).lower()


def _find_effect_in_yaml(
    path: tuple[str, ...],
    value: Any,
    plan: LaunchPlan,
    config: RecipeConfig,
    sources: ConfigSources,
    typed: dict[str, Any],
) -> str:
    """Return the effect of one key of the Accelerate YAML.

    Args:
        path: the key, after the keys of its sections.
        typed: the launcher's flags on the command line, which override the file.
    """
    section = path[0]
    key = path[-1]
    if section == "fsdp_config" and not key.startswith("fsdp"):
        # accelerate takes the key with the prefix and without it.
        key = f"fsdp_{key}"
    if value is None or value == {}:
        return "no effect: it is empty"
    # The section belongs to a strategy that this launch does not have.
    if len(path) > 1 and STRATEGY_OF_SECTION.get(section, plan.kind) != plan.kind:
        return f"no effect: the strategy is {plan.name}"
    if key in UNUSED:
        return f"no effect: {UNUSED[key]}"
    if key in typed and not _is_equal(typed[key], value):
        return f"overridden: --{key} {typed[key]}"
    if key == "mixed_precision" and not _is_equal(value, plan.precision):
        return f"overridden: {plan.precision}, from {plan.precision_source}"
    # accelerate's DeepSpeed section repeats some settings of the recipe. The recipe's values are used.
    if key in RECIPE_KEYS and section == "deepspeed_config":
        if value == "auto":
            return f"filled in: {_describe_recipe_value(key, config, sources)}"
        recipe_value = getattr(config, RECIPE_KEYS[key])
        # 1 and 1.0 are equal as numbers, and "1.0" and 1.0 as texts.
        if value != recipe_value and not _is_equal(value, recipe_value):
            return f"overridden: {_describe_recipe_value(key, config, sources)}"
    # The file can only turn activation checkpointing on or off. The recipe chooses among several modes.
    mode = config.activation_checkpointing
    if key == "fsdp_activation_checkpointing" and bool(value) != (mode != "none"):
        return f"overridden: {mode}, activation_checkpointing from {sources['activation_checkpointing']}"
    return USED


def _describe_recipe_value(strategy_key: str, config: RecipeConfig, sources: ConfigSources) -> str:
    """Return the recipe's value of a setting, and where the value is from."""
    key = RECIPE_KEYS[strategy_key]
    return f"{getattr(config, key)}, {key} from {sources[key]}"


def _find_effect_in_json(
    path: tuple[str, ...], value: Any, plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources
) -> str:
    """Return the effect of one key of the DeepSpeed JSON: whether DeepSpeed's engine gets its value, or another value.

    Args:
        path: the key, after the keys of its sections.
    """
    root = path[0]
    key = path[-1]
    reason = _explain_no_effect(path, value, plan)
    if reason is not None:
        return f"no effect: {reason}"
    if path[:2] == ("zero_optimization", "leaf_module"):
        return _find_effect_of_leaf_modules(key, value, config)
    # Deprecated keys: some of zero_optimization, and the root section bfloat16. Keys inside of bfloat16 are not listed
    # themselves; the section is read as bf16.
    if value is False and key in deepspeed_json.REPLACEMENTS:
        return "no effect: it is off"
    if key in deepspeed_json.REPLACEMENTS or root in deepspeed_json.REPLACEMENTS:
        return f"used: read as {deepspeed_json.REPLACEMENTS.get(key, 'bf16')}, which replaced it"
    # If all parameters of the section are auto and the run has no warm-up, the recipe's schedule takes its place, and the plan
    # lacks the section. This counts as filled in for each key, also for the type, which is not auto.
    if root == "scheduler" and root not in (plan.deepspeed_config or {}):
        return f"filled in: {config.lr_scheduler_type}, lr_scheduler_type from {sources['lr_scheduler_type']}"
    # Look up the value that DeepSpeed's engine gets.
    engine_value: Any = plan.deepspeed_config
    for part in path:
        engine_value = engine_value.get(part) if isinstance(engine_value, dict) else None
    if path == ("gradient_clipping",):
        # For the norm 0, which means no clipping, the engine gets a norm that is never reached.
        engine_value = config.max_grad_norm
    is_auto = value == "auto"
    # accelerate fills in the remaining auto values when it knows the model.
    if is_auto and engine_value in ("auto", None):
        return "filled in: when the model and the data are loaded"
    if engine_value == value:
        return USED
    description = json.dumps(engine_value)
    if len(path) == 1 and root in RECIPE_KEYS:
        description = _describe_recipe_value(root, config, sources)
    elif root in ("fp16", "bf16"):
        description = f"{description}, precision {plan.precision} from {plan.precision_source}"
    if is_auto:
        return f"filled in: {description}"
    return f"overridden: {description}"


def _explain_no_effect(path: tuple[str, ...], value: Any, plan: LaunchPlan) -> str | None:
    """Return why a key of the DeepSpeed JSON has no effect in this launch; None if it has one."""
    root = path[0]
    key = path[-1]
    if root in deepspeed_keys.WITHOUT_EFFECT:
        return deepspeed_keys.WITHOUT_EFFECT[root]
    # A refused key that is on is a problem, and this launch has no problems. So the key is off.
    if root in deepspeed_keys.REFUSED:
        return "it is off"
    if value is None or value == {}:
        return "it is empty"
    if root in ("fp16", "bf16") and key != "enabled" and plan.precision != root:
        return f"the precision is {plan.precision}"
    if root in SEQUENCE_PARALLEL_KEYS and plan.sequence == 1:
        return "parallelism_config_sp_size is 1"
    if root == "aio" and "nvme" not in (plan.offload_optimizer, plan.offload_param):
        return "nothing is offloaded to NVMe"
    # adam_w_mode false would add the decay to the gradient, but has no effect with the type AdamW.
    if root == "optimizer" and key == "adam_w_mode" and value is False:
        optimizer = (plan.deepspeed_config or {}).get("optimizer") or {}
        if str(optimizer.get("type")).lower() == "adamw":
            return "the type is AdamW, which decays weights apart from the gradient"
    if root == "zero_optimization" and len(path) > 1:
        return _explain_no_effect_in_zero(path[1], key, plan)
    return None


def _explain_no_effect_in_zero(setting: str, key: str, plan: LaunchPlan) -> str | None:
    """Return why a key of ``zero_optimization`` has no effect in this launch; None if it has one.

    Args:
        setting: a key of ``zero_optimization``, which may have an object as its value.
        key: a key of that object; else the setting itself.
    """
    if setting in UNUSED_IN_ZERO:
        return UNUSED_IN_ZERO[setting]
    # Only stage 3 reads some settings, and only stages 1 and 2 read others.
    is_of_other_stage = setting.startswith("stage3_") or setting in STAGE_3_KEYS | deepspeed_keys.stage_3_names()
    if plan.zero_stage == 3:
        is_of_other_stage = setting in STAGES_1_AND_2_KEYS
    if is_of_other_stage:
        return f"the stage is {plan.zero_stage}"
    if setting in ("offload_optimizer", "offload_param") and key != "device":
        device = getattr(plan, setting)
        if device == "none" or (key in NVME_KEYS and device != "nvme"):
            return f"the device is {device}"
    return None


def _find_effect_of_leaf_modules(key: str, value: Any, config: RecipeConfig) -> str:
    """Return the effect of a list of ``zero_optimization.leaf_module``.

    Args:
        key: the list: ``classes``, ``names`` or ``name_suffixes``.
        value: names of modules, of their classes, or ends of names.
    """
    names = [value] if isinstance(value, str) else list(value or [])
    modules = list_modules(config)
    # If the model's class is not known here, the names cannot be checked.
    if modules is None:
        return USED
    absent = [name for name in names if not _has_module(modules, key, name)]
    if len(absent) == len(names):
        return "no effect: the model has no such module"
    return f"used, without {', '.join(absent)}: the model has no such module" if absent else USED


# ``modules``: module name -> class. ``key`` says how ``name`` names a module, see `_find_effect_of_leaf_modules`.
def _has_module(modules: dict[str, type], key: str, name: str) -> bool:
    if key == "classes":
        return any(name in (module.__name__, f"{module.__module__}.{module.__name__}") for module in modules.values())
    if key == "names":
        return name in modules
    return any(module_name.endswith(name) for module_name in modules)
