"""``zerobook runlog``: what happened to a run, why, and what it cost.

zerobook runlog status outputs/run           the state of the run, in a sentence or two
zerobook runlog show outputs/run [VIEW]      one view, or all but the last two: spikes, decisions, time, checkpoints, skipped,
                                             branches, events, steps (those that are part of the run, as CSV)
zerobook runlog compare A B C ...            runs in one table: what differs, held-out loss, speed, memory
zerobook runlog compare RUN --attempts 1 2   two attempts of one run
zerobook runlog report outputs/run           the runlog as one HTML page
zerobook runlog verify outputs/run           read every line; exit code 1 if something is wrong
zerobook runlog act outputs/run COMMAND      give a command to a live run: rollback --to STEP, lower-rate FACTOR,
                                             skip FIRST-LAST, save, stop, policy VALUE

status, show and compare print JSON with --json.
"""

import argparse
import csv
import json
import sys
from typing import Any

from zerobook.cli import act, compare_runs
from zerobook.cli.arguments import Parser
from zerobook.runlog.events import ending_types
from zerobook.runlog.history import History, add_log_name_to_errors, folder_of, last_of
from zerobook.runlog.report import write
from zerobook.runlog.summary import summary
from zerobook.runlog.tables import VIEWS, Table
from zerobook.runlog.writer import EVENTS
from zerobook.utils.terminal import console, make_table, plain, say
from zerobook.utils.units import counted

# Name of the view that is printed as CSV, since a run may have millions of steps.
STEPS_VIEW = "steps"
STEP_COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "attempt", "branch")
# Views that `show` prints if no view is named.
LISTED_VIEWS = [name for name in VIEWS if name != "events"]


def runlog(arguments: list[str]) -> int:
    """Run the command with its arguments, and return the exit code."""
    flags = make_parser().parse_args(arguments)
    return flags.function(flags) or 0


def make_parser() -> Parser:
    parser = Parser("zerobook runlog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(metavar="ACTION", required=True, help=", ".join(ACTIONS))
    for name, function in ACTIONS.items():
        action = actions.add_parser(name, prog=f"zerobook runlog {name}", description=function.__doc__)
        action.set_defaults(function=function)
        if name == "compare":
            compare_runs.add_flags(action)
        elif name == "act":
            act.add_flags(action)
        else:
            action.add_argument("run", help="a run's output_dir")
        if name in ("status", "show"):
            action.add_argument("--json", action="store_true", help="print JSON")
        if name == "show":
            action.add_argument("view", nargs="?", choices=[*VIEWS, STEPS_VIEW], help="default: all but events and steps")
    return parser


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def status(flags: argparse.Namespace) -> None:
    """Print the state of the run, in a sentence or two."""
    folder = folder_of(flags.run)
    with add_log_name_to_errors(folder):
        text = summary(folder)
    if flags.json:
        newest = last_of(folder / EVENTS, ("run_start", "metrics", "eval", "checkpoint", *ending_types()))
        _print_json({"status": text, **newest})
    else:
        say(text)


def show(flags: argparse.Namespace) -> None:
    """Print tables of what happened to the run."""
    history = History.read(flags.run)
    with add_log_name_to_errors(history.folder):
        if flags.view == STEPS_VIEW:
            _print_steps(history, as_json=flags.json)
        elif flags.json and flags.view:
            _print_json(VIEWS[flags.view].as_json(history))
        elif flags.json:
            _print_json({name: VIEWS[name].as_json(history) for name in LISTED_VIEWS})
        elif flags.view:
            _print_table(VIEWS[flags.view].table(history))
        else:
            for name in LISTED_VIEWS:
                console().print(f"\n{name}", style="bold")
                _print_table(VIEWS[name].table(history))


def _print_table(table: Table) -> None:
    if not table.rows:
        say("None.")
        return
    # Columns that contain only numbers are aligned on the right.
    columns = zip(table.columns, *table.rows, strict=True)
    numbers = [name for name, *cells in columns if all(map(str.isdigit, cells))]
    printed = make_table(None, table.columns, numbers=numbers)
    for row in table.rows:
        printed.add_row(*(plain(cell, lines=False) for cell in row))
    console().print(printed)


def _print_steps(history: History, *, as_json: bool) -> None:
    """Print the steps that are part of the run as it is now."""
    steps = history.steps(current=True)
    if as_json:
        _print_json(list(steps))
        return
    rows = csv.writer(sys.stdout)
    rows.writerow(STEP_COLUMNS)
    for record in steps:
        cells = []
        for name in STEP_COLUMNS:
            value = record[name]
            # Somebody else may have written the log, with control characters in the place of numbers.
            if isinstance(value, str):
                value = plain(value, lines=False)
            cells.append(value)
        rows.writerow(cells)


def report(flags: argparse.Namespace) -> None:
    """Write the report as one HTML page that needs no other file. The run may still train."""
    say(f"written: {write(flags.run)}")


def verify(flags: argparse.Namespace) -> int:
    """Read every line of the runlog. Exit code 1 if something is wrong."""
    from zerobook.runlog.check import problems

    problem_list, line_counts = problems(folder_of(flags.run))
    for problem in problem_list:
        say(problem)
    verdict = counted(len(problem_list), "problem") if problem_list else "all sound"
    say(f"{counted(line_counts['events'], 'event')} and {counted(line_counts['steps'], 'step')} read: {verdict}")
    return 1 if problem_list else 0


ACTIONS = {
    "status": status,
    "show": show,
    "compare": compare_runs.compare_runs,
    "report": report,
    "verify": verify,
    "act": act.act,
}
