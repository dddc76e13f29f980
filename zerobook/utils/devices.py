"""GPUs with their manufacturers' figures: memory, operations per second, and bandwidths. torch is not imported here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# Bytes a second of PCIe 4 with 16 lanes, in one direction.
PCIE = 32e9


@dataclass(frozen=True)
class Device:
    """A GPU with its manufacturer's figures.

    Args:
        memory: bytes that programs can allocate.
        flops: dense operations per second in half precision, on tensor cores.
        fp32: operations per second in fp32, without tensor cores: by default, torch does not use TF32.
        bandwidth: bytes per second of its memory.
        link: bytes per second to every other GPU of its node, each way.
        pcie: bytes per second over PCIe, each way; ``link`` if there is no NVLink.
        drivers: its names in ``torch.cuda.get_device_name``, without the leading ``NVIDIA``.
        bf16: whether it computes in bf16.
        fused: whether flash attention runs on it.
        product_share: share of ``flops`` that large matrix products reach in training.
        attention_share: share of ``flops`` that fused attention reaches.
        peer_to_peer: whether it sends to another GPU over PCIe directly. GeForce cards send through the host's memory.
        has_run: whether this project has run on it, see docs/measured/gpu.md.
        like: the device whose speed is used for this one; empty if its own speed is known.
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
        """Whether NVLink joins all GPUs of a node. An NVLink bridge joins only pairs of cards, and is not counted."""
        return self.link > self.pcie

    def speed_of(self, name: str, memory: int) -> Device:
        """Return a device called ``name`` with ``memory`` bytes, for a GPU of unknown speed. It gets the speed of this one."""
        return replace(self, name=name, memory=memory, drivers=(), like=self.name)


def _device(
    name: str,
    drivers: str,
    gib: float,
    half: float,
    fp32: float,
    bandwidth: float,
    pcie: float,
    nvlink: float = 0,
    **other: float,
) -> Device:
    """Return a device from the figures of its data sheet.

    Args:
        drivers: its names in the driver, separated by semicolons.
        gib: its memory in 2^30 bytes.
        half: operations per second in half precision, in 10^12. So is ``fp32``.
        bandwidth: of its memory, in 10^9 bytes per second. So are ``pcie`` and ``nvlink``.
        nvlink: 0 if it has no NVLink to all GPUs of its node.
        other: fields of `Device` that have the default on most devices.
    """
    return Device(
        name=name,
        memory=int(gib * 2**30),
        flops=half * 1e12,
        fp32=fp32 * 1e12,
        bandwidth=bandwidth * 1e9,
        link=(nvlink or pcie) * 1e9,
        pcie=pcie * 1e9,
        drivers=tuple(drivers.split("; ")),
        **other,  # type: ignore[arg-type]
    )


# The figures are from the vendors' data sheets, which tests/test_hardware.py names. The sheets give rates of PCIe and NVLink
# for both directions together; the rates here are for one direction. Rates that the sheets give with sparsity are halved. The
# GiB are what programs can allocate: a sheet's GB are 2^30 bytes, and the driver and error correction take a part of them. They
# are from torch's out-of-memory errors in public issues, such as "total capacity of 39.50 GiB" (A100 40 GB, TianheWu/CoSeR#10),
# 79.15 to 79.35 (A100 80 GB, OSU-NLP-Group/TableLlama#10), 79.10 (H100, pytorch/torchtitan#1789), 31.74 (V100,
# liucongg/ChatGLM-Finetuning#73), 44.42 (L40S, stepfun-ai/Step-Video-T2V#8), 44.40 (L40, QwenLM/Qwen3-VL#2097), 23.64 (RTX
# 4090, 3DTopia/Phidias-Diffusion#8), 178.35 (B200, pytorch/ao#4002).
_OLD = {"bf16": False, "fused": False, "product_share": 0.42, "attention_share": 0.3}
_HOPPER = {"product_share": 0.7, "attention_share": 0.3}
_GEFORCE = {"product_share": 0.95, "attention_share": 0.6, "peer_to_peer": False}
_ADA = {"product_share": 0.6, "attention_share": 0.5}
_BLACKWELL = {"product_share": 0.66, "attention_share": 0.35}
_CDNA = {"product_share": 0.46, "attention_share": 0.3}
"""Fields that the devices of a generation have in common.

The shares are fitted to published runs, see docs/measured/plan_accuracy.md. Only those of CDNA are not: its attention_share is
Hopper's, and its product_share is Hopper's times (620 / 1307) / (720 / 989). These are the measured and nominal TFLOPS of bf16
products on an MI300X and an H100 (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1: Training", 22 December 2024)."""
DEVICES = {
    device.name: device
    for device in (
        # The columns are name, drivers, gib; half, fp32 (10^12 operations/s); bandwidth, pcie, nvlink (GB/s).
        _device("v100-16gb", "Tesla V100-SXM2-16GB", 15.77, 125, 15.7, 900, 16, 150, **_OLD),
        _device("v100-32gb", "Tesla V100-SXM2-32GB; Tesla V100-SXM3-32GB", 31.74, 125, 15.7, 900, 16, 150, **_OLD),
        _device("v100-16gb-pcie", "Tesla V100-PCIE-16GB", 15.77, 112, 14, 900, 16, **_OLD),
        _device("v100-32gb-pcie", "Tesla V100-PCIE-32GB", 31.74, 112, 14, 900, 16, **_OLD),
        _device("titan-rtx", "TITAN RTX", 23.64, 130, 16.3, 672, 16, **_OLD),
        _device("t4", "Tesla T4", 14.75, 65, 8.1, 320, 16, **_OLD),
        _device("rtx-3090", "GeForce RTX 3090", 23.69, 71, 35.6, 936, 32, **_GEFORCE),
        _device("rtx-4090", "GeForce RTX 4090", 23.64, 165, 82.6, 1008, 32, **_GEFORCE),
        _device("rtx-5090", "GeForce RTX 5090", 31.36, 209.5, 104.8, 1792, 64, **_GEFORCE),
        _device("rtx-5080", "GeForce RTX 5080", 15.47, 112.6, 56.3, 960, 64, **_GEFORCE),
        _device("rtx-5070-ti", "GeForce RTX 5070 Ti", 15.47, 87.9, 43.9, 896, 64, **_GEFORCE),
        _device("a10", "A10", 22.06, 125, 31.2, 600, 32),
        _device("a10g", "A10G", 22.19, 70, 35, 600, 32),
        _device("a30", "A30", 23.50, 165, 10.3, 933, 32),
        _device("l4", "L4", 22.16, 121, 30.3, 300, 32, **_ADA),
        _device("a40", "A40", 44.43, 150, 37.4, 696, 32),
        _device("a6000", "RTX A6000", 47.54, 155, 38.7, 768, 32),
        _device("rtx-6000-ada", "RTX 6000 Ada Generation", 47.50, 364, 91.1, 960, 32, **_ADA),
        _device("l40", "L40", 44.40, 181, 90.5, 864, 32, **_ADA),
        _device("l40s", "L40S", 44.42, 362, 91.6, 864, 32, **_ADA),
        _device("a100-40gb", "A100-SXM4-40GB", 39.50, 312, 19.5, 1555, 32, 300),
        _device("a100-40gb-pcie", "A100-PCIE-40GB", 39.50, 312, 19.5, 1555, 32),
        _device("a100-80gb", "A100-SXM4-80GB", 79.15, 312, 19.5, 2039, 32, 300),
        _device("a100-80gb-pcie", "A100 80GB PCIe; A100-PCIE-80GB", 79.15, 312, 19.5, 1935, 32),
        _device("a800-80gb", "A800-SXM4-80GB", 79.15, 312, 19.5, 2039, 32, 200),
        _device("a800-80gb-pcie", "A800 80GB PCIe", 79.15, 312, 19.5, 1935, 32),
        _device("h100-80gb", "H100 80GB HBM3", 79.10, 989, 67, 3350, 64, 450, **_HOPPER),
        _device("h100-80gb-pcie", "H100 PCIe", 79.10, 756, 51, 2000, 64, **_HOPPER),
        _device("h100-nvl", "H100 NVL", 93.10, 835, 60, 3900, 64, **_HOPPER),
        _device("h800", "H800", 79.10, 989, 67, 3350, 64, 200, **_HOPPER),
        _device("gh200", "GH200 480GB", 94.50, 989, 67, 4000, 64, **_HOPPER),
        _device("h20", "H20", 95.00, 148, 44, 4000, 64, 450, **_HOPPER),
        _device("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", 94.97, 503.8, 125, 1792, 64, **_ADA),
        _device("h200", "H200", 139.72, 989, 67, 4800, 64, 450, **_HOPPER),
        _device("h200-nvl", "H200 NVL", 139.72, 835, 60, 4800, 64, **_HOPPER),
        _device("b200", "B200", 178.35, 2250, 75, 8000, 64, 900, **_BLACKWELL),
        _device("b300", "B300 SXM6 AC", 267.70, 2250, 75, 8000, 64, 900, **_BLACKWELL),
        _device("mi300x", "AMD Instinct MI300X", 191.98, 1307, 163.4, 5300, 64, 448, **_CDNA),
    )
}
# Number of compute slices into which MIG divides a card, if it is not 7.
_COMPUTE_SLICES = {"a30": 4}


def find_device(name: str) -> Device | None:
    """Return the device that the driver calls ``name``, such as ``NVIDIA A100-SXM4-80GB``; None if it is not in `DEVICES`.

    A MIG instance, such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``, is a device with a share of the card's compute and memory.
    It is linked by PCIe, since MIG instances reach no other GPU directly.
    """
    card_name, _, profile = name.removeprefix("NVIDIA ").partition(" MIG ")
    card = next((device for device in DEVICES.values() if card_name in device.drivers), None)
    if card is None or not profile:
        return card
    # The profile 1g.5gb is one compute slice and 5 GB.
    profile_match = re.fullmatch(r"(\d+)g\.(\d+)gb.*", profile)
    if profile_match is None:
        return None
    compute_share = int(profile_match[1]) / _COMPUTE_SLICES.get(card.name, 7)
    # MIG divides the memory into eighths. The GB of the profile are rounded, and still tell the number of eighths.
    memory_share = round(8 * int(profile_match[2]) * 10**9 / card.memory) / 8
    return replace(
        card,
        name=f"{card.name} MIG {profile}",
        memory=int(memory_share * card.memory),
        flops=compute_share * card.flops,
        fp32=compute_share * card.fp32,
        bandwidth=memory_share * card.bandwidth,
        link=card.pcie,
    )
