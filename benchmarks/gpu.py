"""Measure what one GPU can show, without a network: a list of cases, each recorded when it ends.

    python benchmarks/gpu.py [all|PART ...] [--minutes 9] [--only REGEX] [--out FOLDER]

machine     versions, measured rates of matrix products and copies
probe       collectives of NCCL with one rank; which backend of torch's attention takes which dtypes, grouped heads and masks;
            attention at lengths that are new to the process; the loss at 16,384 tokens and a vocabulary of 128,256; where a
            step waits for the GPU
parity      fp32 training on the GPU under every strategy that one GPU has, against one process on the CPU: with evaluation,
            generation, a rollback between the steps, and a resume
models      tokens a second, memory and MFU of well-known shapes from 0.4 to 8 10^9 parameters, beside the card's own rate on
            their matrices
precision   losses in bf16, in fp16, under each attention backend and with the published DeepSpeed files, against eager fp32
tests       the tests that are marked ``gpu``
planner     planned against measured peaks of CUDA's allocator, over 27 configurations of three architectures
tables      the published batches of tables A and B of scripts/reproduce_tables.py, under 24 GB
speed       seconds and tokens a second of a step under every strategy

The results are one JSON file, FOLDER/DEVICE.json, which is written after each case, so that nothing is lost when the machine is
taken away. A case that fails is recorded with its error, and the next one runs. A later call with the same folder goes on:
cases with a result are skipped, also those that failed. With ``--minutes``, a case starts only if its expected seconds are
left, and one that the end of the time cut short is run again by the next call.

Models are made here with random weights, their tokenizer from the source text of the Python standard library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tables are not part of the installed package

import zerobook
from benchmarks import gpu_parts
from benchmarks.gpu_models import models
from benchmarks.gpu_probe import probe
from benchmarks.gpu_setting import ROOT, Case, Row, Setting
from zerobook.utils.versions import versions

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT_S = 300.0
LIMIT_FACTOR = 2.5
"""A case may take 300 s, or so many times its expected seconds, if that is more."""
CORES_OF_A_CASE = 2
"""Cases run beside each other only if the machine has so many cores for each."""
MOST_AT_ONCE = 8


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Args:
        cases: returns the cases by name, in their order.
        at_once: whether cases run beside each other, because no figure of theirs is a time.
    """

    cases: Callable[[Setting], dict[str, Case]]
    at_once: bool = False


PARTS = {
    "machine": Part(gpu_parts.machine),
    "probe": Part(probe),
    "parity": Part(gpu_parts.parity, at_once=True),
    "models": Part(models),
    "precision": Part(gpu_parts.precision),
    "tests": Part(gpu_parts.tests, at_once=True),
    "planner": Part(gpu_parts.planner),
    "tables": Part(gpu_parts.tables),
    "speed": Part(gpu_parts.speed),
}
"""Parts of the benchmark, the most useful first: a rented machine may be taken away before the end."""


class Record:
    """The results of one machine in a JSON file, written whenever something is added.

    Args:
        facts: the machine and the versions.

    Raises:
        SystemExit: the file has results of another machine or other versions.
    """

    def __init__(self, path: Path, facts: Row):
        self.path = path
        self.parts: dict[str, dict[str, Row]] = {}
        self.unfinished: dict[str, str] = {}
        """part and case -> why it has no result"""
        self._calls: list[Row] = []
        self._facts = facts
        self._lock = threading.Lock()
        if path.exists():
            earlier = json.loads(path.read_text())
            if any(earlier.get(key) != value for key, value in facts.items()):
                sys.exit(f"{path} has results of another machine or of other versions. Give another --out FOLDER.")
            self.parts = earlier["parts"]
            self._calls = earlier["calls"]
            # This call may run other cases than those.
            self.unfinished = earlier["unfinished"]
        self._start = time.monotonic()
        self._calls.append({"command": sys.argv[1:], "begun": datetime.now(UTC).isoformat(timespec="seconds")})

    def rows(self, part: str) -> dict[str, Row]:
        return self.parts.setdefault(part, {})

    def add(self, part: str, case: str, row: Row) -> None:
        with self._lock:
            self.rows(part)[case] = row
            self.unfinished.pop(f"{part}: {case}", None)
            self._write()

    def postpone(self, part: str, case: str, reason: str) -> None:
        """Record why a case has no result in this call."""
        with self._lock:
            self.unfinished[f"{part}: {case}"] = reason
            self._write()

    def _write(self) -> None:
        self._calls[-1]["seconds"] = round(time.monotonic() - self._start, 1)
        content = self._facts | {"calls": self._calls, "parts": self.parts, "unfinished": self.unfinished}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.path.with_suffix(".new")
        staged.write_text(json.dumps(content, indent=1) + "\n")
        staged.replace(self.path)


class Runner:
    """Runs cases and records them.

    Args:
        until: `time.monotonic` after which nothing runs.
        at_once: cases that run beside each other, in parts that allow it.
        show: shows the user what is run.
    """

    def __init__(self, record: Record, until: float = math.inf, at_once: int = 1, show: Callable[[str], None] = print):
        self.record = record
        self._until = until
        self._at_once = at_once
        self._show = show
        self._is_stopped = False

    def stop(self) -> None:
        """Start and record nothing more: what runs is being killed, which is not a result."""
        self._is_stopped = True

    def run(self, part: str, cases: dict[str, Case], *, at_once: bool = False) -> None:
        """Run the cases of a part that have no result."""
        rows = self.record.rows(part)
        waiting = {name: case for name, case in cases.items() if name not in rows}
        if not at_once:
            for name, case in waiting.items():
                self._run(part, name, case)
            return
        # What others are compared with comes first.
        for has_reference in (False, True):
            with ThreadPoolExecutor(self._at_once) as pool:
                futures = []
                for name, case in waiting.items():
                    if (case.reference is not None) is has_reference:
                        futures.append(pool.submit(self._run, part, name, case))
            # Raises what a case does not record, such as a full disk.
            for future in futures:
                future.result()

    def _run(self, part: str, name: str, case: Case) -> None:
        if self._is_stopped:
            return
        start = time.monotonic()
        seconds_left = self._until - start
        if seconds_left < case.seconds:
            self.record.postpone(
                part, name, f"not begun: it is expected to take {case.seconds:.0f} s, and {seconds_left:.0f} were left"
            )
            return
        self._show(f"{part}: {name} begins")
        try:
            limit = max(LIMIT_S, LIMIT_FACTOR * case.seconds)
            row = case.measure(min(limit, seconds_left), self.record.rows(part))
        # Other versions of the libraries may raise other errors.
        except Exception as error:
            output = getattr(error, "output", "") or traceback.format_exc()
            row = {"error": f"{type(error).__name__}: {error}"[:3000], "output": output[-gpu_parts.OUTPUT_TAIL :]}
        if self._is_stopped:
            return
        seconds = time.monotonic() - start
        if "error" in row and time.monotonic() >= self._until:
            self.record.postpone(part, name, f"cut short after {seconds:.0f} s: {row['error']}")
            return
        row |= {"date": datetime.now(UTC).date().isoformat(), "seconds": round(seconds, 1)}
        self.record.add(part, name, row)
        outcome = row.get("error") or row.get("skipped") or "ran"
        self._show(f"{part}: {name}, {seconds:.0f} s: {outcome}"[:400])


def select(cases: dict[str, Case], part: str, pattern: str, limit: int | None) -> dict[str, Case]:
    """Return the first ``limit`` cases whose ``PART: CASE`` matches ``pattern``, and those that they are compared with."""
    matching = [name for name in cases if re.search(pattern, f"{part}: {name}")]
    names = set(matching[:limit])
    names |= {cases[name].reference for name in names} - {None}
    return {name: case for name, case in cases.items() if name in names}


def stop_on_signal(runner: Runner, folder: str, number: int, frame: object) -> None:
    """End at once, with all processes of the running cases and without their models: what has ended is recorded."""
    runner.stop()
    for process in psutil.Process().children(recursive=True):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["all"], metavar="PART", help=f"all, or some of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many (unset: run all)")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="cases that it matches, named 'PART: CASE' as in the output"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and their expected seconds, and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the cases themselves")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--limit", type=int, help="only the first so many cases of each part")
    parser.add_argument("--out", type=Path, help=f"folder for the results; unset: {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    names = list(PARTS) if "all" in options.parts else options.parts
    unknown = sorted(set(names) - PARTS.keys())
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}. Parts: all, {', '.join(PARTS)}")
    _set_environment(options.device)
    target = None if options.list else _target(options)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.scale == "tiny", options.device == "cpu", Path(folder))
        # Parts in their order, whatever the order on the command line.
        chosen = {name: part for name, part in PARTS.items() if name in names}
        cases = {name: select(part.cases(setting), name, options.only, options.limit) for name, part in chosen.items()}
        if target is None:
            _show_list(cases)
            return
        record = Record(*target)
        show = partial(print, flush=True)
        at_once = max(1, min(MOST_AT_ONCE, (os.cpu_count() or 1) // CORES_OF_A_CASE))
        runner = Runner(record, until, at_once, show)
        # Ctrl-C reaches the cases, too: without this, those beside each other would be recorded as failed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, partial(stop_on_signal, runner, folder))
        for name, part in chosen.items():
            runner.run(name, cases[name], at_once=part.at_once)
    _show_end(record)
    if options.out is None:
        subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu_status.py")], check=True)


def _set_environment(device: str) -> None:
    """Set the variables of this process and its children."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Some images let products in fp32 use TF32, whose errors are above the tolerances.
    os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "0"
    # All models and data are here. Without a network, requests to the hub could wait for minutes.
    os.environ["HF_HUB_OFFLINE"] = "1"
    folders = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)


def _target(options: argparse.Namespace) -> tuple[Path, Row]:
    """Return the file for the results, and facts that tell machines and versions apart.

    Raises:
        SystemExit: there is no GPU, or no folder was given for results of a CPU.
    """
    import torch

    device = "CPU"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("there is no GPU here. --device cpu --scale tiny --out FOLDER tries the same cases on a CPU.")
        device = torch.cuda.get_device_name(0)
    elif options.out is None:
        sys.exit(f"--device cpu: {RESULTS.relative_to(ROOT)} is for GPUs. Give --out FOLDER.")
    facts: dict[str, Any] = {"device": device, "scale": options.scale}
    facts["versions"] = versions() | {"zerobook": zerobook.__version__, "CUDA of torch": torch.version.cuda}
    return (options.out or RESULTS) / f"{device.replace(' ', '_')}.json", facts


def _show_list(cases: dict[str, dict[str, Case]]) -> None:
    for part, named in cases.items():
        for name, case in named.items():
            print(f"{case.seconds:5.0f} s  {part}: {name}")
    total = sum(case.seconds for case in itertools.chain.from_iterable(named.values() for named in cases.values()))
    print(f"{total:5.0f} s  in all, one after the other")


def _show_end(record: Record) -> None:
    for part, rows in record.parts.items():
        failed = [name for name, row in rows.items() if "error" in row]
        for name in failed:
            print(f"failed: {part}: {name}")
    for name, reason in record.unfinished.items():
        print(f"{name}: {reason}")
    state = f"{len(record.unfinished)} cases are left for the next call" if record.unfinished else "all cases have results"
    print(f"{state}: {record.path}")


if __name__ == "__main__":
    main()
