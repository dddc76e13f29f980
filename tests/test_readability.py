"""`scripts/readability.py` counts what it says, and fails where the package is worse than a limit."""

import importlib.util
import sys

import pytest

from tests.tiny import ROOT

CODE = """
def first(found, rows):
    # Names are taken from the rows.
    names, sizes = [row.name for row in rows], {}
    total = sum(size if size else 0 for size in sizes)  # fmt: skip
    if total:
        found = next(row for row in rows)
    return names
"""


@pytest.fixture
def readability(monkeypatch):
    spec = importlib.util.spec_from_file_location("readability", ROOT / "scripts" / "readability.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "readability", module)
    spec.loader.exec_module(module)
    return module


def test_what_is_counted(readability, tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    measurement = readability.Measurement()
    measurement.add(tmp_path / "code.py")
    assert measurement.counts == {
        "lines": 8,
        "comments": 1,
        "fmt: skip": 1,
        "statements": 6,
        "packed": 1,
        "compact": 4,
        "nested": 1,
        "names": 9,
        "vague names": 2,
        "long functions": 0,
    }
    assert measurement.figures()["comments"] == 12.5


def test_a_figure_that_is_worse_than_its_limit_fails(readability, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["readability.py"])
    assert readability.main() == 0
    monkeypatch.setitem(readability.BOUNDS, "comments", readability.Bound(99, 99))
    assert readability.main() == 1
    assert "comments" in capsys.readouterr().err
