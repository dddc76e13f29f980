"""Hardware that a plan is made for: GPUs, nodes and the links between them. Imports nothing heavy."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from zerobook.errors import ConfigError
from zerobook.utils.units import parse_bytes, parse_rate

Parsed = TypeVar("Parsed")

CONTEXT = 800_000_000
"""Bytes of a GPU that are in use before the first tensor: CUDA's context, cuBLAS's workspace and NCCL's buffers. An
assumption, not a measurement of this project."""


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
    like: str = ""

    @property
    def nvlink(self) -> bool:
        """True where NVLink joins all GPUs of a node. A bridge joins pairs of cards and is not counted."""
        return self.link > self.pcie

    def speed_of(self, name: str, memory: int) -> Device:
        """Return a GPU whose own speed is not known, with this device's speed."""
        return replace(self, name=name, memory=memory, drivers=(), like=self.name)


def _device(
    name: str, drivers: str, gb: int, tflops: float, fp32: float, gbps: float, pcie: float, nvlink: float = 0, **facts: bool
) -> Device:
    return Device(
        name, gb * 10**9, tflops * 1e12, fp32 * 1e12, gbps * 1e9, (nvlink or pcie) * 1e9, pcie * 1e9,
        tuple(drivers.split("; ")), **facts,  # type: ignore[arg-type]  # only flags are given so
    )  # fmt: skip


# From NVIDIA's data sheets, which tests/test_hardware.py names. The sheets give rates of PCIe and NVLink for both directions
# together; the rates here are for one direction. Rates that the sheets give with sparsity are halved.
_OLD = {"bf16": False, "fused": False}
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
        _device("rtx-3090", "GeForce RTX 3090", 24, 71, 35.6, 936, 32),
        _device("rtx-4090", "GeForce RTX 4090", 24, 165, 82.6, 1008, 32),
        _device("a10", "A10", 24, 125, 31.2, 600, 32),
        _device("a10g", "A10G", 24, 70, 35, 600, 32),
        _device("a30", "A30", 24, 165, 10.3, 933, 32),
        _device("l4", "L4", 24, 121, 30.3, 300, 32),
        _device("a40", "A40", 48, 150, 37.4, 696, 32),
        _device("a6000", "RTX A6000", 48, 155, 38.7, 768, 32),
        _device("rtx-6000-ada", "RTX 6000 Ada Generation", 48, 364, 91.1, 960, 32),
        _device("l40", "L40", 48, 181, 90.5, 864, 32),
        _device("l40s", "L40S", 48, 362, 91.6, 864, 32),
        _device("a100-40gb", "A100-SXM4-40GB", 40, 312, 19.5, 1555, 32, 300),
        _device("a100-40gb-pcie", "A100-PCIE-40GB", 40, 312, 19.5, 1555, 32),
        _device("a100-80gb", "A100-SXM4-80GB", 80, 312, 19.5, 2039, 32, 300),
        _device("a100-80gb-pcie", "A100 80GB PCIe; A100-PCIE-80GB", 80, 312, 19.5, 1935, 32),
        _device("h100-80gb", "H100 80GB HBM3", 80, 989, 67, 3350, 64, 450),
        _device("h100-80gb-pcie", "H100 PCIe", 80, 756, 51, 2000, 64),
        _device("h100-nvl", "H100 NVL", 94, 835, 60, 3900, 64),
        _device("gh200", "GH200 480GB", 96, 989, 67, 4000, 64),
        _device("h200", "H200", 141, 989, 67, 4800, 64, 450),
        _device("h200-nvl", "H200 NVL", 141, 835, 60, 4800, 64),
        _device("b200", "B200", 180, 2250, 75, 8000, 64, 900),
    )
}
_SLICES = {"a30": 4}
"""Number of compute slices into which MIG divides a card, where it is not 7. Memory is divided into eighths."""

NETWORK = 0.8
"""Share of a network's listed bandwidth that collectives get: large trainings report 80 to 85 %."""
LINKS = 0.7
"""Share of the links' listed bytes a second that collectives get inside a node."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of ``nodes`` nodes with ``gpus`` GPUs each. ``network`` is the bytes a second that a node sends; None for
    one node. ``measured`` names the rates (``link``, ``network``) that collectives reached in a measurement; other rates
    are as listed. ``host_memory`` and ``disk`` are bytes of a node; None where they are not given."""

    gpus: int
    nodes: int = 1
    device: Device
    link: float
    network: float | None = None
    host_memory: int | None = None
    disk: int | None = None
    cpu: bool = False
    measured: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def context(self) -> int:
        """Bytes of a GPU that are in use before the first tensor; 0 for a CPU process."""
        return 0 if self.cpu else CONTEXT

    def rate(self, what: str) -> float:
        """Return the bytes a second that collectives get of ``link`` or ``network``: a share of a listed rate, all of a
        measured one."""
        listed = self.link if what == "link" else self.network or 0.0
        return listed if what in self.measured else listed * {"link": LINKS, "network": NETWORK}[what]

    @property
    def name(self) -> str:
        node = f"{self.gpus} x {self.device.name}"
        return node if self.nodes == 1 else f"{self.nodes} nodes of {node}"


def cluster(
    *,
    gpus: str = "1",
    nodes: str = "1",
    gpu: str | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    disk: str | None = None,
    interconnect: str | None = None,
    intra_node: str | None = None,
) -> Cluster:
    """Return the cluster that the flags describe.

    Raises:
        ConfigError: lists every value that is not an amount, not a known device, or impossible.
    """
    problems: list[str] = []

    def read(parse: Callable[[str, str], Parsed], text: str | None, key: str) -> Parsed | None:
        try:
            return parse(text, key) if text is not None else None
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    def number(text: str, key: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            problems.append(f"{key}: {text!r} is no number of {key[2:]}; give 1 or more.")
            return 1
        return int(text)

    count, machines = number(gpus, "--gpus"), number(nodes, "--nodes")
    memory = read(parse_bytes, gpu_memory, "--gpu_memory")
    host, room = read(parse_bytes, host_memory, "--host_memory"), read(parse_bytes, disk, "--disk")
    device = _choose(gpu, memory, problems)
    link = device.link
    if intra_node is not None:
        links = {"nvlink": device.link, "pcie": device.pcie}
        given = links.get(intra_node) or read(_rate, intra_node, "--intra_node")
        link = given or link
        if intra_node == "nvlink" and not device.nvlink:
            problems.append(
                f"--intra_node: {device.name} has no NVLink between all GPUs of a node. Say pcie, or give the rate, "
                "such as 64GB/s."
            )
    network = read(_rate, interconnect, "--interconnect")
    if machines > 1 and interconnect is None:
        problems.append(f"--interconnect: {machines} nodes need the network between them. Give it: 400Gbps.")
    if problems:
        raise ConfigError(problems)
    files = {"link": intra_node, "network": interconnect}
    measured = tuple(what for what, text in files.items() if text is not None and text.endswith(".json"))
    return Cluster(
        gpus=count, nodes=machines, device=device, link=link, network=network, host_memory=host, disk=room, measured=measured
    )


def _rate(text: str, key: str) -> float:
    """Return a rate, or read it from a file that ``scripts/allreduce_bench.py`` wrote: the bus bandwidth of the largest
    all-reduce."""
    if not text.endswith(".json"):
        return parse_rate(text, key)
    try:
        rows = [row for row in json.loads(Path(text).read_text())["rows"] if row["operation"] == "all_reduce"]
        found = float(max(rows, key=lambda row: row["bytes"])["bus_bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {text} is not a result of scripts/allreduce_bench.py: {error}.") from None
    if not 0 < found < math.inf:
        raise ConfigError(
            f"{key}: {text} says bus_bytes_per_s: {found:g} of its largest all_reduce, which is no rate; one rank alone sends "
            "nothing. Run scripts/allreduce_bench.py with 2 processes or more, or give the rate: 400Gbps."
        )
    return found


def processor() -> str:
    """Return the name of this machine's processor, where the kernel reports it, and its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else f"{platform.machine()} CPU"


def known(name: str) -> Device | None:
    """Return the device with a driver's name, such as ``NVIDIA A100-SXM4-80GB``; None where it is not in `DEVICES`.

    For a MIG instance, such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``, return the slice: its share of the compute slices and
    of the memory, linked by PCIe, since MIG instances reach no other GPU directly.
    """
    card, _, profile = name.removeprefix("NVIDIA ").partition(" MIG ")
    found = next((device for device in DEVICES.values() if card in device.drivers), None)
    if found is None or not profile:
        return found
    cut = re.fullmatch(r"(\d+)g\.(\d+)gb.*", profile)
    if cut is None:
        return None
    compute = int(cut[1]) / _SLICES.get(found.name, 7)
    memory = round(8 * int(cut[2]) * 10**9 / found.memory) / 8
    return replace(
        found, name=f"{found.name} MIG {profile}", memory=int(memory * found.memory), flops=compute * found.flops,
        fp32=compute * found.fp32, bandwidth=memory * found.bandwidth, link=found.pcie,
    )  # fmt: skip


def nearest(memory: int) -> Device:
    """Return the device with bf16 whose memory is closest to ``memory`` bytes."""
    recent = [device for device in DEVICES.values() if device.bf16]
    return min(recent, key=lambda d: (abs(d.memory - memory), d.name != "a100-80gb"))


def _choose(name: str | None, memory: int | None, problems: list[str]) -> Device:
    if name is not None and name.lower() not in DEVICES:
        problems.append(f"--gpu: {name!r} is not known here. Known: {', '.join(DEVICES)}. Another: give --gpu_memory alone.")
        return DEVICES["a100-80gb"]
    if name is not None:
        found = DEVICES[name.lower()]
        if memory is None:
            return found
        if memory > 1.1 * found.memory:
            problems.append(f"--gpu_memory: {memory / 1e9:.0f} GB, and a {found.name} has {found.memory / 1e9:.0f}.")
        return replace(found, memory=memory)
    if memory is None:
        return DEVICES["a100-80gb"]
    return nearest(memory).speed_of(f"{memory / 1e9:.0f} GB GPU", memory)
