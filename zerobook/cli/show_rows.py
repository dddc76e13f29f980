"""Rows as the model gets them, and how long they are, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from zerobook.constants import IGNORE
from zerobook.utils.terminal import console, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, np.ndarray]
HISTOGRAM_BINS = 12
HISTOGRAM_CHARACTERS = 60


def show_rows(rows: Iterable[tuple[str, Row]], tokenizer: PreTrainedTokenizerBase, *, encoder_decoder: bool = False) -> None:
    """Print rows with their titles. Supervised tokens are green on a terminal, and between guillemets elsewhere.

    Control characters are shown as escapes. Rows are indented, so that none looks like the title of the next.

    Args:
        encoder_decoder: a row is a source, of which nothing is supervised, and its target.
    """
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    # If guillemets mark supervised tokens, those in the text of a row are escaped, too.
    escaped = "" if out.is_terminal else "«»"
    for title, row in rows:
        out.print(f"\n{title}: {len(row['input_ids'])} tokens", style="bold")
        text = Text()
        for ids, is_supervised, begins_sample in _segments(row, encoder_decoder):
            if begins_sample and len(text):
                text.append("\n")
            piece = visible(cast("str", tokenizer.decode(ids, clean_up_tokenization_spaces=False)), escaped)
            if is_supervised and not out.is_terminal:
                piece = f"«{piece}»"
            text.append(piece, style="green" if is_supervised else "dim")
        out.print(Padding(text, (0, 0, 0, 2), expand=False))
    if out.is_terminal:
        appearance = "green"
    else:
        appearance = "between « and » (the same characters in the text are shown as \\xab and \\xbb)"
    out.print(f"\nsupervised tokens are {appearance}")


def print_histogram(lengths: np.ndarray) -> None:
    """Print a histogram of lengths in tokens, one line per bin."""
    # Not more bins than lengths, so that no line is always empty.
    bins = min(HISTOGRAM_BINS, max(1, len(np.unique(lengths))))
    counts, edges = np.histogram(lengths, bins=bins)
    # Each bin but the last is without its upper edge.
    last_lengths = [*np.ceil(edges[1:-1]) - 1, edges[-1]]
    for count, low, high in zip(counts, edges[:-1], last_lengths, strict=True):
        characters = round(HISTOGRAM_CHARACTERS * count / counts.max())
        # A bin that is not empty has a bar.
        if count:
            characters = max(1, characters)
        console().print(f"  {int(np.ceil(low)):>6} to {int(high):>6} {'█' * characters} {count}", style="cyan")


def _segments(row: Row, encoder_decoder: bool) -> list[tuple[np.ndarray, bool, bool]]:
    """Return (token ids, whether supervised, whether a new sample of a pack begins) of a row, in order."""
    ids = row["input_ids"]
    labels = row["labels"]
    if encoder_decoder:
        return [(ids, False, True), (labels[labels != IGNORE], True, True)]
    begins = row.get("position_ids", np.arange(len(ids))) == 0
    supervised = labels != IGNORE
    # A segment ends where a sample begins, and where supervision begins or ends.
    starts = [0, *(np.flatnonzero(begins[1:] | (supervised[1:] != supervised[:-1])) + 1).tolist()]
    ends = [*starts[1:], len(ids)]
    return [(ids[start:end], bool(supervised[start]), bool(begins[start])) for start, end in zip(starts, ends, strict=True)]
