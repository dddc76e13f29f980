"""Checks of the keys of a DeepSpeed JSON: each key has an effect, or is reported as a key without effect, or is a problem.

DeepSpeed ignores root keys that it does not know, so the keys that it knows are listed here. Inside of most sections,
DeepSpeed's config class checks keys and values. So this class is built, and its errors become problems that name the file and
the key.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest
from zerobook.utils.yaml_text import read_mapping

if TYPE_CHECKING:
    from pydantic import ValidationError

    from zerobook.strategy.launch_plan import LaunchPlan

# Root keys that hold a positive integer, or ``auto``.
INTEGER_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys that hold an object.
OBJECT_KEYS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "fp16",
    "bf16",
    "bfloat16",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "amp",
    "compile",
    "aio",
    "data_types",
    "tensor_parallel",
)
# Root key that DeepSpeed knows and that has no effect here -> why. A run with such a key has a note on it.
WITHOUT_EFFECT = {
    "autotuning": "it belongs to DeepSpeed's launcher; zerobook plan --recommend computes which settings fit",
    "checkpoint": "checkpoints are written by Zerobook",
    "datastates_ckpt": "checkpoints are written by Zerobook",
    "nebula": "checkpoints are written by Zerobook",
    "data_efficiency": "batches are made by Zerobook",
    "curriculum_learning": "batches are made by Zerobook",
    "dataloader_drop_last": "batches are made by Zerobook",
    "vocabulary_size": "DeepSpeed only warns about it",
    "pipeline": "there is no pipeline parallelism here",
    "use_data_before_expert_parallelism": "it belongs to DeepSpeed's layers of experts, which the models do not use",
    "expert_parallel": "it belongs to DeepSpeed's layers of experts, which the models do not use",
    "sparse_attention": "it belongs to DeepSpeed's attention layers, which the models do not use",
    "compile": "DeepSpeed compiles a model when it is told to, and it is not told to here",
    "sparse_gradients": "the models have no embeddings with sparse gradients",
    "disable_allgather": "DeepSpeed reads it nowhere",
    "timers": "it belongs to wall_clock_breakdown of DeepSpeed's own engine loop",
}
# Root key that would change the training -> why it is refused. Sections with ``"enabled": false`` are not refused.
REFUSED = {
    "amp": "NVIDIA's apex is not used. Remove the section; --mixed_precision bf16 or fp16 chooses the precision",
    "torch_autocast": "the precision is that of --mixed_precision. Remove the section",
    "elasticity": "it changes the batch size of a run by itself. Remove the section; a resumed run keeps its global batch",
    "tensor_parallel": "DeepSpeed's tensor parallelism is not supported. Remove the section, or launch with "
    "accelerate_configs/fsdp_tensor.yaml",
    "compression_training": "it replaces layers of the model, which checkpoints do not know. Remove the section",
    "quantize_training": "it replaces weights while training, which checkpoints do not know. Remove the section",
    "progressive_layer_drop": "the models do not take its arguments. Remove the section",
    "eigenvalue": "it serves quantize_training, which is not supported. Remove the section",
    "hybrid_engine": "it is for reinforcement learning. Remove the section",
    "weight_quantization": "it is for inference. Remove the section",
    "graph_harvesting": "it captures steps in CUDA graphs, which the loop does not replay. Remove it",
    "gradient_allreduce_op": "the loss is a mean over all processes, for which gradients are averaged. Remove it",
    "prescale_gradients": "ZeRO averages gradients after it has reduced them. Remove it",
    "gradient_predivide_factor": "ZeRO averages gradients after it has reduced them. Remove it",
    "managed_gradient_accumulation": "Zerobook says itself which micro-batch is the last of a step. Remove it",
}
# Root keys that DeepSpeed's engine uses, or that Zerobook fills in or reads.
EFFECTIVE_KEYS = {
    *INTEGER_KEYS,
    "gradient_clipping",
    "zero_optimization",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "data_types",
    "activation_checkpointing",
    "aio",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "comms_logger",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "disable_python_gc",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}
# Root keys that DeepSpeed reads outside of its config class.
KEYS_READ_ELSEWHERE = {"sequence_parallel_size", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
# Section, or "" for the root, in which DeepSpeed ignores unknown keys -> the keys that DeepSpeed knows.
KNOWN_KEYS = {
    "": EFFECTIVE_KEYS | KEYS_READ_ELSEWHERE,
    "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"},
    "data_types": {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"},
}
# DeepSpeed's class for a section -> the path of the section.
_SECTION_OF_CLASS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsConfig": "comms_logger",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler",
}


def stage_3_names() -> set[str]:
    """Return the other names of the settings that begin with ``stage3_``. DeepSpeed accepts both names."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {name for name, field in DeepSpeedZeroConfig.model_fields.items() if str(field.alias).startswith("stage3_")}


def load(path: str, problems: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; an empty object if the file cannot be read.

    Add a problem to ``problems`` if the file cannot be read, and for each key that an object has twice.
    """

    # json calls this for each object. By default, it keeps the last of several equal keys without a message.
    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        for key in sorted(counts):
            if counts[key] > 1:
                problems.append(f"{path}: {key} stands twice in one object. Keep one of them.")
        return dict(pairs)

    try:
        return read_mapping(
            path,
            "DeepSpeed config",
            lambda text: json.loads(text, object_pairs_hook=make_object),
            advice=f"Paths in an Accelerate YAML are relative to the folder you launch from, here {Path.cwd()}, or to the "
            "folder of the YAML and the two above it.",
        )
    except ConfigError as error:
        problems += error.problems
    return {}


def check_shapes(config: dict[str, Any], file: str) -> list[str]:
    """Return a problem for each section that is not an object, and for each of `INTEGER_KEYS` that is not a positive integer.

    Remove their keys from ``config``.
    """
    problems = []
    for dotted_key in OBJECT_KEYS:
        *parents, last_key = dotted_key.split(".")
        section: Any = config
        for key in parents:
            # A parent that is no object has been removed in an earlier round of the loop.
            section = section.get(key, {})
        if last_key not in section or isinstance(section[last_key], dict):
            continue
        value = section.pop(last_key)
        # null means that there is no section.
        if value is not None:
            problems.append(f"{file}: {dotted_key} is {json.dumps(value)}, expected an object of settings.")
    for key in INTEGER_KEYS:
        value = config.get(key, "auto")
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f'{file}: {key} is {json.dumps(config.pop(key))}, expected a positive integer or "auto".')
    return problems


def check_keys(plan: LaunchPlan) -> None:
    """Add a problem for each unknown or refused key of the plan's DeepSpeed config, and a note for each key without effect.

    Remove the refused keys and those without effect from the config. Call it when the run's values are filled in.
    """
    ds = plan.deepspeed_config
    assert ds is not None
    # Loop over a copy of the keys, since keys are removed.
    for key in list(ds):
        if key not in REFUSED and key not in WITHOUT_EFFECT:
            continue
        if is_off(ds.pop(key)):
            continue
        if key in REFUSED:
            plan.problems.append(f"{plan.config_file}: {key} is not supported: {REFUSED[key]}.")
        else:
            plan.notes.append(f"{plan.config_file}: {key} has no effect: {WITHOUT_EFFECT[key]}")
    # DeepSpeed's own check comes first, since it checks values, too. The loop below checks only names.
    check_by_deepspeed(plan)
    for section, names in KNOWN_KEYS.items():
        settings = (ds.get(section) or {}) if section else ds
        prefix = f"{section}." if section else ""
        for key in settings:
            if key not in names:
                plan.problems.append(
                    f"{plan.config_file}: {prefix}{key}: DeepSpeed {version('deepspeed')} has no such key."
                    f"{nearest(key, names)} It would be ignored. Correct it or remove it."
                )


def is_off(value: object) -> bool:
    """Return whether the value of a refused root key, or of a root key without effect, turns the key off."""
    # A factor of 1 changes nothing.
    is_neutral = not value or (value == 1.0 and not isinstance(value, bool))
    return is_neutral or (isinstance(value, dict) and value.get("enabled") in (False, "auto"))


def check_by_deepspeed(plan: LaunchPlan) -> None:
    """Build DeepSpeed's config object, as the engine will, and add a problem for each value or key that it refuses."""
    import logging

    from pydantic import ValidationError

    filled = _without_auto(deepcopy(plan.deepspeed_config))
    # Both factors are filled in already, so they are not auto. There is no process group yet, so DeepSpeed expects the batch
    # size of a run with one process.
    filled["train_batch_size"] = filled["train_micro_batch_size_per_gpu"] * filled["gradient_accumulation_steps"]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(filled)
    except ValidationError as error:
        plan.problems += list(_explain_errors(plan, error))
    except Exception as error:
        # DeepSpeed raises errors of many other types, which name no key. If there is a problem already, they may repeat it.
        if not plan.problems:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            plan.problems.append(f"{plan.config_file}: DeepSpeed {version('deepspeed')} refuses it: {lines[0].rstrip('.')}.")


def _without_auto(value: Any) -> Any:
    """Return nested settings without those that are ``auto``, which accelerate fills in when it knows the model."""
    if isinstance(value, dict):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
    return value


def _explain_errors(plan: LaunchPlan, error: ValidationError) -> Iterator[str]:
    """Yield a problem for each error of pydantic, with the path of the key in the file."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    # The title of the error is the name of DeepSpeed's class for the section.
    section = _SECTION_OF_CLASS.get(error.title, error.title)
    # Find the keys of the section, so that the nearest one can be named.
    models = [model for model in DeepSpeedConfigModel.__subclasses__() if model.__name__ == error.title]
    names = {name for model in models for name in model.model_fields}
    for detail in error.errors():
        path = ".".join([section, *map(str, detail["loc"])])
        # An earlier check has reported this key already.
        if any(path in problem for problem in plan.problems):
            continue
        if detail["type"] == "extra_forbidden":
            # The message of pydantic does not name the keys that exist.
            yield (
                f"{plan.config_file}: {path}: DeepSpeed {version('deepspeed')} has no such key."
                f"{nearest(str(detail['loc'][-1]), names)} Correct it or remove it."
            )
        else:
            message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"]).rstrip(".")
            yield (
                f"{plan.config_file}: {path} is {json.dumps(detail['input'], default=str)}; DeepSpeed {version('deepspeed')}: "
                f"{message}."
            )
