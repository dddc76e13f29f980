"""Memory that the allocator keeps, for processes of their own; it imports torch alone, and starts sooner so."""

from __future__ import annotations

from pathlib import Path

import torch


def anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))


def kept() -> int:
    """Return the bytes that this process keeps after it has freed many blocks of 1 MiB with small live ones among them."""
    before = anonymous()
    blocks = []
    small = []
    for _ in range(200):
        blocks.append(torch.ones(2**18))
        small.append(torch.ones(8000))  # too large for the gaps of a heap
    blocks.clear()
    return anonymous() - before
