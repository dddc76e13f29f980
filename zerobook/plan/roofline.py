"""Time of a step, by the slowest of its parts. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zerobook.plan.gather_schedule import Gathers, follow_gathers
from zerobook.plan.hardware import Cluster
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import FP32_BYTES, ModelWeights, optimizer_numbers
from zerobook.plan.traffic import Transfer, count_sent_between_nodes, nvme_bytes, pcie_bytes

EFFICIENCY = 0.45
"""Share of the listed operations a second that a training's matrix products reach: tuned trainings of large models report
40 to 50 %. Small models and short rows reach less."""
OVERLAP_COST = 0.1
"""Share of the shorter ones of compute, links and network that does not overlap with the longest."""
CPU_ADAM_BYTES_PER_S = 20e9
"""Bytes that a rank's CPU optimizer reads and writes in a second."""
NVME_BYTES_PER_S = 3e9
"""Rate of a node's NVMe disk, which its ranks share."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step by part: ``compute`` of the passes on the GPU, ``links`` inside and ``network`` between nodes,
    ``optimizer`` on the GPU, ``offload`` to and on the host and its disk. The first three overlap, the others follow after
    them."""

    compute: float
    links: float
    network: float
    optimizer: float
    offload: float

    @property
    def step(self) -> float:
        shortest, middle, longest = sorted((self.compute, self.links, self.network))
        return longest + OVERLAP_COST * (shortest + middle) + self.optimizer + self.offload

    @property
    def bound(self) -> str:
        """Name of the part that takes longest."""
        seconds = asdict(self)
        return max(seconds, key=lambda name: seconds[name])


def step_seconds(
    flops: float,
    transfers: Sequence[Transfer],
    model: ModelWeights,
    sharding: ShardingSpec,
    cluster: Cluster,
    *,
    accumulation: int,
    gathers: Gathers | None = None,
) -> StepSeconds:
    """Return the seconds of an optimizer step, by part.

    Args:
        flops: operations of one micro-batch on one rank.
        gathers: what a micro-batch's passes gather; None means `follow_gathers` without a recorded order.
    """
    device = cluster.device
    peak_flops_per_s = device.fp32 if sharding.precision == "no" else device.flops
    # What goes to other nodes crosses the links of the node too.
    sent_bytes = sum(transfer.sent_bytes for transfer in transfers)
    network_seconds = 0.0
    if cluster.network:
        bytes_between_nodes = count_sent_between_nodes(transfers, cluster.nodes, gloo=cluster.cpu)
        network_seconds = bytes_between_nodes / cluster.rate("network")

    elements = model.trained_elements / sharding.optimizer_ranks
    state_numbers = optimizer_numbers(model, sharding)
    # An optimizer reads weight, gradient and state, and writes all but the gradient: 28 bytes for AdamW. It computes very
    # little, so the memory's bandwidth limits it.
    moved_bytes = FP32_BYTES * (3 + 2 * state_numbers)
    optimizer_seconds = offload_seconds = 0.0
    if sharding.offload_optimizer == "none":
        optimizer_seconds = elements * moved_bytes / device.bandwidth
    else:
        # Gradients go to the host, and updated weights come back.
        offload_seconds = elements * (moved_bytes / CPU_ADAM_BYTES_PER_S + 2 * sharding.compute_bytes / device.pcie)
    if sharding.offload_optimizer == "nvme":
        # Weights and state are read and written.
        swapped_bytes = 2 * FP32_BYTES * (1 + state_numbers)
        offload_seconds += elements * cluster.gpus * swapped_bytes / NVME_BYTES_PER_S
    # Each gather copies a rank's shard to the GPU, and reads from NVMe what is there.
    if sharding.offload_param != "none":
        gathers = gathers or follow_gathers(model.weights, sharding, (), accumulation)
        offload_seconds += pcie_bytes(sharding, gathers, accumulation) / device.pcie
        offload_seconds += nvme_bytes(model, sharding, gathers, accumulation) * cluster.gpus / NVME_BYTES_PER_S
    return StepSeconds(
        compute=accumulation * flops / (peak_flops_per_s * EFFICIENCY),
        links=sent_bytes / cluster.rate("link"),
        network=network_seconds,
        optimizer=optimizer_seconds,
        offload=offload_seconds,
    )
