"""Model FLOPs utilization (MFU): the share of the devices' peak operations that a training's own operations need.

Operations of a token are counted as in PaLM (arXiv 2204.02311, appendix B): two for each weight in the forward pass, two for
its input's gradient, two for its own gradient, and 12 x layers x width x length for attention. Recomputed activations are not
counted. A frozen weight has no gradient of its own, so LoRA needs 4 operations for a weight where full finetuning needs 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zerobook.models.reach import unreached_modules
from zerobook.strategy import Strategy
from zerobook.utils.devices import known
from zerobook.utils.model_config import text_config


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a token in training: ``weights``, and ``attention`` for each token of its row."""

    weights: float
    attention: float

    def per_token(self, length: float) -> float:
        """Return the operations of a token in a row of ``length`` tokens."""
        return self.weights + self.attention * length


def model_flops(strategy: Strategy) -> ModelFlops | None:
    """Return the operations of a token in the prepared model.

    None where a token does not pass all weights (encoder-decoders, experts), or where their number is not that of the
    parameters (quantised models).
    """
    model: Any = strategy.unwrapped
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    text = text_config(config)
    layers, width = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    heads, head = getattr(text, "num_attention_heads", None), getattr(text, "head_dim", None)
    if not layers or not width or getattr(config, "is_encoder_decoder", False):
        return None
    if getattr(config, "quantization_config", None) is not None or any(
        getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        return None
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    base = getattr(model, "get_base_model", lambda: model)()
    unreached = {id(weight) for path in unreached_modules(base) for weight in base.get_submodule(path).parameters()}
    trained = frozen = 0
    for parameter in model.parameters():
        if (parameter is embedding and not tied) or id(parameter) in unreached:
            continue  # rows are looked up; no token passes a vision tower
        size = strategy.shape(parameter).numel()
        trained, frozen = (trained + size, frozen) if parameter.requires_grad else (trained, frozen + size)
    attention = 12 * layers * (heads * head if heads and head else width)
    return ModelFlops(6.0 * trained + 4.0 * frozen, float(attention))


def peak_flops(strategy: Strategy) -> float | None:
    """Return the operations a second of all ranks' devices by their data sheet; None for an unknown device.

    In fp32 it is the rate without tensor cores, as torch computes by default.
    """
    if strategy.device.type != "cuda":
        return None
    device = known(torch.cuda.get_device_name(strategy.device))
    if device is None:
        return None
    return strategy.world_size * (device.fp32 if strategy.plan.precision == "no" else device.flops)
