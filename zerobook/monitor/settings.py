"""Settings of the spike detector."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the detector. Points are logged points. For *excess* and *unit*, see `zerobook.monitor.detector`."""

    level_points: int = 24
    """number of newest accepted points whose median is the level"""
    unit_points: int = 128
    """number of newest accepted points from whose residuals the unit is computed"""
    min_unit: float = 0.02
    """smallest unit, as a share of the level"""
    min_unit_at_start: float = 0.06
    """smallest unit without history, as a share of the level; shrinks to 0 over the first ``level_points`` points"""
    high: float = 3.0
    """excess of a point that may belong to a spike and is kept out of the baseline"""
    still_high: float = 2.5
    """excess of a high point after the first ``min_high_points`` of an excursion, since a spike often falls a little early"""
    drift: float = 1.5
    """evidence that is subtracted at each point"""
    evidence_cap: float = 4.0
    """largest evidence that one point can add, before the drift is subtracted"""
    evidence: float = 5.0
    """sum of evidence that raises an alarm"""
    outlier_steps: int = 3
    """largest number of steps of an outlier"""
    patience: int = 8
    """points that a spike may take to come back before it counts as damage"""
    long_patience: int = 8
    """factor on the patience after a shock, and before a loss that stays high becomes the new level"""
    min_high_points: int = 3
    """minimum number of high points for an alarm, whatever the logging interval"""
    small_rise: float = 0.2
    """largest rise to a new level that is accepted without a known cause, as a share of the loss. Other data causes such
    rises."""
    slow_rise: float = 0.25
    """largest slow rise of a loss that is not reported, as a share of its lowest level; twice this share is a divergence"""
    absurd_factor: float = 40.0
    """factor above the level and above the run's first loss that no data can cause if the weights are undamaged"""
    precursor: float = 8.0
    """excess of a gradient norm that arms the detector"""
    min_norm_unit: float = 0.1
    """smallest unit of the logarithm of the gradient norm. It is absolute: differences of logarithms are ratios, so they need
    no division by the level, and a tenfold norm counts the same in every run."""
    shock_factor: float = 1000.0
    """a gradient norm of at least this factor times its level is a shock, whatever the loss is at that step"""
    chronic_spikes: int = 3
    """spikes within 1000 points that make a ``chronic`` finding"""
