"""Time of a step, from the operations of a traced micro-batch and the bytes that a rank moves. Imports nothing heavy.

A GPU works through its kernels while the host starts the next ones, so a micro-batch takes the longer of both times.
Communication overlaps with the passes in part; the optimizer's step and offload follow after them. The constants are
engineering values or fitted to published runs: docs/measured/plan_accuracy.md compares the times with those runs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zerobook.plan.gather_schedule import Gathers, follow_gathers
from zerobook.plan.hardware import Cluster
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import FP32_BYTES, ModelWeights, optimizer_numbers
from zerobook.plan.traffic import Transfer, count_sent_between_nodes, nvme_bytes, pcie_bytes
from zerobook.plan.work import Product, Work
from zerobook.utils.devices import Device

# Share of the listed fp32 operations per second that large matrix products reach.
FP32_SHARE = 0.75
# Rows, and depth or columns, at which a matrix product reaches half of its rate. In smaller products, the GPU's tiles are
# partly empty.
HALF_RATE_ROWS = 90
HALF_RATE_WIDTH = 125
# Factor of these two sizes for fp32 and for batched products, whose tiles are smaller.
SMALL_TILES = 0.3
# Share of the listed fp32 operations per second that the attention kernels for fp32 reach.
FP32_ATTENTION_SHARE = 0.5
# Tokens of a row at which attention reaches half of its rate.
HALF_RATE_LENGTH = 256
# Share of the listed bandwidth that kernels reach when they read and write.
MEMORY_SHARE = 0.82
# Unpacking one quantised weight takes as long as moving so many bytes.
DEQUANTISED_BYTES = 8.0
# Share of the bytes of other operations that a compiled model moves.
FUSED_SHARE = 0.2
# Seconds in which the host starts one kernel from Python, its share of autograd included.
LAUNCH_SECONDS = 16e-6
# Share of the launches that a compiled model has.
COMPILED_LAUNCHES = 0.3
# Seconds of the host for each of DeepSpeed's hooks. Under ZeRO-3 they run when a pass of a module starts or ends, and gather
# or free weights. Under ZeRO-1 and 2 one runs for each gradient.
HOOK_SECONDS = 1.1e-4
# Kind of strategy -> share of the shorter of passes and communication that runs at the same time as the longer.
OVERLAP = {"deepspeed": 0.16, "fsdp": 0.7, "ddp": 0.7, "single": 0.0}
# Bytes that the CPU optimizers of all ranks of a node together read and write in a second: the rate of its memory.
CPU_ADAM_BYTES_PER_S = 185e9
# Rate of a node's NVMe disk, which its ranks share.
NVME_BYTES_PER_S = 3e9
# Lowest and highest tokens per second to expect, relative to the planned ones: the 10th and 90th percentile of published over
# planned rates (docs/measured/plan_accuracy.md). The second is for several nodes, whose networks differ more than their listed
# rates: it has the percentiles of 99 such runs. 12 of them are planned too fast by more than a quarter, and 12 of 261 on one
# node are further off than that. The page shows no such difference for small models, nor for optimizer state in host memory.
RATE_RANGE = (0.84, 1.06)
NODES_RATE_RANGE = (0.7, 1.02)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step by part."""

    # the passes' kernels on the GPU
    compute: float
    # the host, which starts these kernels
    launches: float
    # traffic inside nodes, and between nodes
    links: float
    network: float
    # the optimizer on the GPU
    optimizer: float
    # transfers to the host and its disk, and the optimizer on the host
    offload: float
    # not seconds but a share, see `OVERLAP`
    overlap: float = 0.0

    @property
    def step(self) -> float:
        # A smooth maximum: if GPU and host need about the same time, each waits for the other at times.
        passes = (self.compute**4 + self.launches**4) ** 0.25
        communication = max(self.links, self.network)
        hidden = self.overlap * min(passes, communication)
        return passes + communication - hidden + self.optimizer + self.offload

    @property
    def bound(self) -> str:
        """Name of the part that takes longest."""
        seconds = asdict(self)
        del seconds["overlap"]
        return max(seconds, key=lambda name: seconds[name])


def product_seconds(product: Product, device: Device) -> float:
    """Return the seconds of one matrix product: those of its operations or of its memory traffic, whichever takes longer."""
    rate = device.flops * device.product_share
    smallness = 1.0
    if product.element_bytes >= FP32_BYTES:
        rate = device.fp32 * FP32_SHARE
        smallness = SMALL_TILES
    if product.batch > 1:
        smallness *= SMALL_TILES
    rate *= product.rows / (product.rows + smallness * HALF_RATE_ROWS)
    rate *= product.depth / (product.depth + smallness * HALF_RATE_WIDTH)
    rate *= product.columns / (product.columns + smallness * HALF_RATE_WIDTH)
    return max(product.flops / rate, product.moved_bytes / (MEMORY_SHARE * device.bandwidth))


def compute_seconds(work: Work, device: Device, *, is_fp32: bool, compiled: bool = False) -> float:
    """Return the seconds that the GPU computes for one micro-batch.

    Args:
        is_fp32: attention runs in fp32.
        compiled: the layers run as torch.compile makes them.
    """
    seconds = 0.0
    for product, times in work.products.items():
        seconds += times * product_seconds(product, device)
    attention_rate = device.flops * device.attention_share
    if is_fp32:
        attention_rate = device.fp32 * FP32_ATTENTION_SHARE
    for (length, flops), times in work.attention.items():
        seconds += times * flops / attention_rate * (length + HALF_RATE_LENGTH) / length
    moved_bytes = work.moved_bytes * (FUSED_SHARE if compiled else 1)
    moved_bytes += work.dequantised_elements * DEQUANTISED_BYTES
    return seconds + moved_bytes / (MEMORY_SHARE * device.bandwidth)


def launch_seconds(work: Work, hooks: int, *, compiled: bool = False) -> float:
    """Return the seconds that the host needs to start the kernels of one micro-batch.

    Args:
        hooks: number of DeepSpeed's hooks that run.
    """
    launches = work.kernels * (COMPILED_LAUNCHES if compiled else 1)
    return launches * LAUNCH_SECONDS + hooks * HOOK_SECONDS


def step_seconds(
    work: Work,
    visits: int,
    transfers: Sequence[Transfer],
    model: ModelWeights,
    sharding: ShardingSpec,
    cluster: Cluster,
    *,
    accumulation: int,
    gathers: Gathers | None = None,
    compiled: bool = False,
) -> StepSeconds:
    """Return the seconds of an optimizer step, by part.

    Args:
        work: operations of one micro-batch on one rank.
        visits: number of `zerobook.plan.gather_schedule.Visit` of a micro-batch.
        gathers: weights that a micro-batch gathers; None means `follow_gathers` without a recorded order.
        compiled: the layers run as torch.compile makes them.
    """
    device = cluster.device
    # All traffic crosses the links of the node, also that to other nodes.
    sent_bytes = sum(transfer.sent_bytes for transfer in transfers)
    network_seconds = 0.0
    if cluster.network:
        network_seconds = count_sent_between_nodes(transfers, cluster.nodes, gloo=cluster.cpu) / cluster.rate("network")

    elements = model.trained_elements / sharding.optimizer_ranks
    state_numbers = optimizer_numbers(model, sharding)
    # For each element, an optimizer reads weight, gradient and state, and writes weight and state. Before it, clipping reads
    # the gradient twice and writes it. Both compute very little, so the memory's bandwidth limits them.
    moved_bytes = FP32_BYTES * (3 + 2 * state_numbers + 3)
    optimizer_seconds = offload_seconds = 0.0
    if sharding.offload_optimizer == "none":
        optimizer_seconds = elements * moved_bytes / (MEMORY_SHARE * device.bandwidth)
    else:
        # Gradients go to the host, and updated weights come back. With accumulation, the gradients on the host come back for
        # each further micro-batch, and the sum goes to the host again (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and
        # stage3.py). FSDP2 sends as many bytes: fp32 gradients, one way. All ranks of a node share its memory.
        host_seconds = moved_bytes * cluster.gpus / CPU_ADAM_BYTES_PER_S
        offload_seconds = elements * (host_seconds + 2 * accumulation * sharding.compute_bytes / device.pcie)
    if sharding.offload_optimizer == "nvme":
        # Weights and state are read and written.
        swapped_bytes = 2 * FP32_BYTES * (1 + state_numbers)
        offload_seconds += elements * cluster.gpus * swapped_bytes / NVME_BYTES_PER_S
    # Each gather copies a rank's shards to the GPU, and reads those on NVMe before.
    if sharding.offload_param != "none":
        gathers = gathers or follow_gathers(model.weights, sharding, (), accumulation)
        offload_seconds += pcie_bytes(sharding, gathers, accumulation) / device.pcie
        offload_seconds += nvme_bytes(model, sharding, gathers, accumulation) * cluster.gpus / NVME_BYTES_PER_S
    hooks = 0
    if sharding.kind == "deepspeed":
        hooks = visits if sharding.is_zero3 else len(model.trained)
    return StepSeconds(
        compute=accumulation * compute_seconds(work, device, is_fp32=sharding.precision == "no", compiled=compiled),
        launches=accumulation * launch_seconds(work, hooks, compiled=compiled),
        links=sent_bytes / cluster.rate("link"),
        network=network_seconds,
        optimizer=optimizer_seconds,
        offload=offload_seconds,
        overlap=OVERLAP[sharding.kind],
    )
