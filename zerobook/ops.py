"""DeepSpeed's C++ ops: compiled ahead, and the locks that a killed compile leaves behind.

torch compiles an extension under a file named ``lock``. A compile that is killed leaves it there, and
every later process waits for it for ever without a word. The compiling process keeps the file
open, so a lock that no process has open is stale.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

OPS = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
}
"""Ops that the shipped strategy files use: offload, NVMe, collectives on a CPU, Adam on a GPU."""


def cache_root() -> Path:
    """Where torch keeps compiled extensions: ``$TORCH_EXTENSIONS_DIR``, else ``~/.cache/torch_extensions``."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def locks() -> list[Path]:
    """Lock files under the extensions' cache, stale or held."""
    root = cache_root()
    return sorted(root.glob("**/lock")) if root.is_dir() else []


def is_held(lock: Path) -> bool:
    """True while some process has the file open. Sees this user's processes (all, as root)."""
    wanted = lock.resolve()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if Path(os.readlink(descriptor)) == wanted:
                return True
        except OSError:
            continue
    return False


def clear_stale_locks() -> list[Path]:
    """Remove locks that no process holds; returns them, so that the caller can say so."""
    stale = [lock for lock in locks() if not is_held(lock)]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def compile_ops(wanted: Iterable[str] = tuple(OPS)) -> list[tuple[str, str]]:
    """Compile those of the ``wanted`` ops that this machine can use. Returns (op, what happened); prints a line before each.

    On a machine without a GPU the CPU variants are built. Already compiled ones load in a second.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for lock in clear_stale_locks():
        print(f"removed {lock}: left behind by a compile that was killed", flush=True)
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    results = []
    for op in wanted:
        builder = accelerator.create_op_builder(OPS[op])
        if builder is None or (op == "shm_comm" and accelerator.device_name() != "cpu"):
            continue
        if op == "fused_adam" and (accelerator.device_name() == "cpu" or shutil.which("nvcc") is None):
            continue
        if not builder.is_compatible(verbose=False):
            need = "install libaio-dev" if op == "async_io" else "not supported here"
            results.append((op, f"skipped: {need}"))
            continue
        print(f"compiling {op} (up to 3 minutes the first time) ...", flush=True)
        start = time.monotonic()
        try:
            builder.load(verbose=False)
            results.append((op, f"ready in {time.monotonic() - start:.0f} s"))
        except Exception as error:  # ninja, the compiler and the linker each raise their own
            results.append((op, f"FAILED: {str(error).splitlines()[0]}"))
        print(f"  {op}: {results[-1][1]}", flush=True)
    return results
