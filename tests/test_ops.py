"""DeepSpeed's ops on a machine with GPUs and no CUDA toolkit: what cannot be compiled is left out, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils import cpp_extension

from tests.harness import ROOT
from zerobook.errors import ConfigError
from zerobook.launch import ops
from zerobook.strategy.launch_plan import LaunchPlan

WITHOUT_TOOLKIT = """
import json, sys
import torch
from torch.utils import cpp_extension

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda index: (8, 0)
torch.version.cuda = "13.0"
cpp_extension.CUDA_HOME = {home!r}
load = cpp_extension.load


def quick(**options):  # C++ alone would compile, and take a minute
    return load(**options) if options["with_cuda"] else type(sys)("op")


cpp_extension.load = quick
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.ops.op_builder import builder

set_accelerator(CUDA_Accelerator())
builder.OpBuilder.has_function = lambda *args, **kwargs: True  # libaio-dev is there
from zerobook.launch import ops
"""
COMPILE = """
print(json.dumps(dict(ops.compile_ops())))
"""
FAIL = """
failed = []
for op, name in ops.OPS.items():
    made = get_accelerator().create_op_builder(name)
    try:
        made and made.load(verbose=False)
    except Exception:
        failed.append(op)
print(json.dumps(failed))
"""


def on_gpus(code, tmp_path, home):
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("DS_ACCELERATOR", None)
    script = WITHOUT_TOOLKIT.format(home=home) + code
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("home", [None, "/runtime/only"])
def test_set_up_leaves_out_what_needs_a_toolkit(tmp_path, home):
    results = on_gpus(COMPILE, tmp_path, home)
    assert set(results) == {"cpu_adam", "pin_memory", "async_io", "fused_adam"}
    for op in ("cpu_adam", "pin_memory"):
        assert results[op].startswith("ready"), results
    for op in ("async_io", "fused_adam"):
        assert results[op].startswith("skipped: it needs nvcc") and "13.0" in results[op], results
        assert (home or "CUDA_HOME is not set") in results[op]


def test_those_ops_are_the_ones_that_fail(tmp_path):
    assert sorted(on_gpus(FAIL, tmp_path, None)) == sorted(ops.NEED_NVCC)


@pytest.mark.parametrize("release, is_missing", [("12.8", True), ("13.2", False), (None, True)])
def test_a_toolkit_of_another_major_version_is_none(tmp_path, monkeypatch, release, is_missing):
    """torch is built for CUDA 13.0. A toolkit may differ from it in the minor version; one that prints none is broken."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.9\n" if release else "")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))

    missing = ops.find_missing_ops(on_gpus=True)

    assert ("fused_adam" in missing) == is_missing
    if is_missing:
        assert "13.0" in missing["fused_adam"] and (release or str(tmp_path)) in missing["fused_adam"]


def test_an_op_that_a_run_needs_is_compiled_before_it_or_named(tmp_path, monkeypatch):
    """All ops of a plan that are not compiled yet, and no others."""
    plan = LaunchPlan(kind="deepspeed", zero_stage=3, device="cpu", world_size=2, backend="gloo", precision="no",
                      precision_source="default", offload_optimizer="nvme")  # fmt: skip
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "pin_memory").mkdir()
    (tmp_path / "pin_memory" / "pin_memory.so").touch()
    wanted = []

    def compiled(absent):
        wanted.append(absent)
        return [(op, "FAILED: there is no compiler" if op == "async_io" else "ready") for op in absent]

    monkeypatch.setattr(ops, "compile_ops", compiled)
    with pytest.raises(ConfigError, match=r"op async_io, which ZeRO-3 .* needs, cannot be compiled: there is no compiler"):
        ops.compile_needed_ops(plan)
    assert sorted(wanted.pop()) == ["async_io", "cpu_adam", "shm_comm"]
    for op in ("async_io", "cpu_adam", "shm_comm"):
        (tmp_path / op).mkdir()
        (tmp_path / op / f"{op}.so").touch()
    ops.compile_needed_ops(plan)
    assert not wanted, "nothing is left to compile"


def test_machines_with_different_cpus_do_not_share_compiled_ops(tmp_path, monkeypatch):
    """Ops are compiled for the instructions of one CPU, and would end a process on another by SIGILL."""
    processor = "processor\t: 0\nmodel name\t: EPYC\ncpu MHz\t\t: {mhz}\nflags\t\t: fpu avx2 {flags}\n\n"
    folders = {}
    machines = {"login": (3000, "avx512f"), "login again": (2100, "avx512f"), "compute": (3000, "")}
    monkeypatch.setattr(ops, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(ops.sys, "prefix", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)

    for machine, (mhz, flags) in machines.items():
        (tmp_path / "cpuinfo").write_text(processor.format(mhz=mhz, flags=flags) * 2)
        folders[machine] = ops.cache_root()
    (tmp_path / "cpuinfo").unlink()
    folders["unknown"] = ops.cache_root()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))

    assert folders["login"] == folders["login again"]
    assert len(set(folders.values())) == 3
    assert {folder.parent for folder in folders.values()} == {tmp_path / "torch_extensions"}
    assert ops.cache_root() == tmp_path / "chosen"


@pytest.mark.parametrize("device, backend, is_loaded", [("cpu", None, False), ("cpu", "native", True), ("nvme", None, True)])
def test_the_op_that_pins_memory_is_needed_only_where_deepspeed_loads_it(monkeypatch, device, backend, is_loaded):
    plan = LaunchPlan(kind="deepspeed", zero_stage=3, device="cuda", world_size=2, backend="nccl", precision="bf16",
                      precision_source="default", offload_optimizer=device)  # fmt: skip
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND", raising=False)
    if backend is not None:
        monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", backend)

    assert ("pin_memory" in ops.list_needed_ops(plan)) == is_loaded
