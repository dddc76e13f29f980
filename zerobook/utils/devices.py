"""GPUs with their manufacturer's figures: memory, operations a second, and bandwidths. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

PCIE = 32e9
"""Bytes a second of PCIe 4 with 16 lanes, in one direction."""


@dataclass(frozen=True)
class Device:
    """A GPU with its manufacturer's figures.

    Args:
        memory: bytes.
        flops: dense operations a second in half precision, on tensor cores.
        fp32: operations a second in fp32, without tensor cores: by default, torch does not use TF32.
        bandwidth: bytes a second of its memory.
        link: bytes a second to every other GPU of its node, each way.
        pcie: bytes a second over PCIe, each way; ``link`` where there is no NVLink.
        drivers: its names as ``torch.cuda.get_device_name`` gives them, without the leading ``NVIDIA``.
        bf16: whether it computes in bf16.
        fused: whether flash attention runs on it.
        product_share: share of ``flops`` that large matrix products reach in a training.
        attention_share: share of ``flops`` that fused attention reaches.
        peer_to_peer: whether it sends to another GPU over PCIe without the host's memory. GeForce cards do not.
        has_run: whether this project has run on it, see docs/measured/gpu.md.
        like: the device whose speed is used for this one, where its own speed is not known.
    """

    name: str
    memory: int
    flops: float
    fp32: float
    bandwidth: float
    link: float
    pcie: float = PCIE
    drivers: tuple[str, ...] = ()
    bf16: bool = True
    fused: bool = True
    product_share: float = 0.8
    attention_share: float = 0.55
    peer_to_peer: bool = True
    has_run: bool = False
    like: str = ""

    @property
    def nvlink(self) -> bool:
        """True where NVLink joins all GPUs of a node. A bridge joins pairs of cards and is not counted."""
        return self.link > self.pcie

    def speed_of(self, name: str, memory: int) -> Device:
        """Return a GPU whose own speed is not known, with this device's speed."""
        return replace(self, name=name, memory=memory, drivers=(), like=self.name)


def _device(
    name: str, drivers: str, gb: int, tflops: float, fp32: float, gbps: float, pcie: float, nvlink: float = 0, **facts: float
) -> Device:
    """Return a device whose figures are in the units of data sheets: GB, 10^12 operations a second, and GB a second."""
    return Device(
        name=name,
        memory=gb * 10**9,
        flops=tflops * 1e12,
        fp32=fp32 * 1e12,
        bandwidth=gbps * 1e9,
        link=(nvlink or pcie) * 1e9,
        pcie=pcie * 1e9,
        drivers=tuple(drivers.split("; ")),
        **facts,  # type: ignore[arg-type]  # the fields that most devices have at their defaults
    )


# From the vendors' data sheets, which tests/test_hardware.py names. The sheets give rates of PCIe and NVLink for both
# directions together; the rates here are for one direction. Rates that the sheets give with sparsity are halved.
_OLD = {"bf16": False, "fused": False, "product_share": 0.42, "attention_share": 0.3}
_HOPPER = {"product_share": 0.7, "attention_share": 0.3}
_GEFORCE = {"product_share": 0.95, "attention_share": 0.6, "peer_to_peer": False}
_ADA = {"product_share": 0.6, "attention_share": 0.5}
_BLACKWELL = {"product_share": 0.66, "attention_share": 0.35}
_CDNA = {"product_share": 0.46, "attention_share": 0.3}
"""Facts of a generation. Shares are fitted to published runs, see docs/measured/plan_accuracy.md. Those of CDNA are not: the
products' share is Hopper's times 620 of 1307 over 720 of 989 TFLOPS, the bf16 products that SemiAnalysis measured on an MI300X
and an H100 ("MI300X vs H100 vs H200 Benchmark Part 1: Training", 22 December 2024). That of attention is Hopper's."""
DEVICES = {
    device.name: device
    for device in (
        #       name, the driver's names, GB, half, fp32 (10^12 operations/s), memory, PCIe, NVLink (GB/s)
        _device("v100-16gb", "Tesla V100-SXM2-16GB", 16, 125, 15.7, 900, 16, 150, **_OLD),
        _device("v100-32gb", "Tesla V100-SXM2-32GB; Tesla V100-SXM3-32GB", 32, 125, 15.7, 900, 16, 150, **_OLD),
        _device("v100-16gb-pcie", "Tesla V100-PCIE-16GB", 16, 112, 14, 900, 16, **_OLD),
        _device("v100-32gb-pcie", "Tesla V100-PCIE-32GB", 32, 112, 14, 900, 16, **_OLD),
        _device("titan-rtx", "TITAN RTX", 24, 130, 16.3, 672, 16, **_OLD),
        _device("t4", "Tesla T4", 16, 65, 8.1, 320, 16, **_OLD),
        _device("rtx-3090", "GeForce RTX 3090", 24, 71, 35.6, 936, 32, **_GEFORCE),
        _device("rtx-4090", "GeForce RTX 4090", 24, 165, 82.6, 1008, 32, **_GEFORCE),
        _device("rtx-5090", "GeForce RTX 5090", 32, 209.5, 104.8, 1792, 64, **_GEFORCE),
        _device("rtx-5080", "GeForce RTX 5080", 16, 112.6, 56.3, 960, 64, **_GEFORCE),
        _device("rtx-5070-ti", "GeForce RTX 5070 Ti", 16, 87.9, 43.9, 896, 64, **_GEFORCE),
        _device("a10", "A10", 24, 125, 31.2, 600, 32),
        _device("a10g", "A10G", 24, 70, 35, 600, 32),
        _device("a30", "A30", 24, 165, 10.3, 933, 32),
        _device("l4", "L4", 24, 121, 30.3, 300, 32, **_ADA),
        _device("a40", "A40", 48, 150, 37.4, 696, 32),
        _device("a6000", "RTX A6000", 48, 155, 38.7, 768, 32),
        _device("rtx-6000-ada", "RTX 6000 Ada Generation", 48, 364, 91.1, 960, 32, **_ADA),
        _device("l40", "L40", 48, 181, 90.5, 864, 32, **_ADA),
        _device("l40s", "L40S", 48, 362, 91.6, 864, 32, **_ADA),
        _device("a100-40gb", "A100-SXM4-40GB", 40, 312, 19.5, 1555, 32, 300),
        _device("a100-40gb-pcie", "A100-PCIE-40GB", 40, 312, 19.5, 1555, 32),
        _device("a100-80gb", "A100-SXM4-80GB", 80, 312, 19.5, 2039, 32, 300),
        _device("a100-80gb-pcie", "A100 80GB PCIe; A100-PCIE-80GB", 80, 312, 19.5, 1935, 32),
        _device("a800-80gb", "A800-SXM4-80GB", 80, 312, 19.5, 2039, 32, 200),
        _device("a800-80gb-pcie", "A800 80GB PCIe", 80, 312, 19.5, 1935, 32),
        _device("h100-80gb", "H100 80GB HBM3", 80, 989, 67, 3350, 64, 450, **_HOPPER),
        _device("h100-80gb-pcie", "H100 PCIe", 80, 756, 51, 2000, 64, **_HOPPER),
        _device("h100-nvl", "H100 NVL", 94, 835, 60, 3900, 64, **_HOPPER),
        _device("h800", "H800", 80, 989, 67, 3350, 64, 200, **_HOPPER),
        _device("gh200", "GH200 480GB", 96, 989, 67, 4000, 64, **_HOPPER),
        _device("h20", "H20", 96, 148, 44, 4000, 64, 450, **_HOPPER),
        _device("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", 96, 503.8, 125, 1792, 64, **_ADA),
        _device("h200", "H200", 141, 989, 67, 4800, 64, 450, **_HOPPER),
        _device("h200-nvl", "H200 NVL", 141, 835, 60, 4800, 64, **_HOPPER),
        _device("b200", "B200", 180, 2250, 75, 8000, 64, 900, **_BLACKWELL),
        _device("b300", "B300 SXM6 AC", 270, 2250, 75, 8000, 64, 900, **_BLACKWELL),
        _device("mi300x", "AMD Instinct MI300X", 192, 1307, 163.4, 5300, 64, 448, **_CDNA),
    )
}
_SLICES = {"a30": 4}
"""Number of compute slices into which MIG divides a card, where it is not 7. Memory is divided into eighths."""


def find_device(name: str) -> Device | None:
    """Return the device with a driver's name, such as ``NVIDIA A100-SXM4-80GB``; None where it is not in `DEVICES`.

    For a MIG instance, such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``, return the slice: its share of the compute slices and
    of the memory, linked by PCIe, since MIG instances reach no other GPU directly.
    """
    card_name, _, profile = name.removeprefix("NVIDIA ").partition(" MIG ")
    card = next((device for device in DEVICES.values() if card_name in device.drivers), None)
    if card is None or not profile:
        return card
    slices = re.fullmatch(r"(\d+)g\.(\d+)gb.*", profile)
    if slices is None:
        return None
    # The name gives rounded GB, which tell the number of eighths of the memory.
    compute_share = int(slices[1]) / _SLICES.get(card.name, 7)
    memory_share = round(8 * int(slices[2]) * 10**9 / card.memory) / 8
    return replace(
        card,
        name=f"{card.name} MIG {profile}",
        memory=int(memory_share * card.memory),
        flops=compute_share * card.flops,
        fp32=compute_share * card.fp32,
        bandwidth=memory_share * card.bandwidth,
        link=card.pcie,
    )
