"""One process and DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager

from zerobook.strategy.base import Strategy


class ReplicatedStrategy(Strategy):
    """One process, or DDP: every rank holds everything."""

    def inference(self) -> AbstractContextManager[None]:
        # The weights are fp32, and accelerate wraps autocast around ``forward`` alone. Around a whole call, each weight is
        # cast once; inside of ``forward``, all of them would be cast again for every token.
        return self.accelerator.autocast()

    def _accumulating(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self.model)
