"""Examples in docstrings say what the code does."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.harness import ROOT

MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "zerobook").rglob("*.py")
    if ">>> " in file.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(import_module(name))
    assert attempted and not failed
