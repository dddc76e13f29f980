"""Output of plans on the terminal and as JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from zerobook.plan.hardware import Cluster
from zerobook.utils.terminal import console, say
from zerobook.utils.units import count, duration, gb, size, with_range

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zerobook.plan.failures import FailurePlan
    from zerobook.plan.rows import Row
    from zerobook.plan.traced_job import TracedJob

# Columns of a table if the output is not a terminal.
WIDTH = 150
# Header -> text of a cell, in the order of the columns.
Cells = dict[str, str]
# Headers of columns in the order in which they are left out on a narrow terminal. Then others follow from the right.
_DISPENSABLE = (
    "by 48 P/N\nbits",
    "by paper,\nas a ring",
    "by\npaper",
    "all states,\ncounted",
    "reserved",
    "allocated",
    "buffers",
    "in\ntraining",
    "waits for",
    "tokens/s,\nrange",
    "card, GB",
    "recomputed",
    "micro-\nbatch",
    "hours,\nrange",
)


def show(traced: TracedJob, rows: Sequence[Row], cluster: Cluster, failures: FailurePlan | None = None) -> None:
    """Print a plan: a table of memory, a table of traffic and time, why rows do not fit, and the best row."""
    from rich.markup import escape

    out = console(WIDTH, markup=True)
    _print_head(out, traced, cluster)
    names = [{"strategy file": row.file, "fits": fits_text(row)} for row in rows]
    dimmed = [not row.fits for row in rows]
    memory_cells = [name | _memory_cells(row) for name, row in zip(names, rows, strict=True)]
    # Most plans use no disk during training.
    if not any(row.memory is not None and row.memory.disk for row in rows):
        for cells in memory_cells:
            cells.pop("disk in\ntraining", None)
    print_table(out, "GPU memory of the fullest rank at its peak, in GB (10^9 bytes)", memory_cells, tuple(names[0]), dimmed)

    is_sent = any(row.sent for row in rows)
    has_rule = _has_rule(rows)
    title = "sent in a step, and its time" if is_sent else "time of a step; nothing is sent"
    step_cells = []
    for name, row in zip(names, rows, strict=True):
        traffic_cells = _traffic_cells(row, cluster, has_rule) if is_sent else {}
        step_cells.append(name | traffic_cells | _time_cells(row))
    print_table(out, title, step_cells, tuple(names[0]), dimmed)

    _print_misfits(out, rows)
    best = rows[0]
    if best.fits and best.time is not None:
        slowest, fastest = best.rates
        hours = with_range(1e9 / best.tokens_per_second, (1e9 / fastest, 1e9 / slowest), duration)
        out.print(
            f"best: [bold]{best.file}[/] ({best.name}), {duration(best.time.step)} a step of "
            f"{best.tokens_per_step:,} tokens, {hours} for 10^9 tokens"
        )
    else:
        out.print("[red]no strategy file fits with these settings.[/]")
    for line in _footer(traced, rows, cluster):
        out.print(f"[dim]{escape(line)}[/]")
    if failures is not None:
        out.print(escape(failures.describe()))


def _print_head(out: Console, traced: TracedJob, cluster: Cluster) -> None:
    """Print the model, the settings that decide its memory and time, and the hardware."""
    from rich.markup import escape

    shape = traced.job.shape
    lengths = f"{shape.source}"
    if shape.target:
        lengths += f" + {shape.target}"
    hardware = f"{cluster.name}, {gb(cluster.device.memory)} GB each"
    if cluster.host_memory:
        hardware += f", host {size(cluster.host_memory)}"
    config = traced.job.config
    settings = [config.mixed_precision or "fp32", f"activation checkpointing {config.activation_checkpointing}"]
    settings.append("eager attention" if config.attn_implementation == "eager" else "fused attention")
    out.print(
        f"[bold]{escape(traced.job.name)}[/]: {count(traced.model.parameters)} parameters, "
        f"{count(traced.model.trained_elements)} trained | micro-batch {shape.rows} x {lengths} tokens, "
        f"accumulation {config.accumulation_steps_on(cluster.ranks)} | {', '.join(settings)} | {hardware}"
    )


def print_table(out: Console, title: str, rows: Sequence[Cells], fixed: Sequence[str], dimmed: Sequence[bool]) -> None:
    """Print a table. If it is wider than the terminal, leave out the least important columns, and print their names below.

    Args:
        fixed: headers of the first columns, which are never left out.
        dimmed: for each row, whether it is printed dim.
    """
    # Rows without figures have cells of the fixed columns only, so the longest row has all headers.
    headers = [header for header in max(rows, key=len) if header not in fixed]
    left_out = []
    table = _build_table(title, rows, fixed, headers, dimmed)
    # Without a large max_width, rich would measure the table as it shrinks it to the terminal.
    while len(headers) > 1 and out.measure(table, options=out.options.update(max_width=1000)).maximum > out.width:
        dispensable = [header for header in _DISPENSABLE if header in headers] or headers[-1:]
        headers.remove(dispensable[0])
        left_out.append(dispensable[0].replace("-\n", "-").replace("\n", " "))
        table = _build_table(title, rows, fixed, headers, dimmed)
    out.print(table)
    if left_out:
        out.print(f"[dim]left out on {out.width} columns: {', '.join(left_out)}; --json has all[/]")


def _build_table(
    title: str, rows: Sequence[Cells], fixed: Sequence[str], headers: Sequence[str], dimmed: Sequence[bool]
) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for header in fixed:
        table.add_column(header, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right")
    for cells, is_dimmed in zip(rows, dimmed, strict=True):
        texts = [cells.get(header, "") for header in (*fixed, *headers)]
        table.add_row(*texts, style="dim" if is_dimmed else "")
    return table


def fits_text(row: Row) -> str:
    """Return whether a run fits into memory: ``tight`` if the highest peak to expect exceeds the GPU's memory."""
    # The run may work, but its memory cannot be computed.
    if row.untraced:
        return "[red]not traced[/]"
    if row.memory is None:
        return "[red]cannot run[/]"
    if not row.fits:
        return "[red]no[/]"
    return "[yellow]tight[/]" if row.tight else "[green]yes[/]"


def _memory_cells(row: Row) -> Cells:
    if row.memory is None or row.paper is None:
        return {}
    device = row.memory.device
    cells = {
        "card": gb(row.memory.total),
        "range": f"{gb(row.memory.low)} - {gb(row.memory.high)}",
        "reserved": gb(device.reserved),
        "allocated": gb(device.allocated),
        "weights": gb(device.parameters),
        "grads": gb(device.gradients),
        "optim.": gb(device.optimizer),
        "activ.": gb(device.activations),
        "buffers": gb(device.buffers),
        "all states,\ncounted": gb(row.states),
        "by\npaper": gb(row.paper.gpu_states),
        "host RAM\nat load": size(row.memory.host_at_load),
        "in\ntraining": size_or_dash(row.memory.host),
        "disk in\ntraining": size_or_dash(row.memory.disk),
    }
    # The activations were not traced, so the sum is a lower bound.
    if row.bare:
        cells |= {"card": f"> {gb(row.memory.total)}", "activ.": "-"}
    return cells


def _traffic_cells(row: Row, cluster: Cluster, has_rule: bool) -> Cells:
    """Return the cells of what is sent, counted and by the papers' formulas."""
    if row.paper is None:
        return {}
    cells = {"each rank": size_or_dash(row.sent), "by\npaper": size_or_dash(row.paper.sent)}
    if cluster.nodes > 1:
        cells["each node"] = size_or_dash(row.between)
        cells["by paper,\nas a ring"] = size_or_dash(row.paper.between)
    if has_rule:
        cells["by 48 P/N\nbits"] = size_or_dash(row.paper.rule or 0)
    return cells


def _time_cells(row: Row) -> Cells:
    if row.memory is None:
        return {}
    if row.time is None:
        return {"tokens/s": "-", "tokens/s,\nrange": "-", "waits for": "-"}
    low, high = row.rates
    return {
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "tokens/s,\nrange": f"{low:,.0f} - {high:,.0f}",
        "waits for": row.time.bound,
    }


def _has_rule(rows: Sequence[Row]) -> bool:
    """Return whether the rule of thumb applies to any of the rows."""
    return any(row.paper is not None and row.paper.rule is not None for row in rows)


def _print_misfits(out: Console, rows: Sequence[Row]) -> None:
    """Print why rows cannot run or do not fit, and what would help. Rows that lack the same resources and have the same
    remedies share a line."""
    from rich.markup import escape

    similar_rows: dict[tuple, list[Row]] = {}
    for row in rows:
        for problem in row.problems:
            verb = "be planned" if row.untraced else "run"
            out.print(f"[bold]{row.file}[/] cannot {verb}: {escape(problem)}")
        if row.exceeded:
            resources = tuple(reason.partition(":")[0] for reason in row.exceeded)
            similar_rows.setdefault((resources, tuple(row.remedies)), []).append(row)
    for (resources, remedies), group in similar_rows.items():
        reason = " and ".join(resources)
        # The amounts of several rows differ, so only those of one are printed.
        if len(group) == 1:
            reason = "; ".join(group[0].exceeded)
        files = ", ".join(row.file for row in group)
        line = f"does not fit ({reason}): [bold]{files}[/]"
        if remedies:
            line += f" -> {' or '.join(remedies)}"
        out.print(line)


def _footer(traced: TracedJob, rows: Sequence[Row], cluster: Cluster) -> list[str]:
    # If the GPU's own speed is not known, times are for a GPU with as much memory.
    speed = "the GPU's listed speed"
    if cluster.device.like:
        speed = f"{cluster.device.like}'s listed speed, since this GPU's is not known"
    if not (cluster.cpu or cluster.device.has_run):
        speed += ", published by the vendor, never run here"
    largest = max(rows, key=lambda row: row.checkpoint)
    lines = [
        f"checkpoints: {_describe_checkpoints(largest)}; times follow from the operations, at a share of {speed}",
        "weights, gradients and optimizer state are counted, activations traced; by paper: ZeRO, sections 5 and 7",
        "card: what torch reserves, and CUDA's context; ranges: where the peaks and the rates of most published runs lie",
    ]
    uncounted = {name for row in rows for name in row.uncounted}
    if uncounted:
        lines.append(f"steps take longer than that: of {', '.join(sorted(uncounted))} no operations are counted")
    if any(row.bare for row in rows):
        lines.append(">: the states alone exceed the GPU, so no activations were traced")
    if _has_rule(rows):
        lines.append("48 P/N bits: a rule of thumb for ZeRO-3 in 2-byte elements on N nodes")
    if traced.job.config.accumulation_steps_on(cluster.ranks) > 1:
        lines.append("what the paper sends is one micro-batch's: it knows no accumulation")
    return lines


def _describe_checkpoints(row: Row) -> str:
    if row.checkpoints is None:
        return f"{size(row.checkpoint)} each; how many follows from the data's length, unless --save_total_limit says"
    if row.checkpoints == 1:
        return size(row.checkpoint)
    return f"{row.checkpoints} of them {size(row.checkpoint)}"


def size_or_dash(amount: float) -> str:
    return size(amount) if amount else "-"


def show_lines(lines: Sequence[tuple[str, str]], file: TextIO | None = None) -> None:
    """Print (heading, text) in two columns. The lines of a long text are aligned."""
    key_width = max(len(key) for key, _ in lines) + 2
    wrapper = textwrap.TextWrapper(
        width=min(shutil.get_terminal_size((100, 0)).columns, 120),
        subsequent_indent=" " * (key_width + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for key, text in lines:
        wrapper.initial_indent = f"  {key:<{key_width}}"
        say(wrapper.fill(text), file=file)


def record(traced: TracedJob, rows: Sequence[Row], cluster: Cluster) -> dict[str, Any]:
    """Return a plan as JSON values. Amounts are in bytes, and times in seconds."""
    row_records = []
    for row in rows:
        row_records.append(
            asdict(row) | {"fits": row.fits, "tokens_per_second": row.tokens_per_second, "tokens_per_second_range": row.rates}
        )
    return {
        "model": traced.job.name,
        "parameters": traced.model.parameters,
        "trained": traced.model.trained_elements,
        "hardware": asdict(cluster),
        "rows": row_records,
    }


def write_json(target: str, values: object) -> None:
    """Write JSON to a file, or print it where ``target`` is ``-``."""
    text = json.dumps(values, indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")
        say(f"wrote {target}")
