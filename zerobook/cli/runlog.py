"""``zerobook runlog``: what happened to a run, why, and what it cost.

zerobook runlog status outputs/run           the state of the run, in a sentence or two
zerobook runlog why outputs/run [STEP]       the last decision (or the one about STEP), from what was seen to what came of it
zerobook runlog show outputs/run [VIEW]      tables of spikes, time, checkpoints, skipped samples and branches, or one of them
zerobook runlog compare A B C ...            runs in one table: what differs, held-out loss, speed, memory
zerobook runlog compare RUN --attempts 1 2   two attempts of one run
zerobook runlog note outputs/run "..."       write into the runlog, while the run trains or later
zerobook runlog verify outputs/run           read every line; exit code 1 where something is wrong
zerobook runlog export outputs/run [--all]   the steps that are part of the run (or all) as CSV
zerobook runlog report outputs/run           the runlog as one HTML page and as Markdown [--watch serves it]
zerobook runlog replay outputs/run STEP      a spike's steps again through the detector, and the flags that do them again
zerobook runlog test-detector FILE           what the spike detector would have done on this curve

status, why, show and compare print JSON with --json.
"""

from __future__ import annotations

import argparse
import csv
import getpass
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from zerobook.cli.arguments import Parser
from zerobook.cli.run_tables import VIEWS, new_table
from zerobook.errors import RunLogError
from zerobook.runlog.events import ending_types, sentence
from zerobook.runlog.history import History, folder_of, is_being_written, last_of
from zerobook.runlog.summary import summary
from zerobook.runlog.writer import EVENTS
from zerobook.utils.terminal import console, plain, say
from zerobook.utils.units import counted

OWN_PARSERS = ("compare", "report", "test-detector")
"""Actions of modules of their own."""
STEPS_BESIDE_SPIKE = 16
"""Steps before and after a spike that `replay` takes for a step of it."""
SHOWN_BESIDE_SPIKE = 4
"""Steps before and after a spike that `replay` prints."""


def runlog(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    action = arguments[0] if arguments else ""
    if action == "test-detector":
        from zerobook.cli.try_detector import test_detector

        return test_detector(arguments[1:])
    if action == "report":
        from zerobook.cli.report import report

        return report(arguments[1:])
    if action == "compare":
        from zerobook.cli.compare_runs import compare_runs

        return compare_runs(arguments[1:])
    flags = _parser().parse_args(arguments)
    return flags.function(flags) or 0


def _parser() -> Parser:
    parser = Parser("zerobook runlog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(metavar="ACTION", required=True, help=", ".join([*ACTIONS, *OWN_PARSERS]))
    for name in OWN_PARSERS:
        action = actions.add_parser(name)
        # `runlog` has handed it on, unless something stood before it.
        action.set_defaults(function=lambda flags: parser.error("write the action first, before flags"))
    for name, function in ACTIONS.items():
        action = actions.add_parser(name, prog=f"zerobook runlog {name}", description=function.__doc__)
        action.set_defaults(function=function)
        action.add_argument("run", help="a run's output_dir")
        if name == "why":
            action.add_argument("step", type=int, nargs="?", help="the decision about this step; default: the last one")
        if name == "show":
            action.add_argument("view", nargs="?", choices=list(VIEWS), help="what is shown; default: all of them")
        if name == "note":
            action.add_argument("text", help="the note, in quotes")
        if name == "export":
            action.add_argument("--all", action="store_true", help="include steps of abandoned branches")
        if name == "replay":
            action.add_argument("step", type=int, help="a step of the spike; zerobook runlog show RUN spikes lists them")
        if name in ("status", "why", "show"):
            action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def status(flags: argparse.Namespace) -> None:
    """Print the state of the run, in a sentence or two."""
    folder = folder_of(flags.run)
    if flags.json:
        newest = last_of(folder / EVENTS, ("run_start", "metrics", "eval", "checkpoint", *ending_types()))
        _print_json({"status": summary(folder), **newest})
    else:
        say(summary(folder))


def why(flags: argparse.Namespace) -> int | None:
    """Print a decision: what was seen, what was done, what came of it."""
    history = History.read(flags.run)
    decisions = history.of("decision")
    if flags.step is not None:
        decisions = [decision for decision in decisions if _is_about(decision, flags.step, history)]
        if not decisions and not flags.json:
            say(f"Nothing was decided about step {flags.step}.")
            return 1
    if flags.json:
        _print_json([[*history.causes(decision), *history.effects(decision)] for decision in decisions])
        return None
    if not decisions:
        say("Nothing had to be decided.")
        return None
    shown = decisions if flags.step is not None else decisions[-1:]
    for decision in shown:
        for event in [*history.causes(decision), *history.effects(decision)]:
            say(f"[{event['seq']}] {sentence(event)}")
    return None


def _is_about(decision: dict[str, Any], step: int, history: History) -> bool:
    """Return whether a decision's first cause, such as a spike, covers ``step``."""
    cause = history.causes(decision)[0]
    return cause.get("onset", -1) <= step <= cause.get("step", -1)


def show(flags: argparse.Namespace) -> None:
    """Print tables of what happened to the run."""
    history = History.read(flags.run)
    if flags.json and flags.view:
        _print_json(VIEWS[flags.view].as_json(history))
    elif flags.json:
        _print_json({name: view.as_json(history) for name, view in VIEWS.items()})
    elif flags.view:
        VIEWS[flags.view].print(history)
    else:
        for name, view in VIEWS.items():
            console().print(f"\n{name}", style="bold")
            view.print(history)


def note(flags: argparse.Namespace) -> None:
    """Write a note into the runlog, while the run trains or later."""
    from zerobook.runlog.writer import RunLog, leave_note

    if not flags.text.strip():
        raise RunLogError('zerobook runlog note: no text is given. Give it in quotes, as in note outputs/run "..."')
    folder = folder_of(flags.run)
    author = getpass.getuser()
    # Only one process writes the log: a run that trains adds the note itself.
    if is_being_written(folder):
        leave_note(folder, flags.text, author)
        say("Noted. The run adds it to its log at its next log point.")
        return
    log = RunLog(folder.parent, attempt=False)
    seq = log.event("note", text=flags.text, by=author)
    log.close()
    say(f"Noted as [{seq}].")


def verify(flags: argparse.Namespace) -> int:
    """Read every line of the runlog. Exit code 1 where something is wrong."""
    from zerobook.runlog.check import problems

    problem_list, counts = problems(folder_of(flags.run))
    for problem in problem_list:
        say(problem)
    verdict = counted(len(problem_list), "problem") if problem_list else "all sound"
    say(f"{counted(counts['events'], 'event')} and {counted(counts['steps'], 'step')} read: {verdict}")
    return 1 if problem_list else 0


def export(flags: argparse.Namespace) -> None:
    """Print the steps of the run as CSV."""
    columns = ("step", "loss", "grad_norm", "learning_rate", "tokens", "attempt", "branch")
    rows = csv.writer(sys.stdout)
    rows.writerow(columns)
    for record in History.read(flags.run).steps(living=not flags.all):
        values = (record[name] for name in columns)
        rows.writerow([plain(value, lines=False) if isinstance(value, str) else value for value in values])


def replay(flags: argparse.Namespace) -> int | None:
    """Print the steps of a spike, each with what the detector says."""
    from zerobook.monitor.curves import points_of
    from zerobook.monitor.detector import Detector

    history = History.read(flags.run)
    spikes = [
        spike
        for spike in history.of("spike")
        if spike["onset"] - STEPS_BESIDE_SPIKE <= flags.step <= spike["step"] + STEPS_BESIDE_SPIKE
    ]
    if not spikes:
        say(f"There is no spike at step {flags.step}. zerobook runlog show {flags.run} spikes lists them.")
        return 1
    spike = spikes[0]
    detector = Detector()
    table = new_table("step", "loss", "level", "excess", "evidence", "the detector says")
    for point in points_of(history.steps(seen_from=spike["branch"])):
        if point.step > spike["step"] + SHOWN_BESIDE_SPIKE:
            break
        # The level before the point: the first point has none, and is its own.
        has_level = detector.has_level
        level = detector.level() if has_level else point.loss
        unit = detector.unit() if has_level else 1.0
        findings = detector.update(point)
        if point.step >= spike["onset"] - SHOWN_BESIDE_SPIKE:
            table.add_row(
                str(point.step),
                f"{point.loss:.4g}",
                f"{level:.4g}",
                f"{(point.loss - level) / unit:.1f}",
                f"{detector.evidence:.1f}",
                "; ".join(f"{finding.kind}: {finding.reason}" for finding in findings),
            )
    console().print(table)
    _print_flags_that_repeat(spike, history)
    return None


def _print_flags_that_repeat(spike: dict[str, Any], history: History) -> None:
    """Print the flags that do a spike's steps again, where a checkpoint from before it is on disk."""
    folders = []
    for event in history.of("checkpoint"):
        if event["state"] == "complete" and event["step"] < spike["onset"] - 1 and Path(event["folder"]).exists():
            folders.append(event["folder"])
    if not folders:
        return
    # The name is the log's, and this line is made to be pasted into a shell.
    checkpoint = shlex.quote(folders[-1])
    last_step = spike["step"] + SHOWN_BESIDE_SPIKE
    flags = f"--resume_from_checkpoint {checkpoint} --output_dir NEW --on_spike log --max_train_steps {last_step}"
    say(f"To do these steps again from the checkpoint before them, add to the run's own launch line:\n  {flags}")


ACTIONS = {
    "status": status,
    "why": why,
    "show": show,
    "note": note,
    "verify": verify,
    "export": export,
    "replay": replay,
}
