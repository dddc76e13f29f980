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
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/ is not part of the installed package

from scripts.log_detector import LogDetector, LogSettings
from scripts.other_logs import read_log
from scripts.other_runs import OtherRun, points_of
from zerobook.errors import ZerobookError
from zerobook.monitor.detector import Detector
from zerobook.monitor.finding import Finding, Point
from zerobook.utils.terminal import console, plain, say
from zerobook.utils.units import counted


def read_column(file: Path) -> dict[int, float]:
    """Return step -> value of a CSV with a header and two columns; nothing if there is no such file."""
    if not file.exists():
        return {}
    with open(file) as handle:
        return {int(float(step)): float(value) for step, value in itertools.islice(csv.reader(handle), 1, None)}


def replay(points: Iterable[Point], detector: Detector | None = None) -> list[Finding]:
    """Return the findings of a detector on a curve, in order. Without one, it is that for logs."""
    detector = detector or LogDetector()
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
    """A labelled loss curve. ``label`` and ``events`` are from labels.json; ``source`` is the repository that published it."""

    name: str
    label: str
    source: str
    events: list[dict[str, Any]]
    points: list[Point]


@dataclass
class Verdict:
    """Reactions of a rule to a curve: its alarms, and the rollbacks among them. Each is (step of the onset, step at which it
    was noticed)."""

    alarms: list[tuple[int, int]]
    rollbacks: list[tuple[int, int]]


def ours(points: list[Point], settings: LogSettings | None = None) -> Verdict:
    """Return the verdict of Zerobook's detector for logs."""
    found = replay(points, LogDetector(settings))
    return Verdict([(f.onset, f.step) for f in found if f.alarm], [(f.onset, f.step) for f in found if f.needs_action])


# The published rules notice a problem at its step, and roll back at each alarm.
def _roll_back_at(steps: Iterable[int]) -> Verdict:
    alarms = [(step, step) for step in steps]
    return Verdict(alarms, alarms)


def llm_foundry(points: list[Point]) -> Verdict:
    """Return the verdict of llm-foundry's KillLossSpike: an alarm at 5 high losses in a row, or if half of the window is above
    the cap."""
    window: deque[float] = deque(maxlen=max(100, round(0.05 * len(points))))
    # the highest loss of the first window, at most 10
    cap = 10.0
    high_in_a_row = 0
    steps = []
    for index, point in enumerate(points):
        if len(window) == window.maxlen:
            if index == window.maxlen:
                cap = min(max(window), cap)
            is_high = point.loss >= 2 * statistics.fmean(window)
            high_in_a_row = high_in_a_row + 1 if is_high else 0
            above_cap = sum(loss > cap for loss in window)
            stays_high = index >= 2 * window.maxlen and above_cap >= window.maxlen / 2
            if high_in_a_row > 4 or stays_high:
                steps.append(point.step)
        window.append(point.loss)
    return _roll_back_at(steps)


def lightning(points: list[Point]) -> Verdict:
    """Return the verdict of Lightning's SpikeDetection: an alarm at a loss that is not finite, or that is higher than the last
    one and three times the mean of the window."""
    # Losses with an alarm are not part of the window.
    window: deque[float] = deque(maxlen=10)
    last_loss = 0.0
    steps = []
    for index, point in enumerate(points):
        if index >= 1:
            mean = statistics.fmean(window)
            is_far = abs(point.loss - mean) >= abs(2.0 * mean)
            if not math.isfinite(point.loss) or (point.loss > last_loss and is_far):
                steps.append(point.step)
                continue
        window.append(point.loss)
        last_loss = point.loss
    return _roll_back_at(steps)


def olmo_core(points: list[Point]) -> Verdict:
    """Return the verdict of OLMo-core's SkipStepOptimizer: an alarm if loss or gradient norm is 6 standard deviations above the
    mean of its window."""
    losses: deque[float] = deque(maxlen=128)
    norms: deque[float] = deque(maxlen=128)
    steps = []
    for point in points:
        norm = point.grad_norm
        # The rule waits until half of the window is filled.
        if len(losses) >= 64:
            is_jump = _exceeds_mean(point.loss, losses)
            if norm is not None and len(norms) >= 64:
                is_jump |= _exceeds_mean(norm, norms)
            if is_jump:
                steps.append(point.step)
        if math.isfinite(point.loss):
            losses.append(point.loss)
        if norm is not None and math.isfinite(norm):
            norms.append(norm)
    return _roll_back_at(steps)


def _exceeds_mean(value: float, window: deque[float]) -> bool:
    return not math.isfinite(value) or value - statistics.fmean(window) > 6 * statistics.stdev(window)


def megatron(points: list[Point]) -> Verdict:
    """Return the verdict of Megatron-LM's rerun machine: an alarm at a loss above 10 times the largest one so far."""
    largest = 0.0
    steps = []
    for index, point in enumerate(points):
        # With this condition, a loss that is NaN is an alarm too.
        if index >= 100 and not abs(point.loss) <= 10 * largest:
            steps.append(point.step)
        elif math.isfinite(point.loss):
            largest = max(largest, abs(point.loss))
    return _roll_back_at(steps)


def median_mad(points: list[Point]) -> Verdict:
    """Return the verdict of median and MAD (median absolute deviation): an alarm at 3 points in a row that are 8 scaled MADs
    above the median of the window."""
    # High losses are not part of the window.
    window: deque[float] = deque(maxlen=100)
    high_in_a_row = 0
    steps = []
    for point in points:
        is_high = False
        if len(window) >= 10:
            median = statistics.median(window)
            # For a normal distribution, 1.4826 MADs are a standard deviation.
            deviation = 1.4826 * statistics.median(abs(loss - median) for loss in window)
            is_high = not math.isfinite(point.loss) or point.loss > median + 8 * max(deviation, 1e-12)
        high_in_a_row = high_in_a_row + 1 if is_high else 0
        if high_in_a_row >= 3:
            steps.append(point.step)
        if not is_high:
            window.append(point.loss)
    return _roll_back_at(steps)


RULES = {
    "Zerobook": ours,
    "llm-foundry KillLossSpike": llm_foundry,
    "Lightning SpikeDetection": lightning,
    "OLMo-core SkipStepOptimizer": olmo_core,
    "Megatron-LM 10x": megatron,
    "median and MAD, k = 8, 3 points": median_mad,
}

COLUMNS = {
    "divergences found": 1,
    "long spikes found": 1,
    "data outliers rolled back": -1,
    "planned restarts rolled back": -1,
    "healthy curves with an alarm": -1,
    "healthy curves rolled back": -1,
    "false alarms": -1,
    "false rollbacks": -1,
}
"""What is counted, and whether a rule should do it (1) or not (-1)."""
PER_POINT = ("false alarms", "false rollbacks")
"""Columns that count events among all points. The others count events or curves among those that are labelled so."""
BEFORE_ONSET = 5
"""Logged points before a labelled event within which an alarm belongs to it."""


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
        count("healthy curves rolled back", bool(verdict.rollbacks))
    # A chronic curve spikes so often that not every spike has a label.
    if curve.label != "chronic":
        counts["false alarms"] = [_count_false(curve, verdict.alarms, place), len(curve.points)]
        counts["false rollbacks"] = [_count_false(curve, verdict.rollbacks, place), len(curve.points)]
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


def _count_false(curve: Curve, reactions: list[tuple[int, int]], place: dict[int, int]) -> int:
    """Return the number of reactions, each counted once by its onset, that belong to no labelled event.

    Args:
        place: step -> index of its point.
    """
    near: set[int] = set()
    for event in curve.events:
        start = place.get(event["onset"], 0)
        recovered = event.get("recovered")
        end = len(curve.points) - 1 if recovered is None else place.get(recovered, len(curve.points) - 1)
        if event["kind"] in ("data_outlier", "schedule_or_reset"):
            end = start + event.get("points", 0)
        near.update(range(start - BEFORE_ONSET, end + SLACK + 1))
    return len({began for began, noticed in reactions if place[began] not in near and place[noticed] not in near})


def total(scores: Iterable[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return column -> (hits, cases), summed over curves."""
    each = list(scores)
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


def near_defaults() -> dict[str, LogSettings]:
    """Return the default settings, and those in which one number is two thirds or one and a half times as large, by name."""
    defaults = LogSettings()
    options = {"the defaults": defaults}
    for field in fields(LogSettings):
        default = getattr(defaults, field.name)
        for factor in (2 / 3, 3 / 2):
            value = round(default * factor) if isinstance(default, int) else round(default * factor, 6)
            changes: dict[str, Any] = {field.name: value}
            options[f"{field.name} {value:g}"] = replace(defaults, **changes)
    return options


def leave_one_out(curves: list[Curve]) -> tuple[dict[str, tuple[int, int]], Counter[str]]:
    """Choose settings on all sources but one and score them on that one, for each source. Return the total scores, and how
    often each setting was chosen."""
    options = near_defaults()
    scores = {
        name: [score(curve, ours(curve.points, settings)) for curve in curves]
        for name, settings in tqdm(options.items(), desc="settings", unit="setting")
    }
    judged: list[dict[str, tuple[int, int]]] = []
    chosen: Counter[str] = Counter()
    for source in sorted({curve.source for curve in curves}):
        is_left_out = [curve.source == source for curve in curves]
        worths = {
            name: _worth(itertools.compress(results, (not left_out for left_out in is_left_out)))
            for name, results in scores.items()
        }
        # Among equals, the first one is taken, which is the defaults.
        best = max(worths, key=lambda name: worths[name])
        chosen[best] += 1
        judged += itertools.compress(scores[best], is_left_out)
    return total(judged), chosen


def _worth(scores: Iterable[dict[str, tuple[int, int]]]) -> float:
    """Return the shares found minus the shares of false reactions. Four false ones in 100,000 points count as one percent."""
    value = 0.0
    for column, (hits, cases) in total(scores).items():
        weight = 0.01 * 100_000 / 4 if column in PER_POINT else 1.0
        value += COLUMNS[column] * weight * hits / max(cases, 1)
    return value


def row(name: str, result: dict[str, tuple[int, int]]) -> str:
    cells = [name]
    for column, (hits, cases) in result.items():
        cells.append(f"{100_000 * hits / max(cases, 1):.1f}" if column in PER_POINT else f"{hits}/{cases}")
    return "| " + " | ".join(cells) + " |"


def headings() -> str:
    return " | ".join(f"{column} per 100,000 points" if column in PER_POINT else column for column in COLUMNS)


def _choices(chosen: Counter[str]) -> str:
    """Return a sentence on the settings that were chosen without the source that was judged."""
    choices = "; ".join(f"{name} for {counted(times, 'source')}" for name, times in chosen.most_common())
    return f"Settings that were chosen on the other sources: {choices}."


def write_table(folder: Path, page_path: Path | None) -> None:
    """Print the table of all rules, and put it into a page between its marks."""
    curves = load(folder)
    sources = {c.source for c in curves}
    lines = [f"| rule | {headings()} |", "|---|" + "---|" * len(COLUMNS)]
    for name, rule in tqdm(RULES.items(), desc="rules", unit="rule"):
        lines.append(row(name, total(score(c, rule(c.points)) for c in curves)))
    held_out, chosen = leave_one_out(curves)
    lines.append(row("Zerobook, settings chosen on the other sources", held_out))
    points = sum(len(c.points) for c in curves)
    count = f"{len(curves)} curves from {len(sources)} sources, {points:,} points. Run on {date.today()}."
    _write_between("table", f"{count}\n\n" + "\n".join(lines) + f"\n\n{_choices(chosen)}\n", page_path)


def write_sets(folders: list[Path], page_path: Path | None) -> None:
    """Print what is found on several sets of curves, where each logged point counts as a step."""
    lines = [f"| set | curves | points | {headings()} |", "|---|---|---|" + "---|" * len(COLUMNS)]
    all_curves: list[Curve] = []

    def add_row(name: str, curves: list[Curve], result: dict[str, tuple[int, int]]) -> None:
        points = sum(len(curve.points) for curve in curves)
        lines.append(row(f"{name} | {len(curves)} | {points:,}", result))

    for folder in tqdm(folders, desc="sets", unit="set"):
        curves = [_with_points_as_steps(curve) for curve in load(folder)]
        add_row(folder.name, curves, total(score(curve, ours(curve.points)) for curve in curves))
        all_curves += curves
    held_out, chosen = leave_one_out(all_curves)
    add_row("all, settings chosen on the other sources", all_curves, held_out)
    _write_between("sets", f"Run on {date.today()}.\n\n" + "\n".join(lines) + f"\n\n{_choices(chosen)}\n", page_path)


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
