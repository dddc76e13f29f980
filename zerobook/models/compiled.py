"""Layers compiled by torch.compile: one layer's code is compiled, and all layers run it (regional compilation).

A whole model takes as many times longer to compile as it has layers, and computes the same.
"""

from __future__ import annotations

import torch
from torch import nn

VARIANTS = 32
"""Forms of a layer that may be compiled: training and evaluation, each with the lengths that are not yet variable. After 8,
torch's default, a layer would run without compilation."""


def compile_layers(model: nn.Module) -> int:
    """Compile the ``forward`` of every layer, and return the number of layers. The code is compiled when a layer first runs.

    Hooks on the layers, by which FSDP2 gathers weights, stay outside of the compiled code.

    Random numbers are drawn as without compilation, so dropout leaves out the same activations.

    Args:
        model: as the strategy prepared it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # Keep a higher limit that the user has set.
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    # Under DDP, torch would cut each layer at the bounds of gradient buckets. Between layers there are cuts enough.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        # An option stays with the compiled code. A setting of torch holds only in the thread that made it, and backward has
        # threads of its own. The attribute is that of this layer: other models of its class stay as they are.
        layer.forward = torch.compile(layer.forward, options={"fallback_random": True})
    return len(layers)
