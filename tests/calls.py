"""Costs counted in calls of functions, which other processes do not change as they change seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def function_calls(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Return the number of Python and C functions that a call of ``function`` calls, and what it returns."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    sys.setprofile(count)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return calls, result
