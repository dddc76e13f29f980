"""Hooks that stop: one rank while it waits for its data, and all ranks while they load."""

from __future__ import annotations

import time

from torch import nn

from zerobook.training.hooks import Hook, TrainerView

AT = 25


class Stalls(Hook):
    def before_step(self, trainer: TrainerView, step: int) -> None:
        if step == AT and trainer.strategy.rank == trainer.strategy.world_size - 1:
            time.sleep(3600)


class LoadsForLong(Hook):
    """All ranks load a model for long, and none of them waits for another."""

    def before_prepare(self, trainer: TrainerView, model: nn.Module) -> None:
        print("LOADING", flush=True)
        time.sleep(3600)
