"""Bytes that the libraries send in each collective of an optimizer step.

The formulas of the literature are in `zerobook.plan.formulas`. The libraries send more in some places and less in others:
DeepSpeed's ZeRO-1 and 2 all-reduce gradients where a reduce-scatter would be enough, ZeRO-3 keeps weights that it needs
again soon, and FSDP2 keeps weights outside layers gathered. The rules follow the sources of
DeepSpeed 0.19.8 and torch 2.13, and were compared with real runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobook.plan.gather_schedule import Gathers, follow_gathers
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import (
    FP32_BYTES,
    ModelWeights,
    Weight,
    cast_bytes,
    ceil_div,
    count_elements,
    shard_elements,
    weights_on_nvme,
)
from zerobook.utils.model_config import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# An all-reduce is a reduce-scatter and an all-gather, so each rank of a ring sends its bytes twice.
ALL_REDUCE_PASSES = 2
# Collective -> how many times as much gloo sends as a ring.
GLOO_FACTORS = {"reduce-scatter": 2}


@dataclass(frozen=True)
class Transfer:
    """A collective's share of a step: ``size_bytes`` of full tensors among ``ranks``; in a ring, each rank sends ``passes``
    x (N - 1)/N of them."""

    content: str
    collective: str
    size_bytes: float
    ranks: int
    passes: int = 1
    # All of these ranks are on one node, whatever the number of nodes.
    within_node: bool = False
    # the number of rings that leave a node at once, where its ranks belong to different rings
    rings: int = 1

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends."""
        return self.size_bytes * self.passes * (self.ranks - 1) / self.ranks


def list_transfers(
    model: ModelWeights, sharding: ShardingSpec, accumulation: int = 1, gathers: Gathers | None = None
) -> list[Transfer]:
    """Return the collectives of a step whose size grows with the model. Those of single numbers, such as losses, are left out.

    Args:
        gathers: weights that are gathered in a micro-batch; None means `follow_gathers` without a recorded order.
    """
    if sharding.ranks == 1 or sharding.kind == "single":
        return []
    if sharding.is_zero3:
        gathers = gathers or follow_gathers(model.weights, sharding, (), accumulation)
        return _zero3_transfers(model, sharding, accumulation, gathers)
    if sharding.kind == "fsdp":
        return _fsdp_transfers(model, sharding, accumulation)
    return _replicated_transfers(model, sharding, accumulation)


def list_token_transfers(
    model_config: PreTrainedConfig, tokens: int, sharding: ShardingSpec, accumulation: int
) -> list[Transfer]:
    """Return what the attention of ``tokens`` sends in a step among ranks that share the tokens of a row.

    DeepSpeed exchanges tokens for heads, of queries, keys, values and results. Context parallelism sends keys and values to all
    ranks in both passes, and their gradients back.
    """
    ranks = sharding.token_ranks
    if ranks == 1:
        return []
    text = text_config(model_config)
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    # The heads together can be wider or narrower than the hidden size, and values narrower than keys.
    key_size = (
        getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size / text.num_attention_heads
    )
    value_size = getattr(text, "v_head_dim", None) or key_size
    # A query and a result have as many bytes as a key and a value.
    head_bytes = sharding.compute_bytes * (key_size + value_size)
    if sharding.kind == "deepspeed":
        token_bytes = 2 * head_bytes * (text.num_attention_heads + key_heads) / ranks
    else:
        token_bytes = 3 * head_bytes * key_heads
    size_bytes = accumulation * text.num_hidden_layers * tokens * token_bytes
    return [Transfer("attention", "all-to-all", size_bytes, ranks, within_node=ranks <= sharding.ranks_per_node)]


def _replicated_transfers(model: ModelWeights, sharding: ShardingSpec, accumulation: int) -> list[Transfer]:
    """Return the transfers of DDP, ZeRO-1 and ZeRO-2, where every rank holds all weights."""
    ranks = sharding.ranks
    within_node = ranks <= sharding.ranks_per_node
    if sharding.kind == "ddp":
        # DDP reduces fp32 gradients once a step.
        return [Transfer("gradients", "all-reduce", FP32_BYTES * model.trained_elements, ranks, ALL_REDUCE_PASSES, within_node)]
    # ZeRO-1 keeps full gradients until the last micro-batch; ZeRO-2 reduces those of each micro-batch.
    reductions = accumulation if sharding.stage == 2 else 1
    gradient_bytes = reductions * model.trained_elements * sharding.compute_bytes
    # The updated weights are gathered from partitions that are padded as in `zerobook.plan.state_bytes`.
    padded_elements = 0
    for group in model.groups:
        padded_elements += _pad(count_elements(group), 2 * ranks)
    return [
        Transfer("gradients", "all-reduce", gradient_bytes, ranks, ALL_REDUCE_PASSES, within_node),
        Transfer("updated weights", "all-gather", padded_elements * sharding.compute_bytes, ranks, within_node=within_node),
    ]


def _zero3_transfers(model: ModelWeights, sharding: ShardingSpec, accumulation: int, gathers: Gathers) -> list[Transfer]:
    ranks = sharding.ranks

    def count_bytes(weights: Iterable[Weight]) -> int:
        return sum(_pad(weight.numel, ranks) * cast_bytes(weight, sharding) for weight in weights)

    forward_bytes = accumulation * count_bytes(gathers.forward)
    backward_bytes = accumulation * count_bytes(gathers.backward)
    first_copy_bytes = forward_bytes
    # hpZ's second copy, on fewer ranks, if there is one
    near_ranks = sharding.nearest_copy_ranks
    if sharding.secondary_ranks > 1:
        # The first gather after an update reads the first copy, since the update makes the second one stale. Later gathers in
        # the step, and all gathers of frozen weights, read the second copy.
        first_copy_bytes = count_bytes(weight for weight in set(gathers.forward) if weight.trained)
    gradient_bytes = accumulation * sharding.compute_bytes * sum(_pad(weight.numel, ranks) for weight in model.trained)
    # After the optimizer's step, the weights that stay gathered are gathered again.
    small_weights = [weight for weight in model.weights if weight.numel <= sharding.persistence_threshold]

    within_node = ranks <= sharding.ranks_per_node
    # A group of ranks that share a copy is on one node if nodes are divided into such groups.
    near_within_node = sharding.ranks_per_node % near_ranks == 0
    gathered_fraction = sharding.weight_factor
    transfers = [
        Transfer("weights, forward", "all-gather", first_copy_bytes * gathered_fraction, ranks, within_node=within_node),
        Transfer(
            "weights, forward, second copy",
            "all-gather",
            (forward_bytes - first_copy_bytes) * gathered_fraction,
            near_ranks,
            within_node=near_within_node,
        ),
        Transfer(
            "weights, backward", "all-gather", backward_bytes * gathered_fraction, near_ranks, within_node=near_within_node
        ),
        Transfer("gradients", "reduce-scatter", gradient_bytes * sharding.gradient_factor, ranks, within_node=within_node),
        Transfer("small weights", "all-gather", count_bytes(small_weights), ranks, within_node=within_node),
    ]
    return [transfer for transfer in transfers if transfer.size_bytes]


def _fsdp_transfers(model: ModelWeights, sharding: ShardingSpec, accumulation: int) -> list[Transfer]:
    """Return the transfers of a step under FSDP2."""
    shard_ranks = sharding.shard_ranks
    within = shard_ranks <= sharding.ranks_per_node
    # FSDP2 reduces gradients in fp32, whatever the precision.
    gradient_bytes = FP32_BYTES * sum(_pad_rows(weight, shard_ranks) for weight in model.trained)
    forward_bytes = 0
    backward_bytes = 0
    for weight in model.weights:
        weight_bytes = _pad_rows(weight, shard_ranks) * cast_bytes(weight, sharding)
        forward_bytes += weight_bytes
        # Weights outside the layers stay gathered after the forward pass; without resharding, all weights do.
        if weight.unit and sharding.reshards:
            backward_bytes += weight_bytes
    # Each micro-batch gathers weights and reduces gradients.
    transfers = [
        Transfer("weights, forward", "all-gather", accumulation * forward_bytes, shard_ranks, within_node=within),
        Transfer("weights, backward", "all-gather", accumulation * backward_bytes, shard_ranks, within_node=within),
        Transfer("gradients", "reduce-scatter", accumulation * gradient_bytes, shard_ranks, within_node=within),
    ]
    if shard_ranks < sharding.ranks:
        # Hybrid sharding: the ranks that hold the same shard form a ring. In the last micro-batch, they all-reduce the
        # gradients of this shard. The rings of the shards on a node share the node's link.
        transfers.append(
            Transfer(
                content="gradients, copies",
                collective="all-reduce",
                size_bytes=gradient_bytes / shard_ranks,
                ranks=sharding.ranks // shard_ranks,
                passes=ALL_REDUCE_PASSES,
                rings=min(shard_ranks, sharding.ranks_per_node),
            )
        )
    return transfers


def pcie_bytes(sharding: ShardingSpec, gathers: Gathers, accumulation: int = 1) -> float:
    """Return the bytes of offloaded weights that are copied to each GPU in a step: a rank's shard, for every gather. With
    one rank, the shard is the weight itself."""
    return accumulation * sum(_stored_shard_bytes(weight, sharding) for weight in gathers.all)


def nvme_bytes(model: ModelWeights, sharding: ShardingSpec, gathers: Gathers, accumulation: int = 1) -> float:
    """Return the bytes of weights that each rank moves from and to NVMe in a step: read for every gather, written once
    after the update."""
    on_nvme = weights_on_nvme(model, sharding)
    names = {weight.name for weight in on_nvme}
    read = sum(_stored_shard_bytes(weight, sharding) for weight in gathers.all if weight.name in names)
    written = sum(_stored_shard_bytes(weight, sharding) for weight in on_nvme if weight.trained)
    return accumulation * read + written


def _stored_shard_bytes(weight: Weight, sharding: ShardingSpec) -> float:
    """Return the bytes of a rank's shard of a weight as it is stored: FSDP2 casts on the GPU. With hpZ, the second copy is
    read."""
    if sharding.kind == "fsdp":
        return _pad_rows(weight, sharding.shard_ranks) * weight.element_bytes / sharding.shard_ranks
    ranks = sharding.nearest_copy_ranks
    return shard_elements(weight, ranks) * ranks * cast_bytes(weight, sharding) / ranks


def count_sent(transfers: Sequence[Transfer]) -> float:
    """Return the bytes that each rank sends in a step."""
    return sum(transfer.sent_bytes for transfer in transfers)


def count_sent_between_nodes(transfers: Sequence[Transfer], nodes: int, *, gloo: bool = False) -> float:
    """Return the bytes that leave each node in a step. A ring over ranks of several nodes crosses each border between nodes
    once, and sends across it what any of its ranks sends.

    Args:
        gloo: CPU processes use gloo, whose reduce-scatter is an all-reduce that keeps a part (torch 2.13, measured in
            docs/measured/traffic.md). NCCL's is a ring.
    """
    if nodes < 2:
        return 0.0
    total = 0.0
    for transfer in transfers:
        # One rank's share of a ring crosses each border, for every ring that leaves the node.
        if not transfer.within_node:
            factor = GLOO_FACTORS.get(transfer.collective, 1) if gloo else 1
            total += transfer.sent_bytes * transfer.rings * factor
    return total


def _pad(elements: int, multiple: int) -> int:
    return ceil_div(elements, multiple) * multiple


def _pad_rows(weight: Weight, ranks: int) -> int:
    """Return the elements of a weight whose rows are padded to a multiple of ``ranks``."""
    rows = weight.shape[0]
    return _pad(rows, ranks) * (weight.numel // max(rows, 1))
