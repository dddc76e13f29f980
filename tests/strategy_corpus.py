"""Strategy files with the features that other projects' files have, each with what `zerobook doctor` has to say about it."""

# ruff: noqa: E501  a case is a line where it can be
from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A strategy file, written by `tests.test_strategy_corpus`.

    Attributes:
        yaml: keys of the Accelerate YAML.
        json: the DeepSpeed JSON that it names; None where it names none.
        said: words of the one problem; None where there is none.
        flags: of the recipe.
        processes: that are launched.
        refused_by_launcher: ``accelerate launch`` ends with an error of its own before it starts a process.
    """

    yaml: dict[str, Any]
    json: dict[str, Any] | None = None
    said: str | None = None
    flags: tuple[str, ...] = ()
    processes: int = 2
    refused_by_launcher: bool = False


DEEPSPEED = {"distributed_type": "DEEPSPEED"}
FSDP = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True},
}  # fmt: skip
ZERO2 = {"zero_optimization": {"stage": 2}}
ZERO3 = {"zero_optimization": {"stage": 3}}
AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


def fsdp(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": FSDP["fsdp_config"] | keys}


def parallel(kind: dict[str, Any], **sizes: int) -> dict[str, Any]:
    return kind | {"parallelism_config": {f"parallelism_config_{key}_size": size for key, size in sizes.items()}}


CORPUS: dict[str, Case] = {
    # --- what works
    "ddp": Case({"distributed_type": "MULTI_GPU"}),
    "one process": Case({"distributed_type": "NO"}, processes=1),
    "fsdp 2": Case(FSDP),
    "fsdp 2, a size that is not used": Case(fsdp(fsdp_min_num_params=1000)),
    "fsdp 2, offload": Case(fsdp(fsdp_offload_params=True)),
    "fsdp 2, the layer's class": Case(fsdp(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer")),
    "a layer of another architecture": Case(
        fsdp(fsdp_transformer_layer_cls_to_wrap="BertLayer"), said="BertLayer: LlamaForCausalLM has no such layer"),
    "fsdp 2, keys of version 1": Case(fsdp(
        fsdp_sharding_strategy="FULL_SHARD", fsdp_backward_prefetch="BACKWARD_PRE", fsdp_forward_prefetch=True,
        fsdp_use_orig_params=True, fsdp_sync_module_states=True, fsdp_state_dict_type="SHARDED_STATE_DICT")),
    "fsdp 2, no wrapping": Case(fsdp(fsdp_auto_wrap_policy="NO_WRAP")),
    "fsdp 2, activation checkpointing": Case(fsdp(fsdp_activation_checkpointing=True)),
    "fsdp 2, keys without prefix": Case({"distributed_type": "FSDP", "fsdp_config": {"version": 2}}),
    "inline stage 2": Case(DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}}),
    "inline stage 3": Case(DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}}),
    "inline offload": Case(DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}),
    "stage 2 all auto": Case(DEEPSPEED, ZERO2 | AUTO | {"gradient_clipping": "auto"}),
    "stage 3 of the Trainer's docs": Case(DEEPSPEED, AUTO | {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
                 "min_loss_scale": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
                              "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
                              "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False}),
    "offload of everything": Case(DEEPSPEED, {"zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}}),
    "offload as it was written once": Case(DEEPSPEED, {"zero_optimization": {"stage": 2, "cpu_offload": True}}),
    "a schedule of auto": Case(DEEPSPEED, ZERO2 | {"scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"}}}),
    "a schedule of numbers": Case(DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupCosineLR", "params": {
        "warmup_num_steps": 2, "total_num_steps": 10, "warmup_min_ratio": 0.1}}}),
    "an empty clipping in the YAML beside a JSON": Case(DEEPSPEED | {"deepspeed_config": {"gradient_clipping": None}}, ZERO2),
    "clipping in the YAML beside a JSON": Case(DEEPSPEED | {"deepspeed_config": {"gradient_clipping": 0.5}}, ZERO2),
    "an optimizer's older keys": Case(DEEPSPEED, ZERO2 | {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "amsgrad": False}}}),
    "sections that are off": Case(DEEPSPEED, ZERO2 | {
        "amp": {"enabled": False}, "flops_profiler": {"enabled": False}, "elasticity": {"enabled": False}}),
    "monitors of DeepSpeed": Case(DEEPSPEED, ZERO2 | {"tensorboard": {"enabled": False}, "csv_monitor": {"enabled": False}}),
    "communication type": Case(DEEPSPEED, ZERO2 | {"communication_data_type": "fp32", "prescale_gradients": False}),
    "a fixed micro-batch, and none by flag": Case(DEEPSPEED, ZERO2 | {"train_micro_batch_size_per_gpu": 2}),
    "fixed batches, and none by flag": Case(DEEPSPEED, ZERO2 | {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}),
    "a fixed batch alone": Case(DEEPSPEED, ZERO2 | {"train_batch_size": 64}),
    "a fixed clipping": Case(DEEPSPEED, ZERO2 | {"gradient_clipping": 0.3}),
    "the JSON's stage, said twice": Case(DEEPSPEED | {"deepspeed_config": {"zero_stage": 2}}, ZERO2),
    "offload to none": Case(DEEPSPEED, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}),
    "settings of ranks' messages": Case(DEEPSPEED, ZERO2 | {"comms_logger": {"enabled": False}, "memory_breakdown": False}),
    # --- keys without effect, and unknown keys
    "checkpoints of DeepSpeed": Case(DEEPSPEED, ZERO2 | {"checkpoint": {"tag_validation": "Warn"}}),
    "data efficiency": Case(DEEPSPEED, ZERO2 | {"data_efficiency": {"enabled": False}}),
    "a typo at the root": Case(DEEPSPEED, ZERO2 | {"gradient_cliping": 0.1}, "Did you mean gradient_clipping?"),
    "another typo at the root": Case(DEEPSPEED, ZERO2 | {"zero_optimisation": {"stage": 3}}, "Did you mean zero_optimization?"),
    "a key of a section at the root": Case(
        DEEPSPEED, ZERO2 | {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer: DeepSpeed"),
    "a key of fp16 in bf16": Case(DEEPSPEED, ZERO2 | {"bf16": {"enabled": "auto", "loss_scale": 0}}, "bf16.loss_scale"),
    "a typo in a section": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 2, "overlap_com": True}}, "Did you mean overlap_comm?"),
    "a typo in offload": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memry": True}}}, "pin_memry"),
    "a typo in fp16": Case(DEEPSPEED, ZERO2 | {"fp16": {"enabled": "auto", "loss_scal": 0}}, "fp16.loss_scal"),
    "a typo in fsdp_config": Case(fsdp(fsdp_reshard_after_forwards=True), said="Did you mean fsdp_reshard_after_forward?"),
    "a typo in deepspeed_config": Case(
        DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "gradient_clip": 1.0}}, said="deepspeed_config.gradient_clip"),
    "a typo in parallelism_config": Case(
        FSDP | {"parallelism_config": {"parallelism_config_tpsize": 2}}, said="Did you mean parallelism_config_tp_size?"),
    "a typo at the root of the YAML": Case(FSDP | {"mixed_precison": "bf16"}, said="mixed_precison", refused_by_launcher=True),
    "a typo in aio": Case(DEEPSPEED, ZERO2 | {"aio": {"block_sze": 1048576}}, "aio.block_sze"),
    "a typo in data_types": Case(DEEPSPEED, ZERO2 | {"data_types": {"grad_accum_dtyp": "fp32"}}, "data_types.grad_accum_dtyp"),
    "a typo in a schedule": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}}, "'warmup_steps'"),
    "a typo in an optimizer": Case(
        DEEPSPEED, ZERO2 | {"optimizer": {"type": "AdamW", "params": {"weight_decy": 0.1}}}, "Did you mean weight_decay?"),
    "a schedule without its length": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}}, "'total_num_steps'"),
    "a schedule's form that is not filled in": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto"}}}, "warmup_type is auto"),
    "a schedule's form that there is not": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "quadratic"}}}, "expected log or linear"),
    "a schedule without warm-up": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "positive integer, got 0"),
    # --- values of other types
    "resharding of version 1": Case(
        fsdp(fsdp_reshard_after_forward="FULL_SHARD"), said="full_shard"),
    "an unknown wrapping": Case(fsdp(fsdp_auto_wrap_policy="LAYERS"), said="LAYERS"),
    "an unknown state": Case(fsdp(fsdp_state_dict_type="SHARDED"), said="SHARDED"),
    "bf16 true": Case(DEEPSPEED, ZERO2 | {"bf16": True}, "bf16 is true, expected an object"),
    "offload_optimizer cpu": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer is \"cpu\", expected an object"),
    "offload_param true": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 3, "offload_param": True}}, "offload_param is true, expected an object"),
    "zero_optimization true": Case(DEEPSPEED, {"zero_optimization": True}, "zero_optimization is true, expected an object"),
    "optimizer AdamW": Case(DEEPSPEED, ZERO2 | {"optimizer": "AdamW"}, "optimizer is \"AdamW\", expected an object"),
    "scheduler params null": Case(DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": []}}, "scheduler.params is []"),
    "accumulation as text": Case(
        DEEPSPEED, ZERO2 | {"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps is \"4\", expected"),
    "micro-batch as text": Case(DEEPSPEED, ZERO2 | {"train_micro_batch_size_per_gpu": "2"}, "expected a positive integer"),
    "a batch of 0": Case(DEEPSPEED, ZERO2 | {"train_batch_size": 0}, "train_batch_size is 0"),
    "stage as text": Case(DEEPSPEED, {"zero_optimization": {"stage": "two"}}, "zero_optimization.stage is \"two\""),
    "a bucket as text": Case(DEEPSPEED, {"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}, "reduce_bucket_size"),
    "clipping as text": Case(DEEPSPEED, ZERO2 | {"gradient_clipping": "low"}, "gradient_clipping is \"low\""),
    "fsdp_config as text": Case({"distributed_type": "FSDP", "fsdp_config": "full_shard"}, said="expected a mapping"),
    # --- what is not supported
    "size based wrapping": Case(
        fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1000), said="fsdp_auto_wrap_policy is SIZE_BASED_WRAP"),
    "a compiled model": Case({"distributed_type": "MULTI_GPU", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, said="dynamo_backend"),
    "zenflow": Case(DEEPSPEED, {"zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}}, "zenflow is not supported"),
    "no norm of gradients": Case(DEEPSPEED, {"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, "compute_grad_norm"),
    "scaled before they are reduced": Case(DEEPSPEED, ZERO2 | {"prescale_gradients": True}, "prescale_gradients is not supported"),
    "the first form of stage 1": Case(DEEPSPEED, {"zero_optimization": {"stage": 1, "legacy_stage1": True}}, "legacy_stage1"),
    "amsgrad": Case(DEEPSPEED, ZERO2 | {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
    "a schedule that a short run does not leave": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}, "two steps at rate 0",
        ("--max_train_steps", "2")),
    "stage 0": Case(DEEPSPEED, {"zero_optimization": {"stage": 0}}, "the recipes run stages 1, 2 and 3"),
    "no stage": Case(DEEPSPEED, {"fp16": {"enabled": "auto"}}, "zero_optimization is missing"),
    "fsdp 1": Case({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, said="fsdp_version: 2"),
    "amp": Case(DEEPSPEED, ZERO2 | {"amp": {"enabled": True, "opt_level": "O1"}}, "amp is not supported"),
    "elasticity": Case(DEEPSPEED, ZERO2 | {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}},
                       "elasticity"),
    "tensor parallelism of DeepSpeed": Case(DEEPSPEED, ZERO2 | {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
    "compile of an older form": Case(DEEPSPEED, ZERO2 | {"compile": {"enabled": True, "backend": "inductor"}}),
    "compression": Case(DEEPSPEED, ZERO2 | {"compression_training": {"weight_quantization": {}}}, "compression_training"),
    "layer drop": Case(DEEPSPEED, ZERO2 | {"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop"),
    "ZeRO-R": Case(DEEPSPEED, ZERO2 | {"activation_checkpointing": {"partition_activations": True}}, "partition_activations is true"),
    "Lamb": Case(DEEPSPEED, ZERO2 | {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "optimizer.type is \"Lamb\""),
    "1-bit Adam": Case(DEEPSPEED, ZERO2 | {"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is \"OneBitAdam\""),
    "OneCycle": Case(DEEPSPEED, ZERO2 | {"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type"),
    "parameters offloaded under stage 2": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "only under stage 3"),
    "quantised weights on a CPU": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
    "groups that do not divide": Case(DEEPSPEED, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "do not divide"),
    "fp16 on a CPU": Case({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}, said="fp16 does not train on a CPU"),
    "fp8": Case({"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}, said="fp8 is not supported", refused_by_launcher=True),
    "no precision without quotes": Case(
        {"distributed_type": "MULTI_GPU", "mixed_precision": False}, said="mixed_precision is False",
        refused_by_launcher=True),
    "no distribution without quotes": Case(
        {"distributed_type": False}, said="distributed_type is False", processes=1),
    "Megatron-LM": Case({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
                        said="distributed_type is MEGATRON_LM"),
    "a TPU": Case({"distributed_type": "XLA"}, said="distributed_type is XLA", refused_by_launcher=True),
    "SageMaker": Case({"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}, said="compute_environment", refused_by_launcher=True),
    "mpirun": Case({"distributed_type": "MULTI_CPU", "mpirun_config": {"mpirun_hostfile": "/etc/hosts"}}, said="mpirun_config", refused_by_launcher=True),
    "one process that is launched twice": Case({"distributed_type": "NO"}, said="num_processes is 2"),
    "tensor parallel under DDP": Case(parallel({"distributed_type": "MULTI_GPU"}, tp=2), said=""),
    "tensor and expert parallel": Case(parallel(FSDP, tp=2, ep=2), said="is not supported"),
    "sequence parallel under FSDP": Case(parallel(FSDP, sp=2), said="zero3_sequence.yaml"),
    "masters in bf16": Case(
        DEEPSPEED, ZERO2 | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "bf16.bf16_master_weights_and_grads is not supported"),
    "masters in bf16, offloaded": Case(
        DEEPSPEED, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}}}, "bf16_master_weights_and_grads is not supported"),
    "masters in fp16": Case(
        DEEPSPEED, ZERO2 | {"fp16": {"fp16_master_weights_and_grads": True}}, "fp16_master_weights_and_grads is not supported"),
    "masters in bf16, switched off": Case(DEEPSPEED, ZERO2 | {"bf16": {"bf16_master_weights_and_grads": False}}),
    "offload as it was written once, as text": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 2, "cpu_offload": "cpu"}}, "offload_optimizer replaced it"),
    "bf16 as it was written once": Case(DEEPSPEED, ZERO2 | {"bfloat16": {"enabled": True}}),
    "bf16 as it is and was written": Case(
        DEEPSPEED, ZERO2 | {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16 replaced it"),
    "several processes of MPI": Case({"distributed_type": "MULTI_CPU"}, said="distributed_type is MULTI_CPU"),
    "fsdp 1, hybrid": Case(
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
        said="parallelism_config_dp_replicate_size"),
    "a layer of experts that is not there": Case(
        DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock"}},
        said="MixtralSparseMoeBlock: LlamaForCausalLM has no such layer"),
    "zero 1 that accumulates bf16 in fp32": Case(
        DEEPSPEED | {"mixed_precision": "bf16"}, {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
        "grad_accum_dtype is fp32"),
    "zero 2 that accumulates bf16 in fp32": Case(
        DEEPSPEED | {"mixed_precision": "bf16"}, ZERO2 | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero 1 that accumulates in fp32": Case(
        DEEPSPEED, {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}),
    # --- two values
    "another clipping in the YAML": Case(
        DEEPSPEED | {"deepspeed_config": {"gradient_clipping": 0.5}}, ZERO2 | {"gradient_clipping": 1.0}, "gradient_clipping 1.0"),
    "activation checkpointing that a flag refuses": Case(
        fsdp(fsdp_activation_checkpointing=True), said="activation_checkpointing is none (from flag",
        flags=("--activation_checkpointing", "none")),
    "another stage in the YAML": Case(DEEPSPEED | {"deepspeed_config": {"zero_stage": 3}}, ZERO2, "deepspeed_config.zero_stage"),
    "a disk in the YAML that the JSON does not have": Case(
        DEEPSPEED | {"deepspeed_config": {"offload_optimizer_nvme_path": "/disk"}}, ZERO2, "offload_optimizer_nvme_path null"),
    "another clipping by flag": Case(
        DEEPSPEED, ZERO2 | {"gradient_clipping": 0.3}, "gradient_clipping is 0.3, but max_grad_norm is 1.0", ("--max_grad_norm", "1")),
    "another micro-batch by flag": Case(
        DEEPSPEED, ZERO2 | {"train_micro_batch_size_per_gpu": 2}, "per_device_train_batch_size is 4",
        ("--per_device_train_batch_size", "4")),
    "another rate by flag": Case(
        DEEPSPEED, ZERO2 | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "learning_rate is 0.01",
        ("--learning_rate", "0.01")),
    "another peak of the schedule by flag": Case(
        DEEPSPEED, ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, "learning_rate is 0.01",
        ("--learning_rate", "0.01")),
    "batches that do not multiply": Case(
        DEEPSPEED, ZERO2 | {"train_batch_size": 15, "train_micro_batch_size_per_gpu": 2}, "train_batch_size is 15"),
    "both half precisions": Case(DEEPSPEED, ZERO2 | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both fp16.enabled"),
}  # fmt: skip
