"""One process and DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager

from zerobook.strategy.base import Strategy


class ReplicatedStrategy(Strategy):
    """One process, or DDP: every rank holds everything."""

    def inference(self) -> AbstractContextManager[None]:
        # accelerate applies autocast in ``forward`` only, and casts the fp32 weights again in each call, which is for each
        # token of `generate`. Around the complete generation, autocast casts each weight once.
        return self.accelerator.autocast()

    def _accumulating(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self.model)
