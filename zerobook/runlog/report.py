"""The logbook of a run as one HTML page that needs no other file, and as Markdown."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from zerobook.runlog import figures
from zerobook.runlog.events import Event, ending_types, is_quiet, mood, sentence
from zerobook.runlog.facts import run_facts
from zerobook.runlog.formatting import duration, figure
from zerobook.runlog.history import History, TimeSpent, folder_of, when
from zerobook.utils.terminal import plain
from zerobook.utils.writing import write_whole

PAGE = "report.html"
MARKDOWN = "report.md"
MOST_RANGES = 60
"""Ranges of sample numbers that a table lists."""


def write(run: str | Path) -> tuple[Path, Path]:
    """Write the page and the Markdown file beside the log. Return their paths."""
    folder = folder_of(run)
    history = History.read(folder)
    page = folder / PAGE
    markdown = folder / MARKDOWN
    write_whole(page, render(history))
    write_whole(markdown, as_markdown(history))
    return page, markdown


def render(history: History, refresh: int | None = None) -> str:
    """Return the page. ``refresh``: seconds after which a browser loads it again."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, finalize=_printable)
    spent = history.time()
    # The script is ours; everything else is escaped.
    script = jinja2.utils.markupsafe.Markup((Path(__file__).parent / "charts.js").read_text())
    return environment.get_template("report.html.j2").render(
        name=_name(history),
        state=_state(history),
        facts=run_facts(history),
        cards=_cards(history, spent),
        refresh=refresh,
        charts=figures.charts(history),
        script=script,
        hint=figures.data_bound(history),
        tables=_tables(history, spent),
        days=_days(history),
        events=len(history.events),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
    )


def _printable(value: Any) -> Any:
    """Return a value of the page without control characters, which its source may show in a terminal."""
    return plain(value) if type(value) is str else value


def _name(history: History) -> str:
    return str(history.folder.resolve().parent.name)


def _state(history: History) -> str:
    from zerobook.runlog.summary import summary

    return summary(history.folder)


def _cards(history: History, spent: TimeSpent) -> list[tuple[str, str]]:
    """Return the large numbers at the top of the page: (text, label)."""
    starts = history.of("run_start")
    log_points = history.of("metrics")
    cards = [(f"{spent.ratio:.1%}", "effective training time"), (duration(spent.total), "since the first event")]
    if log_points:
        cards.append((f"{log_points[-1]['steps'][1]:,} / {starts[-1]['total_steps']:,}", "steps"))
    losses = [event["loss"] for event in history.of("eval") if "loss" in event]
    if losses:
        cards.append((figure(losses[-1], ".4f"), "held-out loss"))
    if log_points:
        cards += _speed_cards(log_points[-1])
    memory = history.of("memory")
    if memory:
        cards.append((f"{memory[-1]['trained_parameters']:,}", "trained parameters"))
    rollbacks = [event for event in history.of("rollback") if event["phase"] == "outcome"]
    samples_left_out = sum(event["samples"] for event in history.of("skip"))
    cards.append((str(len(rollbacks)), "rollbacks"))
    cards.append((str(samples_left_out), "samples left out"))
    cards.append((str(len(starts)), "attempts"))
    cards.append((f"{sum(spent.steps_given_up.values()):,}", "steps given up"))
    return cards


def _speed_cards(log_point: Event) -> list[tuple[str, str]]:
    cards = [(f"{log_point['tokens_per_second']:,.0f}", "supervised tokens/s")]
    if "all_tokens_per_second" in log_point:
        cards.append((f"{log_point['all_tokens_per_second']:,.0f}", "all tokens/s"))
    tflops = log_point.get("tflops")
    mfu = log_point.get("mfu")
    if tflops is not None:
        cards.append((format(tflops, ".3g"), "TFLOPS per device"))
    # Without the peak of the device, its share is not known.
    if mfu is not None or tflops is not None:
        cards.append(("n/a" if mfu is None else f"{mfu:.1%}", "MFU"))
    return cards


# --- tables
class Table(NamedTuple):
    """A table of the page. ``columns`` are its headings; a column ``seq`` holds numbers of events."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_if_empty: str = "None."


def _tables(history: History, spent: TimeSpent) -> list[Table]:
    return [
        _table_of_time(spent),
        _table_of_rollbacks(history),
        _table_of_data_left_out(history),
        _table_of_checkpoints(history),
        *_tables_of_samples(history),
        _table_of_attempts(history),
        _table_of_changes(history),
    ]


def _table_of_time(spent: TimeSpent) -> Table:
    uses = {"training that was kept": spent.training}
    for cause, seconds in spent.given_up.items():
        uses[f"training given up: {cause}"] = seconds
    uses |= {
        "rolling back": spent.going_back,
        "evaluating": spent.evaluating,
        "saving": spent.saving,
        "between attempts": spent.stopped,
        "starting up, and the rest": spent.other,
    }
    rows = []
    for use, seconds in uses.items():
        share = f"{seconds / spent.total:.1%}" if spent.total else ""
        rows.append([use, duration(seconds), share])
    return Table("Where the time went", ["what", "time", "share"], rows)


def _table_of_rollbacks(history: History) -> Table:
    rows = []
    for intent in history.of("rollback"):
        if intent["phase"] != "intent":
            continue
        outcomes = [event for event in history.effects(intent) if event["type"] == "rollback"]
        took = "it has not ended"
        if outcomes:
            took = f"{duration(outcomes[0]['seconds'])}, branch {outcomes[0]['branch']}"
        steps = [str(intent["from_step"]), str(intent["to_step"])]
        rows.append([f"[{intent['seq']}]", *steps, intent["measure"], intent["why"], took])
    return Table("Rollbacks", ["seq", "from step", "to step", "measure", "why", "took"], rows)


def _table_of_data_left_out(history: History) -> Table:
    rows = []
    for event in history.of("skip"):
        first, last = event["steps"]
        ranges = _format_ranges(event["ranges"])
        rows.append([f"[{event['seq']}]", f"{first} to {last}", str(event["samples"]), ranges, event["why"]])
    return Table("Data left out", ["seq", "steps", "samples", "sample numbers", "why"], rows)


def _format_ranges(ranges: list[list[int]]) -> str:
    shown = []
    for start, end in ranges[:MOST_RANGES]:
        shown.append(str(start) if end - start == 1 else f"{start}-{end - 1}")
    more = f" and {len(ranges) - MOST_RANGES} more stretches" if len(ranges) > MOST_RANGES else ""
    return ", ".join(shown) + more


def _table_of_checkpoints(history: History) -> Table:
    proven_by = _proven_by(history)
    rows = []
    for event in history.of("checkpoint"):
        if event["state"] == "complete":
            proof = f"[{proven_by[event['seq']]}]" if event["seq"] in proven_by else ""
            rows.append([f"[{event['seq']}]", str(event["step"]), str(event["branch"]), duration(event["seconds"]), proof])
    return Table("Checkpoints", ["seq", "step", "branch", "took", "proven good"], rows)


def _proven_by(history: History) -> dict[int, int]:
    """Return seq of a checkpoint's event -> seq of the event that says it is good."""
    newest_of_step: dict[int, int] = {}
    proven_by: dict[int, int] = {}
    for event in history.of("checkpoint"):
        if event["state"] == "complete":
            newest_of_step[event["step"]] = event["seq"]
        elif event["state"] == "proven_good" and event["step"] in newest_of_step:
            proven_by[newest_of_step[event["step"]]] = event["seq"]
    return proven_by


def _tables_of_samples(history: History) -> list[Table]:
    """Return the table of the newest evaluation that has samples, such as generated texts; an empty list without any."""
    evaluations = [event for event in history.of("eval") if event.get("samples")]
    if not evaluations:
        return []
    newest = evaluations[-1]
    columns = list(newest["samples"][0])
    rows = [[str(sample.get(column, "")) for column in columns] for sample in newest["samples"]]
    return [Table(f"Samples of the evaluation at step {newest['step']}", columns, rows)]


def _table_of_attempts(history: History) -> Table:
    rows = []
    for attempt in history.attempts():
        starts = [event for event in attempt if event["type"] == "run_start"]
        start = starts[0] if starts else attempt[0]
        lasted = duration(max(0.0, (when(attempt[-1]) - when(attempt[0])).total_seconds()))
        # An attempt may hold the crash event of the one before it.
        failures = [event for event in attempt if event["type"] in ending_types() and not event.get("of_attempt")]
        why = sentence(failures[-1]) if failures and failures[-1]["type"] != "run_end" else ""
        rows.append([f"[{start['seq']}]", str(start["attempt"]), lasted, history.ending(attempt), why])
    return Table("Attempts", ["seq", "attempt", "lasted", "ended", "why"], rows)


def _table_of_changes(history: History) -> Table:
    changes = history.of("config_diff", "launch_diff", "env_diff", "verify")
    rows = [[f"[{event['seq']}]", str(event["attempt"]), sentence(event)] for event in changes]
    title = "Changes: settings, launch, environment, and steps done again"
    return Table(title, ["seq", "attempt", "what"], rows)


# --- the list of events
def _days(history: History) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return day -> entries of the logbook: what happened, what was done about it, and the result."""
    days: dict[str, list[dict[str, Any]]] = {}
    for event in history.events:
        if is_quiet(event):
            continue
        time = when(event)
        entry = {"seq": event["seq"], "time": time.strftime("%H:%M:%S"), "text": sentence(event), "mood": mood(event)}
        days.setdefault(time.strftime("%A, %d %B %Y"), []).append(entry)
    return list(days.items())


def as_markdown(history: History) -> str:
    """Return the logbook as Markdown, without the figures."""
    spent = history.time()
    lines = [f"# {_plain(_name(history))}: logbook", "", _plain(_state(history)), ""]
    lines += [f"- {label}: {_plain(text)}" for label, text in run_facts(history).items()]
    lines += [f"- {label}: {number}" for number, label in _cards(history, spent)]
    for table in _tables(history, spent):
        lines += ["", f"## {_plain(table.title)}", ""]
        if table.rows:
            lines += [_markdown_row(table.columns), "|" + "---|" * len(table.columns)]
            lines += [_markdown_row(row) for row in table.rows]
        else:
            lines.append(table.text_if_empty)
    lines += ["", "## Logbook"]
    for day, entries in _days(history):
        lines += ["", f"### {day}", ""]
        lines += [f"- {entry['time']} [{entry['seq']}] {_plain(entry['text'])}" for entry in entries]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> str:
    """Return a row of a table. Its cells, the names of columns too, may come from data."""
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return ``text`` as one line, escaped for Markdown and HTML."""
    visible = "".join(character for character in text if character.isprintable() or character.isspace())
    line = html.escape(" ".join(visible.split()), quote=False)
    # It makes no link, picture or code.
    return re.sub(r"([\\`*\[])", r"\\\1", line)
