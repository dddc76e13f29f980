"""A hook that counts where the host waits for the GPU in training steps: the part ``probe`` of benchmarks/gpu.py.

    ZEROBOOK_HOST_WAITS=FILE.json accelerate launch ... recipes/NAME.py [flags] --hooks benchmarks/gpu_waits.py:HostWaits

CUDA warns of every operation that waits (`torch.cuda.set_sync_debug_mode`), but for `torch.cuda.synchronize` and collectives.
"""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from zerobook.runlog.records import StepRecord
from zerobook.training.hooks import Hook, TrainerView

RESULT = "ZEROBOOK_HOST_WAITS"
"""Environment variable with the file for the result."""
FIRST_STEP = 5
LAST_STEP = 7
"""The steps that are watched. Earlier ones wait for what is set up once."""
FRAMES = 6
"""Calls that are named of each place, the innermost first."""


class HostWaits(Hook):
    """Counts the waits of `FIRST_STEP` to `LAST_STEP` by place."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._caught = warnings.catch_warnings()

    def before_prepare(self, trainer: TrainerView, model: nn.Module) -> None:
        trainer.save_results = False

    def before_step(self, trainer: TrainerView, step: int) -> None:
        if step == FIRST_STEP:
            self._caught.__enter__()
            # The same place may wait in each step.
            warnings.simplefilter("always")
            warnings.showwarning = self._count
            _set_mode(trainer, "warn")

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        if record.step == LAST_STEP:
            _set_mode(trainer, "default")
            self._caught.__exit__(None, None, None)
            result = {"steps": LAST_STEP - FIRST_STEP + 1, "waits": self.places.total(), "places": dict(self.places)}
            Path(os.environ[RESULT]).write_text(json.dumps(result))

    def _count(self, message: Warning | str, *_: object, **__: object) -> None:
        """Take the place of `warnings.showwarning`."""
        if "synchronizing" in str(message):
            # The last frame is this function, which Python's own module calls.
            frames = [frame for frame in traceback.extract_stack()[:-1] if frame.filename != warnings.__file__]
            calls = [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
            self.places[" < ".join(calls[:FRAMES])] += 1


def _set_mode(trainer: TrainerView, mode: str) -> None:
    if trainer.strategy.device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def _short(file: str) -> str:
    """Return a file's path from its package on."""
    return file.rsplit("site-packages/", 1)[-1].removeprefix(f"{Path(__file__).parents[1]}/")
