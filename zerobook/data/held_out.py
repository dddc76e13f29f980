"""Messages about held-out data on which no loss can be measured, for runs and for ``zerobook data inspect``."""

_OTHER_DATA = "or name other data with --validation_file."


def describe_unsupervised(name: str, counts: str, length: int, length_key: str) -> str:
    """Return the error message for held-out samples without a supervised token.

    Args:
        counts: how many samples were left out or truncated, in words; may be empty.
        length: maximum number of tokens in a row.
        length_key: name of the flag that sets ``length``.
    """
    reason = f" ({counts})" if counts else ""
    return (
        f"{name}: it is held-out data without a supervised token within {length} tokens{reason}, so no loss can be measured on "
        f"it. Raise --{length_key}, {_OTHER_DATA}"
    )


def describe_short_text(name: str, tokens: int, length: int, length_key: str) -> str:
    """Return the error message for held-out running text of fewer ``tokens`` than one block of ``length``."""
    return (
        f"{name}: it is held-out data of {tokens} tokens, fewer than one block of {length}, so no loss can be measured on it. "
        f"Lower --{length_key}, {_OTHER_DATA}"
    )


def describe_empty_share(path: str, percentage: float, *, has_other_held_out_data: bool = False) -> str:
    """Return a warning that the held-out share of small training data is not even one row.

    Args:
        percentage: ``validation_split_percentage``.
        has_other_held_out_data: other datasets of the run have held-out rows.
    """
    empty = f"WARNING: {path}: {percentage:g} % of it is less than one row, so nothing is held out"
    advice = "Give --validation_file, or a higher --validation_split_percentage."
    # A mixture still measures a loss on its other datasets.
    if has_other_held_out_data:
        return f"{empty}, and the held-out loss says nothing about it. {advice}"
    return (
        f"{empty}. No held-out loss is measured, so --eval_steps, --early_stopping_patience and the choice of the best "
        f"checkpoint do not work. {advice}"
    )
