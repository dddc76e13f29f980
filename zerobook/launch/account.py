"""The account of a launch's settings: what becomes of each key of the Accelerate YAML and of the DeepSpeed JSON.

`zerobook doctor` and ``--dry-run`` print it. Keys that are unknown or refused are problems of the launch, so an account is made
of launches without problems.
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
from zerobook.launch.model_facts import model_modules
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils.terminal import make_table

USED = "used"
WRITTEN_HERE = "checkpoints and the final model are written by Zerobook"
UNUSED = {
    "main_training_function": "it is for TPUs and notebooks",
    "downcast_bf16": "it is for TPUs",
    "tpu_use_cluster": "it is for TPUs",
    "tpu_use_sudo": "it is for TPUs",
    "fsdp_state_dict_type": WRITTEN_HERE,
    "zero3_save_16bit_model": WRITTEN_HERE,
    "parallelism_config_sp_attn_implementation": "Zerobook splits the attention of the recipe's attn_implementation",
    **VERSION_1,
}
"""Keys of the Accelerate YAML that are never used -> why."""
UNUSED_IN_ZERO = {
    "load_from_fp32_weights": WRITTEN_HERE,
    "stage3_gather_16bit_weights_on_model_save": WRITTEN_HERE,
    "stage3_gather_fp16_weights_on_model_save": WRITTEN_HERE,
    "gather_16bit_weights_on_model_save": WRITTEN_HERE,
}
"""Settings of ``zero_optimization`` that are never used -> why."""
OF_STAGE_3 = {
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
"""Settings of ``zero_optimization`` that stage 3 alone reads, beside those that begin with ``stage3_``."""
OF_STAGES_1_AND_2 = {
    "allgather_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "ignore_unused_parameters",
    "round_robin_gradients",
    "parameter_alignment",
}
"""Settings of ``zero_optimization`` that stages 1 and 2 alone read."""
OF_NVME = {"nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"}
"""Settings of an offload section that matter with NVMe only."""
OF_SEQUENCE_PARALLELISM = ("sequence_parallel_size", "seq_parallel_communication_data_type")
"""Root keys of a DeepSpeed JSON that matter where processes share the tokens of a row."""
RECIPE_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}
"""Keys of strategy files -> the recipe's keys for the same."""
STRATEGY_OF_SECTION = {"deepspeed_config": "deepspeed", "fsdp_config": "fsdp"}


class Entry(NamedTuple):
    """The effect of one setting.

    Attributes:
        source: the file that has it.
        key: its dotted path.
        value: as written there.
        effect: ``used``, or a sentence that begins with ``filled in``, ``overridden`` or ``no effect``.
    """

    source: str
    key: str
    value: Any
    effect: str


def entries(plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources, *, flags: list[str] | None) -> list[Entry]:
    """Return an entry for each setting of a launch without problems.

    Args:
        plan: the resolved launch.
        config: the resolved config of the recipe.
        sources: of its values.
        flags: arguments of ``accelerate launch``, with the script; None if another launcher started the processes.
    """
    account: list[Entry] = []
    yaml_file = accelerate_file.path_in_flags(flags)
    if yaml_file is not None:
        typed = typed_flags(flags or [])
        for path, value in _leaves(accelerate_file.load(yaml_file)):
            effect = _effect_in_yaml(path, value, plan, config, sources, typed)
            account.append(Entry(yaml_file, ".".join(path), value, effect))
    if plan.config_file is not None and Path(plan.config_file).is_file():
        # The file, and not ``plan.deepspeed_config``, in which the values are filled in already.
        for path, value in _leaves(deepspeed_keys.load(plan.config_file, [])):
            effect = _effect_in_json(path, value, plan, config, sources)
            account.append(Entry(plan.config_file, ".".join(path), value, effect))
    return account


def table(entries: list[Entry]) -> Table:
    """Return the account as a table, a section for each file."""
    rows = make_table("settings of the strategy", ("key", "value", "effect"))
    styles = {"no": "dim", "overridden:": "yellow"}
    for source in dict.fromkeys(entry.source for entry in entries):
        rows.add_section()
        rows.add_row(source, "", "", style="bold")
        for entry in entries:
            if entry.source == source:
                # An effect begins with used, filled in, overridden, or no effect.
                style = styles.get(entry.effect.split()[0], "")
                rows.add_row(f"  {entry.key}", json.dumps(entry.value, default=str), entry.effect, style=style)
    return rows


def _leaves(content: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of each key of nested objects that is not an object with keys itself."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _is_equal(value: object, other: object) -> bool:
    """Return whether two settings are written alike, apart from upper case."""
    return str(value).lower() == str(other).lower()


def _effect_in_yaml(
    path: tuple[str, ...],
    value: Any,
    plan: LaunchPlan,
    config: RecipeConfig,
    sources: ConfigSources,
    typed: dict[str, Any],
) -> str:
    """Return what becomes of a key of the Accelerate YAML.

    Args:
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
    # accelerate's DeepSpeed section repeats some settings of the recipe, whose values are used.
    if key in RECIPE_KEYS and section == "deepspeed_config":
        if value == "auto":
            return f"filled in: {_recipe_value(key, config, sources)}"
        if float(value) != float(getattr(config, RECIPE_KEYS[key]) or 0):
            return f"overridden: {_recipe_value(key, config, sources)}"
    # The file can only turn it on or off; the recipe has the kind.
    if key == "fsdp_activation_checkpointing" and bool(value) != (config.activation_checkpointing != "none"):
        chosen = f"{config.activation_checkpointing}, activation_checkpointing from {sources['activation_checkpointing']}"
        return f"overridden: {chosen}"
    return USED


def _recipe_value(strategy_key: str, config: RecipeConfig, sources: ConfigSources) -> str:
    """Return the value of the recipe's key for the same, and where it is from."""
    key = RECIPE_KEYS[strategy_key]
    return f"{getattr(config, key)}, {key} from {sources[key]}"


def _effect_in_json(path: tuple[str, ...], value: Any, plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources) -> str:
    """Return what becomes of a key of the DeepSpeed JSON: whether DeepSpeed's engine gets its value, or which one instead."""
    root = path[0]
    reason = _idle_reason(path, value, plan)
    if reason is not None:
        return f"no effect: {reason}"
    if path[:2] == ("zero_optimization", "leaf_module"):
        return _effect_of_leaf_modules(path[-1], value, config)
    if value is False and path[-1] in deepspeed_json.REPLACED:
        return "no effect: it is off"
    if path[-1] in deepspeed_json.REPLACED or root in deepspeed_json.REPLACED:
        return f"used: read as {deepspeed_json.REPLACED.get(path[-1], 'bf16')}, which replaced it"
    if root == "scheduler" and root not in (plan.deepspeed_config or {}):
        return f"filled in: {config.lr_scheduler_type}, lr_scheduler_type from {sources['lr_scheduler_type']}"
    engine_value: Any = plan.deepspeed_config
    for key in path:
        engine_value = engine_value.get(key) if isinstance(engine_value, dict) else None
    if path == ("gradient_clipping",):
        # A norm of 0 is written as one that is never reached.
        engine_value = config.max_grad_norm
    is_auto = value == "auto"
    # What is still auto is filled in by accelerate, which knows the model.
    if is_auto and engine_value in ("auto", None):
        return "filled in: when the model and the data are loaded"
    if engine_value == value:
        return USED
    text = json.dumps(engine_value)
    if len(path) == 1 and root in RECIPE_KEYS:
        text = _recipe_value(root, config, sources)
    elif root in ("fp16", "bf16"):
        text = f"{text}, precision {plan.precision} from {plan.precision_source}"
    if is_auto:
        return f"filled in: {text}"
    return f"overridden: {text}"


def _idle_reason(path: tuple[str, ...], value: Any, plan: LaunchPlan) -> str | None:
    """Return why a key of the DeepSpeed JSON has no effect in this launch; None if it has one."""
    root = path[0]
    key = path[1] if len(path) > 1 else ""
    if root in deepspeed_keys.WITHOUT_EFFECT:
        return deepspeed_keys.WITHOUT_EFFECT[root]
    # One that is on is a problem of the launch, so this one is off.
    if root in deepspeed_keys.REFUSED:
        return "it is off"
    if value is None or value == {}:
        return "it is empty"
    if root in ("fp16", "bf16") and key != "enabled" and plan.precision != root:
        return f"the precision is {plan.precision}"
    if root in OF_SEQUENCE_PARALLELISM and plan.sequence == 1:
        return "parallelism_config_sp_size is 1"
    if root == "aio" and "nvme" not in (plan.offload_optimizer, plan.offload_param):
        return "nothing is offloaded to NVMe"
    if root == "optimizer" and path[-1] == "adam_w_mode" and value is False:
        optimizer = (plan.deepspeed_config or {}).get("optimizer") or {}
        if str(optimizer.get("type")).lower() == "adamw":
            return "the type is AdamW, which decays weights apart from the gradient"
    if root != "zero_optimization":
        return None
    if key in UNUSED_IN_ZERO:
        return UNUSED_IN_ZERO[key]
    # Some settings are read by stage 3 alone, and some by stages 1 and 2.
    is_of_other_stage = key.startswith("stage3_") or key in OF_STAGE_3 | deepspeed_keys.stage_3_names()
    if plan.zero_stage == 3:
        is_of_other_stage = key in OF_STAGES_1_AND_2
    if is_of_other_stage:
        return f"the stage is {plan.zero_stage}"
    if key in ("offload_optimizer", "offload_param") and path[-1] != "device":
        device = getattr(plan, key)
        if device == "none" or (path[-1] in OF_NVME and device != "nvme"):
            return f"the device is {device}"
    return None


def _effect_of_leaf_modules(key: str, value: Any, config: RecipeConfig) -> str:
    """Return what becomes of a list of ``zero_optimization.leaf_module``.

    Args:
        key: the list: ``classes``, ``names`` or ``name_suffixes``.
        value: names of modules, of their classes, or ends of names.
    """
    names = [value] if isinstance(value, str) else list(value or [])
    modules = model_modules(config)
    # The model's class is not known here, so nothing can be said against the names.
    if modules is None:
        return USED
    absent = [name for name in names if not _has_module(modules, key, name)]
    if len(absent) == len(names):
        return "no effect: the model has no such module"
    return f"used, without {', '.join(absent)}: the model has no such module" if absent else USED


def _has_module(modules: dict[str, type], key: str, name: str) -> bool:
    if key == "classes":
        return any(name in (module.__name__, f"{module.__module__}.{module.__name__}") for module in modules.values())
    if key == "names":
        return name in modules
    return any(module_name.endswith(name) for module_name in modules)
