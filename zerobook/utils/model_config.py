"""Classes, parts and sizes that follow from a transformers config, also if it is composed of configs of several models."""

import math
from typing import Any

# Elements of a buffer for weights on NVMe, if ``buffer_size`` of the DeepSpeed JSON is ``auto`` or not set.
DEFAULT_NVME_BUFFER = 100_000_000
# Factor on the size of the largest weight, which is often an embedding: tokens may be added to it after it is loaded.
ROOM_FOR_TOKENS = 1.02


def auto_class(config_class: type, *, encoder_decoder: bool) -> Any:
    """Return transformers' auto class that loads models of ``config_class`` to read and write text.

    `AutoModelForCausalLM` does not load most models that also take images. From a checkpoint of Mllama it loads the text model,
    but not again from the folder in which that is saved. These models need `AutoModelForImageTextToText`.
    """
    import transformers

    if encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    text_class = transformers.AutoModelForCausalLM
    image_class = transformers.AutoModelForImageTextToText
    # ``_model_mapping`` has the model class for each config class. A model is saved with the config class that it names itself.
    saved_config_class = getattr(text_class._model_mapping.get(config_class, None), "config_class", type(None))
    if config_class in image_class._model_mapping and saved_config_class not in text_class._model_mapping:
        return image_class
    return text_class


def text_config(config: Any) -> Any:
    """Return the config of the model that reads and writes text.

    It is a part of a composite config, such as that of a model that also takes images. Otherwise it is ``config`` itself.
    """
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def hidden_width(config: Any) -> int:
    """Return the width of the text model's layers, or the largest if they differ; 0 if the config names none."""
    for candidate in (config, text_config(config)):
        width = getattr(candidate, "hidden_size", None)
        if width:
            return int(width)
        widths = getattr(candidate, "hidden_sizes", None)
        if widths:
            return int(max(widths))
    return 0


def automatic_zero_sizes(config: Any) -> dict[str, int]:
    """Return the sizes, in elements, for which ``auto`` stands in ``zero_optimization`` of a DeepSpeed config.

    The formulas are those of accelerate 1.15, which computes nothing for composite configs, since it finds no width in them.
    """
    width = hidden_width(config)
    return {
        "reduce_bucket_size": width**2,
        "stage3_prefetch_bucket_size": int(0.9 * width**2),
        "stage3_param_persistence_threshold": 10 * width,
    }


def nvme_buffer_elements(chosen: float | str, largest_weight: int, ranks: int) -> int:
    """Return the number of elements of DeepSpeed's buffers for weights on NVMe: the chosen number, or more if a shard needs it.

    Each shard passes through a buffer while the model is loaded, and DeepSpeed 0.19.8 asserts that it fits.

    Args:
        chosen: ``buffer_size`` of the DeepSpeed JSON, a number or ``auto``.
        largest_weight: elements of the largest weight of the model. Each rank has a shard of it.
    """
    chosen_elements = DEFAULT_NVME_BUFFER if chosen == "auto" else int(chosen)
    return max(chosen_elements, math.ceil(ROOM_FOR_TOKENS * largest_weight / ranks))
