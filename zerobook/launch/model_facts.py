"""The config.json of a run's model, if it is on this machine, and the reasons in it why the model cannot be trained."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import hub
from zerobook.utils.model_config import auto_class
from zerobook.utils.reading import read_json

_OTHER_STRATEGY = "accelerate_configs/fsdp.yaml"


def model_facts(config: RecipeConfig) -> dict[str, Any] | None:
    """Return the config.json of the model; None if it is not on this machine. Download nothing."""
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
        # There is no such model or file. `load_config` reports this when the run loads the model.
        return None
    return facts if isinstance(facts, dict) else None


def find_text_problems(facts: Mapping[str, Any]) -> list[str]:
    """Return a problem if the recipes cannot train such a model, since it does not read a text and continue it.

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

    model_type = str(facts.get("model_type"))
    # A model of unknown type, or with code of its own (auto_map), cannot be checked.
    if model_type not in CONFIG_MAPPING or "auto_map" in facts:
        return []
    config_class = CONFIG_MAPPING[model_type]
    has_masked_head = config_class in AutoModelForMaskedLM._model_mapping
    is_seq2seq = config_class in AutoModelForSeq2SeqLM._model_mapping
    # With is_decoder, some encoders such as BERT are decoders.
    is_decoder = facts.get("is_decoder", getattr(config_class, "is_decoder", None)) is not False
    has_causal_head = is_decoder and config_class in AutoModelForCausalLM._model_mapping
    if has_masked_head and not is_seq2seq and not has_causal_head:
        return [
            f"model: {model_type} is an encoder, which fills in masked words, and has no language-modelling head that the "
            "recipes train. Take a decoder, or an encoder-decoder."
        ]
    for auto_model in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
        # A model of speech, for example, has another main input.
        if getattr(auto_model._model_mapping.get(config_class, None), "main_input_name", None) == "input_ids":
            return []
    return [f"model: transformers has no class of {model_type} that writes text. Take a decoder, or an encoder-decoder."]


def find_zero3_problems(plan: LaunchPlan, facts: Mapping[str, Any]) -> list[str]:
    """Return the reasons in a model's config why the model cannot be trained under ZeRO-3.

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
            f"config.json, or launch with {_OTHER_STRATEGY}."
        )
    if facts.get("model_type") == "led":
        problems.append(
            "model: an LED embeds padding in those batches whose length is no multiple of its attention window. The processes "
            f"would then gather different weights at the same time, under {plan.name}. Launch with {_OTHER_STRATEGY}."
        )
    return problems


def find_missing_layers(environ: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    """Return a problem for each class of layers that a strategy file names and that the model's Python module does not have.

    Args:
        environ: the environment of a worker process, with the settings of the strategy file.
        facts: the model's config.json.
    """
    model_class = find_model_class(facts)
    if model_class is None:
        return []
    names_in_module = vars(import_module(model_class.__module__))
    layers = ",".join(sorted(model_class._no_split_modules or ()))
    # Variable -> (the key of the strategy file that sets it, the layers that are used if the key is not set).
    keys = {
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", layers),
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_config.deepspeed_moe_layer_cls_names", ""),
    }
    problems = []
    for variable, (key, default) in keys.items():
        for name in map(str.strip, environ.get(variable, "").split(",")):
            if name and name not in names_in_module:
                without_key = f", which then is {default}" if default else ""
                problems.append(f"{key}: {name}: {model_class.__name__} has no such layer. Remove the key{without_key}.")
    return problems


def find_model_class(facts: Mapping[str, Any]) -> Any:
    """Return transformers' class of a model; None if transformers has none for its config.json.

    Args:
        facts: the model's config.json.
    """
    from transformers import CONFIG_MAPPING

    model_type: Any = facts.get("model_type")
    # A model with auto_map has code of its own.
    if model_type not in CONFIG_MAPPING or "auto_map" in facts:
        return None
    config_class = CONFIG_MAPPING[model_type]
    is_encoder_decoder = bool(facts.get("is_encoder_decoder"))
    model_class = auto_class(config_class, encoder_decoder=is_encoder_decoder)._model_mapping.get(config_class, None)
    # Some versions of transformers map composite models to a tuple of classes.
    return model_class if isinstance(model_class, type) else None


def list_modules(config: RecipeConfig) -> dict[str, type] | None:
    """Return the modules of the run's model, name -> class; None if the model's class is not known here."""
    facts = model_facts(config)
    model_class = find_model_class(facts) if facts else None
    if facts is None or model_class is None:
        return None
    import torch

    # On the meta device, the weights need no memory.
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(facts))
    return {name: type(module) for name, module in model.named_modules() if name}
