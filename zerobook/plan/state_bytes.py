"""Bytes of weights, gradients and optimizer state that the libraries allocate, counted from the shapes of the weights.

The literature's formulas include parameters, gradients and moments. DeepSpeed also keeps fp32 master weights, even of an fp32
model, and pads what it partitions. FSDP2 pads rows. AdamW keeps one step count for each tensor that it updates. All of this is
counted here exactly, and ``zerobook plan --measure`` compares it with real runs. The rules follow the sources of DeepSpeed
0.19.8, torch 2.13 and accelerate 1.15.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from zerobook.optimizer import state_numbers
from zerobook.plan.sharding import ShardingSpec
from zerobook.utils.model_config import nvme_buffer_elements

FP32_BYTES = 4
# DeepSpeed keeps smaller tensors in host RAM, even if the strategy file offloads to NVMe.
SWAP_MINIMUM_BYTES = 1 << 20
# Partitions of ZeRO-1 and 2 are multiples of so many elements (DeepSpeed's ``nccl_start_alignment_factor``).
ZERO_ALIGNMENT = 2
# Size of the one-element placeholder in host RAM for weights that are on NVMe.
PLACEHOLDER_BYTES = 2


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model, listed once even if several modules share it."""

    name: str
    shape: tuple[int, ...]
    # bytes of an element before any cast
    element_bytes: int
    trained: bool
    # the layer that is gathered as one; "" for a weight outside layers
    unit: str = ""
    # number of parameters in a quantised weight, of which several share an element; 0 for other weights
    packed_parameters: int = 0
    # bytes that a quantised layer keeps beside its weight, in full on every rank
    scale_bytes: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def parameters(self) -> int:
        return self.packed_parameters or self.numel


@dataclass(frozen=True)
class ModelWeights:
    """All weights in the model's order, and the trained ones by the optimizer's parameter groups."""

    weights: Sequence[Weight]
    groups: Sequence[Sequence[Weight]]

    @cached_property
    def trained(self) -> list[Weight]:
        return [weight for group in self.groups for weight in group]

    @cached_property
    def trained_elements(self) -> int:
        return count_elements(self.trained)

    @cached_property
    def parameters(self) -> int:
        return sum(weight.parameters for weight in self.weights)

    @property
    def is_quantised(self) -> bool:
        return any(weight.scale_bytes for weight in self.weights)

    @property
    def density(self) -> float:
        """Stored elements for each parameter; below 1 where weights are packed."""
        return count_elements(self.weights) / self.parameters


@dataclass
class StateBytes:
    """Bytes of the three kinds of state."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(kw_only=True)
class RankStates:
    """Bytes of one rank's states between the backward pass and the optimizer's step, by place. `Strategy.memory` measures the
    same on a run, without the disk."""

    device: StateBytes
    host: StateBytes = field(default_factory=StateBytes)
    # swapped out to NVMe
    disk: int = 0

    @property
    def live(self) -> StateBytes:
        """States on the device and in host RAM."""
        return StateBytes(
            self.device.parameters + self.host.parameters,
            self.device.gradients + self.host.gradients,
            self.device.optimizer + self.host.optimizer,
        )


def count_elements(weights: Iterable[Weight]) -> int:
    return sum(weight.numel for weight in weights)


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def shard_elements(weight: Weight, ranks: int) -> int:
    """Return the elements of a rank's shard of a weight that is padded to a multiple of the ranks, as ZeRO-3 does."""
    return ceil_div(weight.numel, ranks)


def cast_bytes(weight: Weight, sharding: ShardingSpec) -> int:
    """Return the bytes of a weight's element in the passes under DeepSpeed, which casts the model, or FSDP2, which casts
    gathered weights."""
    return sharding.compute_bytes if sharding.precision != "no" else weight.element_bytes


def shard_bytes(weights: Iterable[Weight], sharding: ShardingSpec) -> int:
    """Return the bytes of a rank's shards under ZeRO-3."""
    return sum(shard_elements(weight, sharding.ranks) * cast_bytes(weight, sharding) for weight in weights)


def count_states(model: ModelWeights, sharding: ShardingSpec, rank: int = 0) -> RankStates:
    """Return the bytes of a model's states on ``rank``."""
    if sharding.kind == "fsdp":
        states = _fsdp_states(model, sharding, rank)
    elif sharding.is_zero3:
        states = _zero3_states(model, sharding)
    elif sharding.kind == "deepspeed":
        states = _zero_states(model, sharding, rank)
    else:
        states = _replicated_states(model, sharding)
    # The scales of quantised weights are neither sharded nor offloaded.
    states.device.parameters += sum(weight.scale_bytes for weight in model.weights)
    return states


def optimizer_numbers(model: ModelWeights, sharding: ShardingSpec) -> float:
    """Return the fp32 numbers of optimizer state in memory for each number of the trained weights: 2 for AdamW."""
    held_bytes = sharding.optimizer_spec.held_bytes(weight.shape for weight in model.trained)
    return held_bytes / FP32_BYTES / max(model.trained_elements, 1)


def checkpoint_numbers(model: ModelWeights, sharding: ShardingSpec) -> int:
    """Return the fp32 numbers of a checkpoint: trained weights and optimizer state."""
    return model.trained_elements + state_numbers(sharding.optimizer_spec, (weight.shape for weight in model.trained))


def _flat_state(elements: int, sharding: ShardingSpec) -> int:
    """Return the bytes of optimizer state for ``elements`` elements of weights that are updated as one flat tensor."""
    return sharding.optimizer_spec.held_bytes([(elements,)])


def _step_counts(tensors: int, sharding: ShardingSpec) -> int:
    """Return the bytes of the step counts of ``tensors`` updated tensors."""
    # DeepSpeed's CPUAdam counts steps in an integer, and not in a tensor.
    if sharding.optimizer == "adamw" and sharding.kind == "deepspeed" and sharding.offload_optimizer != "none":
        return 0
    return sharding.optimizer_spec.step_bytes * tensors


def _replicated_states(model: ModelWeights, sharding: ShardingSpec) -> RankStates:
    """Return the states of a rank with one process or under DDP."""
    optimizer = sharding.optimizer_spec.held_bytes(weight.shape for weight in model.trained)
    # Autocast casts the inputs of operations and not the weights, so gradients are fp32 in every precision.
    return RankStates(
        device=StateBytes(
            parameters=sum(weight.numel * weight.element_bytes for weight in model.weights),
            gradients=FP32_BYTES * model.trained_elements,
            optimizer=optimizer + _step_counts(len(model.trained), sharding),
        )
    )


def _fsdp_states(model: ModelWeights, sharding: ShardingSpec, rank: int) -> RankStates:
    """Return the states of a rank under FSDP2, which divides rows among ranks as torch.chunk does.

    Weights and gradients are padded to the largest shard, which is rank 0's; optimizer state is not.
    """
    states = StateBytes()
    for weight in model.weights:
        states.parameters += row_shard_elements(weight, sharding.shard_ranks, 0) * weight.element_bytes
    for weight in model.trained:
        states.gradients += FP32_BYTES * row_shard_elements(weight, sharding.shard_ranks, 0)
        rank_elements = row_shard_elements(weight, sharding.shard_ranks, rank % sharding.shard_ranks)
        states.optimizer += _flat_state(rank_elements, sharding)
    states.optimizer += _step_counts(len(model.trained), sharding)
    if sharding.offload_param != "none":
        return RankStates(device=StateBytes(), host=states)
    return RankStates(device=states)


def row_shard_elements(weight: Weight, ranks: int, rank: int) -> int:
    """Return the elements of a rank's shard of a weight whose rows FSDP2 divides."""
    rows = weight.shape[0]
    rows_per_rank = ceil_div(rows, ranks)
    # The last ranks have fewer rows, or none.
    return max(0, min(rows_per_rank, rows - rows_per_rank * rank)) * prod(weight.shape[1:])


def _zero_states(model: ModelWeights, sharding: ShardingSpec, rank: int) -> RankStates:
    """Return the states of a rank under ZeRO-1 and 2.

    Each group is flattened, padded to a multiple of ``ZERO_ALIGNMENT`` elements per rank, and divided into equal partitions.
    """
    group_alignment = ZERO_ALIGNMENT * sharding.ranks
    partitions = [ZERO_ALIGNMENT * ceil_div(count_elements(group), group_alignment) for group in model.groups]
    elements = sum(partitions)
    states = StateBytes(
        parameters=elements * sharding.ranks * sharding.compute_bytes,
        # The fp32 master weights count as optimizer state.
        optimizer=FP32_BYTES * elements + _flat_state(elements, sharding) + _step_counts(len(partitions), sharding),
    )
    # Frozen weights belong to no group, and every rank has them.
    for weight in model.weights:
        if not weight.trained:
            states.parameters += weight.numel * cast_bytes(weight, sharding)
    # The CPU's optimizer reads fp32 gradients in host RAM; the GPU keeps none after the backward pass.
    if sharding.offload_optimizer != "none":
        host = StateBytes(gradients=FP32_BYTES * elements, optimizer=states.optimizer)
        return RankStates(device=replace(states, optimizer=0), host=host)
    # The GPU's optimizer reads gradients in the compute dtype.
    for group, partition in zip(model.groups, partitions, strict=True):
        states.gradients += _reduced_elements(group, partition, rank) * sharding.compute_bytes
    return RankStates(device=states)


def _reduced_elements(group: Sequence[Weight], partition: int, rank: int) -> int:
    """Return the gradient elements that a rank keeps of a group: the complete gradient of every weight that overlaps its
    partition, and zeros where its partition extends beyond the last weight."""
    elements = count_elements(weights_of_partition(group, partition, rank))
    # The zeros begin behind the last weight, or where the partition begins if that is later.
    return elements + max(0, partition * (rank + 1) - max(count_elements(group), partition * rank))


def weights_of_partition(group: Sequence[Weight], partition: int, rank: int) -> list[Weight]:
    """Return the weights of a group that overlap a rank's partition of ``partition`` elements."""
    start = partition * rank
    position = 0
    weights = []
    for weight in group:
        if position < start + partition and position + weight.numel > start:
            weights.append(weight)
        position += weight.numel
    return weights


def _zero3_states(model: ModelWeights, sharding: ShardingSpec) -> RankStates:
    """Return the states of a rank under ZeRO-3: every weight is padded to a multiple of the ranks and divided. Small weights
    also stay gathered.

    hpZ divides all weights a second time, among the ranks of a group. The second copy of a trained weight is freed when the
    weight is updated, and made again when the weight is gathered. Small weights are not gathered again before the next step,
    so small trained ones have no second copy until then.
    """
    sharded = shard_bytes(model.weights, sharding)
    persistent = 0
    # weights with a second copy under hpZ
    copied = []
    for weight in model.weights:
        is_small = weight.numel <= sharding.persistence_threshold
        # With one rank, the shard is the weight itself.
        if is_small and sharding.ranks > 1:
            persistent += weight.numel * cast_bytes(weight, sharding)
        if not (is_small and weight.trained):
            copied.append(weight)
    if sharding.secondary_ranks > 1:
        first_shards_per_second = sharding.ranks // sharding.secondary_ranks
        sharded += first_shards_per_second * shard_bytes(copied, sharding)

    # Each sub-group is one flat fp32 tensor, with the master weights beside the optimizer's state.
    sub_groups = split_sub_groups(model, sharding)
    elements = sum(sub_group.elements for sub_group in sub_groups)
    optimizer = FP32_BYTES * elements + _flat_state(elements, sharding) + _step_counts(len(sub_groups), sharding)
    device = StateBytes(persistent + sharded, elements * sharding.compute_bytes, optimizer)
    states = RankStates(device=device)

    if sharding.offload_optimizer != "none":
        swapped = 0
        for sub_group in sub_groups:
            if is_swapped(sub_group, sharding):
                swapped += sub_group.elements
        states.disk = FP32_BYTES * swapped + _flat_state(swapped, sharding)
        states.host.optimizer = optimizer - states.disk
        # The gradients are in host RAM in the compute dtype. Those of states that are in host RAM are there in fp32 too.
        states.host.gradients = device.gradients + FP32_BYTES * (elements - swapped)
        device.gradients = device.optimizer = 0
    if sharding.offload_param != "none":
        on_disk = shard_bytes(weights_on_nvme(model, sharding), sharding)
        states.disk += on_disk
        states.host.parameters = sharded - on_disk
        if on_disk:
            states.host.parameters += PLACEHOLDER_BYTES
        device.parameters = persistent
    return states


@dataclass
class SubGroup:
    """Consecutive weights of a parameter group that ZeRO-3's optimizer updates together."""

    weights: list[Weight]
    # elements of one rank's shards
    elements: int = 0
    # The weights are never written to NVMe.
    stays_in_ram: bool = False


def split_sub_groups(model: ModelWeights, sharding: ShardingSpec) -> list[SubGroup]:
    """Return the sub-groups of all parameter groups. A sub-group ends with the weight by which it reaches ``sub_group_size``.

    Sub-groups that lie completely in the first ``max_in_cpu`` elements of a rank's shards stay in host RAM.
    """
    sub_groups: list[SubGroup] = []
    previous_elements = 0
    for group in model.groups:
        group_elements = sum(shard_elements(weight, sharding.ranks) for weight in group)
        room = min(group_elements, sharding.max_in_cpu_elements - previous_elements)
        position = 0
        sub_group = SubGroup([])
        for weight in group:
            if not sub_group.weights:
                sub_groups.append(sub_group)
            sub_group.weights.append(weight)
            sub_group.elements += shard_elements(weight, sharding.ranks)
            position += shard_elements(weight, sharding.ranks)
            sub_group.stays_in_ram = position <= room
            if sub_group.elements >= sharding.sub_group_elements:
                sub_group = SubGroup([])
        previous_elements += group_elements
    return sub_groups


def is_swapped(sub_group: SubGroup, sharding: ShardingSpec) -> bool:
    """Return whether the optimizer state of a sub-group is on NVMe."""
    return sharding.offload_optimizer == "nvme" and FP32_BYTES * sub_group.elements >= SWAP_MINIMUM_BYTES


def weights_on_nvme(model: ModelWeights, sharding: ShardingSpec) -> list[Weight]:
    """Return the weights whose shards are on NVMe. Small weights, and those of `SubGroup.stays_in_ram`, are in host RAM."""
    if sharding.offload_param != "nvme":
        return []
    names_in_ram: set[str] = set()
    for sub_group in split_sub_groups(model, sharding):
        if sub_group.stays_in_ram:
            names_in_ram.update(weight.name for weight in sub_group.weights)
    on_nvme = []
    for weight in model.weights:
        if weight.name not in names_in_ram and shard_bytes([weight], sharding) >= SWAP_MINIMUM_BYTES:
            on_nvme.append(weight)
    return on_nvme


def nvme_buffer_bytes(model: ModelWeights, sharding: ShardingSpec) -> int:
    """Return the bytes of a rank's host RAM that DeepSpeed allocates for weights on NVMe.

    These are buffers for reading, the part of the room for weights that stay in host RAM (``max_in_cpu``) that no weight uses,
    and a buffer of the size of the largest sub-group, in which weights are rounded before they are written.
    """
    if sharding.offload_param != "nvme":
        return 0
    sub_groups = split_sub_groups(model, sharding)
    largest_elements = 0
    elements = staying_elements = 0
    for sub_group in sub_groups:
        elements += sub_group.elements
        largest_elements = max(largest_elements, sub_group.elements)
        if sub_group.stays_in_ram:
            staying_elements += sub_group.elements
    unused_room = min(sharding.max_in_cpu_elements, elements) - staying_elements
    # If all weights stay in host RAM, none is rounded.
    rounding_buffer = largest_elements if staying_elements < elements else 0
    largest_weight = max(weight.numel for weight in model.weights)
    buffer_elements = nvme_buffer_elements(sharding.nvme_buffer_elements, largest_weight, sharding.ranks)
    return (sharding.nvme_buffers * buffer_elements + unused_room + rounding_buffer) * sharding.compute_bytes
