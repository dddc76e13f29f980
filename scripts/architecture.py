"""Draw the packages of zerobook/ and the direction of their imports, from the code.

usage: architecture.py [PICTURE]

Every import counts, also an import in a function or for types only, and a module that is named by a string. A package is
drawn above all packages that it imports. An arrow is left out if a longer path of arrows implies it. Imports that close a cycle
are red.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "zerobook"
OUTSIDE = {"recipes": "What is trained: one file a recipe", "benchmarks": "Measurements, on CPUs and GPUs"}
"""Folders beside the package that import it."""
# Width and height of a box, gap between boxes, and distance between the middles of rows, in inches.
WIDTH = 2.5
HEIGHT = 0.95
GAP = 0.45
LEVEL = 1.75


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
            module = [PACKAGE, *file.relative_to(root / PACKAGE).with_suffix("").parts]
            files.setdefault(node_of(module), []).append(file)
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, node_files in files.items():
        for file in node_files:
            for statement in ast.walk(ast.parse(file.read_text())):
                for module_name in imported(statement):
                    other = node_of(module_name.split("."))
                    # Other libraries are no nodes.
                    if other in graph and other != name:
                        graph[name].add(other)
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
    """Return the node of a module, whose name is split at the dots."""
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else parts[0]


def without_circles(graph: dict[str, set[str]]) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """Return the graph without imports that close cycles, and these imports as (importing node, imported node).

    The nodes are put into an order, from low to high. Next is a node that imports no remaining node, if there is one. In a
    cycle, it is the node that is imported most compared with what it imports. An import of a higher node closes a cycle.
    """
    order: list[str] = []
    remaining = set(graph)
    while remaining:
        imports_of = {node: len(graph[node] & remaining) for node in remaining}
        importers_of = {node: sum(node in graph[other] for other in remaining) for node in remaining}
        lowest = min(sorted(remaining), key=lambda node: (imports_of[node] > 0, imports_of[node] - importers_of[node]))
        order.append(lowest)
        remaining.remove(lowest)
    straight: dict[str, set[str]] = {node: set() for node in graph}
    against = set()
    for node, others in graph.items():
        for other in others:
            if order.index(other) > order.index(node):
                against.add((node, other))
            else:
                straight[node].add(other)
    return straight, against


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the row of each node, from 0 at the bottom: one above the highest node that it imports."""
    level_of: dict[str, int] = {}

    def find_level(node: str) -> int:
        if node not in level_of:
            level_of[node] = max((find_level(other) + 1 for other in graph[node]), default=0)
        return level_of[node]

    for node in graph:
        find_level(node)
    return level_of


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the arrows that longer paths imply."""
    reachable: dict[str, set[str]] = {}

    def find_reachable(node: str) -> set[str]:
        if node not in reachable:
            reachable[node] = set(graph[node]).union(*map(find_reachable, graph[node]))
        return reachable[node]

    arrows: dict[str, set[str]] = {}
    for node, others in graph.items():
        implied = set().union(*map(find_reachable, others))
        arrows[node] = others - implied
    return arrows


def first_sentence(root: Path, name: str) -> str:
    """Return the first sentence of the docstring of a package or module; empty if there is none."""
    for file in (root / PACKAGE / name / "__init__.py", root / PACKAGE / f"{name}.py"):
        if file.is_file():
            docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
            words = docstring.partition("\n\n")[0].replace("`", "").split()
            return " ".join(words).partition(". ")[0].rstrip(".")
    return OUTSIDE.get(name, "")


# --- the picture
def place_boxes(graph: dict[str, set[str]], level_of: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Return the middle of each box. In a row, boxes are near the boxes that they are linked with."""
    rows: dict[int, list[str]] = defaultdict(list)
    for node in sorted(graph):
        rows[level_of[node]].append(node)
    links = {node: graph[node] | {other for other in graph if node in graph[other]} for node in graph}
    x: dict[str, float] = {}
    for row in rows.values():
        x |= _spread(row)
    # Sort each row by the mean position of the linked boxes, upwards and downwards, until the order settles.
    for _ in range(20):
        for level in (*sorted(rows), *sorted(rows, reverse=True)):
            means = {node: sum(x[other] for other in links[node]) / max(1, len(links[node])) for node in rows[level]}
            x |= _spread(sorted(means, key=lambda node: (means[node], node)))
    return {node: (x[node] * (WIDTH + GAP), level_of[node] * LEVEL) for node in graph}


def _spread(row: list[str]) -> dict[str, float]:
    """Return the position of each node of a row, one apart, with 0 in the middle."""
    return {node: number - (len(row) - 1) / 2 for number, node in enumerate(row)}


def draw(graph: dict[str, set[str]], sentences: dict[str, str], picture: Path) -> None:
    """Draw the graph into a file. ``sentences`` has the text of each box."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "zerobook", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot

    straight, against = without_circles(graph)
    arrows = reduced(straight)
    middles = place_boxes(arrows, levels(straight))
    xs = [x for x, _ in middles.values()]
    ys = [y for _, y in middles.values()]
    size = (max(xs) - min(xs) + WIDTH + 0.6, max(ys) + HEIGHT + 0.9)
    figure, axes = pyplot.subplots(figsize=size)
    axes.set_xlim(min(xs) - WIDTH / 2 - 0.3, max(xs) + WIDTH / 2 + 0.3)
    axes.set_ylim(-HEIGHT / 2 - 0.55, max(ys) + HEIGHT / 2 + 0.35)
    axes.axis("off")
    for node, others in arrows.items():
        for other in others:
            _draw_arrow(axes, middles[node], middles[other], closes_cycle=False)
    for node, other in sorted(against):
        _draw_arrow(axes, middles[node], middles[other], closes_cycle=True)
    for node, middle in middles.items():
        _draw_box(axes, middle, node, sentences[node])
    note = "An arrow points to what is imported. Arrows that longer ways imply are left out."
    if against:
        note += f" Red: {len(against)} import(s) against the direction."
    note = textwrap.fill(note, int(13 * size[0]))
    axes.text(min(xs) - WIDTH / 2, -HEIGHT / 2 - 0.2, note, fontsize=9, color="#44546a", va="top")
    # Without a date, the same graph gives the same file.
    metadata = {"Date": None} if picture.suffix == ".svg" else None
    figure.savefig(picture, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)


def _draw_arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], *, closes_cycle: bool) -> None:
    """Draw an arrow from the edge of the box at ``start`` to the edge of the box at ``end``."""
    from matplotlib.patches import FancyArrowPatch

    (start_x, start_y), (end_x, end_y) = start, end
    # 1 for an arrow that goes down, -1 for one that goes up, 0 in a row.
    down = (start_y > end_y) - (start_y < end_y)
    # An arrow over several rows is bent a little, so that it does not run through boxes. One that closes a cycle is bent more.
    bend = 0.0
    if closes_cycle:
        bend = 0.25
    elif abs(start_y - end_y) > LEVEL:
        bend = 0.08 if start_x >= end_x else -0.08
    axes.add_patch(
        FancyArrowPatch(
            (start_x, start_y - down * HEIGHT / 2),
            (end_x, end_y + down * HEIGHT / 2),
            arrowstyle="-|>",
            mutation_scale=11,
            color="#c0392b" if closes_cycle else "#8a94a6",
            lw=1.3 if closes_cycle else 1.1,
            shrinkA=0,
            shrinkB=1,
            connectionstyle=f"arc3,rad={bend}",
            zorder=1,
        )
    )


def _draw_box(axes: Any, middle: tuple[float, float], node: str, sentence: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = middle
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2),
            WIDTH,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="#fdf3dc" if node in OUTSIDE else "#eef3fb",
            edgecolor="#44546a",
            lw=1.0,
            zorder=2,
        )
    )
    is_folder = (ROOT / PACKAGE / node).is_dir() or node in OUTSIDE
    name = f"{node}/" if is_folder else f"{node}.py"
    axes.text(x, y + HEIGHT / 2 - 0.19, name, ha="center", va="center", fontsize=11, fontweight="bold", zorder=3)
    words = textwrap.fill(textwrap.shorten(sentence, 92, placeholder=" ..."), 34)
    axes.text(x, y - 0.13, words, ha="center", va="center", fontsize=7.5, color="#333333", zorder=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "architecture.svg")
