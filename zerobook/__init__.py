"""Zerobook: training recipes on Hugging Face Accelerate that plan a run, recover from failures and write a runlog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerobook.checkpoint.progress import Progress
    from zerobook.training.hooks import Hook
    from zerobook.training.recipe import Recipe

__version__ = "0.1.0"


def train(recipe: Recipe[Any], *, hooks: Sequence[Hook] = ()) -> Progress:
    """Train a recipe from Python: see `zerobook.training.run.train`. Libraries are imported when it is called."""
    from zerobook.training.run import train as run

    return run(recipe, hooks=hooks)
