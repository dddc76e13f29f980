"""Rows as the model gets them, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from zerobook.constants import IGNORE
from zerobook.utils.terminal import console, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, np.ndarray]


def show_rows(rows: Iterable[tuple[str, Row]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print rows with their titles: supervised tokens green on a terminal, and between guillemets elsewhere.

    Control characters are shown as escapes, and so are a row's own guillemets where they are marks. Rows are
    indented, so that no row looks like the next one's heading.
    """
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    marks = "" if out.is_terminal else "«»"
    for title, row in rows:
        out.print(f"\n{title}: {len(row['input_ids'])} tokens", style="bold")
        text = Text()
        for ids, supervised, first in _stretches(row):
            text.append("\n" if first and len(text) else "")
            piece = visible(cast("str", tokenizer.decode(ids, clean_up_tokenization_spaces=False)), marks)
            if supervised and not out.is_terminal:
                piece = f"«{piece}»"
            text.append(piece, style="green" if supervised else "dim")
        out.print(Padding(text, (0, 0, 0, 2), expand=False))
    marks = "green" if out.is_terminal else "between « and » (the same characters in the text are shown as \\xab and \\xbb)"
    out.print(f"\nsupervised tokens are {marks}")


def _stretches(row: Row) -> list[tuple[np.ndarray, bool, bool]]:
    """Return (token ids, whether supervised, whether a new sample of a pack begins) of a row, in order."""
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) != len(labels):
        return [(ids, False, True), (labels[labels != IGNORE], True, True)]
    begins = row.get("position_ids", np.arange(len(ids))) == 0
    supervised = labels != IGNORE
    cuts = np.flatnonzero(begins[1:] | (supervised[1:] != supervised[:-1])) + 1
    starts = [0, *cuts.tolist()]
    return [(ids[a:b], bool(supervised[a]), bool(begins[a])) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
