"""The figures of the logbook's page: curves over steps, attempts over time, and speed and memory over time."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, pairwise
from typing import Any, NamedTuple

from zerobook.runlog.events import ENDING_EVENTS, EVENT_TYPES, Event, sentence
from zerobook.runlog.events.event_type import Mark
from zerobook.runlog.history import History, when

POINTS = 4_000
"""Points of a curve at most. The lowest and the highest of each stretch are kept, so no spike is lost."""

HELD_OUT_COLOURS = ("#c2185b", "#00796b", "#f57c00", "#5d4037", "#512da8")
LINE_COLOURS = ("#1f5fa8", "#d55e00", "#1a7f37", "#7b3fa0", "#9a6700", "#00796b", "#c2185b", "#5b6775")
LIVING_COLOUR = "#1f5fa8"
GIVEN_UP_COLOUR = "#b9c0c8"
STOP_COLOUR = "#cc0000"

SERIES = ("step", "loss", "grad_norm", "learning_rate")
Columns = dict[str, list]
"""Name in `SERIES` -> the values of all steps."""


def draw(history: History) -> dict[str, str]:
    """Return the figures as HTML by name: ``curves``, ``timeline``, and ``machine``, ``scores`` and ``steps`` where there
    are any."""
    buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [buttons]}
    figures = {
        "curves": _curves(history),
        "timeline": _timeline(history),
        "machine": _machine(history),
        "scores": _scores(history),
        "steps": _step_times(history),
    }
    fragments = {}
    for name, figure in figures.items():
        if figure is not None:
            # The first figure brings the library for all.
            has_library = name == "curves"
            fragments[name] = figure.to_html(full_html=False, include_plotlyjs=has_library, config=config, div_id=name)
    return fragments


# --- curves over steps
def _curves(history: History) -> Any:
    """Return the figure of loss, gradient norm and learning rate over steps."""
    from plotly.subplots import make_subplots

    living, given_up = _series(history)
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.04, row_heights=[0.5, 0.25, 0.25])
    for branch, columns in sorted(given_up.items()):
        for row, name in enumerate(("loss", "grad_norm"), 1):
            _add_series(figure, row, columns, name, GIVEN_UP_COLOUR, f"given up: branch {branch}", most=600)
    for row, name in enumerate(("loss", "grad_norm", "learning_rate"), 1):
        _add_series(figure, row, living, name, LIVING_COLOUR, "the run as it is")
    _add_held_out(figure, history)
    _add_marks(figure, history, loss_of_step=dict(zip(living["step"], living["loss"], strict=True)))
    for row, title in enumerate(("loss", "gradient norm", "learning rate"), 1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    losses = [loss for loss in living["loss"] if loss is not None]
    if losses and min(losses) > 0 and max(losses) > 20 * min(losses):
        figure.update_yaxes(type="log", row=1, col=1)
    figure.update_yaxes(type="log", row=2, col=1)
    figure.update_xaxes(title_text="step", row=3, col=1)
    return figure.update_layout(**_layout(720))


def _series(history: History) -> tuple[Columns, dict[int, Columns]]:
    """Return (the steps that are part of the run, the given-up steps by branch)."""
    last_living_step = history.lives_to()
    living: Columns = {name: [] for name in SERIES}
    given_up: dict[int, Columns] = {}
    for record in history.steps():
        branch = record["branch"]
        columns = living
        if record["step"] > last_living_step.get(branch, math.inf):
            if branch not in given_up:
                given_up[branch] = {name: [] for name in SERIES}
            columns = given_up[branch]
        for name in SERIES:
            columns[name].append(record[name])
    # After a rollback, steps that were done again stand behind later ones.
    if any(before > after for before, after in pairwise(living["step"])):
        order = sorted(range(len(living["step"])), key=living["step"].__getitem__)
        living = {name: [column[index] for index in order] for name, column in living.items()}
    return living, given_up


def _add_series(figure: Any, row: int, columns: Columns, name: str, colour: str, title: str, most: int = POINTS) -> None:
    """Draw one series of steps. The series of one title share an entry of the legend."""
    steps, values = thin(columns["step"], columns[name], most)
    figure.add_scatter(
        x=steps,
        y=values,
        row=row,
        col=1,
        # A line of one point would not be seen.
        mode="lines" if len(steps) > 1 else "markers",
        line={"color": colour, "width": 1.4},
        marker={"color": colour},
        name=title,
        legendgroup=title,
        showlegend=row == 1,
    )


def thin(steps: list[int], values: list[float], most: int = POINTS) -> tuple[list[int], list[float]]:
    """Return at most ``most`` of the points: of each stretch the lowest and the highest, in order. Drops non-finite values."""
    points = []
    for step, value in zip(steps, values, strict=True):
        if value is not None and math.isfinite(value):
            points.append((step, value))
    if len(points) > most:
        points = _extremes(points, stretch_length=math.ceil(len(points) / (most // 2)))
    return [step for step, _ in points], [value for _, value in points]


def _extremes(points: list[tuple[int, float]], stretch_length: int) -> list[tuple[int, float]]:
    """Return the lowest and the highest point of each stretch, in order."""
    extremes = []
    for start in range(0, len(points), stretch_length):
        stretch = points[start : start + stretch_length]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        extremes += sorted({lowest, highest})
    return extremes


def _add_held_out(figure: Any, history: History) -> None:
    for (name, curve), colour in zip(held_out(history).items(), cycle(HELD_OUT_COLOURS), strict=False):
        figure.add_scatter(
            x=list(curve),
            y=list(curve.values()),
            row=1,
            col=1,
            mode="lines+markers",
            name=html.escape(name),
            line={"color": colour, "width": 1.6, "dash": "dot"},
            marker={"size": 5},
        )


def held_out(history: History) -> dict[str, dict[int, float]]:
    """Return the held-out losses that are part of the run as it is now: name -> step -> nats per supervised token.

    There is one curve for each dataset where there are several, or else one curve. Losses from before a resume with other
    held-out data have curves of their own.
    """
    curves: dict[str, dict[int, float]] = {}
    evaluations = [event for event in history.living_evaluations() if event.get("loss") is not None]
    for event in evaluations:
        is_other = event.get("held_out_fingerprint") != evaluations[-1].get("held_out_fingerprint")
        title = "other data held out" if is_other else "held out"
        losses = {f"{title}: {name}": result.get("loss") for name, result in event.get("datasets", {}).items()}
        for name, loss in (losses or {title: event["loss"]}).items():
            if loss is not None:
                curves.setdefault(name, {})[event["step"]] = loss
    return curves


def _add_marks(figure: Any, history: History, loss_of_step: dict[int, Any]) -> None:
    """Draw the events that have a mark on the loss curve."""
    for name, event_type in EVENT_TYPES.items():
        mark = event_type.mark
        if mark is None:
            continue
        events = [event for event in history.of(name) if mark.step(event) is not None]
        if events:
            figure.add_scatter(
                x=[mark.step(event) for event in events],
                y=[_height(event, mark, loss_of_step) for event in events],
                row=1,
                col=1,
                mode="markers",
                text=[_hover(event) for event in events],
                hoverinfo="text",
                name=name.replace("_", " "),
                marker={"color": mark.colour, "symbol": mark.symbol, "size": 11, "line": {"width": 1.5}},
            )


def _height(event: Event, mark: Mark, loss_of_step: dict[int, Any]) -> float | None:
    height = mark.height(event) if mark.height else None
    if height is not None:
        return height
    step = mark.step(event)
    return None if step is None else loss_of_step.get(step)


# --- scores over steps
MOST_SCORES = 12
"""Scores that are drawn; the log has all."""


def scores(history: History) -> dict[str, dict[int, float]]:
    """Return the scores of tasks and generated texts that are part of the run as it is now: name -> step -> value."""
    curves: dict[str, dict[int, float]] = {}
    for event in history.living_evaluations():
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                curves.setdefault(name, {})[event["step"]] = value
    return curves


def _scores(history: History) -> Any:
    """Return the figure of scores over steps, one chart each; None where there are none."""
    from plotly.subplots import make_subplots

    curves = list(scores(history).items())[:MOST_SCORES]
    if not curves:
        return None
    figure = make_subplots(rows=len(curves), cols=1, shared_xaxes=True, vertical_spacing=0.15 / len(curves))
    for row, ((name, curve), colour) in enumerate(zip(curves, cycle(LINE_COLOURS), strict=False), 1):
        figure.add_scatter(
            x=list(curve),
            y=list(curve.values()),
            row=row,
            col=1,
            mode="lines+markers",
            name=html.escape(name),
            line={"color": colour, "width": 1.4},
        )
    figure.update_xaxes(title_text="step", row=len(curves), col=1)
    return figure.update_layout(**_layout(100 + 110 * len(curves)))


# --- attempts over time
def _timeline(history: History) -> Any:
    """Return the figure of steps over wall-clock time: attempts side by side, rollbacks as drops."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for attempt in history.attempts():
        points = []
        for event in attempt:
            is_rollback = event["type"] == "rollback" and event["phase"] == "outcome"
            if event["type"] == "metrics":
                points.append((when(event), event["steps"][1]))
            elif event["type"] == "run_start" or is_rollback:
                points.append((when(event), event["step"]))
        points = _every_nth(points, POINTS)
        figure.add_scatter(
            x=[time for time, _ in points],
            y=[step for _, step in points],
            mode="lines",
            name=f"attempt {attempt[0]['attempt']}: {history.ending(attempt)}",
            line={"width": 2},
        )
    spikes = [event for event in history.of("spike") if event["kind"] == "spike"]
    failures = [event for event in history.of(*ENDING_EVENTS) if event["type"] != "run_end"]
    _add_moments(figure, spikes, "spike", "triangle-up")
    _add_moments(figure, failures, "stopped", "x")
    return figure.update_layout(**_layout(320), yaxis_title="step", xaxis_title="time (UTC)")


def _add_moments(figure: Any, events: list[Event], name: str, symbol: str) -> None:
    if events:
        figure.add_scatter(
            x=[when(event) for event in events],
            y=[event.get("step") for event in events],
            mode="markers",
            name=name,
            text=[_hover(event) for event in events],
            hoverinfo="text",
            marker={"color": STOP_COLOUR, "size": 10, "symbol": symbol},
        )


# --- speed and memory over time
WAITS = 0.1
"""Share of the time spent waiting for data from which the page warns."""

Line = tuple[list[Any], list[float]]
"""(times, values) of a line."""


class Chart(NamedTuple):
    """A chart over time. ``largest``: largest value of its axis, None for the largest that is drawn."""

    title: str
    lines: dict[str, Line]
    largest: float | None = None


def data_bound(history: History) -> str:
    """Return a warning if the newest attempt waited for data; an empty string otherwise."""
    log_points = history.of("metrics")
    # The first log point of an attempt includes its start.
    waits = [event["data_wait"] for event in log_points if event["attempt"] == log_points[-1]["attempt"]][1:]
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

    charts = [chart for chart in _charts(history) if chart.lines]
    if not charts:
        return None
    figure = make_subplots(rows=len(charts), cols=1, shared_xaxes=True, vertical_spacing=0.12 / len(charts))
    # All charts share a legend, so the colours go on from one to the next.
    colours = cycle(LINE_COLOURS)
    for row, chart in enumerate(charts, 1):
        for name, (times, values) in chart.lines.items():
            mode = "lines" if len(times) > 2 else "lines+markers"
            line = {"color": next(colours), "width": 1.4}
            figure.add_scatter(x=times, y=values, row=row, col=1, mode=mode, name=name, line=line)
        figure.update_yaxes(title_text=chart.title, row=row, col=1, rangemode="tozero")
        if chart.largest is not None:
            figure.update_yaxes(range=[0, chart.largest], row=row, col=1)
    figure.update_xaxes(title_text="time (UTC)", row=len(charts), col=1)
    return figure.update_layout(**_layout(60 + 170 * len(charts)))


def _charts(history: History) -> list[Chart]:
    log_points = history.of("metrics")
    samples = history.of("machine")
    speed = {
        "supervised tokens/s": _line(log_points, lambda event: event["tokens_per_second"]),
        "all tokens/s": _line(log_points, lambda event: event.get("all_tokens_per_second")),
    }
    shares = {
        "waiting for data": _line(log_points, lambda event: event["data_wait"]),
        "MFU": _line(log_points, lambda event: event.get("mfu")),
    }
    host = {
        "host memory": _line(samples, lambda event: event["memory_used"] / 2**30),
        "this run": _line(samples, lambda event: event["own"] / 2**30),
    }
    gpu_memory = {}
    number_of_gpus = max((len(event["gpus"]) for event in samples), default=0)
    for index in range(number_of_gpus):
        present = [event for event in samples if index < len(event["gpus"])]
        gpu_memory[f"GPU {index} memory"] = _line(present, partial(_of_gpu, index, "memory_used", 2**30))
        shares[f"GPU {index} busy"] = _line(present, partial(_of_gpu, index, "utilisation", 1))
    host_total = max((event["memory_total"] / 2**30 for event in samples), default=None)
    return [
        Chart("tokens/s", _without_empty(speed)),
        Chart("share", _without_empty(shares), 1.0),
        Chart("host RAM, GiB", _without_empty(host), host_total),
        Chart("GPU memory, GiB", _without_empty(gpu_memory)),
    ]


def _of_gpu(index: int, quantity: str, unit: float, event: Event) -> float:
    return float(event["gpus"][index][quantity]) / unit


def _line(events: Sequence[Event], value: Callable[[Event], float | None]) -> Line:
    """Return the line of a value over time. Events for which ``value`` returns None are left out."""
    points = []
    for event in events:
        number = value(event)
        if number is not None:
            points.append((when(event), number))
    points = _every_nth(points, POINTS)
    return [time for time, _ in points], [number for _, number in points]


def _without_empty(lines: dict[str, Line]) -> dict[str, Line]:
    return {name: line for name, line in lines.items() if line[0]}


# --- phases of a step
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
WORK = ("forward", "backward", "optimizer")
"""Phases that contain the time in which a process waits for others."""


def step_times(history: History) -> dict[str, tuple[list[int], list[float]]]:
    """Return phase -> (steps, ms a step) of all log points that say so.

    ``waited`` is the time in which a process waited for the others, taken out of its phases in proportion to their length.
    """
    # Of steps that were done again, the last time counts.
    by_last_step = {event["steps"][1]: event for event in history.of("metrics") if event.get("seconds")}
    log_points = sorted(by_last_step.values(), key=lambda event: event["steps"][1])
    log_points = _every_nth(log_points, 400)
    steps = [event["steps"][1] for event in log_points]
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for event in log_points:
        first, last = event["steps"]
        for phase, seconds in _without_waiting(event).items():
            times[phase].append(1000 * seconds / (last - first + 1))
    return {phase: (steps, values) for phase, values in times.items() if any(values)}


def _without_waiting(log_point: Event) -> dict[str, float]:
    """Return phase -> seconds, with the time of waiting as a phase of its own."""
    waited = log_point.get("waited") or 0.0
    seconds = {phase: log_point["seconds"].get(phase, 0.0) for phase in PHASES}
    work = sum(seconds[phase] for phase in WORK) or 1.0
    for phase in WORK:
        seconds[phase] *= 1 - min(1.0, waited / work)
    return seconds | {"waited": waited}


def _step_times(history: History) -> Any:
    """Return the figure of a step's time by phase, stacked; None where no log point says so."""
    from plotly import graph_objects

    times = step_times(history)
    if not times:
        return None
    figure = graph_objects.Figure()
    for phase, (steps, values) in times.items():
        title, colour = PHASES[phase]
        figure.add_bar(x=steps, y=values, name=title, marker={"color": colour, "line": {"width": 0}})
    of_every_step = [values for phase, (_, values) in times.items() if phase not in ("evaluate", "save")]
    totals = sorted(map(sum, zip(*of_every_step, strict=True)))
    # The first steps compile and allocate: they would flatten the others.
    if totals and totals[-1] > 0:
        figure.update_yaxes(range=[0, 1.25 * totals[int(0.9 * (len(totals) - 1))]])
    return figure.update_layout(**_layout(340), barmode="stack", bargap=0, xaxis_title="step", yaxis_title="ms a step")


# --- for all figures
def _layout(height: int) -> dict[str, Any]:
    return {
        "height": height,
        "template": "plotly_white",
        "hovermode": "closest",
        "margin": {"l": 70, "r": 10, "t": 60, "b": 40},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }


def _hover(event: Event) -> str:
    return html.escape(f"[{event['seq']}] {sentence(event)}")[:300]


def _every_nth(values: list[Any], most: int) -> list[Any]:
    """Return at most ``most`` of the values, evenly chosen."""
    stride = max(1, math.ceil(len(values) / most))
    return values[::stride]
