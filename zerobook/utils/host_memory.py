"""Host memory while weights are read and sharded: what may be locked, what the allocator keeps, and what copies need."""

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

# Parameters of glibc's ``mallopt``.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Size of a block, in bytes, from which glibc maps it on its own while weights are loaded, and unmaps it when it is freed.
_THRESHOLD_WHILE_LOADING = 256 * 1024
# The largest such size, to which glibc itself raises it when large blocks are freed.
_MAXIMUM_THRESHOLD = 32 * 1024 * 1024
# Bytes of an element of safetensors' dtypes; 1 for the others.
STORED_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
# Bytes of an element of the dtypes in which floats are loaded. ``auto``, which keeps the dtype of the file, is not listed.
LOADED_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# Number of the capability with which Linux does not limit locked memory, see capabilities(7).
CAP_IPC_LOCK = 14


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock, so that it is never swapped out; None: any amount."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        status = read_text("/proc/self/status")
        uid_map = read_text("/proc/self/uid_map")
    except OSError:
        return limit
    # CapEff has a bit for each capability of the process.
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    has_capability = capabilities is not None and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1
    # The capability counts only in the system's first user namespace, where all user ids are mapped to themselves. A rootless
    # container has another one.
    if has_capability and uid_map.split() == ["0", "0", "4294967295"]:
        return None
    return limit


@contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Return a context in which freed memory goes back to the system at once, on Linux with glibc.

    While a model is loaded and sharded, every rank allocates and frees complete weights. glibc would keep their memory: after
    a large block is freed for the first time, glibc takes blocks of up to 32 MiB from its heap, which shrinks only from its
    end. So one block in use keeps the memory of all blocks before it. Nothing changes if the user has set thresholds of glibc.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if _sets_threshold(os.environ) or libc is None or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    # A threshold that a program has set is not raised by glibc when a large block is freed.
    libc.mallopt(M_MMAP_THRESHOLD, _THRESHOLD_WHILE_LOADING)
    # Give back what was freed before.
    libc.malloc_trim(ctypes.c_size_t(0))
    try:
        yield
    finally:
        libc.malloc_trim(ctypes.c_size_t(0))
        # A training on a CPU allocates large blocks in every step, so glibc would raise its thresholds to these values.
        libc.mallopt(M_MMAP_THRESHOLD, _MAXIMUM_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * _MAXIMUM_THRESHOLD)


def _sets_threshold(environment: Mapping[str, str]) -> bool:
    """Return whether environment variables set a threshold of glibc's allocator."""
    if environment.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}:
        return True
    return re.search("(mmap|trim)_threshold", environment.get("GLIBC_TUNABLES", "")) is not None


def weight_bytes(folder: Path, dtype: str) -> int:
    """Return how many bytes the weights in a folder's safetensors files take once they are loaded; 0 if there are no files.

    Args:
        dtype: in which floats are loaded: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the dtype in the file.
    """
    total = 0
    for file in folder.glob("model*.safetensors"):
        try:
            header: dict[str, Any] = json.loads(read_safetensors_header(file))
            header.pop("__metadata__", None)
            for entry in header.values():
                total += _loaded_bytes(entry, LOADED_WIDTHS.get(dtype))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file}: it is not a file of weights that can be read: {error}.") from None
    return total


# Return the bytes of a tensor once it is loaded. ``entry`` describes it in the header. ``float_width`` is the bytes of a float
# in the dtype in which floats are loaded; None keeps the dtype of the file.
def _loaded_bytes(entry: dict[str, Any], float_width: int | None) -> int:
    start, end = entry["data_offsets"]
    width = STORED_WIDTHS.get(entry["dtype"], 1)
    elements = (end - start) // width
    # Floats of 8 bits are quantised weights, which are not converted.
    if float_width and width > 1 and "F" in entry["dtype"]:
        width = float_width
    return elements * width


def too_many_copies(folder: Path | None, dtype: str, copies: int) -> str | None:
    """Return a warning if this host's free memory is too small for ``copies`` ranks that each load the model; else None.

    Args:
        folder: the model's files; None for a model without files, whose copies take no memory here.
    """
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
