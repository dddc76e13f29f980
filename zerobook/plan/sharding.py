"""The numbers of a strategy file that memory and traffic depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerobook.optimizer import OptimizerSpec, optimizer_spec
from zerobook.utils.model_config import automatic_zero_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from zerobook.strategy.launch_plan import LaunchPlan


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """The numbers of a `LaunchPlan`. Each ``auto`` of a DeepSpeed config is resolved. The defaults are DeepSpeed's."""

    # "single", "ddp", "deepspeed" or "fsdp"
    kind: str
    name: str
    ranks: int
    ranks_per_node: int
    # ZeRO's stage; 3 for FSDP
    stage: int = 0
    # ranks that share one copy of the weights
    shard_ranks: int = 1
    # hpZ: ranks that share a second copy of the weights; 1 without a second copy
    secondary_ranks: int = 1
    # ranks that share the tokens of a row
    token_ranks: int = 1
    precision: str = "no"
    # the value of --optimizer
    optimizer: str = "adamw"
    # "none", "cpu" or "nvme"
    offload_optimizer: str = "none"
    offload_param: str = "none"
    # On machines with GPUs, offloaded states are in pinned memory.
    pins_host_memory: bool = True
    reduce_bucket_elements: int = 500_000_000
    prefetch_bucket_elements: int = 50_000_000
    # elements up to which a weight stays gathered
    persistence_threshold: int = 100_000
    max_live_elements: int = 1_000_000_000
    max_reuse_elements: int = 1_000_000_000
    sub_group_elements: int = 1_000_000_000
    # trained elements of a rank that stay in host RAM, if weights are on NVMe
    max_in_cpu_elements: int = 1_000_000_000
    # buffers in host RAM for weights that are read from NVMe or written to it
    nvme_buffers: int = 5
    nvme_buffer_elements: int = 100_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    quantized_weights: bool = False
    quantized_gradients: bool = False
    # FSDP frees weights after a layer's forward pass.
    reshards: bool = True
    # FSDP: rank 0 loads the model, and sends the other ranks their shards.
    rank_0_loads: bool = False

    @property
    def is_zero3(self) -> bool:
        return self.kind == "deepspeed" and self.stage == 3

    @property
    def offloads(self) -> bool:
        """Whether weights or optimizer state are outside of the GPU."""
        return self.offload_optimizer != "none" or self.offload_param != "none"

    @property
    def optimizer_ranks(self) -> int:
        """Ranks among which optimizer state is divided: all under ZeRO-1 and 2, otherwise those that share the weights."""
        return self.ranks if self.stage in (1, 2) else self.shard_ranks

    @property
    def nearest_copy_ranks(self) -> int:
        """Ranks that share the copy from which weights are gathered again: under hpZ, this is the second copy."""
        return self.secondary_ranks if self.secondary_ranks > 1 else self.shard_ranks

    @property
    def weight_factor(self) -> float:
        """Share of a weight's 2 bytes that is sent. ZeRO++ can quantise weights to int8."""
        return 0.5 if self.quantized_weights else 1.0

    @property
    def gradient_factor(self) -> float:
        """Share of a gradient's 2 bytes that is sent. ZeRO++ can quantise gradients to int4."""
        return 0.25 if self.quantized_gradients else 1.0

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        return optimizer_spec(self.optimizer)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in forward and backward passes."""
        return 4 if self.precision == "no" else 2

    @property
    def cast(self) -> str:
        """The precision to which the library casts a layer's weights for its passes: DeepSpeed casts the model, FSDP2 gathered
        weights. ``no`` under other strategies."""
        return self.precision if self.kind in ("deepspeed", "fsdp") else "no"

    @property
    def autocast(self) -> str:
        """The precision that autocast casts single operations to, under one process and DDP."""
        return self.precision if self.kind in ("single", "ddp") else "no"


def sharding_spec(plan: LaunchPlan, model_config: PreTrainedConfig, ranks_per_node: int | None = None) -> ShardingSpec:
    """Return the settings of a launch plan that memory and traffic depend on. Each ``auto`` becomes the size for the model.

    Args:
        model_config: transformers' config; buckets are sized by its width.
        ranks_per_node: None if there is only one node.
    """
    # On GPUs, accelerate wraps a model in DDP only if there are several processes; on a CPU also with one.
    is_single = plan.kind == "ddp" and plan.world_size == 1 and plan.device != "cpu"
    common: dict[str, Any] = {
        "kind": "single" if is_single else plan.kind,
        "name": plan.name,
        "precision": plan.precision,
        "ranks": plan.world_size,
        "ranks_per_node": ranks_per_node or plan.world_size,
        "token_ranks": plan.sequence * plan.context,
        "optimizer": plan.optimizer,
        "offload_optimizer": plan.offload_optimizer,
        "offload_param": plan.offload_param,
    }
    if plan.kind == "fsdp":
        # FSDP shards what ZeRO stage 3 shards.
        return ShardingSpec(**common, stage=3, shard_ranks=plan.shard, rank_0_loads=plan.rank_0_loads, reshards=plan.reshards)
    if plan.kind != "deepspeed":
        return ShardingSpec(**common)
    zero = (plan.deepspeed_config or {}).get("zero_optimization", {})
    automatic_sizes = automatic_zero_sizes(model_config)

    def read_number(key: str, default: float, section: dict[str, Any] = zero) -> int:
        value = section.get(key, default)
        if value == "auto":
            value = automatic_sizes.get(key, default)
        return int(value)

    stage = plan.zero_stage or 0
    offloaded_weights = zero.get("offload_param") or {}
    offloaded_optimizer = zero.get("offload_optimizer") or {}
    return ShardingSpec(
        **common,
        stage=stage,
        shard_ranks=plan.world_size if stage == 3 else 1,
        secondary_ranks=plan.secondary,
        pins_host_memory=bool(offloaded_weights.get("pin_memory") or offloaded_optimizer.get("pin_memory")),
        reduce_bucket_elements=read_number("reduce_bucket_size", 5e8),
        prefetch_bucket_elements=read_number("stage3_prefetch_bucket_size", 5e7),
        persistence_threshold=read_number("stage3_param_persistence_threshold", 1e5),
        max_live_elements=read_number("stage3_max_live_parameters", 1e9),
        max_reuse_elements=read_number("stage3_max_reuse_distance", 1e9),
        sub_group_elements=read_number("sub_group_size", 1e9),
        max_in_cpu_elements=read_number("max_in_cpu", 1e9, offloaded_weights),
        nvme_buffers=read_number("buffer_count", 5, offloaded_weights),
        nvme_buffer_elements=read_number("buffer_size", 1e8, offloaded_weights),
        overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
        contiguous_gradients=bool(zero.get("contiguous_gradients", True)),
        quantized_weights=bool(zero.get("zero_quantized_weights", False)),
        quantized_gradients=bool(zero.get("zero_quantized_gradients", False)),
    )
