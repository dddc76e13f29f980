"""Formulas from the literature for what a training step holds and sends. Imports nothing heavy.

These are the figures that people compare with; `zerobook.plan.state_bytes` counts what the libraries really hold.
``parameters`` are elements; results are bytes unless noted otherwise. Sources:

ZeRO    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv:1910.02054
ZeRO++  Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, arXiv:2306.10209
SP      Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198
DS      the estimators of DeepSpeed 0.19.8, deepspeed.runtime.zero.stage_1_and_2 and stage3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class States:
    """Bytes of the model's states on one device."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(parameters: float, stage: int, ranks: int, *, mixed: bool, states: float = 2) -> States:
    """Return the bytes of states that each stage leaves on a device (ZeRO, section 5).

    Args:
        stage: 0 (data parallelism) to 3.
        mixed: 2-byte weights and gradients, with fp32 master weights and two moments (K = 12); otherwise everything is fp32,
            without separate master weights (K = 8).
        states: fp32 numbers that the optimizer keeps for each parameter; the paper's K is Adam's, with 2.
    """
    element_bytes = 2 if mixed else 4
    # The paper's K: bytes of optimizer state for each parameter, with the fp32 master weights of mixed precision.
    k = 4 * states
    if mixed:
        k += 4
    # Each stage divides one kind of state more among the ranks.
    parameter_ranks = ranks if stage >= 3 else 1
    gradient_ranks = ranks if stage >= 2 else 1
    optimizer_ranks = ranks if stage >= 1 else 1
    return States(
        parameters * element_bytes / parameter_ranks,
        parameters * element_bytes / gradient_ranks,
        parameters * k / optimizer_ranks,
    )


class Estimate(NamedTuple):
    """DeepSpeed's own estimate: bytes of host RAM of a node and of memory of a GPU, and their formula."""

    host: float
    gpu: float
    formula: str


BUFFERS = 1.5
"""DS: ``additional_buffer_factor``, a factor on host RAM for everything that the estimator does not count."""


def deepspeed_zero2(parameters: int, gpus_per_node: int, nodes: int, *, offload: bool, printed: bool = False) -> Estimate:
    """Return DeepSpeed's estimate for ZeRO-2 (DS, ``estimate_zero2_model_states_mem_needs``). Its "GB" is 2^30 bytes.

    Without offload, it counts 2 P + 18 P/N, including fp32 copies of the gradients; the paper has 2 P + 14 P/N.

    Args:
        printed: use 4 P + 16 P/N, as in the published tables, which come from an earlier version.
    """
    ranks = gpus_per_node * nodes
    if offload:
        host = parameters * max(4 * ranks, 16) * BUFFERS
        return Estimate(host, 2 * parameters, "host P x max(4 N, 16) x 1.5, GPU 2 P")
    replicated_bytes = 4 if printed else 2
    sharded_bytes = 20 - replicated_bytes
    gpu = replicated_bytes * parameters + int(sharded_bytes * parameters / ranks)
    host = parameters * 4 * gpus_per_node * BUFFERS
    return Estimate(host, gpu, f"host 4 P x ranks a node x 1.5, GPU {replicated_bytes} P + {sharded_bytes} P/N")


def deepspeed_zero3(
    parameters: int,
    largest_layer: int,
    gpus_per_node: int,
    nodes: int,
    *,
    optimizer: bool,
    params: bool,
    zero_init: bool = True,
) -> Estimate:
    """Return DeepSpeed's estimate for ZeRO-3 (DS, ``estimate_zero3_model_states_mem_needs``). Its "GB" is 2^30 bytes.

    Args:
        largest_layer: parameters of the largest layer, which is gathered whole.
        optimizer, params: whether each is offloaded to host RAM; parameters only together with the optimizer.
        zero_init: the model is sharded while it is made; otherwise every rank first holds all of it in host RAM.
    """
    ranks = gpus_per_node * nodes
    layer_bytes = 4 * largest_layer
    if not optimizer:
        loaded_parameters = largest_layer if zero_init else parameters
        host = loaded_parameters * 4 * gpus_per_node * BUFFERS
        gpu = layer_bytes + int(18 * parameters / ranks)
        return Estimate(host, gpu, "host 4 x loaded x ranks a node x 1.5, GPU 4 L + 18 P/N")
    # 16 bytes of optimizer state a parameter in host RAM, and 2 of weights where they are offloaded too.
    bytes_per_parameter = 16
    gpu = layer_bytes
    formula = "GPU 4 L"
    if params:
        bytes_per_parameter += 2
    else:
        gpu += int(2 * parameters / ranks)
        formula += " + 2 P/N"
    host_per_parameter = bytes_per_parameter / nodes
    if not zero_init:
        host_per_parameter = max(4 * gpus_per_node, host_per_parameter)
    host = parameters * host_per_parameter * BUFFERS
    return Estimate(host, gpu, f"host {bytes_per_parameter} P / nodes x 1.5, {formula}")


def deepspeed_rows(parameters: int, largest_layer: int, gpus_per_node: int, nodes: int) -> list[tuple[str, Estimate]]:
    """Return DeepSpeed's estimates for every way to offload, ZeRO-2 and 3, in the order of its own tables: (case, estimate).

    Without offload, ZeRO-2 has another row for the earlier version of the estimator that published tables come from.
    """
    ranks = (gpus_per_node, nodes)
    rows = [
        ("ZeRO-2, optimizer offloaded", deepspeed_zero2(parameters, *ranks, offload=True)),
        ("ZeRO-2, nothing offloaded", deepspeed_zero2(parameters, *ranks, offload=False)),
        ("ZeRO-2, nothing offloaded, by an earlier version", deepspeed_zero2(parameters, *ranks, offload=False, printed=True)),
    ]
    offloads = {
        "optimizer and parameters offloaded": {"optimizer": True, "params": True},
        "optimizer offloaded": {"optimizer": True, "params": False},
        "nothing offloaded": {"optimizer": False, "params": False},
    }
    for name, offload in offloads.items():
        for zero_init in (True, False):
            estimate = deepspeed_zero3(parameters, largest_layer, *ranks, **offload, zero_init=zero_init)
            rows.append((f"ZeRO-3, {name}, {'sharded' if zero_init else 'whole'} while loading", estimate))
    return rows


def activations(
    layers: int, batch: int, length: int, width: int, heads: int, *, element: int = 2, fused: bool, checkpointing: bool
) -> float:
    """Return the bytes that a transformer's layers keep for the backward pass, without the logits (SP, equations 1 and 4).

    Args:
        element: bytes of an activation; the paper's 34 and 5 count bytes at 2, two of the 34 for masks of one byte.
        fused: attention that keeps no [length, length] matrices, such as flash attention.
        checkpointing: only each layer's input is kept; one layer at a time is recomputed completely.
    """
    # SP's s b h, in units of 2 bytes.
    tensor = batch * length * width * element / 2
    layer_bytes = 34 * tensor
    if not fused:
        layer_bytes += 5 * heads * length**2 * batch * element / 2
    if checkpointing:
        return 2 * tensor * layers + layer_bytes
    return layer_bytes * layers


def logits(batch: int, length: int, vocabulary: int, *, element: int = 2) -> float:
    """Return the bytes that cross-entropy holds at its peak: the computed logits, their fp32 copy, its log-softmax and its
    gradient."""
    return float(batch * length * vocabulary * (element + 3 * 4))


def traffic(stage: int, *, hpz: bool = False, quantized_weights: bool = False, quantized_gradients: bool = False) -> float:
    """Return what a rank sends in a step, as a multiple of the parameters' elements, without the extra gathers of accumulation.

    ZeRO, section 7: an all-reduce is a reduce-scatter and an all-gather, each 1. ZeRO-3 gathers weights in the forward pass
    and again in the backward pass, and reduce-scatters gradients. ZeRO++: hpZ gathers for the backward pass inside the
    node, quantised weights are sent in half as many bytes, quantised gradients in a quarter. All three together send 0.75
    between nodes, a quarter of ZeRO-3's 3.
    """
    if stage < 3:
        return 2.0
    gather = weight_gather(quantized_weights)
    gathers = 1 if hpz else 2
    return gathers * gather + gradient_reduction(quantized_gradients)


def weight_gather(quantized: bool) -> float:
    """Return the part of `traffic` for a gather of all weights: in int8 half of 2 bytes."""
    return 0.5 if quantized else 1.0


def gradient_reduction(quantized: bool) -> float:
    """Return the part of `traffic` for a reduce-scatter of all gradients: in int4 a quarter of 2 bytes."""
    return 0.25 if quantized else 1.0


def ring(multiple: float, ranks: int) -> float:
    """Return what each rank of a ring really sends where an ideal law counts ``multiple``: (N - 1) / N of it."""
    return multiple * (ranks - 1) / ranks


def between_nodes_rule(parameters: float, nodes: int) -> float:
    """Return the bytes that a node exchanges in a step of ZeRO-3 with 2-byte elements: 48 M / N bits, a rule of thumb for
    sizing networks.

    The rule counts 3 transfers of 16 bits a parameter, divided by the nodes. The table shows the ring's law, `ring`, beside
    it.
    """
    return 48 * parameters / nodes / 8


def flops(parameters: float, tokens: float, *, checkpointing: bool) -> float:
    """Return the floating-point operations of a forward and a backward pass: 2 and 4 for each parameter and token, and 2
    more where the forward pass is recomputed. The products inside attention are left out. Source: Kaplan et al., Scaling
    Laws for Neural Language Models, arXiv:2001.08361, section 2.1."""
    return (8 if checkpointing else 6) * parameters * tokens


CHECKPOINT_BYTES = 14
"""Bytes of a parameter with its optimizer state in a sharded checkpoint of a mixed-precision run: 2 + 4 + 4 + 4."""
