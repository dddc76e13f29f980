"""Tables of what happened to a run, for ``zerobook runlog show``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerobook.runlog.events import sentence
from zerobook.runlog.formatting import duration
from zerobook.runlog.history import Branch, History
from zerobook.utils.terminal import console, say
from zerobook.utils.units import counted

if TYPE_CHECKING:
    from rich.table import Table

RANGES_SHOWN = 40
NUMBERS = frozenset({"step", "from", "to", "steps", "samples", "seq", "time", "points", "branch", "attempt"})
"""Columns that are aligned at the right."""


class View(NamedTuple):
    """One side of a run: printed as a table, or returned as JSON values."""

    print: Callable[[History], None]
    as_json: Callable[[History], Any]


def new_table(*columns: str) -> Table:
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    return table


def print_spikes(history: History) -> None:
    """Print every spike, and the measure against it."""
    table = new_table("seq", "branch", "step", "points", "what", "loss", "what was done")
    for spike in history.of("spike"):
        measures = [effect["measure"] for effect in history.effects(spike) if effect["type"] == "decision"]
        table.add_row(
            str(spike["seq"]),
            str(spike["branch"]),
            str(spike["onset"]),
            str(spike["points"]),
            spike["kind"],
            f"{_loss(spike['base'])} -> {_loss(spike['peak'])}",
            measures[0] if measures else "",
        )
    console().print(table if table.row_count else "No spike.")
    outliers = [anomaly for anomaly in history.of("anomaly") if anomaly["kind"] == "outlier"]
    say(f"High for one or a few steps: {counted(len(outliers), 'time')}; no action is taken for that.")


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def print_time(history: History) -> None:
    """Print where the time and the steps went."""
    spent = history.time()
    table = new_table("what", "time", "share", "steps")

    def add(name: str, seconds: float, steps: int | None = None) -> None:
        share = f"{seconds / spent.total:.1%}" if spent.total else ""
        table.add_row(name, duration(seconds), share, "" if steps is None else str(steps))

    add("training that was kept", spent.training)
    for cause, seconds in spent.given_up.items():
        add(f"training given up: {cause}", seconds, spent.steps_given_up[cause])
    add("rolling back", spent.going_back)
    add("evaluating", spent.evaluating)
    add("saving", spent.saving)
    add("between attempts", spent.stopped)
    add("starting up, and the rest", spent.other)
    console().print(table)
    say(f"{spent.ratio:.1%} of {duration(spent.total)} was spent on training that was kept.")


def print_checkpoints(history: History) -> None:
    """Print the checkpoints that were saved, and which are proven good."""
    saved: dict[int, dict[str, Any]] = {}
    proven_steps = set()
    for event in history.of("checkpoint"):
        if event["state"] == "complete":
            # After a rollback, a step is saved again, and has to be proven again.
            saved[event["step"]] = event
            proven_steps.discard(event["step"])
        elif event["state"] == "proven_good":
            proven_steps.add(event["step"])
    lives_to = history.lives_to()
    table = new_table("seq", "step", "branch", "state", "on disk")
    for step, event in sorted(saved.items()):
        is_abandoned = step > lives_to.get(event["branch"], float("inf"))
        if is_abandoned:
            state = "of an abandoned branch"
        elif step in proven_steps:
            state = "proven good"
        else:
            state = "not proven yet"
        is_on_disk = not is_abandoned and Path(event["folder"]).exists()
        folder = event["folder"] if is_on_disk else "no"
        table.add_row(str(event["seq"]), str(step), str(event["branch"]), state, folder)
    console().print(table if saved else "No checkpoint was saved.")


def print_skipped(history: History) -> None:
    """Print the samples that are left out, and why."""
    skips = history.of("skip")
    if not skips:
        say("Nothing is left out.")
        return
    table = new_table("seq", "steps", "samples", "ranges", "why")
    for skip in skips:
        first_step, last_step = skip["steps"]
        steps = f"{first_step} to {last_step}"
        table.add_row(str(skip["seq"]), steps, str(skip["samples"]), _ranges(skip["ranges"]), skip["why"])
    console().print(table)


def _ranges(ranges: list[list[int]]) -> str:
    """Return half-open ranges as text, such as ``5-6, 9``."""
    texts = []
    for start, end in ranges[:RANGES_SHOWN]:
        texts.append(str(start) if end - start == 1 else f"{start}-{end - 1}")
    more = len(ranges) - RANGES_SHOWN
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def print_branches(history: History) -> None:
    """Print the branches of the run, and the steps of each that are still part of it."""
    table = new_table("branch", "attempt", "from", "to", "lives to", "why it began")
    for branch in history.branches():
        cause = sentence(branch.cause) if branch.cause else "the run began"
        table.add_row(str(branch.number), str(branch.attempt), str(branch.start), str(branch.end), _living_steps(branch), cause)
    console().print(table)


def _living_steps(branch: Branch) -> str:
    if branch.lives_to >= branch.end:
        return "all of it"
    if branch.lives_to <= branch.start:
        return "nothing"
    return f"step {branch.lives_to}"


def time_as_json(history: History) -> dict[str, Any]:
    spent = history.time()
    return {**asdict(spent), "other": spent.other, "ratio": spent.ratio}


# JSON is of events as docs/reference/runlog.md describes them, of seconds, or of branches.
VIEWS = {
    "spikes": View(print_spikes, lambda history: history.of("spike")),
    "time": View(print_time, time_as_json),
    "checkpoints": View(print_checkpoints, lambda history: history.of("checkpoint")),
    "skipped": View(print_skipped, lambda history: history.of("skip")),
    "branches": View(print_branches, lambda history: [asdict(branch) for branch in history.branches()]),
}
