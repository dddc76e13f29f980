"""Rows of Arrow tables: Parquet files, saved datasets, and datasets of the hub.

A column of Arrow has one type. Objects that differ between rows become one type with the keys of all of them, and each row
gets a null for every key that only others have. In descriptions and calls of tools, the model would learn these nulls.
"""

from typing import Any

_TOOL_KEYS = ("tools", "tool_calls", "function_call")
"""Columns and keys of turns whose objects differ between rows by their nature."""


def without_padding(row: Any) -> Any:
    """Return a row whose tools and calls have no nulls in their objects.

    A null that the data had there before it became a table cannot be told apart, and is removed too. JSON text is left alone.
    """
    if isinstance(row, list):
        # A list of Arrow has one type: its first object tells whether there are objects in it at all.
        first = next((item for item in row if item is not None), None)
        if not isinstance(first, list | dict):
            return row
        return list(map(without_padding, row))
    if not isinstance(row, dict):
        return row
    cleaned = {}
    for key, value in row.items():
        cleaned[key] = _without_nulls(value) if key in _TOOL_KEYS else without_padding(value)
    return cleaned


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects that are null, at any depth. Arrow adds none to lists."""
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
