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
BEGIN = "<!-- written by scripts/gpu_status.py -->"
END = "<!-- end -->"
NOTHING = """Nothing yet: all measurements in these pages were made on CPUs. `python benchmarks/gpu.py all` makes all
measurements for which one GPU is enough. It needs no network. Its results replace these lines:
[how to run it](../guides/gpu.md)."""
MORE = "Several GPUs together were not run. How to run it, and what each part shows: [GPUs](../guides/gpu.md)."


def outcome(part: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return a summary of a part's rows; empty if there is nothing to add to the number of rows.

    A row without a result, since it failed or was skipped, is left out.
    """
    if part == "tests":
        return "; ".join(row["summary"] for row in rows.values() if "summary" in row)
    if part == "parity":
        alike = [row["alike"] for row in rows.values() if "alike" in row]
        return f"{sum(alike)} of {len(alike)} train as the CPU does" if alike else ""
    if part == "planner":
        return _planner_outcome(rows)
    if part == "models":
        speeds = [f"{name}: {row['tokens/s']:,.0f} tokens/s" for name, row in rows.items() if "tokens/s" in row]
        return "; ".join(speeds)
    return ""


def _planner_outcome(rows: dict[str, dict[str, Any]]) -> str:
    """Return the errors of the planned peaks of memory; empty if no peak was measured."""
    errors = []
    for row in rows.values():
        peak = row.get("figures", {}).get("GPU memory, peak")
        if peak is not None:
            errors.append(peak["planned"] / peak["measured"] - 1)
    if not errors:
        return ""
    median = statistics.median(abs(error) for error in errors)
    largest = max(errors, key=abs)
    return f"peaks planned {median:.1%} off in the median, {largest:+.1%} at most"


def words(results: Path) -> str:
    """Return Markdown: a table for each file of results, or a note that there are none yet."""
    sections = []
    for file in sorted(results.glob("*.json")):
        content = json.loads(file.read_text())
        parts = {part: rows for part, rows in content["parts"].items() if rows}
        if parts:
            link = f"[{file.name}](../../benchmarks/results/gpu/{file.name})"
            head = f"One {content['device']}, {_date_range(parts)}, torch {content['versions']['torch']}: {link}"
            sections.append("\n".join([head, "", *_table(parts)]))
    if not sections:
        return NOTHING
    return "\n\n".join([*sections, MORE])


def _date_range(parts: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the date on which all rows were measured, or the first and the last one."""
    dates = sorted({row["date"] for rows in parts.values() for row in rows.values()})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _table(parts: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return the lines of a table with one row for each part."""
    lines = ["| part | ran | failed | not run | what came out |", "|---|---|---|---|---|"]
    for part, rows in parts.items():
        failed = sum("error" in row for row in rows.values())
        skipped = sum("skipped" in row for row in rows.values())
        lines.append(f"| {part} | {len(rows) - failed - skipped} | {failed} | {skipped} | {outcome(part, rows)} |")
    return lines


def written(text: str, results: Path) -> str:
    """Return ``text`` with the part between the marks replaced by a summary of ``results``.

    Raises:
        ValueError: the two marks do not occur exactly once.
    """
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    summary = f"{BEGIN}\n{words(results)}\n{END}"
    # A function returns the text as it is. In a text, re would read backslashes as references.
    page, count = re.subn(pattern, lambda _: summary, text, flags=re.S)
    if count != 1:
        raise ValueError(f"the marks {BEGIN} and {END} stand {count} times in the text; they have to stand once.")
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), RESULTS))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
