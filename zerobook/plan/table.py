"""Output of plans on the terminal and as JSON: the rows of strategy files, and the literature's formulas alone.

Imports nothing heavy, so that the formulas alone are shown in a tenth of a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerobook.plan import formulas
from zerobook.plan.hardware import Cluster
from zerobook.plan.literature import Paper, paper
from zerobook.plan.sharding import ShardingSpec
from zerobook.utils.terminal import console, say
from zerobook.utils.units import count, duration, gb, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zerobook.plan.rows import Row, Subject

WIDTH = 150
"""Columns of a table where the output is not a terminal."""
Column = tuple[str, "Callable[[Row], str]"]


def show(subject: Subject, rows: Sequence[Row], where: Cluster) -> None:
    """Print a plan: what a GPU holds, what is sent, what does not fit and what would help."""
    from rich.markup import escape

    out = console(WIDTH, markup=True)
    shape = subject.shape
    lengths = f"{shape.source} + {shape.target}" if shape.target else f"{shape.source}"
    room = f", host {size(where.host_memory)}" if where.host_memory else ""
    out.print(
        f"[bold]{escape(subject.name)}[/]: {count(subject.parameters)} parameters, {count(subject.trained)} trained | "
        f"micro-batch {shape.rows} x {lengths} tokens, accumulation {subject.accumulation} | {where.name}, "
        f"{gb(where.device.memory)} GB each{room}"
    )
    if subject.by_formula:
        out.print(f"[yellow]by formula[/], not counted or traced: {escape(subject.by_formula)}")
    by = "BY FORMULA: " if subject.by_formula else ""
    title = f"{by}GPU memory of the fullest rank at its peak, in GB (10^9 bytes)"
    _print(out, title, _memory(subject, rows), rows)
    sends = any(row.sent for row in rows)
    title = f"{by}{'sent in a step, and its time' if sends else 'time of a step; nothing is sent'}"
    _print(out, title, [*(_traffic(subject, rows, where) if sends else ()), *_time()], rows)
    _misfits(out, rows)
    best = rows[0]
    if best.fits and best.time is not None:
        out.print(
            f"best{' by formula' if by else ''}: [bold]{best.file}[/] ({best.name}), {duration(best.time.step)} a step of "
            f"{best.tokens_per_step:,} tokens, {duration(1e9 / best.tokens_per_second)} for 10^9 tokens"
        )
    else:
        out.print("[red]no strategy file fits with these settings.[/]")
    for line in _footer(subject, rows, where):
        out.print(f"[dim]{escape(line)}[/]")


def _print(out: Console, title: str, columns: list[Column], rows: Sequence[Row]) -> None:
    """Print a table without the columns that do not fit the terminal, the least important first, and name those."""
    left_out = []
    made = _table(title, columns, rows)
    while len(columns) > 1 and out.measure(made, options=out.options.update(max_width=1000)).maximum > out.width:
        named = [column for header in _DISPENSABLE for column in columns if column[0] == header]
        gone = named[0] if named else columns[-1]
        columns = [column for column in columns if column is not gone]
        left_out.append(" ".join(gone[0].split()))
        made = _table(title, columns, rows)
    out.print(made)
    if left_out:
        out.print(f"[dim]left out on {out.width} columns: {', '.join(left_out)}; --json has all[/]")


_DISPENSABLE = (
    "formula of the\nstates, in bytes", "formula of what each\nrank sends, in bytes", "by 48 P/N\nbits", "by paper,\nas a ring",
    "by\npaper", "all states,\ncounted", "buffers", "in\ntraining", "waits for",
)  # fmt: skip
"""Headers of columns in the order in which a narrow terminal does without them. After them, columns go from the right."""


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    from rich.table import Table

    made_of = Table(title=title, title_justify="left", box=None)
    made_of.add_column("strategy file", no_wrap=True)
    made_of.add_column("fits", no_wrap=True)
    for header, _ in columns:
        made_of.add_column(header, justify="left" if header.startswith("formula") else "right")
    for row in rows:
        cells = [] if row.memory is None else [cell(row) for _, cell in columns]
        made_of.add_row(row.file, _fits(row), *cells, style="" if row.fits else "dim")
    return made_of


def _fits(row: Row) -> str:
    if row.memory is None:
        return "[red]not traced[/]" if row.untraced else "[red]cannot run[/]"
    if not row.fits:
        return "[red]no[/]"
    return "[yellow]tight[/]" if row.tight else "[green]yes[/]"


def _memory(subject: Subject, rows: Sequence[Row]) -> list[Column]:
    def part(*names: str) -> Callable[[Row], str]:
        return lambda row: gb(sum(_held(row).device[name] for name in names))

    columns: list[Column] = [
        ("total", lambda row: ("> " if row.bare else "") + gb(_held(row).total)),
        ("weights", part("parameters")),
        ("grads", part("gradients")),
        ("optim.", part("optimizer")),
        ("activ.", lambda row: "-" if row.bare else gb(_held(row).device["activations"])),
        ("buffers", part("buffers", "other")),
    ]
    if not subject.by_formula:
        columns += [
            ("all states,\ncounted", lambda row: gb(row.states)),
            ("by\npaper", lambda row: gb(_paper(row).held("none"))),
        ]
    columns += [
        ("host RAM\nat load", lambda row: size(_held(row).host_at_load)),
        ("in\ntraining", lambda row: _or_dash(_held(row).host)),
    ]
    if any(row.memory is not None and row.memory.disk for row in rows):
        columns.append(("disk in\ntraining", lambda row: _or_dash(_held(row).disk)))
    if subject.by_formula:
        columns.append(("formula of the\nstates, in bytes", lambda row: _paper(row).formula["states"].removesuffix(" bytes")))
    return columns


def _traffic(subject: Subject, rows: Sequence[Row], where: Cluster) -> list[Column]:
    """Return the columns of what is sent: counted, and by the papers' law. A plan by formula has only the law."""
    columns: list[Column] = [("each rank", lambda row: _or_dash(row.sent))]
    if not subject.by_formula:
        columns.append(("by\npaper", lambda row: _or_dash(_paper(row).sent)))
    if where.nodes > 1:
        columns.append(("each node", lambda row: _or_dash(row.between)))
        if not subject.by_formula:
            columns.append(("by paper,\nas a ring", lambda row: _or_dash(_paper(row).between)))
    if _ruled(rows):
        columns.append(("by 48 P/N\nbits", lambda row: _or_dash(_paper(row).rule or 0)))
    if subject.by_formula:
        columns.append(
            ("formula of what each\nrank sends, in bytes", lambda row: _paper(row).formula["sent"].removesuffix(" bytes"))
        )
    return columns


def _ruled(rows: Sequence[Row]) -> bool:
    """Return whether the rule of thumb applies to any of the rows."""
    return any(row.paper is not None and row.paper.rule is not None for row in rows)


def _time() -> list[Column]:
    return [
        ("tokens/s", lambda row: f"{row.tokens_per_second:,.0f}" if row.time else "-"),
        ("waits for", lambda row: row.time.bound if row.time else "-"),
    ]


def _held(row: Row) -> Any:
    assert row.memory is not None
    return row.memory


def _paper(row: Row) -> Paper:
    assert row.paper is not None
    return row.paper


def _misfits(out: Console, rows: Sequence[Row]) -> None:
    """Print why rows cannot run, and what would help rows that do not fit. Rows with the same reason and remedy share a
    line."""
    from rich.markup import escape

    for row in rows:
        for problem in row.problems:
            out.print(f"[bold]{row.file}[/] cannot {'be planned' if row.untraced else 'run'}: {escape(problem)}")
    alike: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.over:
            alike.setdefault((tuple(reason.partition(":")[0] for reason in row.over), tuple(row.remedies)), []).append(row)
    for (reasons, remedies), some in alike.items():
        why = "; ".join(some[0].over) if len(some) == 1 else " and ".join(reasons)
        way = f" -> {' or '.join(remedies)}" if remedies else ""
        out.print(f"does not fit ({why}): [bold]{', '.join(row.file for row in some)}[/]{way}")


def _footer(subject: Subject, rows: Sequence[Row], where: Cluster) -> list[str]:
    from zerobook.plan.roofline import EFFICIENCY

    like = where.device.like
    speed = f"{like}'s listed speed, since this GPU's is not known" if like else "the GPU's listed speed"
    lines = [
        f"checkpoints: {_checkpoints(max(rows, key=lambda row: row.checkpoint))}; times assume {EFFICIENCY:.0%} of {speed}"
    ]
    if subject.by_formula:
        example = next((row for row in rows if row.formula), None)
        lines += [f"{name}: {words}" for name, words in example.formula.items()] if example else []
        lines.append("the libraries' buffers, copies and padding are in no formula: leave room for them")
    else:
        lines.append("weights, gradients and optimizer state are counted, activations traced; by paper: ZeRO, sections 5 and 7")
    if uncounted := sorted({name for row in rows for name in row.uncounted}):
        lines.append(f"steps take longer than that: of {', '.join(uncounted)} no operations are counted")
    if any(row.bare for row in rows):
        lines.append(">: the states alone exceed the GPU, so no activations were traced")
    if _ruled(rows):
        lines.append("48 P/N bits: a rule of thumb for ZeRO-3 in 2-byte elements on N nodes")
    if subject.accumulation > 1:
        lines.append("what the paper sends is one micro-batch's: it knows no accumulation")
    return lines


def _checkpoints(row: Row) -> str:
    if row.checkpoints is None:
        return f"{size(row.checkpoint)} each; how many follows from the data's length, unless --save_total_limit says"
    return size(row.checkpoint) if row.checkpoints == 1 else f"{row.checkpoints} of them {size(row.checkpoint)}"


def _or_dash(amount: float) -> str:
    return size(amount) if amount else "-"


def record(subject: Subject, rows: Sequence[Row], where: Cluster) -> dict[str, Any]:
    """Return a plan as JSON values. Amounts are bytes, times seconds."""
    return {
        "model": subject.name, "parameters": subject.parameters, "trained": subject.trained,
        "by_formula": subject.by_formula or None, "hardware": asdict(where),
        "rows": [asdict(row) | {"fits": row.fits, "tokens_per_second": row.tokens_per_second} for row in rows],
    }  # fmt: skip


def write_json(target: str, found: object) -> None:
    """Write JSON to a file, or print it where ``target`` is ``-``."""
    text = json.dumps(found, indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")
        say(f"wrote {target}")


class Tokens(NamedTuple):
    """The sizes of a transformer's activations."""

    layers: int
    batch: int
    length: int
    width: int

    @property
    def words(self) -> str:
        return f"{self.layers} layers of {self.width}, {self.batch} x {self.length} tokens"

    def rows(self) -> list[tuple[str, float]]:
        """Return (what is kept for the backward pass, its bytes)."""
        tensor = self.layers * self.batch * self.length * self.width

        def kept(element: int, checkpointing: bool) -> float:  # fused attention has no term of the heads
            return formulas.activations(*self, heads=1, element=element, fused=True, checkpointing=checkpointing)

        return [
            ("one tensor of each layer, 2 bytes an element (its input: checkpointing)", 2.0 * tensor),
            ("one tensor of each layer, 4 bytes an element", 4.0 * tensor),
            ("everything, 2 bytes, fused attention (34 s b h a layer)", kept(2, False)),
            ("inputs of layers, and one layer recomputed, 2 bytes, fused attention", kept(2, True)),
        ]

    def record(self) -> list[dict[str, str | float]]:
        return [{"what": what, "bytes": amount} for what, amount in self.rows()]


def show_formulas(
    parameters: int, where: Cluster, *, mixed: bool, target: str | None, largest_layer: int | None, tokens: Tokens | None
) -> None:
    """Print the papers' figures for a number of parameters under DDP and ZeRO's stages.

    Args:
        target: as in `write_json`.
        largest_layer: parameters of the largest layer, for DeepSpeed's estimates under ZeRO-3; None leaves them out.
        tokens: the sizes of a transformer's activations; None leaves them out.
    """
    ranks, rows = where.ranks, []
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        spread = ShardingSpec(
            kind="deepspeed" if stage else "ddp", name=name, ranks=ranks, node=where.gpus, stage=stage,
            shard=ranks if stage == 3 else 1, precision="bf16" if mixed else "no",
        )  # fmt: skip
        rows.append((name, paper(parameters, parameters, spread, where.nodes)))
    two = formulas.deepspeed_zero2(parameters, where.gpus, where.nodes, offload=False)
    estimates = [] if largest_layer is None else formulas.deepspeed_rows(parameters, largest_layer, where.gpus, where.nodes)
    checkpoint = formulas.CHECKPOINT_BYTES * parameters
    if target:
        write_json(target, {
            "parameters": parameters, "hardware": asdict(where), "precision": "mixed" if mixed else "fp32", "unit": "bytes",
            "rows": [{"name": name, "total": made.states.total, **asdict(made)} for name, made in rows],
            "deepspeed_zero2": two._asdict(),
            **({"deepspeed": [{"case": case} | made._asdict() for case, made in estimates]} if estimates else {}),
            **({"activations": tokens.record()} if tokens else {}),
            "checkpoint": {"bytes": checkpoint, "formula": f"{formulas.CHECKPOINT_BYTES} P bytes"},
        })  # fmt: skip
    if target == "-":
        return
    kind = "mixed precision: 2-byte elements, K = 12" if mixed else "fp32: 4-byte elements, K = 8"
    print(f"{count(parameters)} parameters (P) on {where.name}: {ranks} GPUs ({kind}); GB are 10^9 bytes, without activations")
    print(f"{'':8}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'total':>10}{'of DDP':>8} a GPU, by formula")
    for name, made in rows:
        states = made.states
        amounts = ((states.parameters, 10), (states.gradients, 11), (states.optimizer, 11), (states.total, 10))
        cells = "".join(f"{gb(amount) + ' GB':>{width}}" for amount, width in amounts)
        less = f"1/{rows[0][1].states.total / states.total:.3g}"
        print(f"{name:8}{cells}{less:>8} = {made.formula['states']}")
    if ranks > 1:
        print("sent in a step by each rank, by the ring's law" + (", and by each node:" if where.nodes > 1 else ":"))
    for name, made in rows if ranks > 1 else ():
        line = f"{name:8}{size(made.sent):>10} = {made.formula['sent']}"
        if where.nodes > 1:
            line += f"; between nodes {_or_dash(made.between)} as a ring"
        if made.rule is not None:
            line += f", {size(made.rule)} by the rule {made.formula['rule']}"
        print(line)
    print("DeepSpeed's estimator, in GiB of host RAM a node and memory a GPU; L are the parameters of the largest layer:")
    for case, estimate in estimates or [("ZeRO-2, nothing offloaded", two)]:
        print(f"{case:68}{estimate.host / 2**30:>9,.2f}{estimate.gpu / 2**30:>9,.2f} = {estimate.formula} bytes")
    if tokens:
        print(f"activations of {tokens.words}:")
        for what, amount in tokens.rows():
            print(f"{what:74}{gb(amount):>9} GB")
    print(f"a checkpoint with optimizer state: {size(checkpoint)} = {formulas.CHECKPOINT_BYTES} P bytes")
