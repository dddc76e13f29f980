"""bf16 stays near fp32, with fp32 masters; a JSON that fixes fp16 yields to the flag; QLoRA trains and resumes."""

from __future__ import annotations

import json

import pytest
import torch

from tests.distributed.test_parity import largest_difference
from tests.harness import REFUSED, ROOT, launch, sampled

BF16_TOLERANCE = 0.03
"""Relative, on every step's loss: bf16 keeps 8 bits, 0.4 % a rounding, and ten steps of Adam drift apart."""


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero2", pytest.param("zero3", marks=pytest.mark.full), pytest.param("fsdp", marks=pytest.mark.full)]
)
def test_bf16_is_near_fp32(launches, strategy):
    one = launches("single", 1, 4, 1)
    run = launches(strategy, 2, 2, 1, mixed_precision="bf16")
    start = run.event("run_start")
    assert start["plan"]["precision"] == "bf16"
    assert start["live"]["master_dtype"] == "float32"
    difference = largest_difference(run.losses, one.losses)
    assert 1e-6 < difference < BF16_TOLERANCE, "equal to fp32 would mean that bf16 was not used"
    assert run.losses[-1] < 0.75 * run.losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: fp16 loss scaling needs a GPU")
def test_fp16_scales_the_loss(launches):
    run = launches("ddp", 1, 4, 1, mixed_precision="fp16")
    assert run.event("run_end")["progress"]["scaler"]["scale"] > 1
    assert run.losses[-1] < run.losses[0]


PUBLISHED = ["zero2_config_accelerate", "zero3_offload_config_accelerate"]


@pytest.mark.launch
@pytest.mark.parametrize("name", sampled(PUBLISHED, "zero2_config_accelerate"))
def test_published_file_trains_on_a_cpu_with_only_the_precision_flag(tiny, tmp_path, name):
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", block_size=64, max_train_steps=6,
        per_device_train_batch_size=2, num_warmup_steps=2, learning_rate=3e-3, logging_steps=2,
    )  # fmt: skip
    file = f"ds_configs/published/{name}.json"
    launcher = ["--use_deepspeed", "--deepspeed_config_file", str(ROOT / file)]
    refused = launch(launcher, 2, "causal_lm", tmp_path / "refused", expect=REFUSED, **flags)
    assert f"{name}.json: fp16.enabled" in refused.text and "--mixed_precision no" in refused.text
    assert "ConfigError" in refused.text and not (tmp_path / "refused" / "runlog").exists()

    run = launch([*launcher, "--mixed_precision", "no"], 2, "causal_lm", tmp_path / "run", **flags)
    stage = 2 if "zero2" in name else 3
    assert run.event("run_start")["live"]["zero_stage"] == stage
    assert "fp16.enabled says fp16; no is used" in " ".join(run.text.split())
    # The file's WarmupDecayLR sets the rate, one step late, since DeepSpeed moves it behind each step and it starts before
    # its own first: log(step) up to the peak in 2 steps, then 6 - 2 equal ones down to 0.
    assert [s["learning_rate"] for s in run.steps] == pytest.approx([0, 0, 3e-3, 3e-3, 2.25e-3, 1.5e-3])
    assert run.losses[-1] < run.losses[1]


@pytest.mark.launch
def test_the_adam_of_a_json_is_the_recipes_own(launches, tmp_path):
    """Without an op that would have to be compiled."""
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    file = tmp_path / "adam.json"
    file.write_text(json.dumps(config | {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}))
    run, own = launches(["--use_deepspeed", "--deepspeed_config_file", str(file)], 2, 2, 1), launches("zero2", 2, 2, 1)
    assert run.event("run_start")["live"]["optimizer_class"] == "AdamW"
    assert largest_difference(run.losses, own.losses) < 1e-6


def test_every_layer_of_the_base_is_nf4_with_double_quantisation(tiny):
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    from zerobook.models.quantise import nf4

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=nf4("no"))
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 2 * 7
    for layer in layers:
        state = layer.weight.quant_state
        assert state.quant_type == "nf4" and state.nested
        assert layer.weight.dtype == layer.compute_dtype == torch.float32, "stored as it is computed, for FSDP"


def test_an_evaluation_leaves_4_bit_weights_as_they_are(tiny, monkeypatch):
    """bitsandbytes believes here that the CPU has AVX512-BF16, where it would repack them."""
    import bitsandbytes.nn.modules
    from transformers import AutoModelForCausalLM

    from zerobook.models.quantise import keep_4bit_layout, nf4

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=nf4("no"))
    keep_4bit_layout(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        training = model.train()(torch.arange(40).view(2, 20)).logits
        evaluation = model.eval()(torch.arange(40).view(2, 20)).logits
    assert torch.equal(training, evaluation)
    for name, weight in model.named_parameters():  # as bytes: packed weights that are read as floats may be NaN
        assert torch.equal(weight.detach().view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["zero2", "fsdp", "ddp", "zero3"], "fsdp"))
def test_qlora_trains_saves_and_resumes(launches, tiny, strategy):
    whole = launches(strategy, 2, 2, 1, "lora_finetune", load_in_4bit=True, save_steps=6)
    assert whole.losses[-1] < 0.75 * whole.losses[0]
    held = [rank["parameters"] for rank in whole.event("memory")["per_rank_bytes"]]
    if strategy in ("fsdp", "zero3"):  # the packed 4-bit base is sharded with the rest
        replicated = launches("ddp", 2, 2, 1, "lora_finetune", load_in_4bit=True, save_steps=6)
        assert max(held) < 0.6 * replicated.event("memory")["per_rank_bytes"][0]["parameters"]
    else:  # embedding and adapters stay in fp32
        unquantised = launches("single", 1, 4, 1, "lora_finetune")
        assert max(held) < 0.7 * unquantised.event("memory")["per_rank_bytes"][0]["parameters"]
        assert abs(whole.losses[0] - unquantised.losses[0]) > 1e-3, "4 bits round"
    adapter = whole.output / "adapter"
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    assert tensors and all(t.numel() for t in tensors.values())
    assert any(t.abs().sum() > 0 for name, t in tensors.items() if "lora_B" in name), "lora_B starts at zero"

    again = launches(
        strategy, 2, 2, 1, "lora_finetune", load_in_4bit=True,
        resume_from_checkpoint=whole.output / "checkpoints" / "step-000006",
    )  # fmt: skip
    assert [s["step"] for s in again.steps] == [7, 8, 9, 10]
    assert largest_difference(again.losses, whole.losses[6:]) < 1e-5


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_qlora_in_bf16_trains_as_one_process_and_holds_less(launches, strategy):
    """Weights that are not quantised are then loaded in bf16, unless a person chooses another dtype."""
    asked = dict(load_in_4bit=True, mixed_precision="bf16", eval_on_start=True, eval_steps=2)
    one = launches("single", 1, 4, 1, "lora_finetune", **asked)
    run = launches(strategy, 2, 2, 1, "lora_finetune", **asked)
    assert largest_difference(run.losses, one.losses) < 3e-2
    fp32 = launches("single", 1, 4, 1, "lora_finetune", **asked, dtype="float32")
    held, before = (r.event("memory")["per_rank_bytes"][0]["parameters"] for r in (one, fp32))
    assert held < 0.9 * before and largest_difference(one.losses, fp32.losses) < 3e-2
