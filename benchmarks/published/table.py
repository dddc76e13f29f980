"""A published table with the figures of its rerun, as data and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.published.trial import TrialError


@dataclass
class Line:
    """An arm of a comparison, with values by column. A column's name has the unit; ``config`` is the fingerprint of the
    run."""

    name: str
    published: dict[str, Any] = field(default_factory=dict)
    here: dict[str, Any] = field(default_factory=dict)
    config: str = ""


@dataclass
class Finding:
    """A claim of the published figures, whether it holds here, and the cause if it does not. The cause is quoted from
    the run, or follows from its figures."""

    claim: str
    holds: bool
    cause: str = ""


@dataclass
class Table:
    """A table. ``source`` names where the published figures are from. ``not_run`` says why there are no figures from here,
    ``died`` how a run failed."""

    letter: str
    title: str
    source: str
    settings: str = ""
    lines: list[Line] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_run: str = ""
    died: str = ""

    @contextmanager
    def keeping_what_ran(self) -> Iterator[None]:
        """End the block at a run that fails. The lines before it are kept, and ``died`` says how it failed."""
        try:
            yield
        except TrialError as error:
            self.died = str(error)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        """Return a section of Markdown. Published columns come first, so that they are not mistaken for figures from here."""
        parts = [f"## {self.letter}. {self.title}", f"Published: {self.source}"]
        if self.not_run:
            parts.append(f"**Not run here:** {self.not_run}")
        if self.died:
            parts.append(f"**A run failed here:** {self.died}")
        if self.settings:
            parts.append(f"Here: {self.settings}")
        if self.lines:
            parts.append(self._grid())
        parts += ["\n".join(_finding(found) for found in self.findings)] if self.findings else []
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def _grid(self) -> str:
        printed = _columns([line.published for line in self.lines])
        here = _columns([line.here for line in self.lines])
        hashed = any(line.config for line in self.lines)
        rows = [["", *(f"*published:* {name}" for name in printed), *(f"**here:** {name}" for name in here)]]
        rows[0] += ["config"] if hashed else []
        rows.append(["---", *["---:"] * (len(printed) + len(here)), *(["---"] if hashed else [])])
        for line in self.lines:
            cells = [line.name, *(_printed(line.published.get(name)) for name in printed)]
            cells += [_cell(line.here.get(name)) for name in here]
            cells += [f"`{line.config}`" if line.config else "-"] if hashed else []
            rows.append(cells)
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _printed(value: Any) -> str:
    """Return a published value with all its digits; three of one that follows from a published formula."""
    return f"{value:,.12g}" if isinstance(value, float) and value == round(value, 2) else _cell(value)


def _cell(value: Any) -> str:
    """Return a value with three digits, ``-`` if there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _finding(found: Finding) -> str:
    return f"- {found.claim}: **{'reproduced' if found.holds else 'not reproduced'}**" + (
        f". {found.cause}" if found.cause else ""
    )
