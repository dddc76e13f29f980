"""Rows of Arrow tables: Parquet files, saved datasets, and datasets of the hub.

A column of Arrow has one type. If the objects of its rows have different keys, the type has all of these keys, and each object
gets a null for every key that it lacks. In descriptions and calls of tools, the model would learn these nulls.
"""

from typing import Any

# Columns, and keys of turns, whose objects have different keys in different rows.
_TOOL_KEYS = ("tools", "tool_calls", "function_call")


def without_padding(row: Any) -> Any:
    """Return a row, or a value in it, without the nulls in the objects of tools and calls.

    A null that was in the data before it became a table looks the same, and is removed too. JSON text is not changed.
    """
    if isinstance(row, list):
        # All items of a list in Arrow have the same type, so the first one tells whether they can have objects in them.
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
    """Return a value without the keys whose values are null, at any depth. Nulls in lists stay: Arrow adds none there."""
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
