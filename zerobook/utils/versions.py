"""Versions of the software with which a run, a benchmark or a table was made."""

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Return the versions of zerobook, Python and the libraries that affect a run."""
    libraries = {name: _version(name) for name in ("torch", "accelerate", "deepspeed", "transformers", "peft")}
    return {"zerobook": _version("zerobook"), "python": platform.python_version(), **libraries}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
