"""Formulas from the literature that the tables compare measurements with. Imports nothing heavy.

`activations` is of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198.
"""

from __future__ import annotations


def activations(
    layers: int, batch: int, length: int, width: int, heads: int, *, element: int = 2, fused: bool, checkpointing: bool
) -> float:
    """Return the bytes that a transformer's layers keep for the backward pass, without the logits (equations 1 and 4).

    Args:
        element: bytes of an activation; the paper's 34 and 5 count bytes at 2, two of the 34 for masks of one byte.
        fused: attention that keeps no [length, length] matrices, such as flash attention.
        checkpointing: only each layer's input is kept; one layer at a time is recomputed completely.
    """
    # The paper's s b h, in units of 2 bytes.
    tensor = batch * length * width * element / 2
    layer_bytes = 34 * tensor
    if not fused:
        layer_bytes += 5 * heads * length**2 * batch * element / 2
    if checkpointing:
        return 2 * tensor * layers + layer_bytes
    return layer_bytes * layers


def ring(multiple: float, ranks: int) -> float:
    """Return what each rank of a ring really sends where an ideal law counts ``multiple``: (N - 1) / N of it."""
    return multiple * (ranks - 1) / ranks
