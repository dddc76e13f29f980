"""Write the tables of failures at scale into docs/guides/plan.md.

usage: failures.py
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # scripts/ is not part of the installed package

from zerobook.plan.failures import RATES, RESTART_SECONDS, best_interval, goodput  # noqa: E402
from zerobook.training.intervals import LONGEST_S  # noqa: E402
from zerobook.utils.units import duration  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "plan.md"
BEGIN = "<!-- written by scripts/failures.py -->"
END = "<!-- end of failures.py -->"
GPUS = (8, 64, 512, 16_384, 100_000)
SAVES = (5.0, 60.0)
"""Seconds of a save."""


def tables() -> str:
    """Return Markdown: the published rates, and what follows from one of them for numbers of GPUs."""
    lines = ["| `--failures` | failures | GPU hours between failures | source |", "|---|---:|---:|---|"]
    for name, rate in RATES.items():
        failures = f"{rate.failures:g} in {rate.days:g} days on {rate.gpus:,} GPUs"
        lines.append(f"| `{name}` | {failures} | {rate.gpu_hours:,.0f} | {rate.source} |")
    lines += ["", f"With the failures of `llama3` and restarts of {duration(RESTART_SECONDS)}:", ""]
    longest = duration(LONGEST_S)
    lines.append(f"| GPUs | failure every | a save takes | best interval (Young's) | goodput | saved every {longest} |")
    lines.append("|---:|---:|---:|---:|---:|---:|")
    for gpus in GPUS:
        mean_time = 3600 * RATES["llama3"].gpu_hours / gpus
        for save in SAVES:
            best = best_interval(save, mean_time)
            cells = [f"{gpus:,}", duration(mean_time), f"{save:.0f} s"]
            cells.append(f"{duration(best)} ({duration(young_interval(save, mean_time))})")
            for interval in (best, LONGEST_S):
                cells.append(f"{goodput(interval, save, RESTART_SECONDS, mean_time):.1%}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def young_interval(save: float, mean_time: float) -> float:
    """Return the best work between two saves, by Young: where a save is short against the mean time between failures."""
    return math.sqrt(2 * save * mean_time)


def replaced(page: str) -> str:
    """Return the page with new tables between `BEGIN` and `END`."""
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n{tables()}\n{END}", page, flags=re.DOTALL)


def main() -> None:
    PAGE.write_text(replaced(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
