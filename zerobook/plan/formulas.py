"""Formulas from the literature for what a training step holds and sends. Imports nothing heavy.

People compare plans with these figures; `zerobook.plan.state_bytes` counts what the libraries really hold. ``parameters`` are
numbers of elements. Results are bytes unless the docstring names another unit. Sources:

ZeRO    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv:1910.02054
ZeRO++  Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, arXiv:2306.10209
"""

from dataclasses import dataclass


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
    """Return the bytes of states on one device under a stage of ZeRO (section 5).

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
    # Stage 1 divides optimizer state among the ranks, stage 2 also gradients, stage 3 also parameters.
    parameter_ranks = ranks if stage >= 3 else 1
    gradient_ranks = ranks if stage >= 2 else 1
    optimizer_ranks = ranks if stage >= 1 else 1
    return States(
        parameters * element_bytes / parameter_ranks,
        parameters * element_bytes / gradient_ranks,
        parameters * k / optimizer_ranks,
    )


def traffic(stage: int) -> float:
    """Return the elements that a rank sends in a step of one micro-batch, as a multiple of the number of parameters.

    ZeRO, section 7: an all-gather or a reduce-scatter sends each element once. Up to stage 2, gradients are all-reduced, which
    is both. ZeRO-3 gathers weights in the forward pass and again in the backward pass, and reduce-scatters gradients.
    """
    return 3.0 if stage == 3 else 2.0


def between_nodes_rule(parameters: float, nodes: int) -> float:
    """Return the bytes that a node exchanges in a step of ZeRO-3 with 2-byte elements, by a rule of thumb for sizing networks.

    The rule counts 3 transfers of 16 bits for each parameter, divided by the number of nodes: 48 P / N bits.
    """
    return 48 * parameters / nodes / 8


# Bytes of a parameter in a sharded checkpoint of a mixed-precision run: 2 of the weight, 4 of its fp32 master weight, and 4 of
# each of Adam's two moments.
CHECKPOINT_BYTES = 14
