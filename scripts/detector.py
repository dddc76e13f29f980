"""Try the spike detector on the logs of other programs, and compare it with published rules on labelled loss curves.

    python scripts/detector.py try FILE ...
    python scripts/detector.py page FILE ...
    python scripts/detector.py table FOLDER [--write docs/guides/detector.md]
    python scripts/detector.py sets FOLDER ... [--write docs/guides/detector.md]

`try` prints what would have been found and done in the run of a log, and `page` writes the same with its curves beside the log.
A log is a transformers `trainer_state.json`, what Trainer printed, TensorBoard's event files or CSV, a history or chart export
of Weights & Biases, CSV, JSON Lines, or a folder with one of these.

`table` compares the detector with published rules. FOLDER holds `curves/NAME.csv` (step,loss), `grad_norm/NAME.csv` and
`lr/NAME.csv` where there are such, and `labels.json`: per curve its `label`, `source_repo` and `events` (`onset`, `recovered`,
`points`, `kind`). `sets` prints what the detector finds on several such folders, where each logged point counts as a step.

Published rules, as implemented in their repositories (read in November 2026):
  llm-foundry KillLossSpike    5 losses in a row at least twice the mean of the last 100, or half of the last 100 above the cap
  Lightning SpikeDetection     a loss thrice the running mean of 10 (rtol 2.0) and above the one before, or not finite
  OLMo-core SkipStepOptimizer  loss or gradient norm 6 standard deviations above the mean of the last 128
  Megatron-LM rerun machine    loss above 10 x the largest seen
  median and MAD               8 scaled MADs above the median of the last 100, three points in a row
"""

from __future__ import annotations

import argparse
import csv
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

from scripts.other_logs import read_log
from scripts.other_runs import OtherRun, points_of
from zerobook.errors import ZerobookError
from zerobook.monitor.detector import Detector
from zerobook.monitor.finding import Finding, Point
from zerobook.monitor.settings import Settings
from zerobook.utils.terminal import console, plain, say


def read_column(file: Path) -> dict[int, float]:
    """Return step -> value of a CSV with a header and two columns; nothing if there is no such file."""
    if not file.exists():
        return {}
    with open(file) as handle:
        return {int(float(step)): float(value) for step, value in itertools.islice(csv.reader(handle), 1, None)}


def replay(points: Iterable[Point], settings: Settings | None = None) -> list[Finding]:
    """Return the detector's findings on a curve, in order."""
    detector = Detector(settings)
    found = []
    for point in points:
        found += detector.update(point)
    return found + detector.finish()


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
        elif event["kind"] == "schedule_or_reset":
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
        norms = read_column(folder / "grad_norm" / name)
        rates = read_column(folder / "lr" / name)
        points = []
        for point in points_of(read_log(folder / "curves" / name).records):
            points.append(replace(point, grad_norm=norms.get(point.step), learning_rate=rates.get(point.step)))
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
    text = f"{count}\n\n" + "\n".join(lines) + f"\n\nSettings that were chosen on the other sources: {choices}.\n"
    _write_between("table", text, page_path)


def write_sets(folders: list[Path], page_path: Path | None) -> None:
    """Print what is found on several sets of curves, where each logged point counts as a step."""
    lines = [
        "| set | curves | points | " + " | ".join(COLUMNS) + " | healthy curves rolled back |",
        "|---|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for folder in tqdm(folders, desc="sets", unit="set"):
        curves = [_with_points_as_steps(curve) for curve in load(folder)]
        verdicts = [ours(curve.points) for curve in curves]
        healthy = [verdict for curve, verdict in zip(curves, verdicts, strict=True) if curve.label == "healthy"]
        rolled_back = sum(bool(verdict.rollbacks) for verdict in healthy)
        points = sum(len(curve.points) for curve in curves)
        found = row(f"{folder.name} | {len(curves)} | {points:,}", total(curves, verdicts))
        lines.append(f"{found} {rolled_back}/{len(healthy)} |")
    _write_between("sets", f"Run on {date.today()}.\n\n" + "\n".join(lines) + "\n", page_path)


def _with_points_as_steps(curve: Curve) -> Curve:
    """Return a curve whose steps are numbered by its points, in its events too."""
    place: dict[int, int] = {}
    for number, point in enumerate(curve.points):
        place.setdefault(point.step, number)
    steps = sorted(place)

    def number_of(step: int) -> int:
        # The step of an event may not be logged.
        return place[min(steps, key=lambda logged: abs(logged - step))]

    events = []
    for event in curve.events:
        recovered = event.get("recovered")
        recovered = None if recovered is None else number_of(recovered)
        events.append({**event, "onset": number_of(event["onset"]), "recovered": recovered})
    points = [replace(point, step=number) for number, point in enumerate(curve.points)]
    return Curve(curve.name, curve.label, curve.source, events, points)


def _write_between(name: str, text: str, page_path: Path | None) -> None:
    """Print a table, and put it into a page between its marks."""
    print(text)
    if page_path is None:
        return
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page_path.read_text().split(start)
    page_path.write_text(before + start + text + end + rest.split(end)[1])


# --- logs of other programs
def try_detector(paths: list[str]) -> None:
    """Print what would have been found and done in the run of each log."""
    from rich.table import Table

    for path in paths:
        run = OtherRun.read(path)
        findings = run.table()
        printed = Table(title=path, title_justify="left", title_style="bold")
        for column in findings.columns:
            printed.add_column(column, overflow="fold")
        for cells in findings.rows:
            printed.add_row(*(plain(cell, lines=False) for cell in cells))
        if findings.rows:
            console().print(printed)
        say(f"{path}: {run.summary()}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("try", "page"):
        actions.add_parser(name).add_argument("logs", nargs="+", metavar="FILE", help="the log of a run, or its folder")
    table = actions.add_parser("table")
    table.add_argument("folder", type=Path)
    sets = actions.add_parser("sets")
    sets.add_argument("folders", type=Path, nargs="+")
    for parser_of_tables in (table, sets):
        parser_of_tables.add_argument("--write", type=Path, help="put the table between its marks in this Markdown file")
    flags = parser.parse_args(arguments)
    try:
        if flags.action == "table":
            write_table(flags.folder, flags.write)
        elif flags.action == "sets":
            write_sets(flags.folders, flags.write)
        elif flags.action == "try":
            try_detector(flags.logs)
        else:
            for path in flags.logs:
                say(f"written: {OtherRun.read(path).write_page()}")
    except ZerobookError as error:
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
