"""Profiles of some steps (``--profile 10-12``): a Chrome trace of every rank, and where the time of its device went.

A device computes, waits for communication that no computation hides (exposed), or waits for its host. On a GPU these are
intervals of kernels: NCCL's are communication, all others compute. On a CPU they are intervals of torch's operations, and
gloo's collectives, which run on threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from zerobook.health.position import during
from zerobook.training.hooks import Hook, TrainerView
from zerobook.utils.bars import tqdm

if TYPE_CHECKING:
    from zerobook.runlog.records import StepRecord

Interval = tuple[float, float]
FOLDER = "profile"
"""Folder in the runlog with the traces."""
_COLLECTIVES = ("nccl", "gloo:")
"""Beginnings of the names of communication: NCCL's kernels, gloo's collectives."""


class Profiler(Hook):
    """Profiles the steps ``first`` to ``last``, and writes a ``profile`` event.

    Profiling slows these steps down, so the shares are right, and the seconds are more than those of other steps.
    """

    def __init__(self, first: int, last: int, folder: Path):
        self.first = first
        self.last = last
        self.folder = folder / FOLDER
        self._profile: profile | None = None
        self._written = False

    def before_step(self, trainer: TrainerView, step: int) -> None:
        if step != self.first or self._written:
            return
        # A rollback went back over the first step.
        if self._profile is not None:
            self._profile.stop()
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        if record.step == self.last and self._profile is not None:
            with during("save"), trainer.pace.apart():
                self._write(trainer, self._profile)
            self._profile = None
            self._written = True

    def on_end(self, trainer: TrainerView) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        if not self._written and trainer.strategy.is_main:
            steps = f"steps {self.first} to {self.last}"
            tqdm.write(f"profile: this attempt did not run all of {steps}, so no trace was written")

    def _write(self, trainer: TrainerView, profiled: profile) -> None:
        strategy = trainer.strategy
        # Kernels of these steps may still run.
        if strategy.device.type == "cuda":
            torch.cuda.synchronize()
        profiled.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(self.folder / f"steps-{self.first}-{self.last}.rank{strategy.rank}.json.gz"))
        per_rank = strategy.gather(shares(profiled.events() or (), on_gpu=strategy.device.type == "cuda"))
        trainer.log.event("profile", steps=[self.first, self.last], ranks=per_rank, folder=str(self.folder))


def shares(events: Iterable[Any], *, on_gpu: bool) -> dict[str, float]:
    """Return ``seconds`` from the first to the last event of a profile, and of these the shares of ``compute``, of exposed
    ``communication`` and of ``idle``.

    Args:
        events: of `torch.profiler.profile.events`.
        on_gpu: the device is a GPU, so only its kernels count.
    """
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        # Annotations span kernels, and the gaps between them.
        if on_gpu and (event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation):
            continue
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith(_COLLECTIVES):
            communication.append(interval)
        # On a CPU an operation contains others, which would count twice.
        elif on_gpu or (event.name.startswith("aten::") and not event.cpu_children):
            compute.append(interval)
    busy = union([*compute, *communication])
    if not busy:
        return {"seconds": 0.0, "compute": 0.0, "communication": 0.0, "idle": 0.0}
    # In microseconds, as a profile counts.
    duration = busy[-1][1] - busy[0][0] or 1.0
    compute_time = length(union(compute))
    busy_time = length(busy)
    return {
        "seconds": round(duration / 1e6, 6),
        "compute": round(compute_time / duration, 4),
        "communication": round((busy_time - compute_time) / duration, 4),
        "idle": round(1 - busy_time / duration, 4),
    }


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones, ascending.

    >>> union([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the summed length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
