"""Write what has run on GPUs into docs/measured/gpu.md, between two marks, from the results of benchmarks/gpu.py.

usage: gpu_status.py
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "measured" / "gpu.md"
BEGIN, END = "<!-- written by scripts/gpu_status.py -->", "<!-- end -->"
NOTHING = """Nothing yet: all that is measured in these pages was measured on CPUs. On a machine with a GPU,
`python benchmarks/gpu.py all` runs what one GPU can show, without a network, and writes its results in place of these
lines: [how to run it](../guides/gpu.md)."""
MORE = "Several GPUs together were not run. How to run it, and what each part shows: [GPUs](../guides/gpu.md)."


def outcome(part: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return a summary of a part's rows; empty if there is nothing to add to the number of rows."""
    if part == "tests":
        return "; ".join(row["summary"] for row in rows.values() if "summary" in row)
    if part == "parity":
        alike = [row["alike"] for row in rows.values() if "alike" in row]
        return f"{sum(alike)} of {len(alike)} train as the CPU does" if alike else ""
    if part == "planner":
        peaks = [row["figures"]["GPU memory, peak"] for row in rows.values() if "GPU memory, peak" in row.get("figures", {})]
        errors = [peak["planned"] / peak["measured"] - 1 for peak in peaks]
        if errors:
            largest = max(errors, key=abs)
            return f"peaks planned {statistics.median(map(abs, errors)):.1%} off in the median, {largest:+.1%} at most"
    if part == "models":
        speeds = [f"{name}: {row['tokens/s']:,.0f} tokens/s" for name, row in rows.items() if "tokens/s" in row]
        return "; ".join(speeds)
    return ""


def words(results: Path) -> str:
    """Return Markdown: a table for each file of results, or a note that there are none yet."""
    sections = []
    for file in sorted(results.glob("*.json")):
        content = json.loads(file.read_text())
        parts = {part: rows for part, rows in content["parts"].items() if rows}
        if not parts:
            continue
        dates = sorted({row["date"] for rows in parts.values() for row in rows.values()})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        link = f"[{file.name}](../../benchmarks/results/gpu/{file.name})"
        lines = [f"One {content['device']}, {when}, torch {content['versions']['torch']}: {link}", ""]
        lines += ["| part | ran | failed | not run | what came out |", "|---|---|---|---|---|"]
        for part, rows in parts.items():
            failed = sum("error" in row for row in rows.values())
            skipped = sum("skipped" in row for row in rows.values())
            lines.append(f"| {part} | {len(rows) - failed - skipped} | {failed} | {skipped} | {outcome(part, rows)} |")
        sections.append("\n".join(lines))
    if not sections:
        return NOTHING
    return "\n\n".join([*sections, MORE])


def written(text: str, results: Path) -> str:
    """Return ``text`` with the part between the marks replaced by a summary of ``results``.

    Raises:
        ValueError: the two marks do not occur exactly once.
    """
    page, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{words(results)}\n{END}", text, flags=re.S
    )
    if count != 1:
        raise ValueError(f"the marks {BEGIN} and {END} stand {count} times in the text; they have to stand once.")
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), RESULTS))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
