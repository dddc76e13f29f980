"""The DeepSpeed config of a strategy file: read, checked against the flags, and filled in memory. The file is unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.config_sources import ConfigDraft
from zerobook.launch import deepspeed_keys, ops, recompute
from zerobook.launch.accelerate_cli import STRATEGY_FILE_VARIABLE
from zerobook.utils.nearest import nearest
from zerobook.utils.units import size

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig
    from zerobook.strategy.launch_plan import LaunchPlan

HPZ_KEY = "zero_hpz_partition_size"
QUANTISED_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
# Parameters that DeepSpeed's FusedAdam takes and torch's AdamW does not.
FUSED_ADAM_PARAMETERS = ("bias_correction", "set_grad_none")
# Parameters that an optimizer section may have on every device.
ADAM_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode")
# DeepSpeed's schedules -> the ``lr_scheduler_type`` with the same form, see
# https://huggingface.co/docs/transformers/deepspeed
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Weights of a rank that `check_locked_memory` assumes, since it does not know the model. NVMe offload is of use for larger
# models only.
ASSUMED_WEIGHTS = 10_000_000
# Schedule parameter that accelerate fills in for ``auto`` -> a value to check the other parameters with.
EXAMPLE_PARAMETERS = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100}
# Path of a setting that would change the training, or that checkpoints do not support -> why it is refused.
REFUSED_SETTINGS = {
    ("bf16", "bf16_master_weights_and_grads"): "trained weights and their optimizer state are kept in fp32",
    ("fp16", "fp16_master_weights_and_grads"): "trained weights and their optimizer state are kept in fp32",
    ("zero_optimization", "zenflow"): "it updates some weights later than others, so that losses differ from other strategies'",
    ("zero_optimization", "legacy_stage1"): "this version of DeepSpeed has no second form of stage 1",
    ("zero_optimization", "elastic_checkpoint"): "checkpoints are written by Zerobook, for any number of processes",
    ("zero_optimization", "offload_optimizer", "super_offload"): "its optimizer's state cannot be saved for other strategies",
}
# Deprecated key of DeepSpeed, which is still accepted -> the key or section that replaced it.
REPLACEMENTS = {
    "bfloat16": "bf16",
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "pin_memory",
}
CPU_CHECKPOINTING = "cpu_checkpointing"
# A clipping norm that is never reached: DeepSpeed computes the gradient norm only if it clips.
UNREACHABLE_NORM = 1e30


def read(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read the JSON, or the YAML's inline ``deepspeed_config``, into ``plan``."""
    json_path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    has_json = json_path != "none"
    if has_json:
        plan.config_file = find_json(json_path, environ.get(STRATEGY_FILE_VARIABLE))
        config = deepspeed_keys.load(plan.config_file, plan.problems)
    else:
        plan.config_file = "the Accelerate YAML's deepspeed_config"
        config = _read_inline(environ)
    plan.problems += deepspeed_keys.check_shapes(config, plan.config_file)
    plan.deepspeed_config = config
    _read_replaced_keys(plan, config)
    _refuse_settings(plan, config)
    if has_json:
        _compare_with_launcher(plan, config, environ)
    zero = _read_stage(plan, config)
    if plan.zero_stage in (1, 2) and zero.get("round_robin_gradients"):
        # With this setting, DeepSpeed 0.19.8 reorders the weights. Asked for the fp32 values of a weight, it then returns those
        # of another one.
        zero["round_robin_gradients"] = False
        plan.notes.append(
            f"{plan.config_file}: zero_optimization.round_robin_gradients is turned off: with it, the fp32 weights cannot be "
            "read for checkpoints and for the saved model. It changes the speed of CPU offload only"
        )
    plan.offload_optimizer = _get_offload_device(zero, "offload_optimizer")
    plan.offload_param = _get_offload_device(zero, "offload_param")
    if plan.offload_param != "none" and plan.zero_stage in (1, 2):
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.offload_param is set with stage {plan.zero_stage}; "
            "parameters can be offloaded only under stage 3. Set stage 3 or remove offload_param."
        )
    if HPZ_KEY in zero:
        _read_hpz(plan, zero, int(environ.get("LOCAL_WORLD_SIZE", plan.world_size)))


def _read_stage(plan: LaunchPlan, config: dict[str, Any]) -> dict[str, Any]:
    """Read the ZeRO stage into ``plan``, and return ``zero_optimization``, which gets stage 0 if it has no usable stage."""
    # `check_shapes` has removed a section that is no object.
    section = config.get("zero_optimization")
    stage = (section or {}).get("stage")
    # The JSON may say true, which is equal to 1 in Python.
    if stage in (1, 2, 3) and not isinstance(stage, bool):
        plan.zero_stage = stage
        return config["zero_optimization"]
    if section is not None:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.stage is {json.dumps(stage)}; the recipes run stages 1, 2 and 3. "
            "Write one of them, or launch with accelerate_configs/ddp.yaml, which spreads the data only, as stage 0 does."
        )
    # An empty config could not be read, which is a problem of its own.
    elif config:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization is missing. Add a section with a stage, 1 to 3, or pick a file from "
            "ds_configs/."
        )
    # Continue with stage 0, so that the rest of the file is checked.
    plan.zero_stage = 0
    config["zero_optimization"] = {**(section or {}), "stage": 0}
    return config["zero_optimization"]


# ``key``: offload_optimizer or offload_param. The device is none, cpu or nvme.
def _get_offload_device(zero: dict[str, Any], key: str) -> str:
    return str((zero.get(key) or {}).get("device", "none"))


def _read_replaced_keys(plan: LaunchPlan, config: dict[str, Any]) -> None:
    """Replace the keys of earlier versions of DeepSpeed in ``config``. Such a key beside its replacement is a problem."""
    zero = _find_section(config, "zero_optimization")
    pin_memory = zero.pop("cpu_offload_use_pin_memory", None)
    for key, section, value_type in (
        ("bfloat16", config, dict),
        ("cpu_offload", zero, bool),
        ("cpu_offload_param", zero, bool),
    ):
        value = section.pop(key, None)
        # A key that turns an option off needs no replacement.
        if value is None or value is False:
            continue
        replacement = REPLACEMENTS[key]
        if replacement in section or not isinstance(value, value_type):
            plan.problems.append(
                f"{plan.config_file}: {key} is {json.dumps(value)}, and {replacement} replaced it. Write {replacement} alone."
            )
        elif key == "bfloat16":
            config["bf16"] = value
        else:
            # The other two keys turn on offload to host memory, for which there are sections now.
            zero[replacement] = {"device": "cpu"}
            if pin_memory is not None:
                zero[replacement]["pin_memory"] = pin_memory
            plan.notes.append(f"{plan.config_file}: {key} is read as {replacement} with device cpu")


def _refuse_settings(plan: LaunchPlan, config: dict[str, Any]) -> None:
    """Add a problem for each setting that is refused."""
    for path, reason in REFUSED_SETTINGS.items():
        if _find_section(config, *path[:-1]).get(path[-1]):
            plan.problems.append(f"{plan.config_file}: {'.'.join(path)} is not supported: {reason}. Remove it.")
    if _find_section(config, "zero_optimization").get("compute_grad_norm") is False:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.compute_grad_norm is false; clipping and spike detection need the norm of "
            "the gradients. Remove it."
        )


def _find_section(config: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return the object at the keys of ``path``, each inside the one before; an empty object if there is none."""
    section: Any = config
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _compare_with_launcher(plan: LaunchPlan, config: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Add a problem for each setting of the YAML's ``deepspeed_config``, or of the launcher's flags, that the JSON contradicts.

    accelerate reads only the JSON. It refuses such settings of the YAML, and ignores such flags.
    """
    zero = config.get("zero_optimization") or {}
    json_values = {
        "gradient_clipping": config.get("gradient_clipping", "auto"),
        "zero_stage": zero.get("stage"),
        "offload_optimizer_device": _get_offload_device(zero, "offload_optimizer"),
        "offload_optimizer_nvme_path": (zero.get("offload_optimizer") or {}).get("nvme_path"),
        "offload_param_device": _get_offload_device(zero, "offload_param"),
        "offload_param_nvme_path": (zero.get("offload_param") or {}).get("nvme_path"),
    }
    for key, json_value in json_values.items():
        # accelerate's launcher sets these variables for its flags, and for keys of the YAML that have a value.
        variable = key.upper() if key == "gradient_clipping" else f"DEEPSPEED_{key.upper()}"
        launcher_text = environ.get(f"ACCELERATE_{variable}", "auto").lower()
        if launcher_text == "auto":
            continue
        json_texts = {str(json_value).lower()}
        if isinstance(json_value, int | float):
            # The launcher may write the same number as 1 or as 1.0.
            json_texts |= {f"{json_value:g}", str(float(json_value))}
        # The launcher's norm applies only if the JSON leaves the norm open.
        if key == "gradient_clipping" and json_value == "auto":
            config[key] = float(launcher_text)
        elif launcher_text not in json_texts:
            plan.problems.append(
                f"{plan.config_file}: it says {key} {json.dumps(json_value)}, and deepspeed_config.{key} of the YAML, or the "
                f"launcher's --{key}, says {launcher_text}. Remove that: the JSON alone is read."
            )


def _choose_swap_folders(plan: LaunchPlan, zero: dict[str, Any], output_dir: Path) -> None:
    """Give the run a folder of its own under each ``nvme_path``. For "auto", it is a folder in ``output_dir``.

    DeepSpeed 0.19.8 names its swap files by the rank and a counter only. With the same path, two runs would read each other's
    weights, and the second one deletes the files of the first when it starts.
    """
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key) or {}
        if section.get("device") != "nvme":
            continue
        path = section.get("nvme_path") or "auto"
        # `deepspeed_keys.check_keys` reports a value that is no path.
        if not isinstance(path, str):
            continue
        if path == "auto":
            folder = output_dir / "nvme_offload"
            note = f"NVMe offload swaps under {folder}; set nvme_path in the JSON to a fast local disk"
        else:
            digest = hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]
            folder = Path(path) / f"zerobook-{digest}"
            note = f"NVMe offload swaps under {folder}"
        section["nvme_path"] = str(folder)
        if note not in plan.notes:
            plan.notes.append(note)


def _read_hpz(plan: LaunchPlan, zero: dict[str, Any], processes_of_node: int) -> None:
    """Read the group size of hpZ, by which ZeRO++ holds a second copy of the weights in each group.

    The backward pass then gathers weights without traffic between groups. "auto" makes the processes of a node a group.
    """
    setting = zero[HPZ_KEY]
    is_auto = setting == "auto"
    size = processes_of_node if is_auto else setting
    where = f"{plan.config_file}: zero_optimization.{HPZ_KEY} is {json.dumps(setting)}"
    world = plan.world_size
    # The value 1 turns hpZ off. It is replaced below if the size is usable.
    zero[HPZ_KEY] = 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        plan.problems.append(f'{where}, expected the number of processes of a node, or "auto", which finds it.')
    # hpZ is off.
    elif setting in (0, 1):
        return
    elif plan.zero_stage != 3:
        plan.problems.append(f"{where} with stage {plan.zero_stage}; only stage 3 cuts weights. Set stage 3 or remove it.")
    elif plan.offload_param == "nvme":
        plan.problems.append(
            f"{where} with offload_param on nvme, where DeepSpeed cannot put the second copy. Offload parameters to cpu, or "
            f"remove {HPZ_KEY}."
        )
    elif world % size:
        # The next larger number of processes that can be divided into two or more groups of this size.
        fitting = max(2, -(-world // size)) * size
        plan.problems.append(
            f"{where}, and groups of {size} do not divide {world} processes. Pass --num_processes {fitting}, or write a number "
            "that does."
        )
    elif is_auto and size in (1, world):
        plan.notes.append(
            f"hpZ is off: a second copy of the weights saves nothing where {size} of {world} processes share a node. For "
            f"groups of another size write their number of processes as {HPZ_KEY} into a copy of {plan.config_file}"
        )
    else:
        zero[HPZ_KEY] = size
        plan.secondary = size


def check_device(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Add problems if DeepSpeed is set to another device than the run, or if the config needs a GPU and there is none."""
    if plan.kind == "deepspeed" and plan.device == "cuda" and environ.get("DS_ACCELERATOR") == "cpu":
        plan.problems.append(
            "DS_ACCELERATOR: the environment tells DeepSpeed that it has a cpu, and this run is on cuda. Unset DS_ACCELERATOR "
            'to train on GPUs; to train on the CPU, set use_cpu: true in the Accelerate YAML or CUDA_VISIBLE_DEVICES="".'
        )
    # DeepSpeed's kernels for quantisation run on GPUs only.
    zero = (plan.deepspeed_config or {}).get("zero_optimization", {})
    quantised_keys = [key for key in QUANTISED_KEYS if zero.get(key)]
    if plan.device == "cpu":
        for key in quantised_keys:
            plan.problems.append(
                f"{plan.config_file}: zero_optimization.{key} is {json.dumps(zero[key])}; DeepSpeed quantises on GPUs only. "
                "Set it to false to train on a CPU."
            )
    elif quantised_keys:
        plan.notes.append(
            f"{plan.config_file}: with {' and '.join(quantised_keys)}, ZeRO++ rounds what it sends, so losses differ from "
            "those of other strategies. Users report crashes and runs that do not learn (DeepSpeed issues 4386, 4852 and "
            "6926): watch the first losses, and keep spike detection on"
        )


def check_ops(plan: LaunchPlan, missing: Mapping[str, str]) -> None:
    """Add problems for ops that the config needs and this machine cannot compile. Call it after `fill`.

    Args:
        missing: op that cannot be compiled here -> the reason.
    """
    for op in ops.list_needed_ops(plan):
        if op in missing:
            section = "optimizer.params" if op == "fused_adam" else "zero_optimization"
            plan.problems.append(
                f"{plan.config_file}: {section} needs DeepSpeed's op {op}, which cannot be compiled here: {missing[op]}. "
                "Install that and run make setup, or change the section: in place of fused_adam, torch's Adam steps without "
                "these params; in place of nvme, offload to cpu."
            )


def check_locked_memory(plan: LaunchPlan, limit: int | None) -> None:
    """Add a problem if DeepSpeed may not lock the buffers of NVMe offload in memory.

    Without the check, DeepSpeed 0.19.8 would end the process by SIGABRT after the model is loaded. Call it after
    `deepspeed_keys.check_keys`.

    Args:
        limit: bytes that a process may lock; None: any number.
    """
    if limit is None or not plan.swap_folders:
        return

    def read_number(section: dict[str, Any], key: str, default: float) -> float:
        # The value may also be "auto", or one that `deepspeed_keys.check_keys` has reported.
        value = section.get(key)
        return value if isinstance(value, int | float) else default

    # The default numbers below are DeepSpeed's.
    zero = (plan.deepspeed_config or {})["zero_optimization"]
    needed_bytes = 0.0
    if plan.offload_param == "nvme":
        section = zero["offload_param"]
        element_bytes = 4 if plan.precision == "no" else 2
        needed_bytes += read_number(section, "buffer_count", 5) * read_number(section, "buffer_size", 1e8) * element_bytes
    if plan.offload_optimizer == "nvme":
        # A buffer holds the fp32 values of the largest group of weights.
        group_size = min(read_number(zero, "sub_group_size", 1e9), ASSUMED_WEIGHTS)
        needed_bytes += read_number(zero["offload_optimizer"], "buffer_count", 4) * group_size * 4
    if needed_bytes > limit:
        plan.problems.append(
            f"{plan.config_file}: DeepSpeed locks the buffers of NVMe offload in memory, at least {size(needed_bytes)} per "
            f"rank, and a process may lock {size(limit)} on this machine (ulimit -l). Raise the limit: ulimit -l unlimited, or "
            "docker run --ulimit memlock=-1; or offload to cpu."
        )


def _read_inline(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the YAML's ``deepspeed_config``, whose settings the launcher passes in variables, as a DeepSpeed config."""
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    zero: dict[str, Any] = {"stage": int(stage) if stage.isdigit() else stage}
    for key in ("offload_optimizer", "offload_param"):
        device = environ.get(f"ACCELERATE_DEEPSPEED_{key.upper()}_DEVICE", "none")
        nvme_path = environ.get(f"ACCELERATE_DEEPSPEED_{key.upper()}_NVME_PATH", "none")
        if device not in ("none", ""):
            zero[key] = {"device": device}
            if nvme_path != "none":
                zero[key]["nvme_path"] = nvme_path
    clipping: str | float = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    # accelerate writes none if the YAML has no gradient_clipping.
    if clipping == "none":
        clipping = "auto"
    # `fill` reports a text that is neither a number nor auto.
    with suppress(ValueError):
        clipping = float(clipping)
    return {"zero_optimization": zero, "gradient_clipping": clipping}


def find_json(path: str, strategy_file: str | Path | None) -> str:
    """Return the path of the DeepSpeed JSON that a strategy file names.

    A relative path is resolved against the working folder, as accelerate does. If there is no such file, it is resolved against
    the folder of the strategy file and the two folders above. So the shipped strategy files, which name ``ds_configs/...``,
    work from every folder.
    """
    if strategy_file is None or Path(path).is_file():
        return path
    for folder in list(Path(strategy_file).expanduser().absolute().parents)[:3]:
        if (folder / path).is_file():
            return str(folder / path)
    # The caller reports the missing file.
    return path


def check_micro_batch(plan: LaunchPlan, draft: ConfigDraft[Any]) -> None:
    """Copy the JSON's micro-batch, and the accumulation that its global batch gives, into the draft.

    Add a problem if the user set another micro-batch. Call it before a resumed run divides its global batch anew.
    """
    ds = plan.deepspeed_config or {}
    micro_batch = ds.get("train_micro_batch_size_per_gpu", "auto")
    _copy_or_compare(plan, "train_micro_batch_size_per_gpu", micro_batch, "per_device_train_batch_size", draft)
    global_batch = ds.get("train_batch_size", "auto")
    # Samples in the micro-batches of all processes together.
    samples = draft.config.per_device_train_batch_size * plan.data_parallel_size
    # The JSON's global batch determines the accumulation only if nothing else sets it.
    is_set_by_user = draft.sources.get("gradient_accumulation_steps", "default") != "default"
    is_set_by_json = ds.get("gradient_accumulation_steps", "auto") not in ("auto", 1)
    if global_batch != "auto" and not is_set_by_user and not is_set_by_json and global_batch % samples == 0:
        draft.set(f"{plan.config_file}: train_batch_size", gradient_accumulation_steps=global_batch // samples)


def fill(plan: LaunchPlan, draft: ConfigDraft[Any]) -> None:
    """Write the run's batch sizes, clipping and optimizer into the DeepSpeed config.

    Values that only the JSON sets are copied into the ``draft``. If the user sets a value, too, both must be equal.
    """
    ds = plan.deepspeed_config
    assert ds is not None
    _copy_or_compare(plan, "gradient_clipping", ds.get("gradient_clipping", "auto"), "max_grad_norm", draft)
    if "optimizer" in ds:
        _fill_optimizer(plan, ds, draft)
    config = draft.config
    # Without clipping, DeepSpeed does not compute the gradient norm, which the run reports. So a run that does not clip gets a
    # norm that is never reached.
    ds["gradient_clipping"] = config.max_grad_norm or UNREACHABLE_NORM
    _fill_batch_sizes(plan, ds, config)
    _choose_swap_folders(plan, ds["zero_optimization"], Path(config.output_dir))
    _check_accumulation_dtype(plan, ds)
    if "activation_checkpointing" in ds:
        _read_activation_checkpointing(plan, ds["activation_checkpointing"], draft)
    # Without this setting, DeepSpeed accepts only its own optimizers.
    ds["zero_allow_untested_optimizer"] = True
    if config.optimizer != "adamw":
        # Without this setting, accelerate would replace the optimizer by DeepSpeed's CPU Adam.
        ds["zero_force_ds_cpu_optimizer"] = False
    if ds.get("scheduler"):
        _fill_schedule(plan, ds, draft)


def _fill_batch_sizes(plan: LaunchPlan, ds: dict[str, Any], config: RecipeConfig) -> None:
    """Write the run's batch sizes into ``ds``. Another global batch in the JSON is a problem."""
    global_batch = ds.get("train_batch_size", "auto")
    product = config.per_device_train_batch_size * config.gradient_accumulation_steps * plan.data_parallel_size
    if global_batch not in ("auto", product):
        plan.problems.append(
            f"{plan.config_file}: train_batch_size is {global_batch}, but {config.per_device_train_batch_size} per device x "
            f"{config.gradient_accumulation_steps} accumulation x {plan.data_parallel_size} processes = {product}. "
            'Write "auto" in the JSON, or make them equal.'
        )
    ds.update(
        train_batch_size=product,
        train_micro_batch_size_per_gpu=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )


def _check_accumulation_dtype(plan: LaunchPlan, ds: dict[str, Any]) -> None:
    """Add a problem for ZeRO-1 in bf16 with accumulation in fp32.

    Only in this case, DeepSpeed 0.19.8 makes an optimizer from which Zerobook cannot read weights and norms.
    """
    dtype = ds.get("data_types", {}).get("grad_accum_dtype")
    is_zero_1_in_bf16 = (plan.zero_stage, plan.precision, plan.offload_optimizer) == (1, "bf16", "none")
    if is_zero_1_in_bf16 and dtype in ("fp32", "float32", "float", "torch.float32"):
        plan.problems.append(
            f"{plan.config_file}: data_types.grad_accum_dtype is {dtype}, which is not supported under ZeRO-1 in "
            "bf16. Set zero_optimization.stage to 2, which accumulates in fp32 too, or remove it."
        )


def _fill_schedule(plan: LaunchPlan, ds: dict[str, Any], draft: ConfigDraft[Any]) -> None:
    """Check the schedule of the JSON, which DeepSpeed will build, and compare its peak rate with the run's."""
    kind = ds["scheduler"].get("type")
    params = ds["scheduler"].get("params") or {}
    where = f"{plan.config_file}: scheduler"
    if not isinstance(kind, str) or kind not in SCHEDULES:
        plan.problems.append(
            f"{where}.type {kind!r} is not known here. Write one of {', '.join(SCHEDULES)}, or remove the section; the "
            "recipe's lr_scheduler_type then sets the rate."
        )
        return
    # Check the parameters before anything is copied from them. DeepSpeed would refuse them only after the model is loaded.
    reason = _find_refusal_of_schedule(kind, params)
    if reason is not None:
        plan.problems.append(f"{where}.params: {reason}.")
        return
    is_all_auto = len(params) > 0 and all(value == "auto" for value in params.values())
    # The number of steps may not be known yet. But a run with a warm-up has a step of it even if it has one step in total.
    has_warmup = draft.config.warmup_steps(total=1) > 0
    if is_all_auto and not has_warmup:
        _replace_schedule(plan, ds, draft)
        return
    peak = params.get("warmup_max_lr")
    # Without this key, the peak of WarmupDecayLR is 0.001. The other schedules then take the rate of the optimizer.
    if peak is None:
        peak = 0.001 if kind == "WarmupDecayLR" else "auto"
    _copy_or_compare(plan, "scheduler.params.warmup_max_lr", peak, "learning_rate", draft)
    steps = draft.config.max_train_steps
    # The rate or the ratio at which the warm-up begins. accelerate fills in 0 for auto.
    lowest = params.get("warmup_min_lr", params.get("warmup_min_ratio", 0))
    if steps is not None and steps <= 2 and lowest in ("auto", 0):
        plan.problems.append(
            f"{where}: {kind} begins with two steps at rate 0, and max_train_steps is {steps}: nothing would be trained. "
            "Train more steps, or remove the section; lr_scheduler_type then sets the rate."
        )
    plan.notes.append(f"learning rate: {kind} from {plan.config_file}, not lr_scheduler_type")


def _replace_schedule(plan: LaunchPlan, ds: dict[str, Any], draft: ConfigDraft[Any]) -> None:
    """Replace the schedule of the JSON by ``lr_scheduler_type``, for a run without a warm-up.

    DeepSpeed's schedules always warm up, and begin with two steps at rate 0.
    """
    kind = ds.pop("scheduler")["type"]
    if not draft.sources.is_set("lr_scheduler_type"):
        draft.set(str(plan.config_file), lr_scheduler_type=SCHEDULES[kind])
    plan.notes.append(
        f"learning rate: lr_scheduler_type {draft.config.lr_scheduler_type} in place of {kind} from {plan.config_file}, "
        "which always warms up"
    )


def _find_refusal_of_schedule(kind: str, params: dict[str, Any]) -> str | None:
    """Return why DeepSpeed refuses this schedule, which is built here for one weight; None if DeepSpeed accepts it."""
    import torch
    from deepspeed.runtime import lr_schedules

    # Replace auto by an example, if accelerate would fill in the parameter.
    values = dict(params)
    for name, value in params.items():
        if value == "auto":
            values[name] = EXAMPLE_PARAMETERS.get(name, value)
        if values[name] == "auto":
            return f"{name} is auto, which accelerate does not fill in for it"
    warmup_type = params.get("warmup_type", "log")
    if warmup_type not in ("log", "linear"):
        # DeepSpeed would only warn, and use log instead.
        return f"warmup_type is {json.dumps(warmup_type)}, expected log or linear"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    try:
        getattr(lr_schedules, kind)(optimizer, **values)
    except Exception as error:
        # Wrong names and values raise errors of many types.
        return f"DeepSpeed refuses {json.dumps(params)}: {str(error).rstrip('.')}"
    return None


def _fill_optimizer(plan: LaunchPlan, ds: dict[str, Any], draft: ConfigDraft[Any]) -> None:
    """Write the run's rate, decay, eps and betas into the optimizer section, and check the other keys of the section."""
    kind = ds["optimizer"].get("type")
    if draft.config.optimizer != "adamw":
        plan.problems.append(
            f"{plan.config_file}: optimizer.type is {json.dumps(kind)}, but optimizer is {draft.config.optimizer} (from "
            f"{draft.sources['optimizer']}). Remove the section from the JSON, or pass --optimizer adamw."
        )
        return
    if str(kind).lower() not in ("adam", "adamw"):
        plan.problems.append(
            f"{plan.config_file}: optimizer.type is {json.dumps(kind)}; a JSON may bring Adam or AdamW only. Write AdamW, or "
            "remove the section and choose with --optimizer: adamw, sgd, or your own as FILE.py:Class."
        )
        return
    params = ds["optimizer"].setdefault("params", {})
    for parameter, key in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("eps", "adam_epsilon")):
        _copy_or_compare(plan, f"optimizer.params.{parameter}", params.get(parameter, "auto"), key, draft)
        params[parameter] = getattr(draft.config, key)
    _check_adam_parameters(plan, params)
    betas = params.get("betas", "auto")
    if betas == "auto":
        betas = ["auto", "auto"]
    if not isinstance(betas, list) or len(betas) != 2:
        plan.problems.append(f"{plan.config_file}: optimizer.params.betas is {betas}, expected two numbers, as [0.9, 0.999].")
        return
    _copy_or_compare(plan, "optimizer.params.betas[0]", betas[0], "adam_beta1", draft)
    _copy_or_compare(plan, "optimizer.params.betas[1]", betas[1], "adam_beta2", draft)
    params["betas"] = [draft.config.adam_beta1, draft.config.adam_beta2]
    if plan.offload_optimizer == "none" and not {"torch_adam", *FUSED_ADAM_PARAMETERS} & params.keys():
        # Nothing in the section needs FusedAdam. So the run has the same optimizer as without the section.
        params["torch_adam"] = True
        params["fused"] = True
        plan.notes.append(
            "optimizer: torch's Adam steps in place of DeepSpeed's FusedAdam, which has to be compiled, on GPUs with nvcc; "
            f'"torch_adam": false in the optimizer.params of {plan.config_file} keeps FusedAdam'
        )


# Add a problem for each parameter of the optimizer section that is not supported.
def _check_adam_parameters(plan: LaunchPlan, params: dict[str, Any]) -> None:
    if params.get("amsgrad") is False:
        # False is the default. True is reported below.
        del params["amsgrad"]
    if plan.offload_optimizer == "none":
        supported = {*ADAM_PARAMETERS, *FUSED_ADAM_PARAMETERS, "fused", "foreach"}
    else:
        # DeepSpeed's CPU Adam, which updates offloaded weights, has other parameters.
        supported = {*ADAM_PARAMETERS, "bias_correction"}
    for key in params:
        if key not in supported:
            plan.problems.append(
                f"{plan.config_file}: optimizer.params.{key} is not supported.{nearest(key, supported)} Correct or remove it."
            )


def _read_activation_checkpointing(plan: LaunchPlan, section: object, draft: ConfigDraft[Any]) -> None:
    """Read the settings of DeepSpeed's own checkpoint function (ZeRO-R).

    transformers' models call torch's function instead, for which one of the settings has a counterpart: inputs of layers in
    host memory, see `zerobook.models.recompute`.
    """
    where = f"{plan.config_file}: activation_checkpointing"
    if not isinstance(section, dict):
        plan.problems.append(f"{where} is {json.dumps(section)}, expected an object of settings. Remove it or write one.")
        return
    for key, value in section.items():
        # A setting that is off has no effect.
        if value and (key != CPU_CHECKPOINTING or value is not True):
            plan.problems.append(
                f"{where}.{key} is {json.dumps(value)}; transformers' models call torch's checkpoint function, which has only "
                f"{CPU_CHECKPOINTING}, true or false. Remove it."
            )
    if section.get(CPU_CHECKPOINTING) is True:
        recompute.request(plan, str(plan.config_file), f"activation_checkpointing.{CPU_CHECKPOINTING}", "offload", draft)


def _copy_or_compare(plan: LaunchPlan, json_key: str, json_value: object, key: str, draft: ConfigDraft[Any]) -> None:
    """Copy a value of the JSON into the draft's ``key``, or add a problem if the user set another value."""
    value = getattr(draft.config, key)
    # With auto, the JSON leaves the value to the recipe.
    if json_value in ("auto", value):
        return
    if not isinstance(json_value, int | float):
        plan.problems.append(f'{plan.config_file}: {json_key} is {json.dumps(json_value)}, expected a number or "auto".')
    elif draft.sources.is_set(key):
        plan.problems.append(
            f"{plan.config_file}: {json_key} is {json_value}, but {key} is {value} (from {draft.sources[key]}). "
            'Write "auto" in the JSON, or make them equal.'
        )
    else:
        draft.set(str(plan.config_file), **{key: json_value})
