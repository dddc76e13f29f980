"""Bar charts of the tables: batches that fit, memory and time, published and measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.table import Table

PUBLISHED, HERE = "#b8b8b8", "#3b6ea5"
PARTS = {"weights, MB": "#3b6ea5", "gradients, MB": "#e08e45", "optimizer, MB": "#7a9e5f"}


def memory(tables: dict[str, Table], file: Path) -> None:
    """Write a PNG: largest batches of table A and B, and the states of table C."""
    pyplot = _pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12.5, 3.9), layout="constrained", width_ratios=(1, 1, 1.7))
    batches = [(line.name, line.published.get("batch"), line.here.get("largest batch")) for line in tables["A"].lines[:2]]
    _pairs(left, batches, "A. largest training batch")
    sizes = [
        (line.name.replace(", ", ",\n"), line.published.get("batch"), line.here.get("largest batch"))
        for line in tables["B"].lines
    ]
    _pairs(middle, sizes, "B. largest batch on one device")
    lines = [line for line in tables["C"].lines if not line.name.endswith("1 process")] or tables["C"].lines
    for place, line in enumerate(lines):
        bottom = 0.0
        for part, colour in PARTS.items():
            right.bar(place, line.here[part], bottom=bottom, color=colour, width=0.62, label=part if place == 0 else None)
            bottom += line.here[part]
        formula = line.published["MB"]
        right.hlines(
            formula,
            place - 0.42,
            place + 0.42,
            color="black",
            linewidth=1.6,
            label="the paper's formula" if place == 0 else None,
        )
    right.set_xticks(range(len(lines)), [line.name.split(",")[0] for line in lines], fontsize=8)
    right.set_title(f"C. states of a process, MB, {lines[0].name.split(', ')[1]}", fontsize=10, loc="left")
    right.legend(fontsize=7.5, frameon=False)
    _plain(left, middle, right)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def seconds(tables: dict[str, Table], file: Path) -> None:
    """Write a PNG: the epochs of table A, published and here, and the step of table F."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(12.5, 3.7), layout="constrained", width_ratios=(1, 1.5, 1))
    lines = tables["A"].lines
    for panel, part in ((axes[0], "published"), (axes[1], "here")):
        shown = [
            (line.name.replace(", ", ",\n"), getattr(line, part)) for line in lines if "training, s" in getattr(line, part)
        ]
        _stacked(panel, shown, f"A. an epoch, s: {'as printed' if part == 'published' else 'here'}")
    steps = [(line.name.replace("activations ", ""), None, line.here["s a step"]) for line in tables["F"].lines]
    _pairs(axes[2], steps, "F. a step, s: activations")
    _plain(*axes)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _pairs(axes: Any, rows: Sequence[tuple[str, Any, Any]], title: str) -> None:
    """Draw published figures beside those from here. Where both exist, each has its own scale, since the machines differ."""
    numbers = [[row[side] for row in rows if isinstance(row[side], int | float)] for side in (1, 2)]
    tops = [max(found, default=0) for found in numbers]
    for side, (colour, label) in enumerate(((PUBLISHED, "published"), (HERE, "here"))):
        if not tops[side]:
            continue
        for place, row in enumerate(rows):
            value, at = row[side + 1], place + (0.19 if side else -0.19) * (tops[0] > 0)
            height = value / tops[side] if isinstance(value, int | float) else 0
            axes.bar(at, height, width=0.36 if tops[0] else 0.55, color=colour, label=label if place == 0 else None)
            number = isinstance(value, int | float)
            words = f"{value:,.3g}" if number else "out of\nmemory" if value else ""
            axes.text(at, height + 0.02, words, ha="center", va="bottom", fontsize=8 if number else 6)
    axes.set_xticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(0, 1.3)
    axes.set_title(title, fontsize=10, loc="left")
    if tops[0]:
        axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=2)
        axes.set_xlabel("published and here have scales of their own", fontsize=7.5)


def _stacked(axes: Any, rows: Sequence[tuple[str, dict[str, Any]]], title: str) -> None:
    for place, (_, found) in enumerate(rows):
        train, evaluation = found["training, s"], found.get("evaluation, s", 0.0)
        if not isinstance(train, int | float):
            axes.text(place, 0, "out of\nmemory", ha="center", va="bottom", fontsize=8)
            continue
        axes.bar(place, train, color="#3b6ea5", width=0.55, label="training" if place == 0 else None)
        axes.bar(place, evaluation, bottom=train, color="#e08e45", width=0.55, label="evaluation" if place == 0 else None)
        for middle, value in ((train / 2, train), (train + evaluation / 2, evaluation)):
            axes.text(place, middle, f"{value:.1f}", ha="center", va="center", fontsize=8, color="white")
    axes.set_xticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.margins(y=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=2)


def _plain(*panels: Any) -> None:
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
