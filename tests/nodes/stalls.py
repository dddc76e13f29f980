"""A hook whose last rank stops while it waits for its data."""

from __future__ import annotations

import time

from zerobook.training.hooks import Hook, TrainerView

AT = 25


class Stalls(Hook):
    def before_step(self, trainer: TrainerView, step: int) -> None:
        if step == AT and trainer.strategy.rank == trainer.strategy.world_size - 1:
            time.sleep(3600)
