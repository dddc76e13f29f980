"""Chart of every strategy's GPU memory as stacked bars, with a line at the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerobook.errors import ConfigError
from zerobook.plan.hardware import Cluster
from zerobook.plan.memory import PARTS
from zerobook.plan.rows import Row

COLOURS = ("#3b6ea5", "#e08e45", "#7a9e5f", "#b0486a", "#8d84c4", "#b8b8b8")


def draw(rows: Sequence[Row], where: Cluster, title: str, file: Path) -> None:
    """Write a PNG. Rows that cannot run are left out. Bars far beyond the device's memory are cut, and show their total."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.memory is not None][::-1]
    if not shown:
        raise ConfigError(f"--png {file}: no strategy file can run this, so there is nothing to draw.")
    limit = where.device.memory / 1e9
    right = max(min(max(row.memory.total / 1e9 for row in shown if row.memory), 2.5 * limit), limit) * 1.12
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(shown) + 1.6), layout="constrained")
    for place, row in enumerate(shown):
        assert row.memory is not None
        left = 0.0
        for part, colour in zip(PARTS, COLOURS, strict=True):
            width = row.memory.device[part] / 1e9
            axes.barh(
                place, width, left=left, color=colour, height=0.68, alpha=1 if row.fits else 0.45,
                hatch="//" if row.bare else None, edgecolor="white", linewidth=0,
            )  # fmt: skip
            left += width
        cut = left > right
        axes.text(
            right * 0.995 if cut else left + right * 0.008, place,
            f"{'> ' if row.bare else ''}{left:,.0f} GB" if left >= 10 else f"{left:.1f} GB",
            va="center", ha="right" if cut else "left", fontsize=8, color="white" if cut and row.fits else "black",
        )  # fmt: skip
    axes.axvline(limit, color="black", linewidth=1.2)
    axes.text(limit, len(shown) - 0.35, f" {limit:,.0f} GB", fontsize=8, va="bottom")
    axes.set_yticks(range(len(shown)), [row.file for row in shown])
    axes.set_xlim(0, right)
    axes.set_xlabel("GB (10^9 bytes) on the fullest rank at its peak; pale: does not fit; hatched: states alone")
    axes.set_title(title, fontsize=11, loc="left", pad=16)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    axes.legend(handles, PARTS, ncols=6, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.16))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
