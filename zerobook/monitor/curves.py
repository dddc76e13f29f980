"""Loss curves, from files of other programs and from Zerobook's own runs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from zerobook.errors import DataError
from zerobook.monitor.detector import Detector, Finding, Point, Settings
from zerobook.runlog.history import History
from zerobook.runlog.writer import EVENTS
from zerobook.utils.reading import read_text

STEP = ("step", "global_step", "_step", "iteration", "iter")
LOSS = ("loss", "train_loss", "train/loss", "training_loss", "lm loss", "lm_loss")
NORM = ("grad_norm", "train/grad_norm", "gradient_norm", "grad-norm")
RATE = ("learning_rate", "train/learning_rate", "lr")


def read(path: str | Path, grad_norm: str | Path | None = None) -> list[Point]:
    """Return the points of a loss curve, in the file's order.

    Args:
        path: a ``trainer_state.json`` (transformers), a CSV with a header, JSON Lines, or a run's ``output_dir``.
            Columns may be called as in `STEP`, `LOSS`, `NORM` and `RATE`. Rows without a step or a loss are skipped.
        grad_norm: a CSV with ``step,grad_norm``, if the norms are in a separate file.

    Raises:
        DataError: the file holds no curve. The message names the columns that were found.
    """
    path = Path(path).expanduser()
    run = path.is_dir() and (path / "runlog" / EVENTS).exists()
    if not run and not path.is_file():
        raise DataError(f"{path}: there is no such file. Give a trainer_state.json, a CSV, JSON Lines, or a run's output_dir.")
    norms = dict(_pairs(Path(grad_norm), NORM)) if grad_norm else {}
    points = []
    # a run's steps that were given up are left out: another attempt or branch did them again
    for row in History.read(path).steps(living=True) if run else _rows(path, LOSS):
        step, loss = _number(row, STEP), _number(row, LOSS)
        if step is not None and loss is not None and math.isfinite(step):
            norm = norms.get(int(step)) if norms else _number(row, NORM)
            points.append(Point(step=int(step), loss=loss, grad_norm=norm, learning_rate=_number(row, RATE)))
    if len(points) < 2:
        raise DataError(f"{path}: {len(points)} rows hold a step and a loss as numbers; a curve has more.")
    return points


def _pairs(path: Path, names: tuple[str, ...]) -> Iterator[tuple[int, float]]:
    for row in _rows(path, names):
        step, value = _number(row, STEP), _number(row, names)
        if step is not None and value is not None:
            yield int(step), value


def _rows(path: Path, wanted: tuple[str, ...]) -> Iterable[dict[str, Any]]:
    try:
        text = read_text(path, errors="replace")
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error}") from error
    if text.lstrip()[:1] in ("{", "["):
        rows = _json_rows(path, text)
    else:
        rows = list(csv.DictReader(text.replace("\0", "").splitlines(), skipinitialspace=True))
    columns = {_plain(key) for row in rows for key in row if key is not None}
    if not (columns & set(STEP) and columns & set(wanted)):
        found = ", ".join(sorted(columns)[:12]) or "none"
        raise DataError(
            f"{path}: this is not a loss curve: it needs a column named {', '.join(STEP)} and one of {', '.join(wanted)}; "
            f"found: {found}."
        )
    return ({_plain(key): value for key, value in row.items() if key is not None} for row in rows)


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        whole = json.loads(text)  # the standard library's, since trainers write NaN
    except (json.JSONDecodeError, RecursionError):
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return [row for row in whole["log_history"] if isinstance(row, dict)]
    if isinstance(whole, list):
        return [row for row in whole if isinstance(row, dict)]
    rows, broken = [], 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            broken += bool(line.strip())
            continue
        if isinstance(row, dict):
            rows.append(row)
    if broken > len(rows):
        raise DataError(f"{path}: {broken} of its lines are no JSON, {len(rows)} are.")
    return rows


def _plain(name: str) -> str:
    return name.strip().lower()


def _number(row: dict[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = row.get(name)
        if value not in (None, ""):
            try:
                return float(value)
            except (TypeError, ValueError):
                return None
    return None


def points_of(records: Iterable[dict[str, Any]]) -> Iterator[Point]:
    """Yield the points of a runlog's step records. A number that is missing there was not finite."""
    for record in records:
        loss, norm = (math.nan if record[key] is None else record[key] for key in ("loss", "grad_norm"))
        masked = not (math.isfinite(loss) and math.isfinite(norm))
        yield Point(step=record["step"], loss=loss, grad_norm=norm, learning_rate=record["learning_rate"], masked=masked)


def replay(points: Iterable[Point], settings: Settings | None = None, each: Callable[[], None] | None = None) -> list[Finding]:
    """Return the detector's findings on a curve, in order. ``each`` is called once per point, for a progress bar."""
    detector = Detector(settings)
    found = []
    for point in points:
        found += detector.update(point)
        if each:
            each()
    return found + detector.finish()
