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
    asked = parser.parse_args()

    from benchmarks.published import pages, suite
    from benchmarks.published.bench import Bench
    from zerobook.cli.plan import here
    from zerobook.errors import ConfigError
    from zerobook.launch import ops
    from zerobook.utils.units import parse_bytes

    try:
        wanted = set(asked.tables.upper())
        if not wanted or wanted - set("ABCDEFG"):
            raise ConfigError(f"--tables: {asked.tables!r}: there are the tables A to G.")
        if wanted != set("ABCDEFG") and asked.out is None:
            raise ConfigError(f"--tables {asked.tables}: docs/measured/ holds all of one run. Give --out FOLDER for a part.")
        if asked.processes is not None and asked.processes < 1:
            raise ConfigError(f"--processes: {asked.processes} is not a number of processes; give 1 or more.")
        where = here(None if asked.processes is None else str(asked.processes))
        if where.cpu and asked.scale == "full":
            raise ConfigError("--scale full: the published sizes want a GPU, and there is none here. Take --scale tiny.")
        budget = parse_bytes(asked.device_memory, "--device_memory") if asked.device_memory else None
    except ConfigError as error:
        print(f"\n{error}\n", file=sys.stderr)
        return 2
    failed = [what for _, what in ops.compile_ops() if what.startswith("FAILED")]
    if failed:  # under a budget, the compiler itself could fail for lack of memory, which says nothing about the run
        print(f"\nDeepSpeed's ops could not be compiled: {'; '.join(failed)}\n", file=sys.stderr)
        return 2
    ranks = asked.processes or (2 if where.cpu else where.gpus)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, suite.progress() as say:
        bench = Bench(Path(folder), asked.scale == "tiny", ranks, where, budget, say)
        tables = suite.run(bench, asked.tables.upper())
    result = pages.record(tables, asked.scale, where, ranks, seconds=time.monotonic() - start)
    pages.write(result, tables, asked.out or ROOT)
    return 1 if any(table.died for table in tables) else 0


if __name__ == "__main__":
    sys.exit(main())
