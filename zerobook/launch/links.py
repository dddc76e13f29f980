"""Rates of the links between the processes of a run, measured before it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerobook.utils.units import size

PROBE_BYTES = 1 << 18
"""Size of the first messages."""
MOST_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Type of a device -> size of a message at most. NVLink sends 64 MiB in the time that some kernel launches take."""
SECONDS = 0.2
"""Seconds that a message may take over the slowest link."""
REPEATS = 3
"""Measurements of a link. It counts as slow only if all of them say so."""
SLOW_FACTOR = 4.0
"""A link is slow if another link of its kind is this many times as fast."""


Measurement = tuple[int, float, float]
"""What a rank has received: bytes, the fewest seconds in which they came, and the most seconds in which this process was ready
to run meanwhile, and the host's cores were busy."""


def measure_ring(device: torch.device, group: dist.ProcessGroup | None = None) -> Measurement:
    """Measure what comes from the rank before this one while all ranks send to the next one. Collective.

    Bandwidth-bound collectives send along such a ring.
    """
    # NCCL makes its communicator in the first collective of a group, in which all ranks have to take part. In an exchange
    # among an odd number of ranks, one of them waits for its turn.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    # NCCL connects two ranks at their first message, which would be measured as a slow one.
    _exchange(PROBE_BYTES, device, group)
    # All ranks send as many bytes as the slowest link takes in `SECONDS`.
    slowest = torch.tensor(_exchange(PROBE_BYTES, device, group), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    payload = int(min(max(PROBE_BYTES * SECONDS / slowest.item(), PROBE_BYTES), MOST_BYTES[device.type]))
    times = []
    core_waits = []
    for _ in range(REPEATS):
        waited_before = _core_wait()
        times.append(_exchange(payload, device, group))
        core_waits.append(_core_wait() - waited_before)
    return payload, min(times), max(core_waits)


def _core_wait() -> float:
    """Return the seconds that the threads of this process have waited for a core; 0 if the system does not count them."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end meanwhile.
        with suppress(OSError):
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def _exchange(payload: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Send bytes to the next rank and receive as many; return the seconds until they had come.

    Neighbours take turns, so that no link carries both directions at once: a host that sends slowly would receive slowly too,
    since its acknowledgements wait behind what it sends.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    sent = torch.zeros(payload, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    seconds = 0.0
    # In a ring of an odd number of ranks, the last one needs a turn of its own.
    for turn in range(2 + size % 2):
        dist.barrier(group)
        start = time.perf_counter()
        if _turn(rank, size) == turn:
            operation = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size)
        elif _turn((rank - 1) % size, size) == turn:
            operation = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
        else:
            continue
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
        # NCCL's wait returns before the bytes have come.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if operation.op is dist.irecv:
            seconds = time.perf_counter() - start
    return max(seconds, 1e-9)


def _turn(rank: int, size: int) -> int:
    """Return the turn in which a rank sends: no two neighbours of the ring have the same."""
    return 2 if size % 2 and rank == size - 1 else rank % 2


class Link(NamedTuple):
    """A link of the ring. ``rate``: bytes per second. ``free_rate``: without the time in which an end waited for a core."""

    sender: str
    receiver: str
    rate: float
    free_rate: float


def links(hosts: Sequence[str], measurements: Sequence[Sequence[float]]) -> tuple[list[Link], list[Link]]:
    """Return the links between hosts, and those inside of hosts.

    Args:
        hosts: the host of each rank.
        measurements: `measure_ring` of each rank.
    """
    between: list[Link] = []
    inside: list[Link] = []
    for rank, (payload, seconds, core_wait) in enumerate(measurements):
        # Rank 0 receives from the last rank.
        free_seconds = max(seconds - core_wait - measurements[rank - 1][2], 1e-9)
        link = Link(hosts[rank - 1], hosts[rank], payload / seconds, payload / free_seconds)
        if link.sender == link.receiver:
            inside.append(link)
        else:
            between.append(link)
    return between, inside


def warn_of_slow_links(links_of_kind: Sequence[Link]) -> list[str]:
    """Return a warning for each link that is much slower than the fastest of its kind, and not because a host was busy."""
    fastest_rate = max((link.rate for link in links_of_kind), default=0.0)
    warnings = []
    for link in links_of_kind:
        # Without the time in which a host's cores were busy: a busy host is no slow link.
        if link.free_rate * SLOW_FACTOR < fastest_rate:
            warnings.append(
                f"slow link: {link.sender} sends {speed(link.rate)} to {link.receiver}; the fastest link has "
                f"{speed(fastest_rate)}. Every step waits for the slowest link."
            )
    return warnings


def summary(between: Sequence[Link], inside: Sequence[Link]) -> str:
    """Return the slowest and the fastest link of each kind in one line.

    >>> summary([Link("a", "b", 1e9, 1e9), Link("b", "a", 2e9, 2e9)], [])
    'links between hosts: 8.00 Gbit/s to 16.0 Gbit/s'
    """
    kinds: Mapping[str, Sequence[Link]] = {"between hosts": between, "inside hosts": inside}
    spans = []
    for kind, links_of_kind in kinds.items():
        if links_of_kind:
            rates = [link.rate for link in links_of_kind]
            spans.append(f"{kind}: {speed(min(rates))} to {speed(max(rates))}")
    return f"links {', '.join(spans)}"


def speed(rate: float) -> str:
    """Return bytes per second as bits per second, as links are named.

    >>> speed(1.25e9), speed(1.25e6), speed(3e4)
    ('10.0 Gbit/s', '10.0 Mbit/s', '240 kbit/s')
    """
    return size(8 * rate).replace("B", "bit/s")
