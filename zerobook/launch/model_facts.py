"""The config.json of a run's model, where it is on this machine, and what a strategy cannot do with it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import hub
from zerobook.utils.model_config import auto_class
from zerobook.utils.reading import read_json

_ELSEWHERE = "accelerate_configs/fsdp.yaml"


def model_facts(config: RecipeConfig) -> dict[str, Any] | None:
    """Return the config.json of the model; None if it is not on this machine. Downloads nothing."""
    name = config.model_name_or_path or config.initialised_from
    if not name:
        return None
    try:
        path = embedded.converted(name) or hub.folder(name, config.model_revision)
        if path is None:
            return None
        if path.is_dir():
            path = path / "config.json"
        facts = read_json(path)
    except (OSError, ValueError):
        # There is no such model, or no such file: `load_config` says so.
        return None
    return facts if isinstance(facts, dict) else None


def unfit_for_text(facts: Mapping[str, Any]) -> list[str]:
    """Return why the recipes do not train such a model, as far as its config says: it does not read text and continue it.

    Args:
        facts: the model's config.json.
    """
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )

    kind = str(facts.get("model_type"))
    # Nothing is known of a model whose code comes with it.
    if kind not in CONFIG_MAPPING or "auto_map" in facts:
        return []
    config_class = CONFIG_MAPPING[kind]
    has_masked_head = config_class in AutoModelForMaskedLM._model_mapping
    is_seq2seq = config_class in AutoModelForSeq2SeqLM._model_mapping
    # Some classes of encoders become decoders by a value of their config.
    is_decoder = facts.get("is_decoder", getattr(config_class, "is_decoder", None)) is not False
    has_causal_head = is_decoder and config_class in AutoModelForCausalLM._model_mapping
    if has_masked_head and not is_seq2seq and not has_causal_head:
        return [
            f"model: {kind} is an encoder, which fills in masked words, and has no language-modelling head that the recipes "
            "train. Take a decoder, or an encoder-decoder."
        ]
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
        if getattr(auto._model_mapping.get(config_class, None), "main_input_name", None) == "input_ids":
            return []
    return [f"model: transformers has no class of {kind} that writes text. Take a decoder, or an encoder-decoder."]


def unfit_for_zero3(plan: LaunchPlan, facts: Mapping[str, Any]) -> list[str]:
    """Return why a model cannot be trained under ZeRO-3, as far as its config says.

    Args:
        facts: the model's config.json.
    """
    if plan.zero_stage != 3:
        return []
    problems = []
    noise = facts.get("router_jitter_noise")
    if noise:
        problems.append(
            f"model: its config asks for router_jitter_noise {noise:g}, by which transformers 5.23 multiplies in place. torch "
            f"forbids that on the outputs of layers that DeepSpeed 0.19.8 wraps, under {plan.name}. Set it to 0 in the model's "
            f"config.json, or launch with {_ELSEWHERE}."
        )
    if facts.get("model_type") == "led":
        problems.append(
            "model: an LED embeds padding in those batches whose length is no multiple of its attention window. The processes "
            f"would then gather different weights at the same time, under {plan.name}. Launch with {_ELSEWHERE}."
        )
    return problems


def unfit_layers(environ: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    """Return a problem for each layer class that a strategy file names and the model's own module does not have.

    Args:
        facts: the model's config.json.
    """
    model = model_class(facts)
    if model is None:
        return []
    names_in_module = vars(import_module(model.__module__))
    layers = ",".join(sorted(model._no_split_modules or ()))
    # Environment variable -> (the key that sets it, the layers that are used if the key is not set).
    keys = {
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", layers),
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_config.deepspeed_moe_layer_cls_names", ""),
    }
    problems = []
    for variable, (key, default) in keys.items():
        for name in map(str.strip, environ.get(variable, "").split(",")):
            if name and name not in names_in_module:
                without_key = f", which then is {default}" if default else ""
                problems.append(f"{key}: {name}: {model.__name__} has no such layer. Remove the key{without_key}.")
    return problems


def model_class(facts: Mapping[str, Any]) -> Any:
    """Return transformers' class of a model; None if its config.json names none that is known here."""
    kind = facts.get("model_type")
    if kind is None or "auto_map" in facts:
        return None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[kind]
    is_encoder_decoder = bool(facts.get("is_encoder_decoder"))
    model = auto_class(config_class, encoder_decoder=is_encoder_decoder)._model_mapping.get(config_class, None)
    # Composite models are mapped to a tuple of classes in some versions.
    return model if isinstance(model, type) else None


def model_modules(config: RecipeConfig) -> dict[str, type] | None:
    """Return the modules of the run's model: name -> class. None if the model's class is not known here."""
    facts = model_facts(config)
    model = model_class(facts) if facts else None
    if facts is None or model is None:
        return None
    import torch

    # A model without memory for its weights has the same modules.
    with torch.device("meta"):
        skeleton = model(model.config_class.from_dict(facts))
    return {name: type(module) for name, module in skeleton.named_modules() if name}
