"""Communication of ranks: how long they wait for each other, how often they reduce, and in which precision."""

from __future__ import annotations

import json

import pytest

from tests.distributed.test_parity import TOLERANCE, largest_difference
from tests.harness import ROOT, calls, kinds, launch, threads, timeouts
from zerobook.launch.build import COLLECTIVE_TIMEOUT


@pytest.fixture
def watched(launches):
    def run(strategy, processes, **flags):
        return launches(strategy, processes, 1, 2, max_train_steps=3, num_warmup_steps=0, spy={}, **flags)

    return run


@pytest.mark.launch
@pytest.mark.parametrize("strategy, processes, groups", [
    ("zero2", 2, 2), ("fsdp_hybrid", 4, 3), pytest.param("zero3_hpz", 4, 3, marks=pytest.mark.full),
])  # fmt: skip
def test_every_group_waits_as_long_as_the_default_one(watched, strategy, processes, groups):
    run = watched(strategy, processes)
    for rank in range(processes):
        found = timeouts(run.output, rank)
        assert len(found) >= groups, "the strategy makes groups of its own"
        assert set(found) == {COLLECTIVE_TIMEOUT.total_seconds()}


@pytest.mark.launch
def test_replicas_all_reduce_once_a_step(watched, launches):
    run = watched("fsdp_hybrid", 4)
    counted = calls(run.output)
    assert counted["reduce_scatter_tensor float32"] == 2 * counted["all_reduce float32"] > 0, "two micro-batches a step"
    one = launches("single", 1, 4, 2, max_train_steps=3, num_warmup_steps=0)
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert largest_difference(run.norms, one.norms) < TOLERANCE


@pytest.mark.launch
def test_a_rank_of_zero2_can_receive_the_sum_of_its_own_part_alone(watched, tmp_path):
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
    (tmp_path / "reduce.json").write_text(json.dumps(config))
    both = watched("zero2", 2), watched(["--use_deepspeed", "--deepspeed_config_file", str(tmp_path / "reduce.json")], 2)
    by_all, by_owner = (calls(run.output).get("all_reduce float32", 0) for run in both)
    assert by_all > by_owner == 0
    assert both[0].losses == both[1].losses and largest_difference(both[1].norms, both[0].norms) < TOLERANCE


@pytest.mark.launch
def test_gradients_are_reduced_in_fp32_under_bf16(watched):
    counted = calls(watched("fsdp", 2, mixed_precision="bf16").output)
    assert counted.get("reduce_scatter_tensor float32", 0) > 0
    assert "reduce_scatter_tensor bfloat16" not in counted


STORAGES = """
import json
from pathlib import Path

from zerobook.training.hooks import Hook


class Storages(Hook):
    def on_gradients_ready(self, trainer):
        tensors = trainer.strategy.live_tensors()["gradients"]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        Path(trainer.config.output_dir, "storages.json").write_text(json.dumps([len(tensors), len(addresses)]))
"""


BUFFERS = """
import json, os
from pathlib import Path
from zerobook.training.hooks import Hook

class Buffers(Hook):
    def on_end(self, trainer):
        names = [file.name for file in Path("/dev/shm").glob(f"*_{os.environ['MASTER_PORT']}_*")]
        maps = Path("/proc/self/maps").read_text()
        mapped = sum("deepspeed_allreduce_buffer" in line for line in maps.splitlines())
        Path(trainer.config.output_dir, f"buffers-{os.environ['RANK']}.json").write_text(json.dumps([names, mapped]))
"""


@pytest.mark.launch
def test_deepspeeds_shared_memory_ends_with_its_processes(tiny, tmp_path):
    (tmp_path / "buffers.py").write_text(BUFFERS)
    run = launch(
        "zero2", 2, "causal_lm", tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "text.txt",
        block_size=64, max_train_steps=2, hooks=f"{tmp_path / 'buffers.py'}:Buffers",
    )  # fmt: skip
    for rank in range(2):
        names, mapped = json.loads((run.output / f"buffers-{rank}.json").read_text())
        assert mapped == 2, "the buffers of both ranks are in use"
        assert names == []


@pytest.mark.launch
def test_ddp_keeps_no_gradient_beside_its_buckets(tiny, tmp_path):
    (tmp_path / "storages.py").write_text(STORAGES)
    run = launch(
        "ddp", 2, "causal_lm", tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "text.txt",
        block_size=64, max_train_steps=3, gradient_accumulation_steps=2, hooks=f"{tmp_path / 'storages.py'}:Storages",
    )  # fmt: skip
    gradients, storages = json.loads((run.output / "storages.json").read_text())
    assert storages < gradients / 2


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, given, expected",
    [
        pytest.param("zero2_offload", None, 3, marks=pytest.mark.full),
        pytest.param("zero2_offload", 1, 1, marks=pytest.mark.full),
        pytest.param("fsdp_offload", None, 3, marks=pytest.mark.full),
        pytest.param("zero2", None, 1, marks=pytest.mark.full),
    ],
)
def test_an_optimizer_in_host_memory_shares_the_cores(launches, strategy, given, expected):
    flags = dict(max_train_steps=2, num_warmup_steps=0, environment={"OMP_NUM_THREADS": given}, spy={"cores": 6})
    run = launches(strategy, 2, 2, 1, **flags)
    assert [threads(run.output, rank) for rank in range(2)] == [expected, expected]


NCCL = {"int8", "uint8", "bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
"""dtypes that NCCL sends, torch 2.13: torch/include/torch/csrc/distributed/c10d/NCCLUtils.hpp, without the 8-bit floats."""
full = pytest.mark.full


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, processes, flags",
    [
        ("fsdp_hybrid", 4, {}),
        ("fsdp", 2, {"mixed_precision": "bf16"}),
        ("zero2", 2, {}),
        *(pytest.param(*case, marks=full) for case in (
            ("zero3_hpz", 4, {}),
            ("ddp", 2, {}), ("zero1", 2, {"mixed_precision": "bf16"}), ("zero3", 2, {"mixed_precision": "bf16"}),
            ("zero3_offload", 2, {}), ("fsdp_offload", 2, {}))),
        pytest.param("zero3", 1, {"mixed_precision": "bf16"}, marks=pytest.mark.gpu),
        pytest.param("fsdp", 1, {"mixed_precision": "bf16"}, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_collectives_take_tensors_on_the_strategys_device_of_types_that_nccl_sends(watched, strategy, processes, flags):
    run = watched(strategy, processes, **flags)
    device = run.event("run_start")["plan"]["device"]
    for rank in range(processes):
        found = kinds(run.output, rank)
        assert found, "the strategy talks"
        assert {where for _, where, _ in found} == {device}, sorted(found)
        assert {dtype for _, _, dtype in found} <= NCCL, sorted(found)
