"""Values of environment variables."""

from __future__ import annotations


def is_true(value: object) -> bool:
    """Return whether a variable is set to a word for true."""
    return str(value).lower() in ("1", "true", "yes")
