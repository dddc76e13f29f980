"""Break random lines of the package one at a time, and count how many of them the tests find.

usage: mutate.py [--seed 7] [--count 40] [--stages named fast launch] [--out FILE]

Each change is one of: a comparison shifted or negated, ``+`` and ``-`` exchanged, ``and`` and ``or`` exchanged, ``not``
removed, a small integer off by one, a statement deleted. It is made in a copy of the repository, where the stages run until
one fails:

- named: tests without launches in the files that name the changed module
- fast: every test without launches
- launch: the launched sample

A change that no stage finds is reported with its line: it needs a test, or it changes nothing that can be seen.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("training", "strategy", "checkpoint", "data", "monitor")
STAGES = ("named", "fast", "launch")
FAST_TESTS = ["-n", "2", "--dist", "loadfile", "-m", "not launch and not full"]
LAUNCHED_TESTS = ["-m", "launch and not full"]
STAGE_SECONDS = 3600
NO_TESTS = 5
"""Exit status of pytest if no test is selected."""

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SIGNS = {ast.Add: "-", ast.Sub: "+"}


@dataclass(frozen=True)
class Mutant:
    """One change: the characters ``start`` to ``end`` of ``path`` (bytes, in UTF-8) become ``text``."""

    path: str
    line: int
    start: int
    end: int
    before: str
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, help="a file of JSON lines, one for each change")
    arguments = parser.parse_args()

    mutants = choose_mutants(arguments.seed, arguments.count)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repository(Path(folder) / "repository")
        survivors = 0
        for number, mutant in enumerate(mutants, 1):
            finder = find_by_tests(copy, mutant, arguments.stages)
            survivors += finder is None
            print(
                f"{number:3} {finder or 'NOT FOUND':9} {mutant.path}:{mutant.line}: {mutant.before} -> {mutant.text}",
                flush=True,
            )
            if arguments.out:
                with arguments.out.open("a") as out:
                    out.write(json.dumps(asdict(mutant) | {"found_by": finder}) + "\n")
    print(f"{len(mutants) - survivors} of {len(mutants)} changes were found by the stages {', '.join(arguments.stages)}")
    return 0


def choose_mutants(seed: int, count: int) -> list[Mutant]:
    """Return ``count`` random changes, at most one in a line, so that long lines are not chosen more often."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / "zerobook" / folder).rglob("*.py")):
            for mutant in find_mutants(path):
                by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    chooser = random.Random(seed)
    lines = chooser.sample(sorted(by_line), count)
    return [chooser.choice(by_line[line]) for line in lines]


def find_mutants(path: Path) -> Iterator[Mutant]:
    """Yield every change of a file whose result is still Python."""
    source = path.read_bytes()
    tree = ast.parse(source)
    line_starts = [0]
    for source_line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(source_line))

    for node in _reachable(tree):
        replacement = _replacement(node)
        if replacement is None:
            continue
        start = line_starts[node.lineno - 1] + node.col_offset
        end = line_starts[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(source[start:end].decode().split())
        yield Mutant(str(path.relative_to(ROOT)), node.lineno, start, end, before, replacement)


def _reachable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, without annotations, decorators, assertions, raised errors and f-strings.

    Tests do not see changes of these.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _reachable(child)


def _replacement(node: ast.AST) -> str | None:
    """Return the code that replaces a node, in parentheses if it is an expression; None if the node is not changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            return f"({ast.unparse(node.left)} {COMPARISONS[type(operator)]} {ast.unparse(node.comparators[0])})"
        case ast.BinOp(op=operator) if type(operator) in SIGNS:
            return f"({ast.unparse(node.left)} {SIGNS[type(operator)]} {ast.unparse(node.right)})"
        case ast.BoolOp(op=operator):
            exchanged = " or " if isinstance(operator, ast.And) else " and "
            return "(" + exchanged.join(f"({ast.unparse(value)})" for value in node.values) + ")"
        case ast.UnaryOp(op=ast.Not()):
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and 0 <= number < 100:
            return str(number + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "pass"
    return None


def copy_repository(copy: Path) -> Path:
    """Copy the working tree, with links to folders that are not tracked and slow to make. Return the copy."""
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for name in files:
        source = ROOT / name
        if source.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name)
    for name in (".venv", ".cache"):
        if not (copy / name).exists():
            (copy / name).symlink_to(ROOT / name)
    return copy


def find_by_tests(copy: Path, mutant: Mutant, stages: list[str]) -> str | None:
    """Return the first stage whose tests fail with the change; None if all pass."""
    path = copy / mutant.path
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    try:
        for stage in stages:
            if stage == "named":
                files = _tests_that_name(copy, mutant.path)
                options = [*FAST_TESTS, *files]
                if not files:
                    continue
            else:
                options = FAST_TESTS if stage == "fast" else LAUNCHED_TESTS
            if not _passes(copy, options):
                return stage
        return None
    finally:
        path.write_bytes(source)


def _tests_that_name(copy: Path, module: str) -> list[str]:
    """Return the test files that import the module of a path such as ``zerobook/data/pack.py``."""
    package, name = module.removesuffix(".py").replace("/", ".").rsplit(".", 1)
    spellings = (f"{package}.{name}", f"from {package} import {name}")
    tests = sorted((copy / "tests").glob("test_*.py"))
    return [str(test) for test in tests if any(spelling in test.read_text() for spelling in spellings)]


def _passes(copy: Path, options: list[str]) -> bool:
    """Run pytest until its first failure. A run that hangs counts as failed."""
    command = [str(copy / ".venv/bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return process.wait(STAGE_SECONDS) in (0, NO_TESTS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


if __name__ == "__main__":
    sys.exit(main())
