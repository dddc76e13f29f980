"""docs/reference/ and the picture of the packages are what the code says, and the code writes nothing that they leave out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import architecture, parallelism, performance, reference
from tests.harness import ROOT
from tests.test_checkpoints import save_all, spread
from zerobook.config import RecipeConfig
from zerobook.runlog.events import COMMON_FIELDS, EVENT_TYPES


@pytest.mark.parametrize("name, text", reference.pages().items(), ids=list(reference.pages()))
def test_the_pages_are_made_of_the_code(name, text):
    assert (ROOT / "docs" / "reference" / name).read_text() == text, "run scripts/reference.py"


def test_the_page_of_speeds_is_made_of_the_results():
    assert performance.PAGE.read_text() == performance.page(), "run scripts/performance.py"


@pytest.mark.parametrize("name", parallelism.PICTURES)
def test_pictures_of_parallelism_are_drawn_and_shown(name):
    assert (parallelism.FOLDER / f"{name}.svg").read_text() == parallelism.picture(name), "run scripts/parallelism.py"
    assert f"(parallelism/{name}.svg)" in parallelism.FOLDER.with_suffix(".md").read_text()


def test_every_flag_stands_under_a_heading():
    named = [name for names in reference.groups(RecipeConfig).values() for name in names]
    assert sorted(named) == sorted(RecipeConfig.model_fields)


# --- events
def constants(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def looked_up(module: ast.Module, expression: ast.expr) -> set[str]:
    """Return the values of the module's tables that an expression names."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    tables = [n.value for n in module.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in names]
    return set().union(*(constants(value) for table in tables if isinstance(table, ast.Dict) for value in table.values))


def kinds(module: ast.Module, function: ast.AST, given: ast.expr) -> set[str]:
    """Return the types of events that an argument can name: itself, what it looks up, what is assigned to it, or what
    callers pass."""
    if not isinstance(given, ast.Name):
        return constants(given) | looked_up(module, given)
    assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == given.id]
    if assigned:
        (source,) = assigned
        return constants(source) | looked_up(module, source.value)
    assert isinstance(function, ast.FunctionDef)
    place = [argument.arg for argument in function.args.args].index(given.id)
    calls = [n for n in ast.walk(module) if isinstance(n, ast.Call) and ast.unparse(n.func) == function.name]
    return set().union(*(constants(call.args[place]) for call in calls))


def written() -> Iterator[tuple[str, str, set[str]]]:
    """(where, type, fields) of every event that the package writes; fields in ``**`` are not seen."""
    for file in sorted((ROOT / "zerobook").rglob("*.py")):
        module = ast.parse(file.read_text())
        for function in (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)):
            for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
                if isinstance(call.func, ast.Attribute) and call.func.attr == "event" and call.args:
                    fields = {keyword.arg for keyword in call.keywords if keyword.arg} - {"durable"}
                    for kind in kinds(module, function, call.args[0]):
                        yield f"{file.name}:{call.lineno}", kind, fields


def test_every_event_that_is_written_is_described():
    written_events = list(written())
    for where, name, fields in written_events:
        assert name in EVENT_TYPES, f"{where}: declare {name} in zerobook/runlog/events"
        known_fields = {*EVENT_TYPES[name].fields, *COMMON_FIELDS}
        assert fields <= known_fields, f"{where}: describe the fields of {name} in zerobook/runlog/events"
    assert {name for _, name, _ in written_events} == set(EVENT_TYPES)


# --- checkpoints
def test_every_file_of_a_checkpoint_is_described(tmp_path):
    save_all(tmp_path, 3, spread([4], 2))
    folder = tmp_path / "checkpoints" / "step-000003"
    names = {file.name for file in folder.iterdir()}
    pieces = {name for name in names if name.startswith("tensors-")}
    only_with_hooks = {"hooks.json"}
    assert pieces and names - pieces == set(reference.CHECKPOINT_FILES) - {"tensors-RRRRR-NNNNN.safetensors"} - only_with_hooks
    for name in ("manifest.json", "tensors.json"):
        described = set(reference.CHECKPOINT_FILES[name][1]) - {"state_shapes"}  # which AdamW's checkpoints do not have
        assert set(json.loads((folder / name).read_text())) == described
    described = reference.field_docs(reference.Progress)
    assert set(json.loads((folder / "progress.json").read_text())) == set(described)


def test_a_field_without_a_description_is_refused():
    from zerobook.strategy import Piece

    with pytest.raises(ValueError, match="has no docstring behind it"):
        reference.field_docs(Piece)


def test_the_glossary_is_short():
    rows = [line for line in (ROOT / "docs" / "reference" / "glossary.md").read_text().splitlines() if line.startswith("| **")]
    assert 0 < len(rows) <= 30


def words_given_up() -> list[str]:
    """Return the words of a table of CONTRIBUTING.md, one or several in its first column."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words that are not used")[2]
    table = section.partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    return [word.strip() for row in rows for word in row.split(",")]


def test_pages_and_code_use_none_of_the_words_that_were_given_up():
    words = words_given_up()
    assert len(words) > 4
    pattern = re.compile(rf"\b({'|'.join(words)})", re.IGNORECASE)
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "measured" not in page.parts]
    files = [ROOT / "README.md", *pages, *(ROOT / "zerobook").rglob("*.py"), *(ROOT / "zerobook").rglob("*.j2")]
    found = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if pattern.search(line) and "RENAMED" not in line and '"ladder": "policy"' not in line:
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


# --- the picture of the packages
def test_the_picture_has_every_package():
    graph = architecture.imports(ROOT)
    drawn = re.findall(r">([\w]+(?:/|\.py))</text>", (ROOT / "docs" / "architecture.svg").read_text())
    assert {Path(name).stem for name in drawn} == set(graph), "run scripts/architecture.py"


def test_imports_of_every_kind_are_seen_and_circles_are_told(tmp_path):
    package = tmp_path / "zerobook"
    for name, code in {
        "low/__init__": "", "low/leaf": "X = 1",
        "middle/__init__": "", "middle/a": "from zerobook.low.leaf import X", "middle/b": "def f():\n    import zerobook.low",
        "top": "COMMANDS = {'a': 'zerobook.middle.b'}\nfrom zerobook import low",
    }.items():  # fmt: skip
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    graph = architecture.imports(tmp_path)
    assert graph == {"low": set(), "middle": {"low"}, "top": {"low", "middle"}}
    straight, against = architecture.without_circles(graph)
    assert not against and architecture.levels(straight) == {"low": 0, "middle": 1, "top": 2}
    assert architecture.reduced(straight) == {"low": set(), "middle": {"low"}, "top": {"middle"}}
    (package / "low" / "leaf.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zerobook.top import f"
    )
    straight, against = architecture.without_circles(architecture.imports(tmp_path))
    assert against == {("low", "top")} and architecture.levels(straight) == {"low": 0, "middle": 1, "top": 2}
