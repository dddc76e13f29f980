"""Which versions a run, a benchmark or a table was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of zerobook, Python and the libraries that decide what a run does."""
    found = {"zerobook": _version("zerobook"), "python": platform.python_version()}
    return found | {name: _version(name) for name in ("torch", "accelerate", "deepspeed", "transformers", "peft")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
