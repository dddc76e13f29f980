"""The logbook of a run as one HTML page that needs no other file, and as Markdown."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerobook.runlog.event_text import QUIET, duration, figure, sentence
from zerobook.runlog.history import History, TimeSpent, folder_of, when

PAGE = "report.html"
MARKDOWN = "report.md"
POINTS = 4_000
"""Points of a curve at most. The lowest and the highest of each stretch are kept, so no spike is lost."""

MARKS = {
    "spike": ("#d55e00", "triangle-up"),
    "rollback": ("#cc0000", "arrow-left"),
    "skip": ("#7b3fa0", "x"),
    "lr_change": ("#0072b2", "triangle-down"),
    "anomaly": ("#999999", "circle-open"),
    "checkpoint": ("#1a7f37", "line-ns-open"),
    "note": ("#9a6700", "star"),
}
"""event's type -> (colour, plotly's symbol) of its marker on the loss"""
SERIES = ("step", "loss", "grad_norm", "learning_rate")
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
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    spent = history.time()
    curves, timeline = _figures(history)
    return environment.get_template("report.html.j2").render(
        name=_name(history), state=_state(history), cards=_cards(history, spent), refresh=refresh,
        curves=jinja2.utils.markupsafe.Markup(curves), timeline=jinja2.utils.markupsafe.Markup(timeline),
        tables=list(_tables(history, spent)), days=_days(history), events=len(history.events),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip


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
    cards += [(str(len(outcomes)), "rollbacks"), (str(sum(e["samples"] for e in history.of("skip"))), "samples left out")]
    cards += [(str(len(starts)), "attempts"), (f"{sum(spent.steps_given_up.values()):,}", "steps given up")]
    return cards


# --- figures
def thin(steps: list[int], values: list[float], most: int = POINTS) -> tuple[list[int], list[float]]:
    """Return at most ``most`` of the points: of each stretch the lowest and the highest, in order. Drops non-finite values."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None and math.isfinite(v)]
    if len(points) <= most:
        return [s for s, _ in points], [v for _, v in points]
    size = -(-len(points) // (most // 2))
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [s for s, _ in kept], [v for _, v in kept]


def _series(history: History) -> tuple[dict[str, list], dict[int, dict[str, list]]]:
    """Return (columns of the steps that are part of the run, columns of the given-up steps by branch)."""
    lives = history.lives_to()
    living: dict[str, list] = {name: [] for name in SERIES}
    dead: dict[int, dict[str, list]] = {}
    takes = {0: [living[name].append for name in SERIES]}  # looked up once: there may be a million steps
    for record in history.steps():
        branch, step = record["branch"], record["step"]
        key = 0
        if step > lives.get(branch, math.inf):
            key = branch + 1
            if key not in takes:
                dead[branch] = {name: [] for name in SERIES}
                takes[key] = [dead[branch][name].append for name in SERIES]
        for take, name in zip(takes[key], SERIES, strict=True):
            take(record[name])
    if any(a > b for a, b in pairwise(living["step"])):
        order = sorted(range(len(living["step"])), key=living["step"].__getitem__)
        living = {name: [column[i] for i in order] for name, column in living.items()}
    return living, dead


def _figures(history: History) -> tuple[str, str]:
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    living, dead = _series(history)
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.04, row_heights=[0.5, 0.25, 0.25])
    rows = (("loss", 1), ("grad_norm", 2), ("learning_rate", 3))
    for branch, columns in sorted(dead.items()):
        for name, row in rows[:2]:
            x, y = thin(columns["step"], columns[name], 600)
            figure.add_scatter(x=x, y=y, row=row, col=1, mode="lines", line={"color": "#b9c0c8", "width": 1.2},
                               name=f"given up: branch {branch}", legendgroup=branch, showlegend=row == 1)  # fmt: skip
    for name, row in rows:
        x, y = thin(living["step"], living[name])
        figure.add_scatter(x=x, y=y, row=row, col=1, mode="lines", line={"color": "#1f5fa8", "width": 1.4},
                           name="the run as it is", legendgroup="living", showlegend=row == 1)  # fmt: skip
    loss_at = dict(zip(living["step"], living["loss"], strict=True))
    for kind, (colour, symbol) in MARKS.items():
        marks = [(step, e) for e in history.of(kind) if (step := _mark(e)) is not None]
        if marks:
            x = [step for step, _ in marks]
            heights = [_height(e, loss_at, step) for step, e in marks]
            text = [html.escape(f"[{e['seq']}] {sentence(e)}")[:300] for _, e in marks]
            figure.add_scatter(x=x, y=heights, row=1, col=1, mode="markers", text=text, hoverinfo="text",
                               name=kind.replace("_", " "), marker={"color": colour, "symbol": symbol, "size": 11,
                                                                    "line": {"width": 1.5}})  # fmt: skip
    for row, title in ((1, "loss"), (2, "gradient norm"), (3, "learning rate")):
        figure.update_yaxes(title_text=title, row=row, col=1)
    positive = [v for v in living["loss"] if v is not None]
    if positive and min(positive) > 0 and max(positive) > 20 * min(positive):
        figure.update_yaxes(type="log", row=1, col=1)
    figure.update_yaxes(type="log", row=2, col=1)
    figure.update_xaxes(title_text="step", row=3, col=1)
    figure.update_layout(height=720, template="plotly_white", hovermode="closest", margin={"l": 70, "r": 10, "t": 60, "b": 40},
                         legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})  # fmt: skip
    buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [buttons]}
    first = figure.to_html(full_html=False, include_plotlyjs=True, config=config, div_id="curves")
    second = _timeline(history, go).to_html(full_html=False, include_plotlyjs=False, config=config, div_id="timeline")
    return first, second


def _mark(event: dict[str, Any]) -> int | None:
    """Return the step at which an event is drawn; None if it is not drawn."""
    kind = event["type"]
    if kind == "rollback":
        return event["from_step"] if event["phase"] == "intent" else None
    if kind == "checkpoint":
        return event["step"] if event["state"] == "complete" else None
    if kind == "anomaly":
        return event["onset"] if event["kind"] == "outlier" else None
    if kind == "skip":
        return event["steps"][0]
    if kind == "lr_change":
        return event["cut"][0]
    if kind == "note":
        return None
    return event["onset"]


def _height(event: dict[str, Any], loss_at: dict[int, Any], step: int) -> float | None:
    if event["type"] in ("spike", "anomaly") and event["peak"] is not None and event["peak"] < 1e4:
        return event["peak"]
    return loss_at.get(step)


def _timeline(history: History, go: Any) -> Any:
    """Return the figure of steps over wall-clock time: attempts side by side, rollbacks as drops."""
    figure = go.Figure()
    for attempt in history.attempts():
        x, y = [], []
        for event in attempt:
            if event["type"] == "metrics":
                x.append(when(event))
                y.append(event["steps"][1])
            elif event["type"] == "run_start" or (event["type"] == "rollback" and event["phase"] == "outcome"):
                x.append(when(event))
                y.append(event["step"])
        if len(x) > POINTS:
            keep = range(0, len(x), -(-len(x) // POINTS))
            x, y = [x[i] for i in keep], [y[i] for i in keep]
        number = attempt[0]["attempt"]
        figure.add_scatter(x=x, y=y, mode="lines", name=f"attempt {number}: {history.ending(attempt)}", line={"width": 2})
    for kinds, name, symbol in ((("spike",), "spike", "triangle-up"), (("crash", "stop", "preempted"), "stopped", "x")):
        events = [e for e in history.of(*kinds) if e["type"] != "spike" or e["kind"] == "spike"]
        if events:
            figure.add_scatter(x=[when(e) for e in events], y=[e.get("step") for e in events], mode="markers", name=name,
                               text=[html.escape(f"[{e['seq']}] {sentence(e)}")[:300] for e in events], hoverinfo="text",
                               marker={"color": "#cc0000", "size": 10, "symbol": symbol})  # fmt: skip
    figure.update_layout(height=320, template="plotly_white", margin={"l": 70, "r": 10, "t": 50, "b": 40},
                         legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
                         yaxis_title="step", xaxis_title="time (UTC)")  # fmt: skip
    return figure


# --- tables and entries
def _tables(history: History, spent: TimeSpent) -> Iterator[tuple[str, list[str], list[list[str]], str]]:
    rows = [["training that lives on", duration(spent.training), f"{spent.ratio:.1%}"]]
    parts = [(f"training given up: {cause}", seconds) for cause, seconds in spent.given_up.items()]
    parts += [("going back", spent.going_back), ("evaluating", spent.evaluating), ("saving", spent.saving),
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
    rows = [[f"[{e['seq']}]", str(e["attempt"]), sentence(e)] for e in history.of("config_diff", "env_diff")]
    yield "Changes of settings and environment", ["seq", "attempt", "what"], rows, "None."


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
    lines += [f"- {label}: {number}" for number, label in _cards(history, spent)]
    for title, columns, rows, none in _tables(history, spent):
        lines += ["", f"## {title}", ""]
        if rows:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
        else:
            lines.append(none)
    lines += ["", "## Logbook"]
    for day, entries in _days(history):
        lines += ["", f"### {day}", ""]
        lines += [f"- {entry['time']} [{entry['seq']}] {_plain(entry['text'])}" for entry in entries]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return ``text`` as one line, escaped for Markdown and HTML."""
    line = html.escape(" ".join("".join(c for c in text if c.isprintable() or c.isspace()).split()), quote=False)
    return re.sub(r"([\\`*\[])", r"\\\1", line)  # no link, picture or code
