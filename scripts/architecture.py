"""Draw the packages of zerobook/ and the direction of their imports, from the code.

usage: architecture.py [PICTURE]

Every import counts: also imports inside functions, imports for types alone, and modules named by a string. A package is
drawn above all packages that it imports. An arrow is left out where a longer path of arrows implies it. Imports that close
a cycle are red.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "zerobook"
OUTSIDE = {"recipes": "What is trained: one file a recipe", "benchmarks": "Measurements, on CPUs and GPUs"}
"""Folders beside the package that import it."""
WIDTH, HEIGHT, GAP, LEVEL = 2.5, 0.95, 0.45, 1.75
"""Width and height of a box, gap between boxes, and distance between rows, in inches."""


def main(picture: Path) -> None:
    graph = imports(ROOT)
    draw(graph, {name: first_sentence(ROOT, name) for name in graph}, picture)
    print(f"wrote {picture}: {len(graph)} packages")


# --- the graph
def imports(root: Path) -> dict[str, set[str]]:
    """Return node -> the nodes that it imports. A node is a package of zerobook, a module at its top, or a folder outside."""
    files = {name: [*(root / name).rglob("*.py")] for name in OUTSIDE if (root / name).is_dir()}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        if file != root / PACKAGE / "__init__.py":
            files.setdefault(node_of([PACKAGE, *file.relative_to(root / PACKAGE).with_suffix("").parts]), []).append(file)
    graph = {name: set() for name in files}
    for name, group in files.items():
        for file in group:
            for node in ast.walk(ast.parse(file.read_text())):
                for target in imported(node):
                    graph[name] |= {found for found in (node_of(target.split(".")),) if found in graph and found != name}
    return graph


def imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names, or that a string in a table of commands names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Constant) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", str(node.value)):
        return [str(node.value)]
    return []


def node_of(parts: list[str]) -> str:
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else parts[0]


def without_circles(graph: dict[str, set[str]]) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """Return the graph without the fewest imports found that close cycles, and those imports.

    Nodes are removed one after another: first nodes that import no remaining node, then nodes that no remaining node
    imports; in a cycle, the node that is imported most compared with what it imports. Imports of a node that is removed
    later are against the direction.
    """
    low: list[str] = []
    left = set(graph)
    while left:
        uses = {node: len(graph[node] & left) for node in left}
        used = {node: sum(node in graph[other] for other in left) for node in left}
        node = min(sorted(left), key=lambda n: (uses[n] > 0, uses[n] - used[n]))
        low.append(node)
        left.remove(node)
    place = {node: number for number, node in enumerate(low)}
    against = {(a, b) for a in graph for b in graph[a] if place[b] > place[a]}
    return {a: {b for b in graph[a] if (a, b) not in against} for a in graph}, against


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the row of each node, from 0 at the bottom: one above the highest node that it imports."""
    found: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in found:
            found[node] = max((level(other) + 1 for other in graph[node]), default=0)
        return found[node]

    for node in graph:
        level(node)
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the arrows that longer paths imply."""
    reach: dict[str, set[str]] = {}

    def below(node: str) -> set[str]:
        if node not in reach:
            reach[node] = set(graph[node]).union(*map(below, graph[node]))
        return reach[node]

    return {node: {b for b in graph[node] if not any(b in below(c) for c in graph[node] - {b})} for node in graph}


def first_sentence(root: Path, name: str) -> str:
    """Return the first sentence of the docstring of a package or module; empty if there is none."""
    for file in (root / PACKAGE / name / "__init__.py", root / PACKAGE / f"{name}.py"):
        if file.is_file():
            lines = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].replace("`", "")
            return " ".join(lines.split()).partition(". ")[0].rstrip(".")
    return OUTSIDE.get(name, "")


# --- the picture
def ordered(graph: dict[str, set[str]], level: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Return the middle of each box. In a row, boxes are near the boxes that they are linked with."""
    rows: dict[int, list[str]] = defaultdict(list)
    for node in sorted(graph):
        rows[level[node]].append(node)
    links = {node: graph[node] | {other for other in graph if node in graph[other]} for node in graph}
    x = {node: place - (len(row) - 1) / 2 for row in rows.values() for place, node in enumerate(row)}
    for _ in range(20):
        for number in (*sorted(rows), *sorted(rows, reverse=True)):
            row = sorted(rows[number], key=lambda n: (sum(x[m] for m in links[n]) / max(1, len(links[n])), n))
            x |= {node: place - (len(row) - 1) / 2 for place, node in enumerate(row)}
    return {node: (x[node] * (WIDTH + GAP), level[node] * LEVEL) for node in graph}


def draw(graph: dict[str, set[str]], said: dict[str, str], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "zerobook", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    straight, against = without_circles(graph)
    level, arrows = levels(straight), reduced(straight)
    middle = ordered(arrows, level)
    xs, ys = zip(*middle.values(), strict=True)
    size = (max(xs) - min(xs) + WIDTH + 0.6, max(ys) + HEIGHT + 0.9)
    figure, axes = pyplot.subplots(figsize=size)
    axes.set_xlim(min(xs) - WIDTH / 2 - 0.3, max(xs) + WIDTH / 2 + 0.3)
    axes.set_ylim(-HEIGHT / 2 - 0.55, max(ys) + HEIGHT / 2 + 0.35)
    axes.axis("off")
    lines = [(a, b, "#8a94a6", 1.1) for a in arrows for b in arrows[a]] + [(a, b, "#c0392b", 1.3) for a, b in sorted(against)]
    for a, b, colour, width in lines:
        (xa, ya), (xb, yb) = middle[a], middle[b]
        down = 1 if ya > yb else -1 if ya < yb else 0
        bend = 0.0 if abs(ya - yb) <= LEVEL else 0.08 * (1 if xa >= xb else -1)
        axes.add_patch(
            FancyArrowPatch(
                (xa, ya - down * HEIGHT / 2),
                (xb, yb + down * HEIGHT / 2),
                arrowstyle="-|>",
                mutation_scale=11,
                color=colour,
                lw=width,
                shrinkA=0,
                shrinkB=1,
                connectionstyle=f"arc3,rad={0.25 if colour != '#8a94a6' else bend}",
                zorder=1,
            )
        )
    for node, (x, y) in middle.items():
        face = "#fdf3dc" if node in OUTSIDE else "#eef3fb"
        axes.add_patch(
            FancyBboxPatch((x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08",
                           facecolor=face, edgecolor="#44546a", lw=1.0, zorder=2)
        )  # fmt: skip
        name = f"{node}/" if (ROOT / PACKAGE / node).is_dir() or node in OUTSIDE else f"{node}.py"
        words = textwrap.shorten(said[node], 92, placeholder=" ...")
        axes.text(x, y + HEIGHT / 2 - 0.19, name, ha="center", va="center", fontsize=11, fontweight="bold", zorder=3)
        axes.text(x, y - 0.13, textwrap.fill(words, 34), ha="center", va="center", fontsize=7.5, color="#333333", zorder=3)
    note = "An arrow points to what is imported. Arrows that longer ways imply are left out."
    if against:
        note += f" Red: {len(against)} import(s) against the direction."
    note = textwrap.fill(note, int(13 * size[0]))
    axes.text(min(xs) - WIDTH / 2, -HEIGHT / 2 - 0.2, note, fontsize=9, color="#44546a", va="top")
    figure.savefig(picture, bbox_inches="tight", metadata={"Date": None} if picture.suffix == ".svg" else None)
    pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "architecture.svg")
