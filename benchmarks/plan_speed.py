"""Measure how long plans take, and write docs/measured/plan_speed.md.

usage: plan_speed.py [--against FOLDER] [--repeats N] [--page FILE]

Each command runs in a process of its own, as on the command line, and the least of its times is listed. ``--against`` is the
folder of another version, whose commands run in turn with those of this one.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import processor  # noqa: E402
from zerobook.utils.versions import versions  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "plan_speed.md"
MODELS = "benchmarks/models"
COMMANDS = {
    "formulas": "--formulas --parameters 7.5B --gpus 64",
    "Llama-3.1-8B": f"--gpus 8 --gpu a100-80gb {MODELS}/llama3.1_8b.json --mixed_precision bf16",
    "Llama-3.1-8B, `--recommend`": f"--gpus 8 --gpu a100-80gb --recommend {MODELS}/llama3.1_8b.json",
    "Qwen3-8B on one 24 GB GPU, `--recommend`": f"--gpus 1 --gpu rtx-4090 --recommend {MODELS}/qwen3_8b.json",
    "Falcon-180B, LoRA": (
        "--gpus 8 --nodes 2 --gpu_memory 80GB --interconnect 400Gbps --host_memory 1TB recipes/lora_finetune.py "
        f"--model_name_or_path {MODELS}/falcon_180b.json --mixed_precision bf16"
    ),
}
"""Plan -> arguments of ``zerobook plan``."""


@dataclass(frozen=True)
class Times:
    """Elapsed seconds and processor seconds of a process."""

    clock: float
    processor: float


def run(folder: Path, arguments: str) -> Times:
    """Run ``zerobook plan`` from a version's folder."""
    environ = os.environ | {"PYTHONPATH": str(folder)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-m", "zerobook.cli.main", "plan", *arguments.split()]
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    clock = time.perf_counter() - start
    # 1: nothing fits.
    if result.returncode not in (0, 1):
        raise SystemExit(result.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Times(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(folders: list[Path], arguments: str, repeats: int) -> list[Times]:
    """Return each version's least times, with the versions in turn."""
    times: list[list[Times]] = [[] for _ in folders]
    for _ in range(repeats):
        for index, folder in enumerate(folders):
            times[index].append(run(folder, arguments))
    least = []
    for of_version in times:
        clock = min(each.clock for each in of_version)
        processor = min(each.processor for each in of_version)
        least.append(Times(clock, processor))
    return least


def page(rows: list[list[str]], with_earlier: bool, repeats: int) -> str:
    """Return the page as Markdown."""
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "zerobook")
    columns = ["plan", "seconds", "processor seconds"]
    if with_earlier:
        columns += ["earlier version: seconds", "processor seconds"]
    lines = [
        "# Time of a plan",
        "",
        "The table has the elapsed and the processor seconds of `zerobook plan`. Each plan runs in a new process. The",
        "processor time depends less on other programs. About half of a short plan is the import of torch and transformers.",
        "`formulas` is `zerobook plan --formulas`, which imports neither. A plan traces only a few of a model's equal layers.",
        "Its result is exactly that of a trace of all layers (`tests/test_plan_repetition.py`).",
    ]
    if with_earlier:
        lines.append("The last two columns are an earlier version, which traced all layers. The two versions ran in turn.")
    lines += [
        "",
        f"Hardware: {processor()}, {os.cpu_count()} cores. Date: {date.today()}. The fastest of {repeats} runs. {libraries}.",
        "Written by `python benchmarks/plan_speed.py`.",
        "",
        "| " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * (len(columns) - 1),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the commands, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="folder of an earlier version")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    flags = parser.parse_args()
    folders = [ROOT]
    if flags.against is not None:
        folders.append(flags.against.resolve())
    rows = []
    for name, arguments in COMMANDS.items():
        row = [name]
        for times in measure(folders, arguments, flags.repeats):
            row += [f"{times.clock:.1f}", f"{times.processor:.1f}"]
        print(*row, sep="  ", flush=True)
        rows.append(row)
    flags.page.write_text(page(rows, flags.against is not None, flags.repeats))
    print(f"wrote {flags.page}")


if __name__ == "__main__":
    main()
