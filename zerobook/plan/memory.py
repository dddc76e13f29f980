"""Peak memory of a rank's GPU in a step, and of a node's host RAM, from states, activations and buffers."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from zerobook.plan.gather_schedule import Gathers, follow_gathers
from zerobook.plan.host_ram import host_buffer_bytes, largest_trained, partition_sizes
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import (
    FP32_BYTES,
    ModelWeights,
    RankStates,
    cast_bytes,
    count_states,
)
from zerobook.plan.trace import Trace

# Bytes of a GPU that the driver shows before the first tensor: CUDA's context, kernels and cuBLAS's workspace.
CONTEXT_BYTES = 900_000_000
# Bytes of NCCL's buffers, if there are several ranks.
NCCL_BYTES = 260_000_000
# Bytes of freed blocks that torch's allocator keeps at the peak, for each byte that is allocated. Strategies that share states
# among ranks allocate buffers of many sizes, which leave gaps.
CACHED_SHARE = 0.04
SHARED_CACHED_SHARE = 0.17
# Lowest and highest peak to expect, relative to the planned one; the second where strategies share states among ranks. The
# first is the 10th and 90th percentile of published over planned peaks, sources weighted alike
# (docs/measured/plan_accuracy.md). The second is a judgement: published peaks of 50 such runs lie between 0.7 and 1.22, those
# of the 25 that are planned exactly as they ran between 0.87 and 1.01.
RANGE = (0.9, 1.22)
SHARED_RANGE = (0.88, 1.3)


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes of one GPU at one moment."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    # gathered weights, and what the libraries allocate to send and to update
    buffers: int = 0
    # freed blocks that torch's allocator keeps
    cached: int = 0
    # allocations of CUDA and NCCL outside of torch
    other: int = 0

    # what torch.cuda.max_memory_allocated returns
    @property
    def allocated(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    # what torch.cuda.max_memory_reserved returns
    @property
    def reserved(self) -> int:
        return self.allocated + self.cached

    # what the driver shows
    @property
    def total(self) -> int:
        return self.reserved + self.other


@dataclass(kw_only=True)
class PeakMemory:
    """Bytes of one GPU at its peak, and bytes of host RAM and disk of a node."""

    device: DeviceBytes
    # the moment of the peak, such as "backward"
    when: str
    # host RAM while the model is loaded
    host_at_load: int
    # host RAM during training
    host: int
    disk: int
    # lowest and highest peak to expect, see `RANGE`
    low: int
    high: int
    # moment -> bytes that are allocated then
    moments: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes that the driver shows, which have to fit the card."""
        return self.device.total


def peak_memory(
    model: ModelWeights,
    sharding: ShardingSpec,
    trace: Trace,
    *,
    accumulation: int,
    gpus_per_node: int,
    on_gpu: bool = True,
    gathers: Gathers | None = None,
) -> PeakMemory:
    """Return the peak memory of the fullest rank, over the moments of a step and of the evaluation after it.

    Args:
        accumulation: micro-batches of a step.
        gpus_per_node: ranks that share a node's host RAM and disk.
        on_gpu: add CUDA's context and the blocks that its allocator caches.
        gathers: weights that a micro-batch gathers; None means that they are computed.
    """
    gathers = gathers or follow_gathers(model.weights, sharding, trace.visits, accumulation)
    # Padding makes the last rank the fullest of some strategies, and the first that of others.
    states = max(
        count_states(model, sharding, 0),
        count_states(model, sharding, sharding.ranks - 1),
        key=lambda states: states.live.total,
    )

    moments = _moments(model, sharding, trace, states, gathers.peak_elements, accumulation)
    if on_gpu and model.is_quantised and (sharding.is_zero3 or sharding.kind == "fsdp"):
        moments["load"] = _quantised_load(model, states, sharding)
    # moment -> bytes of the GPU, the lowest total to expect, and the highest
    peaks: dict[str, tuple[DeviceBytes, int, int]] = {}
    for name, moment in moments.items():
        peaks[name] = (moment, moment.total, moment.total)
        if on_gpu:
            # While a quantised base is loaded, each rank holds all of it.
            shares_states = sharding.stage > 0 and sharding.ranks > 1 and name != "load"
            peaks[name] = _estimate_on_gpu(moment, sharding.ranks, shares_states=shares_states)
    when = max(peaks, key=lambda name: peaks[name][0].total)
    device, low, _ = peaks[when]
    high = max(high for _, _, high in peaks.values())
    host_buffers = host_buffer_bytes(model, states, sharding, accumulation=accumulation, on_gpu=on_gpu)
    # At the end, rank 0 collects the trained weights in host RAM, where offloaded states still are.
    collected = sum(weight.numel * weight.element_bytes for weight in model.trained) if sharding.offloads else 0
    return PeakMemory(
        device=device,
        low=low,
        high=high,
        when=when,
        host_at_load=_model_bytes_at_load(model, sharding, gpus_per_node, on_gpu=on_gpu),
        host=(states.host.total + host_buffers + trace.pinned_bytes) * gpus_per_node + collected,
        disk=states.disk * gpus_per_node,
        moments={name: moment.allocated for name, moment in moments.items()},
    )


def _estimate_on_gpu(device: DeviceBytes, ranks: int, *, shares_states: bool) -> tuple[DeviceBytes, int, int]:
    """Return ``device`` with the cached blocks and the memory outside of torch, and the lowest and highest total to expect.

    Args:
        shares_states: ranks share the states, see `SHARED_RANGE`.
    """
    cached_share = CACHED_SHARE
    low, high = RANGE
    if shares_states:
        cached_share = SHARED_CACHED_SHARE
        low, high = SHARED_RANGE
    outside_torch = CONTEXT_BYTES
    if ranks > 1:
        outside_torch += NCCL_BYTES
    device = replace(device, cached=int(cached_share * device.allocated), other=outside_torch)
    # States are counted exactly, so the total is never lower than with them alone.
    least = device.parameters + device.gradients + device.optimizer + device.other
    return device, max(int(low * device.total), least), int(high * device.total)


def _moments(
    model: ModelWeights, sharding: ShardingSpec, trace: Trace, states: RankStates, gathered_elements: int, accumulation: int
) -> dict[str, DeviceBytes]:
    """Return moment -> what the device holds then: at the fullest point of each pass, in the optimizer's step and in an
    evaluation.

    Args:
        gathered_elements: the most elements of weights that ZeRO-3 has gathered at once.
    """

    def at_moment(gradients: int, activations: int, buffers: int) -> DeviceBytes:
        return DeviceBytes(
            parameters=states.device.parameters,
            gradients=gradients,
            optimizer=states.device.optimizer,
            activations=activations,
            buffers=buffers,
        )

    moments: dict[str, DeviceBytes] = {}
    buffers = {
        "forward and loss": _pass_buffers(model, sharding, gathered_elements, is_backward=False),
        "backward": _pass_buffers(model, sharding, gathered_elements, is_backward=True),
    }
    # Gradients grow during the backward pass while activations shrink, so each point of it is compared.
    for gradient_elements, activations in trace.timeline:
        name = "backward" if gradient_elements else "forward and loss"
        gradients = _gradient_bytes(model, states, sharding, gradient_elements, accumulation)
        moment = at_moment(gradients, activations, buffers[name])
        if name not in moments or moment.allocated > moments[name].allocated:
            moments[name] = moment
    moments["step"] = at_moment(states.device.gradients, 0, _step_buffers(model, sharding))
    if trace.evaluation_bytes is not None:
        # When an evaluation begins, the step has freed its gradients.
        gradients = _gradient_bytes(model, states, sharding, 0, accumulation=1)
        moments["evaluation"] = at_moment(gradients, trace.evaluation_bytes, buffers["forward and loss"])
    return moments


def _quantised_load(model: ModelWeights, states: RankStates, sharding: ShardingSpec) -> DeviceBytes:
    """Return what the device holds while a quantised base is loaded, before it is sharded.

    transformers 5.23 puts a base that bitsandbytes quantises on the GPU of each rank (quantizers/), also under ZeRO-3.
    accelerate 1.15 keeps it there until FSDP2 has made all shards (utils/fsdp_utils.py).
    """
    base = sum(weight.numel * weight.element_bytes + weight.scale_bytes for weight in model.weights)
    shards = states.device.parameters if sharding.kind == "fsdp" else 0
    return DeviceBytes(parameters=base, buffers=shards)


def _gradient_bytes(
    model: ModelWeights, states: RankStates, sharding: ShardingSpec, gradient_elements: int, accumulation: int
) -> int:
    """Return the bytes of gradients on the device when ``gradient_elements`` of the trained elements have one."""
    # Bytes after the backward pass.
    final_bytes = states.device.gradients
    if sharding.kind == "ddp":
        # Gradients are views of buckets that are not freed, except those of earlier micro-batches.
        return 2 * final_bytes if accumulation > 1 else final_bytes
    if sharding.kind in ("single", "fsdp") and accumulation > 1:
        # The sums of earlier micro-batches exist from the start.
        return final_bytes
    if sharding.is_zero3:
        # ZeRO-3 allocates its gradients when training starts.
        return final_bytes
    # ZeRO-1 keeps the full gradients of earlier micro-batches until they are reduced.
    if sharding.kind == "deepspeed" and sharding.stage == 1 and accumulation > 1:
        return model.trained_elements * sharding.compute_bytes
    # The backward pass allocates the gradients one after the other.
    new_bytes = final_bytes * gradient_elements // max(model.trained_elements, 1)
    # ZeRO-2 adds them to those of earlier micro-batches after the backward pass (DeepSpeed 0.19.8, stage_1_and_2.py).
    if sharding.stage == 2 and accumulation > 1:
        new_bytes += final_bytes
    return new_bytes


def _pass_buffers(model: ModelWeights, sharding: ShardingSpec, gathered_elements: int, *, is_backward: bool) -> int:
    """Return the bytes of the library's buffers during the forward or the backward pass.

    Args:
        gathered_elements: the most elements of weights that ZeRO-3 has gathered at once.
    """
    if sharding.kind == "fsdp":
        return _fsdp_pass_buffers(model, sharding, is_backward=is_backward)
    if sharding.kind != "deepspeed":
        return 0
    if sharding.stage < 3:
        # With offload, the gradient of one weight passes through a buffer that is never freed.
        buffers = largest_trained(model) * sharding.compute_bytes if sharding.offload_optimizer != "none" else 0
        # Only the backward pass reduces gradients.
        if is_backward:
            # With overlap_comm, one bucket is filled while the other is reduced.
            buffers += (2 if sharding.overlap_comm else 1) * _reduce_bucket(sharding)
        return buffers
    if sharding.ranks > 1:
        # A prefetch gathers several weights into one flat buffer, which exists besides the weights themselves.
        gathered_elements += min(sharding.prefetch_bucket_elements, gathered_elements)
    elif sharding.offload_param == "none":
        # With one rank, the shard is the weight itself.
        gathered_elements = 0
    # ZeRO-3 allocates its bucket when training starts, so it exists in the forward pass, too.
    return _reduce_bucket(sharding) + gathered_elements * sharding.compute_bytes


def _reduce_bucket(sharding: ShardingSpec) -> int:
    """Return the bytes of the bucket that DeepSpeed reduces gradients in."""
    return sharding.reduce_bucket_elements * sharding.compute_bytes if sharding.contiguous_gradients else 0


def _fsdp_pass_buffers(model: ModelWeights, sharding: ShardingSpec, *, is_backward: bool) -> int:
    """Return the bytes of gathered layers, and in the backward pass of a layer's gradients that are reduced."""
    unit_bytes: dict[str, int] = defaultdict(int)
    for weight in model.weights:
        unit_bytes[weight.unit] += weight.numel * cast_bytes(weight, sharding)
    # Weights outside layers stay gathered.
    root_bytes = unit_bytes.pop("", 0)
    layers = sorted(unit_bytes.values(), reverse=True)
    # A layer is gathered into a flat buffer, and copied out of it. In the forward pass, the flat buffer is kept until the next
    # layer is copied. In the backward pass, the next layer is gathered into its flat buffer early. So at most two layers' bytes
    # exist: a layer and a flat buffer, or two flat buffers (torch 2.13, fsdp/_fully_shard/_fsdp_param_group.py).
    # Without resharding, all layers stay gathered, beside the flat buffer of the last one.
    gathered_layers = layers[:2] if sharding.reshards else layers + layers[:1]
    buffers = root_bytes + sum(gathered_layers)
    if is_backward:
        trained_elements: dict[str, int] = defaultdict(int)
        for weight in model.trained:
            trained_elements[weight.unit] += weight.numel
        trained_elements.pop("", 0)
        # Gradients of one layer at a time exist, with the fp32 buffer in which they are reduced.
        buffers += max(trained_elements.values(), default=0) * (sharding.compute_bytes + FP32_BYTES)
    return buffers


def _step_buffers(model: ModelWeights, sharding: ShardingSpec) -> int:
    """Return the bytes of buffers of the optimizer's step."""
    # An optimizer on the host needs no buffers of the GPU.
    if sharding.kind != "deepspeed" or sharding.offload_optimizer != "none":
        return 0
    largest_partition = max(partition_sizes(model, sharding), default=0)
    # ZeRO-3 casts the gradients of one sub-group at a time to fp32.
    if sharding.stage == 3:
        return FP32_BYTES * min(largest_partition, sharding.sub_group_elements) + _reduce_bucket(sharding)
    # The gradients of one group are flattened, and then copied to fp32.
    return (FP32_BYTES + sharding.compute_bytes) * largest_partition


# Return the bytes of a node's host RAM while the model is loaded.
def _model_bytes_at_load(model: ModelWeights, sharding: ShardingSpec, gpus_per_node: int, *, on_gpu: bool) -> int:
    weight_bytes = [weight.numel * weight.element_bytes for weight in model.weights]
    if model.is_quantised:
        # With GPUs, each rank moves one weight after the other to its GPU. On a CPU, each rank holds a copy of the model.
        return (max(weight_bytes) if on_gpu else sum(weight_bytes)) * gpus_per_node
    return host_bytes_at_load(sum(weight_bytes), max(weight_bytes), sharding, gpus_per_node)


def host_bytes_at_load(model_bytes: int, largest_bytes: int, sharding: ShardingSpec, gpus_per_node: int) -> int:
    """Return the bytes of a node's host RAM while a model of ``model_bytes``, which is not quantised, is loaded and sharded.

    Each rank loads a copy, except under ZeRO-3 and FSDP2. Under ZeRO-3, the ranks of a node hold one copy as shards. Each of
    them also holds the weight that is being loaded, twice: gathered, and in the buffer of the all-gather. Under FSDP2, rank 0
    loads a copy and sends the other ranks their shards.

    Args:
        largest_bytes: bytes of the largest weight.
    """
    if sharding.is_zero3:
        # A single rank holds all shards, and gathers nothing.
        if sharding.ranks == 1:
            return model_bytes
        return model_bytes + 2 * largest_bytes * gpus_per_node
    if sharding.rank_0_loads:
        return model_bytes
    return model_bytes * gpus_per_node
