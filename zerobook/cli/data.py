"""``zerobook data``: prepare a recipe's data ahead, and look at it.

    zerobook data prepare recipes/lora_finetune.py --config recipes/configs/lora_smollm2.yaml
    zerobook data inspect recipes/lora_finetune.py --config recipes/configs/lora_smollm2.yaml --samples 3 --png lengths.png

All other flags than those below belong to the recipe, so a launch of the recipe finds the prepared data.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zerobook.config import parse
from zerobook.constants import IGNORE
from zerobook.data.prepare import PreparedData
from zerobook.errors import ConfigError
from zerobook.training.recipe_file import RUNS, recipe_class
from zerobook.utils.terminal import console, say, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BINS = 12


def data(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    parser = argparse.ArgumentParser("zerobook data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        _rows(prepared, tokenizer, known.samples)
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


def _rows(data: PreparedData, tokenizer: PreTrainedTokenizerBase, samples: int) -> None:
    """Print rows as the model gets them, as text: supervised tokens green on a terminal, and between guillemets elsewhere.

    Control characters are shown as escapes, and so are a row's own guillemets where they are marks. Rows are
    indented, so that no row looks like the next one's heading.
    """
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    marks = "" if out.is_terminal else "«»"
    for name, view in _parts(data):
        for number in range(min(samples, len(view))):
            row = view[number]
            out.print(f"\n{name}, row {number}: {len(row['input_ids'])} tokens", style="bold")
            text = Text()
            for ids, supervised, first in _stretches(row):
                text.append("\n" if first and len(text) else "")
                piece = visible(cast("str", tokenizer.decode(ids, clean_up_tokenization_spaces=False)), marks)
                if supervised and not out.is_terminal:
                    piece = f"«{piece}»"
                text.append(piece, style="green" if supervised else "dim")
            out.print(Padding(text, (0, 0, 0, 2), expand=False))
    out.print("\nsupervised in " + ("green" if out.is_terminal else "«guillemets»; a row's own are shown as \\xab and \\xbb"))


def _stretches(row: dict[str, np.ndarray]) -> list[tuple[np.ndarray, bool, bool]]:
    """Return (token ids, whether supervised, whether a new sample of a pack begins) of a row, in order."""
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) != len(labels):
        return [(ids, False, True), (labels[labels != IGNORE], True, True)]
    begins = row.get("position_ids", np.arange(len(ids))) == 0
    supervised = labels != IGNORE
    cuts = np.flatnonzero(begins[1:] | (supervised[1:] != supervised[:-1])) + 1
    starts = [0, *cuts.tolist()]
    return [(ids[a:b], bool(supervised[a]), bool(begins[a])) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


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
