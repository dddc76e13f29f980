"""Model FLOPs utilization (MFU): the operations that training needs, as a share of the peak operations of the devices.

The operations per token are counted as in PaLM (arXiv 2204.02311, appendix B). Each weight takes two in the forward pass, two
for the gradient of its input, and two for its own gradient. Attention takes 12 x layers x width x length. Recomputed
activations are not counted. The output layer is counted for every token, although it computes only those that have a target. A
frozen weight has no gradient, so LoRA needs 4 operations for a weight where full finetuning needs 6.
"""

from dataclasses import dataclass
from typing import Any

import torch

from zerobook.models.unused_modules import unused_modules
from zerobook.strategy import Strategy
from zerobook.utils.devices import find_device
from zerobook.utils.model_config import text_config


@dataclass(frozen=True)
class ModelFlops:
    """Operations per token in training: ``weights``, and ``attention`` times the length of the row."""

    weights: float
    attention: float

    def per_token(self, length: float) -> float:
        """Return the operations per token in a row of ``length`` tokens."""
        return self.weights + self.attention * length


def model_flops(strategy: Strategy) -> ModelFlops | None:
    """Return the operations per token of the prepared model.

    Returns:
        None if a token does not pass through all weights (encoder-decoders, experts), or if the elements of the parameters are
        not the weights (quantised models, which pack several into one).
    """
    model: Any = strategy.unwrapped
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    text = text_config(config)
    layers = getattr(text, "num_hidden_layers", None)
    width = getattr(text, "hidden_size", None)
    if not layers or not width or getattr(config, "is_encoder_decoder", False):
        return None
    if getattr(config, "quantization_config", None) is not None:
        return None
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None

    # Skip weights without a matrix product: the rows of input embeddings are only looked up, and text does not pass through a
    # vision tower. Embeddings that are tied to the output layer count, since that multiplies them.
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    # The embeddings are tied if the output layer has the same weight.
    skipped = set() if output is not None and output.weight is embedding else {id(embedding)}
    base = getattr(model, "get_base_model", lambda: model)()
    for path in unused_modules(base):
        skipped |= {id(weight) for weight in base.get_submodule(path).parameters()}

    # The strategy knows the shapes of complete weights, of which a rank may hold a shard.
    trained = 0
    frozen = 0
    for parameter in model.parameters():
        if id(parameter) in skipped:
            continue
        size = strategy.shape(parameter).numel()
        if parameter.requires_grad:
            trained += size
        else:
            frozen += size
    # All heads together may be wider or narrower than the hidden size.
    heads = getattr(text, "num_attention_heads", None)
    head_size = getattr(text, "head_dim", None)
    attention_width = heads * head_size if heads and head_size else width
    return ModelFlops(6.0 * trained + 4.0 * frozen, float(12 * layers * attention_width))


def peak_flops(strategy: Strategy) -> float | None:
    """Return the operations per second of all ranks' devices, by their data sheet; None for an unknown device or TF32."""
    if strategy.device.type != "cuda":
        return None
    device = find_device(torch.cuda.get_device_name(strategy.device))
    # Without mixed precision, torch does not use the tensor cores, unless the weights themselves are in half precision.
    is_half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in strategy.unwrapped.parameters())
    computes_in_fp32 = strategy.plan.precision == "no" and not is_half
    # Some container images turn TF32 on. Its peak is not in the table of devices.
    if device is None or (computes_in_fp32 and torch.backends.cuda.matmul.fp32_precision == "tf32"):
        return None
    return strategy.world_size * (device.fp32 if computes_in_fp32 else device.flops)
