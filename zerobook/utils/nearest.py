"""Suggestions for a misspelt name: the end of an error message."""

import difflib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from zerobook.utils import other_trainers


def nearest(name: str, names: Iterable[str], prefix: str = "", *, most: int = 1) -> str:
    """Return `` Did you mean ...?`` with up to ``most`` of ``names`` that are spelt like ``name``, or an empty string.

    Args:
        prefix: what stands before the first name, such as ``--``.
    """
    matches = difflib.get_close_matches(name, list(names), n=most, cutoff=0.6)
    return f" Did you mean {prefix}{', '.join(matches)}?" if matches else ""


def nearest_file(missing: Path) -> str:
    """Return `` Did you mean ...?`` with a file in the folder of the missing one, or an empty string."""
    # Read 10,000 names at most, since a folder may have millions of files.
    try:
        neighbours = {entry.name for entry in islice(missing.parent.iterdir(), 10_000)}
    except OSError:
        return ""
    folder = "" if str(missing.parent) == "." else f"{missing.parent}/"
    return nearest(missing.name, neighbours, folder)


def nearest_value(key: str, value: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean ...?`` with one of the values of a flag, or an empty string.

    Args:
        value: another trainer's word for the value, or a misspelt value.
    """
    # Look for another trainer's word first, since it may be spelt like a value that means something else.
    translation = other_trainers.VALUES.get(key, {}).get(value)
    if translation:
        return f" Did you mean {translation}?"
    return nearest(value, set(choices))
