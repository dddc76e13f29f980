"""A trace of few equal layers is the trace of all: bytes, operations, products and visits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.planning import made
from zerobook.plan.repetition import UnequalPartsError, find_repetitions, keep_few
from zerobook.plan.trace import trace_step
from zerobook.plan.traced_job import trace_job

LAYERS = 6
WIDTH = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 256, "intermediate_size": 96}
DECODER = {**WIDTH, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
BART = {
    "d_model": 64, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 4, "vocab_size": 256,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": DECODER,
    "qwen3": DECODER,
    "gpt2": {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 256, "n_positions": 64},
    "opt": {**WIDTH, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "falcon": WIDTH,
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 256},
    "mixtral": {**DECODER, **EXPERTS},
    "gemma": DECODER,
    "gemma3_text": {**DECODER, "num_hidden_layers": 12, "sliding_window": 16, "layer_types": 6 * ALTERNATING},
    "phi": {**WIDTH, "max_position_embeddings": 64},
    "blenderbot": BART,
    "bloom": {"hidden_size": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 256},
    "mistral": {**DECODER, "sliding_window": 16},
}  # fmt: skip
"""Type of a model -> values of its config. gemma3's layers alternate."""
ENCODER_DECODERS = ("t5", "blenderbot")
SETTINGS = {
    "full": {},
    "checkpointing": {"activation_checkpointing": True, "mixed_precision": "bf16"},
    "lora": {"lora_r": 4, "mixed_precision": "bf16", "activation_checkpointing": "selective"},
    "qlora": {"lora_r": 4, "load_in_4bit": True, "mixed_precision": "bf16", "activation_checkpointing": True},
}


def make(folder: Path, model: str, values: dict, setting: str = "full"):
    """Return the job of a model in a setting."""
    file = folder / f"{model}.json"
    file.write_text(json.dumps({"model_type": model, **values}))
    flags = dict(SETTINGS[setting])
    recipe = "causal_lm"
    if model in ENCODER_DECODERS:
        recipe = "seq2seq_chatbot"
        flags |= {"max_source_length": 48, "max_target_length": 24}
        if "lora_r" in flags:
            flags |= {"adapter": "lora"}
    elif "lora_r" in flags:
        recipe = "lora_finetune"
        flags |= {"max_seq_length": 48}
    else:
        flags |= {"block_size": 48}
    flags["validation_split_percentage"] = 5
    return made(recipe, file, per_device_train_batch_size=2, **flags)


CASES = []
for name in MODELS:
    for each in SETTINGS:
        # No recipe trains an encoder-decoder on a quantised base.
        if each == "qlora" and name in ENCODER_DECODERS:
            continue
        # Every model in one setting, and Llama in all.
        is_sampled = each == "checkpointing" or name == "llama"
        CASES.append(pytest.param(name, each, marks=[] if is_sampled else pytest.mark.full))


@pytest.mark.parametrize("model, setting", CASES)
def test_few_layers_give_the_trace_of_all(tmp_path, model, setting):
    precision = SETTINGS[setting].get("mixed_precision", "no")
    job = make(tmp_path, model, MODELS[model], setting)
    module = job.build_on_meta()
    stacks = [module.get_submodule(repetition.name) for repetition in find_repetitions(module)]
    layers_that_ran = set()
    for layers in stacks:
        for layer in layers:
            layer.register_forward_pre_hook(lambda layer, _: layers_that_ran.add(layer))

    short = trace_job(job, "no", precision, "cuda", module)
    ran = len(layers_that_ran)
    complete = trace_job(job, "no", precision, "cuda", module, all_layers=True)

    assert short == complete
    assert complete.evaluation_bytes is not None
    assert len(stacks) == (2 if model in ENCODER_DECODERS else 1)
    assert 0 < ran < len(layers_that_ran)


class Layer(nn.Module):
    def __init__(self, index: int, width: int = 8):
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(8, width)
        self.back = nn.Linear(width, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.back(self.linear(hidden))
        # What neither the class nor a setting shows.
        return hidden + hidden if self.layer_idx == 2 else hidden


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_layers_that_differ_in_what_they_do_are_found():
    model = Stack([Layer(index) for index in range(8)])
    repetitions = find_repetitions(model)
    batch = {"inputs": torch.ones(2, 8)}

    def loss(model: nn.Module, batch: dict) -> torch.Tensor:
        return model(**batch).sum()

    assert repetitions
    with keep_few(model, repetitions), pytest.raises(UnequalPartsError):
        trace_step(model, batch, loss, "no", repetitions=repetitions)


def test_layers_of_other_widths_are_not_left_out():
    widths = [16, 8, 8, 8, 8, 8, 16, 8, 8, 8, 8, 8]
    layers = [Layer(index, width) for index, width in enumerate(widths)]

    assert not find_repetitions(Stack(layers[:8]))
    assert [each.start for each in find_repetitions(Stack([*layers[:1], *layers[1:6]]))] == [1]


def test_layers_that_share_a_weight_are_all_traced():
    layers = [Layer(index) for index in range(8)]
    for layer in layers[1:]:
        layer.linear = layers[0].linear

    assert not find_repetitions(Stack(layers))


def test_a_loss_that_takes_an_output_of_each_layer_is_not_traced_with_few(tmp_path):
    job = make(tmp_path, "llama", MODELS["llama"])

    def loss(model: nn.Module, batch: dict) -> torch.Tensor:
        output = model(input_ids=batch["input_ids"], output_hidden_states=True)
        return torch.stack(output.hidden_states).float().sum()

    with job.build() as (model, batch), pytest.raises(ValueError, match="output_hidden_states"):
        trace_step(model, batch, loss, "no", device="cuda", repetitions=[])
