"""Hardware that a plan is made for: GPUs, nodes and the links between them. Imports nothing heavy."""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from zerobook.errors import ConfigError
from zerobook.utils.devices import DEVICES, Device
from zerobook.utils.reading import read_json
from zerobook.utils.units import parse_bytes, parse_rate

Parsed = TypeVar("Parsed")


# Share of a network's listed bandwidth that collectives reach.
NETWORK = 0.64
# Share of the listed bandwidth of the links inside a node that collectives reach.
LINKS = 0.66
# Bytes per second that collectives reach over PCIe if GPUs can only send through the host's memory.
THROUGH_HOST = 3.5e9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of ``nodes`` nodes with ``gpus`` GPUs each. Rates are bytes per second."""

    gpus: int
    nodes: int = 1
    device: Device
    # rate between the GPUs of a node
    link: float
    # rate at which a node sends to other nodes; None for one node
    network: float | None = None
    # bytes of a node's RAM and disk; None: not known, so that they are not checked
    host_memory: int | None = None
    disk: int | None = None
    # CPU processes in the place of GPUs
    cpu: bool = False
    # names of the rates, "link" or "network", that were measured with collectives; the others are the hardware's listed rates
    measured: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def kernels(self) -> str:
        """The device whose kernels a trace simulates: ``cpu``, ``cuda``, or ``cuda without flash`` for older GPUs."""
        if self.cpu:
            return "cpu"
        return "cuda" if self.device.fused else "cuda without flash"

    @property
    def half_precision(self) -> str:
        return "bf16" if self.device.bf16 else "fp16"

    def rate(self, name: str) -> float:
        """Return the bytes per second that collectives reach.

        Args:
            name: ``link`` or ``network``.
        """
        rate = self.link
        share = LINKS
        if name == "network":
            rate = self.network or 0.0
            share = NETWORK
        # A measured rate is what collectives reach already.
        if name in self.measured:
            return rate
        # A rate above that of PCIe is the rate of an NVLink bridge, and its traffic does not go through the host's memory.
        if name == "link" and not self.device.peer_to_peer and rate <= self.device.pcie:
            return min(rate * share, THROUGH_HOST)
        return rate * share

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

    # A value that is refused is replaced by a default, so that all problems are reported at once.
    gpu_count = read(_parse_number, gpus, "--gpus") or 1
    node_count = read(_parse_number, nodes, "--nodes") or 1
    gpu_memory_bytes = read(parse_bytes, gpu_memory, "--gpu_memory")
    host_memory_bytes = read(parse_bytes, host_memory, "--host_memory")
    disk_bytes = read(parse_bytes, disk, "--disk")
    network = read(_parse_or_read_rate, interconnect, "--interconnect")
    device = _choose_device(gpu, gpu_memory_bytes, problems)
    link = device.link
    if intra_node == "pcie":
        link = device.pcie
    elif intra_node == "nvlink" and not device.nvlink:
        problems.append(
            f"--intra_node: {device.name} has no NVLink between all GPUs of a node. Say pcie, or give the rate, such as 64GB/s."
        )
    elif intra_node != "nvlink":
        link = read(_parse_or_read_rate, intra_node, "--intra_node") or link
    if node_count > 1 and interconnect is None:
        problems.append(f"--interconnect: {node_count} nodes need the network between them. Give it: 400Gbps.")
    if problems:
        raise ConfigError(problems)
    measured = []
    for name, text in (("link", intra_node), ("network", interconnect)):
        if text is not None and text.endswith(".json"):
            measured.append(name)
    return Cluster(
        gpus=gpu_count,
        nodes=node_count,
        device=device,
        link=link,
        network=network,
        host_memory=host_memory_bytes,
        disk=disk_bytes,
        measured=tuple(measured),
    )


def _parse_number(text: str, key: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}: {text!r} is not a number of {key[2:]}; give 1 or more.")
    return int(text)


def _parse_or_read_rate(text: str, key: str) -> float:
    """Return the bytes per second of a text such as ``400Gbps``, or of a JSON file that ``scripts/allreduce_bench.py`` wrote:
    the bus bandwidth of its largest all-reduce."""
    if not text.endswith(".json"):
        return parse_rate(text, key)
    try:
        all_reduces = [row for row in read_json(text)["rows"] if row["operation"] == "all_reduce"]
        # The largest message shows the link's rate. With small ones, the latency counts more.
        rate = float(max(all_reduces, key=lambda row: row["bytes"])["bus_bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {text} is not a result of scripts/allreduce_bench.py: {error}.") from None
    # One rank alone sends nothing.
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"{key}: {text} says bus_bytes_per_s: {rate:g} of its largest all_reduce, which is not a rate; a single rank sends "
            "nothing. Run scripts/allreduce_bench.py with 2 processes or more, or give the rate: 400Gbps."
        )
    return rate


def nearest(memory: int) -> Device:
    """Return the device with bf16 whose memory is closest to ``memory`` bytes."""
    # GPUs with the same listed memory differ by some hundred megabytes, so differences are rounded to GB.
    return min(
        (device for device in DEVICES.values() if device.bf16),
        key=lambda device: (round(abs(device.memory - memory) / 1e9), device.name != "a100-80gb"),
    )


def _choose_device(name: str | None, memory: int | None, problems: list[str]) -> Device:
    """Return the device that ``--gpu`` and ``--gpu_memory`` describe. If they are refused, add to ``problems``, and return the
    default device, with which the other flags are checked."""
    default = DEVICES["a100-80gb"]
    if name is None:
        return default if memory is None else nearest(memory).speed_of(f"{memory / 1e9:.0f} GB GPU", memory)
    hyphenated = name.lower().replace(" ", "-")
    # Part of a name is enough if it is in one name only: 4090 is, and a100 is in the names of several devices.
    words = set(hyphenated.split("-"))
    candidates = [device_name for device_name in DEVICES if words <= set(device_name.split("-"))]
    if hyphenated in DEVICES:
        candidates = [hyphenated]
    if len(candidates) != 1:
        hint = f" Did you mean --gpus {name}?" if name.isdecimal() else ""
        similar = candidates or difflib.get_close_matches(hyphenated, DEVICES, n=5) or DEVICES
        problems.append(
            f"--gpu: {name!r} is not the name of one GPU.{hint} Known: {', '.join(similar)}. Another: give --gpu_memory alone."
        )
        return default
    device = DEVICES[candidates[0]]
    if memory is None:
        return device
    # A partition of a GPU has less memory than the GPU, and none has more.
    if memory > 1.1 * device.memory:
        problems.append(f"--gpu_memory: {memory / 1e9:.0f} GB, and a {device.name} has {device.memory / 1e9:.0f}.")
    return replace(device, memory=memory)
