"""Distribution of a run over ranks by a strategy file, as the numbers that memory and traffic depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerobook.optimizer import OptimizerSpec, optimizer_spec
from zerobook.utils.model_config import automatic_zero_sizes

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PreTrainedConfig

    from zerobook.strategy.launch_plan import LaunchPlan


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """A `LaunchPlan` with every ``auto`` of its DeepSpeed config in numbers. Bucket and threshold sizes count elements."""

    kind: str  # "single", "ddp", "deepspeed" or "fsdp"
    name: str
    ranks: int
    node: int  # ranks on one node
    stage: int = 0
    shard: int = 1  # ranks that share one copy of the weights
    secondary: int = 1  # hpZ: ranks that share a second copy of the weights; 1: no second copy
    precision: str = "no"
    optimizer: str = "adamw"  # as --optimizer says
    offload_optimizer: str = "none"
    offload_param: str = "none"
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistent: int = 100_000
    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    in_cpu: int = 1_000_000_000  # with weights on NVMe: a rank's trained elements that stay in host RAM
    buffers: int = 5  # in host RAM, for weights that are read or written
    buffer: int = 100_000_000  # elements of each buffer
    overlap: bool = False
    contiguous: bool = True
    quantized_weights: bool = False
    quantized_gradients: bool = False
    reshards: bool = True  # FSDP: weights are freed after a layer's forward pass
    rank_0_loads: bool = False  # FSDP: the other ranks read no weights

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        return optimizer_spec(self.optimizer)

    @property
    def compute(self) -> int:
        """Bytes of an element in forward and backward passes."""
        return 4 if self.precision == "no" else 2

    @property
    def cast(self) -> str:
        """The precision that layers see their weights in: DeepSpeed casts the model, FSDP2 what it gathers."""
        return self.precision if self.kind in ("deepspeed", "fsdp") else "no"

    @property
    def autocast(self) -> str:
        """The precision that autocast casts single operations to, under one process and DDP."""
        return self.precision if self.kind in ("single", "ddp") else "no"


def spread(plan: LaunchPlan, model_config: PreTrainedConfig | SimpleNamespace, node: int | None = None) -> ShardingSpec:
    """Return the numbers of a resolved strategy file for a model.

    Args:
        model_config: transformers' config; buckets are sized by its width.
        node: ranks on one node; None where there is only one node.
    """
    # on GPUs, accelerate wraps a model in DDP only with several processes; on a CPU also with one
    alone = plan.kind == "ddp" and plan.world_size == 1 and plan.device != "cpu"
    common: dict[str, Any] = {
        "kind": "single" if alone else plan.kind, "name": plan.name, "precision": plan.precision,
        "ranks": plan.world_size, "node": node or plan.world_size, "optimizer": plan.optimizer,
        "offload_optimizer": plan.offload_optimizer, "offload_param": plan.offload_param,
    }  # fmt: skip
    if plan.kind == "fsdp":
        return ShardingSpec(**common, stage=3, shard=plan.shard, rank_0_loads=plan.rank_0_loads)
    if plan.kind != "deepspeed":
        return ShardingSpec(**common)
    zero = (plan.deepspeed_config or {}).get("zero_optimization", {})
    auto = automatic_zero_sizes(model_config)

    def number(key: str, default: float, section: dict[str, Any] = zero) -> int:
        value = section.get(key, default)
        return int(auto.get(key, default) if value == "auto" else value)

    stage = plan.zero_stage or 0
    weights = zero.get("offload_param") or {}
    return ShardingSpec(
        **common,
        stage=stage,
        shard=plan.world_size if stage == 3 else 1,
        secondary=plan.secondary,
        reduce_bucket=number("reduce_bucket_size", 5e8),
        prefetch_bucket=number("stage3_prefetch_bucket_size", 5e7),
        persistent=number("stage3_param_persistence_threshold", 1e5),
        live=number("stage3_max_live_parameters", 1e9),
        reuse=number("stage3_max_reuse_distance", 1e9),
        sub_group=number("sub_group_size", 1e9),
        in_cpu=number("max_in_cpu", 1e9, weights),
        buffers=number("buffer_count", 5, weights),
        buffer=number("buffer_size", 1e8, weights),
        overlap=bool(zero.get("overlap_comm", stage == 3)),
        contiguous=bool(zero.get("contiguous_gradients", True)),
        quantized_weights=bool(zero.get("zero_quantized_weights", False)),
        quantized_gradients=bool(zero.get("zero_quantized_gradients", False)),
    )
