"""The notebook and the Dockerfile, which are not run here: their commands resolve, and the files that they name are there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.harness import ROOT
from zerobook.cli.doctor import inspect_launch
from zerobook.cli.main import COMMANDS
from zerobook.launch.resolve import Hardware

NOTEBOOK = ROOT / "docs" / "notebooks" / "qlora_t4.ipynb"


def test_the_notebooks_commands_resolve_on_a_t4(tmp_path, monkeypatch):
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and all("outputs" not in cell or not cell["outputs"] for cell in notebook["cells"])
    lines = [line.strip() for cell in notebook["cells"] if cell["cell_type"] == "code" for line in cell["source"]]
    shown = [line for line in lines if line.startswith("!") and "git" not in line]
    typed = [words for line in shown for words in re.findall(r"zerobook ([a-z]+ .*)", line)]
    named = [words.split()[0] for words in typed]
    assert named == ["data", "plan", "launch", "chat", "runlog"] and set(named) <= set(COMMANDS)
    (launch,) = (shlex.split(words)[1:] for words in typed if words.startswith("launch"))
    monkeypatch.chdir(ROOT)
    launch[launch.index("outputs/t4")] = str(tmp_path / "t4")
    t4 = Hardware(gpus=1, gpu_name="Tesla T4", bf16=False)
    plan, problems, config, _ = inspect_launch(launch, t4)
    assert not problems and not plan.problems and plan.precision == "fp16"
    assert config.base_format == "nf4" and config.gradient_accumulation_steps == 4
    assert "Not run here" in "".join(notebook["cells"][0]["source"])


def test_the_dockerfile_copies_what_is_there():
    text = (ROOT / "Dockerfile").read_text()
    assert "not built here" in text
    for names in re.findall(r"^COPY (\S+) ", text, re.M):
        assert (ROOT / names).exists(), names
    packages = re.search(r"apt-get install -y --no-install-recommends (.*?) \\", text)[1].split()
    assert packages == sorted(packages) and {"g++", "libaio-dev", "python3-dev"} <= set(packages)


def pinned_torch():
    return re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)[1]


def stated_cuda():
    """The CUDA version of PyPI's torch, as requirements-gpu.txt states it."""
    text = (ROOT / "requirements-gpu.txt").read_text()
    return re.search(rf"torch {re.escape(pinned_torch())} is built for CUDA (\d+\.\d+)", text)[1]


def test_the_image_has_the_compiler_of_torchs_cuda_version():
    image = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\S*-devel-", (ROOT / "Dockerfile").read_text(), re.M)[1]
    assert image == stated_cuda()
    # The pinned version, as built for CUDA, where the environment has it.
    if torch.__version__.startswith(pinned_torch()) and torch.version.cuda:
        assert torch.version.cuda == stated_cuda()


@pytest.mark.full
def test_the_requirements_of_gpus_resolve_with_torch_of_their_cuda_version(tmp_path):
    report = tmp_path / "report.json"
    # With ===, pip takes no wheel of another build, such as 2.13.0+cpu. flash-attn is no wheel, and its set-up would look for
    # nvcc where it is not told to leave out what is compiled.
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-build-isolation",
        "--report", str(report), f"torch==={pinned_torch()}", "-r", str(ROOT / "requirements-gpu.txt"),
    ]  # fmt: skip
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]

    packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    versions = {package["name"]: package["version"] for package in packages}
    assert {"torch", "flash_attn", "nvidia-ml-py"} <= set(versions)
    assert versions["cuda-toolkit"].startswith(f"{stated_cuda()}.")
