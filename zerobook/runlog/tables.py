"""Tables of what happened to a run, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from zerobook.runlog.events import Event, is_quiet, sentence
from zerobook.runlog.formatting import figure
from zerobook.runlog.history import Branch, History, event_time, find_ending, time_spent
from zerobook.utils.units import duration

# Maximum number of ranges of sample numbers in one cell of a table.
MOST_RANGES = 60


class Table(NamedTuple):
    """A table. ``columns`` are its headings; a column ``seq`` holds numbers of events."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def time_table(history: History) -> Table:
    spent = time_spent(history)
    uses = [("training", spent.training, "")]
    for cause, seconds in spent.abandoned.items():
        uses.append((f"training abandoned: {cause}", seconds, str(spent.abandoned_steps[cause])))
    uses += [
        ("rolling back", spent.going_back, ""),
        ("evaluating", spent.evaluating, ""),
        ("saving", spent.saving, ""),
        ("between attempts", spent.stopped, ""),
        ("starting, and other", spent.other, ""),
    ]
    rows = []
    for use, seconds, steps in uses:
        share = f"{seconds / spent.total:.1%}" if spent.total else ""
        rows.append([use, duration(seconds), share, steps])
    return Table("Where the time went", ["what", "time", "share", "steps"], rows)


def spike_table(history: History) -> Table:
    rows = []
    for spike in history.of("spike"):
        actions = [effect["action"] for effect in history.effects(spike) if effect["type"] == "decision"]
        loss = f"{figure(spike['base'], '.4g')} -> {figure(spike['peak'], '.4g')}"
        rows.append(
            [
                _format_seq(spike),
                str(spike["branch"]),
                str(spike["onset"]),
                str(spike["points"]),
                spike["kind"],
                loss,
                actions[0] if actions else "",
            ]
        )
    return Table("Spikes", ["seq", "branch", "step", "points", "what", "loss", "what was done"], rows)


def rollback_table(history: History) -> Table:
    rows = []
    # A rollback writes two events. The intent has the reason, and the outcome has the time that the rollback took.
    for intent in history.of("rollback"):
        if intent["phase"] != "intent":
            continue
        outcomes = [event for event in history.effects(intent) if event["type"] == "rollback"]
        took = "it has not ended"
        if outcomes:
            took = f"{duration(outcomes[0]['seconds'])}, branch {outcomes[0]['branch']}"
        rows.append(
            [_format_seq(intent), str(intent["from_step"]), str(intent["to_step"]), intent["action"], intent["why"], took]
        )
    return Table("Rollbacks", ["seq", "from step", "to step", "action", "why", "took"], rows)


def skipped_table(history: History) -> Table:
    rows = []
    for event in history.of("skip"):
        first, last = event["steps"]
        rows.append(
            [_format_seq(event), f"{first} to {last}", str(event["samples"]), _format_ranges(event["ranges"]), event["why"]]
        )
    return Table("Data left out", ["seq", "steps", "samples", "sample numbers", "why"], rows)


def _format_ranges(ranges: list[list[int]]) -> str:
    """Return ranges as text: [[5, 7], [9, 10]], whose ends are excluded, as ``5-6, 9``."""
    shown = []
    for start, end in ranges[:MOST_RANGES]:
        shown.append(str(start) if end - start == 1 else f"{start}-{end - 1}")
    more = f" and {len(ranges) - MOST_RANGES} more ranges" if len(ranges) > MOST_RANGES else ""
    return ", ".join(shown) + more


def checkpoint_table(history: History) -> Table:
    # Number of a save's event -> number of the event that says that the checkpoint is proven good. It is shown in brackets.
    proven_by = _find_proofs(history)
    last_current_steps = history.last_current_steps()
    rows = []
    for event in history.of("checkpoint"):
        if event["state"] != "complete":
            continue
        state = "not proven yet"
        if event["step"] > last_current_steps.get(event["branch"], float("inf")):
            state = "of an abandoned branch"
        elif event["seq"] in proven_by:
            state = f"proven good [{proven_by[event['seq']]}]"
        rows.append([_format_seq(event), str(event["step"]), str(event["branch"]), duration(event.get("seconds") or 0), state])
    return Table("Checkpoints", ["seq", "step", "branch", "took", "state"], rows)


def _find_proofs(history: History) -> dict[int, int]:
    """Return the number of the event of a save -> the number of the event that says that the checkpoint is proven good."""
    # Step -> the number of its newest save.
    newest_of_step: dict[int, int] = {}
    proven_by: dict[int, int] = {}
    for event in history.of("checkpoint"):
        # After a rollback, a step is saved again, and has to be proven again.
        if event["state"] == "complete":
            newest_of_step[event["step"]] = event["seq"]
        elif event["state"] == "proven_good" and event["step"] in newest_of_step:
            proven_by[newest_of_step[event["step"]]] = event["seq"]
    return proven_by


def branch_table(history: History) -> Table:
    rows = []
    for branch in history.branches():
        cause = sentence(branch.cause) if branch.cause else "the run began"
        rows.append(
            [
                str(branch.number),
                str(branch.attempt),
                str(branch.start),
                str(branch.end),
                _describe_current_part(branch),
                cause,
            ]
        )
    return Table("Branches", ["branch", "attempt", "from", "to", "current up to", "why it began"], rows)


def _describe_current_part(branch: Branch) -> str:
    if branch.lives_to >= branch.end:
        return "all of it"
    if branch.lives_to <= branch.start:
        return "nothing"
    return f"step {branch.lives_to}"


def attempt_table(history: History) -> Table:
    rows = []
    for attempt in history.attempts():
        starts = [event for event in attempt if event["type"] == "run_start"]
        start = starts[0] if starts else attempt[0]
        # The wall clock may have been set during the attempt.
        seconds = attempt[-1]["monotonic"] - attempt[0]["monotonic"]
        ending = find_ending(attempt)
        why = ""
        if ending is not None and ending["type"] != "run_end":
            why = sentence(ending)
        rows.append([_format_seq(start), str(start["attempt"]), duration(seconds), history.ending(attempt), why])
    return Table("Attempts", ["seq", "attempt", "lasted", "ended", "why"], rows)


def change_table(history: History) -> Table:
    rows = []
    for event in history.of("config_diff", "launch_diff", "env_diff", "verify"):
        rows.append([_format_seq(event), str(event["attempt"]), sentence(event)])
    return Table("Changes: settings, launch, environment, and steps done again", ["seq", "attempt", "what"], rows)


def decisions(history: History) -> list[list[Event]]:
    """Return for each decision a list of events: those that led to it, the decision, and what it caused."""
    return [[*history.causes(decision), *history.effects(decision)] for decision in history.of("decision")]


def decision_table(history: History) -> Table:
    rows = []
    for number, events in enumerate(decisions(history), 1):
        for event in events:
            rows.append([str(number), _format_seq(event), sentence(event)])
    return Table("Decisions", ["decision", "seq", "what"], rows)


def notable_events(history: History) -> list[Event]:
    """Return the events that lists show. Events of frequent measurements, such as log points, are left out."""
    return [event for event in history.events if not is_quiet(event)]


def event_table(history: History) -> Table:
    rows = [
        [_format_seq(event), event_time(event).strftime("%Y-%m-%d %H:%M:%S"), sentence(event)]
        for event in notable_events(history)
    ]
    return Table("Events", ["seq", "UTC", "what"], rows)


def sample_tables(history: History) -> list[Table]:
    """Return the table of the newest evaluation that has samples, such as generated texts; an empty list without any."""
    evaluations = [event for event in history.of("eval") if event.get("samples")]
    if not evaluations:
        return []
    newest = evaluations[-1]
    columns = list(newest["samples"][0])
    rows = []
    for sample in newest["samples"]:
        rows.append([str(sample.get(column, "")) for column in columns])
    return [Table(f"Samples of the evaluation at step {newest['step']}", columns, rows)]


def _format_seq(event: Event) -> str:
    return f"[{event['seq']}]"


# --- the tables that ``zerobook runlog show`` takes by name
@dataclass(frozen=True, kw_only=True)
class View:
    """Functions that make a table of a run, and the same content as JSON values."""

    table: Callable[[History], Table]
    as_json: Callable[[History], Any]


def _time_as_json(history: History) -> dict[str, Any]:
    spent = time_spent(history)
    return {
        **asdict(spent),
        "other": spent.other,
        "ratio": spent.ratio,
        # Earlier names of ``abandoned`` and ``abandoned_steps``, which programs may still read.
        "given_up": spent.abandoned,
        "steps_given_up": spent.abandoned_steps,
    }


# The JSON values are events, as docs/reference/runlog.md describes them. Only those of ``time`` are seconds, and those of
# ``branches`` have the fields of `Branch`.
VIEWS = {
    "spikes": View(table=spike_table, as_json=lambda history: history.of("spike")),
    "decisions": View(table=decision_table, as_json=decisions),
    "time": View(table=time_table, as_json=_time_as_json),
    "checkpoints": View(table=checkpoint_table, as_json=lambda history: history.of("checkpoint")),
    "skipped": View(table=skipped_table, as_json=lambda history: history.of("skip")),
    "branches": View(table=branch_table, as_json=lambda history: list(map(asdict, history.branches()))),
    "events": View(table=event_table, as_json=notable_events),
}
