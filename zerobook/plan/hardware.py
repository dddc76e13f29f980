"""Hardware that a plan is made for: GPUs, nodes and the links between them. Imports nothing heavy."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from zerobook.errors import ConfigError
from zerobook.utils.devices import DEVICES, Device
from zerobook.utils.reading import read_json
from zerobook.utils.units import parse_bytes, parse_rate

Parsed = TypeVar("Parsed")

CONTEXT_BYTES = 800_000_000
"""Bytes of a GPU that are in use before the first tensor: CUDA's context, cuBLAS's workspace and NCCL's buffers. An
assumption, not a measurement of this project."""


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
    def kernels(self) -> str:
        """The device whose kernels a trace simulates."""
        return "cpu" if self.cpu else "cuda"

    @property
    def context_bytes(self) -> int:
        """Bytes of a GPU that are in use before the first tensor; 0 for a CPU process."""
        return 0 if self.cpu else CONTEXT_BYTES

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
        rows = [row for row in read_json(text)["rows"] if row["operation"] == "all_reduce"]
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


def nearest(memory: int) -> Device:
    """Return the device with bf16 whose memory is closest to ``memory`` bytes."""
    recent = [device for device in DEVICES.values() if device.bf16]
    return min(recent, key=lambda d: (abs(d.memory - memory), d.name != "a100-80gb"))


def _choose(name: str | None, memory: int | None, problems: list[str]) -> Device:
    if name is not None and name.lower() not in DEVICES:
        count = f" Did you mean --gpus {name}?" if str(name).isdecimal() else ""
        known = ", ".join(DEVICES)
        problems.append(f"--gpu: {name!r} is not known here.{count} Known: {known}. Another: give --gpu_memory alone.")
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
