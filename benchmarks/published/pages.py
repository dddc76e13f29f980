"""Output of the tables: one JSON file, one page, and pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from benchmarks.machine import processor
from benchmarks.published import pictures
from benchmarks.published.table import Table
from zerobook.plan.hardware import Cluster
from zerobook.utils.units import duration

HEADER = """# Published tables, run again

`python scripts/reproduce_tables.py --scale tiny` writes this page. It repeats comparisons from the literature. Columns marked
*published* have the figures of the publication, and columns marked **here** have those that were measured on the machine below.
The machines are different, so compare the rows of one column, and not a published with a measured figure. `-` means that a
figure was not published or not measured. *config* is a hash of the settings of the run.

At the tiny scale, the models have the same classes and are small. A limit of bytes takes the place of the GPU's memory. The
kernel enforces this limit, and the tables quote the error of the first allocation that exceeds it. Such small runs can show
which variant is better, and why, if memory or traffic is the reason. The processes share two cores, so the times say little
about GPUs.
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
