"""The machine that a page is measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the name of this machine's processor, where the kernel reports it, and its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return f"{platform.machine()} CPU"
