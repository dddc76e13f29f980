"""Activation checkpointing in one process: the same gradients, and fewer bytes kept."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_plan_trace import MIXTRAL
from zerobook.config import RecipeConfig
from zerobook.config_sources import parse
from zerobook.errors import ConfigError
from zerobook.models import recompute
from zerobook.plan.trace import SavedTensors
from zerobook.training.recipe_file import recipe_class

MODES = ["full", "every:2", "selective", "offload"]
MODELS = {
    "llama": {},
    "gpt2": {},
    "gpt2 with dropout": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "falcon": {"parallel_attn": True},  # adds to a product's result in place
    "bart": {},
    "mixtral": {"output_router_logits": True, "router_jitter_noise": 0.1},
}


def model_of(tiny, tmp_path, name: str, **changes) -> nn.Module:
    import transformers

    if name == "mixtral":
        (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    folder = tmp_path if name == "mixtral" else tiny / name.partition(" ")[0]
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in {"use_cache": False, **MODELS[name], **changes}.items():
        setattr(config, key, value)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    return kind.from_config(config).train()


def pass_of(model: nn.Module) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and bytes kept for the backward pass."""
    ids = torch.arange(2 * 32).reshape(2, 32) * 7 % 500
    torch.manual_seed(1)  # of dropout
    with SavedTensors(lambda: [*model.parameters(), *model.buffers(), ids]) as saved:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, saved.bytes


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_checkpointing_and_fewer_bytes_are_kept(tiny, tmp_path, name):
    loss, gradients, whole = pass_of(model_of(tiny, tmp_path, name))
    kept = {}
    for mode in MODES:
        model = model_of(tiny, tmp_path, name)
        recompute.enable(model, mode, attention_dropout=MODELS[name].get("attn_pdrop", 0.0))
        again, found, kept[mode] = pass_of(model)
        assert again == loss and found.keys() == gradients.keys()
        for weight, gradient in gradients.items():
            torch.testing.assert_close(found[weight], gradient, rtol=1e-6, atol=1e-9)
        assert not list(recompute.iterate_saved_tensors()), "what was kept has been used, or freed"
    assert kept["offload"] < kept["full"] < kept["every:2"] < whole and kept["full"] < kept["selective"] < whole


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_selective_runs_neither_products_nor_attention_again(tiny, tmp_path, dropout):
    """Attention with dropout is run again: otherwise the dropouts after it would draw other numbers."""

    def counts(mode: str) -> Counter[str]:
        model = model_of(tiny, tmp_path, "llama")
        recompute.enable(model, mode, attention_dropout=dropout)
        with Operations() as operations:
            pass_of(model)
        return operations.counts

    plain, full, selective = (counts(mode) for mode in ("none", "full", "selective"))
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert selective["aten::mm"] == plain["aten::mm"] < full["aten::mm"]
    assert selective["aten::silu"] == full["aten::silu"] > plain["aten::silu"]
    assert plain[attention] == 2 and full[attention] == 4 and selective[attention] == (4 if dropout else 2)


def test_a_result_that_is_changed_in_place_is_computed_again(tiny, tmp_path):
    class Changes(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.up, self.down = mlp.up_proj, mlp.down_proj

        def forward(self, x):
            y = self.up(x)
            y.view(-1).add_(1.0)
            return self.down(torch.sin(y))

    found = []
    for mode in ("none", "selective"):
        model = model_of(tiny, tmp_path, "llama")
        for layer in model.model.layers:
            layer.mlp = Changes(layer.mlp)
        recompute.enable(model, mode)
        found.append(pass_of(model)[1])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-9)


def test_the_second_product_of_an_adapter_is_computed_again():
    """It is cheap, and as large as the layer's own."""
    x, a, b = torch.randn(64, 128), torch.randn(128, 4, requires_grad=True), torch.randn(4, 128, requires_grad=True)
    kept = recompute._SavedResults(frozenset(["aten::mm"]))
    with recompute._SaveResults(kept):
        _ = (x @ a) @ b
    assert [tuple(t.shape) for t in recompute.iterate_saved_tensors()] == [(64, 4)]
    with recompute._ReuseResults(kept):
        _ = (x @ a) @ b
    assert not list(recompute.iterate_saved_tensors()), "each result is handed out once, and then freed"


def test_offload_moves_the_layers_inputs(tiny, tmp_path, monkeypatch):
    moved = []

    class ToHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool):
            super().__init__(lambda tensor: moved.append(tensor.shape) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(recompute, "save_on_cpu", ToHost)
    model = model_of(tiny, tmp_path, "llama")
    recompute.enable(model, "offload")
    pass_of(model)
    assert moved.count((2, 32, 64)) == 2, "the input of each of two layers, and nothing inside of them"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_frees_the_gpus_memory(tiny, tmp_path):
    peaks = {}
    for mode in ("full", "offload"):
        model = model_of(tiny, tmp_path, "llama", num_hidden_layers=24).cuda()
        recompute.enable(model, mode)
        ids = (torch.arange(8 * 512).reshape(8, 512) * 7 % 500).cuda()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        peaks[mode] = torch.cuda.memory_allocated() - before
        loss.backward()
    inputs = 24 * 8 * 512 * 64 * 4
    assert peaks["full"] - peaks["offload"] > 0.9 * inputs


@pytest.mark.parametrize(
    "given, read",
    [("none", "none"), ("full", "full"), ("selective", "selective"), ("offload", "offload"), ("every:2", "every:2"),
     (True, "full"), (False, "none"), ("true", "full"), ("no", "none"), ("every:12", "every:12")],
)  # fmt: skip
def test_values_and_older_ones(given, read):
    assert RecipeConfig(activation_checkpointing=given).activation_checkpointing == read


@pytest.mark.parametrize("given", ["every", "every:1", "every:0", "every:N", "every:-2", "some", "2", 2])
def test_other_values_are_refused(tmp_path, given):
    file = tmp_path / "r.yaml"
    file.write_text(f"activation_checkpointing: {given}\nmodel_name_or_path: m\ndataset_name: d\n")
    kind = recipe_class("recipes/causal_lm.py").config_class
    with pytest.raises(ConfigError, match=r"activation_checkpointing: got .* expected none, full, every:N"):
        parse(kind, ["--config", str(file)])


@pytest.mark.parametrize(
    "flags", [["--activation_checkpointing"], ["--gradient_checkpointing"], ["--activation_checkpointing", "true"]]
)
def test_a_bare_flag_is_full(flags):
    kind = recipe_class("recipes/causal_lm.py").config_class
    config, *_ = parse(kind, ["--model_name_or_path", "m", "--dataset_name", "d", *flags])
    assert config.activation_checkpointing == "full"


def test_what_cannot_be_done_is_said(tiny, tmp_path):
    model = model_of(tiny, tmp_path, "llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not support it"):
        recompute.enable(model, "full")
    model = model_of(tiny, tmp_path, "llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="flex_attention"):
        recompute.enable(model, "selective")
