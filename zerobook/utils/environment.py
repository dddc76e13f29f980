"""Values of environment variables."""

from __future__ import annotations


def true(value: object) -> bool:
    return str(value).lower() in ("1", "true", "yes")
