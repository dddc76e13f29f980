"""Marks of tests of what only newer libraries do."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from tests.harness import ROOT


def needs_transformers(least: str, lack: str) -> pytest.MarkDecorator:
    """Skip a test where transformers is older than ``least``, and say what the older one does."""
    is_older = Version(version("transformers")).release < Version(least).release
    return pytest.mark.skipif(is_older, reason=f"before {least}, transformers {lack}")


NEEDS_MODEL_PARALLELISM = needs_transformers("5.20", "does not load a part of a model on each process")


def shipped_strategies() -> list[Any]:
    """Return the names of the files of accelerate_configs/ as the parameters of a test."""
    parameters = []
    for file in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        marks = [NEEDS_MODEL_PARALLELISM] if file.stem in ("fsdp_tensor", "fsdp_experts") else []
        parameters.append(pytest.param(file.stem, marks=marks))
    return parameters
