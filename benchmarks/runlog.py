"""Cost of the runlog, in CPU or wall-clock seconds of this machine. Every figure is a median of several rounds.

    python benchmarks/runlog.py [--out benchmarks/results/runlog.json]

- a step: the spike monitor and its line in the log, on rank 0, at a log point every 10 steps (CPU time);
- `zerobook runlog status` on a million events, from the shell, against starting Python and importing torch;
- `zerobook runlog report` of a million steps, logged every 10;
- an event that waits for the disk.

Takes about three minutes and 1 GB of disk, without training.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from zerobook.runlog.jsonl import encode
from zerobook.runlog.records import StepRecord
from zerobook.runlog.writer import EVENTS, STEPS, RunLog
from zerobook.training.spikes import SpikeHandler

ROUNDS = 5
MILLION = 1_000_000
BATCH = 64
"""Samples of a step, whose ids are in the log."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    known = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"step": per_step(Path(folder) / "steps"), "durable_event_s": durable(Path(folder) / "durable")}
        many, long = Path(folder) / "events", Path(folder) / "steps-of-a-long-run"
        make_long_log(many, every=1, steps=1)
        found["status_of_a_million_events_s"] = timed("-m", "zerobook.cli.main", "runlog", "status", str(many))
        found["python_and_torch_alone_s"] = timed("-c", "import torch")
        make_long_log(long, every=10, steps=MILLION)
        found["report_of_a_million_steps_s"] = timed("-m", "zerobook.cli.main", "runlog", "report", str(long))
        found["log_bytes"] = {name: (long / "runlog" / name).stat().st_size for name in (EVENTS, STEPS)}
    record = {"date": str(date.today()), "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
              "python": platform.python_version(), "rounds": ROUNDS, **found}  # fmt: skip
    print(json.dumps(record, indent=1))
    if known.out:
        known.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def record(step: int, rng: random.Random) -> StepRecord:
    ids = [rng.randrange(10**6) for _ in range(BATCH)]
    return StepRecord(
        step=step, loss=2.0 + rng.gauss(0, 0.05), grad_norm=1.0 + abs(rng.gauss(0, 0.1)), learning_rate=1e-4, tokens=4096,
        cursor=(step * BATCH - BATCH, step * BATCH), ids=ids,
    )  # fmt: skip


def per_step(folder: Path) -> dict[str, float]:
    """Return the microseconds of CPU time a step that rank 0 spends on the log and the watch."""
    strategy = SimpleNamespace(is_main=True, plan=SimpleNamespace(precision="no"), on_main=lambda work: work())
    manager = SimpleNamespace(saver=SimpleNamespace(writing_step=None))
    config = SimpleNamespace(
        on_spike="rollback", max_rollbacks=8, rollback_lr_factor=0.5, policy=None, expect=[], learning_rate=1e-3
    )
    rng = random.Random(0)
    watching, writing = [], []
    for number in range(ROUNDS):
        log = RunLog(folder / str(number))
        watch = SpikeHandler(config, strategy, manager, log, print, detector={}, policy={})  # type: ignore[arg-type]
        blocks = [[record(step, rng) for step in range(first, first + 10)] for first in range(1, 5001, 10)]
        start = time.process_time()
        for block in blocks:
            watch.see(block)
        watching.append((time.process_time() - start) / 5000)
        start = time.process_time()
        for block in blocks:
            log.steps([taken.to_json() for taken in block])
            log.event("metrics", durable=False, steps=[block[0].step, block[-1].step], loss=2.0, mean_loss=2.0,
                      grad_norm=1.0, learning_rate=1e-4, tokens_per_second=1e4, data_wait=0.0)  # fmt: skip
        writing.append((time.process_time() - start) / 5000)
        log.close()
    return {"watch_us": round(statistics.median(watching) * 1e6, 1), "log_us": round(statistics.median(writing) * 1e6, 1)}


def durable(folder: Path) -> float:
    log = RunLog(folder)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        log.event("decision", measure="none")
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 6)


def make_long_log(folder: Path, *, every: int, steps: int) -> None:
    """Write a log of a million steps: an event every ``every`` steps, and the records of the first ``steps`` steps."""
    log = RunLog(folder)
    log.event("run_start", step=0, config={}, versions={}, live={"strategy": "DDP", "world_size": 8}, batch="64 samples a step",
              total_steps=MILLION)  # fmt: skip
    log.close()
    rng = random.Random(0)
    common = {"attempt": 1, "branch": 0, "utc": "2026-01-01T00:00:00.000+00:00"}
    with (folder / "runlog" / EVENTS).open("ab") as events, (folder / "runlog" / STEPS).open("ab") as records:
        for step in tqdm(range(1, MILLION + 1), desc="a long log", unit="step"):
            if step % every == 0:
                event = {"seq": step // every + 1, **common, "type": "metrics", "monotonic": float(step),
                         "steps": [step - every + 1, step], "loss": 2.0, "mean_loss": 2.0, "grad_norm": 1.0,
                         "learning_rate": 1e-4, "tokens_per_second": 1e4, "data_wait": 0.0}  # fmt: skip
                events.write(encode(event))
            if step <= steps:
                records.write(encode({"attempt": 1, "branch": 0} | record(step, rng).to_json()))


def timed(*words: str) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 3)


if __name__ == "__main__":
    sys.exit(main())
