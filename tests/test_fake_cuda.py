"""A training step on GPUs that are not there: every tensor of it is on the GPU, and has the dtype that it should."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT

FEW = ["single:causal_lm:bf16", "ddp:causal_lm:bf16", "fsdp:causal_lm:bf16", "fsdp_hybrid:causal_lm:bf16"]
MANY = [
    *(f"{strategy}:{recipe}:bf16" for strategy in ("single", "ddp") for recipe in ("lora_finetune", "seq2seq_chatbot")),
    *(f"{strategy}:causal_lm:no" for strategy in ("single", "ddp", "fsdp")),
    *(f"{strategy}:{recipe}:bf16" for strategy in ("fsdp", "fsdp_hybrid") for recipe in ("lora_finetune", "seq2seq_chatbot")),
    "single:causal_lm:fp16",
    "ddp:causal_lm:fp16",
]
"""Not DeepSpeed, which reads what tensors hold and calls its own C++; not offload, since fake tensors are not pinned; nor rows
that processes share, for which torch reads the numbers of chunks."""
COMPUTED = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "no": "torch.float32"}
GATHERED = "_allgather_base_"
SCATTERED = "_reduce_scatter_base_"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    folder = Path(torch.__file__).parent
    line = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{folder}/include", str(ROOT / "tests" / "fake_cuda.cpp"),
            f"-L{folder}/lib", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{folder}/lib", "-o", str(target)]  # fmt: skip
    subprocess.run(line, check=True, timeout=300)
    return target


def steps(library: Path, cases: list[str]) -> dict[str, dict[str, list[str]]]:
    result = library.with_name("result.json")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, str(ROOT / "tests" / "fake_cuda.py"), str(library), str(result), *cases]
    process = subprocess.run(line, env=environ, text=True, capture_output=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    of_cases = json.loads(result.read_text())
    assert list(of_cases) == cases
    return of_cases


def check(case: str, step: dict[str, list[str]]) -> None:
    assert "error" not in step, f"{case}: {step['error']}"
    strategy, _, precision = case.split(":")
    assert step["elsewhere"] == [], case
    computed = COMPUTED[precision]
    assert step["products"] == [computed], case
    sent = {
        "single": [],
        "ddp": ["allreduce_ torch.float32"],
        "fsdp": [f"{GATHERED} {computed}", f"{SCATTERED} torch.float32"],
        # The replicas must have equal norms, so the squares of shards are gathered, and each rank adds them in the same order.
        "fsdp_hybrid": [
            f"{GATHERED} {computed}",
            f"{SCATTERED} torch.float32",
            "allgather_ torch.float64",
            "allreduce_ torch.float32",
        ],
    }
    assert step["collectives"] == sent[strategy], case


def test_a_step_computes_and_sends_on_the_gpu(library):
    for case, step in steps(library, FEW).items():
        check(case, step)


def test_offloaded_weights_are_loaded_into_host_memory(library):
    """The result is on the GPU. torch refuses the forward pass where a weight, or its shard, is not in host memory."""
    found = steps(library, ["load_offloaded"])["load_offloaded"]
    assert found == {"weights": ["cpu"], "shards": ["cpu"], "result": ["cuda:0"]}


@pytest.mark.full
def test_every_recipe_computes_and_sends_on_the_gpu(library):
    for case, step in steps(library, MANY).items():
        check(case, step)
