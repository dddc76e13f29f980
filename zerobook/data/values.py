"""Values of a row: texts and JSON, checked, and their kinds in words for messages."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import Any

from zerobook.data.samples import BadSample


def read_text(value: object, name: str, *, blank: bool = False) -> str:
    """Return ``value`` if it is a text that can be tokenized.

    Args:
        name: of the value, for the error message.
        blank: allow an empty text, and one of white space alone.

    Raises:
        BadSample: it is not a text, is empty or blank, or has a NUL character or an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise BadSample(f"{name} is {kind_of(value)}, expected a string")
    if not value.strip() and not blank:
        raise BadSample(f"{name} is empty")
    if "\0" in value:
        raise BadSample(f"{name} has a NUL character at position {value.index(chr(0))}; is the file text?")
    try:
        # JSON can write half of a surrogate pair, which no tokenizer takes.
        value.encode()
    except UnicodeEncodeError as error:
        raise BadSample(f"{name} has an unpaired surrogate at position {error.start}, which is not a character") from None
    return value


def is_empty(value: object) -> bool:
    """Return whether a column that may be left out is empty: null, an empty text, or NaN, which pandas writes for it."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def read_json(text: str, name: str) -> Any:
    """Return the value of a JSON text inside a row. ``name``: of the text, for the error message.

    Raises:
        BadSample: it is not valid JSON.
    """
    try:
        return json.loads(read_text(text, name), parse_constant=refuse_constant)
    except ValueError as error:
        raise BadSample(f"{name} is not valid JSON: {error}") from None
    except RecursionError:
        raise BadSample(f"{name} is JSON that is nested too deeply") from None


def refuse_constant(constant: str) -> None:
    """Raise `ValueError` for NaN and Infinity. Python reads and writes them in JSON, but JSON has no such numbers."""
    raise ValueError(f"{constant} is not a number of JSON")


def json_problem(error: json.JSONDecodeError) -> str:
    """Return what is wrong with a text that is not valid JSON. NaN and Infinity, which many programs write, are named."""
    # The position of orjson's error is at the word, or behind its minus sign.
    constant = _CONSTANT.search(error.doc, max(0, error.pos - 1), error.pos + len("-Infinity"))
    if constant is None:
        return f"not valid JSON: {error.msg}"
    return f"not valid JSON: {constant[0]} is not a number of JSON, null stands for a value that is missing"


_CONSTANT = re.compile(r"-?\b(NaN|Infinity)\b")


def kind_of(value: object) -> str:
    """Return the kind of a value in words, such as ``a list``."""
    if value is None:
        return "null"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    # Looked up by the exact type, so a boolean is not a number here.
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two texts or lists have in common at their beginning."""
    return sum(takewhile(bool, map(eq, one, other)))


def listed(columns: Iterable[Any]) -> str:
    """Return names in alphabetical order for a message; a name that is not printable is quoted."""
    names = []
    for name in sorted(map(str, columns)):
        names.append(name if name.isprintable() else repr(name))
    return ", ".join(names) or "nothing"
