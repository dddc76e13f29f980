"""The state of a run in a sentence or two."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from zerobook.runlog.events import Event, ending_in_words, ending_types, sentence
from zerobook.runlog.formatting import far_above_best, figure
from zerobook.runlog.history import event_time, find_ending, is_being_written, last_of
from zerobook.runlog.writer import EVENTS
from zerobook.utils.terminal import plain
from zerobook.utils.units import duration


def summary(folder: Path) -> str:
    """Return the state of a run in a sentence or two. Reads a few lines only, however long the log is."""
    # Type -> its newest event.
    newest = last_of(folder / EVENTS, ("run_start", "metrics", "eval", "checkpoint", "decision", "machine", *ending_types()))
    start = newest.get("run_start")
    if start is None:
        return "It has not begun to train."
    # Events of earlier attempts say nothing about the present state.
    attempt_events = {name: event for name, event in newest.items() if event["attempt"] == start["attempt"]}
    ending = find_ending(attempt_events.values())
    log_point = attempt_events.get("metrics")
    step = log_point["steps"][1] if log_point else start["step"]
    total = start["total_steps"]
    branch = max(event["branch"] for event in attempt_events.values())
    words = f"{_describe_state(folder, attempt_events, ending)}: step {step} of {total} ({step / max(total, 1):.0%}), "
    words += f"attempt {start['attempt']}, branch {branch}"
    if log_point:
        words += f", loss {figure(log_point['loss'], '.4f')}, {log_point['tokens_per_second']:,.0f} supervised tokens/s"
    words += "."
    if ending is not None and ending["type"] != "run_end":
        words += f" {sentence(ending)}"
    elif ending is not None and ending.get("far_above_best"):
        words += f" {far_above_best(ending['far_above_best'])}"
    # The evaluation and the decision may be of an earlier attempt. An evaluation of a later step than ``step`` is of steps
    # that were abandoned.
    evaluation = newest.get("eval", {})
    if "loss" in evaluation and evaluation["step"] <= step:
        words += f" Held-out loss {figure(evaluation['loss'], '.4f')} at step {evaluation['step']}."
    if "decision" in newest:
        words += f" Last decision: {newest['decision']['action']} ({newest['decision']['rule']})."
    return plain(words, lines=False)


def _describe_state(folder: Path, attempt_events: dict[str, Event], ending: Event | None) -> str:
    if ending is not None:
        return ending_in_words(ending)
    if is_being_written(folder):
        newest = max(attempt_events.values(), key=lambda event: event["seq"])
        age = (datetime.now(UTC) - event_time(newest)).total_seconds()
        return f"Training (last event {duration(max(0.0, age))} ago)"
    return "ENDED WITHOUT AN EVENT (killed, out of memory, or a power failure)"
