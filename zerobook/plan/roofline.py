"""Time of a step, by the slowest of its parts. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zerobook.plan.gather_schedule import Gathered, gathered
from zerobook.plan.hardware import Cluster
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import Groups, Weight, state_ratio
from zerobook.plan.traffic import Flow, between_nodes, to_gpu, with_nvme

EFFICIENCY = 0.45
"""Share of the listed operations a second that a training's matrix products reach: tuned trainings of large models report
40 to 50 %. Small models and short rows reach less."""
HOST_ADAM = 20e9
"""Bytes a second that a rank's CPU optimizer reads and writes."""
NVME = 3e9
"""Bytes a second of a node's NVMe disk, which its ranks share."""


@dataclass(frozen=True)
class Time:
    """Seconds of a step: ``compute`` of the passes on the GPU, ``links`` inside and ``network`` between nodes,
    ``optimizer`` on the GPU, ``offload`` to and on the host and its disk. The first three overlap, except for a tenth of
    the two shorter ones; the others follow after them."""

    compute: float
    links: float
    network: float
    optimizer: float
    offload: float

    @property
    def step(self) -> float:
        parts = sorted((self.compute, self.links, self.network))
        return parts[2] + 0.1 * (parts[0] + parts[1]) + self.optimizer + self.offload

    @property
    def bound(self) -> str:
        """Name of the part that takes longest."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name])


def time(
    flops: float,
    flows: Sequence[Flow],
    groups: Groups,
    spread: ShardingSpec,
    cluster: Cluster,
    *,
    accumulation: int,
    weights: Sequence[Weight] | None = None,
    passes: Gathered | None = None,
    states: float | None = None,
) -> Time:
    """Return the seconds of an optimizer step, by part.

    Args:
        flops: operations of one micro-batch on one rank.
        weights: all weights; None means those of ``groups``, where none is frozen.
        passes: what a micro-batch's passes gather; None means `gathered` without a recorded order.
        states: numbers of optimizer state for each trained weight; None means computed from the shapes in ``groups``.
    """
    peak = cluster.device.flops if spread.precision != "no" else cluster.device.fp32
    links = sum(flow.sent for flow in flows) / cluster.rate("link")
    between = between_nodes(flows, cluster.nodes, gloo=cluster.cpu)
    network = between / cluster.rate("network") if cluster.network else 0.0
    # ZeRO-1 and 2 partition the optimizer alone; elsewhere it is sharded like the weights
    mine = sum(w.numel for group in groups for w in group) / (spread.ranks if spread.stage in (1, 2) else spread.shard)
    states = state_ratio(groups, spread) if states is None else states
    # An optimizer reads weight, gradient and state, and writes all but the gradient, 4 bytes each: 28 bytes for AdamW. It
    # computes very little, so the memory's bandwidth limits it.
    moved = 4 * (3 + 2 * states)
    optimizer = offload = 0.0
    if spread.offload_optimizer == "none":
        optimizer = mine * moved / cluster.device.bandwidth
    else:
        offload = mine * (moved / HOST_ADAM + 2 * spread.compute / cluster.device.pcie)
    if spread.offload_optimizer == "nvme":
        offload += mine * cluster.gpus * 8 * (1 + states) / NVME  # weight and state are read and written
    if spread.offload_param != "none":
        every = [w for group in groups for w in group] if weights is None else weights
        passes = passes or gathered(every, spread, (), accumulation)
        offload += to_gpu(spread, passes, accumulation) / cluster.device.pcie
        offload += with_nvme(every, groups, spread, passes, accumulation) * cluster.gpus / NVME
    return Time(accumulation * flops / (peak * EFFICIENCY), links, network, optimizer, offload)
