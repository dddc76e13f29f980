"""``zerobook data``: look at a data file, or prepare a recipe's data ahead and look at it.

    zerobook data inspect chats.jsonl --max_seq_length 1024
    zerobook data prepare recipes/lora_finetune.py --config recipes/configs/lora_smollm2.yaml
    zerobook data inspect recipes/lora_finetune.py --config recipes/configs/lora_smollm2.yaml --samples 3 --png lengths.png

All other flags than those below belong to the recipe, so a launch of the recipe finds the prepared data.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from zerobook.cli.arguments import Parser
from zerobook.cli.show_rows import show_rows
from zerobook.config import parse
from zerobook.data.prepare import PreparedData
from zerobook.errors import ConfigError
from zerobook.training.recipe_file import RUNS, recipe_class
from zerobook.utils.terminal import console, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BINS = 12


def data(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    if (
        arguments[:1] == ["inspect"]
        and any(not token.startswith("-") for token in arguments[1:2])
        and (not arguments[1].endswith(".py"))
    ):
        from zerobook.cli.inspect_data import inspect

        return inspect(arguments[1:])
    parser = Parser("zerobook data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "inspect"])
    parser.add_argument("recipe", help=f"the recipe's file, such as recipes/lora_finetune.py; {RUNS}, up to its data")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that tokenize (default: all cores)")
    parser.add_argument("--samples", type=int, default=2, help="inspect: rows to show of each dataset")
    parser.add_argument("--png", help="inspect: write a picture of the lengths to this file")
    known, recipe_flags = parser.parse_known_args(arguments)
    prepared, tokenizer = _prepare(known.recipe, recipe_flags, known.workers)
    _table(prepared)
    if known.action == "inspect":
        _lengths(prepared)
        parts = [(f"{name}, row {number}", view[number]) for name, view in _parts(prepared)
                 for number in range(min(known.samples, len(view)))]  # fmt: skip
        show_rows(parts, tokenizer)
        if known.png:
            draw_lengths(prepared, known.png)
            say(f"wrote {known.png}")
    return 0


def _prepare(recipe: str, flags: list[str], workers: int) -> tuple[PreparedData, PreTrainedTokenizerBase]:
    from zerobook.training.run import prepare_data

    made = recipe_class(recipe)
    config, sources, dry_run = parse(made.config_class, flags)
    if dry_run:
        raise ConfigError("--dry-run: zerobook data does not train, so there is no dry run. Drop the flag.")
    return prepare_data(made(config), sources, workers)


def _parts(data: PreparedData) -> list[tuple[str, Any]]:
    """Return (name, view) of every dataset, held-out ones last."""
    names = [name for name in data.report if not name.endswith(", held out")]
    return [*zip(names, data.train.views, strict=True), *((f"{n}, held out", p.views[0]) for n, p in data.held_out.items())]


def _table(data: PreparedData) -> None:
    from rich.table import Table

    table = Table(title="prepared data", title_justify="left")
    words = ("dataset", "format", "what was done")
    for column in (
        "dataset",
        "format",
        "rows",
        "tokens",
        "counted by the loss",
        "shortest",
        "median",
        "longest",
        "what was done",
    ):
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for name, view in _parts(data):
        lengths, counted = view.lengths, {"rows", "tokens"}
        done = ", ".join(f"{n:,} {what}" for what, n in data.report[name].items() if what not in counted)
        sizes = (len(view), lengths.sum(), view.loss_weights.sum(), lengths.min(), int(np.median(lengths)), lengths.max())
        format, _ = data.formats[name.removesuffix(", held out")]
        table.add_row(name, format, *(f"{int(n):,}" for n in sizes), done)
    console().print(table)
    for name, (_, unread) in data.formats.items():
        if unread:
            say(f"columns of {name} that are not read: {', '.join(unread)}")
    folders = dict.fromkeys(str(view.store.folder) for _, view in _parts(data))
    for folder in folders:
        say(folder)


def _lengths(data: PreparedData) -> None:
    """Print histograms of tokens per row."""
    out = console()
    for name, view in _parts(data):
        counts, edges = np.histogram(view.lengths, bins=min(_BINS, max(1, len(np.unique(view.lengths)))))
        out.print(f"\n{name}: tokens per row", style="bold")
        for count, low, high in zip(counts, edges, edges[1:], strict=False):
            bar = "█" * max(int(count > 0), round(60 * count / counts.max()))
            out.print(f"  {int(np.ceil(low)):>6} to {int(high):>6} {bar} {count}", style="cyan")


def draw_lengths(data: PreparedData, file: str) -> None:
    """Draw histograms of tokens per row, one panel per dataset, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = _parts(data)
    figure, axes = pyplot.subplots(len(parts), 1, figsize=(8, 2.4 * len(parts)), squeeze=False, constrained_layout=True)
    for (name, view), axis in zip(parts, axes[:, 0], strict=True):
        axis.hist(view.lengths, bins=40, color="#3b6ea5")
        axis.axvline(np.median(view.lengths), color="#c0392b", linewidth=1, label=f"median {int(np.median(view.lengths))}")
        axis.set_title(f"{name}: {len(view):,} rows, {int(view.lengths.sum()):,} tokens", loc="left", fontsize=10)
        axis.set_xlabel("tokens per row")
        axis.set_ylabel("rows")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
