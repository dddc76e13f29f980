"""Measure the bandwidth between ranks: all-reduce, all-gather and reduce-scatter over sizes, on gloo or NCCL, one node or
several.

On one machine, the script starts its own processes; on several, start it on each with torchrun:

    python scripts/allreduce_bench.py --processes 2 --out links.json
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 scripts/allreduce_bench.py

Algorithm bandwidth is the size divided by the time. Bus bandwidth is what each link carries, whatever the number of ranks:
algorithm bandwidth times 2 (N - 1)/N for all-reduce, times (N - 1)/N for the others, whose size is that of the gathered
tensor (as NVIDIA's nccl-tests count). ``zerobook plan --interconnect links.json`` (or ``--intra_node``) uses the bus
bandwidth of the largest size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
BUS_FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Operation -> bus bandwidth / (algorithm bandwidth x (N - 1)/N)."""
CPU_MEGABYTES = (0.25, 1, 4, 16, 64)
# NCCL reaches its full rate only at hundreds of megabytes.
GPU_MEGABYTES = (*CPU_MEGABYTES, 256, 1024)
WARM_UP_ROUNDS = 2


def measure(operation: str, size: int, device: torch.device, rounds: int) -> float:
    """Return the median seconds of one call on ``size`` bytes of fp32, on the slowest rank. All ranks call this."""
    ranks = dist.get_world_size()
    # A number of elements that can be divided by the ranks.
    elements = max(size // 4 // ranks, 1) * ranks
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    call = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }[operation]
    times = []
    for turn in range(WARM_UP_ROUNDS + rounds):
        # The ranks begin together, so that none measures how long it waits for another.
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        if turn >= WARM_UP_ROUNDS:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what was started on it. A CPU does its work before the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_row(operation: str, megabytes: float, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the time and the bandwidths of an operation on a tensor of this size. All ranks call this."""
    size = int(megabytes * 1e6)
    seconds = measure(operation, size, device, rounds)
    ranks = dist.get_world_size()
    return {
        "operation": operation,
        "bytes": size,
        "seconds": seconds,
        "algorithm_bytes_per_s": size / seconds,
        "bus_bytes_per_s": size / seconds * BUS_FACTORS[operation] * (ranks - 1) / ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="where torchrun did not start it: processes to start")
    parser.add_argument("--megabytes", type=float, nargs="+", help="sizes of the whole tensor (0.25 to 64; on GPUs to 1024)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    flags = parser.parse_args()
    # torchrun sets RANK. Without it, this process starts the ranks, with the same flags.
    if "RANK" not in os.environ:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={flags.processes}", __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*line, *sys.argv[1:]], env=environment, check=False).returncode)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    default_sizes = GPU_MEGABYTES if on_gpu else CPU_MEGABYTES
    rows = []
    for operation in OPERATIONS:
        for megabytes in flags.megabytes or default_sizes:
            row = measure_row(operation, megabytes, device, flags.rounds)
            rows.append(row)
            if dist.get_rank() == 0:
                print(
                    f"{operation:15} {megabytes:>8g} MB {row['seconds'] * 1e3:>9.2f} ms   "
                    f"algorithm {row['algorithm_bytes_per_s'] / 1e9:>7.2f} GB/s   bus {row['bus_bytes_per_s'] / 1e9:>7.2f} GB/s"
                )
    if dist.get_rank() == 0 and flags.out:
        result = {
            "date": str(date.today()),
            "torch": torch.__version__,
            "backend": dist.get_backend(),
            "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
            "ranks": dist.get_world_size(),
            "nodes": dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"]),
            "rows": rows,
        }
        flags.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {flags.out}")
    # No rank ends before rank 0 has written the file.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
