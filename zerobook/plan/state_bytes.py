"""Bytes of a model's states that the libraries really hold, counted from the shapes of its weights.

The literature's formulas include parameters, gradients and moments. DeepSpeed also keeps fp32 master weights of an fp32
model, pads what it partitions, and allocates buckets. FSDP2 pads rows. AdamW counts its steps in a tensor for each tensor
that it updates; other optimizers keep other state, as their `OptimizerSpec` says. All of this is counted here to the byte,
and compared with live runs by ``zerobook plan --measure``. Read from DeepSpeed 0.19.8, torch 2.13 and accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from zerobook.optimizer import state_numbers
from zerobook.plan.sharding import ShardingSpec
from zerobook.utils.units import counted

SWAPPED = 1 << 20
"""Bytes. DeepSpeed keeps smaller tensors in host RAM, even where the file says NVMe."""
STAND_IN = 2
"""Bytes of the one number in host RAM that replaces all weights while they are on NVMe."""
Groups = Sequence[Sequence["Weight"]]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model, listed once even where several modules share it.

    ``element`` is the bytes of an element before any cast. ``unit`` is the layer that is gathered as one, "" for a weight
    outside layers. ``packed`` is the number of parameters in the weight, where several share an element. ``scales`` is the
    bytes that a quantised layer keeps beside its weight, whole on every rank.
    """

    name: str
    shape: tuple[int, ...]
    element: int
    trained: bool
    unit: str = ""
    packed: int = 0
    scales: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def parameters(self) -> int:
        return self.packed or self.numel


@dataclass(kw_only=True)
class StateBytes:
    """Bytes of one rank, in all places.

    ``parameters``, ``gradients`` and ``optimizer`` are the live tensors between the backward pass and the step, each
    storage once, as `Strategy.memory` counts them. ``host`` is the share of each that is in host RAM. ``disk`` is what was
    swapped out; the other figures do not include it.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: dict[str, int] = field(default_factory=dict)
    disk: int = 0

    @property
    def states(self) -> dict[str, int]:
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}

    @property
    def on_device(self) -> dict[str, int]:
        return {key: value - self.host.get(key, 0) for key, value in self.states.items()}


def hold(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, rank: int = 0) -> StateBytes:
    """Return what ``rank`` holds of a model.

    Args:
        weights: all weights, in the model's order.
        groups: the trained weights, by the optimizer's parameter groups.
    """
    if spread.kind == "fsdp":
        held = _fsdp(weights, spread, rank)
    elif spread.kind != "deepspeed":
        held = _replicated(weights, spread)
    else:
        held = (_zero3 if spread.stage == 3 else _zero)(weights, groups, spread, rank)
    held.parameters += sum(w.scales for w in weights)
    return held


def state_ratio(groups: Groups, spread: ShardingSpec) -> float:
    """Return the fp32 numbers of optimizer state in memory for each number of the trained weights: 2 for AdamW."""
    trained = [w for group in groups for w in group]
    return spread.optimizer_spec.held_bytes(w.shape for w in trained) / 4 / max(sum(w.numel for w in trained), 1)


def saved_numbers(groups: Groups, spread: ShardingSpec) -> int:
    """Return the fp32 numbers of a checkpoint: trained weights and optimizer state."""
    trained = [w for group in groups for w in group]
    return sum(w.numel for w in trained) + state_numbers(spread.optimizer_spec, (w.shape for w in trained))


def _state(elements: int, spread: ShardingSpec) -> int:
    """Return the bytes of optimizer state for ``elements`` elements of weights, which are updated flat or in part."""
    return spread.optimizer_spec.held_bytes([(elements,)])


def _counts(tensors: int, spread: ShardingSpec) -> int:
    """Return the bytes of the step counts that are tensors. DeepSpeed's CPUAdam counts in an integer."""
    in_integers = spread.optimizer == "adamw" and spread.kind == "deepspeed" and spread.offload_optimizer != "none"
    return 0 if in_integers else spread.optimizer_spec.step_bytes * tensors


def _replicated(weights: Sequence[Weight], spread: ShardingSpec) -> StateBytes:
    """Return what a rank holds with one process or under DDP."""
    trained = [w for w in weights if w.trained]
    elements = sum(w.numel for w in trained)
    return StateBytes(
        parameters=sum(w.numel * w.element for w in weights),
        gradients=4 * elements,
        optimizer=spread.optimizer_spec.held_bytes(w.shape for w in trained) + _counts(len(trained), spread),
    )


def _fsdp(weights: Sequence[Weight], spread: ShardingSpec, rank: int) -> StateBytes:
    """Return what a rank holds under FSDP2. Rows are divided among ranks. Weights and gradients are padded to the largest
    part, optimizer state is not."""
    place = rank % spread.shard
    trained = [w for w in weights if w.trained]
    held = StateBytes(
        parameters=sum(_row_elements(w, spread.shard, 0) * w.element for w in weights),
        gradients=sum(4 * _row_elements(w, spread.shard, 0) for w in trained),
        optimizer=sum(_state(_row_elements(w, spread.shard, place), spread) for w in trained) + _counts(len(trained), spread),
    )
    if spread.offload_param != "none":
        held.host = held.states
    return held


def _zero(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, rank: int) -> StateBytes:
    """Return what a rank holds under ZeRO-1 and 2: each group is flattened, padded to a multiple of two elements a rank,
    and divided into equal parts."""
    flat = [_up(sum(w.numel for w in group), 2 * spread.ranks) for group in groups]
    parts = [size // spread.ranks for size in flat]
    frozen = sum(w.numel * _cast(w, spread) for w in weights if not w.trained)
    state = 4 * sum(parts) + _state(sum(parts), spread) + _counts(len(parts), spread)
    held = StateBytes(parameters=sum(flat) * spread.compute + frozen, gradients=0, optimizer=state)
    if spread.offload_optimizer == "none":
        reduced = sum(_reduced(group, part, rank) for group, part in zip(groups, parts, strict=True))
        held.gradients = reduced * spread.compute
    else:
        held.gradients = 4 * sum(parts)
        held.host = {"gradients": held.gradients, "optimizer": held.optimizer}
    return held


def _reduced(group: Sequence[Weight], part: int, rank: int) -> int:
    """Return the gradient elements that a rank keeps of a group: the whole gradient of every weight that reaches into its
    part, and zeros where its part extends beyond the last weight."""
    start, stop = part * rank, part * (rank + 1)
    at = kept = 0
    for weight in group:
        if at < stop and at + weight.numel > start:
            kept += weight.numel
        at += weight.numel
    return kept + max(0, stop - max(at, start))


def _zero3(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, rank: int) -> StateBytes:
    """Return what a rank holds under ZeRO-3: every weight is padded to a multiple of the ranks and divided; small ones also
    stay gathered.

    hpZ divides all weights a second time, among the ranks of a group. The second copy of a trained weight is freed when the
    weight is updated, and made again when the weight is gathered. Small weights are not gathered again before the next
    step, so small trained ones have no second copy until then.
    """
    sub_groups = [sum(_part(w, spread) for w in sub) for group in groups for sub in _sub_groups(group, spread)]
    small = [w for w in weights if w.numel <= spread.persistent]
    persistent = sum(w.numel * _cast(w, spread) for w in small) if spread.ranks > 1 else 0  # one rank: the part is the whole
    sharded = sum(_part(w, spread) * _cast(w, spread) for w in weights)
    if spread.secondary > 1:
        parts = spread.ranks // spread.secondary  # parts of the first copy in one part of the second
        sharded += parts * sum(
            _part(w, spread) * _cast(w, spread) for w in weights if not w.trained or w.numel > spread.persistent
        )
    elements = sum(sub_groups)
    state = 4 * elements + _state(elements, spread) + _counts(len(sub_groups), spread)
    held = StateBytes(parameters=sharded + persistent, gradients=elements * spread.compute, optimizer=state)
    if spread.offload_optimizer != "none":
        swapped = [sub for sub in sub_groups if spread.offload_optimizer == "nvme" and 4 * sub >= SWAPPED]
        held.disk = 4 * sum(swapped) + _state(sum(swapped), spread)
        held.optimizer -= held.disk
        held.gradients += 4 * (sum(sub_groups) - sum(swapped))  # an fp32 copy for the CPU's optimizer
        held.host = {"gradients": held.gradients, "optimizer": held.optimizer}
    if spread.offload_param != "none":
        away = sum(_part(w, spread) * _cast(w, spread) for w in on_nvme(weights, groups, spread))
        left = sharded - away + (STAND_IN if away else 0)
        held.parameters += left - sharded
        held.disk += away
        held.host["parameters"] = left
    return held


def on_nvme(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec) -> list[Weight]:
    """Return the weights whose parts are on NVMe. The first of the trained weights, and all small weights, stay in host
    RAM."""
    if spread.offload_param != "nvme":
        return []
    staying = {w.name for subs in _staying(groups, spread) for sub in subs for w in sub}
    return [w for w in weights if w.name not in staying and _part(w, spread) * _cast(w, spread) >= SWAPPED]


def nvme_buffers(groups: Groups, spread: ShardingSpec) -> int:
    """Return the bytes of a rank's host RAM that DeepSpeed allocates for weights on NVMe: buffers to read them into, the
    unused rest of the room for weights that stay, and a buffer of the size of the largest sub-group, in which the other
    weights are rounded before they are written."""
    if spread.offload_param != "nvme":
        return 0
    subs = [list(_sub_groups(group, spread)) for group in groups]
    staying = _staying(groups, spread)

    def size(some: Iterable[Sequence[Weight]]) -> int:
        return sum(_part(w, spread) for sub in some for w in sub)

    room = min(spread.in_cpu, size(groups))
    left = room - sum(size(some) for some in staying)
    leaving = any(len(some) < len(every) for some, every in zip(staying, subs, strict=True))
    written = max(size([sub]) for every in subs for sub in every) if leaving else 0
    return (spread.buffers * spread.buffer + left + written) * spread.compute


def unswappable(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec) -> list[str]:
    """Return why DeepSpeed would fail an assertion: a part of a weight is larger than a buffer for NVMe. Empty where all
    parts fit."""
    largest = max(on_nvme(weights, groups, spread), key=lambda w: _part(w, spread), default=None)
    if largest is None or _part(largest, spread) <= spread.buffer:
        return []
    return [
        f"offload_param.buffer_size: {largest.name} has {_part(largest, spread):,} elements on each of "
        f"{counted(spread.ranks, 'rank')}, and a buffer for NVMe holds {spread.buffer:,}. Raise it in the DeepSpeed "
        "file, or take more ranks."
    ]


def _staying(groups: Groups, spread: ShardingSpec) -> list[list[list[Weight]]]:
    """Return for each group the sub-groups whose weights never leave host RAM for NVMe: those that are completely within
    the first ``in_cpu`` elements of a rank's parts."""
    found, before = [], 0
    for group in groups:
        whole, at, some = sum(_part(w, spread) for w in group), 0, []
        for sub in _sub_groups(group, spread):
            at += sum(_part(w, spread) for w in sub)
            if at <= min(whole, spread.in_cpu - before):
                some.append(sub)
        found.append(some)
        before += whole
    return found


def _sub_groups(group: Sequence[Weight], spread: ShardingSpec) -> Iterable[list[Weight]]:
    """Yield consecutive parts of a group. Each ends with the weight whose part makes the sum of parts reach
    ``sub_group_size``."""
    sub: list[Weight] = []
    size = 0
    for weight in group:
        sub.append(weight)
        size += _part(weight, spread)
        if size >= spread.sub_group:
            yield sub
            sub, size = [], 0
    if sub:
        yield sub


def _part(weight: Weight, spread: ShardingSpec) -> int:
    return -(-weight.numel // spread.ranks)


def _cast(weight: Weight, spread: ShardingSpec) -> int:
    """Return the bytes of an element after DeepSpeed has cast the model."""
    return spread.compute if spread.precision != "no" else weight.element


def _row_elements(weight: Weight, shard: int, place: int) -> int:
    """Return the elements of the rows that one of ``shard`` ranks holds, divided as in torch.chunk."""
    rows, each = weight.shape[0], -(-weight.shape[0] // shard)
    return max(0, min(each, rows - each * place)) * prod(weight.shape[1:])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
