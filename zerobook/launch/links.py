"""Rates of the links between the processes of a run, measured before the training."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerobook.utils.units import size

# Size of the first messages.
PROBE_BYTES = 1 << 18
# Type of a device -> the largest size of a message. Over NVLink, 64 MiB take no longer than some kernel launches.
MOST_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
# Seconds that a message may take over the slowest link.
MESSAGE_S = 0.2
# Measurements of a link. The best of them counts.
REPEATS = 3
# A link is slow if another link of its kind is this many times as fast.
SLOW_FACTOR = 4.0


# What a rank has measured as the receiver: the bytes of a message, the fewest seconds that it took, and the most seconds that
# the rank waited for a core meanwhile.
Measurement = tuple[int, float, float]


def measure_ring(device: torch.device, group: dist.ProcessGroup | None = None) -> Measurement:
    """Let every rank send to the next one, and measure what this rank receives from the rank before it. Collective.

    Collectives whose time depends on the bandwidth send along such a ring.
    """
    # NCCL makes its communicator in the first collective of a group, in which all ranks have to take part. In an exchange
    # among an odd number of ranks, one of them waits for its turn.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    # The first message of two ranks is slow, since NCCL connects them. So it is not measured.
    _exchange(PROBE_BYTES, device, group)
    # All ranks then send as many bytes as the slowest link sends in `MESSAGE_S` seconds.
    slowest = torch.tensor(_exchange(PROBE_BYTES, device, group), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    payload = int(min(max(PROBE_BYTES * MESSAGE_S / slowest.item(), PROBE_BYTES), MOST_BYTES[device.type]))
    times = []
    core_waits = []
    for _ in range(REPEATS):
        wait_before = _read_core_wait()
        times.append(_exchange(payload, device, group))
        core_waits.append(_read_core_wait() - wait_before)
    return payload, min(times), max(core_waits)


def _read_core_wait() -> float:
    """Return the seconds that the threads of this process have waited for a core; 0 if the system does not count them."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end while the loop runs. The second number is the time on a queue for a core.
        with suppress(OSError):
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def _exchange(payload: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Send ``payload`` bytes to the next rank, receive as many from the rank before, and return the seconds of the receive.

    Neighbours take turns, so that no host sends and receives at once. A host that sends slowly would also receive slowly, since
    its acknowledgements would wait behind the bytes that it sends.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    sent = torch.zeros(payload, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    seconds = 0.0
    # In a ring of an odd number of ranks, the last rank has a third turn.
    for turn in range(2 + size % 2):
        dist.barrier(group)
        start = time.perf_counter()
        if _find_turn(rank, size) == turn:
            operation = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size)
        elif _find_turn((rank - 1) % size, size) == turn:
            operation = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
        else:
            continue
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
        # With NCCL, wait returns before the bytes have come.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if operation.op is dist.irecv:
            seconds = time.perf_counter() - start
    return max(seconds, 1e-9)


def _find_turn(rank: int, size: int) -> int:
    """Return the turn (0, 1 or 2) in which a rank sends. Neighbours in the ring have different turns."""
    return 2 if size % 2 and rank == size - 1 else rank % 2


class Link(NamedTuple):
    """A link of the ring.

    Attributes:
        rate: bytes per second.
        free_rate: bytes per second without the time in which the sender or the receiver waited for a core.
    """

    sender: str
    receiver: str
    rate: float
    free_rate: float


def build_links(hosts: Sequence[str], measurements: Sequence[Sequence[float]]) -> tuple[list[Link], list[Link]]:
    """Return (the links between hosts, the links inside hosts), each with its rates.

    Args:
        hosts: the host of each rank.
        measurements: the result of `measure_ring` of each rank.
    """
    between: list[Link] = []
    inside: list[Link] = []
    for rank, (payload, seconds, core_wait) in enumerate(measurements):
        # Rank 0 receives from the last rank, which has the index -1.
        sender = rank - 1
        sender_core_wait = measurements[sender][2]
        free_seconds = max(seconds - core_wait - sender_core_wait, 1e-9)
        link = Link(hosts[sender], hosts[rank], payload / seconds, payload / free_seconds)
        if link.sender == link.receiver:
            inside.append(link)
        else:
            between.append(link)
    return between, inside


def warn_of_slow_links(links_of_kind: Sequence[Link]) -> list[str]:
    """Return a warning for each link that is much slower than the fastest link of its kind.

    Args:
        links_of_kind: all links between hosts, or all links inside hosts.
    """
    fastest_rate = max((link.rate for link in links_of_kind), default=0.0)
    warnings = []
    for link in links_of_kind:
        # Compare the rate without the time in which a host's cores were busy, so that a busy host is not reported.
        if link.free_rate * SLOW_FACTOR < fastest_rate:
            warnings.append(
                f"slow link: {link.sender} sends {format_rate(link.rate)} to {link.receiver}; the fastest link has "
                f"{format_rate(fastest_rate)}. Every step waits for the slowest link."
            )
    return warnings


def summarize(between: Sequence[Link], inside: Sequence[Link]) -> str:
    """Return one line with the rates of the slowest and the fastest link of each kind.

    >>> summarize([Link("a", "b", 1e9, 1e9), Link("b", "a", 2e9, 2e9)], [])
    'links between hosts: 8.00 Gbit/s to 16.0 Gbit/s'
    """
    kinds: Mapping[str, Sequence[Link]] = {"between hosts": between, "inside hosts": inside}
    spans = []
    for kind, links_of_kind in kinds.items():
        if links_of_kind:
            rates = [link.rate for link in links_of_kind]
            spans.append(f"{kind}: {format_rate(min(rates))} to {format_rate(max(rates))}")
    return f"links {', '.join(spans)}"


def format_rate(rate: float) -> str:
    """Return a rate in bytes per second as a text in bits per second, the usual unit of links.

    >>> format_rate(1.25e9), format_rate(1.25e6), format_rate(3e4)
    ('10.0 Gbit/s', '10.0 Mbit/s', '240 kbit/s')
    """
    # `size` writes a number of bytes, such as 10.0 GB.
    return size(8 * rate).replace("B", "bit/s")
