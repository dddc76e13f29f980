"""Environment variables of accelerate that a launch may be started with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerobook.utils.environment import is_true
from zerobook.utils.nearest import nearest

_PREFIX = "ACCELERATE_"
_TPU = "it is for TPUs"
_SAGEMAKER = "it is for SageMaker"
_FP8 = "the precision is not fp8"
_HERE = "checkpoints and the final model are written by Zerobook"
_PARALLEL = (
    "DP_REPLICATE_SIZE",
    "DP_SHARD_SIZE",
    "TP_SIZE",
    "EP_SIZE",
    "CP_SIZE",
    "CP_BACKEND",
    "CP_COMM_STRATEGY",
    "SP_SIZE",
    "SP_BACKEND",
    "SP_SEQ_LENGTH",
    "SP_SEQ_LENGTH_IS_VARIABLE",
    "SP_ATTN_IMPLEMENTATION",
)
_FSDP = (
    "VERSION",
    "OFFLOAD_PARAMS",
    "MIN_NUM_PARAMS",
    "RESHARD_AFTER_FORWARD",
    "AUTO_WRAP_POLICY",
    "TRANSFORMER_CLS_TO_WRAP",
    "CPU_RAM_EFFICIENT_LOADING",
    "ACTIVATION_CHECKPOINTING",
    "ACTIVATION_CHECKPOINTING_OFFLOAD",
    "IGNORED_MODULES",
)
_USED = (
    "USE_CPU",
    "USE_DEEPSPEED",
    "USE_FSDP",
    "USE_PARALLELISM_CONFIG",
    "MIXED_PRECISION",
    "GRADIENT_ACCUMULATION_STEPS",
    "GRADIENT_CLIPPING",
    "CONFIG_DS_FIELDS",
    "CPU_AFFINITY",
    "DEBUG_MODE",
    "DEEPSPEED_CONFIG_FILE",
    "DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "DEEPSPEED_ZERO3_INIT",
    "DEEPSPEED_ZERO_STAGE",
    "DYNAMO_BACKEND",
    "LOG_LEVEL",
    "ENABLE_RICH",
    "ALLOW_CP_STANDALONE",
)
REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "the recipes do not run under Megatron-LM. Unset it",
    "ACCELERATE_TORCH_DEVICE": "a process takes the GPU of its LOCAL_RANK, or the CPU. Unset it; GPUs are chosen with "
    "CUDA_VISIBLE_DEVICES",
}
"""Variable -> why a launch with it is refused."""
VARIABLES: dict[str, str] = {
    **{f"ACCELERATE_{name}": "" for name in _USED},
    **{f"FSDP_{name}": "" for name in _FSDP},
    **{f"PARALLELISM_CONFIG_{name}": "" for name in _PARALLEL},
    **REFUSED,
    **{
        f"FSDP_{name}": "it is a setting of FSDP 1"
        for name in ("SHARDING_STRATEGY", "BACKWARD_PREFETCH", "FORWARD_PREFETCH", "USE_ORIG_PARAMS", "SYNC_MODULE_STATES")
    },
    **{
        f"ACCELERATE_DYNAMO_{name}": "the model is not compiled"
        for name in ("MODE", "USE_DYNAMIC", "USE_FULLGRAPH", "USE_REGIONAL_COMPILATION")
    },
    "FSDP_STATE_DICT_TYPE": _HERE,
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": _HERE,
    "ACCELERATE_FP8_BACKEND": _FP8,
    "ACCELERATE_FP8_OPT_LEVEL": _FP8,
    "ACCELERATE_DOWNCAST_BF16": _TPU,
    "ACCELERATE_IN_TPU_POD": _TPU,
    "ACCELERATE_USE_SAGEMAKER": _SAGEMAKER,
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": _SAGEMAKER,
    "ACCELERATE_NUM_PROCESSES": "it is for accelerate's own tests",
    "ACCELERATE_DEBUG_RDV_FILE": "it is for debug_launcher",
    "ACCELERATE_BYPASS_DEVICE_MAP": "--device_map is refused with several processes",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "models are not made empty here",
}
"""Variable -> why it has no effect on a run; empty where it has one."""


def check(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each refused variable, and for each name that is close to one of accelerate's."""
    for name in sorted(environ):
        if name in REFUSED and is_true(environ[name]) | (name == "ACCELERATE_TORCH_DEVICE"):
            yield f"{name} is {environ[name]}: {REFUSED[name]}."
        elif name.startswith(_PREFIX) and name not in VARIABLES:
            names = {key.removeprefix(_PREFIX) for key in VARIABLES if key.startswith(_PREFIX)}
            correction = nearest(name.removeprefix(_PREFIX), names, _PREFIX)
            # A name that is close to none of accelerate's belongs to another program.
            if correction:
                yield f"{name}: accelerate has no such variable.{correction} It would be ignored. Correct it or unset it."
