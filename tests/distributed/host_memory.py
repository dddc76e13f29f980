"""Runs a recipe up to its first step, and measures the memory of all its ranks while the model is loaded and prepared.

    accelerate launch ... host_memory.py recipes/NAME.py [flags]

Rank 0 reads the anonymous and shared memory of every rank 500 times a second: one weight is gathered for a few milliseconds.
Mapped files are page cache, and not counted. It writes ``host_memory.json`` into the output folder: bytes above those before
loading.
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from zerobook.models import load
from zerobook.strategy.fsdp import FullyShardedStrategy
from zerobook.strategy.zero import ZeroStrategy

SAMPLES_A_SECOND = 500
load_model = load.load_model


def held(process: int) -> int:
    """Return the bytes of anonymous and shared memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Meter(threading.Thread):
    """Keeps the peak of the ranks' memory since it was last asked."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ranks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(self.ranks, os.getpid())
        self.base = self.peak = self.sample()

    def sample(self) -> int:
        return sum(map(held, self.ranks))

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self.sample())
            time.sleep(1 / SAMPLES_A_SECOND)

    def read(self) -> dict[str, int]:
        """Return the peak and the present memory, above what it was at first."""
        now = self.sample()
        peak, self.peak = max(self.peak, now), now
        return {"peak": peak - self.base, "after": now - self.base}


meter: Meter | None = None
found: dict[str, dict[str, int]] = {}


def phase(name: str) -> None:
    """End a phase. Collective."""
    dist.barrier()
    if meter is not None:
        found[name] = meter.read()
    dist.barrier()


def measured_load(*args, **kwargs):
    global meter
    dist.barrier()
    counting = Meter()
    if dist.get_rank() == 0:
        meter = counting
        meter.start()
    dist.barrier()
    model = load_model(*args, **kwargs)
    phase("load")
    return model


def measured(kind):
    prepare = kind.prepare

    def measured_prepare(self, *args):
        prepare(self, *args)
        phase("prepare")
        if dist.get_rank() == 0:
            (Path(os.environ["ZEROBOOK_HOST_MEMORY"])).write_text(json.dumps(found))
        dist.barrier()
        os._exit(0)

    kind.prepare = measured_prepare


if __name__ == "__main__":
    load.load_model = measured_load
    for strategy in (FullyShardedStrategy, ZeroStrategy):
        measured(strategy)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
