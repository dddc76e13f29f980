"""The machines that a plan is for. Imports nothing heavy."""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from zerobook.errors import ConfigError
from zerobook.plan.units import parse_bytes, parse_rate

CONTEXT = 800_000_000
"""Bytes of a GPU that are gone before the first tensor: CUDA's context, cuBLAS's workspace and NCCL's buffers. An assumption,
not a measurement of this project."""


@dataclass(frozen=True)
class Device:
    """A GPU as its maker states it: bytes of memory, dense operations a second in half precision, bytes a second of memory.

    ``link`` is bytes a second to the other GPUs of its node, each way. ``fused`` says that flash attention runs on it.
    ``like`` is the device whose speed stands for this one's, where its own is not known.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    bf16: bool = True
    fused: bool = True
    like: str = ""


def _device(name: str, gb: int, tflops: float, gbps: float, link: float, **facts: bool) -> Device:
    return Device(name, gb * 10**9, tflops * 1e12, gbps * 1e9, link * 1e9, **facts)


# NVIDIA's data sheets. NVLink is given there for both directions together and halved here; 32 is PCIe 4 with 16 lanes.
DEVICES = {
    device.name: device
    for device in (
        _device("v100-16gb", 16, 125, 900, 150, bf16=False, fused=False),
        _device("v100-32gb", 32, 125, 900, 150, bf16=False, fused=False),
        _device("titan-rtx", 24, 130, 672, 50, bf16=False, fused=False),
        _device("t4", 16, 65, 320, 16, bf16=False, fused=False),
        _device("rtx-3090", 24, 71, 936, 28),
        _device("rtx-4090", 24, 165, 1008, 32),
        _device("a10", 24, 125, 600, 32),
        _device("l4", 24, 121, 300, 32),
        _device("a6000", 48, 155, 768, 56),
        _device("l40s", 48, 362, 864, 32),
        _device("a100-40gb", 40, 312, 1555, 300),
        _device("a100-80gb", 80, 312, 2039, 300),
        _device("h100-80gb", 80, 989, 3350, 450),
        _device("h200", 141, 989, 4800, 450),
        _device("b200", 180, 2250, 8000, 900),
    )
}

PCIE = 32e9
"""Bytes a second between GPUs without NVLink: PCIe 4 with 16 lanes, one way."""
NETWORK = 0.8
"""Of a network's listed bandwidth, what collectives get: 80 to 85 % is what large trainings report."""
LINKS = 0.7
"""Of the links' listed bytes a second, what collectives get inside a node."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``gpus`` a node on ``nodes`` nodes. ``network`` is bytes a second that a node sends; None for one node. Of both rates
    ``measured`` names those that collectives really got; others are as listed. Memory is in bytes, ``host_memory`` and
    ``disk`` a node's; None where nobody said."""

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
        """Bytes of a GPU that are gone before the first tensor; a CPU process has none."""
        return 0 if self.cpu else CONTEXT

    def rate(self, what: str) -> float:
        """Bytes a second that collectives get of ``link`` or ``network``: some of what is listed, all of what was measured."""
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
    """What the flags describe.

    Raises:
        ConfigError: with everything at once that is no amount, no device, or impossible.
    """
    problems: list[str] = []

    def read(parse, text, key):
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
        links = {"nvlink": device.link, "pcie": min(device.link, PCIE)}
        given = links.get(intra_node) or read(_rate, intra_node, "--intra_node")
        link = given or link
        if intra_node == "nvlink" and device.link <= PCIE:
            problems.append(f"--intra_node: {device.name} has no NVLink. Say pcie, or give the rate, such as 64GB/s.")
    network = read(_rate, interconnect, "--interconnect")
    if machines > 1 and interconnect is None:
        problems.append(f"--interconnect: {machines} nodes, and nothing is said of the network between. Give it: 400Gbps.")
    if problems:
        raise ConfigError(problems)
    files = {"link": intra_node, "network": interconnect}
    measured = tuple(what for what, text in files.items() if text is not None and text.endswith(".json"))
    return Cluster(
        gpus=count, nodes=machines, device=device, link=link, network=network, host_memory=host, disk=room, measured=measured
    )


def _rate(text: str, key: str) -> float:
    """A rate, or a file that ``scripts/allreduce_bench.py`` wrote: the bus bandwidth of its largest all-reduce."""
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
    """This machine's processor by name, where the kernel tells it, and architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else f"{platform.machine()} CPU"


def known(name: str) -> Device | None:
    """The device that a driver's name means, as ``NVIDIA A100-SXM4-80GB``; None where none of ours is."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [key for key in DEVICES if set(key.split("-")) <= words]
    return DEVICES[max(fitting, key=len)] if fitting else None


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
        return Device(found.name, memory, found.flops, found.bandwidth, found.link, found.bf16, found.fused)
    if memory is None:
        return DEVICES["a100-80gb"]
    recent = [device for device in DEVICES.values() if device.bf16]
    like = min(recent, key=lambda d: (abs(d.memory - memory), d.name != "a100-80gb"))
    return Device(f"{memory / 1e9:.0f} GB GPU", memory, like.flops, like.bandwidth, like.link, like=like.name)
