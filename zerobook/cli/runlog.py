"""``zerobook runlog``: what happened to a run, why, and what it cost.

zerobook runlog status outputs/run           the state of the run, in a sentence or two
zerobook runlog why outputs/run [STEP]       the last decision (or the one about STEP), from what was seen to what came of it
zerobook runlog spikes outputs/run           every spike and what was done
zerobook runlog lost outputs/run             where the time and the steps went
zerobook runlog good outputs/run             the checkpoints, and which are proven good
zerobook runlog skipped outputs/run          samples that are left out, and why
zerobook runlog path outputs/run             the branches of the run, and the steps of each that are still part of it
zerobook runlog compare A B C ...            runs in one table: what differs, held-out loss, speed, memory [--json]
zerobook runlog diff A B                     two runs, or two attempts of one: diff RUN 1 2
zerobook runlog note outputs/run "..."       write into the logbook, while it runs or later
zerobook runlog verify outputs/run           read every line; exit code 1 where something is wrong
zerobook runlog export outputs/run [--all]   the living steps (or all) as CSV
zerobook runlog replay outputs/run STEP      a spike's steps again through the detector, and the command that does them again
zerobook runlog report outputs/run           the logbook as one HTML page and as Markdown [--watch serves it]
zerobook runlog test-detector FILE           what the spike detector would have done on this curve
"""

from __future__ import annotations

import argparse
import csv
import getpass
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.cli.arguments import Parser
from zerobook.errors import RunLogError
from zerobook.runlog import compare
from zerobook.runlog.events import ENDING_EVENTS, is_quiet, sentence
from zerobook.runlog.formatting import duration
from zerobook.runlog.history import History, folder_of, is_being_written, last_of
from zerobook.runlog.summary import summary
from zerobook.runlog.writer import EVENTS
from zerobook.utils.terminal import console, plain, say
from zerobook.utils.units import counted

if TYPE_CHECKING:
    from rich.table import Table


def runlog(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    if arguments[:1] == ["test-detector"]:
        from zerobook.cli.try_detector import test_detector

        return test_detector(arguments[1:])
    if arguments[:1] == ["report"]:
        from zerobook.cli.report import report

        return report(arguments[1:])
    if arguments[:1] == ["compare"]:
        from zerobook.cli.compare_runs import compare_runs

        return compare_runs(arguments[1:])
    parser = Parser("zerobook runlog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=[*_ACTIONS, "compare", "report", "test-detector"])
    parser.add_argument("run", help="a run's output_dir")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help="export: include steps of abandoned branches")
    parser.add_argument("--json", action="store_true", help="print JSON: for status, why, spikes, lost, good, skipped, path")
    known = parser.parse_args(arguments)
    if known.action not in _ACTIONS:
        parser.error(f"write {known.action} first, before its flags")
    if known.json and known.action not in _AS_JSON:
        raise RunLogError(f"zerobook runlog {known.action}: it prints no JSON. {', '.join(_AS_JSON)} do.")
    most = {"why": 1, "note": 1, "replay": 1, "diff": 2}.get(known.action, 0)
    if len(known.rest) > most:
        raise RunLogError(
            f"zerobook runlog {known.action}: {' '.join(known.rest)!r} are too many arguments. See zerobook runlog --help."
        )
    if known.json:
        print(json.dumps(_AS_JSON[known.action](known), indent=2, default=str))
        return 0
    return _ACTIONS[known.action](known) or 0


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table()
    for name in columns:
        right = name in ("step", "from", "to", "steps", "samples", "seq", "time", "points", "branch", "attempt")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _step(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RunLogError(f"{text!r} is no step. Give a number.") from None


# --- status
def status(known: argparse.Namespace) -> None:
    say(summary(folder_of(known.run)))


# --- what happened
def why(known: argparse.Namespace) -> int | None:
    history = History.read(known.run)
    decisions = history.of("decision")
    if known.rest:
        step = _step(known.rest[0])
        near = [d for d in decisions if (cause := history.causes(d)[0]).get("onset", -1) <= step <= cause.get("step", -1)]
        if not near:
            say(f"Nothing was decided about step {step}.")
            return 1
        decisions = near
    if not decisions:
        say("Nothing had to be decided.")
        return None
    for decision in decisions if known.rest else decisions[-1:]:
        for event in [*history.causes(decision), *history.effects(decision)]:
            say(f"[{event['seq']}] {sentence(event)}")
    return None


def spikes(known: argparse.Namespace) -> None:
    history = History.read(known.run)
    table = _table("seq", "branch", "step", "points", "what", "loss", "what was done")
    for event in history.of("spike"):
        done = next((e["measure"] for e in history.effects(event) if e["type"] == "decision"), "")
        base, peak = (f"{event[key]:.4g}" if event[key] is not None else "not finite" for key in ("base", "peak"))
        table.add_row(
            str(event["seq"]),
            str(event["branch"]),
            str(event["onset"]),
            str(event["points"]),
            event["kind"],
            f"{base} -> {peak}",
            done,
        )
    odd = len([e for e in history.of("anomaly") if e["kind"] == "outlier"])
    console().print(table if table.row_count else "No spike.")
    say(f"High for one or a few steps: {counted(odd, 'time')}; no action is taken for that.")


def lost(known: argparse.Namespace) -> None:
    spent = History.read(known.run).time()
    table = _table("what", "time", "share", "steps")
    rows: list[tuple[str, float, int | None]] = [("training that was kept", spent.training, None)]
    rows += [(f"training given up: {cause}", s, spent.steps_given_up[cause]) for cause, s in spent.given_up.items()]
    rows += [("rolling back", spent.going_back, None), ("evaluating", spent.evaluating, None), ("saving", spent.saving, None),
             ("between attempts", spent.stopped, None), ("starting up, and the rest", spent.other, None)]  # fmt: skip
    for name, seconds, steps in rows:
        share = f"{seconds / spent.total:.1%}" if spent.total else ""
        table.add_row(name, duration(seconds), share, "" if steps is None else str(steps))
    console().print(table)
    say(f"{spent.ratio:.1%} of {duration(spent.total)} was spent on training that was kept.")


def good(known: argparse.Namespace) -> None:
    history = History.read(known.run)
    states: dict[int, dict[str, Any]] = {}
    for event in history.of("checkpoint"):
        if event["state"] == "complete":
            states[event["step"]] = {"folder": event["folder"], "proven": False, "seq": event["seq"], "branch": event["branch"]}
        elif event["state"] == "proven_good" and event["step"] in states:
            states[event["step"]]["proven"] = True
    lives = history.lives_to()
    table = _table("seq", "step", "branch", "state", "on disk")
    for step, facts in sorted(states.items()):
        given_up = step > lives.get(facts["branch"], float("inf"))
        state = "of an abandoned branch" if given_up else "proven good" if facts["proven"] else "not proven yet"
        there = Path(facts["folder"]).exists() and not given_up
        table.add_row(str(facts["seq"]), str(step), str(facts["branch"]), state, facts["folder"] if there else "no")
    console().print(table if states else "No checkpoint was saved.")


def skipped(known: argparse.Namespace) -> None:
    found = History.read(known.run).of("skip")
    if not found:
        say("Nothing is left out.")
        return
    table = _table("seq", "steps", "samples", "ranges", "why")
    for event in found:
        shown = ", ".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in event["ranges"][:40])
        more = f" and {len(event['ranges']) - 40} more" if len(event["ranges"]) > 40 else ""
        table.add_row(str(event["seq"]), "{} to {}".format(*event["steps"]), str(event["samples"]), shown + more, event["why"])
    console().print(table)


def path(known: argparse.Namespace) -> None:
    history = History.read(known.run)
    table = _table("branch", "attempt", "from", "to", "lives to", "why it began")
    for branch in history.branches():
        cause = sentence(branch.cause) if branch.cause else "the run began"
        lives = (
            "all of it"
            if branch.lives_to >= branch.end
            else "nothing"
            if branch.lives_to <= branch.start
            else f"step {branch.lives_to}"
        )
        table.add_row(str(branch.number), str(branch.attempt), str(branch.start), str(branch.end), lives, cause)
    console().print(table)


# --- comparing
def diff(known: argparse.Namespace) -> int | None:
    rest = known.rest
    if len(rest) == 2:
        history = History.read(known.run)
        starts = {event["attempt"]: event for event in history.of("run_start")}
        missing = [number for number in rest if _step(number) not in starts]
        if missing:
            raise RunLogError(f"{known.run}: it has no attempt {missing[0]}, only {', '.join(map(str, starts))}.")
        first, second = starts[int(rest[0])], starts[int(rest[1])]
        losses = [{r["step"]: r["loss"] for r in history.steps() if r["attempt"] == int(number)} for number in rest]
    elif len(rest) == 1:
        runs = [History.read(known.run), History.read(rest[0])]
        first, second = (run.of("run_start")[-1] for run in runs)
        losses = [{r["step"]: r["loss"] for r in run.steps(living=True)} for run in runs]
    else:
        raise RunLogError("zerobook runlog diff: give two runs, or a run and two of its attempts' numbers.")
    table = _table("what", "first", "second")
    for was, now in (
        (compare.launch(first), compare.launch(second)), (first["config"], second["config"]),
        (first["versions"], second["versions"]),
    ):  # fmt: skip
        for key, (before, after) in compare.differences(was, now).items():
            table.add_row(key, str(before), str(after))
    console().print(table if table.row_count else "The launch, the settings and the versions are the same.")
    if shared := sorted(set(losses[0]) & set(losses[1])):
        apart = compare.first_apart(*losses)
        if apart is None:
            say(f"The losses of the {counted(len(shared), 'step')} that both have are the same, bit for bit.")
        else:
            far = max(shared, key=lambda s: abs((losses[0][s] or 0) - (losses[1][s] or 0)))
            say(f"The losses differ from step {apart} on ({losses[0][apart]} and {losses[1][apart]}), most at step {far} "
                  f"({losses[0][far]} and {losses[1][far]}).")  # fmt: skip
    else:
        say("They have no step in common.")
    return None


# --- writing, checking, taking out
def note(known: argparse.Namespace) -> int | None:
    from zerobook.runlog.writer import RunLog, leave_note

    if not known.rest or not known.rest[0].strip():
        raise RunLogError('zerobook runlog note: no text is given. Give it in quotes, as in note outputs/run "..."')
    folder = folder_of(known.run)
    text, by = known.rest[0], getpass.getuser()
    if is_being_written(folder):
        leave_note(folder, text, by)
        say("Noted. The run adds it to its log at its next log point.")
        return None
    log = RunLog(folder.parent, attempt=False)
    seq = log.event("note", text=text, by=by)
    log.close()
    say(f"Noted as [{seq}].")
    return None


def verify(known: argparse.Namespace) -> int:
    from zerobook.runlog.check import problems

    found, counts = problems(folder_of(known.run))
    for problem in found:
        say(problem)
    say(
        f"{counted(counts['events'], 'event')} and {counted(counts['steps'], 'step')} read: "
        + (counted(len(found), "problem") if found else "all sound")
    )
    return int(bool(found))


def export(known: argparse.Namespace) -> None:
    columns = ("step", "loss", "grad_norm", "learning_rate", "tokens", "attempt", "branch")
    rows = csv.writer(sys.stdout)
    rows.writerow(columns)
    for record in History.read(known.run).steps(living=not known.all):
        values = (record[name] for name in columns)
        rows.writerow([plain(value, lines=False) if isinstance(value, str) else value for value in values])


def replay(known: argparse.Namespace) -> int | None:
    """Print the steps of a spike, each with what the detector says."""
    from zerobook.monitor.curves import points_of
    from zerobook.monitor.detector import Detector

    if not known.rest:
        raise RunLogError(
            "zerobook runlog replay: no spike is named. Give one of its steps; zerobook runlog spikes lists them."
        )
    step = _step(known.rest[0])
    history = History.read(known.run)
    near = [e for e in history.of("spike") if e["onset"] - 16 <= step <= e["step"] + 16]
    if not near:
        say(f"There is no spike at step {step}. zerobook runlog spikes {known.run} lists them.")
        return 1
    spike = near[0]
    detector = Detector()
    table = _table("step", "loss", "level", "excess", "evidence", "the detector says")
    for point in points_of(history.steps(seen_from=spike["branch"])):
        if point.step > spike["step"] + 4:
            break
        level = detector.level() if len(detector.loss.near) else point.loss
        unit = detector.loss.unit() if len(detector.loss.near) else 1.0
        found = detector.update(point)
        if point.step >= spike["onset"] - 4:
            says = "; ".join(f"{f.kind}: {f.reason}" for f in found)
            table.add_row(str(point.step), f"{point.loss:.4g}", f"{level:.4g}", f"{(point.loss - level) / unit:.1f}",
                          f"{detector.evidence:.1f}", says)  # fmt: skip
    console().print(table)
    before = [e for e in history.of("checkpoint") if e["state"] == "complete" and e["step"] < spike["onset"] - 1]
    there = [e["folder"] for e in before if Path(e["folder"]).exists()]
    if there:
        # The name is the log's, and this line is made to be pasted into a shell.
        checkpoint = shlex.quote(there[-1])
        flags = f"--resume_from_checkpoint {checkpoint} --output_dir NEW --on_spike log --max_train_steps {spike['step'] + 4}"
        say(f"To do these steps again from the checkpoint before them, add to the run's own launch line:\n  {flags}")
    return None


# --- as JSON
def _status_json(known: argparse.Namespace) -> dict[str, Any]:
    folder = folder_of(known.run)
    newest = last_of(folder / EVENTS, ("run_start", "metrics", "eval", "checkpoint", *ENDING_EVENTS))
    return {"status": summary(folder), **newest}


def _why_json(known: argparse.Namespace) -> list[list[dict[str, Any]]]:
    history = History.read(known.run)
    return [[*history.causes(decision), *history.effects(decision)] for decision in history.of("decision")]


def _lost_json(known: argparse.Namespace) -> dict[str, Any]:
    spent = History.read(known.run).time()
    return {**asdict(spent), "other": spent.other, "ratio": spent.ratio}


_AS_JSON: dict[str, Callable[[argparse.Namespace], Any]] = {
    "status": _status_json,
    "why": _why_json,
    "spikes": lambda known: History.read(known.run).of("spike"),
    "lost": _lost_json,
    "good": lambda known: History.read(known.run).of("checkpoint"),
    "skipped": lambda known: History.read(known.run).of("skip"),
    "path": lambda known: [asdict(branch) for branch in History.read(known.run).branches()],
}
"""action -> what it prints with ``--json``: events as docs/reference/runlog.md describes them, seconds, or branches"""


def story(history: History) -> list[dict[str, Any]]:
    """Return the events of the logbook, without series and samples."""
    return [event for event in history.events if not is_quiet(event)]


_ACTIONS = {
    "status": status, "why": why, "spikes": spikes, "lost": lost, "good": good, "skipped": skipped, "path": path, "diff": diff,
    "note": note, "verify": verify, "export": export, "replay": replay,
}  # fmt: skip
