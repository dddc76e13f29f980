"""Model FLOPs utilization: operations of a token, and the share of the peak."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

from zerobook.training.pace import Pace
from zerobook.training.utilization import ModelFlops, model_flops, peak_flops

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}


def flops(model):
    return model_flops(SimpleNamespace(unwrapped=model, shape=lambda parameter: parameter.shape))


@pytest.mark.parametrize("tied", [False, True])
def test_full_finetuning_needs_six_operations_for_each_weight_that_is_multiplied(tied):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    weights = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else 100 * 64)
    assert flops(model) == ModelFlops(6 * weights, 12 * 3 * 64)
    assert flops(model).per_token(10) == 6 * weights + 12 * 3 * 64 * 10


def test_frozen_weights_need_four():
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), LoraConfig(r=4, target_modules=["q_proj"]))
    trained = 3 * 2 * 4 * 64
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained - 100 * 64
    assert flops(model).weights == 6 * trained + 4 * frozen


def test_nothing_is_said_of_models_whose_tokens_do_not_pass_all_weights():
    experts = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2, num_key_value_heads=4))
    assert flops(experts) is None
    small = T5Config(d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=2, vocab_size=50)
    assert flops(T5ForConditionalGeneration(small)) is None


def test_the_share_of_the_peak(monkeypatch):
    plan = SimpleNamespace(precision="bf16")
    model = torch.nn.Linear(2, 2)
    strategy = SimpleNamespace(device=SimpleNamespace(type="cuda"), world_size=8, plan=plan, unwrapped=model)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops(strategy) == 8 * 312e12
    plan.precision = "no"
    assert peak_flops(strategy) == 8 * 19.5e12
    with monkeypatch.context() as patched:
        # Some images let products in fp32 use the tensor cores.
        patched.setattr("torch.backends.cuda.matmul", SimpleNamespace(fp32_precision="tf32"))
        assert peak_flops(strategy) is None
    model.bfloat16()
    assert peak_flops(strategy) == 8 * 312e12, "a base in half precision computes in it"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Abacus 9000")
    assert peak_flops(strategy) is None
    pace, now = Pace(torch.device("cpu")), [10.0]
    monkeypatch.setattr("zerobook.training.pace.time.monotonic", lambda: now[0])
    pace.flops, pace.peak, pace.devices = ModelFlops(1000.0, 10.0), 1e6, 8
    pace.start()
    pace.count(tokens=30, all_tokens=200, rows=4)
    now[0] = 11.0
    with pace.paused():  # an evaluation, say
        now[0] = 15.0
    now[0] = 16.0
    phases = {"forward": 2.0, "data": 0.5}
    monkeypatch.setattr("zerobook.training.pace.position.log_point", lambda step, device_phases, **_: phases)
    pace.measure(1)
    assert pace.seconds == phases and pace.data_wait == 0.25
    assert (pace.tokens_per_second, pace.all_tokens_per_second) == (15.0, 100.0)
    assert pace.mfu == pytest.approx((1000 + 10 * 50) * 100 / 1e6)
    assert pace.tflops == pytest.approx((1000 + 10 * 50) * 100 / 8 / 1e12)
