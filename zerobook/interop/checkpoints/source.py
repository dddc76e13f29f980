"""A checkpoint of another trainer as it is read, and the progress that its trainer recorded beside it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerobook.errors import CheckpointError
from zerobook.strategy import Piece
from zerobook.utils.reading import read_json

# The state that AdamW keeps for each weight, by its names in torch.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True)
class Source:
    """Weights and optimizer state of another trainer."""

    trainer: str
    """name of the program that wrote it, for messages"""
    ranks: int
    """number of processes that wrote it"""
    shapes: dict[str, list[int]]
    """shapes of the trained weights, by their names in the model"""
    optimizer_steps: int
    """number of steps that AdamW has counted"""
    settings: dict[str, Any]
    """settings of the optimizer's first group, such as ``lr``, the next step's rate, and ``initial_lr``, the schedule's peak"""
    group_count: int
    """number of the optimizer's groups of weights, each with its own settings; 0 if it is not known"""
    parts: list[Iterable[Piece]]
    """the pieces of all tensors, in parts that can be read at the same time; a piece is read when it is taken"""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """persistent buffers of the model, by name"""
    scaler: dict[str, Any] | None = None
    """fp16 loss scaler, as `zerobook.strategy.state.TrainingState.scaler_state` returns it"""


@dataclass(kw_only=True)
class Position:
    """How far a run has come, from ``trainer_state.json``."""

    step: int
    """optimizer steps done"""
    epoch: float = 0.0
    """passes over the data"""
    total_steps: int = 0
    """length of the schedule; 0 if it is not recorded"""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """what the trainer logged, with transformers' keys"""


def read_position(folder: Path, optimizer_steps: int) -> Position:
    """Return how far the run of a checkpoint has come. Without ``trainer_state.json``, only the steps are known."""
    position = Position(step=optimizer_steps)
    state_file = folder / "trainer_state.json"
    if state_file.exists():
        state = read_json_object(state_file)
        try:
            position.step = int(state["global_step"])
            position.epoch = float(state["epoch"] or 0)
            position.total_steps = int(state["max_steps"])
            position.log_history = [dict(entry) for entry in state["log_history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{state_file}: it is not of transformers' Trainer: {error!r}. Copy it again.") from None
    return position


def require_adamw(path: Path, state_names: Iterable[str]) -> None:
    """Raise `CheckpointError` if the optimizer, which keeps ``state_names`` for each weight, is not AdamW."""
    if set(MOMENTS) != set(state_names) - {"step"}:
        raise CheckpointError(
            f"{path}: its optimizer keeps {', '.join(sorted(state_names)) or 'nothing'}, and AdamW's {' and '.join(MOMENTS)} "
            "alone can be taken over. Start a new run from the trained weights."
        )


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `CheckpointError` if there is none."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: it cannot be read: {error}. Copy it again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: it holds no JSON object. Copy it again.")
    return content
