"""The weights that text input does not use, such as a vision tower. They are frozen under every strategy.

Such a weight gets no gradient from text. If it stayed trainable, DDP would wait for its gradient, ZeRO would apply weight decay
to it, and a single process would leave it unchanged. The optimizer, the checkpoints and the planner take only weights with
``requires_grad``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerobook.utils.model_config import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# These three have names of modules, which are the last part of a module's path.
# Modules that bring images or sound into the text model's embedding.
_FOR_OTHER_INPUTS = ("multi_modal_projector", "visual_projection", "embed_tokens_extend")
# Modules that no recipe uses: LED's projections for tokens with global attention, and poolers, which summarise a text in one
# vector.
_UNUSED = ("query_global", "key_global", "value_global", "pooler")
# Modules that attend to an encoder. They are unused if a decoder is loaded without its encoder.
_CROSS_ATTENTION = ("encoder_attn", "encoder_attn_layer_norm", "cross_attn", "cross_attn_layer_norm")


def freeze_unused(model: PreTrainedModel) -> str | None:
    """Freeze the weights of a loaded model that text input does not use, and those that the model's class does not train.

    transformers 5.23 makes every weight that it loads trainable, even if the model's class has made it without a gradient.

    Returns:
        A note for the user that names the unused modules; None if text input uses all modules.
    """
    # Weights that the class makes without a gradient are sinusoidal positions, and biases by which routers balance their
    # experts. A new model shows which these are. On the meta device, it needs no memory.
    with torch.device("meta"):
        fresh_model = type(model)(copy.deepcopy(model.config))
    fixed = {name for name, parameter in fresh_model.named_parameters() if not parameter.requires_grad}
    modules = unused_modules(model)
    prefixes = tuple(f"{module}." for module in modules)
    for name, parameter in model.named_parameters():
        if name in fixed or name.startswith(prefixes):
            parameter.requires_grad = False
    if not modules:
        return None
    # layers.0.pooler, layers.1.pooler, ... are named once, as layers.*.pooler. A dictionary keeps their order.
    patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", module) for module in modules)
    return f"text input does not use {', '.join(patterns)} of this {type(model).__name__}: frozen, and without adapters"


def unused_modules(model: PreTrainedModel) -> list[str]:
    """Return the paths of the modules that text input does not use. Modules inside of these are not listed again."""
    unused: list[str] = []
    for path, module in model.named_modules():
        # `named_modules` yields a module before the modules inside of it.
        is_inside = path.startswith(tuple(f"{outer}." for outer in unused))
        # The path of the model itself is empty.
        if path and not is_inside and _is_unused(model, path, module):
            unused.append(path)
    # A module without weights, such as an activation, has nothing to freeze.
    return [path for path in unused if list(model.get_submodule(path).parameters())]


def _is_unused(model: PreTrainedModel, path: str, module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    name = path.rpartition(".")[2]
    if name in (*_FOR_OTHER_INPUTS, *_UNUSED):
        return True
    # A part that is a model itself names its main input, which may be images or sound.
    reads_other_input = isinstance(module, PreTrainedModel) and module.main_input_name != "input_ids"
    if model.config.is_encoder_decoder:
        return reads_other_input
    # A decoder without an encoder.
    if not getattr(model.config, "add_cross_attention", False):
        if name in _CROSS_ATTENTION:
            return True
        # Mllama skips the layers that only attend to an image.
        if hasattr(module, "cross_attn") and not hasattr(module, "self_attn"):
            return True
    # This model is not composite: its config is that of its text model.
    if text_config(model.config) is model.config:
        return reads_other_input
    # In a composite model, text uses the modules inside the text model, and those around it.
    return not any(_contains(module, text) or _contains(text, module) for text in _text_modules(model))


def _text_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the text model inside of a composite model, and its output layer."""
    from transformers import PreTrainedModel

    text = text_config(model.config)
    inner = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not model and module.config is text:
            inner.append(module)
    # If no part has the text model's config, yield the complete model, so that all of its modules count as used.
    yield from inner or [model]
    output = model.get_output_embeddings()
    if output is not None:
        yield output


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())
