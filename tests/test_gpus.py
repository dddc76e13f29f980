"""GPUs that a process may use and torch does not see or has no kernels for: refused with both versions, unless the CPU was
asked for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.harness import ROOT
from tests.test_resolve import WORKER, plan_for
from zerobook.cli.doctor import doctor, inspect_launch
from zerobook.cli.plan import here
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch import build as launch
from zerobook.launch.resolve import Hardware
from zerobook.utils import gpus

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: gcc 12\n"


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A machine with two GPUs and a driver."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(gpus, "find_library", lambda name: "libcuda.so.1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "")  # put back after the test, whatever it sets
        monkeypatch.delenv(name)
    return tmp_path


def test_gpus_that_torch_does_not_see_are_a_problem(node):
    for environ in ({}, WORKER):
        (problem,) = plan_for(environ, Hardware.detect())[0].problems
        assert "2 NVIDIA GPUs" in problem and "nvidia0" in problem and "nvidiactl" not in problem
        assert "for CUDA 13.0" in problem and "535.104.05" in problem and "use_cpu: true" in problem


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", " "])
def test_gpus_that_are_hidden_are_none(node, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Hardware.detect().unused is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Hardware.detect().unused


def test_what_belongs_to_the_host_alone_does_not_count(node, monkeypatch):
    """A container may see the driver of its host in /proc, and even files that it cannot open."""
    with monkeypatch.context() as patched:

        def denied(path, *rest):
            raise PermissionError

        patched.setattr(os, "open", denied)
        assert Hardware.detect().unused is None
    for name in ("nvidia0", "nvidia1"):
        (node / name).unlink()
    assert Hardware.detect().unused is None
    (node / "nvidia0").touch()
    assert Hardware.detect().unused

    monkeypatch.setattr(gpus, "find_library", lambda name: None)
    assert Hardware.detect().unused is None, "without libcuda no process can use a GPU"


def test_launch_dry_run_and_doctor_say_the_same(node, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    expected = Hardware.detect().unused
    monkeypatch.setattr(launch, "parent_flags", lambda: None)
    sources = ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default"))
    with pytest.raises(ConfigError) as caught:
        launch.resolve_this_process(RecipeConfig(output_dir=str(tmp_path)), sources)
    assert caught.value.problems == [expected]

    flags = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]
    for line in ([], flags):
        assert doctor(line) == 1
        assert "sees no GPU, but this process may use 2 NVIDIA GPUs" in " ".join(capsys.readouterr().out.split())
    plan, *_ = inspect_launch([*flags, "--cpu"], Hardware.detect())
    assert (plan.kind, plan.device) == ("single", "cpu") and not plan.problems, "accelerate starts one process with --cpu"

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    plan, *_ = launch.resolve_this_process(RecipeConfig(output_dir=str(tmp_path)), sources)
    assert plan.device == "cpu"


CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13_0 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    "capability, architectures, expected",
    [
        ((7, 5), CUDA_13_0, True),
        ((7, 0), CUDA_13_0, False),
        ((6, 1), CUDA_13_0, False),
        ((7, 0), CUDA_12_6, True),
        ((6, 1), CUDA_12_6, True),
        ((3, 7), CUDA_12_6, False),
        ((10, 0), CUDA_12_6, False),
        ((8, 9), CUDA_13_0, True),
        ((10, 3), CUDA_13_0, True),
        ((8, 0), ["sm_86"], False),  # of the same major version, and older
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_90", "compute_120"], True),
        ((13, 0), ["sm_90", "compute_90"], True),  # PTX, which is compiled for newer GPUs of any major version
        ((8, 0), ["compute_90"], False),
    ],
)
def test_kernels_run_on_gpus_of_their_major_version_and_ptx_on_every_newer_one(capability, architectures, expected):
    assert gpus.has_kernels(capability, architectures) is expected


@pytest.fixture
def old_gpu(monkeypatch):
    """A machine with an A100 and, if ``order`` says so, before or behind it a V100, under torch for CUDA 13.0."""
    import torch

    def detected(order: list[tuple[int, int]], cuda: str | None = "13.0", architectures=CUDA_13_0) -> Hardware:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(order))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100" if order[index] == (8, 0) else "Tesla V100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: order[index])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        return Hardware.detect()

    return detected


def test_a_gpu_that_torch_has_no_kernels_for_is_a_problem(old_gpu):
    hardware = old_gpu([(7, 0)])
    for environ in ({}, WORKER):
        problem = plan_for(environ, hardware)[0].problems[0]
        assert "GPU 0 (Tesla V100)" in problem and "CUDA 12.6" in problem and "use_cpu: true" in problem
        assert "7.0" in problem and "sm_75" in problem, "the GPU's capability, and what torch has"
    assert not plan_for({"ACCELERATE_USE_CPU": "true"}, hardware)[0].problems

    assert not plan_for({}, old_gpu([(7, 0)], "12.6", CUDA_12_6))[0].problems
    assert not plan_for({}, old_gpu([(9, 4)], None, ["gfx942"]))[0].problems, "an AMD GPU"


def test_a_gpu_that_no_process_takes_is_no_problem(old_gpu):
    behind = old_gpu([(8, 0), (7, 0)])
    two = WORKER | {"LOCAL_WORLD_SIZE": "2"}
    assert not plan_for({}, behind)[0].problems
    assert not plan_for(WORKER | {"WORLD_SIZE": "1"}, behind)[0].problems
    assert "GPU 1 (Tesla V100)" in plan_for(two, behind)[0].problems[0]
    assert "GPU 0 (Tesla V100)" in plan_for({}, old_gpu([(7, 0), (8, 0)]))[0].problems[0]


def test_doctor_and_a_plan_of_this_machine_name_a_gpu_without_kernels(old_gpu, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    old_gpu([(8, 0), (7, 0)])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (40 * 10**9, 40 * 10**9))
    for line in ([], ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]):
        assert doctor(line) == 1
        assert "GPU 1 (Tesla V100)" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="Tesla V100"):
        here(None)
    assert here("1").gpus == 1


@pytest.mark.parametrize(
    "asked, hidden",
    [("", True), ("not full", True), ("not gpu and not full", True), ("gpu", False), ("gpu and not launch", False)],
)
def test_gpus_are_hidden_from_tests_that_do_not_ask_for_them(monkeypatch, asked, hidden):
    from tests import conftest

    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    conftest.pytest_configure(SimpleNamespace(getoption=lambda name: asked))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if hidden else None)
    assert os.environ.get("DS_ACCELERATOR") == ("cpu" if hidden else None)
