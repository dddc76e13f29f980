"""``zerobook runlog compare``: runs, or two attempts of one, in one table."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerobook.errors import RunLogError
from zerobook.runlog import compare
from zerobook.runlog.facts import code_version, run_results, short_name
from zerobook.runlog.formatting import figure
from zerobook.runlog.history import History, add_log_name_to_errors
from zerobook.utils.terminal import console, say
from zerobook.utils.units import count, counted, size

# Columns of the table if the output is not a terminal.
WIDTH = 80
LABEL_COLUMNS = 22
# Minimum width of the column of a run. Runs that do not fit beside each other are printed in further tables.
RUN_COLUMNS = 11
# Settings that usually differ between two runs, and that do not change what the runs compute.
IGNORED_SETTINGS = {"output_dir", "resume_from_checkpoint"}
SAME_SETTINGS = "The settings, the launch and the versions are the same."

# Label of a row of results -> the text of a run's cell.
RESULTS: dict[str, Callable[[Any], str]] = {
    "held-out loss": lambda run: _text(run["loss"], "{:.4f}".format),
    "lowest held-out loss": lambda run: _text(run["best_loss"], "{:.4f}".format),
    "at step": lambda run: _text(run["best_step"], "{:,}".format),
    "steps": lambda run: "-" if None in (run["step"], run["total_steps"]) else f"{run['step']:,} of {run['total_steps']:,}",
    "tokens/s": lambda run: _text(run["tokens_per_second"], "{:,.0f}".format),
    "memory of rank 0": lambda run: _text(run["memory"], size),
    "trained parameters": lambda run: _text(run["trained_parameters"], count),
    "state": lambda run: run["state"],
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--attempts", nargs=2, type=int, metavar="N", help="compare two attempts of one run")
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure as a number")


def compare_runs(flags: argparse.Namespace) -> None:
    """Print several runs in one table, with what differs in their settings. For two runs, or two attempts of one run, also
    print from which step on the losses differ."""
    histories = [History.read(run) for run in flags.runs]
    if flags.attempts is not None and len(histories) > 1:
        raise RunLogError(
            f"zerobook runlog compare --attempts: it compares attempts of one run, and {len(histories)} are given."
        )
    if flags.attempts is None and len(histories) < 2:
        raise RunLogError(
            f"zerobook runlog compare: {flags.runs[0]} is one run. Give two or more, or --attempts with the numbers of two."
        )
    if flags.attempts is not None:
        compared = _read_attempts(flags.runs[0], histories[0], flags.attempts)
    else:
        compared = [_read_run(run, history) for run, history in zip(flags.runs, histories, strict=True)]
    settings = _differing_settings([entry.settings for entry in compared])
    if flags.json:
        _print_json(compared, settings)
        return
    results = [entry.results for entry in compared if entry.results]
    names = _short_names(compared)
    _print_tables(names, settings, results)
    if results:
        _say_best(names, results)
    if len(compared) == 2:
        _say_where_losses_differ(compared[0].losses, compared[1].losses)


@dataclass(kw_only=True)
class Compared:
    """A run, or an attempt of a run. Only a run has ``results``; those of an attempt are empty."""

    run: str
    attempt: int | None
    settings: dict[str, Any]
    losses: dict[int, float | None]
    results: dict[str, Any]


def _read_run(run: str, history: History) -> Compared:
    # A run has the settings of its newest attempt.
    starts = history.of("run_start")
    with add_log_name_to_errors(history.folder):
        return Compared(
            run=run,
            attempt=None,
            settings=_settings_of_attempt(starts[-1]) if starts else {},
            losses=_losses_by_step(history.steps(current=True)),
            results=run_results(history),
        )


def _read_attempts(run: str, history: History, numbers: Sequence[int]) -> list[Compared]:
    starts = {event["attempt"]: event for event in history.of("run_start")}
    attempts = []
    for number in numbers:
        if number not in starts:
            raise RunLogError(f"{run}: it has no attempt {number}, only {', '.join(map(str, starts))}.")
        steps = [step for step in history.steps() if step["attempt"] == number]
        with add_log_name_to_errors(history.folder):
            settings = _settings_of_attempt(starts[number])
        attempts.append(Compared(run=run, attempt=number, settings=settings, losses=_losses_by_step(steps), results={}))
    return attempts


def _print_json(compared: Sequence[Compared], settings: Mapping[str, list[Any]]) -> None:
    """Print a list with an entry for each run or attempt. ``settings``: key -> its value in each of them."""
    entries = []
    for index, run in enumerate(compared):
        entry: dict[str, Any] = {"run": run.run}
        if run.attempt is not None:
            entry["attempt"] = run.attempt
        entry |= run.results
        entry["settings"] = {key: values[index] for key, values in settings.items()}
        # The first step whose loss differs from that of the first run; null if none differs, as for the first run itself.
        entry["first_differing_step"] = compare.first_differing_step(compared[0].losses, run.losses)
        entries.append(entry)
    print(json.dumps(entries, indent=2, default=str))


def _differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> its value in each run, for the keys whose values are not the same in all runs.

    Args:
        settings: for each run, its settings by `_settings_of_attempt`.
    """
    keys = sorted(set().union(*settings))
    # Settings of the config come first, then those of the launch and the versions. The sort keeps the alphabetical order
    # within both groups.
    keys.sort(key=lambda key: key.startswith(("launch.", "version.")))
    differing = {}
    for key in keys:
        values = [run_settings.get(key) for run_settings in settings]
        if any(compare.differences({key: values[0]}, {key: value}) for value in values[1:]):
            differing[key] = values
    return differing


def _settings_of_attempt(run_start: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an attempt, its launch (keys ``launch.KEY``), versions (``version.LIBRARY``) and commit."""
    settings = {key: value for key, value in run_start["config"].items() if key not in IGNORED_SETTINGS}
    for key, value in compare.launch(run_start).items():
        settings[f"launch.{key}"] = value
    for library, version in run_start["versions"].items():
        settings[f"version.{library}"] = version
    commit = code_version(run_start)
    if commit:
        settings["code"] = commit
    return settings


def _losses_by_step(steps: Iterable[Mapping[str, Any]]) -> dict[int, float | None]:
    """Return step -> loss. If a step was done twice, its last loss counts."""
    return {step["step"]: step["loss"] for step in steps}


def _say_where_losses_differ(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> None:
    shared = sorted(set(first) & set(second))
    if not shared:
        say("The two have no step in common.")
        return
    step = compare.first_differing_step(first, second)
    if step is None:
        say(f"The losses of the {counted(len(shared), 'step')} that both have are the same, bit for bit.")
        return
    differing = [number for number in shared if first[number] != second[number]]
    worst_step = max(differing, key=lambda number: abs(_as_float(first[number]) - _as_float(second[number])))
    say(
        f"The losses differ from step {step} on ({figure(first[step], '')} and {figure(second[step], '')}), most at step "
        f"{worst_step} ({figure(first[worst_step], '')} and {figure(second[worst_step], '')})."
    )


def _as_float(loss: float | None) -> float:
    # A loss that is not finite is recorded as null.
    return float("inf") if loss is None else loss


def _short_names(compared: Sequence[Compared]) -> list[str]:
    """Return the heading of each column: ``attempt 2``, or the last part of the run's path if no other run has the same."""
    names = []
    last_parts = [Path(entry.run).resolve().name for entry in compared]
    for entry, last_part in zip(compared, last_parts, strict=True):
        if entry.attempt is not None:
            names.append(f"attempt {entry.attempt}")
        elif last_parts.count(last_part) == 1:
            names.append(last_part)
        else:
            names.append(entry.run)
    return names


def _print_tables(names: Sequence[str], settings: dict[str, list[Any]], results: Sequence[dict[str, Any]]) -> None:
    """Print a row for each result and each differing setting, and a column for each run or attempt.

    Args:
        settings: key -> its value in each run.
        results: results of each run; an empty list if the columns are attempts.
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
            for label, format_result in RESULTS.items():
                table.add_row(label, *(format_result(results[index]) for index in indices))
            table.add_section()
        for key, values in settings.items():
            label = key.removeprefix("launch.").removeprefix("version.")
            table.add_row(label, *(_cell(values, index) for index in indices))
        out.print(table)
    if not settings:
        say(SAME_SETTINGS)


def _cell(values: Sequence[Any], index: int) -> str:
    """Return the value of a setting in the run ``index`` as text. A long path is shortened to its last part.

    Args:
        values: the setting's value in each run.
    """
    texts = [_text(value, str) for value in values]
    short_texts = [short_name(text, RUN_COLUMNS) for text in texts]
    # Different paths may have the same last part. Then the short texts would not distinguish the runs.
    return short_texts[index] if len(set(short_texts)) == len(set(texts)) else texts[index]


def _say_best(runs: Sequence[str], results: Sequence[dict[str, Any]]) -> None:
    measured = [(run, result) for run, result in zip(runs, results, strict=True) if result["best_loss"] is not None]
    if not measured:
        return
    # Losses are comparable only if they were measured on the same samples, cut in the same way.
    if len({result["held_out_fingerprint"] for _, result in measured}) > 1:
        say("the held-out losses are of different data (other samples, tokens or lengths), so none is called the lowest")
        return
    run, result = min(measured, key=lambda entry: entry[1]["best_loss"])
    say(f"lowest held-out loss: {result['best_loss']:.4f}, {run} at step {result['best_step']}")


def _text(value: Any, format_value: Callable[[Any], str]) -> str:
    """Return a value as text; a dash if there is none."""
    return "-" if value is None else format_value(value)
