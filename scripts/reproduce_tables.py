"""Run the published comparisons again on this machine and show both results side by side.

    python scripts/reproduce_tables.py --scale tiny                          two CPU processes, under 15 minutes
    python scripts/reproduce_tables.py --scale full --device_memory 24GB     GPUs, the published sizes

A  DDP against ZeRO-2 on two devices        B  a model that one device does not hold
C  memory of the ZeRO stages                D  traffic of the ZeRO stages
E  precision under FSDP and DeepSpeed       F  activation checkpointing
G  gradient accumulation
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerobook.plan.hardware import Cluster

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tables are not part of the installed package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("tiny", "full"), required=True)
    parser.add_argument("--tables", default="ABCDEFG", help="only these, such as ABC")
    parser.add_argument(
        "--device_memory", help="bytes of a process at most, such as 24GB; unset: 24GiB, or what tiny tables need"
    )
    parser.add_argument("--processes", type=int, help="at most; unset: 2 on a CPU, all GPUs")
    parser.add_argument("--out", type=Path, help="folder for the results; unset: docs/measured/ and benchmarks/results/")
    flags = parser.parse_args()

    from benchmarks.published import pages, suite
    from benchmarks.published.bench import Bench
    from zerobook.errors import ConfigError
    from zerobook.launch import ops

    try:
        machine, memory_budget = check(flags)
    except ConfigError as error:
        print(f"\n{error}\n", file=sys.stderr)
        return 2
    # Compile before the runs. In a run with a limit of memory, the compiler itself could reach the limit.
    failures = [outcome for _, outcome in ops.compile_ops() if outcome.startswith("FAILED")]
    if failures:
        print(f"\nDeepSpeed's ops could not be compiled: {'; '.join(failures)}\n", file=sys.stderr)
        return 2
    ranks = flags.processes or (2 if machine.cpu else machine.gpus)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, suite.progress() as show_progress:
        bench = Bench(Path(folder), flags.scale == "tiny", ranks, machine, memory_budget, show_progress)
        tables = suite.run(bench, flags.tables.upper())
    result = pages.record(tables, flags.scale, machine, ranks, seconds=time.monotonic() - start)
    pages.write(result, tables, flags.out or ROOT)
    return 1 if any(table.died for table in tables) else 0


def check(flags: argparse.Namespace) -> tuple[Cluster, int | None]:
    """Return this machine, and the memory of a device in bytes, None if ``--device_memory`` is not set.

    Raises:
        ConfigError: the flags cannot be used, or not on this machine.
    """
    from zerobook.cli.plan import here
    from zerobook.errors import ConfigError
    from zerobook.utils.units import parse_bytes

    letters = set(flags.tables.upper())
    if not letters or letters - set("ABCDEFG"):
        raise ConfigError(f"--tables: {flags.tables!r}: there are the tables A to G.")
    if letters != set("ABCDEFG") and flags.out is None:
        raise ConfigError(f"--tables {flags.tables}: docs/measured/ holds all of one run. Give --out FOLDER for a part.")
    if flags.processes is not None and flags.processes < 1:
        raise ConfigError(f"--processes: {flags.processes} is not a number of processes; give 1 or more.")
    machine = here(None if flags.processes is None else str(flags.processes))
    if machine.cpu and flags.scale == "full":
        raise ConfigError("--scale full: the published sizes want a GPU, and there is none here. Take --scale tiny.")
    memory_budget = parse_bytes(flags.device_memory, "--device_memory") if flags.device_memory else None
    return machine, memory_budget


if __name__ == "__main__":
    sys.exit(main())
