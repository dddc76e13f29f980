"""Output of the tables: one JSON file, one page, and pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from benchmarks.published import pictures
from benchmarks.published.table import Table
from zerobook.plan.hardware import Cluster, processor
from zerobook.utils.units import duration

HEADER = """# Published tables, run again

`python scripts/reproduce_tables.py --scale tiny` makes this page: comparisons that the literature prints, with *published*
figures as they stand there and **here** what was measured on the machine below. They are different machines: figures are to
be read down a column, not across. `-` is nothing printed, or nothing measured; nothing from the literature stands under *here*.

At the tiny scale the models are of the same classes and small, and a budget of bytes stands for the GPU's memory. It is
enforced by the kernel, and really exceeded: tables name the allocation that was refused. What such a scale can show is the
direction of a result and its cause, where memory and traffic decide it. Times are those of processes that share two cores;
they say little of GPUs.
"""
TINY = "On GPUs, `python scripts/reproduce_tables.py --scale full --device_memory 24GB` writes a page with the published sizes."


def record(tables: Sequence[Table], scale: str, where: Cluster, ranks: int, *, seconds: float) -> dict[str, Any]:
    """Return all results as JSON values."""
    from zerobook.utils.versions import versions

    return {
        "scale": scale,
        "date": str(date.today()),
        "hardware": processor() if where.cpu else f"{where.gpus} x {where.device.name}",
        "cores": os.cpu_count(),
        "processes": ranks,
        "versions": versions(),
        "seconds": round(seconds),
        "tables": [table.to_json() for table in tables],
    }


def write(result: dict[str, Any], tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write ``docs/measured/tables*.md``, its pictures and ``benchmarks/results/tables_*.json``, and print their paths."""
    scale = result["scale"]
    name = "CPU" if scale == "tiny" else result["hardware"].replace(" ", "_")
    data = folder / "benchmarks" / "results" / f"tables_{scale}_{name}.json"
    page = folder / "docs" / "measured" / ("tables.md" if scale == "tiny" else f"tables_{name}.md")
    for path in (data, page):
        path.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    drawn = _draw({table.letter: table for table in tables}, page)
    page.write_text(markdown(result, tables, drawn))
    written = [data, page, *drawn]
    print("\n".join(f"wrote {path}" for path in written))
    return written


def markdown(result: dict[str, Any], tables: Sequence[Table], drawn: Sequence[Path]) -> str:
    """Return the page as Markdown."""
    found = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "zerobook")
    made = (
        f"Hardware: {result['hardware']}, {result['cores']} cores, {result['processes']} processes. Date: {result['date']}, in "
        f"{duration(result['seconds'])}. {found}."
    )
    pictured = "\n".join(f"![{path.stem.replace('_', ' ')}]({path.name})" for path in drawn)
    last = [TINY] if result["scale"] == "tiny" else []
    return "\n".join([HEADER, *last, "", made, "", pictured, "", *(table.markdown() for table in tables)])


def _draw(tables: dict[str, Table], page: Path) -> list[Path]:
    drawn = []
    for kind, draw, needed in (("memory", pictures.memory, "ABC"), ("time", pictures.seconds, "AF")):
        if all(letter in tables and tables[letter].lines for letter in needed):
            drawn.append(page.with_name(f"{page.stem}_{kind}.png"))
            draw(tables, drawn[-1])
    return drawn
