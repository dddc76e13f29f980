"""Try the spike detector on loss curves.

    python scripts/detector.py try FILE [--grad_norm CSV] [--plot PNG]
    python scripts/detector.py table FOLDER [--write docs/guides/detector.md]

`try` says what the detector would have done on a curve: a transformers `trainer_state.json`, a CSV with a header, JSON Lines,
or the output folder of a run.

`table` compares the detector with published rules on labelled curves. FOLDER holds `curves/NAME.csv` (step,loss),
`grad_norm/NAME.csv` where there is one, and `labels.json`: per curve its `label`, `source_repo` and `events` (`onset`,
`recovered`, `points`, `kind`).

Published rules, as implemented in their repositories (read in November 2026):
  llm-foundry KillLossSpike    5 losses in a row at least twice the mean of the last 100, or half of the last 100 above the cap
  Lightning SpikeDetection     a loss thrice the running mean of 10 (rtol 2.0) and above the one before, or not finite
  OLMo-core SkipStepOptimizer  loss or gradient norm 6 standard deviations above the mean of the last 128
  Megatron-LM rerun machine    loss above 10 x the largest seen
  median and MAD               8 scaled MADs above the median of the last 100, three points in a row
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zerobook.errors import ZerobookError
from zerobook.monitor.detector import Detector, Finding, Point, Settings
from zerobook.runlog.other_logs import read_log
from zerobook.utils.terminal import console, say


def read(path: str | Path, grad_norm: str | Path | None = None) -> list[Point]:
    """Return the points of a loss curve, in the file's order. The arguments are those of `read_log`."""
    return [Point(**record) for record in read_log(path, grad_norm).records]


def replay(points: Iterable[Point], settings: Settings | None = None) -> list[Finding]:
    """Return the detector's findings on a curve, in order."""
    detector = Detector(settings)
    found = []
    for point in points:
        found += detector.update(point)
    return found + detector.finish()


# --- one curve
DOES = {
    "armed": "keeps the last good checkpoint",
    "outlier": "notes it",
    "spike": "waits",
    "spike_end": "goes on",
    "damage": "rolls back, skips the data",
    "divergence": "rolls back, skips the data",
    "level_shift": "notes it, takes the new level",
    "slow_rise": "warns",
    "reset": "notes it",
    "chronic": "advises a lower learning rate",
}
"""finding's kind -> what the policy does about it under ``--on_spike rollback``"""


def try_detector(file: str, grad_norm: str | None, plot: str | None) -> None:
    """Print what the detector finds on a curve, and what a run would do about it."""
    points = read(file, grad_norm)
    findings = replay(points)
    print_findings(points, findings)
    if plot:
        draw(points, findings, plot, title=Path(file).name)
        say(f"drawn to {plot}")


def print_findings(points: list[Point], findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title_justify="left")
    for name in ("step", "began", "what", "it would", "why"):
        table.add_column(name, justify="right" if name in ("step", "began") else "left", overflow="fold")
    for finding in findings:
        # It arms at many harmless points.
        if finding.kind == "armed":
            continue
        colour = "yellow" if finding.alarm else "dim"
        if finding.needs_action:
            colour = "red"
        kind = Text(finding.kind, style=colour)
        table.add_row(str(finding.step), str(finding.onset), kind, DOES[finding.kind], finding.reason)
    if table.row_count:
        console().print(table)
    alarms = sum(finding.kind == "spike" or (finding.needs_action and finding.points == 1) for finding in findings)
    rollbacks = sum(finding.needs_action for finding in findings)
    outliers = sum(finding.kind == "outlier" for finding in findings)
    console().print(
        f"{len(points):,} points, steps {points[0].step:,} to {points[-1].step:,}: {alarms} alarms, "
        f"{rollbacks} rollbacks, {outliers} points or pairs of odd data"
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
        colour, name = ("#d55e00", "rolls back") if f.needs_action else styles.get(f.kind, (None, None))
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


# --- the table

LONG = 5
"""Minimum of logged points of a long spike."""
SLACK = 20
"""Logged points after a planned restart within which a rollback counts as caused by the restart."""


@dataclass
class Curve:
    name: str
    label: str
    source: str
    events: list[dict[str, Any]]
    points: list[Point]


@dataclass
class Verdict:
    """Steps at which a rule reacted: alarms, and those that would have rolled back, each as (onset, noticed)."""

    alarms: list[tuple[int, int]]
    rollbacks: list[tuple[int, int]]


def ours(points: list[Point], settings: Settings | None = None) -> Verdict:
    found = replay(points, settings)
    return Verdict([(f.onset, f.step) for f in found if f.alarm], [(f.onset, f.step) for f in found if f.needs_action])


def _same(steps: Iterable[int]) -> Verdict:
    alarms = [(step, step) for step in steps]
    return Verdict(alarms, alarms)


def llm_foundry(points: list[Point]) -> Verdict:
    window: deque[float] = deque(maxlen=max(100, round(0.05 * len(points))))
    steps, in_a_row, cap = [], 0, 10.0
    for index, p in enumerate(points):
        if len(window) == window.maxlen:
            if index == window.maxlen:
                cap = min(max(window), cap)
            in_a_row = in_a_row + 1 if p.loss >= 2 * statistics.fmean(window) else 0
            high = index >= 2 * window.maxlen and sum(x > cap for x in window) >= window.maxlen / 2
            if in_a_row > 4 or high:
                steps.append(p.step)
        window.append(p.loss)
    return _same(steps)


def lightning(points: list[Point]) -> Verdict:
    window: deque[float] = deque(maxlen=10)
    steps, last = [], 0.0
    for index, p in enumerate(points):
        if index >= 1:
            mean = statistics.fmean(window)
            if not math.isfinite(p.loss) or (p.loss > last and abs(p.loss - mean) >= abs(2.0 * mean)):
                steps.append(p.step)
                continue
        window.append(p.loss)
        last = p.loss
    return _same(steps)


def olmo_core(points: list[Point]) -> Verdict:
    losses: deque[float] = deque(maxlen=128)
    norms: deque[float] = deque(maxlen=128)
    steps = []
    for p in points:
        norm = p.grad_norm
        if len(losses) >= 64:
            jump = not math.isfinite(p.loss) or p.loss - statistics.fmean(losses) > 6 * statistics.stdev(losses)
            if norm is not None and len(norms) >= 64:
                jump |= not math.isfinite(norm) or norm - statistics.fmean(norms) > 6 * statistics.stdev(norms)
            if jump:
                steps.append(p.step)
        if math.isfinite(p.loss):
            losses.append(p.loss)
        if norm is not None and math.isfinite(norm):
            norms.append(norm)
    return _same(steps)


def megatron(points: list[Point]) -> Verdict:
    steps, largest = [], 0.0
    for index, p in enumerate(points):
        if index >= 100 and not abs(p.loss) <= 10 * largest:
            steps.append(p.step)
        elif math.isfinite(p.loss):
            largest = max(largest, abs(p.loss))
    return _same(steps)


def median_mad(points: list[Point]) -> Verdict:
    window: deque[float] = deque(maxlen=100)
    steps, in_a_row = [], 0
    for p in points:
        high = False
        if len(window) >= 10:
            middle = statistics.median(window)
            mad = 1.4826 * statistics.median(abs(x - middle) for x in window)
            high = not math.isfinite(p.loss) or p.loss > middle + 8 * max(mad, 1e-12)
        in_a_row = in_a_row + 1 if high else 0
        if in_a_row >= 3:
            steps.append(p.step)
        if not high:
            window.append(p.loss)
    return _same(steps)


RULES = {
    "Zerobook": ours,
    "llm-foundry KillLossSpike": llm_foundry,
    "Lightning SpikeDetection": lightning,
    "OLMo-core SkipStepOptimizer": olmo_core,
    "Megatron-LM 10x": megatron,
    "median and MAD, k = 8, 3 points": median_mad,
}

COLUMNS = ("divergences found", "long spikes found", "data outliers rolled back", "planned restarts rolled back",
           "healthy curves with an alarm")  # fmt: skip
GOOD = (1, 1, -1, -1, -1)


def score(curve: Curve, verdict: Verdict) -> dict[str, tuple[int, int]]:
    """Return column -> (hits, cases) of one curve."""
    place = {p.step: i for i, p in enumerate(curve.points)}
    last = curve.points[-1].step
    counts = {column: [0, 0] for column in COLUMNS}

    def count(column: str, hit: bool) -> None:
        counts[column][0] += hit
        counts[column][1] += 1

    if curve.label == "healthy":
        count("healthy curves with an alarm", bool(verdict.alarms))
    for event in curve.events:
        onset = event["onset"]
        if event["kind"] == "divergence":
            count("divergences found", any(noticed >= onset for _, noticed in verdict.rollbacks))
        elif event["kind"] == "spike" and event["points"] >= LONG:
            end = event["recovered"] or last
            count("long spikes found", any(onset <= noticed <= end for _, noticed in verdict.alarms))
        elif event["kind"] == "data_outlier":
            near = range(place.get(onset, 0), place.get(onset, 0) + event["points"] + 1)
            count("data outliers rolled back", any(place[began] in near for began, _ in verdict.rollbacks))
        elif event.get("must_not_rollback"):
            start = place.get(onset, 0)
            near = range(start - 5, start + SLACK)
            count("planned restarts rolled back", any(place[began] in near for began, _ in verdict.rollbacks))
    return {column: (hit, cases) for column, (hit, cases) in counts.items()}


def total(curves: list[Curve], verdicts: list[Verdict]) -> dict[str, tuple[int, int]]:
    each = [score(c, v) for c, v in zip(curves, verdicts, strict=True)]
    return {column: (sum(e[column][0] for e in each), sum(e[column][1] for e in each)) for column in COLUMNS}


def load(folder: Path) -> list[Curve]:
    labels = json.loads((folder / "labels.json").read_text())
    curves = []
    for name, facts in sorted(labels.items()):
        norms = folder / "grad_norm" / name
        points = read(folder / "curves" / name, norms if norms.exists() else None)
        curves.append(Curve(name, facts["label"], facts["source_repo"], facts["events"], points))
    return curves


def leave_one_out(curves: list[Curve]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Choose settings on all sources but one and score them on that one, for each source. Return the total scores, and how
    often each setting was chosen."""
    options = [
        replace(Settings(), level_points=level_points, unit_points=unit_points, drift=drift, evidence=evidence)
        for level_points, unit_points, drift, evidence in itertools.product(
            (16, 24, 48), (64, 128, 256), (1.0, 1.5, 2.0), (4.0, 5.0, 7.0)
        )
    ]
    options.sort(key=lambda s: s != Settings())  # among equals, the defaults come first
    marks = [[score(c, ours(c.points, s)) for c in curves] for s in tqdm(options, desc="settings", unit="setting")]
    summed = {column: [0, 0] for column in COLUMNS}
    chosen: dict[str, int] = {}
    for source in sorted({c.source for c in curves}):
        others = [i for i, c in enumerate(curves) if c.source != source]
        worth = [_worth([mark[i] for i in others]) for mark in marks]
        best = worth.index(max(worth))
        names = ("level_points", "unit_points", "drift", "evidence")
        words = ", ".join(f"{name} {getattr(options[best], name)}" for name in names)
        chosen[words] = chosen.get(words, 0) + 1
        for i, c in enumerate(curves):
            if c.source == source:
                for column in COLUMNS:
                    for k in (0, 1):
                        summed[column][k] += marks[best][i][column][k]
    return {column: (hit, cases) for column, (hit, cases) in summed.items()}, chosen


def _worth(marks: list[dict[str, tuple[int, int]]]) -> float:
    """Return the share found minus the share of false alarms. A false alarm on a healthy curve counts as much as a missed
    spike."""
    value = 0.0
    for column, sign in zip(COLUMNS, GOOD, strict=True):
        cases = sum(m[column][1] for m in marks)
        value += sign * sum(m[column][0] for m in marks) / cases if cases else 0.0
    return value


def row(name: str, result: dict[str, tuple[int, int]]) -> str:
    return f"| {name} | " + " | ".join(f"{hit}/{cases}" for hit, cases in result.values()) + " |"


def write_table(folder: Path, page_path: Path | None) -> None:
    """Print the table of all rules, and put it into a page between its marks."""
    curves = load(folder)
    sources = {c.source for c in curves}
    lines = ["| rule | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, rule in tqdm(RULES.items(), desc="rules", unit="rule"):
        lines.append(row(name, total(curves, [rule(c.points) for c in curves])))
    held_out, chosen = leave_one_out(curves)
    lines.append(row("Zerobook, settings chosen on the other sources", held_out))
    points = sum(len(c.points) for c in curves)
    count = f"{len(curves)} curves from {len(sources)} sources, {points:,} points. Run on {date.today()}."
    choices = "; ".join(
        f"{words} ({times} of {len(sources)} times)" for words, times in sorted(chosen.items(), key=lambda x: -x[1])
    )
    text = f"{count}\n\n" + "\n".join(lines) + f"\n\nChosen without the source that was judged: {choices}.\n"
    print(text)
    if page_path is not None:
        start, end = "<!-- table -->\n", "<!-- end of table -->"
        page = page_path.read_text()
        before, rest = page.split(start)
        page_path.write_text(before + start + text + end + rest.split(end)[1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("try")
    one.add_argument("file", help="trainer_state.json, a CSV with step and loss, JSON Lines, or a run's output_dir")
    one.add_argument("--grad_norm", help="a CSV with step and grad_norm, if the file has no gradient norms")
    one.add_argument("--plot", metavar="PNG", help="draw the curve and the detections into this file")
    table = actions.add_parser("table")
    table.add_argument("folder", type=Path)
    table.add_argument("--write", type=Path, help="put the tables between the marks of this Markdown file")
    flags = parser.parse_args(arguments)
    try:
        if flags.action == "try":
            try_detector(flags.file, flags.grad_norm, flags.plot)
        else:
            write_table(flags.folder, flags.write)
    except ZerobookError as error:
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
