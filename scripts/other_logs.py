"""Logs of other programs, read as records like those of a run's steps.

What a file is follows from its content:

    transformers' trainer_state.json    a JSON object with ``log_history``
    TensorBoard's event file            its first record
    output of transformers' Trainer     Python dictionaries with a loss, among progress bars and other lines
    JSON, JSON Lines                    the first character is ``{`` or ``[``, as in histories of Weights & Biases
    CSV                                 everything else, as TensorBoard's and Weights & Biases' pages export it
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.event_files import MAGIC, read_scalars
from zerobook.errors import DataError
from zerobook.runlog.history import History
from zerobook.runlog.writer import EVENTS
from zerobook.utils.reading import MOST_BYTES, open_regular, read_text

Row = dict[str, Any]

COLUMNS = {
    "step": ("train/global_step", "trainer/global_step", "global_step", "step", "current_steps", "iteration", "iter", "_step"),
    "loss": (
        "train/loss",
        "loss",
        "train_loss",
        "train_loss_step",
        "training_loss",
        "loss/train",
        "lm loss",
        "lm_loss",
    ),
    "grad_norm": ("train/grad_norm", "grad_norm", "gradient_norm", "global_grad_norm", "grad-norm", "grad norm"),
    "learning_rate": ("train/learning_rate", "learning_rate", "train/lr", "lr", "learning-rate", "lr-adamw", "lr-adam"),
    "held_out": ("eval/loss", "eval_loss", "val/loss", "val_loss", "validation_loss"),
}
"""Quantity -> names of its column, in small letters. The first that has numbers is read."""
_TENSORBOARD_EXPORT = {"wall time", "step", "value"}
"""Columns of the CSV that TensorBoard's page downloads. The file's name alone says what the value is."""
_TRAINER_LOSS = re.compile(r"\{'(?:[^{}\n]*')?loss': [^{}\n]*\}")
# A dictionary, or the number of steps in a progress bar and their total.
_TRAINER_TOKEN = re.compile(r"(\{'[^{}\n]*\})|\| *(\d+)/(\d+) \[")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_CURVE_NAMES = ("run", "run_id", "split")
"""Columns whose values tell the curves of a file apart."""
_TRAINER_PAIR = re.compile(r"'([^']+)': '?([^',}]+)")


@dataclass(kw_only=True)
class OtherLog:
    """The loss curve of a log.

    ``records`` have step, loss, grad_norm and learning_rate, in the log's order, and the branch: the number of times that the
    steps went back before.
    """

    path: Path
    file_format: str
    columns: dict[str, str]
    """quantity -> name of the column that it was read from"""
    records: list[Row] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    """step -> loss on held-out data"""

    def last_current_steps(self) -> dict[int, float]:
        """Return branch -> its last step that no later branch did again."""
        first_steps = {record["branch"]: record["step"] for record in reversed(self.records)}
        last_step = math.inf
        last_current_steps = {}
        # The newest branch is the first, since the records were read backwards.
        for branch, first_step in first_steps.items():
            last_current_steps[branch] = last_step
            last_step = min(last_step, first_step - 1)
        return last_current_steps


def read_log(path: str | Path) -> OtherLog:
    """Return the loss curve of a file, or of a folder: a run's, one of Trainer's, or one with TensorBoard's event files.

    Raises:
        DataError: there is no loss curve. The message says what was found.
    """
    path = Path(path).expanduser()
    file_format, rows = _read_rows(path)
    log = OtherLog(path=path, file_format=file_format, columns=_choose_columns(path, file_format, rows))
    for point in _merge_rows(rows, log.columns):
        step = point["step"]
        if math.isfinite(point.get("held_out", math.nan)):
            log.held_out[step] = point["held_out"]
        if "loss" in point:
            values = {name: point.get(name) for name in ("grad_norm", "learning_rate")}
            branch = 0
            if log.records:
                branch = log.records[-1]["branch"] + (step <= log.records[-1]["step"])
            log.records.append({"step": step, "loss": point["loss"], **values, "branch": branch})
    if len(log.records) < 2:
        raise DataError(f"{path}: {len(log.records)} rows hold a step and a loss as numbers; a curve has more.")
    return log


# --- columns
def _choose_columns(path: Path, file_format: str, rows: list[Row]) -> dict[str, str]:
    """Return quantity -> column. Raises `DataError` without steps or losses."""
    present = {name for row in rows for name in row}
    with_numbers = {name for row in rows for name, value in row.items() if _number(value) is not None}
    columns = {}
    for quantity, names in COLUMNS.items():
        # A column that is there but empty is the second choice: the message then is about its values.
        candidates = [name for group in (with_numbers, present) for name in names if name in group]
        if candidates:
            columns[quantity] = candidates[0]
    if present == _TENSORBOARD_EXPORT:
        columns["loss"] = "value"
    if "step" not in columns or "loss" not in columns:
        names_found = ", ".join(sorted(present)[:12]) or "none"
        raise DataError(
            f"{path}: this is not a loss curve. Read as {file_format}, it needs a column of steps "
            f"({', '.join(COLUMNS['step'])}) and one of these: {', '.join(COLUMNS['loss'])}. Columns found: {names_found}."
        )
    return columns


def _column_name(name: str) -> str:
    """Return a column's name in small letters, without the run's name, which Weights & Biases puts before it."""
    return name.strip().lower().rsplit(" - ", 1)[-1]


def _merge_rows(rows: Iterable[Row], columns: dict[str, str]) -> list[Row]:
    """Return the quantities that each step has. Neighbouring rows of one step are one point if they do not contradict."""
    points: list[Row] = []
    for row in rows:
        numbers = {quantity: _number(row.get(column)) for quantity, column in columns.items()}
        point: Row = {quantity: number for quantity, number in numbers.items() if number is not None}
        if not math.isfinite(point.get("step", math.nan)):
            continue
        point["step"] = int(point["step"])
        previous = points[-1] if points else {}
        if previous.keys() & point.keys() == {"step"} and previous["step"] == point["step"]:
            previous.update(point)
        else:
            points.append(point)
    return points


def _number(value: Any) -> float | None:
    """Return a cell as a number, which may be NaN; None for one without a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# --- formats
def _read_rows(path: Path) -> tuple[str, list[Row]]:
    """Return a log's format in words, and its rows with the names of columns in small letters."""
    try:
        file_format, rows = _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror or error}") from error
    named_rows = []
    for row in rows:
        # A line of CSV with more cells than the first has a list under None.
        named_rows.append({_column_name(name): value for name, value in row.items() if name is not None})
    for name in _CURVE_NAMES:
        with_loss = [row for row in named_rows if any(_number(row.get(column)) is not None for column in COLUMNS["loss"])]
        curves = sorted({str(row[name]) for row in with_loss if name in row})
        if len(curves) > 1:
            raise DataError(
                f"{path}: its column {name} tells several curves apart: {', '.join(curves[:6])}. Give a file of one."
            )
    return file_format, named_rows


def _read_folder(path: Path) -> tuple[str, list[Row]]:
    if (path / "runlog" / EVENTS).exists():
        # Steps that were abandoned are left out: another attempt or branch did them again.
        rows = []
        for record in History.read(path).steps(current=True):
            # The runlog has null for a loss that is not finite.
            loss = math.nan if record["loss"] is None else record["loss"]
            rows.append(record | {"loss": loss})
        return "a run of Zerobook", rows
    states = [*path.glob("trainer_state.json"), *path.glob("checkpoint-*/trainer_state.json")]
    if states:
        # Each checkpoint has the history up to its step, so the newest has the most.
        return _read_file(max(states, key=lambda state: state.stat().st_size))
    # A run that was resumed has several event files in its folder. Their names begin with the time.
    rows_of = {file: _read_file(file)[1] for file in sorted(path.rglob("events.out.tfevents.*"))}
    # A tracker writes the run's settings into a folder of their own.
    files = [file for file, rows in rows_of.items() if any(map(_names_loss, rows))] or list(rows_of)
    folders = sorted({str(file.parent) for file in files})
    if len(folders) != 1:
        raise DataError(
            f"{path}: a folder has to hold the runlog, the trainer_state.json or the TensorBoard event files of one run. "
            f"Folders with event files: {', '.join(folders[:5]) or 'none'}."
        )
    return "event files of TensorBoard", [row for file in files for row in rows_of[file]]


def _names_loss(row: Row) -> bool:
    return any(_column_name(name) in COLUMNS["loss"] for name in row)


def _read_file(path: Path) -> tuple[str, list[Row]]:
    with open_regular(path) as handle:
        if MAGIC in handle.read(64):
            handle.seek(0)
            scalars = read_scalars(handle.read(MOST_BYTES))
            return "an event file of TensorBoard", [{"step": step, tag: value} for step, tag, value in scalars]
    text = read_text(path, errors="replace")
    if _TRAINER_LOSS.search(text):
        return _output_rows(text)
    if text.lstrip()[:1] in ("{", "["):
        return _json_rows(path, text)
    return "CSV", _csv_rows(path, text)


def _output_rows(text: str) -> tuple[str, list[Row]]:
    """Return the dictionaries that Trainer printed. It prints no steps, but draws its progress bars after each of them."""
    rows: list[Row] = []
    bars_after: list[list[tuple[str, str]]] = []
    for dictionary, bar_step, bar_total in _TRAINER_TOKEN.findall(text):
        if dictionary:
            rows.append(dict(_TRAINER_PAIR.findall(dictionary)))
            bars_after.append([])
        elif rows:
            bars_after[-1].append((bar_step, bar_total))
    # After an evaluation, its own bar may come first. After a training loss, the training's bar does.
    training_totals = {bars[0][1] for row, bars in zip(rows, bars_after, strict=True) if bars and "loss" in row}
    for row, bars in zip(rows, bars_after, strict=True):
        steps = [step for step, total in bars if total in training_totals]
        if steps:
            row["step"] = steps[0]
    # Bars that follow few of the lines are of something else, such as of saving.
    if sum("step" in row for row in rows) >= len(rows) / 2:
        return "output of Trainer", rows
    number = 0
    for row in rows:
        number += "loss" in row
        row["step"] = number
    return "output of Trainer without progress bars, so its points are numbered from 1", rows


def _json_rows(path: Path, text: str) -> tuple[str, list[Row]]:
    whole = _parse_json(text)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return "trainer_state.json of transformers", list(filter(_is_row, whole["log_history"]))
    if isinstance(whole, list):
        return "JSON", list(filter(_is_row, whole))
    lines = [_parse_json(line) for line in text.splitlines() if line.strip()]
    rows = list(filter(_is_row, lines))
    if len(rows) < len(lines) / 2:
        raise DataError(f"{path}: of its {len(lines)} lines {len(rows)} are JSON objects.")
    return "JSON Lines", rows


def _parse_json(text: str) -> Any:
    """Return the value; None for what is no JSON. Not orjson: trainers write NaN."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_row(value: Any) -> bool:
    return isinstance(value, dict)


def _csv_rows(path: Path, text: str) -> list[Row]:
    lines = text.replace("\0", "").splitlines()
    header = lines[0] if lines else ""
    delimiter = max(",;\t", key=header.count)
    try:
        reader = csv.DictReader(lines, skipinitialspace=True, delimiter=delimiter)
        losses = [name for name in reader.fieldnames or () if _column_name(name) in COLUMNS["loss"]]
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{path}: it cannot be read as CSV: {error}") from error
    # A chart of Weights & Biases may show several runs, of which each has a column.
    if len(losses) > len({_column_name(name) for name in losses}):
        raise DataError(f"{path}: it holds several runs: {', '.join(losses[:6])}. Export the chart of one run.")
    for number, row in enumerate(rows, start=2):
        if any(row.get(None) or ()):
            raise DataError(f"{path}, line {number}: it has more cells than the first line. Are decimal commas not in quotes?")
        for name, cell in row.items():
            if delimiter != "," and _DECIMAL_COMMA.fullmatch(str(cell)):
                row[name] = cell.replace(",", ".")
    return rows
