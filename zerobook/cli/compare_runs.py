"""``zerobook runlog compare A B C ...``: several runs in one table, with what differs in their settings.

Of two runs, and of two attempts of one (``compare RUN --attempts 1 2``), it also says from which step on the losses differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerobook.cli.arguments import Parser
from zerobook.errors import RunLogError
from zerobook.runlog import compare
from zerobook.runlog.facts import code_version, run_results, short_name
from zerobook.runlog.history import History
from zerobook.utils.terminal import console, say
from zerobook.utils.units import count, counted, size

WIDTH = 80
"""Columns of the table where the output is no terminal."""
LABEL_COLUMNS = 22
RUN_COLUMNS = 11
"""Fewest columns of a run; more runs than fit stand in further tables."""
IGNORED_SETTINGS = {"output_dir", "resume_from_checkpoint"}
"""Settings that differ between any two runs, and change nothing in what they compute."""
SAME_SETTINGS = "The settings, the launch and the versions are the same."

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
    parser.add_argument("--attempts", nargs=2, type=int, metavar="N", help="compare two attempts of one run")
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure as a number")
    flags = parser.parse_args(arguments)
    histories = [History.read(run) for run in flags.runs]
    if flags.attempts is not None:
        if len(histories) > 1:
            raise RunLogError(f"zerobook runlog compare --attempts: they are of one run, and {len(histories)} are given.")
        return _compare_attempts(flags.runs[0], histories[0], flags.attempts, as_json=flags.json)
    if len(histories) < 2:
        raise RunLogError(
            f"zerobook runlog compare: {flags.runs[0]} is one run. Give two or more, or --attempts with the numbers of two."
        )
    starts = [history.of("run_start") for history in histories]
    settings = _differing_settings([_settings(run_starts[-1]) if run_starts else {} for run_starts in starts])
    results = [run_results(history) for history in histories]
    if flags.json:
        runs = []
        for index, run in enumerate(flags.runs):
            run_settings = {key: values[index] for key, values in settings.items()}
            runs.append({"run": run, **results[index], "settings": run_settings})
        print(json.dumps(runs, indent=2, default=str))
        return 0
    names = _names(flags.runs)
    _print_tables(names, settings, results)
    _say_best(names, results)
    if len(histories) == 2:
        _say_where_losses_differ(*(_losses(history.steps(living=True)) for history in histories))
    return 0


def _compare_attempts(run: str, history: History, numbers: Sequence[int], *, as_json: bool) -> int:
    starts = {event["attempt"]: event for event in history.of("run_start")}
    for number in numbers:
        if number not in starts:
            raise RunLogError(f"{run}: it has no attempt {number}, only {', '.join(map(str, starts))}.")
    settings = _differing_settings([_settings(starts[number]) for number in numbers])
    if as_json:
        attempts = []
        for index, number in enumerate(numbers):
            attempt_settings = {key: values[index] for key, values in settings.items()}
            attempts.append({"run": run, "attempt": number, "settings": attempt_settings})
        print(json.dumps(attempts, indent=2, default=str))
        return 0
    _print_tables([f"attempt {number}" for number in numbers], settings, [])
    _say_where_losses_differ(*(_losses(step for step in history.steps() if step["attempt"] == number) for number in numbers))
    return 0


def _differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return setting -> its value in each run, of the settings, launches and versions that are not the same in all runs."""
    keys = sorted(set().union(*settings))
    # Settings of the config stand first, then those of the launch and the versions.
    keys.sort(key=lambda key: key.startswith(("launch.", "version.")))
    differing = {}
    for key in keys:
        values = [run_settings.get(key) for run_settings in settings]
        if any(compare.differences({key: values[0]}, {key: value}) for value in values[1:]):
            differing[key] = values
    return differing


def _settings(run_start: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an attempt by name, those of its launch and its versions with a prefix."""
    settings = {key: value for key, value in run_start["config"].items() if key not in IGNORED_SETTINGS}
    for key, value in compare.launch(run_start).items():
        settings[f"launch.{key}"] = value
    for library, version in run_start["versions"].items():
        settings[f"version.{library}"] = version
    commit = code_version(run_start)
    if commit:
        settings["code"] = commit
    return settings


def _losses(steps: Iterable[Mapping[str, Any]]) -> dict[int, float | None]:
    """Return step -> loss; of a step that was done twice, the last one."""
    return {step["step"]: step["loss"] for step in steps}


def _say_where_losses_differ(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> None:
    shared = sorted(set(first) & set(second))
    if not shared:
        say("They have no step in common.")
        return
    step = compare.first_apart(first, second)
    if step is None:
        say(f"The losses of the {counted(len(shared), 'step')} that both have are the same, bit for bit.")
        return
    # A loss that is not finite is recorded as null.
    largest = max(shared, key=lambda number: abs((first[number] or 0) - (second[number] or 0)))
    say(
        f"The losses differ from step {step} on ({first[step]} and {second[step]}), most at step {largest} "
        f"({first[largest]} and {second[largest]})."
    )


def _names(runs: Sequence[str]) -> list[str]:
    """Return short names of runs: the last part of the path, or where two have the same, the path as it was given."""
    names = [Path(run).resolve().name for run in runs]
    return [name if names.count(name) == 1 else run for name, run in zip(names, runs, strict=True)]


def _print_tables(names: Sequence[str], settings: dict[str, list[Any]], results: Sequence[dict[str, Any]]) -> None:
    """Print one row for each figure and setting, and one column for each run.

    Args:
        results: of each run; empty where the columns are attempts, which have no results of their own.
    """
    from rich import box
    from rich.table import Table

    if not results and not settings:
        say(SAME_SETTINGS)
        return
    out = console(WIDTH)
    runs_per_table = max(1, (out.width - LABEL_COLUMNS) // (RUN_COLUMNS + 2))
    for start in range(0, len(names), runs_per_table):
        indices = range(start, min(start + runs_per_table, len(names)))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold", style="dim")
        for index in indices:
            table.add_column(names[index], overflow="fold", justify="right")
        if results:
            for label, text in RESULTS.items():
                table.add_row(label, *(text(results[index]) for index in indices))
            table.add_section()
        for key, values in settings.items():
            label = key.removeprefix("launch.").removeprefix("version.")
            table.add_row(label, *(_cell(values, index) for index in indices))
        out.print(table)
    if not settings:
        say(SAME_SETTINGS)


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
