"""The DeepSpeed config of a strategy file: read, checked against the flags, and filled in memory. The file is unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.config import ConfigDraft
from zerobook.launch import deepspeed_keys, recompute
from zerobook.launch.accelerate_cli import STRATEGY_FILE
from zerobook.utils.nearest import nearest

if TYPE_CHECKING:
    import inspect

    from zerobook.strategy.launch_plan import LaunchPlan

HPZ = "zero_hpz_partition_size"
QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
FUSED_ONLY = ("bias_correction", "set_grad_none")
"""Parameters that DeepSpeed's FusedAdam takes and torch's AdamW does not."""
ADAM = ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode")
"""Parameters that an optimizer section may have on every device."""
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedules -> the ``lr_scheduler_type`` with the same form, see https://huggingface.co/docs/transformers/deepspeed"""
FILLED = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
"""Parameters of a schedule for which accelerate fills in ``auto``."""
REFUSED_IN_ZERO = {
    "zenflow": "it updates some weights later than others, so that losses differ from those of other strategies",
    "legacy_stage1": "this version of DeepSpeed has no second form of stage 1",
    "elastic_checkpoint": "checkpoints are written by Zerobook, and continue on any number of processes without it",
}
"""Settings of ``zero_optimization`` that would change the training -> why they are refused."""
HALF_MASTERS = {
    "bf16": ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "fp16": ("fp16_master_weights_and_grads",),
}
"""Section of a half precision -> its settings that keep less than fp32 of the trained weights."""
CPU_CHECKPOINTING = "cpu_checkpointing"
NOT_HERE = {
    "partition_activations": "it divides a layer's input among the ranks of tensor parallelism, which all hold the same one; "
    "ranks of ZeRO hold different ones, so there is nothing to divide",
    "contiguous_memory_optimization": "it needs partition_activations, which has nothing to divide without tensor parallelism",
    "number_checkpoints": "it is the size of contiguous_memory_optimization's buffer, which is not used here",
    "synchronize_checkpoint_boundary": "it belongs to DeepSpeed's checkpoint function; transformers' models call torch's",
    "profile": "it times DeepSpeed's checkpoint function; transformers' models call torch's",
}
"""Settings of ``activation_checkpointing`` that have no effect on the models trained here -> why."""
NEVER = 1e30
"""A clipping norm that is never reached: DeepSpeed computes the gradient norm only where it clips."""


def read(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read the JSON, or the YAML's inline ``deepspeed_config``, into ``plan``."""
    json_path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    has_json = json_path != "none"
    if has_json:
        plan.config_file = find_json(json_path, environ.get(STRATEGY_FILE))
        config = deepspeed_keys.load(plan.config_file, plan.problems)
    else:
        plan.config_file = "the Accelerate YAML's deepspeed_config"
        config = _read_inline(environ)
    plan.problems += deepspeed_keys.check_shapes(config, plan.config_file)
    plan.deepspeed_config = config
    _read_old_bf16(plan, config)
    _refuse_half_masters(plan, config)
    if has_json:
        _compare_with_yaml(plan, config, environ)
    zero = _read_stage(plan, config)
    _read_old_offload(plan, zero)
    _refuse_in_zero(plan, zero)
    plan.offload_optimizer = _offload_device(zero, "offload_optimizer")
    plan.offload_param = _offload_device(zero, "offload_param")
    if plan.offload_param != "none" and plan.zero_stage in (1, 2):
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.offload_param is set with stage {plan.zero_stage}; "
            "parameters can be offloaded only under stage 3. Set stage 3 or remove offload_param."
        )
    if HPZ in zero:
        _read_hpz(plan, zero, int(environ.get("LOCAL_WORLD_SIZE", plan.world_size)))


def _read_stage(plan: LaunchPlan, config: dict[str, Any]) -> dict[str, Any]:
    """Read the stage into ``plan``, and return the section that has it. Where no stage is usable, it has stage 0."""
    section = config.get("zero_optimization")
    stage = section.get("stage") if isinstance(section, dict) else None
    if isinstance(section, dict) and stage in (1, 2, 3) and not isinstance(stage, bool):
        plan.zero_stage = stage
        return section
    if isinstance(section, dict):
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.stage is {json.dumps(stage)}; the recipes run stages 1, 2 and 3. "
            "Write one of them, or launch with accelerate_configs/ddp.yaml, which spreads the data only, as stage 0 does."
        )
    elif config:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization is missing. Add a section with a stage, 1 to 3, or pick a file from "
            "ds_configs/."
        )
    plan.zero_stage = 0
    config["zero_optimization"] = {**(section or {}), "stage": 0}
    return config["zero_optimization"]


def _offload_device(zero: dict[str, Any], key: str) -> str:
    section = zero.get(key) or {}
    return str(section.get("device", "none"))


def _read_old_bf16(plan: LaunchPlan, config: dict[str, Any]) -> None:
    """Write the section ``bfloat16`` as ``bf16``, which replaced it: DeepSpeed would read the empty one that is made here."""
    if "bfloat16" not in config:
        return
    section = config.pop("bfloat16")
    if "bf16" in config:
        plan.problems.append(f"{plan.config_file}: it has bfloat16 and bf16, which replaced it. Remove bfloat16.")
    else:
        config["bf16"] = section


def _refuse_half_masters(plan: LaunchPlan, config: dict[str, Any]) -> None:
    """Add a problem for each setting without fp32 masters: steps smaller than a weight's precision would be lost."""
    for section, keys in HALF_MASTERS.items():
        values = config.get(section)
        if not isinstance(values, dict):
            continue
        for key in keys:
            if values.get(key):
                plan.problems.append(
                    f"{plan.config_file}: {section}.{key} is not supported: trained weights and their optimizer state are kept "
                    "in fp32, here and in checkpoints. Remove it."
                )
                # DeepSpeed allows the second setting only with the first, so one problem says it all.
                break


def _read_old_offload(plan: LaunchPlan, zero: dict[str, Any]) -> None:
    """Write the keys that sections offload_optimizer and offload_param replaced as those sections."""
    pin_memory = zero.pop("cpu_offload_use_pin_memory", None)
    for old, section in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        value = zero.pop(old, None)
        if value is None:
            continue
        if not isinstance(value, bool):
            plan.problems.append(
                f"{plan.config_file}: zero_optimization.{old} is {json.dumps(value)}, expected true or false. Write a section "
                f'{section} with "device": "cpu" in its place.'
            )
        elif section in zero:
            plan.problems.append(
                f"{plan.config_file}: zero_optimization has {old} and {section}, which replaced it. Remove {old}."
            )
        elif value:
            zero[section] = {"device": "cpu"}
            if pin_memory is not None:
                zero[section]["pin_memory"] = pin_memory
            plan.notes.append(f"{plan.config_file}: zero_optimization.{old} is read as {section} with device cpu")


def _refuse_in_zero(plan: LaunchPlan, zero: dict[str, Any]) -> None:
    """Add a problem for each setting of ``zero_optimization`` that would change the training or hide what it does."""
    for key, reason in REFUSED_IN_ZERO.items():
        if zero.get(key):
            plan.problems.append(f"{plan.config_file}: zero_optimization.{key} is not supported: {reason}. Remove it.")
    if zero.get("compute_grad_norm", True) is False:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.compute_grad_norm is false; clipping and spike detection need the norm of "
            "the gradients. Remove it."
        )
    moments = zero.get("offload_optimizer")
    if isinstance(moments, dict) and moments.get("super_offload"):
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.offload_optimizer.super_offload is not supported: its optimizer's state "
            "cannot be saved for other strategies. Remove it."
        )


def _compare_with_yaml(plan: LaunchPlan, config: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Add a problem for each setting of the YAML's ``deepspeed_config`` section that differs from the JSON it names.

    accelerate refuses both together, and reads the JSON alone.
    """
    yaml_keys = environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    yaml_clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if "gradient_clipping" in yaml_keys and yaml_clipping not in ("auto", "none"):
        json_clipping = config.get("gradient_clipping", "auto")
        if json_clipping == "auto":
            config["gradient_clipping"] = float(yaml_clipping)
        elif float(yaml_clipping) != json_clipping:
            plan.problems.append(
                f"{plan.config_file}: gradient_clipping is {json_clipping}, and "
                f"deepspeed_config.gradient_clipping of the Accelerate YAML is {yaml_clipping}. Remove one of them."
            )
    zero = config.get("zero_optimization") or {}
    json_values = {
        "zero_stage": zero.get("stage"),
        "offload_optimizer_device": (zero.get("offload_optimizer") or {}).get("device", "none"),
        "offload_param_device": (zero.get("offload_param") or {}).get("device", "none"),
    }
    for key, json_value in json_values.items():
        yaml_value = environ.get(f"ACCELERATE_DEEPSPEED_{key.upper()}", "none")
        if key in yaml_keys and yaml_value.lower() != str(json_value).lower():
            plan.problems.append(
                f"{plan.config_file}: it says {json.dumps(json_value)}, and deepspeed_config.{key} of the Accelerate YAML says "
                f"{yaml_value}. Remove the key from the YAML: the JSON alone is read."
            )


def _read_hpz(plan: LaunchPlan, zero: dict[str, Any], processes_of_node: int) -> None:
    """Read the group size of ZeRO++'s second copy of the weights. "auto" means the processes of a node."""
    setting = zero[HPZ]
    is_auto = setting == "auto"
    size = processes_of_node if is_auto else setting
    where = f"{plan.config_file}: zero_optimization.{HPZ} is {json.dumps(setting)}"
    world = plan.world_size
    # 1 is DeepSpeed's value for off. It stays where the size is not usable.
    zero[HPZ] = 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        plan.problems.append(f'{where}, expected the number of processes of a node, or "auto", which finds it.')
    elif setting in (0, 1):
        return
    elif plan.zero_stage != 3:
        plan.problems.append(f"{where} with stage {plan.zero_stage}; only stage 3 cuts weights. Set stage 3 or remove it.")
    elif plan.offload_param == "nvme":
        plan.problems.append(
            f"{where} with offload_param on nvme, where DeepSpeed cannot put the second copy. Offload parameters to cpu, or "
            f"remove {HPZ}."
        )
    elif world % size:
        fitting = max(2, -(-world // size)) * size
        if is_auto:
            plan.problems.append(
                f"{where}, the {size} processes of this node, and groups of {size} do not divide {world} processes. Pass "
                f"--num_processes {fitting}."
            )
        else:
            plan.problems.append(
                f"{where}, and groups of {size} do not divide {world} processes. Pass --num_processes {fitting}, or write a "
                "number that does, or auto."
            )
    elif is_auto and size in (1, world):
        reason = "there is one node" if size == world else "each node has one process"
        plan.notes.append(
            f"hpZ is off: {reason}, where a second copy of the weights would save nothing. For groups of another size write "
            f"their number of processes as {HPZ} into a copy of {plan.config_file}"
        )
    else:
        zero[HPZ] = size
        plan.secondary = size
        if size == world:
            plan.notes.append(f"hpZ: one group of all {world} processes; the second copy of the weights saves nothing there")


def check_device(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Add problems if DeepSpeed is set to another device, or if the config needs a GPU and there is none."""
    if plan.kind == "deepspeed" and plan.device == "cuda" and environ.get("DS_ACCELERATOR") == "cpu":
        plan.problems.append(
            "DS_ACCELERATOR: the environment tells DeepSpeed that it has a cpu, and this run is on cuda. Unset DS_ACCELERATOR "
            'to train on GPUs; to train on the CPU, set use_cpu: true in the Accelerate YAML or CUDA_VISIBLE_DEVICES="".'
        )
    zero = (plan.deepspeed_config or {}).get("zero_optimization", {})
    quantised_keys = [key for key in QUANTISED if zero.get(key)]
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
    """Add problems for ops that the config needs and this machine cannot compile: ``missing`` says why. Call after `fill`."""
    for key in ("offload_optimizer", "offload_param"):
        if getattr(plan, key) == "nvme" and "async_io" in missing:
            plan.problems.append(
                f"{plan.config_file}: zero_optimization.{key}.device is nvme, and DeepSpeed's op async_io cannot be "
                f"compiled here: {missing['async_io']}. Install that and run make setup, or offload to cpu "
                "(accelerate_configs/zero3_offload.yaml)."
            )
            # One missing op is one problem, whatever needs it.
            break
    section = (plan.deepspeed_config or {}).get("optimizer")
    params = section.get("params") if isinstance(section, dict) else None
    if params and not params.get("torch_adam") and plan.offload_optimizer == "none" and "fused_adam" in missing:
        fused_keys = sorted({"torch_adam", *FUSED_ONLY} & params.keys())
        plan.problems.append(
            f"{plan.config_file}: optimizer.params ask for DeepSpeed's FusedAdam, and its op fused_adam cannot be compiled "
            f"here: {missing['fused_adam']}. Install that toolkit and run make setup, or remove "
            f"{', '.join(fused_keys)} from the params: torch's Adam then steps."
        )


def _read_inline(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the YAML's ``deepspeed_config`` section, which the launcher put into variables, as a DeepSpeed config."""
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    zero: dict[str, Any] = {"stage": int(stage) if stage.isdigit() else stage}
    for key in ("offload_optimizer", "offload_param"):
        device = environ.get(f"ACCELERATE_DEEPSPEED_{key.upper()}_DEVICE", "none")
        nvme_path = environ.get(f"ACCELERATE_DEEPSPEED_{key.upper()}_NVME_PATH", "none")
        if device not in ("none", ""):
            zero[key] = {"device": device}
            if nvme_path != "none":
                zero[key]["nvme_path"] = nvme_path
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    is_auto = clipping in ("auto", "none")
    return {"zero_optimization": zero, "gradient_clipping": "auto" if is_auto else float(clipping)}


def find_json(path: str, strategy_file: str | Path | None) -> str:
    """Return where the JSON is that a strategy file names.

    A relative path starts at the working folder, as accelerate reads it. Where there is no such file, it starts at the strategy
    file's folder, or at one of the two above, of which one holds both ``accelerate_configs`` and ``ds_configs``; so shipped
    files work from anywhere.
    """
    if strategy_file is None or Path(path).is_file():
        return path
    folders = list(Path(strategy_file).expanduser().absolute().parents)[:3]
    for folder in folders:
        if (folder / path).is_file():
            return str(folder / path)
    return path


def check_micro_batch(plan: LaunchPlan, draft: ConfigDraft[Any]) -> None:
    """Copy the JSON's micro-batch into the draft, or add a problem if a person set another one.

    Call it before a resumed run cuts its batch anew.
    """
    ds = plan.deepspeed_config or {}
    micro_batch = ds.get("train_micro_batch_size_per_gpu", "auto")
    _copy_or_compare(plan, "train_micro_batch_size_per_gpu", micro_batch, "per_device_train_batch_size", draft)
    global_batch = ds.get("train_batch_size", "auto")
    micro_batches = draft.config.per_device_train_batch_size * plan.data_parallel_size
    # Where nothing else sets the accumulation, the JSON's global batch does.
    is_free = draft.sources.get("gradient_accumulation_steps", "default") == "default"
    is_free = is_free and ds.get("gradient_accumulation_steps", "auto") in ("auto", 1)
    if global_batch != "auto" and is_free and global_batch % micro_batches == 0:
        draft.set(f"{plan.config_file}: train_batch_size", gradient_accumulation_steps=global_batch // micro_batches)


def fill(plan: LaunchPlan, draft: ConfigDraft[Any]) -> None:
    """Write the run's sizes, clipping and optimizer into the config.

    Values that the JSON fixes and no person set are copied into the ``draft``; values that both set must be equal.
    """
    ds = plan.deepspeed_config
    assert ds is not None
    _copy_or_compare(plan, "gradient_clipping", ds.get("gradient_clipping", "auto"), "max_grad_norm", draft)
    if "optimizer" in ds:
        _fill_optimizer(plan, ds, draft)
    config = draft.config
    ds["gradient_clipping"] = config.max_grad_norm or NEVER
    global_batch = ds.get("train_batch_size", "auto")
    product = config.per_device_train_batch_size * config.gradient_accumulation_steps * plan.data_parallel_size
    if global_batch not in ("auto", product):
        plan.problems.append(
            f"{plan.config_file}: train_batch_size is {global_batch}, but {config.per_device_train_batch_size} per device x "
            f"{config.gradient_accumulation_steps} accumulation x {plan.data_parallel_size} processes = {product}. "
            'Write "auto" in the JSON, or make them equal.'
        )
    ds["train_batch_size"] = product
    ds["train_micro_batch_size_per_gpu"] = config.per_device_train_batch_size
    ds["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    for key in ("offload_optimizer", "offload_param"):
        section = ds["zero_optimization"].get(key) or {}
        if section.get("device") == "nvme" and section.get("nvme_path", "auto") in ("auto", None):
            section["nvme_path"] = str(Path(config.output_dir) / "nvme_offload")
            note = f"NVMe offload swaps under {section['nvme_path']}; set nvme_path in the JSON to a fast local disk"
            if note not in plan.notes:
                plan.notes.append(note)
    if "activation_checkpointing" in ds:
        _read_checkpointing(plan, ds["activation_checkpointing"], draft)
    ds["zero_allow_untested_optimizer"] = True
    if config.optimizer != "adamw":
        # accelerate would put DeepSpeed's CPU Adam in its place.
        ds["zero_force_ds_cpu_optimizer"] = False
    if ds.get("scheduler"):
        _fill_schedule(plan, ds, draft)


def _fill_schedule(plan: LaunchPlan, ds: dict[str, Any], draft: ConfigDraft[Any]) -> None:
    """Check the schedule that DeepSpeed is to make. One whose parameters are all auto, without warm-up, is made by
    ``lr_scheduler_type``."""
    import inspect

    from deepspeed.runtime import lr_schedules

    section = ds["scheduler"]
    kind = section.get("type")
    params = section.get("params") or {}
    where = f"{plan.config_file}: scheduler"
    if not isinstance(kind, str) or kind not in SCHEDULES:
        plan.problems.append(
            f"{where}.type {kind!r} is not known here. Write one of {', '.join(SCHEDULES)}, or remove the section; the "
            "recipe's lr_scheduler_type then sets the rate."
        )
        return
    signature = dict(inspect.signature(getattr(lr_schedules, kind)).parameters)
    # DeepSpeed gives these two itself.
    del signature["optimizer"], signature["last_batch_iteration"]
    problem = _problem_of_schedule(kind, params, signature)
    if problem is not None:
        plan.problems.append(f"{where}.params.{problem}")
        return
    is_all_auto = len(params) > 0 and all(value == "auto" for value in params.values())
    if is_all_auto and draft.config.warmup_steps(1) == 0:
        # DeepSpeed's schedules have two steps of warm-up or more, and their rate is 0.
        del ds["scheduler"]
        if not draft.sources.given("lr_scheduler_type"):
            draft.set(str(plan.config_file), lr_scheduler_type=SCHEDULES[kind])
        plan.notes.append(
            f"learning rate: lr_scheduler_type {draft.config.lr_scheduler_type} in place of {kind} from {plan.config_file}, "
            "which always warms up"
        )
        return
    if "warmup_max_lr" in signature:
        peak = params.get("warmup_max_lr", signature["warmup_max_lr"].default)
        # None is the optimizer's own rate.
        if peak is None:
            peak = "auto"
        _copy_or_compare(plan, "scheduler.params.warmup_max_lr", peak, "learning_rate", draft)
    steps = draft.config.max_train_steps
    lowest = params.get("warmup_min_lr", params.get("warmup_min_ratio", 0))
    if steps is not None and steps <= 2 and lowest in ("auto", 0):
        plan.problems.append(
            f"{where}: {kind} begins with two steps at rate 0, and max_train_steps is {steps}: nothing would be trained. "
            "Train more steps, or remove the section; lr_scheduler_type then sets the rate."
        )
    plan.notes.append(f"learning rate: {kind} from {plan.config_file}, not lr_scheduler_type")


def _problem_of_schedule(kind: str, params: dict[str, Any], signature: dict[str, inspect.Parameter]) -> str | None:
    """Return the first problem of a schedule's ``params``, which begins with the parameter's name; None without one.

    Args:
        signature: the parameters of DeepSpeed's class of this kind.
    """
    for name in params:
        if name not in signature:
            return f"{name}: {kind} has no such parameter.{nearest(name, set(signature))} Correct it."
    for name, parameter in signature.items():
        if parameter.default is parameter.empty and name not in params:
            return f'{name} is missing; {kind} needs it. Write "auto".'
    warmup = params.get("warmup_num_steps", "auto")
    if warmup != "auto" and (not isinstance(warmup, int) or warmup < 1):
        return f"warmup_num_steps is {json.dumps(warmup)}, expected a number of 1 or more, or auto."
    for name, value in params.items():
        if isinstance(value, (list, dict)):
            return f"{name} is {json.dumps(value)}; all weights train with one rate. Write one number, or auto."
    for name, value in params.items():
        if value == "auto" and name not in FILLED:
            return f"{name} is auto, which accelerate does not fill in for it. Write a value, or remove it."
    form = params.get("warmup_type", "log")
    if form not in ("log", "linear"):
        return f"warmup_type is {json.dumps(form)}, expected log or linear."
    return None


def _fill_optimizer(plan: LaunchPlan, ds: dict[str, Any], draft: ConfigDraft[Any]) -> None:
    section = ds["optimizer"] if isinstance(ds["optimizer"], dict) else {}
    kind = section.get("type")
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
    params = section.setdefault("params", {})
    keys = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
    for leaf, key in keys.items():
        _copy_or_compare(plan, f"optimizer.params.{leaf}", params.get(leaf, "auto"), key, draft)
        params[leaf] = getattr(draft.config, key)
    if params.get("amsgrad") is False:
        # False is the default. True is not supported, see below.
        del params["amsgrad"]
    if plan.offload_optimizer == "none":
        supported = {*ADAM, *FUSED_ONLY, "fused", "foreach"}
    else:
        supported = {*ADAM, "bias_correction"}
    for key in params:
        if key not in supported:
            plan.problems.append(
                f"{plan.config_file}: optimizer.params.{key} is not supported.{nearest(key, supported)} Correct or remove it."
            )
    betas = params.get("betas", "auto")
    if betas == "auto":
        betas = ["auto", "auto"]
    if not isinstance(betas, list) or len(betas) != 2:
        plan.problems.append(f"{plan.config_file}: optimizer.params.betas is {betas}, expected two numbers, as [0.9, 0.999].")
        return
    _copy_or_compare(plan, "optimizer.params.betas[0]", betas[0], "adam_beta1", draft)
    _copy_or_compare(plan, "optimizer.params.betas[1]", betas[1], "adam_beta2", draft)
    params["betas"] = [draft.config.adam_beta1, draft.config.adam_beta2]
    if plan.offload_optimizer == "none" and not {"torch_adam", *FUSED_ONLY} & params.keys():
        # The run then steps as it does without the section.
        params["torch_adam"] = True
        params["fused"] = True
        plan.notes.append(
            "optimizer: torch's Adam steps in place of DeepSpeed's FusedAdam, which has to be compiled, on GPUs with nvcc; "
            f'"torch_adam": false in the optimizer.params of {plan.config_file} keeps FusedAdam'
        )


def _read_checkpointing(plan: LaunchPlan, section: object, draft: ConfigDraft[Any]) -> None:
    """Read the settings of DeepSpeed's own checkpoint function (ZeRO-R). transformers' models call torch's instead, which can
    do one of them: inputs of layers in host memory, see `zerobook.models.recompute`."""
    where = f"{plan.config_file}: activation_checkpointing"
    if not isinstance(section, dict):
        plan.problems.append(f"{where} is {json.dumps(section)}, expected an object of settings. Remove it or write one.")
        return
    for key, value in section.items():
        setting = f"{where}.{key} is {json.dumps(value)}"
        if key in NOT_HERE:
            if value:
                plan.problems.append(f"{setting}; {NOT_HERE[key]}. Remove it.")
        elif key != CPU_CHECKPOINTING:
            plan.problems.append(f"{setting}; DeepSpeed has no such setting.{nearest(key, {*NOT_HERE, CPU_CHECKPOINTING})}")
        elif not isinstance(value, bool):
            plan.problems.append(f"{setting}, expected true or false.")
    if section.get(CPU_CHECKPOINTING) is True:
        recompute.request(plan, str(plan.config_file), f"activation_checkpointing.{CPU_CHECKPOINTING}", "offload", draft)


def _copy_or_compare(plan: LaunchPlan, json_key: str, json_value: object, key: str, draft: ConfigDraft[Any]) -> None:
    """Copy a value of the JSON into the draft's ``key``, or add a problem if a person set another value."""
    value = getattr(draft.config, key)
    if json_value in ("auto", value):
        return
    if not isinstance(json_value, int | float):
        plan.problems.append(f'{plan.config_file}: {json_key} is {json.dumps(json_value)}, expected a number or "auto".')
    elif draft.sources.given(key):
        plan.problems.append(
            f"{plan.config_file}: {json_key} is {json_value}, but {key} is {value} (from {draft.sources[key]}). "
            'Write "auto" in the JSON, or make them equal.'
        )
    else:
        draft.set(str(plan.config_file), **{key: json_value})
