"""Draw the pictures of docs/guides/parallelism.md: which rank holds what, and what ranks send to each other.

usage: parallelism.py [FOLDER]

A picture has one box for each rank. Each bar in a box is a thing of the training, cut into quarters (at two ranks, halves).
A filled part is held by that rank, a pale one is gathered for a moment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "guides" / "parallelism"
COLOURS = {
    "samples": "#c2410c", "tokens": "#c2410c", "weights": "#1d4ed8", "layers": "#1d4ed8", "columns of weights": "#1d4ed8",
    "experts": "#1d4ed8", "gradients": "#0f766e", "optimizer state": "#7e22ce", "heads in attention": "#a16207",
}  # fmt: skip
"""Name of a bar -> its colour: data, weights, gradients, optimizer state, attention."""
BOX, BAR, GAP, LEFT, TOP, LANE = 110, 16, 7, 138, 34, 9
"""Widths and heights in pixels: a rank's box, a bar, the gap between bars, the labels on the left, the ranks' names, and lines
that would cover each other."""


@dataclass(frozen=True)
class Bar:
    """Parts of a thing that each rank holds, of ``parts``; and those that it gathers for a moment."""

    name: str
    held: Sequence[Sequence[int]]
    gathered: Sequence[Sequence[int]] = ()
    parts: int = 4


@dataclass(frozen=True)
class Sent:
    """Communication between the ranks of each group. ``along`` draws arrows from rank to rank."""

    words: str
    groups: Sequence[Sequence[int]]
    along: bool = False


ALL = [(0, 1, 2, 3)]
WHOLE, OWN = [range(4)] * 4, [[rank] for rank in range(4)]
FIRST_PAIR, SECOND_PAIR = [[0], [1], [0], [1]], [[0], [0], [1], [1]]
PAIRS, ACROSS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]

PICTURES: dict[str, tuple[list[Bar], list[Sent]]] = {
    "data": (
        [Bar("samples", OWN), Bar("weights", WHOLE), Bar("gradients", WHOLE), Bar("optimizer state", WHOLE)],
        [Sent("all-reduce of gradients", ALL)],
    ),
    "zero1": (
        [Bar("samples", OWN), Bar("weights", WHOLE), Bar("gradients", WHOLE), Bar("optimizer state", OWN)],
        [Sent("reduce-scatter of gradients, all-gather of updated weights", ALL)],
    ),
    "zero2": (
        [Bar("samples", OWN), Bar("weights", WHOLE), Bar("gradients", OWN), Bar("optimizer state", OWN)],
        [Sent("reduce-scatter of gradients, all-gather of updated weights", ALL)],
    ),
    "zero3": (
        [Bar("samples", OWN), Bar("weights", OWN, WHOLE), Bar("gradients", OWN), Bar("optimizer state", OWN)],
        [Sent("all-gather of a layer's weights, forward and backward; reduce-scatter of gradients", ALL)],
    ),
    "hybrid": (
        [
            Bar("samples", OWN), Bar("weights", FIRST_PAIR, [range(2)] * 4, 2), Bar("gradients", FIRST_PAIR, parts=2),
            Bar("optimizer state", FIRST_PAIR, parts=2),
        ],
        [Sent("in a node: all-gather, reduce-scatter", PAIRS), Sent("between nodes: all-reduce of gradients", ACROSS)],
    ),
    "tensor": (
        [Bar("samples", WHOLE), Bar("columns of weights", OWN), Bar("gradients", OWN), Bar("optimizer state", OWN)],
        [Sent("all-reduce of activations: twice a layer forward, twice backward", ALL)],
    ),
    "pipeline": (
        [Bar("samples", WHOLE), Bar("layers", OWN), Bar("gradients", OWN), Bar("optimizer state", OWN)],
        [Sent("activations to the next rank, their gradients back", [(0, 1), (1, 2), (2, 3)], along=True)],
    ),
    "sequence": (
        [Bar("tokens", OWN), Bar("heads in attention", OWN), Bar("weights", WHOLE)],
        [Sent("all-to-all before and after attention: tokens for heads", ALL)],
    ),
    "context": (
        [Bar("tokens", OWN), Bar("heads in attention", WHOLE), Bar("weights", WHOLE)],
        [Sent("keys and values to the next rank, once around", [(0, 1), (1, 2), (2, 3)], along=True)],
    ),
    "expert": (
        [Bar("samples", OWN), Bar("experts", OWN), Bar("gradients", OWN), Bar("optimizer state", OWN)],
        [Sent("all-to-all: tokens to their experts, results back", ALL)],
    ),
    "3d": (
        [
            Bar("samples", [[rank // 4] for rank in range(8)], parts=2),
            Bar("layers", [[rank // 2 % 2] for rank in range(8)], parts=2),
            Bar("columns of weights", [[rank % 2] for rank in range(8)], parts=2),
        ],
        [
            Sent("tensor: in a node", [(0, 1), (2, 3), (4, 5), (6, 7)]),
            Sent("pipeline: between neighbouring nodes", [(0, 2), (1, 3), (4, 6), (5, 7)], along=True),
            Sent("data: across all", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ],
    ),
}  # fmt: skip


def main(folder: Path = FOLDER) -> None:
    for name in PICTURES:
        (folder / f"{name}.svg").write_text(picture(name))
    print(f"wrote {len(PICTURES)} pictures to {folder}")


def picture(name: str) -> str:
    """Return a picture as SVG. It has a white ground, so that it can be read on a dark page."""
    bars, sent = PICTURES[name]
    ranks = len(bars[0].held)
    box = BOX if ranks == 4 else 66
    step = box + 14
    bottom = TOP + len(bars) * (BAR + GAP) + GAP
    width, height = LEFT + ranks * step + 6, bottom + sum(LANE * len(lanes(line.groups)) + 23 for line in sent) + 8
    drawn = [f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de"/>']
    for rank in range(ranks):
        x = LEFT + rank * step
        drawn.append(
            f'<rect x="{x}" y="{TOP - 4}" width="{box}" height="{bottom - TOP + 4}" rx="5" fill="#f6f8fa" stroke="#8c959f"/>'
        )
        drawn.append(words(x + box / 2, TOP - 12, f"rank {rank}", "middle"))
    for row, bar in enumerate(bars):
        y = TOP + row * (BAR + GAP) + GAP
        drawn.append(words(LEFT - 10, y + 12.5, bar.name, "end"))
        for rank in range(ranks):
            drawn += parts(LEFT + rank * step + 6, y, box - 12, bar, rank)
    y = bottom + 4
    for line in sent:
        for lane in lanes(line.groups):
            y += LANE
            drawn += [link(LEFT + box / 2, step, y, group, line.along) for group in lane]
        drawn.append(words(LEFT + (ranks * step - 14) / 2, y + 16, line.words, "middle"))
        y += 23
    title = f"<title>{escape(name)}: what each rank holds</title>"
    style = "<style>text { font: 12px sans-serif; fill: #1f2328 }</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, title, style, *drawn, "</svg>"]) + "\n"


def lanes(groups: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the groups in rows, in which no two cover each other."""
    rows: list[list[Sequence[int]]] = []
    for group in groups:
        row = next((row for row in rows if row[-1][-1] <= group[0]), None)
        if row is None:
            rows.append([group])
        else:
            row.append(group)
    return rows


def parts(x: float, y: float, width: float, bar: Bar, rank: int) -> list[str]:
    """Return the parts of a bar in a rank's box: held, gathered for a moment, or elsewhere."""
    size, colour, drawn = width / bar.parts, COLOURS[bar.name], []
    for part in range(bar.parts):
        shade = 1 if part in bar.held[rank] else 0.25 if bar.gathered and part in bar.gathered[rank] else 0
        drawn.append(
            f'<rect x="{x + part * size:.1f}" y="{y}" width="{size - 2:.1f}" height="{BAR}" fill="{colour}" '
            f'fill-opacity="{shade}" stroke="{colour}" stroke-opacity="0.5"/>'
        )
    return drawn


def link(left: float, step: float, y: float, group: Sequence[int], along: bool) -> str:
    """Return a line that joins the ranks of a group, with a dot at each; or an arrow from the first to the last."""
    first, last = left + group[0] * step, left + group[-1] * step
    line = f'<line x1="{first}" y1="{y}" x2="{last}" y2="{y}" stroke="#57606a" stroke-width="1.5"/>'
    if along:
        return line.replace(f'x2="{last}"', f'x2="{last - 8}"') + f'<path d="M {last - 4} {y} l -8 -4 v 8 z" fill="#57606a"/>'
    dots = "".join(f'<circle cx="{left + rank * step}" cy="{y}" r="3.5" fill="#57606a"/>' for rank in group)
    return line + dots


def words(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
