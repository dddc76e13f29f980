"""The account of a DeepSpeed JSON's keys: every key acts, is named as one without effect, or is a problem.

DeepSpeed drops root keys that it does not know, so those that it knows are listed here. Its own config class is built, too:
inside of most sections it checks keys and values, and its errors become problems that name the file and the key.
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

NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Root keys that hold a positive integer, or ``auto``."""
OBJECTS = (
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
"""Keys that hold an object."""
WITHOUT_EFFECT = {
    "autotuning": "it belongs to DeepSpeed's launcher; zerobook plan --recommend finds settings by plan",
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
"""Root keys that DeepSpeed knows and nothing here reads -> why. A run with one says so."""
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
"""Root keys that would change the training -> what to do. A section that says ``"enabled": false`` is none."""
ACTING = {
    *NUMBERS,
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
"""Root keys that DeepSpeed's engine reads and acts on, or that Zerobook fills in or reads."""
OF_OTHERS = {"sequence_parallel_size", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
"""Root keys that DeepSpeed reads in other places than its config class."""
KNOWN = {
    "": ACTING | OF_OTHERS,
    "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"},
    "data_types": {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"},
}
"""Root ("") and sections of which DeepSpeed drops the keys that it does not know -> those that it knows."""
_SECTIONS = {
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
"""DeepSpeed's class of a section's values -> its key."""


def stage_3_names() -> set[str]:
    """Return the names that DeepSpeed takes beside those that begin with ``stage3_``, for the same settings."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {name for name, field in DeepSpeedZeroConfig.model_fields.items() if str(field.alias).startswith("stage3_")}


def load(path: str, problems: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where it cannot be read. Add problems, also for keys that stand twice."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        for key in sorted(counts):
            if counts[key] > 1:
                problems.append(f"{path}: {key} stands twice in one object. Keep one of them.")
        return dict(pairs)

    try:
        return read_mapping(
            path,
            "DeepSpeed config",
            lambda text: json.loads(text, object_pairs_hook=distinct),
            advice=f"Paths in an Accelerate YAML are relative to the folder you launch from, here {Path.cwd()}, or to the "
            "folder of the YAML and the two above it.",
        )
    except ConfigError as error:
        problems += error.problems
    return {}


def check_shapes(config: dict[str, Any], file: str) -> list[str]:
    """Return a problem for each section that is not an object and each size that is not a number. Remove it from ``config``."""
    problems = []
    for dotted in OBJECTS:
        *parents, last_key = dotted.split(".")
        section: Any = config
        for key in parents:
            section = section.get(key, {}) if isinstance(section, dict) else {}
        if not isinstance(section, dict) or last_key not in section or isinstance(section[last_key], dict):
            continue
        value = section.pop(last_key)
        # null means that the section is not there.
        if value is not None:
            problems.append(f"{file}: {dotted} is {json.dumps(value)}, expected an object of settings.")
    for key in NUMBERS:
        value = config.get(key, "auto")
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f'{file}: {key} is {json.dumps(config.pop(key))}, expected a positive integer or "auto".')
    return problems


def account(plan: LaunchPlan) -> None:
    """Add a problem for each key that DeepSpeed does not know or that is refused, and a note for each without effect.

    Keys without effect, and refused ones that are switched off, are taken out of the config. Call it when the run's values are
    filled in.
    """
    ds = plan.deepspeed_config
    assert ds is not None
    # A copy of the keys, since some are taken out.
    for key in list(ds):
        if key not in REFUSED and key not in WITHOUT_EFFECT:
            continue
        if is_off(ds.pop(key)):
            continue
        if key in REFUSED:
            plan.problems.append(f"{plan.config_file}: {key} is not supported: {REFUSED[key]}.")
        else:
            plan.notes.append(f"{plan.config_file}: {key} has no effect: {WITHOUT_EFFECT[key]}")
    # DeepSpeed's own check comes first: it knows the values, and what follows only the names.
    build(plan)
    for section, names in KNOWN.items():
        settings = (ds.get(section) or {}) if section else ds
        prefix = f"{section}." if section else ""
        for key in settings:
            if key not in names:
                plan.problems.append(
                    f"{plan.config_file}: {prefix}{key}: DeepSpeed {version('deepspeed')} has no such key."
                    f"{nearest(key, names)} It would be ignored. Correct it or remove it."
                )


def is_off(value: object) -> bool:
    """Return whether a root key's value changes nothing."""
    neutral = not value or (value == 1.0 and not isinstance(value, bool))
    return neutral or (isinstance(value, dict) and value.get("enabled") in (False, "auto"))


def build(plan: LaunchPlan) -> None:
    """Build DeepSpeed's own config, as the engine will, and add problems for what it refuses: values, and keys of sections."""
    import logging

    from pydantic import ValidationError

    filled = _without_auto(deepcopy(plan.deepspeed_config))
    # There is no process group yet, so DeepSpeed computes the batch of one process.
    filled["train_batch_size"] = filled["train_micro_batch_size_per_gpu"] * filled["gradient_accumulation_steps"]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(filled)
    except ValidationError as error:
        plan.problems += list(_explained(plan, error))
    except Exception as error:
        # Assertions, and errors of many kinds, do not name a key. After another problem they may only repeat it.
        if not plan.problems:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            plan.problems.append(f"{plan.config_file}: DeepSpeed {version('deepspeed')} refuses it: {lines[0].rstrip('.')}.")


def _without_auto(value: Any) -> Any:
    """Return the settings without those that are ``auto``: accelerate fills them in when it knows the model."""
    if isinstance(value, dict):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
    return value


def _explained(plan: LaunchPlan, error: ValidationError) -> Iterator[str]:
    """Yield a problem for each of pydantic's errors, with the key's place in the file."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    section = _SECTIONS.get(error.title, error.title)
    models = [model for model in DeepSpeedConfigModel.__subclasses__() if model.__name__ == error.title]
    names = {name for model in models for name in model.model_fields}
    for detail in error.errors():
        path = ".".join([section, *map(str, detail["loc"])])
        # Another check has complained of this key already.
        if any(path in problem for problem in plan.problems):
            continue
        if detail["type"] == "extra_forbidden":
            # pydantic's message does not name the keys that there are.
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
