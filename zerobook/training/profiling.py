"""Profiles of some steps (``--profile 10-12``): a Chrome trace of every rank."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from zerobook.health.position import during
from zerobook.runlog.records import StepRecord
from zerobook.training.hooks import Hook, TrainerView
from zerobook.utils.bars import tqdm

# Folder in the runlog with the traces.
FOLDER = "profile"


class Profiler(Hook):
    """Profiles the steps ``first`` to ``last``, which slows them down, and writes a ``profile`` event."""

    def __init__(self, first: int, last: int, folder: Path):
        self.first = first
        self.last = last
        self.folder = folder / FOLDER
        self._profile: profile | None = None
        self._written = False

    def before_step(self, trainer: TrainerView, step: int) -> None:
        if step != self.first or self._written:
            return
        # A rollback went back to before the first step, and the profile still runs. Drop it, and profile the steps again.
        if self._profile is not None:
            self._profile.stop()
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        if record.step == self.last and self._profile is not None:
            with during("save"), trainer.pace.paused():
                self._write(trainer, self._profile)
            self._profile = None
            self._written = True

    def on_end(self, trainer: TrainerView) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        if not self._written and trainer.strategy.is_main:
            tqdm.write(f"profile: this attempt did not run all of steps {self.first} to {self.last}, so no trace was written")

    def _write(self, trainer: TrainerView, profiled: profile) -> None:
        # Wait for the kernels of these steps, which may still run.
        if trainer.strategy.device.type == "cuda":
            torch.cuda.synchronize()
        profiled.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(self.folder / f"steps-{self.first}-{self.last}.rank{trainer.strategy.rank}.json.gz"))
        trainer.log.event("profile", steps=[self.first, self.last], folder=str(self.folder))
