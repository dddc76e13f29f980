"""Values as people write them, in YAML and in flags: ``none``, a list in one text, a whole number such as ``1e3``."""

import re
from typing import Any

_WORD = re.compile(r"[\w./:~-]+|<.+>|\[.+\]")
"""A name, a path, ``FILE.py:Class`` or a token in brackets: text that has no comma of its own. A regular expression or another
token may have one."""


def is_none(value: Any) -> bool:
    """Return whether a value is null, or a word for it that YAML reads as text.

    >>> is_none("None"), is_none("null"), is_none("no")
    (True, True, False)
    """
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def as_list(value: Any) -> Any:
    """Return the list that is meant by a single value: names between commas, or the one value. Lists are returned as they are.

    >>> as_list("q_proj, v_proj"), as_list("<|a|>,<|b|>"), as_list(r"layers\\.[0-3]{1,2}"), as_list("none")
    (['q_proj', 'v_proj'], ['<|a|>', '<|b|>'], ['layers\\\\.[0-3]{1,2}'], [])
    """
    if isinstance(value, list | tuple):
        return value
    if is_none(value) or value is False:
        return []
    if not isinstance(value, str):
        return [value]
    # Other texts with commas, such as a regular expression, are one value.
    words = [word.strip() for word in value.split(",")]
    if all(map(_WORD.fullmatch, words)):
        return words
    return [value]


def as_whole_number(value: Any) -> Any:
    """Return ``1e3`` as 1000. What is not a whole number in that form is returned as it is."""
    if not isinstance(value, str) or not re.fullmatch(r"[+-]?[\d.]+[eE]\+?\d{1,2}", value):
        return value
    try:
        number = float(value)
    except ValueError:
        # The text only looks like a number, as 1.2.3e4 does.
        return value
    return int(number) if number.is_integer() else value
