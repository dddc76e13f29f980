"""GPUs that a process may use and torch does not see: refused with both versions, unless the CPU was asked for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.harness import ROOT
from tests.test_resolve import WORKER, plan_for
from zerobook.cli.doctor import doctor, inspect_launch
from zerobook.config import ConfigSources, RecipeConfig
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
