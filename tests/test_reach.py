"""Weights that text does not reach: frozen, without adapters, and written with the model."""

from __future__ import annotations

import pytest
import torch

from zerobook.models.adapters import adapted
from zerobook.models.reach import freeze_unreached
from zerobook.objective import NextToken

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


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gemma3_composite", "marian", "pegasus", "mbart", "led", "decoder of bart"]
)
def test_the_weights_without_a_gradient_are_the_frozen_ones(tiny, name):
    made = {"led": led, "decoder of bart": decoder_of_bart}
    seq2seq = name in ("marian", "pegasus", "mbart")
    model = made[name]() if name in made else load(tiny / name, f"AutoModelFor{'Seq2SeqLM' if seq2seq else 'CausalLM'}")
    expected = without_gradient(model)

    freeze_unreached(model)

    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == expected
    assert bool(expected) == (name not in ("llama", "gemma3", "mbart"))


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "fc1", "down_proj"]])
def test_adapters_stand_beside_the_text_model_only(tiny, targets):
    model = load(tiny / "gemma3_composite")

    made = adapted(model, {**ADAPTERS, "lora_target_modules": targets}, revision="main")

    trained = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    assert trained and all(".language_model." in name for name in trained)


def test_the_router_loss_follows_the_text_models_config():
    from types import SimpleNamespace

    text = SimpleNamespace(router_aux_loss_coef=0.25, output_router_logits=True)
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    assert NextToken().needs_attention_mask(model.train())
    assert not NextToken().needs_attention_mask(model.eval())


def test_the_planner_counts_what_is_trained(tiny):
    from recipes.causal_lm import CausalLM, CausalLMConfig
    from zerobook.plan.job import job

    config = CausalLMConfig(model_name_or_path=str(tiny / "gemma3_composite"), train_file="x.jsonl", block_size=64)
    weights, groups = job(CausalLM(config)).weights()
    trained = {weight.name for group in groups for weight in group}
    assert {weight.name for weight in weights} - trained == without_gradient(load(tiny / "gemma3_composite"))
