"""Host RAM of a rank beside its offloaded states: buffers, and the bytes by which blocks of pinned memory are rounded up."""

from typing import NamedTuple

from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import (
    FP32_BYTES,
    ModelWeights,
    RankStates,
    cast_bytes,
    ceil_div,
    count_elements,
    is_swapped,
    nvme_buffer_bytes,
    row_shard_elements,
    shard_elements,
    split_sub_groups,
    weights_of_partition,
)


class HostBlocks(NamedTuple):
    """Sizes in bytes of a rank's blocks of host RAM that are pinned on a machine with GPUs."""

    # blocks beside the states
    buffers: list[int]
    # blocks of the states, whose bytes `count_states` counts
    states: list[int]
    # blocks that are used only while a model is loaded; torch keeps freed blocks of pinned memory
    loading: list[int]


def host_buffer_bytes(
    model: ModelWeights, states: RankStates, sharding: ShardingSpec, *, accumulation: int, on_gpu: bool
) -> int:
    """Return the bytes of a rank's host RAM beside the states that it offloads.

    torch 2.13 rounds each block of pinned memory up to a power of two (ATen/core/CachingHostAllocator.h).

    Args:
        states: the rank's states.
        accumulation: micro-batches of a step.
        on_gpu: the run is on GPUs. On a CPU no memory is pinned.
    """
    if not states.host.total:
        return 0
    if sharding.kind == "fsdp":
        blocks = _fsdp_blocks(model, sharding)
    elif sharding.stage == 3:
        blocks = _zero3_blocks(model, sharding)
    else:
        blocks = _zero_blocks(model, sharding, accumulation)
    total = sum(blocks.buffers) + nvme_buffer_bytes(model, sharding)
    if on_gpu and sharding.pins_host_memory:
        # Add what rounding adds to the blocks that are counted.
        total += sum(pinned_bytes(size) - size for size in (*blocks.buffers, *blocks.states))
        total += sum(map(pinned_bytes, blocks.loading))
    return total


def pinned_bytes(size: int) -> int:
    """Return the bytes that a block of ``size`` bytes takes in pinned memory."""
    return 1 << (size - 1).bit_length() if size else 0


def partition_sizes(model: ModelWeights, sharding: ShardingSpec) -> list[int]:
    """Return for each parameter group the elements that a rank of DeepSpeed updates."""
    return [ceil_div(count_elements(group), sharding.ranks) for group in model.groups]


def largest_trained(model: ModelWeights) -> int:
    """Return the elements of the largest weight that is trained."""
    return max((weight.numel for weight in model.trained), default=0)


def _zero_blocks(model: ModelWeights, sharding: ShardingSpec, accumulation: int) -> HostBlocks:
    """Return the blocks of ZeRO-2 with offload (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py)."""
    partitions = partition_sizes(model, sharding)
    # the partition's updated weights in the compute dtype, and the gradient of one weight
    buffers = [sharding.compute_bytes * elements for elements in (*partitions, largest_trained(model))]
    if accumulation > 1:
        # the sums of earlier micro-batches' gradients, for all weights that the partition overlaps
        for group, partition in zip(model.groups, partitions, strict=True):
            buffers += [sharding.compute_bytes * weight.numel for weight in weights_of_partition(group, partition, rank=0)]
    # masters and gradients
    return HostBlocks(buffers, [FP32_BYTES * elements for elements in (*partitions, *partitions)], [])


def _zero3_blocks(model: ModelWeights, sharding: ShardingSpec) -> HostBlocks:
    """Return the blocks of ZeRO-3 with offload (DeepSpeed 0.19.8, runtime/zero/stage3.py)."""
    states: list[int] = []
    loading: list[int] = []
    if sharding.offload_optimizer != "none":
        sub_groups = split_sub_groups(model, sharding)
        states.append(sharding.compute_bytes * sum(sub_group.elements for sub_group in sub_groups))
        for sub_group in sub_groups:
            # Only sub-groups in host RAM have fp32 gradients.
            if not is_swapped(sub_group, sharding):
                states.append(FP32_BYTES * sub_group.elements)
    if sharding.offload_param == "cpu":
        for weight in model.weights:
            shard = cast_bytes(weight, sharding) * shard_elements(weight, sharding.ranks)
            # After the model was loaded, the shards of trained weights are copied into one block for each group.
            if weight.trained:
                loading.append(shard)
            else:
                states.append(shard)
        group_elements = [sum(shard_elements(weight, sharding.ranks) for weight in group) for group in model.groups]
        states += [sharding.compute_bytes * elements for elements in group_elements]
    return HostBlocks([], states, loading)


def _fsdp_blocks(model: ModelWeights, sharding: ShardingSpec) -> HostBlocks:
    """Return the blocks of FSDP2 with offload: the shards of weights and gradients (torch 2.13, fsdp/_fully_shard)."""
    ranks = sharding.shard_ranks
    weights = [weight.element_bytes * row_shard_elements(weight, ranks, 0) for weight in model.weights]
    gradients = [FP32_BYTES * row_shard_elements(weight, ranks, 0) for weight in model.trained]
    return HostBlocks([], weights + gradients, [])
