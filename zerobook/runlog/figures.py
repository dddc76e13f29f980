"""The figures of the logbook's page: curves over steps, attempts over time, and speed and memory over time."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from zerobook.runlog.event_text import Event, sentence
from zerobook.runlog.history import History, when

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
HELD_OUT = ("#c2185b", "#00796b", "#f57c00", "#5d4037", "#512da8")
LINES = ("#1f5fa8", "#d55e00", "#1a7f37", "#7b3fa0", "#9a6700", "#00796b", "#c2185b", "#5b6775")
"""Colours of the held-out curves, and of the lines over time."""
SERIES = ("step", "loss", "grad_norm", "learning_rate")


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


def draw(history: History) -> dict[str, str]:
    """Return the figures as HTML by name: ``curves``, ``timeline``, and ``machine``, ``scores`` and ``steps`` where there
    are any."""
    from plotly import graph_objects as go

    buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [buttons]}
    found = {
        "curves": _curves(history),
        "timeline": _timeline(history, go),
        "machine": _machine(history),
        "scores": _scores(history),
        "steps": _step_times(history),
    }
    return {
        name: figure.to_html(full_html=False, include_plotlyjs=name == "curves", config=config, div_id=name)
        for name, figure in found.items()
        if figure is not None
    }


def _curves(history: History) -> Any:
    """Return the figure of loss, gradient norm and learning rate over steps."""
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
    for (name, curve), colour in zip(held_out(history).items(), _cycle(HELD_OUT), strict=False):
        figure.add_scatter(x=list(curve), y=list(curve.values()), row=1, col=1, mode="lines+markers", name=html.escape(name),
                           line={"color": colour, "width": 1.6, "dash": "dot"}, marker={"size": 5})  # fmt: skip
    loss_at = dict(zip(living["step"], living["loss"], strict=True))
    for kind, (colour, symbol) in MARKS.items():
        marks = [(step, e) for e in history.of(kind) if (step := _mark(e)) is not None]
        if marks:
            x = [step for step, _ in marks]
            heights = [_height(e, loss_at, step) for step, e in marks]
            figure.add_scatter(x=x, y=heights, row=1, col=1, mode="markers", text=[_hover(e) for _, e in marks],
                               hoverinfo="text", name=kind.replace("_", " "),
                               marker={"color": colour, "symbol": symbol, "size": 11, "line": {"width": 1.5}})  # fmt: skip
    for row, title in ((1, "loss"), (2, "gradient norm"), (3, "learning rate")):
        figure.update_yaxes(title_text=title, row=row, col=1)
    positive = [v for v in living["loss"] if v is not None]
    if positive and min(positive) > 0 and max(positive) > 20 * min(positive):
        figure.update_yaxes(type="log", row=1, col=1)
    figure.update_yaxes(type="log", row=2, col=1)
    figure.update_xaxes(title_text="step", row=3, col=1)
    return figure.update_layout(**_layout(720))


def _layout(height: int) -> dict[str, Any]:
    return {"height": height, "template": "plotly_white", "hovermode": "closest",
            "margin": {"l": 70, "r": 10, "t": 60, "b": 40},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}}  # fmt: skip


def _cycle(colours: Sequence[str]) -> Iterable[str]:
    while True:
        yield from colours


def _hover(event: Event) -> str:
    return html.escape(f"[{event['seq']}] {sentence(event)}")[:300]


def held_out(history: History) -> dict[str, dict[int, float]]:
    """Return the held-out losses that are part of the run as it is: name -> step -> nats per supervised token.

    There is one curve for each dataset where there are several, or else one curve. Losses from before a resume with other
    held-out data have curves of their own.
    """
    found: dict[str, dict[int, float]] = {}
    evaluations = [event for event in history.living_evaluations() if event.get("loss") is not None]
    for event in evaluations:
        is_other = event.get("held_out_fingerprint") != evaluations[-1].get("held_out_fingerprint")
        title = "other data held out" if is_other else "held out"
        losses = {f"{title}: {name}": part.get("loss") for name, part in event.get("datasets", {}).items()}
        for name, loss in (losses or {title: event["loss"]}).items():
            if loss is not None:
                found.setdefault(name, {})[event["step"]] = loss
    return found


def scores(history: History) -> dict[str, dict[int, float]]:
    """Return the scores of tasks and generated texts that are part of the run as it is: name -> step -> value."""
    found: dict[str, dict[int, float]] = {}
    for event in history.living_evaluations():
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                found.setdefault(name, {})[event["step"]] = value
    return found


MOST_SCORES = 12
"""Scores that are drawn; the log has all."""


def _scores(history: History) -> Any:
    """Return the figure of scores over steps, one chart each; None where there are none."""
    from plotly.subplots import make_subplots

    drawn = list(scores(history).items())[:MOST_SCORES]
    if not drawn:
        return None
    figure = make_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=0.15 / len(drawn))
    for row, ((name, curve), colour) in enumerate(zip(drawn, _cycle(LINES), strict=False), 1):
        figure.add_scatter(x=list(curve), y=list(curve.values()), row=row, col=1, mode="lines+markers", name=html.escape(name),
                           line={"color": colour, "width": 1.4})  # fmt: skip
    figure.update_xaxes(title_text="step", row=len(drawn), col=1)
    return figure.update_layout(**_layout(100 + 110 * len(drawn)))


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
                               text=[_hover(e) for e in events], hoverinfo="text",
                               marker={"color": "#cc0000", "size": 10, "symbol": symbol})  # fmt: skip
    return figure.update_layout(**_layout(320), yaxis_title="step", xaxis_title="time (UTC)")


WAITS = 0.1
"""Share of the time spent waiting for data from which the page warns."""


def data_bound(history: History) -> str:
    """Return a warning if the newest attempt waited for data; an empty string otherwise."""
    points = history.of("metrics")
    waits = [e["data_wait"] for e in points if e["attempt"] == points[-1]["attempt"]][1:]  # the first includes the start
    share = sum(waits) / len(waits) if waits else 0.0
    if share < WAITS:
        return ""
    return (
        f"The devices waited for data for {share:.0%} of the training time. Raise --dataloader_num_workers, or prepare the "
        "data before the run with zerobook data prepare."
    )


def _machine(history: History) -> Any:
    """Return the figure of speed, data wait, memory and utilization over time; None where nothing was measured."""
    from plotly.subplots import make_subplots

    charts = [chart for chart in _charts(history) if chart[1]]
    if not charts:
        return None
    figure = make_subplots(rows=len(charts), cols=1, shared_xaxes=True, vertical_spacing=0.12 / len(charts))
    colours = iter(_cycle(LINES))  # over all charts, which share a legend
    for row, (title, lines, top) in enumerate(charts, 1):
        for name, (x, y) in lines.items():
            mode = "lines" if len(x) > 2 else "lines+markers"
            figure.add_scatter(x=x, y=y, row=row, col=1, mode=mode, name=name, line={"color": next(colours), "width": 1.4})
        figure.update_yaxes(title_text=title, row=row, col=1, rangemode="tozero")
        if top is not None:
            figure.update_yaxes(range=[0, top], row=row, col=1)
    figure.update_xaxes(title_text="time (UTC)", row=len(charts), col=1)
    return figure.update_layout(**_layout(60 + 170 * len(charts)))


PHASES = {
    "data": ("waiting for data", "#9a6700"),
    "forward": ("forward", "#1f5fa8"),
    "backward": ("backward", "#0f8a8a"),
    "optimizer": ("optimizer", "#7b3fa0"),
    "waited": ("waiting for ranks or a core", "#d55e00"),
    "reduce": ("log points", "#5b6775"),
    "evaluate": ("evaluation", "#c2185b"),
    "save": ("saving", "#1a7f37"),
}
"""Phase of a step -> (its name in the figure, colour)."""


def step_times(history: History) -> dict[str, tuple[list[int], list[float]]]:
    """Return phase -> (steps, ms a step) of all log points that say so.

    ``waited`` is the time in which a process waited for the others, taken out of its phases in proportion to their length.
    """
    # of steps that were done again, the last time counts
    points = [*{event["steps"][1]: event for event in history.of("metrics") if event.get("seconds")}.values()]
    points.sort(key=lambda event: event["steps"][1])
    points = points[:: -(-len(points) // 400) or 1]
    steps = [event["steps"][1] for event in points]
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for event in points:
        seconds, waited = event["seconds"], event.get("waited") or 0.0
        work = sum(seconds.get(phase, 0.0) for phase in WORK) or 1.0
        count = event["steps"][1] - event["steps"][0] + 1
        for phase, values in found.items():
            own = waited if phase == "waited" else seconds.get(phase, 0.0)
            own *= 1 - min(1.0, waited / work) if phase in WORK else 1.0
            values.append(1000 * own / count)
    return {phase: (steps, values) for phase, values in found.items() if any(values)}


WORK = ("forward", "backward", "optimizer")


def _step_times(history: History) -> Any:
    """Return the figure of a step's time by phase, stacked; None where no log point says so."""
    from plotly import graph_objects as go

    found = step_times(history)
    if not found:
        return None
    figure = go.Figure()
    for phase, (steps, values) in found.items():
        name, colour = PHASES[phase]
        figure.add_bar(x=steps, y=values, name=name, marker={"color": colour, "line": {"width": 0}})
    usual = [values for phase, (_, values) in found.items() if phase not in ("evaluate", "save")]
    totals = sorted(map(sum, zip(*usual, strict=True)))
    if totals and totals[-1] > 0:  # the first steps compile and allocate
        figure.update_yaxes(range=[0, 1.25 * totals[int(0.9 * (len(totals) - 1))]])
    return figure.update_layout(**_layout(340), barmode="stack", bargap=0, xaxis_title="step", yaxis_title="ms a step")


Line = tuple[list[Any], list[float]]


def _charts(history: History) -> list[tuple[str, dict[str, Line], float | None]]:
    """Return (axis title, name -> line, largest value of the axis) of each chart over time."""
    points, samples = history.of("metrics"), history.of("machine")
    speed = {
        "supervised tokens/s": _line(points, lambda e: e["tokens_per_second"]),
        "all tokens/s": _line(points, lambda e: e.get("all_tokens_per_second")),
    }
    share = {"waiting for data": _line(points, lambda e: e["data_wait"]), "MFU": _line(points, lambda e: e.get("mfu"))}
    host = {
        "host memory": _line(samples, lambda e: e["memory_used"] / 2**30),
        "this run": _line(samples, lambda e: e["own"] / 2**30),
    }
    gpu, busy = dict[str, Line](), dict[str, Line]()
    for index in range(max((len(e["gpus"]) for e in samples), default=0)):
        present = [e for e in samples if index < len(e["gpus"])]
        gpu[f"GPU {index} memory"] = _line(present, partial(_of_gpu, index, "memory_used", 2**30))
        busy[f"GPU {index} busy"] = _line(present, partial(_of_gpu, index, "utilisation", 1))
    total = max((e["memory_total"] / 2**30 for e in samples), default=None)
    shares = {name: line for name, line in (share | busy).items() if line[0]}
    return [
        ("tokens/s", {name: line for name, line in speed.items() if line[0]}, None),
        ("share", shares, 1.0),
        ("host RAM, GiB", {name: line for name, line in host.items() if line[0]}, total),
        ("GPU memory, GiB", {name: line for name, line in gpu.items() if line[0]}, None),
    ]


def _of_gpu(index: int, what: str, unit: float, event: Event) -> float:
    return float(event["gpus"][index][what]) / unit


def _line(events: Sequence[Event], value: Callable[[Event], float | None]) -> Line:
    found = [(when(event), number) for event in events if (number := value(event)) is not None]
    found = found[:: -(-len(found) // POINTS) or 1]
    return [time for time, _ in found], [number for _, number in found]
