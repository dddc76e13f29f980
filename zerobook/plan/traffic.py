"""Bytes that the libraries send in an optimizer step, collective by collective.

The literature's laws are in `zerobook.plan.formulas`. The libraries send more in some places and less in others:
DeepSpeed's ZeRO-1 and 2 all-reduce gradients where a reduce-scatter would be enough, ZeRO-3 keeps weights that it needs
again soon, and FSDP2 keeps weights outside layers gathered. Read from DeepSpeed 0.19.8 and torch 2.13, and counted in live
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobook.plan.gather_schedule import Gathered, gathered
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import Groups, Weight, on_nvme

GLOO = {"reduce-scatter": 2}
"""Collective -> how many times as much gloo sends as a ring."""


@dataclass(frozen=True)
class Flow:
    """A collective's share of a step: ``size`` bytes of whole tensors among ``ranks``; in a ring, each rank sends ``worth``
    x (N - 1)/N of them. ``within``: all of these ranks are on one node, whatever the number of nodes. ``rings``: the number
    of rings that leave a node at once, where its ranks belong to different rings."""

    what: str
    collective: str
    size: float
    ranks: int
    worth: int = 1
    within: bool = False
    rings: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return self.size * self.worth * (self.ranks - 1) / self.ranks


def flows(
    weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, accumulation: int = 1, passes: Gathered | None = None
) -> list[Flow]:
    """Return the collectives of a step whose size grows with the model. Those of a norm or a loss are too small to count.

    Args:
        passes: what a micro-batch's passes gather; None means `gathered` without a recorded order.
    """
    if spread.ranks == 1 or spread.kind == "single":
        return []
    trained = sum(w.numel for group in groups for w in group)
    if spread.kind == "ddp":
        return [Flow("gradients", "all-reduce", 4 * trained, spread.ranks, worth=2, within=spread.ranks <= spread.node)]
    if spread.kind == "deepspeed" and spread.stage == 3:
        return _zero3(weights, groups, spread, accumulation, passes or gathered(weights, spread, (), accumulation))
    return (_fsdp if spread.kind == "fsdp" else _zero)(weights, groups, spread, accumulation)


def _zero(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, accumulation: int) -> list[Flow]:
    n = spread.ranks
    elements = sum(w.numel for group in groups for w in group)
    flat = sum(-(-sum(w.numel for w in group) // (2 * n)) * 2 * n for group in groups)
    times = accumulation if spread.stage == 2 else 1  # ZeRO-1 keeps whole gradients until the last micro-batch
    return [
        Flow("gradients", "all-reduce", times * elements * spread.compute, n, worth=2, within=n <= spread.node),
        Flow("updated weights", "all-gather", flat * spread.compute, n, within=n <= spread.node),
    ]


def _zero3(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, accumulation: int, passes: Gathered) -> list[Flow]:
    n = spread.ranks

    def size(some: Sequence[Weight]) -> int:
        return sum(_whole(w, n) * _element(w, spread) for w in some)

    forward = far = accumulation * size(passes.forward)
    second = n
    if spread.secondary > 1:
        # After its first gather, a weight is gathered from the second copy, until an update makes that copy stale.
        second, far = spread.secondary, size([w for w in set(passes.forward) if w.trained])
    again = accumulation * size(passes.again)
    quantized = 0.5 if spread.quantized_weights else 1.0
    trained = sum(_whole(w, n) for group in groups for w in group) * spread.compute
    persistent = size([w for w in weights if w.numel <= spread.persistent])
    within, near = n <= spread.node, spread.node % second == 0
    found = [
        Flow("weights, forward", "all-gather", far * quantized, n, within=within),
        Flow("weights, forward, second copy", "all-gather", (forward - far) * quantized, second, within=near),
        Flow("weights, backward", "all-gather", again * quantized, second, within=near),
        Flow(
            "gradients",
            "reduce-scatter",
            accumulation * trained * (0.25 if spread.quantized_gradients else 1.0),
            n,
            within=within,
        ),
        Flow("small weights", "all-gather", persistent, n, within=within),
    ]
    return [flow for flow in found if flow.size]


def _fsdp(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, accumulation: int) -> list[Flow]:
    n = spread.shard

    def size(some: Sequence[Weight]) -> int:
        return sum(_rows_up(w, n) * (spread.compute if spread.precision != "no" else w.element) for w in some)

    gradients = 4 * sum(_rows_up(w, n) for group in groups for w in group)  # fp32 in every precision
    layers = size([w for w in weights if w.unit]) if spread.reshards else 0
    found = [
        Flow("weights, forward", "all-gather", accumulation * size(weights), n, within=n <= spread.node),
        Flow("weights, backward", "all-gather", accumulation * layers, n, within=n <= spread.node),
        Flow("gradients", "reduce-scatter", accumulation * gradients, n, within=n <= spread.node),
    ]
    if n < spread.ranks:  # only in the last micro-batch
        rings = min(n, spread.node)
        found.append(Flow("gradients, copies", "all-reduce", gradients / n, spread.ranks // n, worth=2, rings=rings))
    return found


def to_gpu(spread: ShardingSpec, passes: Gathered, accumulation: int = 1) -> float:
    """Return the bytes of offloaded weights that are copied to each GPU in a step: a rank's shard, for every gather. With
    one rank, the shard is the whole weight."""
    return accumulation * sum(_shard(w, spread) for w in passes.all)


def with_nvme(
    weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, passes: Gathered, accumulation: int = 1
) -> float:
    """Return the bytes of weights that each rank moves from and to NVMe in a step: read for every gather, written once
    after the update."""
    away = on_nvme(weights, groups, spread)
    names = {w.name for w in away}
    read = accumulation * sum(_shard(w, spread) for w in passes.all if w.name in names)
    return read + sum(_shard(w, spread) for w in away if w.trained)


def _shard(weight: Weight, spread: ShardingSpec) -> float:
    """Return the bytes of a rank's share of a weight as it is stored: FSDP2 casts on the GPU. With hpZ, the second copy is
    read."""
    if spread.kind == "fsdp":
        return _rows_up(weight, spread.shard) * weight.element / spread.shard
    ranks = spread.secondary if spread.secondary > 1 else spread.shard
    return _whole(weight, ranks) * _element(weight, spread) / ranks


def sent(found: Sequence[Flow]) -> float:
    """Return the bytes that each rank sends in a step."""
    return sum(flow.sent for flow in found)


def between_nodes(found: Sequence[Flow], nodes: int, *, gloo: bool = False) -> float:
    """Return the bytes that leave each node in a step. A ring over ranks of several nodes crosses each border between nodes
    once, and sends across it what any of its ranks sends.

    Args:
        gloo: CPU processes use gloo, whose reduce-scatter is an all-reduce that keeps a part (torch 2.13, measured in
            docs/measured/traffic.md). NCCL's is a ring.
    """
    if nodes < 2:
        return 0.0
    return sum(flow.sent * flow.rings * (GLOO.get(flow.collective, 1) if gloo else 1) for flow in found if not flow.within)


def _element(weight: Weight, spread: ShardingSpec) -> int:
    return spread.compute if spread.precision != "no" else weight.element


def _whole(weight: Weight, ranks: int) -> int:
    return -(-weight.numel // ranks) * ranks


def _rows_up(weight: Weight, ranks: int) -> int:
    rows = weight.shape[0]
    return -(-rows // ranks) * ranks * (weight.numel // max(rows, 1))
