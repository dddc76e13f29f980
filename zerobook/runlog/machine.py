"""Samples of the machine in the log, during the training: host memory, and GPUs if there are any.

A process that the kernel kills because the memory is full cannot write a last event. The last sample tells the next attempt how
full the memory was.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from zerobook.runlog.writer import RunLog
from zerobook.utils.terminal import say

CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
# Share of memory in use from which a warning is given.
FULL = 0.92
SECONDS = 30.0
# Variable from which torch 2.13 and versions before it read the CUDA allocator's settings. If it is not set, 2.13 reads
# PYTORCH_ALLOC_CONF.
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def sample() -> dict[str, Any]:
    """Return the state of the machine now, in bytes, shares and degrees Celsius.

    ``memory_used`` and ``memory_total`` are the host's, or those of the container or the job where its limit is lower; ``own``
    is the resident memory of this process and its children. ``allocator``: as `read_allocator` returns it.
    """
    used, total = _read_host_memory()
    resident = 0
    this_process = psutil.Process()
    for process in [this_process, *this_process.children(recursive=True)]:
        # A process may end after it was listed.
        with suppress(psutil.Error):
            resident += process.memory_info().rss
    return {
        "memory_used": used,
        "memory_total": total,
        "swap_used": psutil.swap_memory().used,
        "own": resident,
        "gpus": _read_gpus(),
        "allocator": read_allocator(),
    }


def _read_host_memory() -> tuple[int, float]:
    """Return (used, total) bytes of the memory that this process can use."""
    memory = psutil.virtual_memory()
    limit, folder = _read_memory_limit()
    if limit >= memory.total:
        return memory.total - memory.available, memory.total
    used = int(_read_text(folder / "memory.current") or 0)
    # The kernel frees cached files before it kills a process, so they do not count as used.
    cached = re.search(r"^inactive_file (\d+)$", _read_text(folder / "memory.stat"), re.MULTILINE)
    if cached is not None:
        used -= int(cached[1])
    return used, limit


def read_allocator() -> dict[str, int] | None:
    """Return the bytes that torch's CUDA allocator holds in this process; None if CUDA is not in use.

    ``allocated`` is used by tensors, and ``reserved`` was taken from the device for them. The difference is free for tensors
    that fit into its gaps. ``allocated_peak`` and ``reserved_peak`` are the maxima so far.
    """
    # A process that has not imported torch, or has not initialised CUDA, does neither for these figures.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    # A process uses one of the devices; the others have zeros.
    stats_of_devices = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    amounts = {}
    for name in ("allocated", "reserved"):
        for suffix, moment in (("", "current"), ("_peak", "peak")):
            key = f"{name}_bytes.all.{moment}"
            amounts[f"{name}{suffix}"] = sum(stats.get(key, 0) for stats in stats_of_devices)
    return amounts


def advise_on_full_gpu() -> str:
    """Return advice for a GPU without memory for another tensor, with the memory that torch's allocator held."""
    amounts = read_allocator()
    words = []
    if amounts is not None:
        reserved = amounts["reserved"] / 2**30
        allocated = amounts["allocated"] / 2**30
        words.append(f"torch had reserved {reserved:.1f} GiB, {allocated:.1f} GiB of it for tensors.")
    settings = os.environ.get(ALLOCATOR_VARIABLE, os.environ.get("PYTORCH_ALLOC_CONF", ""))
    if "expandable_segments:True" not in settings:
        words.append(
            f"If much is reserved and not used, start the run with {ALLOCATOR_VARIABLE}=expandable_segments:True: the "
            "allocator then leaves fewer gaps."
        )
    words.append(
        "Otherwise take a smaller --per_device_train_batch_size with more --gradient_accumulation_steps, "
        "--activation_checkpointing, or a strategy file that spreads more; zerobook plan says what fits."
    )
    return " ".join(words)


def describe_nearly_full(record: dict[str, Any]) -> str | None:
    """Return ``host memory 23.1 of 24.0 GiB`` if at least the share `FULL` was in use at a sample; else None."""
    if record["memory_used"] < FULL * record["memory_total"]:
        return None
    return f"host memory {record['memory_used'] / 2**30:.1f} of {record['memory_total'] / 2**30:.1f} GiB"


def _read_memory_limit() -> tuple[float, Path]:
    """Return the lowest memory limit of this process's cgroups (version 2), in bytes, and the folder of that cgroup.

    A cgroup limits the processes of the cgroups below it too. The limit of a container is in the top folder, and that of a
    Slurm job in a folder below it. Without any limit, it is infinite.
    """
    # The line of version 2 is ``0::`` with the path of the process's cgroup.
    path = re.search("^0::/(.*)$", _read_text(PROCESS_CGROUPS), re.MULTILINE)
    folder = CGROUPS / (path[1] if path else "")
    limits: list[tuple[float, Path]] = [(math.inf, CGROUPS)]
    for cgroup in (folder, *folder.parents):
        limit = _read_text(cgroup / "memory.max")
        # If there is no limit, the text is ``max``.
        if limit.isdigit():
            limits.append((int(limit), cgroup))
    return min(limits)


def _read_text(file: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _read_gpus() -> list[dict[str, Any]]:
    try:
        import pynvml
    except ImportError:
        return []
    gpus = []
    # A GPU that cannot be read, for example because it has fallen off the bus, ends the list.
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            gpus.append(
                {
                    "memory_used": memory.used,
                    "memory_total": memory.total,
                    "utilisation": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
                    "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
                }
            )
    return gpus


class Sampler:
    """Writes a ``machine`` event every ``seconds``, from a thread, until `stop`."""

    def __init__(self, log: RunLog, seconds: float = SECONDS):
        self.log = log
        self.seconds = seconds
        self._end = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="machine samples", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._write_sample()
            # The wait returns True, at once, when `stop` has set the event.
            if self._end.wait(self.seconds):
                return

    def _write_sample(self) -> None:
        record = sample()
        seq = self.log.event("machine", durable=False, **record)
        usage = describe_nearly_full(record)
        # The warning is repeated only after the memory was less full in between.
        if usage and not self._warned:
            self.log.event("memory_warning", parent=seq, reason=usage)
            say(
                f"WARNING: {usage} are in use. A process that runs out of memory is killed without a message: use fewer "
                "--dataloader_num_workers, less offload to host memory, or a machine with more.",
                file=sys.stderr,
            )
        self._warned = bool(usage)

    def stop(self) -> None:
        self._end.set()
        # A sample may hang, for example in the driver of a GPU. The run still ends, since the thread is a daemon.
        self._thread.join(timeout=5)
