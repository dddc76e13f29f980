"""Rows of token ids that were made elsewhere: their labels, and the masks that other trainers write beside them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerobook.constants import IGNORE
from zerobook.data.samples import BadSample, Tokens
from zerobook.data.values import kind_of

# Columns of 0 and 1 that say which tokens are supervised, by the names of TRL, transformers, ms-swift and others.
LOSS_MASKS = (
    "completion_mask",
    "assistant_masks",
    "assistant_mask",
    "assistant_tokens_mask",
    "loss_mask",
    "loss_weights",
    "loss_scale",
)
PADDING_MASK = "attention_mask"
# Columns that `read_tokens` reads beside ``input_ids``.
TOKEN_COLUMNS = ("labels", PADDING_MASK, *LOSS_MASKS)


def read_tokens(row: Mapping[str, Any], columns: tuple[str, ...]) -> Tokens:
    """Return the ids and labels of a row. A token is supervised if its label and all masks say so; padding is removed.

    Raises:
        BadSample: lengths differ, a mask has other values than 0 and 1, or padding stands between tokens.
    """
    ids = _read_integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadSample("input_ids is empty")
    if min(ids) < 0:
        raise BadSample(f"input_ids has the negative id {min(ids)}")
    # A copy, since the labels may be the row's own list.
    labels = list(_read_labels(row, ids))
    for column in LOSS_MASKS:
        for position, is_supervised in enumerate(_read_mask(row, column, len(ids))):
            if not is_supervised:
                labels[position] = IGNORE
    # Cut off the padding, since the collator pads each batch to its own length.
    start, stop = _find_tokens(_read_mask(row, PADDING_MASK, len(ids)))
    return Tokens(ids[start:stop], labels[start:stop])


def check_columns(row: Mapping[str, Any]) -> None:
    """Raise `BadSample` if a row holds several samples, or has a mask that is not read. The error names the column."""
    lengths = row.get("seq_lengths")
    positions = row.get("position_ids")
    if (isinstance(lengths, list) and len(lengths) > 1) or (isinstance(positions, list) and positions.count(0) > 1):
        raise BadSample(
            "its seq_lengths or position_ids say that it holds several samples, which would attend to each other. Prepare the "
            "samples without packing, or pass --format tokenized to train on the row as one sample"
        )
    for column, value in row.items():
        # The mask of special tokens does not say which tokens are supervised.
        is_read = column in TOKEN_COLUMNS or column == "special_tokens_mask"
        if "mask" in str(column) and not is_read and value is not None:
            raise BadSample(
                f"the column {column} is not read, and may say which tokens are supervised. Rename it to loss_mask if 1 means "
                "supervised, or pass --format tokenized to train without it"
            )


# Return the labels of a row; without labels, its ids.
def _read_labels(row: Mapping[str, Any], ids: list[int]) -> list[int]:
    if row.get("labels") is None:
        return list(ids)
    labels = _read_integers(row["labels"], "labels")
    if len(ids) != len(labels):
        raise BadSample(f"{len(ids)} input_ids but {len(labels)} labels; they must match")
    wrong = [label for label in labels if label < 0 and label != IGNORE]
    if wrong:
        raise BadSample(f"labels has {wrong[0]}; negative labels other than {IGNORE} (not supervised) mean nothing")
    return labels


def _read_mask(row: Mapping[str, Any], column: str, length: int) -> list[bool]:
    """Return a mask of a row as booleans; all True if the row has none."""
    values = row.get(column)
    if values is None:
        return [True] * length
    values = _as_list(values, column, "0 and 1")
    if len(values) != length:
        raise BadSample(f"{length} input_ids but {len(values)} values of {column}; they must match")
    for value in values:
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadSample(f"{column} has {value!r:.40} in it, expected 0 and 1")
    return list(map(bool, values))


def _find_tokens(mask: list[bool]) -> tuple[int, int]:
    """Return the range (start, stop) of the tokens, which a mask has True for. Padding may be at both ends."""
    if not any(mask):
        raise BadSample(f"{PADDING_MASK} is 0 for all tokens")
    start = mask.index(True)
    stop = len(mask) - mask[::-1].index(True)
    if not all(mask[start:stop]):
        raise BadSample(f"{PADDING_MASK} is 0 between tokens that it is 1 for; padding stands at an end")
    return start, stop


# Return a list of integers; raise `BadSample` for any other value.
def _read_integers(values: object, name: str) -> list[int]:
    integers = _as_list(values, name, "integers")
    for value in integers:
        # In Python a boolean is an integer, but it is no token id.
        if type(value) is not int:
            raise BadSample(f"{name} has {kind_of(value)} in it, expected integers")
    return integers


def _as_list(values: object, name: str, expected: str) -> list[Any]:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list):
        raise BadSample(f"{name} is {kind_of(values)}, expected a list of {expected}")
    return values
