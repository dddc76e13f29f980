"""Which versions a run, a benchmark or a table was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from zerobook import __version__


def versions() -> dict[str, str]:
    """Of zerobook, Python and the libraries that decide what a run does."""
    found = {"zerobook": __version__, "python": platform.python_version()}
    for package in ("torch", "accelerate", "deepspeed", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
