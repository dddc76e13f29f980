"""Memory that the allocator keeps, copies of a model that a host cannot hold, and weights that are sharded one at a time."""

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zerobook.cli.doctor import inspect_launch
from zerobook.launch.resolve import Hardware
from zerobook.strategy.fsdp_loading import shard_weights
from zerobook.utils.host_memory import too_many_copies, weight_bytes

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_go_back_while_a_model_is_loaded():
    """In a process of its own, whose heap has no room left by other tests."""
    program = (
        "from tests.kept_memory import kept\nfrom zerobook.utils.host_memory import freed_blocks_returned\n"
        "with freed_blocks_returned():\n    print(kept())\nprint(kept())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    returned, usual = map(int, done.stdout.split()[-2:])
    assert returned < 20 * 2**20
    assert usual > 100 * 2**20, "glibc keeps them otherwise, so the first assertion says something"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("variable, value", [
    ("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")
])  # fmt: skip
def test_a_threshold_that_the_user_set_is_kept(variable, value):
    program = (
        "from tests.kept_memory import kept\nfrom zerobook.utils.host_memory import freed_blocks_returned\n"
        "with freed_blocks_returned():\n    pass\nprint(kept())"
    )
    environment = os.environ | {variable: value}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 20 * 2**20


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_each_weight_is_freed_before_the_next_is_sharded(alone):
    """Tied weights stay one tensor, and dtypes and values are those of the weights."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict((name, nn.Linear(3, 5, bias=False)) for name in "abc"))
    model.c.weight = model.a.weight
    fully_shard(model, mesh=alone)
    full = {name: torch.randn(5, 3) for name in ("a.weight", "b.weight")}
    full["c.weight"] = full["a.weight"]
    expected, seen = {name: weight.clone() for name, weight in full.items()}, []
    first = ref(full["b.weight"])

    class Watched(dict):
        def pop(self, name, *default):
            seen.append((name, first() is not None))
            return super().pop(name, *default)

    left = Watched(full)
    full.clear()
    shard_weights(SimpleNamespace(is_main_process=True), model, left)
    assert seen == [("a.weight", True), ("b.weight", True), ("c.weight", False)] and not left
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.to_local(), expected[name])
    assert model.a.weight.to_local().data_ptr() == model.c.weight.to_local().data_ptr()


def test_a_frozen_module_with_hidden_buffers_is_loaded(alone):
    """BatchNorm in a vision tower has a counter, which is hidden while accelerate shards the weights."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[1]._non_persistent_buffers_set.update(("running_mean", "running_var", "num_batches_tracked"))
    fully_shard(model, mesh=alone)
    full = {name: torch.randn(weight.shape) for name, weight in model.state_dict().items()}
    expected = dict(full)
    shard_weights(SimpleNamespace(is_main_process=True), model, full)
    assert all(torch.equal(weight.to_local(), expected[name]) for name, weight in model.state_dict().items())


def files(folder: Path, dtype: torch.dtype) -> Path:
    for part in (1, 2):
        save_file({f"w{part}": torch.zeros(10, 10, dtype=dtype), f"n{part}": torch.zeros(3, dtype=torch.int64)},
                  folder / f"model-0000{part}-of-00002.safetensors")  # fmt: skip
    return folder


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 4), ("bfloat16", 2), ("auto", 2)])
def test_weights_are_counted_in_the_dtype_they_are_loaded_in(tmp_path, dtype, expected):
    assert weight_bytes(files(tmp_path, torch.bfloat16), dtype) == 2 * (100 * expected + 3 * 8)


def test_a_host_that_cannot_hold_the_copies_is_named(tmp_path, monkeypatch):
    folder = files(tmp_path, torch.bfloat16)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3000))
    assert too_many_copies(folder, "float32", 3) is None
    assert "4 ranks" in too_many_copies(folder, "float32", 4)
    assert too_many_copies(None, "float32", 4) is None, "a model that is not here yet"


@pytest.mark.parametrize(("strategy", "copies"), [("ddp", 2), ("zero2", 2), ("zero3", 0), ("fsdp", 1)])
def test_doctor_warns_of_copies_alone(strategy, copies, tiny, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=2000))
    line = ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), "--num_processes", "2",
            str(ROOT / "recipes" / "causal_lm.py"), "--model_name_or_path", str(tiny / "llama"),
            "--train_file", str(tiny / "text.txt"), "--output_dir", str(tiny / "none")]  # fmt: skip
    plan, problems, _, _ = inspect_launch(line, Hardware())
    assert not problems
    (said,) = [note for note in plan.notes if note.startswith("host RAM: ")] or [None]
    assert said is None if copies == 0 else said.startswith(f"host RAM: {copies} rank")
