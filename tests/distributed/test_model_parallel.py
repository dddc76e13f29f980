"""Tensor and expert parallelism: the same training as one process, in every combination, and checkpoints that go anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_checkpoint_matrix import moments_differ
from tests.distributed.test_parity import (
    TOLERANCE,
    assert_same_between_the_steps,
    largest_difference,
    record,
    weight_differences,
)  # fmt: skip
from tests.distributed.test_token_split import strategy_file
from tests.harness import launch

full = pytest.mark.full


@pytest.fixture(scope="module")
def qwen(tiny, tmp_path_factory):
    """A Qwen3, whose norms of queries and keys every process of a tensor-parallel group holds whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    folder = tmp_path_factory.mktemp("models") / "qwen3"
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "llama").save_pretrained(folder)
    return folder


COMBINATIONS = {
    "tensor-2x2": ("fsdp_tensor", {}, 4, 2, {}),
    "tensor-accumulating": ("fsdp_tensor", {}, 2, 2, {"accumulation": 2}),
    "tensor-recomputed": ("fsdp_tensor", {}, 2, 2, {"activation_checkpointing": True, "accumulation": 2}),
    "tensor-qwen3": ("fsdp_tensor", {}, 2, 2, {"model": "qwen3", "accumulation": 2}),
    "tensor-qwen3-2x2": ("fsdp_tensor", {}, 4, 2, {"model": "qwen3", "accumulation": 2}),
    "tensor-sgd": ("fsdp_tensor", {}, 2, 2, {"optimizer": "sgd", "learning_rate": 0.3}),
    "experts-2x2": ("fsdp_experts", {}, 4, 1, {"model": "mixtral"}),
    "experts-4": ("fsdp_experts", {"ep_size: 2": "ep_size: 4"}, 4, 1, {"model": "mixtral"}),
    "experts-recomputed": ("fsdp_experts", {}, 2, 1, {"model": "mixtral", "activation_checkpointing": True, "accumulation": 2}),
}
"""Case -> (strategy file, changes of it, processes, those that read the same rows, flags)."""


@pytest.mark.launch
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case == "tensor-2x2" else full) for case in COMBINATIONS])
def test_every_combination_trains_as_one_process(launches, tmp_path_factory, qwen, case):
    base, changed, processes, same, flags = COMBINATIONS[case]
    accumulation = flags.get("accumulation", 1)
    file = strategy_file(tmp_path_factory.mktemp("files"), base, **changed)
    flags = {key: value for key, value in flags.items() if key != "accumulation"}
    if flags.get("model") == "qwen3":
        flags["model"] = qwen
    alone = {key: value for key, value in flags.items() if key != "activation_checkpointing"}
    one = launches("single", 1, 4, 1, between=True, **alone)
    run = launches(file, processes, 4 * same // (processes * accumulation), accumulation, between=True, **flags)
    assert [s["ids"] for s in run.steps] == [s["ids"] for s in one.steps]
    assert largest_difference(run.losses, one.losses) < TOLERANCE and largest_difference(run.norms, one.norms) < TOLERANCE
    weight, far = weight_differences(run.state(), one.state())
    assert far < 1e-3 and weight < 1e-2 * max(s["learning_rate"] for s in one.steps)
    assert run.event("run_start")["live"]["strategy"] == run.event("run_start")["plan"]["name"]
    assert_same_between_the_steps(run, one)


RESUMED = [
    ("fsdp_tensor", 4, "zero3", 2, "llama"),
    ("fsdp_tensor", 2, "ddp", 2, "llama"),
    ("fsdp_tensor", 4, "single", 1, "llama"),
    ("ddp", 2, "fsdp_tensor", 4, "llama"),
    ("zero3", 2, "fsdp_tensor", 2, "llama"),
    ("fsdp_experts", 4, "fsdp", 2, "mixtral"),
    ("fsdp_experts", 2, "zero3", 2, "mixtral"),
    ("zero2", 2, "fsdp_experts", 4, "mixtral"),
    ("single", 1, "fsdp_experts", 2, "mixtral"),
]
"""(writer, its processes, reader, its processes, model)."""
SAMPLE = [RESUMED[0], RESUMED[7]]


@pytest.mark.launch
@pytest.mark.parametrize(
    "writer, processes, reader, later, model", [pytest.param(*case, marks=[] if case in SAMPLE else full) for case in RESUMED]
)
def test_checkpoints_go_to_and_from_parts(tiny, tmp_path, writer, processes, reader, later, model):
    groups = processes // (2 if writer == "fsdp_tensor" else 1)
    flags = dict(
        model_name_or_path=tiny / model, train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        per_device_train_batch_size=4 // groups, max_train_steps=8, save_steps=4, learning_rate=3e-3, adam_epsilon=1e-6,
        logging_steps=4,
    )  # fmt: skip
    whole = launch(writer, processes, "causal_lm", tmp_path / "whole", **flags)
    run = launch(
        reader, later, "causal_lm", tmp_path / "run",
        resume_from_checkpoint=whole.output / "checkpoints" / "step-000004", **flags,
    )  # fmt: skip
    assert run.event("resume")["differing"] == {}
    assert [s["ids"] for s in run.steps] == [s["ids"] for s in whole.steps[4:]]
    assert largest_difference(run.losses, whole.losses[4:]) < TOLERANCE
    assert largest_difference(run.norms, whole.norms[4:]) < TOLERANCE
    ours, theirs = run.state(), whole.state()
    for name in theirs:
        assert (ours[name] - theirs[name]).abs().max() <= 1e-4 * theirs[name].abs().max(), name
    record("resume", recipe="moe" if model == "mixtral" else "causal_lm", writer=f"{writer} on {processes}",
           reader=f"{reader} on {later}", loss=largest_difference(run.losses, whole.losses[4:]),
           norm=largest_difference(run.norms, whole.norms[4:]), moments=moments_differ(ours, theirs))  # fmt: skip
    results = [load_file(next((output / "model").glob("*.safetensors"))) for output in (run.output, whole.output)]
    assert results[0].keys() == results[1].keys()
    for name, tensor in results[1].items():
        assert (results[0][name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.launch
@full
@pytest.mark.parametrize("strategy, model", [("fsdp_tensor", "llama"), ("fsdp_experts", "mixtral")])
def test_half_precision_keeps_fp32_masters_and_saves_the_loaded_dtype(tiny, tmp_path, strategy, model):
    """A bf16 file, computed in bf16: the losses of FSDP2 within its rounding, and a result in bf16 from masters in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(tiny / model, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny / model).save_pretrained(tmp_path / "half")
    flags = dict(
        model_name_or_path=tmp_path / "half", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=6, learning_rate=3e-3, mixed_precision="bf16", save_steps=6, dtype="auto",
    )  # fmt: skip
    run = launch(strategy, 2, "causal_lm", tmp_path / "run",
                 per_device_train_batch_size=4 if strategy == "fsdp_tensor" else 2, **flags)  # fmt: skip
    plain = launch("fsdp", 2, "causal_lm", tmp_path / "plain", per_device_train_batch_size=2, **flags)
    assert largest_difference(run.losses, plain.losses) < 2e-2
    assert run.event("run_start")["live"]["master_dtype"] == "float32"
    assert {t.dtype for name, t in run.state().items() if name.startswith("weight/")} == {torch.float32}
    weights = load_file(next((run.output / "model").glob("*.safetensors")))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "distributed_config" not in json.loads((run.output / "model" / "config.json").read_text())


@pytest.mark.launch
@full
def test_zero3_still_fails_with_noise_of_a_router(tiny, tmp_path):
    """If this fails, `zerobook.launch.model_facts.find_zero3_problems` can go."""
    folder = tmp_path / "model"
    shutil.copytree(tiny / "mixtral", folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"router_jitter_noise": 0.1}))
    run = launch(
        "zero3", 2, "causal_lm", tmp_path / "run", through=Path(__file__).with_name("unrefused.py"), expect=None,
        model_name_or_path=folder, train_file=tiny / "epoch24.jsonl", block_size=64, max_train_steps=2,
        per_device_train_batch_size=2, validation_split_percentage=0,
    )  # fmt: skip
    assert run.returncode and "is a view and is being modified inplace" in run.text and not run.steps
