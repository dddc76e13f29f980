"""The account of a launch's settings: what becomes of each key of the Accelerate YAML, of the DeepSpeed JSON, and of each of
accelerate's environment variables. `zerobook doctor` and ``--dry-run`` print it.

Keys that are unknown or refused are problems of the launch, so an account is made of launches without problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerobook.launch import accelerate_file, deepspeed_json, deepspeed_keys
from zerobook.launch.accelerate_cli import typed_flags
from zerobook.launch.fsdp_settings import VERSION_1, sharding_in_fsdp2
from zerobook.launch.model_facts import model_modules
from zerobook.launch.variables import VARIABLES

if TYPE_CHECKING:
    from rich.table import Table

    from zerobook.config import ConfigSources, RecipeConfig
    from zerobook.strategy.launch_plan import LaunchPlan

USED = "used"
WRITTEN_HERE = "checkpoints and the final model are written by Zerobook"
TPU = "it is for TPUs"
ONE_MACHINE = "there is one machine"
NO_GPU = "no GPU is used"
UNUSED = {
    "main_training_function": "it is for TPUs and notebooks",
    "downcast_bf16": TPU,
    "tpu_name": TPU,
    "tpu_zone": TPU,
    "tpu_use_cluster": TPU,
    "tpu_use_sudo": TPU,
    "command_file": TPU,
    "commands": TPU,
    "tpu_vm": TPU,
    "tpu_env": TPU,
    "megatron_lm_config": "distributed_type is not MEGATRON_LM",
    "fp8_config": "the precision is not fp8",
    "mpirun_config": "accelerate starts the processes",
    "fsdp_state_dict_type": WRITTEN_HERE,
    "zero3_save_16bit_model": WRITTEN_HERE,
    **VERSION_1,
}
"""Keys of the Accelerate YAML that are never used -> why."""
SEVERAL_MACHINES = {
    "machine_rank",
    "main_process_ip",
    "rdzv_backend",
    "same_network",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
}
"""Keys of the Accelerate YAML that matter on several machines only."""
USED_KEYS = {
    "compute_environment",
    "distributed_type",
    "num_processes",
    "num_machines",
    "main_process_port",
    "mixed_precision",
    "use_cpu",
    "debug",
    "gpu_ids",
    "enable_cpu_affinity",
    "dynamo_config",
    "deepspeed_config",
    "fsdp_config",
    "parallelism_config",
    "deepspeed_config_file",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_init_flag",
    "deepspeed_moe_layer_cls_names",
    "fsdp_version",
    "fsdp_offload_params",
    "fsdp_min_num_params",
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
    "parallelism_config_dp_replicate_size",
    "parallelism_config_dp_shard_size",
    "parallelism_config_tp_size",
    "parallelism_config_ep_size",
    "parallelism_config_cp_size",
    "parallelism_config_cp_backend",
    "parallelism_config_cp_comm_strategy",
    "parallelism_config_sp_size",
    "parallelism_config_sp_backend",
    "parallelism_config_sp_seq_length",
    "parallelism_config_sp_seq_length_is_variable",
    "parallelism_config_sp_attn_implementation",
}
"""Keys of the Accelerate YAML that are used, some of them under a condition: see `_of_yaml`."""
STAGE_3 = {
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
    "zero_quantized_gradients",
    "save_muon_momentum_buffer_in_memory",
}
"""Settings of ``zero_optimization`` that stage 3 alone reads, beside those that begin with ``stage3_``."""
STAGES_1_2 = {
    "allgather_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "ignore_unused_parameters",
    "round_robin_gradients",
    "parameter_alignment",
}
"""Settings of ``zero_optimization`` that stages 1 and 2 alone read."""
UNUSED_IN_ZERO = {
    "allgather_partitions": "DeepSpeed reads it nowhere",
    "load_from_fp32_weights": WRITTEN_HERE,
    "pipeline_loading_checkpoint": WRITTEN_HERE,
    "stage3_gather_16bit_weights_on_model_save": WRITTEN_HERE,
    "stage3_gather_fp16_weights_on_model_save": WRITTEN_HERE,
    "gather_16bit_weights_on_model_save": WRITTEN_HERE,
    "save_muon_momentum_buffer_in_memory": "Muon is not DeepSpeed's here",
}
"""Settings of ``zero_optimization`` that are never used -> why."""
DYNAMIC_SCALE = {"loss_scale_window", "initial_scale_power", "hysteresis", "consecutive_hysteresis", "min_loss_scale"}
"""Settings of ``fp16`` that a fixed loss scale does not read."""
OF_SEQUENCE = ("sequence_parallel_size", "seq_parallel_communication_data_type")
"""Root keys that matter where processes share the tokens of a row."""
NVME = {"nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"}
"""Settings of an offload section that matter with NVMe only."""


class Entry(NamedTuple):
    """The effect of one setting.

    Attributes:
        source: the file that has it, or ``environment``.
        key: its dotted path.
        value: as written there.
        effect: ``used``, or a sentence that begins with ``filled in``, ``overridden`` or ``no effect``.
    """

    source: str
    key: str
    value: Any
    effect: str


def entries(
    plan: LaunchPlan,
    config: RecipeConfig,
    sources: ConfigSources,
    *,
    flags: list[str] | None,
    launch_environ: Mapping[str, str],
    environ: Mapping[str, str],
) -> list[Entry]:
    """Return an entry for each setting of a launch without problems.

    Args:
        plan: the resolved launch.
        config: the resolved config of the recipe.
        sources: of its values.
        flags: arguments of ``accelerate launch``, with the script; None if another launcher started the processes.
        launch_environ: the environment that the launcher was started with.
        environ: the environment of its workers.
    """
    account: list[Entry] = []
    yaml_file = accelerate_file.path_of(flags)
    if yaml_file is not None:
        loaded = accelerate_file.load(yaml_file)
        for path, value in _leaves(loaded):
            effect = _of_yaml(path, value, loaded, plan, config, sources, flags or [])
            account.append(Entry(yaml_file, ".".join(path), value, effect))
    if plan.config_file is not None and Path(plan.config_file).is_file():
        # The file, and not ``plan.deepspeed_config``, in which the values are filled in already.
        for path, value in _leaves(deepspeed_keys.load(plan.config_file, [])):
            effect = _of_json(path, value, plan, config, sources)
            account.append(Entry(plan.config_file, ".".join(path), value, effect))
    account += _of_variables(plan, launch_environ, environ)
    return account


def table(entries: list[Entry]) -> Table:
    """Return the account as a table, a section for each file."""
    from rich.table import Table

    rows = Table(title="settings of the strategy", title_justify="left")
    for column in ("key", "value", "effect"):
        rows.add_column(column, overflow="fold")
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
    """Yield (path, value) of each key of nested objects that is no object with keys itself."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _no_effect(reason: str) -> str:
    return f"no effect: {reason}"


def _is_equal(value: object, other: object) -> bool:
    """Return whether two settings are written alike, apart from upper case."""
    return str(value).lower() == str(other).lower()


def _of_yaml(
    path: tuple[str, ...],
    value: Any,
    loaded: dict[str, Any],
    plan: LaunchPlan,
    config: RecipeConfig,
    sources: ConfigSources,
    flags: list[str],
) -> str:
    """Return what becomes of a key of the Accelerate YAML."""
    section = path[0]
    key = path[-1]
    if section == "fsdp_config" and not key.startswith("fsdp"):
        # accelerate takes the key with the prefix and without it.
        key = f"fsdp_{key}"
    if value is None or value == {}:
        return _no_effect("it is empty")
    if len(path) > 1:
        kind_of_section = {"deepspeed_config": "deepspeed", "fsdp_config": "fsdp"}.get(section, plan.kind)
        if kind_of_section != plan.kind:
            return _no_effect(f"distributed_type is {loaded.get('distributed_type')}")
        if section in UNUSED:
            return _no_effect(UNUSED[section])
    replacement = sharding_in_fsdp2(value) if key == "fsdp_sharding_strategy" else None
    if replacement:
        return _no_effect(replacement)
    if key in UNUSED:
        return _no_effect(UNUSED[key])
    typed = typed_flags(flags)
    if key in typed and not _is_equal(typed[key], value):
        return f"overridden: --{key} {typed[key]}"
    machines = int(typed.get("num_machines") or loaded.get("num_machines") or 1)
    if key in SEVERAL_MACHINES and machines == 1:
        return _no_effect(ONE_MACHINE)
    if key in ("gpu_ids", "enable_cpu_affinity") and plan.device == "cpu":
        return _no_effect(NO_GPU)
    if section == "dynamo_config" and key != "dynamo_backend":
        return _no_effect("the model is not compiled")
    if key == "mixed_precision":
        if _is_equal(value, plan.precision):
            return USED
        return f"overridden: {plan.precision}, from {plan.precision_source}"
    if section == "deepspeed_config":
        # An empty section may be a list, or null.
        return _of_inline(key, value, loaded[section] or {}, plan, config, sources)
    if section == "fsdp_config":
        return _of_fsdp(key, value, loaded[section] or {}, plan, config, sources)
    if section == "parallelism_config":
        return _of_sizes(key, value, plan)
    return USED


def _of_inline(
    key: str, value: Any, section: dict[str, Any], plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources
) -> str:
    """Return what becomes of a key of the YAML's ``deepspeed_config``."""
    if section.get("deepspeed_config_file") and key in ("zero_stage", "offload_optimizer_device", "offload_param_device"):
        return _no_effect("the JSON says the same")
    devices = {"offload_optimizer": plan.offload_optimizer, "offload_param": plan.offload_param}
    for offload, device in devices.items():
        if key == f"{offload}_nvme_path" and device != "nvme":
            return _no_effect(f"{offload}_device is {device}")
    if key in ("zero3_init_flag", "deepspeed_moe_layer_cls_names") and plan.zero_stage != 3:
        return _no_effect(f"the stage is {plan.zero_stage}")
    if value == "auto":
        return f"filled in: {_recipe_value(key, config, sources)}" if key in RECIPE_KEYS else USED
    if key in RECIPE_KEYS and float(value) != float(getattr(config, RECIPE_KEYS[key]) or 0):
        return f"overridden: {_recipe_value(key, config, sources)}"
    return USED


RECIPE_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}
"""Keys of strategy files -> the recipe's keys for the same."""


def _recipe_value(strategy_key: str, config: RecipeConfig, sources: ConfigSources) -> str:
    """Return the value of the recipe's key for the same, and where it is from."""
    key = RECIPE_KEYS[strategy_key]
    return f"{getattr(config, key)}, {key} from {sources[key]}"


def _of_fsdp(
    key: str, value: Any, section: dict[str, Any], plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources
) -> str:
    """Return what becomes of a key of the YAML's ``fsdp_config``."""
    policy = str(section.get("fsdp_auto_wrap_policy", section.get("auto_wrap_policy", "NO_WRAP"))).upper()
    by_layer = key == "fsdp_transformer_layer_cls_to_wrap" and policy == "TRANSFORMER_BASED_WRAP"
    if key in ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap") and not by_layer:
        return _no_effect(f"fsdp_auto_wrap_policy is {policy}")
    if key.startswith("fsdp_activation_checkpointing"):
        recipe_value = config.activation_checkpointing
        is_offload = key.endswith("offload")
        # A file that asks for full leaves the offload key false, which agrees with full.
        agrees = bool(value) == (recipe_value != "none") or (is_offload and recipe_value == "full")
        if agrees:
            return USED
        return f"overridden: {recipe_value}, activation_checkpointing from {sources['activation_checkpointing']}"
    if key == "fsdp_cpu_ram_efficient_loading" and value and plan.loaded_in_parts:
        return "overridden: each process reads its part of the files"
    return USED


def _of_sizes(key: str, value: Any, plan: LaunchPlan) -> str:
    """Return what becomes of a key of the YAML's ``parallelism_config``."""
    name = key.removeprefix("parallelism_config_")
    for prefix, size in (("cp", plan.context), ("sp", plan.sequence)):
        if name.startswith(f"{prefix}_") and name != f"{prefix}_size" and size == 1:
            return _no_effect(f"parallelism_config_{prefix}_size is 1")
    sharding_processes = plan.shard if plan.kind == "fsdp" else plan.data_parallel_size
    sizes = {"dp_replicate_size": plan.replicate, "dp_shard_size": sharding_processes // plan.context}
    size_here = sizes.get(name)
    if size_here in (None, value):
        return USED
    return f"overridden: {size_here}, to fit {plan.world_size} processes"


def _of_json(path: tuple[str, ...], value: Any, plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources) -> str:
    """Return what becomes of a key of the DeepSpeed JSON. What the engine gets is ``plan.deepspeed_config``."""
    root = path[0]
    key = path[-1]
    if root in deepspeed_keys.WITHOUT_EFFECT:
        return _no_effect(deepspeed_keys.WITHOUT_EFFECT[root])
    if root in deepspeed_keys.REFUSED:
        return _no_effect("it is off")
    if value is None:
        return _no_effect("it is empty")
    idle_reason = _idle_reason(path, plan)
    if idle_reason is not None:
        return _no_effect(idle_reason)
    if root == "scheduler":
        return _of_schedule(path, value, plan, config, sources)
    if root == "optimizer" and key == "adam_w_mode":
        return _of_adam_w_mode(value, plan, config)
    if path[:2] == ("zero_optimization", "leaf_module"):
        return _of_leaves(key, value, config)
    if root == "zero_optimization" and key in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
        return "used: read as the section that replaced it"
    if root == "activation_checkpointing":
        if value is True and key == deepspeed_json.CPU_CHECKPOINTING:
            return f"used: activation_checkpointing {config.activation_checkpointing}"
        return _no_effect("it is off")
    return _compare_with_engine(path, value, plan, config, sources)


def _compare_with_engine(
    path: tuple[str, ...], value: Any, plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources
) -> str:
    """Return whether DeepSpeed's engine gets a key's value, or which one it gets in its place."""
    root = path[0]
    # bfloat16 is read as bf16, which replaced it.
    engine_path = ("bf16", *path[1:]) if root == "bfloat16" else path
    engine_value: Any = plan.deepspeed_config
    for key in engine_path:
        engine_value = engine_value.get(key) if isinstance(engine_value, dict) else None
    if path == ("gradient_clipping",):
        # A norm of 0 is written as one that is never reached.
        engine_value = config.max_grad_norm
    is_auto = value == "auto"
    if engine_value == value and not is_auto:
        return USED
    if is_auto and engine_value in ("auto", None):
        return "filled in: from the model's size, when it is loaded"
    text = json.dumps(engine_value)
    if len(path) == 1 and root in RECIPE_KEYS:
        text = _recipe_value(root, config, sources)
    elif root in ("fp16", "bf16", "bfloat16"):
        text = f"{text}, precision {plan.precision} from {plan.precision_source}"
    return f"{'filled in' if is_auto else 'overridden'}: {text}"


def _of_schedule(path: tuple[str, ...], value: Any, plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources) -> str:
    """Return what becomes of a key of the JSON's ``scheduler``."""
    key = path[-1]
    if "scheduler" not in (plan.deepspeed_config or {}):
        return f"filled in: {config.lr_scheduler_type}, lr_scheduler_type from {sources['lr_scheduler_type']}"
    if len(path) == 1:
        return _no_effect("it is empty")
    if path[1] not in ("type", "params"):
        return _no_effect("DeepSpeed reads type and params")
    if value != "auto":
        return USED
    if key == "warmup_max_lr":
        return f"filled in: {config.learning_rate:g}, learning_rate from {sources['learning_rate']}"
    if key == "warmup_num_steps":
        warmup = "num_warmup_steps" if config.num_warmup_steps else "warmup_ratio"
        return f"filled in: {getattr(config, warmup):g}, {warmup} from {sources[warmup]}"
    return "filled in: 0" if key == "warmup_min_lr" else "filled in: the steps of the run"


def _of_adam_w_mode(value: Any, plan: LaunchPlan, config: RecipeConfig) -> str:
    """Return what becomes of ``optimizer.params.adam_w_mode``, which chooses how Adam decays weights."""
    kind = ((plan.deepspeed_config or {}).get("optimizer") or {}).get("type")
    if str(kind).lower() == "adamw":
        return USED if value is True else _no_effect("the type is AdamW, which decays weights apart from the gradient")
    return USED if config.weight_decay else _no_effect("weight_decay is 0")


def _of_leaves(key: str, value: Any, config: RecipeConfig) -> str:
    """Return what becomes of a list of ``zero_optimization.leaf_module``: names of modules, or of their classes."""
    names = [value] if isinstance(value, str) else list(value or [])
    if not names:
        return _no_effect("it is empty")
    modules = model_modules(config)
    if modules is None:
        return USED
    absent = [name for name in names if not _has_module(modules, key, name)]
    if not absent:
        return USED
    if len(absent) == len(names):
        return _no_effect("the model has no such module")
    return f"used, without {', '.join(absent)}: the model has no such module"


def _has_module(modules: dict[str, tuple[str, str]], key: str, name: str) -> bool:
    """Return whether a model has the module that a list of ``leaf_module`` names.

    Args:
        modules: name -> (Python module, class).
        key: the list: ``classes``, ``names`` or ``name_suffixes``.
    """
    if key == "classes":
        return any(name in (class_name, f"{module}.{class_name}") for module, class_name in modules.values())
    if key == "names":
        return name in modules
    return any(module_name.endswith(name) for module_name in modules)


def _idle_reason(path: tuple[str, ...], plan: LaunchPlan) -> str | None:
    """Return why a key of the DeepSpeed JSON has no effect under this stage, precision and offload; None where it has one."""
    root = path[0]
    key = path[1] if len(path) > 1 else ""
    leaf = path[-1]
    if root in ("fp16", "bf16", "bfloat16") and leaf != "enabled" and plan.precision != root.replace("bfloat16", "bf16"):
        return f"the precision is {plan.precision}"
    if root == "aio" and "nvme" not in (plan.offload_optimizer, plan.offload_param):
        return "nothing is offloaded to NVMe"
    if root == "fp16" and leaf in DYNAMIC_SCALE and (plan.deepspeed_config or {}).get("fp16", {}).get("loss_scale"):
        return "loss_scale is fixed"
    if (root, leaf) == ("bf16", "check_grad_overflow") and plan.zero_stage == 3:
        return "the stage is 3"
    if (root, leaf) == ("bf16", "immediate_grad_update"):
        return "it is for bf16 without ZeRO"
    if root in OF_SEQUENCE and plan.sequence == 1:
        return "parallelism_config_sp_size is 1"
    if root == "zero_force_ds_cpu_optimizer" and plan.offload_optimizer == "none":
        return "the optimizer is not offloaded"
    if root in ("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler") and leaf != "enabled":
        section = (plan.deepspeed_config or {}).get(root) or {}
        return None if section.get("enabled") else "it is off"
    if root != "zero_optimization":
        return None
    if key in UNUSED_IN_ZERO:
        return UNUSED_IN_ZERO[key]
    of_stage_3 = key in STAGE_3 | deepspeed_keys.stage_3_names() or key.startswith("stage3_")
    if (of_stage_3 and plan.zero_stage != 3) or (key in STAGES_1_2 and plan.zero_stage == 3):
        return f"the stage is {plan.zero_stage}"
    if key == "offload_optimizer" and leaf == "cpuadam_cores_perc":
        return "it is for super_offload"
    if key == "offload_optimizer" and leaf == "ratio" and plan.zero_stage != 3:
        return f"the stage is {plan.zero_stage}"
    if key in ("offload_optimizer", "offload_param") and leaf != "device":
        device = getattr(plan, key)
        if device == "none" or (leaf in NVME and device != "nvme"):
            return f"the device is {device}"
    return None


def _of_variables(plan: LaunchPlan, launch_environ: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Entry]:
    """Yield an entry for each of accelerate's variables that the launch was started with."""
    for name in sorted(launch_environ):
        if name not in VARIABLES:
            continue
        value = launch_environ[name]
        is_of_fsdp = name.startswith("FSDP_")
        is_of_deepspeed = "DEEPSPEED" in name
        if environ.get(name) != value:
            effect = f"overridden: accelerate launch sets {environ.get(name, 'none')}"
        elif (is_of_fsdp and plan.kind != "fsdp") or (is_of_deepspeed and plan.kind != "deepspeed"):
            effect = _no_effect(f"the strategy is {plan.name}")
        elif VARIABLES[name]:
            effect = _no_effect(VARIABLES[name])
        else:
            effect = USED
        yield Entry("environment", name, value, effect)
