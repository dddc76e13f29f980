"""``zerobook runlog test-detector FILE``: what the detector would have done on this curve."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerobook.cli.arguments import Parser
from zerobook.monitor.curves import read, replay
from zerobook.monitor.detector import Finding, Point
from zerobook.utils.terminal import console, say

DOES = {
    "armed": "keeps the last good checkpoint",
    "outlier": "notes it",
    "spike": "waits",
    "spike_end": "goes on",
    "damage": "rolls back, skips the data",
    "divergence": "rolls back, skips the data",
    "level_shift": "notes it, takes the new level",
    "reset": "notes it",
    "chronic": "advises a lower learning rate",
}
"""finding's kind -> what the policy does about it under ``--on_spike rollback``"""


def test_detector(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    parser = Parser("zerobook runlog test-detector", description=__doc__)
    parser.add_argument("file", help="trainer_state.json, a CSV with step and loss, JSON Lines, or a run's output_dir")
    parser.add_argument("--grad_norm", help="a CSV with step and grad_norm, if the file has no gradient norms")
    parser.add_argument("--all", action="store_true", help="list what only arms, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", metavar="PNG", help="draw the curve and the detections into this file")
    known = parser.parse_args(arguments)
    points = read(known.file, known.grad_norm)
    from zerobook.utils.bars import tqdm

    with tqdm(total=len(points), desc="reading the curve", unit="point", leave=False, disable=len(points) < 100_000) as bar:
        found = replay(points, each=bar.update if not bar.disable else None)
    if known.plot:
        draw(points, found, known.plot, title=Path(known.file).name)
    if known.json:
        import orjson

        print(orjson.dumps(summary(points, found), option=orjson.OPT_INDENT_2).decode())
        return 0
    _print(points, found, everything=known.all)
    if known.plot:
        say(f"drawn to {known.plot}")
    return 0


def summary(points: list[Point], found: list[Finding]) -> dict[str, Any]:
    """Return the findings, in counts and one by one; numbers that are not finite become null in JSON."""
    return {
        "points": len(points),
        "steps": [points[0].step, points[-1].step],
        "alarms": sum(f.kind == "spike" or (f.asks and f.points == 1) for f in found),
        "rollbacks": sum(f.asks for f in found),
        "outliers": sum(f.kind == "outlier" for f in found),
        "findings": [asdict(f) | {"alarm": f.alarm, "rollback": f.asks, "does": DOES[f.kind]} for f in found],
    }


def _print(points: list[Point], found: list[Finding], *, everything: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    shown = [f for f in found if everything or f.kind != "armed"]
    facts = summary(points, found)
    if shown:
        table = Table(title_justify="left")
        for name in ("step", "began", "what", "it would", "why"):
            table.add_column(name, justify="right" if name in ("step", "began") else "left", overflow="fold")
        for f in shown:
            colour = "red" if f.asks else "yellow" if f.alarm else "dim"
            table.add_row(str(f.step), str(f.onset), Text(f.kind, style=colour), DOES[f.kind], f.reason)
        console().print(table)
    console().print(
        f"{facts['points']:,} points, steps {facts['steps'][0]:,} to {facts['steps'][1]:,}: {facts['alarms']} alarms, "
        f"{facts['rollbacks']} rollbacks, {facts['outliers']} points or pairs of odd data"
    )


def draw(points: list[Point], found: list[Finding], file: str, title: str) -> None:
    """Draw the loss over the steps as a PNG, with alarms, rollbacks and odd data marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 5))
    finite = [p for p in points if abs(p.loss) < float("inf")]
    axes.plot([p.step for p in finite], [p.loss for p in finite], linewidth=0.8, color="#1f5fa8")
    styles = {"outlier": ("#999999", "odd data"), "spike": ("#e69f00", "spike: waits"), "level_shift": ("#009e73", "new level"),
              "reset": ("#009e73", "beginning again")}  # fmt: skip
    named = set()
    for f in found:
        colour, name = ("#d55e00", "rolls back") if f.asks else styles.get(f.kind, (None, None))
        if colour:
            axes.axvline(f.onset, color=colour, linewidth=1, alpha=0.7, label=None if name in named else name)
            named.add(name)
    if finite and min(p.loss for p in finite) > 0 and max(p.loss for p in finite) > 10 * min(p.loss for p in finite):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss", title=title)
    if named:
        axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    plt.close(figure)
