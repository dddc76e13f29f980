"""Measure how the package reads. Exit with 1 where a figure is worse than its limit.

usage: readability.py [--worst N] [FOLDER]

Measured over the Python files of FOLDER (`zerobook` by default):

- statements: the size that counts; clear code takes more lines for the same statements
- compact: comprehensions, conditional expressions and walruses per 100 statements
- nested: statements that hold two or more of those
- vague names: percent of local names that say how a value was come by, and not what it is
- comments: percent of lines that are comments
- fmt: skip: places where the formatter is turned off
- packed: assignments of several values in one line
- long functions: functions over 60 lines

Low figures alone make no code easy to read: they show where to look.
"""

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMPACT = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.NamedExpr)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LONG_FUNCTION_LINES = 60
VAGUE_WORDS = (
    "found said asked given held own theirs mine wanted told known taken passed_over aside where_from others other_one "
    "thing things one ones those these it them part parts whole place places kept seen left tried meant"
)
VAGUE_NAMES = frozenset(VAGUE_WORDS.split())


class Bound(NamedTuple):
    """The limit of a figure today, and its goal. Only ``comments`` is better when it is larger."""

    limit: float
    goal: float


# A limit follows the figure down as code is rewritten, until it is the goal.
BOUNDS = {
    "statements": Bound(30_170, 16_500),
    "compact": Bound(5, 5),
    "nested": Bound(20, 20),
    "vague names": Bound(0.5, 0.5),
    "comments": Bound(3.9, 4),
    "fmt: skip": Bound(0, 0),
    "packed": Bound(60, 60),
    "long functions": Bound(12, 12),
}


class Measurement:
    """Counts over files, and a score of each function: how much there is in it for a reader to take apart."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.functions: list[tuple[float, str]] = []

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        self.counts["lines"] += len(lines)
        self.counts["comments"] += sum(line.lstrip().startswith("#") for line in lines)
        self.counts["fmt: skip"] += text.count("# fmt: skip") + text.count("# fmt: off")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt):
                self._add_statement(node)
            if isinstance(node, FUNCTIONS):
                self._add_function(node, path)

    def _add_statement(self, statement: ast.stmt) -> None:
        self.counts["statements"] += 1
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple):
            self.counts["packed"] += isinstance(statement.targets[0], ast.Tuple)
        # The defaults and decorators of a definition are not steps.
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            return
        compact = sum(isinstance(expression, COMPACT) for expression in _expressions(statement))
        self.counts["compact"] += compact
        self.counts["nested"] += compact >= 2

    def _add_function(self, function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> None:
        names = [argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]]
        compact = 0
        for node in ast.walk(function):
            compact += isinstance(node, COMPACT)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
        vague = [name for name in names if name.strip("_") in VAGUE_NAMES]
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        self.counts["names"] += len(names)
        self.counts["vague names"] += len(vague)
        self.counts["long functions"] += lines > LONG_FUNCTION_LINES
        score = compact + 2 * len(vague) + max(0, lines - 40) / 4
        facts = f"{lines} lines, {compact} compact, {len(vague)} vague"
        self.functions.append((score, f"{os.path.relpath(path)}:{function.lineno} {function.name}: {facts}"))

    def figures(self) -> dict[str, float]:
        """Return the figures that `BOUNDS` names, in its units."""
        counts = self.counts
        figures: dict[str, float] = {name: counts[name] for name in BOUNDS}
        figures["compact"] = round(100 * counts["compact"] / max(1, counts["statements"]), 1)
        figures["vague names"] = round(100 * counts["vague names"] / max(1, counts["names"]), 1)
        figures["comments"] = round(100 * counts["comments"] / max(1, counts["lines"]), 1)
        return figures


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of the statements inside it."""
    pending = list(ast.iter_child_nodes(statement))
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.stmt):
            yield node
            pending += ast.iter_child_nodes(node)


def is_worse(name: str, value: float, limit: float) -> bool:
    return value < limit if name == "comments" else value > limit


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how the package reads.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "zerobook")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N functions with the most to take apart")
    arguments = parser.parse_args()
    measurement = Measurement()
    for path in sorted(arguments.folder.resolve().rglob("*.py")):
        measurement.add(path)
    has_limits = arguments.folder == ROOT / "zerobook"
    worse = []
    print(f"{'':16}{'now':>8}{'limit':>8}{'goal':>8}")
    for name, value in measurement.figures().items():
        bound = BOUNDS[name]
        print(f"{name:16}{value:>8,}{bound.limit:>8,}{bound.goal:>8,}")
        if has_limits and is_worse(name, value, bound.limit):
            worse.append(name)
    for score, function in sorted(measurement.functions, reverse=True)[: arguments.worst]:
        print(f"{score:6.1f}  {function}")
    if worse:
        print(f"worse than the limit: {', '.join(worse)}. Write it as CONTRIBUTING.md says.", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
