"""Buffers that change in training go on under any strategy, as the weights do."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.buffers import BIAS
from tests.harness import ROOT, launch, sampled

WRAPPER = ROOT / "tests" / "distributed" / "buffers.py"
CASES = [("zero2", "single", 1), ("zero3", "fsdp", 2), ("fsdp", "zero3", 2), ("ddp", "zero2", 2)]
SAMPLE = [("fsdp", "zero3", 2), ("ddp", "zero2", 2)]


def flags(tiny):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=6, per_device_train_batch_size=2, learning_rate=3e-3, save_steps=3, logging_steps=3,
    )  # fmt: skip


def buffers(output):
    found = load_file(output / "model" / "model.safetensors")
    return {name.rpartition(".")[2]: value for name, value in found.items() if name.startswith("model.layers.0.")}


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    return cache(
        lambda name: launch(name, 2, "causal_lm", tmp_path_factory.mktemp(name) / "run", through=WRAPPER, **flags(tiny))
    )


@pytest.mark.launch
@pytest.mark.parametrize("writer, reader, processes", sampled(CASES, *SAMPLE))
def test_buffers_go_on_under_another_strategy(tiny, tmp_path, written, writer, reader, processes):
    whole = buffers(written(writer).output)
    assert whole["seen"].tolist() == [1007] and whole["seen"].dtype == torch.int64
    assert torch.equal(whole["router_bias"], torch.tensor(BIAS)) and whole["router_bias"].dtype == torch.float32
    saved = written(writer).output / "checkpoints" / "step-000003"
    middle = {n.rpartition(".")[2]: b for n, b in load_file(saved / "buffers.safetensors").items()}
    assert middle["seen"].tolist() == [1004]
    settings = flags(tiny) | {"per_device_train_batch_size": 4 // processes}
    again = launch(reader, processes, "causal_lm", tmp_path / "run", through=WRAPPER, resume_from_checkpoint=saved, **settings)
    found = buffers(again.output)
    assert found["seen"].tolist() == [1007] and torch.equal(found["average"], whole["average"])
    assert torch.equal(found["router_bias"], torch.tensor(BIAS))


@pytest.mark.launch
@pytest.mark.full
def test_deepspeeds_half_precision_does_not_round_saved_buffers(tiny, tmp_path):
    run = launch("zero2", 2, "causal_lm", tmp_path / "run", through=WRAPPER, mixed_precision="bf16", **flags(tiny))
    found = buffers(run.output)
    assert found["seen"].tolist() == [1007] and torch.equal(found["router_bias"], torch.tensor(BIAS))
