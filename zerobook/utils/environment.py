"""Values of environment variables."""

from __future__ import annotations

from typing import Any


def true(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "yes")
