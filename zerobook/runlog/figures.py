"""The charts of the report: curves over steps, attempts over time, and speed and memory over time.

This module says what is drawn; `charts.js` draws it in the browser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, pairwise
from typing import Any

from zerobook.runlog.events import EVENT_TYPES, Event, ending_types, sentence
from zerobook.runlog.history import History, event_time, is_finished_rollback
from zerobook.utils.terminal import plain

# Maximum number of points of a curve over steps.
POINTS = 2_000
# Maximum number of points of a curve over time.
TIME_POINTS = 400
# Number of points of abandoned steps, over all branches.
ABANDONED_POINTS = 4_000
# Maximum number of characters of an event's text beside the pointer.
MOST_TEXT = 300

HELD_OUT_COLOURS = ("magenta", "teal", "brown", "slate", "violet")
LINE_COLOURS = ("blue", "orange", "green", "violet", "ochre", "teal", "magenta", "slate")

SERIES = ("step", "loss", "grad_norm", "learning_rate")
# Name in `SERIES` -> the values of all steps.
Columns = dict[str, list]


@dataclass(kw_only=True)
class Curve:
    """A curve of a panel. Curves of one name are shown and hidden together."""

    name: str
    x: list[float]
    """steps, or seconds since 1970"""
    y: list[float | None]
    colour: str
    """name of a colour in the page's palette, or any colour of CSS"""
    kind: str = "line"
    """line, dotted, bars (stacked upon those before) or marks"""
    symbol: str = ""
    """character that is drawn for a mark"""
    texts: list[str] = field(default_factory=list)
    """of each mark, the text that is shown beside the pointer"""


@dataclass(kw_only=True)
class Panel:
    """Curves over one x axis. ``lowest`` and ``largest`` are the ends of the y axis if it does not follow the curves."""

    title: str
    curves: list[Curve]
    height: int = 130
    is_log: bool = False
    lowest: float | None = None
    largest: float | None = None


@dataclass(kw_only=True)
class Chart:
    """Panels that share an x axis: steps, or time."""

    panels: list[Panel]
    is_time: bool = False


def make_charts(history: History) -> dict[str, dict[str, Any]]:
    """Return name -> chart as JSON values, for each chart that the log has values for."""
    charts = {
        "curves": make_steps_chart(history.steps(), history.last_current_steps(), held_out_curves(history), history.events),
        "timeline": _make_timeline(history),
        "machine": _make_machine_chart(history),
        "scores": _make_scores_chart(history),
        "steps": _make_step_times_chart(history),
    }
    return {name: chart_as_json(chart) for name, chart in charts.items() if chart is not None}


def chart_as_json(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON values. Changes the names and values of its curves to what the page can show."""
    for panel in chart.panels:
        for curve in panel.curves:
            # Names may come from data, with control characters.
            curve.name = plain(curve.name, lines=False)
            curve.y = [_round_value(value) for value in curve.y]
    return asdict(chart)


def _round_value(value: float | None) -> float | None:
    """Return a value with six digits, more than can be seen; None if it is not finite, since JSON has no such numbers."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


# --- curves over steps
def make_steps_chart(
    records: Iterable[dict[str, Any]],
    last_current_step: dict[int, float],
    held_out_losses: dict[str, dict[int, float]],
    events: Iterable[Event],
) -> Chart:
    """Return the chart of loss, gradient norm and learning rate over steps.

    Args:
        records: records of steps, with the values that `SERIES` names, and the branch.
        last_current_step: branch -> its last step that is still part of the run.
        held_out_losses: name -> step -> loss.
        events: the log's events. Those whose type has a mark are drawn on the loss.
    """
    current, abandoned = _read_columns(records, last_current_step)
    loss = Panel(title="loss", curves=[], height=300)
    norm = Panel(title="gradient norm", curves=[], is_log=True)
    rate = Panel(title="learning rate", curves=[])
    # All abandoned branches together have `ABANDONED_POINTS`, so that the page stays small. A branch has at least 40 points,
    # so that its form can be seen.
    points_of_branch = max(40, ABANDONED_POINTS // max(1, len(abandoned)))
    abandoned_losses: dict[int, dict[int, Any]] = {}
    for branch, columns in sorted(abandoned.items()):
        title = f"abandoned: branch {branch}"
        loss.curves.append(_make_curve(columns, "loss", title, "orange", points_of_branch))
        norm.curves.append(_make_curve(columns, "grad_norm", title, "orange", points_of_branch))
        abandoned_losses[branch] = dict(zip(columns["step"], columns["loss"], strict=True))
    for panel, name in ((loss, "loss"), (norm, "grad_norm"), (rate, "learning_rate")):
        panel.curves.append(_make_curve(current, name, "the run as it is", "blue", POINTS))
    # A gradient norm may be 0, which a log axis cannot show.
    norm.is_log = all(value > 0 for curve in norm.curves for value in curve.y if value is not None)
    # On a linear axis, the end of a loss that falls far would look flat. The last curve is that of the current steps.
    losses = [value for value in loss.curves[-1].y if value is not None]
    loss.is_log = bool(losses) and min(losses) > 0 and max(losses) > 20 * min(losses)
    for (name, values), colour in zip(held_out_losses.items(), cycle(HELD_OUT_COLOURS), strict=False):
        loss.curves.append(Curve(name=name, x=list(values), y=list(values.values()), colour=colour, kind="dotted"))
    loss.curves += _make_marks(events, dict(zip(current["step"], current["loss"], strict=True)), abandoned_losses)
    return Chart(panels=[loss, norm, rate])


def _read_columns(records: Iterable[dict[str, Any]], last_current_step: dict[int, float]) -> tuple[Columns, dict[int, Columns]]:
    """Return the values of (the steps that are part of the run, in order; branch -> its abandoned steps)."""
    current: Columns = {name: [] for name in SERIES}
    abandoned: dict[int, Columns] = {}
    for record in records:
        branch = record["branch"]
        columns = current
        if record["step"] > last_current_step.get(branch, math.inf):
            columns = abandoned.setdefault(branch, {name: [] for name in SERIES})
        for name in SERIES:
            columns[name].append(record[name])
    # Steps that were done again after a rollback may stand behind later steps in the file.
    if any(before > after for before, after in pairwise(current["step"])):
        order = sorted(range(len(current["step"])), key=current["step"].__getitem__)
        for name, column in current.items():
            current[name] = [column[index] for index in order]
    return current, abandoned


def _make_curve(columns: Columns, name: str, title: str, colour: str, most_points: int) -> Curve:
    steps, values = thin(columns["step"], columns[name], most_points)
    return Curve(name=title, x=steps, y=values, colour=colour)


def thin(steps: Sequence[float], values: Sequence[float | None], most: int = POINTS) -> tuple[list[float], list[float | None]]:
    """Return (steps, values) of at most ``most`` of the points, without values that are not finite.

    If there are more points, they are divided into chunks, and of each chunk the lowest and the highest point stay, so that no
    spike is lost.
    """
    points = []
    for step, value in zip(steps, values, strict=True):
        if value is not None and math.isfinite(value):
            points.append((step, value))
    if len(points) > most:
        points = _extremes(points, chunk_length=math.ceil(len(points) / (most // 2)))
    thinned_steps: list[float] = [step for step, _ in points]
    return thinned_steps, [value for _, value in points]


def _extremes(points: list[tuple[float, float]], chunk_length: int) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each chunk, in order."""
    extremes = []
    for start in range(0, len(points), chunk_length):
        chunk = points[start : start + chunk_length]
        lowest = min(chunk, key=lambda point: point[1])
        highest = max(chunk, key=lambda point: point[1])
        # Sorted by step. If all values of the chunk are equal, the two are the same point, and the set has one.
        extremes += sorted({lowest, highest})
    return extremes


def held_out_curves(history: History) -> dict[str, dict[int, float]]:
    """Return the held-out losses that are part of the run as it is now: name -> step -> nats per supervised token.

    There is one curve for each dataset if there are several, or else one curve. Losses on other held-out data than that of the
    last evaluation are in separate curves, named ``other data held out``. A resume can change the data.
    """
    curves: dict[str, dict[int, float]] = {}
    evaluations = [event for event in history.current_evaluations() if event.get("loss") is not None]
    for event in evaluations:
        title = "held out"
        if event.get("held_out_fingerprint") != evaluations[-1].get("held_out_fingerprint"):
            title = "other data held out"
        losses = {f"{title}: {name}": result.get("loss") for name, result in event.get("datasets", {}).items()}
        # An evaluation of one dataset has no field ``datasets``.
        if not losses:
            losses[title] = event["loss"]
        for name, loss in losses.items():
            if loss is not None:
                curves.setdefault(name, {})[event["step"]] = loss
    return curves


def _make_marks(
    events: Iterable[Event], current_losses: dict[int, Any], abandoned_losses: dict[int, dict[int, Any]]
) -> list[Curve]:
    """Return the marks of events, at the loss of their step, as one curve for each type of event.

    Args:
        current_losses: step -> loss.
        abandoned_losses: branch -> step -> loss. An event of an abandoned step is marked at the loss of its own branch.
    """
    # Type of event, in words -> curve.
    marks: dict[str, Curve] = {}
    for event in events:
        event_type = EVENT_TYPES.get(event["type"])
        # The log of another version may have types of events that this version does not know.
        if event_type is None or event_type.mark is None:
            continue
        mark = event_type.mark
        step = mark.step(event)
        if step is None:
            continue
        name = event["type"].replace("_", " ")
        curve = marks.setdefault(name, Curve(name=name, x=[], y=[], colour=mark.colour, kind="marks", symbol=mark.symbol))
        losses = abandoned_losses.get(event["branch"], {})
        curve.x.append(step)
        curve.y.append(losses.get(step, current_losses.get(step)))
        curve.texts.append(_label(event))
    return list(marks.values())


# Return the text that is shown beside the pointer at the mark of an event.
def _label(event: Event) -> str:
    return f"[{event['seq']}] {sentence(event)}"[:MOST_TEXT]


# --- scores over steps
# Maximum number of scores that are drawn. The log has all.
MOST_SCORES = 12


def score_curves(history: History) -> dict[str, dict[int, float]]:
    """Return the scores of tasks and generated texts that are part of the run as it is now: name -> step -> value."""
    curves: dict[str, dict[int, float]] = {}
    for event in history.current_evaluations():
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                curves.setdefault(name, {})[event["step"]] = value
    return curves


def _make_scores_chart(history: History) -> Chart | None:
    """Return the chart of scores over steps, one panel each; None if there are none."""
    panels = []
    for name, values in list(score_curves(history).items())[:MOST_SCORES]:
        curve = Curve(name=name, x=list(values), y=list(values.values()), colour="blue")
        panels.append(Panel(title=plain(name, lines=False), curves=[curve], height=90))
    return Chart(panels=panels) if panels else None


# --- attempts over time
def _make_timeline(history: History) -> Chart:
    """Return the chart of steps over wall-clock time: attempts side by side, rollbacks as drops."""
    curves = []
    for attempt, colour in zip(history.attempts(), cycle(LINE_COLOURS), strict=False):
        points = []
        for event in attempt:
            if event["type"] == "metrics":
                points.append((_timestamp(event), event["steps"][1]))
            # A rollback goes back to an earlier step, where the line drops.
            elif event["type"] == "run_start" or is_finished_rollback(event):
                points.append((_timestamp(event), event["step"]))
        name = f"attempt {attempt[0]['attempt']}: {history.ending(attempt)}"
        curves.append(_make_time_curve(name, points, colour))
    spikes = [event for event in history.of("spike") if event["kind"] == "spike"]
    # Neither the end of a run that is done nor an import is a failure.
    failures = history.of(*(set(ending_types()) - {"run_end", "imported"}))
    curves += [_make_time_marks(spikes, "spike", "▲"), _make_time_marks(failures, "stopped", "✕")]
    # A curve without points would only have a name in the legend.
    curves = [curve for curve in curves if curve.x]
    return Chart(panels=[Panel(title="step", curves=curves, height=230, lowest=0)], is_time=True)


# Return seconds since 1970. A tenth of a second is exact enough for a chart, and keeps the page small.
def _timestamp(event: Event) -> float:
    return round(event_time(event).timestamp(), 1)


def _make_time_marks(events: list[Event], name: str, symbol: str) -> Curve:
    steps = [event.get("step") for event in events]
    times = list(map(_timestamp, events))
    return Curve(name=name, x=times, y=steps, colour="red", kind="marks", symbol=symbol, texts=list(map(_label, events)))


# ``points`` are (time, value).
def _make_time_curve(name: str, points: list[tuple[float, float]], colour: str) -> Curve:
    times = [time for time, _ in points]
    thinned_times, thinned_values = thin(times, [value for _, value in points], TIME_POINTS)
    return Curve(name=name, x=thinned_times, y=thinned_values, colour=colour)


# --- speed and memory over time
# Share of the time spent waiting for data from which the page warns.
MOST_DATA_WAIT = 0.1


def warn_of_data_wait(history: History) -> str:
    """Return a warning if the newest attempt waited long for data; an empty string otherwise."""
    log_points = history.of("metrics")
    waits = [event["data_wait"] for event in log_points if event["attempt"] == log_points[-1]["attempt"]]
    # The first log point of an attempt includes its start, where the data workers are started.
    waits = waits[1:]
    share = sum(waits) / len(waits) if waits else 0.0
    if share < MOST_DATA_WAIT:
        return ""
    return (
        f"The devices waited for data for {share:.0%} of the training time. Raise --dataloader_num_workers, or prepare the "
        "data before the run with zerobook data prepare."
    )


def _make_machine_chart(history: History) -> Chart | None:
    """Return the chart of speed, data wait, memory and utilization over time; None if nothing was measured."""
    log_points = history.of("metrics")
    samples = history.of("machine")
    speed = {
        "supervised tokens/s": _collect_points(log_points, lambda event: event["tokens_per_second"]),
        "all tokens/s": _collect_points(log_points, lambda event: event.get("all_tokens_per_second")),
    }
    shares = {
        "waiting for data": _collect_points(log_points, lambda event: event["data_wait"]),
        "MFU": _collect_points(log_points, lambda event: event.get("mfu")),
    }
    host = {
        "host memory": _collect_points(samples, lambda event: event["memory_used"] / 2**30),
        "this run": _collect_points(samples, lambda event: event["own"] / 2**30),
    }
    gpu_memory = {}
    number_of_gpus = max((len(event["gpus"]) for event in samples), default=0)
    for index in range(number_of_gpus):
        # Samples of an attempt on another machine may have fewer GPUs.
        samples_of_gpu = [event for event in samples if index < len(event["gpus"])]
        gpu_memory[f"GPU {index} memory"] = _collect_points(samples_of_gpu, partial(_read_gpu, index, "memory_used", 2**30))
        shares[f"GPU {index} busy"] = _collect_points(samples_of_gpu, partial(_read_gpu, index, "utilisation", 1))
    host_total = max((event["memory_total"] / 2**30 for event in samples), default=None)
    # All panels share a legend, so no two curves have the same colour until all colours are used.
    colours = cycle(LINE_COLOURS)
    panels = []
    for title, lines, largest in (
        ("tokens/s", speed, None),
        ("share", shares, 1.0),
        ("host RAM, GiB", host, host_total),
        ("GPU memory, GiB", gpu_memory, None),
    ):
        curves = [_make_time_curve(name, points, next(colours)) for name, points in lines.items() if points]
        if curves:
            panels.append(Panel(title=title, curves=curves, lowest=0, largest=largest))
    return Chart(panels=panels, is_time=True) if panels else None


# The event comes last, since `partial` fills in the other arguments, and `_collect_points` calls the rest with the event.
def _read_gpu(index: int, quantity: str, unit: float, event: Event) -> float:
    return float(event["gpus"][index][quantity]) / unit


def _collect_points(events: Sequence[Event], read_value: Callable[[Event], float | None]) -> list[tuple[float, float]]:
    """Return (time, value) of the events for which ``read_value`` does not return None."""
    points = []
    for event in events:
        value = read_value(event)
        if value is not None:
            points.append((_timestamp(event), value))
    return points


# --- phases of a step
# Phase of a step -> (its name in the figure, colour).
PHASES = {
    "data": ("waiting for data", "ochre"),
    "forward": ("forward", "blue"),
    "backward": ("backward", "teal"),
    "optimizer": ("optimizer", "violet"),
    "reduce": ("log points", "slate"),
    "evaluate": ("evaluation", "magenta"),
    "save": ("saving", "green"),
}


def step_times(history: History) -> dict[str, tuple[list[int], list[float]]]:
    """Return phase -> (steps, ms per step), from the log points that have the seconds of phases."""
    # A step that was done again replaces the earlier one.
    by_last_step = {event["steps"][1]: event for event in history.of("metrics") if event.get("seconds")}
    log_points = sorted(by_last_step.values(), key=lambda event: event["steps"][1])
    # At most 400 log points are drawn: every n-th one.
    log_points = log_points[:: max(1, math.ceil(len(log_points) / 400))]
    steps = [event["steps"][1] for event in log_points]
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for event in log_points:
        # A log point has the seconds of all its steps together.
        first, last = event["steps"]
        for phase in PHASES:
            times[phase].append(1000 * event["seconds"].get(phase, 0.0) / (last - first + 1))
    return {phase: (steps, values) for phase, values in times.items() if any(values)}


def _make_step_times_chart(history: History) -> Chart | None:
    """Return the chart of a step's time by phase, stacked; None if no log point has the seconds of phases."""
    times = step_times(history)
    if not times:
        return None
    curves = []
    for phase, (steps, values) in times.items():
        title, colour = PHASES[phase]
        curves.append(Curve(name=title, x=[*steps], y=[*values], colour=colour, kind="bars"))
    # The y axis ends a quarter above the 90th percentile of the steps. The slowest steps, such as the first one, which
    # compiles and allocates, would press all others flat. Only few steps evaluate or save, so these phases do not count.
    frequent_phases = [values for phase, (_, values) in times.items() if phase not in ("evaluate", "save")]
    totals = sorted(map(sum, zip(*frequent_phases, strict=True)))
    largest = None
    if totals and totals[-1] > 0:
        largest = 1.25 * totals[int(0.9 * (len(totals) - 1))]
    return Chart(panels=[Panel(title="ms a step", curves=curves, height=240, lowest=0, largest=largest)])
