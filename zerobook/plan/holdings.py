"""What the implementations really hold of a model's states, counted from the shapes of its weights.

The literature's formulas know parameters, gradients and moments. DeepSpeed keeps an fp32 master even of an fp32 model, pads
what it partitions, and lays buckets aside; FSDP2 pads rows; DDP copies gradients into buckets; AdamW counts its steps in a
tensor for each weight. All of that is exact to the byte here, and compared with live runs (`zerobook plan --measure`).
Read from DeepSpeed 0.19.8, torch 2.13 and accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

STEP = 4
"""Bytes of AdamW's count of steps, a tensor of one fp32 number for each tensor it steps."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model, once, however many modules share it.

    ``element`` is the bytes of an element as loaded; ``unit`` names the module that FSDP2 wraps and that is gathered
    whole, "" for what belongs to the root.
    """

    name: str
    shape: tuple[int, ...]
    element: int
    trained: bool
    unit: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a strategy file spreads a run; what `zerobook.resolve.LaunchPlan` says, in numbers."""

    kind: str  # "single", "ddp", "deepspeed" or "fsdp"
    ranks: int
    stage: int = 0
    shard: int = 1  # ranks that share one copy
    secondary: int = 1  # hpZ: ranks that share the second copy
    precision: str = "no"
    offload_optimizer: str = "none"
    offload_param: str = "none"
    sub_group: float = 1e9  # elements
    bucket: float = 5e8  # elements of ``reduce_bucket_size``
    gather_bucket: float = 5e8  # elements of ``allgather_bucket_size``
    prefetch: float = 5e7  # elements of ``stage3_prefetch_bucket_size``
    persistent: float = 1e5  # elements of ``stage3_param_persistence_threshold``
    overlap: bool = False
    contiguous: bool = True

    @property
    def compute(self) -> int:
        """Bytes of an element in forward and backward passes."""
        return 4 if self.precision == "no" else 2


@dataclass(kw_only=True)
class Holdings:
    """Bytes on one rank, the fullest. On the device where nothing else is said.

    ``parameters``, ``gradients`` and ``optimizer`` count live tensors at the moment between backward and step, each storage
    once, as `Strategy.memory` does; ``host`` is the part of them in host RAM, ``disk`` that on NVMe. ``buffers`` are laid
    aside for a whole backward pass; ``at_step`` is what the step takes for itself.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0
    at_step: int = 0
    gathered: int = 0
    host: dict[str, int] = field(default_factory=dict)
    disk: int = 0

    @property
    def states(self) -> int:
        """On all devices together."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def on_device(self) -> int:
        return self.states - sum(self.host.values()) - self.disk


def hold(weights: Sequence[Weight], spread: Spread, groups: Sequence[Sequence[Weight]]) -> Holdings:
    """What a rank holds of a model.

    Args:
        weights: all of them, in the model's order.
        groups: the trained ones, as the optimizer's parameter groups have them.
    """
    if spread.kind == "fsdp":
        return _fsdp(weights, spread)
    if spread.kind != "deepspeed":
        return _replicated(weights, spread)
    return _zero3(weights, spread, groups) if spread.stage == 3 else _zero(weights, spread, groups)


def _replicated(weights: Sequence[Weight], spread: Spread) -> Holdings:
    """One process, or DDP. Trained weights are fp32, whatever they were loaded in."""
    trained = [w for w in weights if w.trained]
    elements = sum(w.numel for w in trained)
    return Holdings(
        parameters=4 * elements + sum(w.numel * w.element for w in weights if not w.trained),
        gradients=4 * elements,
        optimizer=8 * elements + STEP * len(trained),
    )


def _fsdp(weights: Sequence[Weight], spread: Spread) -> Holdings:
    """Rows are dealt out; every rank's part is padded to the largest in the weights and gradients, and not in the moments."""
    trained = [w for w in weights if w.trained]
    parameters = sum(_padded(w, spread.shard) * (4 if w.trained else w.element) for w in weights)
    moments = max(sum(8 * _rows(w, spread.shard, rank) * prod(w.shape[1:]) for w in trained) for rank in {0, spread.shard - 1})
    held = Holdings(
        parameters=parameters,
        gradients=sum(4 * _padded(w, spread.shard) for w in trained),
        optimizer=moments + STEP * len(trained),
    )
    if spread.offload_param != "none":
        held.host = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    return held


def _zero(weights: Sequence[Weight], spread: Spread, groups: Sequence[Sequence[Weight]]) -> Holdings:
    """ZeRO-1 and 2: each group flattened, padded to two elements a rank, and cut into equal parts."""
    frozen = [w for w in weights if not w.trained]
    flat = [_up(sum(w.numel for w in group), 2 * spread.ranks) for group in groups]
    parts = [size // spread.ranks for size in flat]
    return Holdings(
        parameters=sum(_lowered(w, spread) * w.numel for w in frozen) + sum(flat) * spread.compute,
        gradients=sum(parts) * spread.compute,
        optimizer=sum(12 * part + STEP for part in parts),
    )


def _zero3(weights: Sequence[Weight], spread: Spread, groups: Sequence[Sequence[Weight]]) -> Holdings:
    """Every weight padded to one element a rank and cut; small ones stay gathered besides."""

    def part(w: Weight) -> int:
        return -(-w.numel // spread.ranks)

    sub_groups = [sub for group in groups for sub in _sub_groups(group, spread)]
    trained = sum(part(w) for sub in sub_groups for w in sub)
    persistent = sum(w.numel for w in weights if w.numel <= spread.persistent)
    return Holdings(
        parameters=sum(part(w) * _lowered(w, spread) for w in weights) + persistent * spread.compute,
        gradients=trained * spread.compute,
        optimizer=12 * trained + STEP * len(sub_groups),
    )


def _sub_groups(group: Sequence[Weight], spread: Spread) -> Iterable[list[Weight]]:
    """Stretches of a group, each closed by the weight whose part makes the parts reach ``sub_group_size``."""
    sub: list[Weight] = []
    size = 0
    for weight in group:
        sub.append(weight)
        size += -(-weight.numel // spread.ranks)
        if size >= spread.sub_group:
            yield sub
            sub, size = [], 0
    if sub:
        yield sub


def _lowered(weight: Weight, spread: Spread) -> int:
    """Bytes of an element once DeepSpeed has cast the model."""
    return spread.compute if spread.precision != "no" else weight.element


def _rows(weight: Weight, shard: int, rank: int) -> int:
    """Rows of a weight that ``rank`` of ``shard`` holds, as torch.chunk deals them."""
    each = -(-weight.shape[0] // shard) if weight.shape else 1
    return max(0, min(each, (weight.shape[0] if weight.shape else 1) - each * rank))


def _padded(weight: Weight, shard: int) -> int:
    """Elements of the largest part."""
    return _rows(weight, shard, 0) * prod(weight.shape[1:])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
