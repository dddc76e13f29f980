"""Weights that text input does not use: frozen, without adapters, and written with the model."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from zerobook.models.adapters import adapt_model
from zerobook.models.unused_modules import freeze_unused
from zerobook.objective import NextToken
from zerobook.utils.model_config import auto_class

ADAPTERS = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "seed": 0}


def load(folder, kind="AutoModelForCausalLM"):
    import transformers

    return getattr(transformers, kind).from_pretrained(folder)


def without_gradient(model) -> set[str]:
    """Return the names of the weights that get no gradient from text, with every weight trainable."""
    for parameter in model.parameters():
        parameter.requires_grad = True
    ids = torch.arange(3, 67).view(2, 32)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    model.train()(**inputs).logits.square().sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


def led():
    from transformers import AutoModelForSeq2SeqLM, LEDConfig

    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = LEDConfig(vocab_size=128, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, attention_window=16, **sizes)
    return AutoModelForSeq2SeqLM.from_config(config)


def decoder_of_bart():
    from transformers import AutoModelForCausalLM, BartConfig

    sizes = {f"decoder_{what}": size for what, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))}
    return AutoModelForCausalLM.from_config(BartConfig(vocab_size=128, d_model=32, **sizes))


TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
WITH_IMAGES = {
    "llava": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **VISION},
              "image_token_index": 127},
    "mistral3": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": {"model_type": "pixtral", **VISION},
                 "image_token_index": 127},
    "idefics3": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": 127},
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
                   "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0]}, "image_token_id": 127},
    "mllama": {"text_config": {**TEXT, "cross_attention_layers": [1]}, "image_token_index": 128,
               "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_global_layers": 1,
                                 "attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 64,
                                 "intermediate_layers_indices": [0]}},
}  # fmt: skip
"""Models of classes that take images too."""


SINUSOIDAL = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
FIXED = {"marian": SINUSOIDAL, "pegasus": SINUSOIDAL}
"""Weights that the model's class makes without a gradient. From transformers 5.24 on, they would get one from text."""


def with_images(kind):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **WITH_IMAGES[kind])
    return auto_class(type(config), encoder_decoder=False).from_config(config)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gemma3_composite", "marian", "pegasus", "mbart", "led", "decoder of bart", *WITH_IMAGES]
)
def test_the_weights_without_a_gradient_are_the_frozen_ones(tiny, name):
    made = {"led": led, "decoder of bart": decoder_of_bart, **{kind: partial(with_images, kind) for kind in WITH_IMAGES}}
    seq2seq = name in ("marian", "pegasus", "mbart")
    model = made[name]() if name in made else load(tiny / name, f"AutoModelFor{'Seq2SeqLM' if seq2seq else 'CausalLM'}")
    expected = without_gradient(model) | FIXED.get(name, set())

    freeze_unused(model)

    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == expected
    assert bool(expected) == (name not in ("llama", "gemma3", "mbart"))


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "fc1", "down_proj"]])
def test_adapters_stand_beside_the_text_model_only(tiny, targets):
    model = load(tiny / "gemma3_composite")

    made = adapt_model(model, {**ADAPTERS, "lora_target_modules": targets}, revision="main")

    trained = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    assert trained and all(".language_model." in name for name in trained)


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_models_with_images_load_whole_and_again(tmp_path, kind):
    """And a decoder whose images have no class of their own loads as it is released."""
    model = with_images(kind)
    model.save_pretrained(tmp_path)

    again, report = auto_class(type(model.config), encoder_decoder=False).from_pretrained(tmp_path, output_loading_info=True)

    assert type(again) is type(model) and not report["missing_keys"]


def test_routers_that_are_linear_layers_get_no_adapters():
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(**TEXT, intermediate_size_mlp=64, head_dim=8, num_local_experts=2, interleave_moe_layer_step=2)
    made = adapt_model(
        AutoModelForCausalLM.from_config(config), {**ADAPTERS, "lora_target_modules": ["all-linear"]}, revision="main"
    )

    ids = torch.arange(3, 35).view(1, 32)
    made(input_ids=ids, labels=ids).loss.backward()

    trained = {name: parameter for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert trained and not any("router" in name for name in trained)
    assert all(parameter.grad is not None for parameter in trained.values())


def test_the_router_loss_follows_the_text_models_config():
    from types import SimpleNamespace

    text = SimpleNamespace(router_aux_loss_coef=0.25, output_router_logits=True)
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    assert NextToken().needs_attention_mask(model.train())
    assert not NextToken().needs_attention_mask(model.eval())


def test_the_planner_counts_what_is_trained(tiny):
    from recipes.causal_lm import CausalLM, CausalLMConfig
    from zerobook.plan.job import make_job

    config = CausalLMConfig(model_name_or_path=str(tiny / "gemma3_composite"), train_file="x.jsonl", block_size=64)
    model = make_job(CausalLM(config)).weights()
    weights, groups = model.weights, model.groups
    trained = {weight.name for group in groups for weight in group}
    assert {weight.name for weight in weights} - trained == without_gradient(load(tiny / "gemma3_composite"))
