"""Facts from a transformers config, also if it is composed of the configs of several models."""

import math
from typing import Any

DEFAULT_NVME_BUFFER = 100_000_000
"""Elements of a buffer for weights on NVMe, if ``buffer_size`` of the DeepSpeed JSON is ``auto`` or not set."""
ROOM_FOR_TOKENS = 1.02
"""Factor on the size of the largest weight, which is often an embedding: tokens may be added to it after it is loaded."""


def auto_class(config_class: type, *, encoder_decoder: bool) -> Any:
    """Return transformers' auto class that loads the models of ``config_class``, to read and write text.

    Most models that also take images have an auto class of their own. So has Mllama, whose text model alone can be loaded, but
    not loaded again from where it is saved.
    """
    import transformers

    if encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    text = transformers.AutoModelForCausalLM
    images = transformers.AutoModelForImageTextToText
    # The text model's own config, which is what would be saved.
    saved_config_class = getattr(text._model_mapping.get(config_class, None), "config_class", type(None))
    if config_class in images._model_mapping and saved_config_class not in text._model_mapping:
        return images
    return text


def text_config(config: Any) -> Any:
    """Return the config of the model that reads and writes text: the part named so in a composite config, as of models that
    also take images, and else ``config`` itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def hidden_width(config: Any) -> int:
    """Return the width of the text model's layers, the largest if there are several; 0 if the config names none."""
    for candidate in (config, text_config(config)):
        width = getattr(candidate, "hidden_size", None)
        if width:
            return int(width)
        widths = getattr(candidate, "hidden_sizes", None)
        if widths:
            return int(max(widths))
    return 0


def automatic_zero_sizes(config: Any) -> dict[str, int]:
    """Return the sizes, in elements, that ``auto`` stands for in the ``zero_optimization`` of a DeepSpeed config: those of
    accelerate 1.15, which finds no width in composite configs."""
    width = hidden_width(config)
    return {
        "reduce_bucket_size": width**2,
        "stage3_prefetch_bucket_size": int(0.9 * width**2),
        "stage3_param_persistence_threshold": 10 * width,
    }


def nvme_buffer_elements(chosen: float | str, largest_weight: int, ranks: int) -> int:
    """Return the elements of a buffer of DeepSpeed for weights on NVMe: as many as were chosen, or as the largest shard needs.

    Each shard passes through a buffer while the model is loaded, and DeepSpeed 0.19.8 asserts that it fits.

    Args:
        chosen: ``buffer_size`` of the JSON, a number or ``auto``.
        largest_weight: elements of the largest weight of the model.
    """
    chosen_elements = DEFAULT_NVME_BUFFER if chosen == "auto" else int(chosen)
    return max(chosen_elements, math.ceil(ROOM_FOR_TOKENS * largest_weight / ranks))
