"""The report of a run as one HTML page that needs no other file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerobook.runlog import figures
from zerobook.runlog.events import Event, sentence, style
from zerobook.runlog.facts import run_facts
from zerobook.runlog.formatting import figure
from zerobook.runlog.history import (
    History,
    TimeSpent,
    add_log_name_to_errors,
    event_time,
    folder_of,
    is_finished_rollback,
    time_spent,
)
from zerobook.runlog.summary import summary
from zerobook.runlog.tables import (
    attempt_table,
    change_table,
    checkpoint_table,
    notable_events,
    rollback_table,
    sample_tables,
    skipped_table,
    time_table,
)
from zerobook.utils.terminal import plain
from zerobook.utils.units import duration
from zerobook.utils.writing import write_whole

PAGE = "report.html"


def write(run: str | Path) -> Path:
    """Write the page beside the log, and return its path. ``run``: the run's ``output_dir`` or the log's folder."""
    folder = folder_of(run)
    # The page is rendered before the file is opened, so an error leaves the page that was there.
    with add_log_name_to_errors(folder):
        content = render(History.read(folder))
    page = folder / PAGE
    write_whole(page, content)
    return page


def render(history: History) -> str:
    """Return the page of a run as HTML."""
    return render_page(
        name=history.folder.resolve().parent.name,
        state=summary(history.folder),
        facts=run_facts(history),
        cards=_make_cards(history, time_spent(history)),
        charts=figures.make_charts(history),
        hint=figures.warn_of_data_wait(history),
        tables=[
            time_table(history),
            rollback_table(history),
            skipped_table(history),
            checkpoint_table(history),
            *sample_tables(history),
            attempt_table(history),
            change_table(history),
        ],
        days=_group_by_day(history),
        note=f"Times are UTC. The page has {len(history.events)} events; [n] is an event's number in events.jsonl.",
    )


def render_page(**values: Any) -> str:
    """Return a page as HTML. ``values`` are all variables of report.html.j2. They may be of a run without a runlog."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, finalize=_make_printable)
    template = environment.get_template("report.html.j2")
    return template.render(**values, written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"))


def _make_printable(value: Any) -> Any:
    """Return a value of the page without control characters, which would act on a terminal that shows the page's source."""
    # Strings of the subclass `markupsafe.Markup` are HTML already, such as the JSON of a chart. They stay as they are.
    return plain(value) if type(value) is str else value


def _make_cards(history: History, spent: TimeSpent) -> list[tuple[str, str]]:
    """Return the large numbers at the top of the page: (text, label)."""
    starts = history.of("run_start")
    log_points = history.of("metrics")
    cards = [(f"{spent.ratio:.1%}", "effective training time"), (duration(spent.total), "since the first event")]
    if log_points and starts:
        cards.append((f"{log_points[-1]['steps'][1]:,} / {starts[-1]['total_steps']:,}", "steps"))
    losses = [event["loss"] for event in history.current_evaluations() if "loss" in event]
    if losses:
        cards.append((figure(losses[-1], ".4f"), "held-out loss"))
    if log_points:
        cards += _make_speed_cards(log_points[-1])
    memory = history.of("memory")
    if memory:
        cards.append((f"{memory[-1]['trained_parameters']:,}", "trained parameters"))
    rollbacks = [event for event in history.events if is_finished_rollback(event)]
    samples_left_out = sum(event["samples"] for event in history.of("skip"))
    cards.append((str(len(rollbacks)), "rollbacks"))
    cards.append((str(samples_left_out), "samples left out"))
    cards.append((str(len(starts)), "attempts"))
    cards.append((f"{sum(spent.abandoned_steps.values()):,}", "steps abandoned"))
    return cards


# Return the cards (text, label) with the speed at a log point.
def _make_speed_cards(log_point: Event) -> list[tuple[str, str]]:
    cards = [(f"{log_point['tokens_per_second']:,.0f}", "supervised tokens/s")]
    if "all_tokens_per_second" in log_point:
        cards.append((f"{log_point['all_tokens_per_second']:,.0f}", "all tokens/s"))
    tflops = log_point.get("tflops")
    mfu = log_point.get("mfu")
    if tflops is not None:
        cards.append((format(tflops, ".3g"), "TFLOPS per device"))
    if mfu is not None:
        cards.append((f"{mfu:.1%}", "MFU"))
    elif tflops is not None:
        # MFU is the share of the device's peak, which is not known for every device.
        cards.append(("n/a", "MFU"))
    return cards


# --- the list of events
def _group_by_day(history: History) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (day, entries of its events) of each day, in order."""
    days: dict[str, list[dict[str, Any]]] = {}
    for event in notable_events(history):
        time = event_time(event)
        entry = {"seq": event["seq"], "time": time.strftime("%H:%M:%S"), "text": sentence(event), "style": style(event)}
        days.setdefault(time.strftime("%A, %d %B %Y"), []).append(entry)
    return list(days.items())
