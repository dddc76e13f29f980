"""Configs for well-known models: each is read, resolved, and planned on the hardware that its header names."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.planning import MODELS

PARAMETERS = {
    "falcon_7b": 6_921_720_704,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "smollm2_1.7b": 1_711_376_384,
}
"""Model -> its parameters, as its card on the hub counts them; tied embeddings once."""
FLAN_T5 = {"flan_t5_base": 247_577_856, "flan_t5_xl": 2_849_757_184, "flan_t5_xxl": 11_135_332_352}
"""The same with an output layer of its own, which transformers 5 builds tied to the embedding."""


def parameters(name: str) -> tuple[int, int]:
    """Return the parameters of a model, and those of its embedding."""
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json")
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    return sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_model(name):
    assert parameters(name)[0] == PARAMETERS[name]


@pytest.mark.parametrize("name", FLAN_T5)
def test_parameters_of_flan_t5(name):
    assert sum(parameters(name)) == FLAN_T5[name]
