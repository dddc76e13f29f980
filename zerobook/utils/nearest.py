"""Names that are spelt like a wrong one, as the end of an error message."""

import difflib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from zerobook.utils import other_trainers


def nearest(name: str, names: Iterable[str], prefix: str = "", *, most: int = 1) -> str:
    """Return ``Did you mean ...?`` with the ``most`` names that are spelt most like it, or an empty string."""
    matches = difflib.get_close_matches(name, list(names), n=most, cutoff=0.6)
    return f" Did you mean {prefix}{', '.join(matches)}?" if matches else ""


def nearest_file(missing: Path) -> str:
    """Return ``Did you mean ...?`` with a neighbour of a file that is not there, or an empty string."""
    # A folder may have millions of files.
    try:
        neighbours = {entry.name for entry in islice(missing.parent.iterdir(), 10_000)}
    except OSError:
        return ""
    folder = "" if str(missing.parent) == "." else f"{missing.parent}/"
    return nearest(missing.name, neighbours, folder)


def nearest_value(key: str, value: str, choices: Iterable[str]) -> str:
    """Return ``Did you mean ...?`` with the value of a flag that is meant: by another trainer's word, or by its spelling."""
    # The word of another trainer may be spelt like another value.
    translation = other_trainers.VALUES.get(key, {}).get(value)
    if translation:
        return f" Did you mean {translation}?"
    return nearest(value, set(choices))
