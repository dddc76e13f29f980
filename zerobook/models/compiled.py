"""Regional compilation: torch.compile compiles the code of one layer, and all layers run it.

To compile a complete model takes as many times longer as it has layers, and the results are the same.
"""

import torch
from torch import nn

# Maximum number of compiled forms of a layer. torch compiles one for training and one for evaluation, and more for the first
# lengths of rows, until it treats lengths as variable. Beyond the maximum (torch's default is 8), a layer runs uncompiled.
VARIANTS = 32


def compile_layers(model: nn.Module) -> int:
    """Set every layer to be compiled when it first runs, and return the number of layers.

    Only ``forward`` is compiled. FSDP2 gathers weights in hooks on the layers, which stay outside of the compiled code. Random
    numbers are drawn as without compilation, so dropout leaves out the same activations.

    Args:
        model: the model that the strategy has prepared.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # Keep a higher limit that the user has set.
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    # Under DDP, torch would split compiled code at the bounds of gradient buckets, so that reductions begin early. Here each
    # layer is compiled separately, and reductions can begin between layers.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        # Draw random numbers as without compilation. This is an option of the compiled code and not a setting of torch, since
        # a setting applies only to the thread that made it, and the backward pass has other threads.
        layer.forward = torch.compile(layer.forward, options={"fallback_random": True})
    return len(layers)
