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
    """Print the text of rows. Supervised tokens are green on a terminal, and between guillemets elsewhere.

    Control characters are shown as escapes. Rows are indented, so that no line of a row looks like the title of the next row.

    Args:
        rows: (title, row) each.
        encoder_decoder: a row has a source, of which nothing is supervised, and a target.
    """
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    # Characters to escape. If guillemets mark supervised tokens, a guillemet in the text must not look like such a mark.
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
    # At most one bin for each length that occurs: further bins would always be empty.
    bins = min(HISTOGRAM_BINS, max(1, len(np.unique(lengths))))
    counts, edges = np.histogram(lengths, bins=bins)
    # The longest length of each bin: the upper edge of a bin belongs to the next bin, except that of the last bin.
    last_lengths = [*np.ceil(edges[1:-1]) - 1, edges[-1]]
    for count, low, high in zip(counts, edges[:-1], last_lengths, strict=True):
        characters = round(HISTOGRAM_CHARACTERS * count / counts.max())
        # A bin that is not empty has a bar, also if the bar would be rounded to 0 characters.
        if count:
            characters = max(1, characters)
        console().print(f"  {int(np.ceil(low)):>6} to {int(high):>6} {'█' * characters} {count}", style="cyan")


def _segments(row: Row, encoder_decoder: bool) -> list[tuple[np.ndarray, bool, bool]]:
    """Divide a row where a sample of a pack begins, and where supervision begins or ends.

    Returns:
        (token ids, whether they are supervised, whether a sample begins with them) of each segment, in order.
    """
    ids = row["input_ids"]
    labels = row["labels"]
    if encoder_decoder:
        return [(ids, False, True), (labels[labels != IGNORE], True, True)]
    # The positions in each sample of a pack begin with 0. A row that is not packed has no positions.
    begins_sample = row.get("position_ids", np.arange(len(ids))) == 0
    is_supervised = labels != IGNORE
    # Whether a segment begins at a token, for all tokens but the first.
    begins_segment = begins_sample[1:] | (is_supervised[1:] != is_supervised[:-1])
    starts = [0, *(np.flatnonzero(begins_segment) + 1).tolist()]
    limits = zip(starts, [*starts[1:], len(ids)], strict=True)
    return [(ids[start:end], bool(is_supervised[start]), bool(begins_sample[start])) for start, end in limits]
