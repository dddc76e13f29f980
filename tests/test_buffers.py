"""Buffers that belong to a model: saved in their own dtypes, and part of every checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from recipes.causal_lm import CausalLMConfig
from zerobook.checkpoint import state, store
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import BUFFERS, Saver
from zerobook.errors import CheckpointError
from zerobook.models import export
from zerobook.models.save import save_model
from zerobook.strategy import ReplicatedStrategy
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.strategy.weights import persistent_buffers

BIAS = torch.tensor([1.0001, -2.0003, 3.0005])
TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: None, eos_token_id=2)


def bart(tiny, dtype=torch.float32, extra=True):
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny / "bart", dtype=dtype)
    if extra:
        layer = model.model.encoder.layers[0]
        layer.register_buffer("seen", torch.tensor([1001]))
        layer.register_buffer("router_bias", BIAS.clone())
        layer.register_buffer("table", torch.ones(2), persistent=False)
    return model


@pytest.fixture
def make(tiny):
    def made(model=None, **settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        plan = LaunchPlan(kind="single", world_size=1, device="cpu", backend=None, precision="no", precision_source="default")
        strategy = ReplicatedStrategy(Accelerator(cpu=True), plan)
        config = CausalLMConfig(model_name_or_path="x", dataset_name="x", **settings)
        strategy.prepare(bart(tiny) if model is None else model, config, total_steps=10)
        return strategy, config

    yield made
    AcceleratorState._reset_state(reset_partial_state=True)


def saved(strategy, folder, step=1, background=False):
    saver = Saver(strategy, str(folder), keep=None, background=background)
    saver.save(Progress(step=step), {"config": {}})
    return saver


def layer_of(strategy):
    return strategy.unwrapped.model.encoder.layers[0]


def test_a_saved_model_has_buffers_in_the_dtypes_they_were_loaded_in(tiny, make, tmp_path):
    model = bart(tiny, torch.bfloat16)
    model.model.decoder.layers[0].fc1.float()  # as transformers loads weights that a model's class keeps in fp32
    strategy, config = make(model, dtype="bfloat16", output_dir=str(tmp_path))
    found = load_file(save_model(strategy, TOKENIZER, config) / "model.safetensors")
    seen, bias = (found[f"model.encoder.layers.0.{name}"] for name in ("seen", "router_bias"))
    assert seen.tolist() == [1001] and seen.dtype == torch.int64
    assert bias.dtype == torch.float32 and torch.equal(bias, BIAS)
    assert found["final_logits_bias"].dtype == torch.bfloat16 and "model.encoder.layers.0.table" not in found
    assert found["model.decoder.layers.0.fc1.weight"].dtype == torch.float32
    assert found["model.decoder.layers.0.fc2.weight"].dtype == torch.bfloat16


def test_buffers_that_a_strategy_rounded_are_saved_as_loaded_until_they_change(tiny, make):
    strategy, _ = make()
    layer = layer_of(strategy)
    layer.router_bias.data = layer.router_bias.data.bfloat16()  # what DeepSpeed does
    name = "model.encoder.layers.0.router_bias"
    assert torch.equal(strategy.buffers()[name], BIAS)
    layer.router_bias += 1
    found = strategy.buffers()[name]
    assert found.dtype == torch.float32 and torch.equal(found, (BIAS.bfloat16() + 1).float())
    other = BIAS * 1.7
    strategy.restore_buffers(strategy.buffers() | {name: other})
    assert layer.router_bias.dtype == torch.bfloat16 and torch.equal(strategy.buffers()[name], other)


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_brings_buffers_back(make, tmp_path, background):
    strategy, _ = make()
    layer = layer_of(strategy)
    layer.seen += 1
    before = {name: buffer.clone() for name, buffer in persistent_buffers(strategy.unwrapped)}
    saver = saved(strategy, tmp_path, background=background)
    with torch.no_grad():
        for _, buffer in persistent_buffers(strategy.unwrapped):
            buffer.add_(7)  # later training, which neither a save in the background nor a rollback may see
    saver.wait()
    (result,) = saver.results()
    assert result.problem is None and store.find_damage(result.checkpoint, thorough=True) is None
    manifest = json.loads((result.checkpoint / store.MANIFEST).read_text())
    assert manifest["format_version"] == 4 and BUFFERS in manifest["files"]
    state.load(strategy, result.checkpoint)
    found = dict(persistent_buffers(strategy.unwrapped))
    assert set(found) == {"final_logits_bias", "model.encoder.layers.0.seen", "model.encoder.layers.0.router_bias"}
    assert all(torch.equal(found[name], before[name]) and found[name].dtype == before[name].dtype for name in before)


def test_a_model_with_other_buffers_is_refused(tiny, make, tmp_path):
    strategy, _ = make()
    saved(strategy, tmp_path)
    (checkpoint,) = store.list_complete(store.folder_of(tmp_path))
    other, _ = make(bart(tiny, extra=False))
    before = {name: p.detach().clone() for name, p in other.trainable()}
    with torch.no_grad():
        for _, parameter in strategy.trainable():
            parameter.add_(1)
    saved(strategy, tmp_path, step=2)
    with pytest.raises(CheckpointError, match=r"the buffer model\.encoder.*router_bias is \(3,\) in it and missing in this"):
        state.load(other, store.folder_of(tmp_path) / "step-000002")
    assert all(torch.equal(p, before[name]) for name, p in other.trainable()), "nothing was changed"
    assert checkpoint.exists()


def test_an_adapters_checkpoint_has_no_buffers_of_its_base(tiny, make, tmp_path):
    from peft import LoraConfig, get_peft_model

    strategy, _ = make(get_peft_model(bart(tiny), LoraConfig(target_modules=["q_proj"])))
    assert strategy.buffers() == {}
    saved(strategy, tmp_path)
    (checkpoint,) = store.list_complete(store.folder_of(tmp_path))
    assert load_file(checkpoint / BUFFERS) == {}
    state.load(strategy, checkpoint)
    assert layer_of(SimpleNamespace(unwrapped=strategy.unwrapped.get_base_model())).seen.tolist() == [1001]


def test_an_export_has_the_buffers_of_the_checkpoint(tiny, make, tmp_path):
    strategy, _ = make(bart(tiny, extra=False))
    with torch.no_grad():
        strategy.unwrapped.final_logits_bias.add_(1.001)
    saved(strategy, tmp_path)
    (checkpoint,) = store.list_complete(store.folder_of(tmp_path))
    facts = {"model_name_or_path": str(tiny / "bart"), "trust_remote_code": False, "model_revision": None, "dataset_name": "x",
             "tokenizer_name": None, "chat_template": None, "learning_rate": 1, "lr_scheduler_type": "linear"}  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps({"config": facts}))
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        assert export.export_checkpoint(checkpoint, folder, dtype=dtype, merge=True)["difference"] < 1e-5
        found = load_file(folder / "model.safetensors")
        assert torch.equal(found["final_logits_bias"], strategy.unwrapped.final_logits_bias)
        assert found["model.shared.weight"].dtype == dtype
