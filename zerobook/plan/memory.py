"""Peak memory of a rank's GPU in a step, and of a node's host RAM, from states, activations and buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerobook.plan.gather_schedule import Gathered, gathered
from zerobook.plan.hardware import CONTEXT
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import Groups, StateBytes, Weight, hold, nvme_buffers
from zerobook.plan.trace import Trace

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


@dataclass(kw_only=True)
class Memory:
    """Bytes at the moment of the peak, by part, on one GPU; and bytes of host RAM and disk on a node.

    ``buffers`` are what the libraries allocate or gather; ``other`` is the CUDA context. ``when`` names the moment of the
    peak.
    """

    device: dict[str, int]
    when: str
    host_at_load: int
    host: int
    disk: int
    moments: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.device.values())


def memory(
    weights: Sequence[Weight],
    groups: Groups,
    spread: ShardingSpec,
    trace: Trace,
    *,
    accumulation: int,
    gpus_per_node: int,
    context: int = CONTEXT,
    passes: Gathered | None = None,
) -> Memory:
    """Follow a step, and the evaluation after it, through their moments and return the moment with the most memory.

    Args:
        accumulation: micro-batches of a step.
        gpus_per_node: ranks that share a node's host RAM and disk.
        context: bytes of the device that are in use before the first tensor; 0 on a CPU.
        passes: what the passes of ``trace`` gather; computed where it is None.
    """
    held = max((hold(weights, groups, spread, rank) for rank in {0, spread.ranks - 1}), key=lambda h: sum(h.states.values()))
    fixed = held.on_device
    trained = sum(w.numel for group in groups for w in group)
    moments: dict[str, dict[str, int]] = {}
    passes = passes or gathered(weights, spread, trace.visits, accumulation)
    aside = [_buffers(weights, groups, spread, passes.most, backward=backward) for backward in (False, True)]
    for gradients_done, activations in trace.timeline:
        when = "backward" if gradients_done else "forward and loss"
        parts = {
            "parameters": fixed["parameters"],
            "gradients": _gradients(held, spread, gradients_done, trained, accumulation),
            "optimizer": fixed["optimizer"],
            "activations": activations,
            "buffers": aside[bool(gradients_done)],
            "other": context,
        }
        if when not in moments or sum(parts.values()) > sum(moments[when].values()):
            moments[when] = parts
    at_step = _at_step(weights, groups, spread)
    moments["step"] = {**fixed, "activations": 0, "buffers": at_step, "other": context}
    if trace.evaluation is not None:
        moments["evaluation"] = {
            **fixed,
            "gradients": _gradients(held, spread, 0, trained, accumulation=1),  # the step's gradients are freed
            "activations": trace.evaluation,
            "buffers": aside[0],
            "other": context,
        }
    when = max(moments, key=lambda name: sum(moments[name].values()))
    whole = sum(w.numel * w.element for w in weights)
    on_host = sum(held.host.values()) + (_pinned(groups, spread) if held.host else 0)
    return Memory(
        device=moments[when],
        when=when,
        host_at_load=at_load(
            whole, max(w.numel * w.element for w in weights), spread, gpus_per_node, quantised=any(w.scales for w in weights)
        ),
        host=(on_host + trace.host) * gpus_per_node,
        disk=held.disk * gpus_per_node,
        moments={name: sum(parts.values()) for name, parts in moments.items()},
    )


def _gradients(held: StateBytes, spread: ShardingSpec, done: int, trained: int, accumulation: int) -> int:
    """Return the bytes of gradients on the device when ``done`` of the ``trained`` elements have one."""
    final = held.on_device["gradients"]
    if accumulation > 1 and spread.kind in ("single", "ddp"):
        return final  # the gradients of the previous micro-batch
    if spread.stage == 3 and spread.kind == "deepspeed":
        return final  # allocated at the start
    if spread.kind == "deepspeed" and spread.stage == 1 and accumulation > 1:
        return trained * spread.compute
    return final * done // max(trained, 1)


def _buffers(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec, whole: int, *, backward: bool) -> int:
    """Return the bytes of buffers during the passes. ``whole``: elements that ZeRO-3 has gathered."""
    trained = sum(w.numel for group in groups for w in group)
    if spread.kind == "ddp":
        return 4 * trained  # the buckets that gradients are copied into; they are not freed
    if spread.kind == "deepspeed":
        bucket = spread.reduce_bucket * spread.compute if spread.contiguous else 0
        if spread.stage < 3:
            return bucket * (2 if spread.overlap else 1) if backward else 0
        if spread.ranks > 1:
            whole += min(spread.prefetch_bucket, whole)  # several weights are gathered in one flat buffer
        elif spread.offload_param == "none":
            whole = 0  # the part is the whole weight
        return bucket + whole * spread.compute
    if spread.kind == "fsdp":
        units = _units(weights, spread)
        root, layers = units.pop("", 0), sorted(units.values(), reverse=True)
        # a layer in use, the next layer, and the flat buffer in which it is gathered
        unsharded = root + sum(layers[:2]) + (layers[0] if layers else 0)
        # a layer's gradients, and the fp32 buffer that they are reduced in
        leaving = max((size for unit, size in _trained(groups).items() if unit), default=0)
        return unsharded + (leaving * (spread.compute + 4) if backward else 0)
    return 0


def _trained(groups: Groups) -> dict[str, int]:
    """Return the trained elements of each unit."""
    found: dict[str, int] = defaultdict(int)
    for group in groups:
        for w in group:
            found[w.unit] += w.numel
    return found


def _units(weights: Sequence[Weight], spread: ShardingSpec) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for w in weights:
        found[w.unit] += w.numel * (spread.compute if spread.precision != "no" else w.element)
    return found


def _at_step(weights: Sequence[Weight], groups: Groups, spread: ShardingSpec) -> int:
    """Return the bytes of buffers of the optimizer's step."""
    if spread.kind == "ddp":
        return 4 * sum(w.numel for group in groups for w in group)
    if spread.kind != "deepspeed" or spread.offload_optimizer != "none":
        return 0
    sizes = [-(-sum(w.numel for w in group) // spread.ranks) for group in groups]
    if spread.stage == 3:
        bucket = spread.reduce_bucket * spread.compute if spread.contiguous else 0
        return 4 * min(max(sizes, default=0), spread.sub_group) + bucket
    # a group's gradients flattened, and again in fp32
    return max(((4 + spread.compute) * size for size in sizes), default=0)


def _pinned(groups: Groups, spread: ShardingSpec) -> int:
    """Return the bytes of host RAM beside the states: ZeRO-2 offload also keeps updated weights in the compute dtype there,
    and weights on NVMe are read through buffers."""
    if spread.kind == "deepspeed" and spread.stage < 3:
        return spread.compute * sum(-(-sum(w.numel for w in group) // spread.ranks) for group in groups)
    return nvme_buffers(groups, spread)


def at_load(whole: int, largest: int, spread: ShardingSpec, gpus_per_node: int, *, quantised: bool = False) -> int:
    """Return the bytes of a node's host RAM while a model of ``whole`` bytes is loaded and sharded.

    Each rank loads a copy, except under ZeRO-3 and FSDP2. Under ZeRO-3, the ranks of a node hold one copy as shards. Each of
    them also holds the weight that is being loaded, twice: gathered, and in the buffer of the all-gather. Under FSDP2, rank 0
    holds the copy, and the other ranks get their shards from it. But every rank loads and quantises a base that is quantised
    while it is loaded.

    Args:
        largest: bytes of the largest weight.
        quantised: weights are packed.
    """
    if spread.kind == "deepspeed" and spread.stage == 3:
        return whole + (2 * largest * gpus_per_node if spread.ranks > 1 else 0)
    return whole if spread.rank_0_loads and not quantised else whole * gpus_per_node
