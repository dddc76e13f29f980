"""Write docs/measured/performance.md from the results of benchmarks/checkpoint.py, data.py and runlog.py.

usage: performance.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured" / "performance.md"


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def page() -> str:
    """Return the page as Markdown."""
    saved, data, log = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("checkpoint", "data", "runlog"))
    machine, data_date = saved["machine"], data["packing"]["date"]
    parts = [
        "# Performance\n",
        "<!-- written by scripts/performance.py -->\n",
        "Ratios compare two things that were measured in turns in one run, so a slow machine slows both. Training speed on\n"
        "GPUs is measured by the part `speed` of `python benchmarks/gpu.py all`: [gpu.md](gpu.md) says what has run.\n",
        section(
            "Checkpoints",
            "benchmarks/checkpoint.py",
            f"SmolLM2-135M on two processes, {saved['checkpoint_bytes'] / 1e9:.1f} GB a checkpoint. {machine['cores']} cores "
            f"({machine['architecture']}), {saved['date']}, torch {machine['versions']['torch']}.",
            [
                ["rate of a save with digests, against plain writes", f"{saved['save_rate_of_raw_write']:.2f}"],
                ["memory of a save above what training holds", f"{saved['extra_memory_of_a_save_bytes'] / 1e6:.0f} MB"],
                ["stall of a background save, against a copy in memory", f"{saved['background_stall_of_memory_copy']:.1f}"],
                ["digests checked, from the page cache", f"{saved['verify_gigabytes_a_second']:.0f} GB/s"],
                [
                    "time to load what another strategy wrote, against one's own",
                    span(saved["load_of_the_writers_own"].values()),
                ],
            ],
        ),
        section("Data", "benchmarks/data.py", f"{data['cpu']}, {data['cores']} cores, {data_date}.", of_data(data)),
        section(
            "Runlog",
            "benchmarks/runlog.py",
            f"{log['cores']} cores ({log['machine']}), {log['date']}, medians of {log['rounds']} rounds.",
            [
                ["the spike monitor's time a step", f"{log['step']['watch_us']} us"],
                ["the log's time a step", f"{log['step']['log_us']} us"],
                ["one event, flushed to the disk", f"{log['durable_event_s'] * 1000:.2f} ms"],
                ["`runlog status` of a log with a million events", f"{log['status_of_a_million_events_s']:.2f} s"],
                ["`runlog report` of a million steps", f"{log['report_of_a_million_steps_s']:.1f} s"],
            ],
        ),
    ]
    return "\n".join(parts)


def of_data(data: dict[str, Any]) -> list[list[str]]:
    rows = [
        [f"planning packs: {name} tokens, {found['samples']:,} samples", f"{found['seconds']} s, {found['fill']:.2%} full"]
        for name, found in data["packing"]["figures"].items()
    ]
    rows += [
        [f"tokenizing, {name}", f"{found['tokens/s']:,} tokens/s, {found['median ratio of pairs']} of the library's rate"]
        for name, found in data["tokenizing"]["figures"].items()
    ]
    rows += [
        [f"preparing {found['bytes'] / 1e9:.1f} GB of text, {name}", f"{found['tokens/s']:,} tokens/s"]
        for name, found in data["preparing"]["figures"].items()
        if "bytes" in found
    ]
    return [*rows, ["supervised tokens a second, packed against padded", str(data["saving"]["figures"]["ratio"])]]


def span(values: Any) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def section(title: str, program: str, where: str, rows: list[list[str]]) -> str:
    table = "".join(f"| {what} | {figure} |\n" for what, figure in rows)
    return f"## {title}\n\nBy `python {program}`. {where}\n\n| | |\n| --- | --- |\n{table}"


if __name__ == "__main__":
    main()
