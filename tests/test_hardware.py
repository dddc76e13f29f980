"""The planner's table of GPUs, by the names that ``torch.cuda.get_device_name`` gives, against the maker's data sheets."""

from __future__ import annotations

import json

import pytest
import torch

from zerobook.cli.plan import here
from zerobook.launch.resolve import Hardware
from zerobook.plan.hardware import cluster
from zerobook.utils.devices import find_device

# name, GB, dense half precision and fp32 outside of tensor cores (10^12 operations a second), GB/s of memory, GB/s to each
# other GPU of a node in one direction, the vendor's document. Documents give links for both directions, and newer ones half
# precision with sparsity: both are halved here. Bridges that join pairs of cards are left out.
SHEETS = [
    ("Tesla V100-SXM2-16GB", 16, 125, 15.7, 900, 150, "Tesla V100 data sheet"),
    ("Tesla V100-SXM2-32GB", 32, 125, 15.7, 900, 150, "Tesla V100 data sheet"),
    ("Tesla V100-PCIE-32GB", 32, 112, 14, 900, 16, "Tesla V100 data sheet"),
    ("NVIDIA TITAN RTX", 24, 130, 16.3, 672, 16, "Turing architecture white paper"),
    ("Tesla T4", 16, 65, 8.1, 320, 16, "T4 data sheet"),
    ("NVIDIA GeForce RTX 3090", 24, 71, 35.6, 936, 32, "GA102 architecture white paper"),
    ("NVIDIA GeForce RTX 4090", 24, 165, 82.6, 1008, 32, "Ada architecture white paper"),
    ("NVIDIA GeForce RTX 5090", 32, 209.5, 104.8, 1792, 64, "RTX Blackwell architecture white paper"),
    ("NVIDIA GeForce RTX 5080", 16, 112.6, 56.3, 960, 64, "RTX Blackwell architecture white paper"),
    ("NVIDIA GeForce RTX 5070 Ti", 16, 87.9, 43.9, 896, 64, "RTX Blackwell architecture white paper"),
    ("NVIDIA A10", 24, 125, 31.2, 600, 32, "A10 data sheet"),
    ("NVIDIA A10G", 24, 70, 35, 600, 32, "A10G data sheet, as AWS has it"),
    ("NVIDIA A30", 24, 165, 10.3, 933, 32, "A30 data sheet"),
    ("NVIDIA L4", 24, 121, 30.3, 300, 32, "L4 data sheet"),
    ("NVIDIA A40", 48, 149.7, 37.4, 696, 32, "A40 data sheet"),
    ("NVIDIA RTX A6000", 48, 154.8, 38.7, 768, 32, "RTX A6000 data sheet"),
    ("NVIDIA RTX 6000 Ada Generation", 48, 364.25, 91.1, 960, 32, "RTX 6000 Ada data sheet and Ada white paper"),
    ("NVIDIA L40", 48, 181, 90.5, 864, 32, "L40 data sheet"),
    ("NVIDIA L40S", 48, 362, 91.6, 864, 32, "L40S data sheet"),
    ("NVIDIA A100-SXM4-40GB", 40, 312, 19.5, 1555, 300, "A100 data sheet"),
    ("A100-SXM4-40GB", 40, 312, 19.5, 1555, 300, "A100 data sheet; older drivers leave NVIDIA out"),
    ("NVIDIA A100-PCIE-40GB", 40, 312, 19.5, 1555, 32, "A100 data sheet"),
    ("NVIDIA A100-SXM4-80GB", 80, 312, 19.5, 2039, 300, "A100 data sheet"),
    ("NVIDIA A100 80GB PCIe", 80, 312, 19.5, 1935, 32, "A100 data sheet"),
    ("NVIDIA A800-SXM4-80GB", 80, 312, 19.5, 2039, 200, "A800 data sheet: an A100 with NVLink of 400 GB/s"),
    ("NVIDIA A800 80GB PCIe", 80, 312, 19.5, 1935, 32, "A800 data sheet"),
    ("NVIDIA H100 80GB HBM3", 80, 989, 67, 3350, 450, "H100 data sheet"),
    ("NVIDIA H100 PCIe", 80, 756, 51, 2000, 64, "H100 data sheet of 2022"),
    ("NVIDIA H100 NVL", 94, 835, 60, 3900, 64, "H100 data sheet"),
    ("NVIDIA H800", 80, 989, 67, 3350, 200, "H800 data sheet: an H100 with NVLink of 400 GB/s"),
    ("NVIDIA H20", 96, 148, 44, 4000, 450, "H20 data sheet"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        96,
        503.8,
        125,
        1792,
        64,
        "RTX PRO 6000 data sheet; RTX Blackwell PRO white paper",
    ),
    ("NVIDIA GH200 480GB", 96, 989, 67, 4000, 64, "GH200 data sheet"),
    ("NVIDIA H200", 141, 989, 67, 4800, 450, "H200 data sheet"),
    ("NVIDIA H200 NVL", 141, 835, 60, 4800, 64, "H200 data sheet"),
    ("NVIDIA B200", 180, 2250, 75, 8000, 900, "HGX B200 data sheet"),
    ("NVIDIA B300 SXM6 AC", 270, 2250, 75, 8000, 900, "HGX B300 data sheet; hosts have PCIe 5"),
    (
        "AMD Instinct MI300X",
        192,
        1307,
        163.4,
        5300,
        448,
        "Instinct MI300X data sheet: 7 Infinity Fabric links of 64 GB/s each way",
    ),
]
# the MIG user guide: a 1g instance has one of 7 compute slices (an A30's one of 4), and memory comes in eighths
SLICES = [
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5, 312 / 7, 19.5 / 7, 1555 / 8, 32, "MIG user guide"),
    ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", 10, 312 / 7, 19.5 / 7, 1555 / 4, 32, "MIG user guide"),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40, 312 * 3 / 7, 19.5 * 3 / 7, 2039 / 2, 32, "MIG user guide"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 10, 989 / 7, 67 / 7, 3350 / 8, 64, "MIG user guide"),
    ("NVIDIA H200 MIG 1g.18gb", 141 / 8, 989 / 7, 67 / 7, 600, 64, "MIG user guide"),
    ("NVIDIA A30 MIG 2g.12gb", 12, 82.5, 5.15, 933 / 2, 32, "MIG user guide"),
]


@pytest.mark.parametrize("name, memory, half, fp32, bandwidth, link, source", SHEETS + SLICES, ids=lambda value: str(value))
def test_a_drivers_name_has_the_data_sheets_figures(name, memory, half, fp32, bandwidth, link, source):
    device = find_device(name)
    assert device is not None, source
    # The sheets' GB are 2^30 bytes, of which programs get 92 to 99 %.
    assert 0.9 < device.memory / (memory * 2**30) < 1.005, source
    assert device.flops == pytest.approx(half * 1e12, rel=5e-3), source
    assert (device.fp32, device.bandwidth) == pytest.approx((fp32 * 1e12, bandwidth * 1e9)), source
    assert device.link == pytest.approx(link * 1e9), source


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 SOMETHING NEW", "AMD Instinct MI250X", "NVIDIA A100-SXM4-40GB MIG ?"],
)
def test_a_card_that_only_sounds_like_a_known_one_is_not_it(name):
    assert find_device(name) is None


def on(monkeypatch, name: str, total: float) -> None:
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda _: Hardware(gpus=1, gpu_name=name)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(total), int(total)))


def test_an_unknown_card_is_said_and_planned_like_the_nearest(monkeypatch, capsys):
    on(monkeypatch, "NVIDIA Something 24", 24e9)
    device = here(None).device
    said = capsys.readouterr().err
    assert device.name == "NVIDIA Something 24" and device.memory == 24e9
    assert device.like and device.like in said and "NVIDIA Something 24" in said and "a100" not in said
    on(monkeypatch, "NVIDIA L40", 48e9)
    assert here(None).device.flops == 181e12 and not here(None).device.like and not capsys.readouterr().err


def test_a_slice_of_this_machine_has_the_slices_speed(monkeypatch):
    on(monkeypatch, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5.1e9)
    found = here(None)
    assert found.device.flops == pytest.approx(312e12 / 7) and found.link == 32e9 and found.device.memory == 5.1e9


def test_fp32_is_timed_without_tensor_cores():
    from zerobook.plan.roofline import FP32_SHARE, product_seconds
    from zerobook.plan.work import Product

    large = Product(1, 10**6, 10**6, 10**6, element_bytes=4)
    for name, rate in (("a100-80gb", 19.5e12), ("rtx-3090", 35.6e12), ("h100-80gb-pcie", 51e12)):
        assert product_seconds(large, cluster(gpu=name).device) == pytest.approx(2e18 / (rate * FP32_SHARE), rel=1e-3), name


def test_offload_crosses_the_cards_own_pcie():
    from zerobook.plan.roofline import step_seconds
    from zerobook.plan.sharding import ShardingSpec
    from zerobook.plan.state_bytes import ModelWeights, Weight
    from zerobook.plan.work import Work

    groups = [[Weight("all", (10**9,), 4, trained=True)]]
    spread = ShardingSpec(
        name="", ranks=1, ranks_per_node=1, kind="deepspeed", stage=2, precision="bf16", offload_optimizer="cpu"
    )
    four, five = (
        step_seconds(Work(), 0, [], ModelWeights(groups[0], groups), spread, cluster(gpu=gpu), accumulation=1).offload
        for gpu in ("a100-80gb", "h200")
    )
    assert four - five == pytest.approx(2 * spread.compute_bytes * 1e9 * (1 / 32e9 - 1 / 64e9))


def test_nvlink_is_refused_where_only_bridges_are():
    from zerobook.errors import ConfigError

    with pytest.raises(ConfigError, match="a6000 has no NVLink between all GPUs"):
        cluster(gpu="a6000", intra_node="nvlink")
    assert cluster(gpu="a6000", intra_node="56GB/s").link == 56e9
    assert cluster(gpu="h100-80gb", intra_node="pcie").link == 64e9


@pytest.mark.parametrize(
    "name, device",
    [
        ("4090", "rtx-4090"),
        ("RTX 5070 Ti", "rtx-5070-ti"),
        ("H100 NVL", "h100-nvl"),
        ("A40", "a40"),
        ("rtx-pro", "rtx-pro-6000"),
    ],
)
def test_a_part_of_one_name_is_enough(name, device):
    assert cluster(gpu=name).device.name == device


@pytest.mark.parametrize(
    "name, candidates",
    [("a100", ["a100-40gb", "a100-80gb"]), ("h100", ["h100-80gb", "h100-nvl"]), ("rtx", ["rtx-4090"]), ("7", ["--gpus 7"])],
)
def test_a_part_of_several_names_is_answered_with_them(name, candidates):
    from zerobook.errors import ConfigError

    with pytest.raises(ConfigError, match="--gpu: ") as caught:
        cluster(gpu=name)
    assert all(candidate in str(caught.value) for candidate in candidates)
    assert ("l40s" in str(caught.value)) == (name == "7"), "candidates alone"


def test_a_device_has_run_where_there_are_results_of_it():
    from tests.harness import ROOT
    from zerobook.utils.devices import DEVICES

    names = [json.loads(file.read_text())["device"] for file in (ROOT / "benchmarks" / "results" / "gpu").glob("*.json")]
    assert {device.name for device in DEVICES.values() if device.has_run} == {find_device(name).name for name in names}
