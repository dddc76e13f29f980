"""scripts/mutate.py breaks lines, and every broken file is still Python."""

import ast
from pathlib import Path

import pytest

from scripts import mutate

SOURCE = '''
def count(rows: int = 3) -> int:
    """Count."""
    total = rows + 1  # öäü: offsets are in bytes
    if not rows or total < 5:
        print("few")
    total += 2
    return total
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    return path


def test_each_kind_of_change_is_made_and_leaves_python(module: Path):
    source = module.read_bytes()

    mutants = list(mutate.find_mutants(module))

    changes = {(mutant.before, mutant.text) for mutant in mutants}
    assert {
        ("rows + 1", "(rows - 1)"),
        ("not rows", "(rows)"),
        ("not rows or total < 5", "((not rows) and (total < 5))"),
        ("total < 5", "(total <= 5)"),
        ('print("few")', "pass"),
        ("total += 2", "pass"),
        ("3", "4"),
    } <= changes
    for mutant in mutants:
        ast.parse(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])


def test_a_change_that_a_test_sees_is_found_and_taken_back(module: Path, monkeypatch: pytest.MonkeyPatch):
    broken = next(mutant for mutant in mutate.find_mutants(module) if mutant.before == "rows + 1")
    # In place of pytest, which would take a process.
    monkeypatch.setattr(mutate, "_passes", lambda copy, options: "(rows - 1)" not in module.read_text())

    assert mutate.find_by_tests(module.parent, broken, ["fast"]) == "fast"

    assert module.read_text() == SOURCE
