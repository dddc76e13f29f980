"""Compiled layers, and what ``--fast`` turns on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from recipes.lora_finetune import LoraConfig
from tests.harness import launch
from tests.test_resolve import A100, CPU, HYBRID, WORKER, deepspeed, plan_for
from zerobook.launch.resolve import Hardware


def chosen(environ, hardware, **given):
    plan, config = plan_for(environ, hardware, fast=True, **given)
    assert not plan.problems
    notes = [note for note in plan.notes if note.startswith("fast")]
    assert notes, "it says what it did"
    return config, " ".join(notes)


def test_a_gpu_compiles_and_collates_in_workers():
    config, notes = chosen(WORKER, A100)
    assert config.torch_compile and config.dataloader_num_workers == 2
    assert "torch_compile True" in notes and config.mixed_precision is None


def test_a_long_run_on_a_cpu_compiles_and_a_short_one_does_not():
    config, _ = chosen(WORKER, CPU, max_train_steps=5000)
    assert config.torch_compile and config.dataloader_num_workers == 0
    config, notes = chosen(WORKER, CPU, max_train_steps=20)
    assert not config.torch_compile and "20 steps" in notes


def test_what_the_user_has_set_stays(tmp_path):
    config, notes = chosen(WORKER, A100, torch_compile=False, dataloader_num_workers=5)
    assert not config.torch_compile and config.dataloader_num_workers == 5 and "you have set it" in notes


def test_what_cannot_be_compiled_is_left_out_by_fast_and_refused_by_name(tmp_path):
    zero3 = deepspeed(tmp_path, zero_optimization={"stage": 3})
    for environ, given in (
        (zero3, {}),
        (WORKER, {"activation_checkpointing": "selective"}),
        (WORKER, {"kind": LoraConfig, "load_in_4bit": True, "model_name_or_path": "x"}),
    ):
        config, notes = chosen(environ, A100, **given)
        assert not config.torch_compile and "left out: torch_compile" in notes
        plan, _ = plan_for(environ, A100, torch_compile=True, **given)
        assert any(problem.startswith("torch_compile") for problem in plan.problems)
    plan, _ = plan_for(WORKER | HYBRID, A100, torch_compile=True)
    assert not any(problem.startswith("torch_compile") for problem in plan.problems), "FSDP2's hooks stay outside"


@pytest.mark.full
def test_layers_run_compiled_and_drop_out_as_before():
    import torch

    from tests.test_host_waits import made
    from zerobook.models.compiled import compile_layers

    model = made("GPT2", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.arange(3, 19)[None]

    def logits():
        torch.manual_seed(1)
        return model(input_ids=ids).logits

    expected = logits()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert compile_layers(model) == 2
    assert torch.allclose(logits(), expected, atol=1e-5), "the same activations are left out"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    with ThreadPoolExecutor(1) as other:  # torch's settings are each thread's own; on a GPU, backward has a thread
        assert torch.allclose(other.submit(logits).result(), expected, atol=1e-5), "in a thread too"
    assert compile_layers(torch.nn.Linear(2, 2)) == 0


@pytest.mark.full  # two compilations
def test_compiled_layers_recompute_what_they_left_out_in_the_thread_of_backward():
    import torch

    from tests.test_host_waits import made
    from zerobook.models.compiled import compile_layers

    def gradients(compiled):
        torch.manual_seed(0)
        model = made("GPT2", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            torch._dynamo.reset()
            assert compile_layers(model) == 2
        with ThreadPoolExecutor(1) as other:
            for length in (16, 17):
                torch.manual_seed(1)
                loss = model(input_ids=torch.arange(3, 3 + length)[None]).logits.square().mean()
                other.submit(loss.backward).result()
        return [parameter.grad for parameter in model.parameters()]

    for compiled, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.allclose(compiled, plain, rtol=1e-4, atol=1e-6)


def test_without_a_compiler_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    lacking = replace(A100, missing_compiler=Hardware.detect().missing_compiler)
    config, notes = chosen(WORKER, lacking)
    assert not config.torch_compile and "lacks a C++ compiler" in notes
    for key, value in (("torch_compile", True), ("attn_implementation", "flex_attention")):
        plan, _ = plan_for(WORKER, lacking, **{key: value})
        assert any(problem.startswith(f"{key}: ") for problem in plan.problems), key


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_compiled_layers_train_as_others_do(strategy, tiny, tmp_path):
    given = {
        "model_name_or_path": tiny / "llama", "train_file": tiny / "chats.jsonl", "validation_file": tiny / "few.jsonl",
        "max_seq_length": 64, "per_device_train_batch_size": 2, "max_train_steps": 6, "eval_steps": 3, "learning_rate": 5e-3,
    }  # fmt: skip
    plain = launch(strategy, 2, "lora_finetune", tmp_path / "plain", **given)
    compiled = launch(strategy, 2, "lora_finetune", tmp_path / "compiled", torch_compile=True, **given)
    assert "torch_compile: 2 layers of" in compiled.text
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert compiled.norms == pytest.approx(plain.norms, rel=1e-4)
    held_out = [[event["loss"] for event in run.events if event["type"] == "eval"] for run in (plain, compiled)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    assert compiled.state().keys() == plain.state().keys(), "checkpoints have the same names"
