"""Run other programs that check training logs on labelled loss curves, beside the spike detector and with the same counts.

    python -m venv /tmp/checkers && /tmp/checkers/bin/pip install trainspotter==0.2.6 losslint==0.4.1 trainpulse==0.4.0
    python benchmarks/log_checkers.py FOLDER --python /tmp/checkers/bin/python [--write docs/guides/detector.md]

FOLDER is as `scripts/detector.py` describes it. The programs run in an environment of their own, with their defaults. Two of
them read a log when the run is over, so they judge with the whole curve in view; trainpulse and Zerobook judge point by point.
An alarm is a warning or an error about the loss or the gradient norm. A rollback is a verdict that the run diverged, or a loss
that is not finite, since none of the three acts by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Columns = dict[str, list]
"""``step``, ``loss``, ``grad_norm`` and ``learning_rate`` of a curve. A norm or rate may be None."""
Reactions = dict[str, list[tuple[int, int]]]
"""``alarms`` and ``rollbacks``, each as (step at which it began, step at which it was noticed)."""


def trainspotter(columns: Columns) -> Reactions:
    from trainspotter import Run, run_all  # type: ignore[import-not-found]

    run = Run()
    names = {"loss": "train/loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}
    for column, metric in names.items():
        for step, value in zip(columns["step"], columns[column], strict=True):
            if value is not None:
                run.add_point(metric, step, value)
    run.finalize()
    reactions: Reactions = {"alarms": [], "rollbacks": []}
    for finding in run_all(run):
        place = (finding.step_start, finding.step_end)
        if finding.severity != "info" and finding.detector in ("spikes", "divergence", "grad_norm"):
            reactions["alarms"].append(place)
        if finding.detector == "divergence":
            reactions["rollbacks"].append(place)
    return reactions


def losslint(columns: Columns) -> Reactions:
    from losslint import checks  # type: ignore[import-not-found]
    from losslint.parsing import RunLog  # type: ignore[import-not-found]

    # It names five steps of a finding at most.
    checks.MAX_EXAMPLES = 10**9
    series = {name: columns[name] for name in ("loss", "grad_norm", "learning_rate") if any(columns[name])}
    reactions: Reactions = {"alarms": [], "rollbacks": []}
    for finding in checks.run_all_checks(RunLog(steps=columns["step"], series=series, source=Path("curve"))):
        if finding.check in ("loss_spike", "nan_inf"):
            places = [(step, step) for step in finding.details["steps"]]
        elif finding.check == "divergence":
            places = [(columns["step"][0], columns["step"][-1])]
        else:
            continue
        reactions["alarms"] += places
        if finding.check != "loss_spike":
            reactions["rollbacks"] += places
    return reactions


def trainpulse(columns: Columns) -> Reactions:
    from trainpulse import Monitor  # type: ignore[import-not-found]

    monitor = Monitor()
    reactions: Reactions = {"alarms": [], "rollbacks": []}
    for step, loss, norm in zip(columns["step"], columns["loss"], columns["grad_norm"], strict=True):
        alerts = monitor.log("loss", step, loss)
        if norm is not None:
            alerts += monitor.log("grad_norm", step, norm)
        for alert in alerts:
            if alert.detector in ("nan_detector", "loss_spike", "gradient"):
                reactions["alarms"].append((step, step))
            if alert.detector == "nan_detector" and alert.metric_name == "loss":
                reactions["rollbacks"].append((step, step))
    return reactions


CHECKERS = {"trainspotter": trainspotter, "losslint": losslint, "trainpulse": trainpulse}
MARKS = ("<!-- log checkers -->\n", "<!-- end of log checkers -->")


def judge(python: Path, name: str, curves: list[Columns]) -> list[Reactions]:
    """Return the reactions of a checker to each curve. It runs in the environment of ``python``."""
    command = [str(python), __file__, "--checker", name]
    done = subprocess.run(command, input=json.dumps(curves), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def versions(python: Path) -> str:
    script = (
        "import json, sys; from importlib.metadata import version; print(', '.join(f'{n} {version(n)}' for n in sys.argv[1:]))"
    )
    return subprocess.run([str(python), "-c", script, *CHECKERS], capture_output=True, text=True, check=True).stdout.strip()


def write_table(folder: Path, python: Path, page: Path | None) -> None:
    from datetime import date

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/ is not part of the installed package
    from scripts.detector import COLUMNS, Verdict, headings, load, ours, row, score, total

    curves = load(folder)
    columns: list[dict[str, list[Any]]] = []
    for curve in curves:
        names = ("step", "loss", "grad_norm", "learning_rate")
        columns.append({name: [getattr(point, name) for point in curve.points] for name in names})
    lines = [f"| program | {headings()} |", "|---|" + "---|" * len(COLUMNS)]
    lines.append(row("Zerobook", total(score(curve, ours(curve.points)) for curve in curves)))
    for name in CHECKERS:
        verdicts = []
        for reactions in judge(python, name, columns):
            places = {kind: [(began, noticed) for began, noticed in reactions[kind]] for kind in reactions}
            verdicts.append(Verdict(**places))
        lines.append(row(name, total(map(score, curves, verdicts))))
    points = sum(len(curve.points) for curve in curves)
    sources = {curve.source for curve in curves}
    count = (
        f"{len(curves)} curves from {len(sources)} sources, {points:,} points. Run on {date.today()} with {versions(python)}."
    )
    text = f"{count}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if page is not None:
        before, rest = page.read_text().split(MARKS[0])
        page.write_text(before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--python", type=Path, help="Python of the environment that has the other programs")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this Markdown file")
    parser.add_argument("--checker", choices=list(CHECKERS), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.checker:
        print(json.dumps([CHECKERS[flags.checker](columns) for columns in json.load(sys.stdin)]))
    else:
        write_table(flags.folder, flags.python, flags.write)


if __name__ == "__main__":
    main()
