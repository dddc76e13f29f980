"""The logbook of a run as one HTML page that needs no other file, and as Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerobook.runlog import figures
from zerobook.runlog.event_text import QUIET, duration, figure, sentence
from zerobook.runlog.facts import run_facts
from zerobook.runlog.history import History, TimeSpent, folder_of, when
from zerobook.utils.terminal import plain

PAGE = "report.html"
MARKDOWN = "report.md"
_MOODS = {"spike": "warn", "rollback": "bad", "crash": "bad", "stop": "bad", "save_failed": "bad", "memory_warning": "bad",
          "straggler": "warn", "preempted": "warn", "verify": "good", "run_end": "good", "note": "note"}  # fmt: skip


def write(run: str | Path) -> tuple[Path, Path]:
    """Write the page and the Markdown file beside the log. Return their paths."""
    folder = folder_of(run)
    history = History.read(folder)
    page, markdown = folder / PAGE, folder / MARKDOWN
    _put(page, render(history))
    _put(markdown, as_markdown(history))
    return page, markdown


def _put(file: Path, text: str) -> None:
    """Write a file completely or not at all: half a page on a full disk would take space that the run's model still needs."""
    staging = file.with_name(f"{file.name}.partial")
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(file)
    except OSError:
        staging.unlink(missing_ok=True)
        raise


def render(history: History, refresh: int | None = None) -> str:
    """Return the page. ``refresh``: seconds after which a browser loads it again."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, finalize=_printable)
    spent = history.time()
    drawn = {name: jinja2.utils.markupsafe.Markup(figure) for name, figure in figures.draw(history).items()}
    return environment.get_template("report.html.j2").render(
        name=_name(history), state=_state(history), facts=run_facts(history), cards=_cards(history, spent), refresh=refresh,
        figures=drawn, hint=figures.data_bound(history),
        tables=list(_tables(history, spent)), days=_days(history), events=len(history.events),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip


def _printable(value: Any) -> Any:
    """Return a value of the page without control characters, which its source may show in a terminal."""
    return plain(value) if type(value) is str else value


def _name(history: History) -> str:
    return str(history.folder.resolve().parent.name)


def _state(history: History) -> str:
    from zerobook.runlog.summary import summary

    return summary(history.folder)


def _cards(history: History, spent: TimeSpent) -> list[tuple[str, str]]:
    starts, metrics, evals = history.of("run_start"), history.of("metrics"), history.of("eval")
    outcomes = [e for e in history.of("rollback") if e["phase"] == "outcome"]
    cards = [(f"{spent.ratio:.1%}", "effective training time"), (duration(spent.total), "since the first event")]
    if metrics:
        cards.append((f"{metrics[-1]['steps'][1]:,} / {starts[-1]['total_steps']:,}", "steps"))
    losses = [e["loss"] for e in evals if "loss" in e]
    if losses:
        cards.append((figure(losses[-1], ".4f"), "held-out loss"))
    if metrics:
        cards.append((f"{metrics[-1]['tokens_per_second']:,.0f}", "supervised tokens/s"))
        if "all_tokens_per_second" in metrics[-1]:
            cards.append((f"{metrics[-1]['all_tokens_per_second']:,.0f}", "all tokens/s"))
        tflops, mfu = metrics[-1].get("tflops"), metrics[-1].get("mfu")
        if tflops is not None:
            cards.append((format(tflops, ".3g"), "TFLOPS per device"))
        if mfu is not None or tflops is not None:
            cards.append(("n/a" if mfu is None else f"{mfu:.1%}", "MFU"))
    memory = history.of("memory")
    if memory:
        cards.append((f"{memory[-1]['trained_parameters']:,}", "trained parameters"))
    cards += [(str(len(outcomes)), "rollbacks"), (str(sum(e["samples"] for e in history.of("skip"))), "samples left out")]
    cards += [(str(len(starts)), "attempts"), (f"{sum(spent.steps_given_up.values()):,}", "steps given up")]
    return cards


# --- tables and entries
def _tables(history: History, spent: TimeSpent) -> Iterator[tuple[str, list[str], list[list[str]], str]]:
    rows = [["training that was kept", duration(spent.training), f"{spent.ratio:.1%}"]]
    parts = [(f"training given up: {cause}", seconds) for cause, seconds in spent.given_up.items()]
    parts += [("rolling back", spent.going_back), ("evaluating", spent.evaluating), ("saving", spent.saving),
              ("between attempts", spent.stopped), ("starting up, and the rest", spent.other)]  # fmt: skip
    rows += [[name, duration(seconds), f"{seconds / spent.total:.1%}" if spent.total else ""] for name, seconds in parts]
    yield "Where the time went", ["what", "time", "share"], rows, ""
    rows = []
    for intent in [e for e in history.of("rollback") if e["phase"] == "intent"]:
        outcome = next((e for e in history.effects(intent) if e["type"] == "rollback"), None)
        done = f"{duration(outcome['seconds'])}, branch {outcome['branch']}" if outcome else "it has not ended"
        rows.append(
            [f"[{intent['seq']}]", str(intent["from_step"]), str(intent["to_step"]), intent["measure"], intent["why"], done]
        )
    yield "Rollbacks", ["seq", "from step", "to step", "measure", "why", "took"], rows, "None."
    rows = [
        [f"[{e['seq']}]", f"{e['steps'][0]} to {e['steps'][1]}", str(e["samples"]), _ranges(e["ranges"]), e["why"]]
        for e in history.of("skip")
    ]
    yield "Data left out", ["seq", "steps", "samples", "sample numbers", "why"], rows, "None."
    proven = _proven(history)
    rows = []
    for e in history.of("checkpoint"):
        if e["state"] == "complete":
            good = f"[{proven[e['seq']]}]" if e["seq"] in proven else ""
            rows.append([f"[{e['seq']}]", str(e["step"]), str(e["branch"]), duration(e["seconds"]), good])
    yield "Checkpoints", ["seq", "step", "branch", "took", "proven good"], rows, "None."
    shown = [event for event in history.of("eval") if event.get("samples")][-1:]
    for event in shown:
        columns = list(event["samples"][0])
        rows = [[str(sample.get(column, "")) for column in columns] for sample in event["samples"]]
        yield f"Samples of the evaluation at step {event['step']}", columns, rows, "None."
    rows = []
    for attempt in history.attempts():
        start = next((e for e in attempt if e["type"] == "run_start"), attempt[0])
        how = history.ending(attempt)
        lasted = duration(max(0.0, (when(attempt[-1]) - when(attempt[0])).total_seconds()))
        last = next(
            (e for e in reversed(attempt) if e["type"] in ("crash", "stop", "preempted") and not e.get("of_attempt")), None
        )
        rows.append([f"[{start['seq']}]", str(start["attempt"]), lasted, how, sentence(last) if last else ""])
    yield "Attempts", ["seq", "attempt", "lasted", "ended", "why"], rows, "None."
    rows = [
        [f"[{e['seq']}]", str(e["attempt"]), sentence(e)]
        for e in history.of("config_diff", "launch_diff", "env_diff", "verify")
    ]
    yield "Changes: settings, launch, environment, and steps done again", ["seq", "attempt", "what"], rows, "None."


def _proven(history: History) -> dict[int, int]:
    """Return seq of a checkpoint's event -> seq of the event that says it is good."""
    newest: dict[int, int] = {}
    found: dict[int, int] = {}
    for event in history.of("checkpoint"):
        if event["state"] == "complete":
            newest[event["step"]] = event["seq"]
        elif event["state"] == "proven_good" and event["step"] in newest:
            found[newest[event["step"]]] = event["seq"]
    return found


def _ranges(ranges: list[list[int]]) -> str:
    shown = ", ".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in ranges[:60])
    return shown + (f" and {len(ranges) - 60} more stretches" if len(ranges) > 60 else "")


def _days(history: History) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return day -> entries of the logbook: what happened, what was done about it, and the result."""
    days: dict[str, list[dict[str, Any]]] = {}
    for event in history.events:
        armed = event["type"] == "anomaly" and event["kind"] == "armed"
        if event["type"] in QUIET or armed:
            continue
        time = when(event)
        mood = _MOODS.get(event["type"], "")
        if (event["type"] == "spike" and event["kind"] in ("damage", "divergence")) or event.get("far_above_best"):
            mood = "bad"
        entry = {"seq": event["seq"], "time": time.strftime("%H:%M:%S"), "text": sentence(event), "mood": mood}
        days.setdefault(time.strftime("%A, %d %B %Y"), []).append(entry)
    return list(days.items())


def as_markdown(history: History) -> str:
    """Return the logbook as Markdown, without the figures."""
    spent = history.time()
    lines = [f"# {_plain(_name(history))}: logbook", "", _plain(_state(history)), ""]
    lines += [f"- {label}: {_plain(text)}" for label, text in run_facts(history).items()]
    lines += [f"- {label}: {number}" for number, label in _cards(history, spent)]
    for title, columns, rows, none in _tables(history, spent):
        lines += ["", f"## {_plain(title)}", ""]
        if rows:
            lines += [_markdown_row(columns), "|" + "---|" * len(columns)]
            lines += [_markdown_row(row) for row in rows]
        else:
            lines.append(none)
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
    line = html.escape(" ".join("".join(c for c in text if c.isprintable() or c.isspace()).split()), quote=False)
    return re.sub(r"([\\`*\[])", r"\\\1", line)  # no link, picture or code
