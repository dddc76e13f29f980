"""``zerobook runlog compare A B C ...``: several runs in one table, with what differs in their settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerobook.cli.arguments import Parser
from zerobook.errors import RunLogError
from zerobook.runlog import compare
from zerobook.runlog.facts import code_version, run_results, short_name
from zerobook.runlog.history import History
from zerobook.utils.terminal import console, say
from zerobook.utils.units import count, size

WIDTH = 80
"""Columns of the table where the output is no terminal."""
LABEL_COLUMNS = 22
RUN_COLUMNS = 11
"""Fewest columns of a run; more runs than fit stand in further tables."""
IGNORED_SETTINGS = {"output_dir", "resume_from_checkpoint"}
"""Settings that differ between any two runs, and change nothing in what they compute."""

RESULTS: dict[str, Callable[[Any], str]] = {
    "held-out loss": lambda run: _number(run["loss"], "{:.4f}"),
    "lowest held-out loss": lambda run: _number(run["best_loss"], "{:.4f}"),
    "at step": lambda run: _number(run["best_step"], "{:,}"),
    "steps": lambda run: "-" if run["step"] is None else f"{run['step']:,} of {run['total_steps']:,}",
    "tokens/s": lambda run: _number(run["tokens_per_second"], "{:,.0f}"),
    "memory of rank 0": lambda run: "-" if run["memory"] is None else size(run["memory"]),
    "trained parameters": lambda run: "-" if run["trained_parameters"] is None else count(run["trained_parameters"]),
    "state": lambda run: run["state"],
}
"""Label of a row of results -> the text of a run's cell."""


def compare_runs(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    parser = Parser("zerobook runlog compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure as a number")
    known = parser.parse_args(arguments)
    if len(known.runs) < 2:
        raise RunLogError(f"zerobook runlog compare: {known.runs[0]} is one run. Give two or more.")
    histories = [History.read(run) for run in known.runs]
    settings = _differing_settings(histories)
    results = [run_results(history) for history in histories]
    if known.json:
        runs = [
            {"run": run, **result, "settings": {key: values[index] for key, values in settings.items()}}
            for index, (run, result) in enumerate(zip(known.runs, results, strict=True))
        ]
        print(json.dumps(runs, indent=2, default=str))
        return 0
    names = _names(known.runs)
    _print_tables(names, settings, results)
    _say_best(names, results)
    return 0


def _differing_settings(histories: Sequence[History]) -> dict[str, list[Any]]:
    """Return setting -> its value in each run, of the settings, launches and versions that are not the same in all runs."""
    settings = [_settings(history) for history in histories]
    keys = sorted(set().union(*settings))
    # Settings of the config stand first, then those of the launch and the versions.
    keys.sort(key=lambda key: key.startswith(("launch.", "version.")))
    columns = {key: [one.get(key) for one in settings] for key in keys}
    return {
        key: values for key, values in columns.items() if any(compare.differences({key: values[0]}, {key: v}) for v in values)
    }


def _settings(history: History) -> dict[str, Any]:
    """Return the settings of a run's newest attempt by name."""
    starts = history.of("run_start")
    if not starts:
        return {}
    start = starts[-1]
    found = {key: value for key, value in start["config"].items() if key not in IGNORED_SETTINGS}
    found |= {f"launch.{key}": value for key, value in compare.launch(start).items()}
    found |= {f"version.{key}": value for key, value in start["versions"].items()}
    version = code_version(start)
    return found | ({"code": version} if version else {})


def _names(runs: Sequence[str]) -> list[str]:
    """Return short names of runs: the last part of the path, or where two have the same, the path as it was given."""
    names = [Path(run).resolve().name for run in runs]
    return [name if names.count(name) == 1 else run for name, run in zip(names, runs, strict=True)]


def _print_tables(names: Sequence[str], settings: dict[str, list[Any]], results: Sequence[dict[str, Any]]) -> None:
    """Print one row for each figure and setting, and one column for each run."""
    from rich import box
    from rich.table import Table

    out = console(WIDTH)
    places = max(1, (out.width - LABEL_COLUMNS) // (RUN_COLUMNS + 2))
    for start in range(0, len(names), places):
        shown = range(start, min(start + places, len(names)))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold", style="dim")
        for index in shown:
            table.add_column(names[index], overflow="fold", justify="right")
        for label, text in RESULTS.items():
            table.add_row(label, *(text(results[index]) for index in shown))
        table.add_section()
        for key, values in settings.items():
            table.add_row(key.removeprefix("launch.").removeprefix("version."), *(_cell(values, index) for index in shown))
        out.print(table)
    if not settings:
        out.print("The settings, the launch and the versions are the same.")


def _cell(values: Sequence[Any], index: int) -> str:
    """Return a setting as text, a long path by its last part where that tells the runs apart."""
    texts = ["-" if value is None else str(value) for value in values]
    short = [short_name(text, RUN_COLUMNS) for text in texts]
    return short[index] if len(set(short)) == len(set(texts)) else texts[index]


def _say_best(runs: Sequence[str], results: Sequence[dict[str, Any]]) -> None:
    measured = [(run, result) for run, result in zip(runs, results, strict=True) if result["best_loss"] is not None]
    if not measured:
        return
    if len({result["held_out_fingerprint"] for _, result in measured}) > 1:
        say("the held-out losses are of different data (other samples, tokens or lengths), so none is called the lowest")
        return
    run, result = min(measured, key=lambda entry: entry[1]["best_loss"])
    say(f"lowest held-out loss: {result['best_loss']:.4f}, {run} at step {result['best_step']}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
