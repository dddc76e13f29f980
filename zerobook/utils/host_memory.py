"""Host memory while weights are read and sharded: what the allocator keeps, and what copies of a model need."""

import ctypes
import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerobook.errors import ConfigError
from zerobook.utils.reading import read_safetensors_header, read_text
from zerobook.utils.units import counted

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of glibc's ``mallopt``."""
LARGE = 256 * 1024
"""Bytes from which a block is mapped on its own while weights are loaded."""
USUAL = 32 * 1024 * 1024
"""Bytes that glibc's own threshold grows to when large blocks are freed, and its maximum."""
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of an element of safetensors' dtypes; 1 for the others."""
LOADED = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of the dtypes that floats are loaded in; ``auto`` keeps the file's."""
CAP_IPC_LOCK = 14
"""Number of the capability with which Linux does not limit locked memory, see capabilities(7)."""


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock, so that it is never swapped out; None: any amount."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        status = read_text("/proc/self/status")
        users = read_text("/proc/self/uid_map")
    except OSError:
        return soft
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    is_unlimited = capabilities is not None and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1
    # In a user namespace of its own, the capability does not count.
    return None if is_unlimited and users.split() == ["0", "0", "4294967295"] else soft


@contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Let freed blocks of memory go back to the system, on Linux with glibc.

    While a model is loaded and sharded, every rank allocates and frees whole weights. glibc would keep them: after the first
    free of a large block it serves blocks of up to 32 MiB from its heap, where one live block keeps all below it. Thresholds
    that the user set for glibc stay as they are.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if _set_by_user(os.environ) or libc is None or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    # A threshold that is set stays: glibc no longer raises it when a large block is freed.
    libc.mallopt(M_MMAP_THRESHOLD, LARGE)
    # Give back what was freed before.
    libc.malloc_trim(ctypes.c_size_t(0))
    try:
        yield
    finally:
        libc.malloc_trim(ctypes.c_size_t(0))
        # The values that glibc would have reached, as training on a CPU allocates large blocks in every step.
        libc.mallopt(M_MMAP_THRESHOLD, USUAL)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * USUAL)


def _set_by_user(environment: Mapping[str, str]) -> bool:
    """Return whether the environment sets a threshold of glibc's allocator."""
    if environment.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}:
        return True
    return re.search("(mmap|trim)_threshold", environment.get("GLIBC_TUNABLES", "")) is not None


def weight_bytes(folder: Path, dtype: str) -> int:
    """Return the bytes of the weights in a folder's safetensors files once loaded, 0 if there are none.

    Args:
        dtype: that floats are loaded in: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the files' own.
    """
    total = 0
    loaded_width = LOADED.get(dtype)
    for file in folder.glob("model*.safetensors"):
        try:
            header: dict[str, Any] = json.loads(read_safetensors_header(file))
            header.pop("__metadata__", None)
            for entry in header.values():
                start, end = entry["data_offsets"]
                width = WIDTHS.get(entry["dtype"], 1)
                elements = (end - start) // width
                # 8-bit floats are quantised, and stay so.
                is_float = width > 1 and "F" in entry["dtype"]
                if is_float and loaded_width:
                    width = loaded_width
                total += elements * width
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file}: it is not a file of weights that can be read: {error}.") from None
    return total


def too_many_copies(folder: Path | None, dtype: str, copies: int) -> str | None:
    """Return a warning if ``copies`` copies of a model, each of another rank, exceed this host's free memory; else None."""
    import psutil

    copy_bytes = 0 if folder is None else weight_bytes(folder, dtype)
    free = psutil.virtual_memory().available
    if copy_bytes * copies <= free:
        return None
    return (
        f"host RAM: {counted(copies, 'rank')} on this host load a copy of the weights each, {copy_bytes / 1e9:.1f} GB x "
        f"{copies} = {copy_bytes * copies / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free. Use accelerate_configs/zero3.yaml, "
        "which shards the model while it is loaded, or start fewer ranks."
    )
