"""Values as people write them in YAML and in flags: ``none``, a list with commas, a whole number such as ``1e3``."""

import re
from typing import Any

# An item of a list with commas: a name, a path, FILE.py:Class, or a token in brackets. Such texts have no comma of their own,
# unlike regular expressions and other tokens.
_ITEM = re.compile(r"[\w./:~-]+|<.+>|\[.+\]")


def is_none(value: Any) -> bool:
    """Return whether a value is null, or a word for it that YAML reads as text.

    >>> is_none("None"), is_none("null"), is_none("no")
    (True, True, False)
    """
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def as_list(value: Any) -> Any:
    """Return the list for which a value stands: names between commas, or the value alone. Lists are returned as they are.

    ``none`` and false stand for an empty list.

    >>> as_list("q_proj, v_proj"), as_list("<|a|>,<|b|>"), as_list(r"layers\\.[0-3]{1,2}"), as_list("none")
    (['q_proj', 'v_proj'], ['<|a|>', '<|b|>'], ['layers\\\\.[0-3]{1,2}'], [])
    """
    if isinstance(value, list | tuple):
        return value
    if is_none(value) or value is False:
        return []
    if not isinstance(value, str):
        return [value]
    items = [item.strip() for item in value.split(",")]
    if all(map(_ITEM.fullmatch, items)):
        return items
    # Another text with commas, such as a regular expression, is one value.
    return [value]


def as_whole_number(value: Any) -> Any:
    """Return the number for a text such as ``1e3``. A value that is not a whole number in this form is returned as it is."""
    if not isinstance(value, str) or not re.fullmatch(r"[+-]?[\d.]+[eE]\+?\d{1,2}", value):
        return value
    try:
        number = float(value)
    except ValueError:
        # The pattern also matches texts that are no number, such as 1.2.3e4.
        return value
    return int(number) if number.is_integer() else value
