"""Machines: what is described, what is found, and what host memory and links allow."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config

from tests.planning import FILES, ROOT, made, shortened, traced_once
from zerobook.cli.main import main
from zerobook.cli.plan import here
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch.resolve import Hardware
from zerobook.plan.hardware import LINKS, NETWORK, cluster
from zerobook.plan.memory import CACHED_SHARE, CONTEXT_BYTES, RANGE, peak_memory
from zerobook.plan.roofline import MEMORY_SHARE, step_seconds
from zerobook.plan.rows import plan_row
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights, Weight, count_states
from zerobook.plan.trace import TimelinePoint, Trace
from zerobook.plan.traced_job import TracedJob
from zerobook.plan.traffic import Transfer, list_token_transfers, list_transfers
from zerobook.plan.work import Work
from zerobook.utils.devices import DEVICES, find_device
from zerobook.utils.model_config import nvme_buffer_elements


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"gpus": "0"}, ["--gpus", "'0'", "1 or more"]),
        ({"gpus": "many"}, ["--gpus", "'many'"]),
        ({"gpus": "²"}, ["--gpus", "'²'"]),
        ({"gpus": "1.5"}, ["--gpus", "'1.5'"]),
        ({"nodes": "-1"}, ["--nodes", "'-1'", "1 or more"]),
        ({"nodes": "0"}, ["--nodes", "'0'"]),
        ({"gpu_memory": "0GB"}, ["--gpu_memory", "'0GB'", "is zero"]),
        ({"gpu_memory": "-80GB"}, ["--gpu_memory", "'-80GB'", "80GB"]),
        ({"host_memory": "0B"}, ["--host_memory", "'0B'", "is zero"]),
        ({"disk": "4"}, ["--disk", "'4'", "GB", "GiB"]),
        ({"gpu": "a1000"}, ["--gpu", "a1000", "a100-80gb"]),
        ({"gpu_memory": "80"}, ["--gpu_memory", "'80'", "80GB", "GiB for 2^30"]),
        ({"gpu": "t4", "gpu_memory": "80GB"}, ["--gpu_memory", "80 GB", "16"]),
        ({"nodes": "2"}, ["--interconnect", "400Gbps"]),
        ({"nodes": "2", "interconnect": "fast"}, ["--interconnect", "'fast'"]),
        ({"nodes": "2", "interconnect": "400"}, ["--interconnect", "'400'", "400Gbps", "300GB/s"]),
        ({"nodes": "2", "interconnect": "0Gbps"}, ["--interconnect", "'0Gbps'"]),
        ({"nodes": "2", "interconnect": "400GB"}, ["--interconnect", "'400GB'", "a second"]),
        ({"intra_node": "600"}, ["--intra_node", "'600'", "300GB/s"]),
        ({"gpu": "l4", "intra_node": "nvlink"}, ["--intra_node", "no NVLink", "pcie"]),
        ({"gpus": "0", "host_memory": "lots"}, ["--gpus", "--host_memory"]),
    ],
)
def test_impossible_machines_are_refused(flags, said):
    with pytest.raises(ConfigError) as caught:
        cluster(**flags)
    assert all(word in str(caught.value) for word in said), str(caught.value)


@pytest.mark.parametrize(
    "name, key",
    [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A10", "a10"), ("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA RTX A6000", "a6000"), ("Tesla V100-SXM2-32GB", "v100-32gb"),
     ("Radeon", None)],
)  # fmt: skip
def test_a_drivers_name_is_known(name, key):
    assert find_device(name) == (DEVICES[key] if key else None)


def test_machines():
    two = cluster(gpus="8", nodes="2", gpu_memory="80GB", interconnect="400Gbps", intra_node="pcie")
    assert two.ranks == 16 and two.network == 50e9 and two.link == 32e9 and two.device.flops == DEVICES["a100-80gb"].flops
    assert cluster(gpu="h200").device.memory == pytest.approx(150e9, rel=0.001)


def on_gpus(monkeypatch, *free: float, name: str = "NVIDIA A100-SXM4-80GB") -> None:
    """A machine with one GPU of 80 GB for each number of free bytes."""
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda _: Hardware(gpus=len(free), gpu_name=name)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(free[index]), 80 * 10**9))


def test_here_is_planned_with_what_others_leave(monkeypatch, capsys):
    on_gpus(monkeypatch, 79e9, 30e9)
    found = here(None)
    said = capsys.readouterr().err
    assert "50.0 GB of GPU 1's 80.0 GB are taken" in said
    assert found.gpus == 2 and found.device.memory == 30e9 and found.device.flops == DEVICES["a100-80gb"].flops
    assert here("1").device.memory == 79e9 and not capsys.readouterr().err, "the first alone is free"
    with pytest.raises(ConfigError, match="--gpus: 3, and there are 2 here"):
        here("3")
    on_gpus(monkeypatch, 80e9, name="Radeon")
    assert here(None).device.flops == DEVICES["a100-80gb"].flops and here(None).device.like == "a100-80gb"


def test_the_optimizer_waits_for_memory():
    """With clipping, it moves 40 bytes for each parameter that a rank steps, at the rate of the GPU's memory."""
    groups = [[Weight("all", (10**9,), 4, trained=True)]]
    model = ModelWeights(groups[0], groups)
    common = {"name": "", "ranks": 8, "ranks_per_node": 8, "precision": "bf16"}
    eight = cluster(gpus="8", gpu="a100-80gb")

    def seconds(where=eight, **spread):
        return step_seconds(Work(), 0, [], model, ShardingSpec(**common, **spread), where, accumulation=1)

    alone = seconds(kind="ddp")
    assert alone.optimizer == pytest.approx(40e9 / 2039e9 / MEMORY_SHARE) == alone.step and alone.bound == "optimizer"
    for parted in ({"kind": "deepspeed", "stage": 1}, {"kind": "deepspeed", "stage": 3, "shard_ranks": 8}):
        assert seconds(**parted).optimizer == pytest.approx(alone.optimizer / 8)
    assert seconds(kind="fsdp", stage=3, shard_ranks=4).optimizer == pytest.approx(alone.optimizer / 4), "two copies"
    twice = dataclasses.replace(eight, device=dataclasses.replace(eight.device, bandwidth=2 * eight.device.bandwidth))
    assert seconds(twice, kind="ddp").optimizer == pytest.approx(alone.optimizer / 2)
    on_host = seconds(kind="fsdp", stage=3, shard_ranks=8, offload_optimizer="cpu", offload_param="cpu")
    assert on_host.optimizer == 0 and on_host.offload >= 40e9 / 165e9


M = 1 << 20

TRAINED = [Weight(name, (4 * M,), 4, True) for name in "abc"]

FROZEN = [Weight("frozen", (8 * M,), 4, False), Weight("small", (M - 2,), 4, False)]


COLLECTED = 4 * 6 * M
"""Bytes of the trained weights that rank 0 collects at the end."""


def planned_host(spread, *, accumulation=1, on_gpu=True, rank_weights=((3 * M,), (M,), (2 * M,))):
    """The bytes of host RAM of one rank that trains weights of these shapes in one group."""
    weights = [Weight(str(number), shape, 4, True) for number, shape in enumerate(rank_weights)]
    model = ModelWeights(weights, [weights])
    common = {"name": "", "ranks": 1, "ranks_per_node": 1, "shard_ranks": 1, "precision": "bf16"}
    micro = Trace(0, [TimelinePoint(0, 0)])
    spec = ShardingSpec(**common, **spread)
    return peak_memory(model, spec, micro, accumulation=accumulation, gpus_per_node=1, on_gpu=on_gpu).host


def test_offload_under_zero_2_has_buffers_in_host_ram():
    """6 M elements: master weights, gradients and two moments in fp32, and updated weights in bf16."""
    zero2 = {"kind": "deepspeed", "stage": 2, "offload_optimizer": "cpu", "pins_host_memory": False}
    states = (4 * 4 + 2) * 6 * M + COLLECTED
    assert planned_host(zero2) == states + 2 * 3 * M, "the gradient of the largest weight"
    assert planned_host(zero2, accumulation=2) == states + 2 * 3 * M + 2 * 6 * M, "and those of earlier micro-batches"


def test_pinned_memory_is_rounded_up_to_powers_of_two_on_gpus():
    zero2 = {"kind": "deepspeed", "stage": 2, "offload_optimizer": "cpu"}
    moments = 2 * 4 * 6 * M + COLLECTED
    # master weights and gradients of 24 MiB each, updated weights of 12 MiB, and a gradient of 6 MiB
    pinned = 32 * M + 32 * M + 16 * M + 8 * M
    assert planned_host(zero2) == pinned + moments
    # gradients of 6, 2 and 4 MiB
    assert planned_host(zero2, accumulation=2) == pinned + moments + (8 + 2 + 4) * M
    assert planned_host(zero2, on_gpu=False) == planned_host(zero2 | {"pins_host_memory": False}, on_gpu=False)
    # FSDP2: shards of weights and of gradients, each 12, 4 and 8 MiB
    fsdp = {"kind": "fsdp", "stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
    extra = planned_host(fsdp) - planned_host(fsdp, on_gpu=False)
    assert extra == 2 * (16 - 12) * M


@pytest.mark.parametrize(
    "in_cpu, staying, set_aside",
    [
        (10**9, "abc", 0),
        (5 * M, "ab", M + 2 * M),  # what b leaves of the room, and where c is rounded to before it is written
        (4 * M, "ab", 0 + 2 * M),
        (2 * M, "a", 0 + 2 * M),
        (2 * M - 1, "", 2 * M - 1 + 2 * M),  # room for a rank's part of a, less one
        (0, "", 2 * M),
    ],
)
def test_what_host_ram_may_not_hold_lies_on_nvme(in_cpu, staying, set_aside):
    """The first ``max_in_cpu`` elements of trained weights stay, in whole sub-groups. So do frozen parts under 1 MiB."""
    common = {
        "kind": "deepspeed", "name": "", "ranks": 2, "ranks_per_node": 2, "stage": 3, "shard_ranks": 2, "precision": "bf16",
        "sub_group_elements": 2 * M,
        "persistence_threshold": 10, "max_reuse_elements": 0, "prefetch_bucket_elements": 0, "max_in_cpu_elements": in_cpu,
        "nvme_buffers": 1, "nvme_buffer_elements": 100, "pins_host_memory": False,
        "offload_optimizer": "nvme",
    }  # fmt: skip
    weights, groups = [*TRAINED, *FROZEN], [TRAINED[:2], TRAINED[2:]]
    on_host, on_disk = (ShardingSpec(**common, offload_param=where) for where in ("cpu", "nvme"))
    model = ModelWeights(weights, groups)
    before, after = count_states(model, on_host), count_states(model, on_disk)
    away = 2 * (4 * M + 2 * M * (3 - len(staying)))
    assert after.live.parameters == before.live.parameters - away + 2 and after.disk == before.disk + away, (
        "a number in their place"
    )
    assert after.host == dataclasses.replace(before.host, parameters=before.host.parameters - away + 2)
    assert after.device == before.device
    micro, options = Trace(0, [TimelinePoint(0, 0)]), {"accumulation": 1, "gpus_per_node": 2}
    planned = peak_memory(model, on_disk, micro, **options)
    assert planned.disk == 2 * after.disk
    # The largest weight, 8 M elements, is cut in two, and has room for more tokens.
    buffer = math.ceil(1.02 * 4 * M)
    # At the end, one rank collects all trained weights.
    assert planned.host == 2 * (after.host.total + 2 * (buffer + set_aside)) + 4 * 3 * 4 * M
    # read twice a micro-batch, written once a step where they are trained; the node's two ranks have one disk
    two, seconds = cluster(gpus="2", gpu="a100-80gb"), {}
    for spread in (on_host, on_disk):
        seconds[spread.offload_param] = step_seconds(Work(), 0, [], model, spread, two, accumulation=3).offload
    moved = 3 * 2 * away + (away - 2 * 4 * M)
    assert seconds["nvme"] - seconds["cpu"] == pytest.approx(2 * moved / 3e9)


def test_a_strategy_file_says_what_stays_in_host_ram(tmp_path, tiny):
    text = (ROOT / "ds_configs" / "zero3_nvme.json").read_text()
    (tmp_path / "ds.json").write_text(text.replace('"max_in_cpu": 1000000000.0', '"max_in_cpu": 1e6'))
    file = tmp_path / "little.yaml"
    file.write_text(
        (FILES[0].parent / "zero3_nvme.yaml").read_text().replace("ds_configs/zero3_nvme.json", str(tmp_path / "ds.json"))
    )
    planned = made("causal_lm", tiny / "wide", block_size=64)
    traced = TracedJob.of(planned, "cuda")
    sources = ConfigSources(dict.fromkeys(type(planned.config).model_fields, "default"))
    two = cluster(gpus="2", gpu="a100-80gb")
    shipped, little = (plan_row(f, traced, two, sources) for f in (FILES[0].parent / "zero3_nvme.yaml", file))
    both = [(planned.sharding.nvme_buffers, planned.sharding.nvme_buffer_elements) for planned in (little, shipped)]
    assert little.sharding.max_in_cpu_elements == 10**6 and both == [(5, 10**8)] * 2
    assert little.memory.disk > shipped.memory.disk > 0
    assert little.time.offload > shipped.time.offload


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("kind, element", [("deepspeed", 2), ("fsdp", 4)])
def test_offloaded_weights_cross_to_one_gpu_too(kind, element, ranks):
    """A rank's shard for every gathering, whether or not there is anybody to gather from. FSDP2 casts behind the bus."""
    layer, head = Weight("layer", (8000, 1000), 4, False, "layer"), Weight("head", (8000, 100), 4, False)
    trained = Weight("adapter", (8,), 4, True, "layer")
    common = {"kind": kind, "name": "", "ranks": ranks, "ranks_per_node": ranks, "stage": 3, "shard_ranks": ranks,
              "precision": "bf16", "persistence_threshold": 10, "max_reuse_elements": 10**6, "prefetch_bucket_elements": 0,
              "offload_optimizer": "cpu"}  # fmt: skip
    where, weights = cluster(gpus=str(ranks), gpu="a100-80gb"), [layer, trained, head]

    def seconds(offload_param: str) -> float:
        spread = ShardingSpec(**common, offload_param=offload_param)
        model = ModelWeights(weights, [[trained]])
        found = list_transfers(model, spread, 3)
        return step_seconds(Work(), 0, found, model, spread, where, accumulation=3).offload

    elements = 2 * layer.numel + head.numel + (2 * trained.numel if kind == "fsdp" else 0)
    assert seconds("cpu") - seconds("none") == pytest.approx(3 * elements * element / ranks / 32e9)


@pytest.mark.parametrize("kind", [{"kind": "deepspeed", "stage": 2}, {"kind": "fsdp", "stage": 3, "shard_ranks": 2}])
def test_gradients_of_each_micro_batch_cross_pcie_where_the_optimizer_is_on_the_host(kind):
    weight = Weight("layer", (1000, 1000), 4, True, "layer")
    spread = ShardingSpec(name="", ranks=2, ranks_per_node=2, precision="bf16", offload_optimizer="cpu", **kind)
    where = cluster(gpus="2", gpu="a100-80gb")

    once, thrice = (
        step_seconds(Work(), 0, [], ModelWeights([weight], [[weight]]), spread, where, accumulation=number).offload
        for number in (1, 3)
    )

    assert thrice - once == pytest.approx(2 * 4 * 10**6 / 2 / 32e9)


def links(folder: Path, rate: float) -> str:
    """A file as scripts/allreduce_bench.py writes it, of which the planner reads one figure."""
    file = folder / "links.json"
    file.write_text(json.dumps({"rows": [{"operation": "all_reduce", "bytes": 64e6, "bus_bytes_per_s": rate}]}))
    return str(file)


@pytest.mark.parametrize("key", ["interconnect", "intra_node"])
def test_a_measured_rate_is_what_collectives_get(tmp_path, key):
    """A listed one they get a part of."""
    moved = [Transfer("gradients", "all-reduce", 16e9, 16, passes=2)]
    spread = ShardingSpec(kind="ddp", name="", ranks=16, ranks_per_node=8)

    def seconds(rate: str, part: str) -> float:
        where = cluster(**{"gpus": "8", "nodes": "2", "interconnect": "400Gbps", key: rate})
        return getattr(step_seconds(Work(), 0, moved, ModelWeights([], []), spread, where, accumulation=1), part)

    part, listed = {"interconnect": ("network", NETWORK), "intra_node": ("links", LINKS)}[key]
    assert seconds(links(tmp_path, 25e9), part) == pytest.approx(30 / 25)
    assert seconds("25GB/s", part) == pytest.approx(30 / 25 / listed)


def test_geforce_cards_send_through_the_host_unless_a_bridge_joins_them():
    through_host = cluster(gpus="2", gpu="rtx-3090").rate("link")
    bridge = cluster(gpus="2", gpu="rtx-3090", intra_node="56GB/s").rate("link")

    assert cluster(gpus="2", gpu="rtx-3090", intra_node="16GB/s").rate("link") == through_host
    assert bridge == pytest.approx(LINKS * 56e9)


@pytest.mark.parametrize("rate", [0.0, -1e9, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["interconnect", "intra_node"])
def test_a_benchmark_of_one_rank_is_refused(tmp_path, key, rate):
    with pytest.raises(ConfigError) as caught:
        cluster(**{"gpus": "8", "nodes": "2", "interconnect": "400Gbps", key: links(tmp_path, rate)})
    for word in (f"--{key}", "links.json", f"bus_bytes_per_s: {rate:g}", "2 processes or more", "400Gbps"):
        assert word in str(caught.value)


def test_a_cpu_has_no_context_of_cuda(tiny, monkeypatch, capsys):
    def other(*flags: str) -> int:
        line = ["plan", *flags, "--strategies", "single", "--json", "-", str(tiny / "llama"), "--block_size", "64"]
        assert main(line) == 0
        (single,) = json.loads(capsys.readouterr().out)["rows"]
        return single["memory"]["device"]["other"]

    monkeypatch.setattr(Hardware, "detect", classmethod(lambda _: Hardware()))
    assert other("--here", "--gpus", "1") == 0
    assert other("--gpu", "t4") == CONTEXT_BYTES


@pytest.mark.launch
@pytest.mark.full
def test_measured_links_are_planned_with(tmp_path):
    file = tmp_path / "links.json"
    line = [sys.executable, "scripts/allreduce_bench.py", "--megabytes", "0.25", "1", "--rounds", "3", "--out", str(file)]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["ranks"] == 2 and found["backend"] == "gloo" and len(found["rows"]) == 6
    for measured in found["rows"]:
        worth = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}[measured["operation"]]
        assert measured["bus_bytes_per_s"] == pytest.approx(worth * measured["bytes"] / measured["seconds"])
    (largest,) = [r for r in found["rows"] if r["operation"] == "all_reduce" and r["bytes"] == 1_000_000]
    assert cluster(gpus="8", nodes="2", interconnect=str(file)).network == largest["bus_bytes_per_s"]
    file.write_text("{}")
    with pytest.raises(ConfigError, match="allreduce_bench"):
        cluster(gpus="8", nodes="2", interconnect=str(file))


@pytest.mark.parametrize(
    ("chosen", "largest_weight", "elements"), [("auto", 10, 100_000_000), (1e6, 10, 1_000_000), (1e6, 4_000_000, 2_040_000)]
)
def test_a_buffer_for_nvme_holds_the_largest_shard(chosen, largest_weight, elements):
    assert nvme_buffer_elements(chosen, largest_weight, ranks=2) == elements


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp", "ddp"])
def test_each_gpu_holds_a_quantised_base_whole_while_it_is_loaded(kind):
    """transformers shards no quantised base while it loads it, and puts it on the GPU."""
    packed = Weight("packed", (800 * M,), 1, False, scale_bytes=M)
    adapter = Weight("adapter", (M,), 4, True)
    model = ModelWeights([packed, adapter], [[adapter]])
    sharding = ShardingSpec(
        kind=kind,
        name="",
        ranks=8,
        ranks_per_node=8,
        stage=3 if kind == "deepspeed" else 0,
        shard_ranks=1 if kind == "ddp" else 8,
    )
    trace = Trace(0, [TimelinePoint(0, 0), TimelinePoint(M, 0)])
    whole = 800 * M + M + 4 * M

    on_gpu = peak_memory(model, sharding, trace, accumulation=1, gpus_per_node=8)
    on_cpu = peak_memory(model, sharding, trace, accumulation=1, gpus_per_node=8, on_gpu=False)

    # Without sharding, a GPU holds it whole at all times.
    assert ("load" in on_gpu.moments) is (kind != "ddp")
    assert on_gpu.device.allocated >= whole
    assert "load" not in on_cpu.moments and on_cpu.host_at_load == 8 * (800 + 4) * M
    # On a GPU, the host holds a weight at a time.
    assert on_gpu.host_at_load == 8 * 800 * M


def test_the_allocator_has_as_few_gaps_while_a_quantised_base_is_loaded_as_where_nothing_is_shared():
    layers = [Weight(f"layer{n}", (20 * M,), 1, False, f"layer{n}", scale_bytes=M) for n in range(40)]
    adapter = Weight("adapter", (M,), 4, True, "layer0")
    sharding = ShardingSpec(kind="fsdp", name="", ranks=8, ranks_per_node=8, stage=3, shard_ranks=8)
    trace = Trace(0, [TimelinePoint(0, 0), TimelinePoint(M, 0)])

    peak = peak_memory(ModelWeights([*layers, adapter], [[adapter]]), sharding, trace, accumulation=1, gpus_per_node=8)

    assert peak.when == "load"
    assert peak.device.reserved == int((1 + CACHED_SHARE) * peak.device.allocated)
    assert peak.high == int(RANGE[1] * peak.total)


@pytest.mark.parametrize(
    "kind, config, token_elements",
    [
        ("deepspeed", Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128), 2 * (16 + 8) * 128),
        ("fsdp", Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128), 6 * 8 * 128),
        ("deepspeed", DeepseekV3Config(), 2 * 128 * (192 + 128)),
        ("fsdp", DeepseekV3Config(), 3 * 128 * (192 + 128)),
    ],
)
def test_attention_sends_tokens_as_wide_as_its_heads(kind, config, token_elements):
    config.num_hidden_layers = 3
    spec = ShardingSpec(kind=kind, name="", ranks=2, ranks_per_node=2, token_ranks=2, precision="bf16")

    (transfer,) = list_token_transfers(config, 10, spec, accumulation=1)

    assert transfer.size_bytes == 3 * 10 * token_elements * 2


def test_layers_that_are_not_resharded_are_sent_once_and_stay_in_memory(tmp_path):
    file = next(path for path in FILES if path.stem == "fsdp")
    kept = tmp_path / "fsdp_kept.yaml"
    kept.write_text(file.read_text().replace("reshard_after_forward: true", "reshard_after_forward: false"))
    traced = traced_once(made("causal_lm", shortened(tmp_path, "llama2_70b", num_hidden_layers=4)), "cuda")
    where = cluster(gpus="8", gpu="a100-80gb")

    resharded, unsharded = (plan_row(path, traced, where, ConfigSources({})) for path in (file, kept))

    assert not resharded.problems and not unsharded.problems
    assert 0.6 < unsharded.sent / resharded.sent < 0.75, "the backward pass gathers nothing"
    layer_bytes = (unsharded.memory.device.buffers - resharded.memory.device.buffers) / 3
    assert layer_bytes > 3e9, "three more layers of 0.86 billion fp32 weights"


def planned_moments(*, accumulation: int, **spread) -> dict[str, int]:
    """Return what one of two ranks allocates at each moment, without activations: a layer of 6 M and a head of 2 M."""
    weights = [Weight("layer", (6 * M,), 4, True, unit="layers.0"), Weight("head", (2 * M,), 4, True)]
    sharding = ShardingSpec(name="", ranks=2, ranks_per_node=2, precision="bf16", reduce_bucket_elements=0, **spread)
    trace = Trace(0, [TimelinePoint(0, 0), TimelinePoint(2 * M, 0), TimelinePoint(8 * M, 0)])
    return peak_memory(
        ModelWeights(weights, [weights]), sharding, trace, accumulation=accumulation, gpus_per_node=2, on_gpu=False
    ).moments


@pytest.mark.parametrize(
    "spread, gradient_bytes",
    # The partition of the last rank has a part of both weights, whose gradients are complete.
    [({"kind": "deepspeed", "stage": 2}, 2 * 8 * M), ({"kind": "fsdp", "stage": 3, "shard_ranks": 2}, 4 * 4 * M)],
)
def test_shards_of_the_gradients_of_earlier_micro_batches_stay(spread, gradient_bytes):
    alone = planned_moments(accumulation=1, **spread)
    summed = planned_moments(accumulation=2, **spread)

    assert summed["forward and loss"] - alone["forward and loss"] == gradient_bytes
    # ZeRO-2 adds the gradients up at the end of a backward pass; FSDP2 adds each of them when it is reduced.
    growth = gradient_bytes if spread["kind"] == "deepspeed" else 0
    assert summed["backward"] - alone["backward"] == growth
