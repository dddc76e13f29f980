"""The points that the spike detector reads, and its findings."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Point:
    """One logged point, all values reduced over ranks."""

    step: int
    loss: float
    """nats per supervised token; any finite number, or not finite"""
    grad_norm: float | None = None
    learning_rate: float | None = None
    is_skipped: bool = False
    """whether the update was not applied, since a gradient was not finite"""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and not self.is_skipped


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An observation on the loss curve. ``kind`` is one of

    ``armed``        a gradient norm or a first high loss that may announce a spike
    ``outlier``      high for a few steps only, then back at the level
    ``spike``        an alarm: high for longer than an outlier
    ``spike_end``    the loss came back
    ``damage``       the loss did not come back in time
    ``divergence``   the loss rises, stays high without coming down, is not finite, or suddenly stays exactly 0; or the gradient
                     stays exactly 0
    ``slow_rise``    the level has slowly risen far above its lowest value
    ``level_shift``  a moderate step to a new level, which is accepted
    ``reset``        the losses repeat the beginning of the log: another run begins (only in logs of other programs)
    ``chronic``      spikes so often that the learning rate is the cause
    """

    kind: str
    step: int
    """step at which it was noticed"""
    onset: int
    """step at which it began"""
    points: int
    """logged points since the onset"""
    base: float
    """level of the loss before the onset"""
    peak: float
    """highest loss since the onset, or the loss of the point that it is about; after a slow rise, the level"""
    reason: str
    finite: bool = True
    """False if a loss or a gradient was not finite"""
    is_slow: bool = False
    """True if the loss has risen slowly over many steps, so that no single samples are the cause"""

    @property
    def alarm(self) -> bool:
        return self.kind in ("spike", "damage", "divergence", "slow_rise")

    @property
    def needs_action(self) -> bool:
        """True if a recovery action is needed: the weights are damaged, or will be."""
        return self.kind in ("damage", "divergence")
