"""Failures of a run on many GPUs: how often it is expected to fail, how often to save, and the goodput. Imports nothing heavy.

Failures are assumed to be independent of each other and of what the run does, with a constant rate. A failure costs the work
since the last save, and a restart, which may fail as well. Times are seconds. Sources:

Young   A first order approximation to the optimum checkpoint interval, Communications of the ACM 17(9), 1974
Daly    A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3),
        2006
"""

import math
from dataclasses import dataclass

from zerobook.errors import ConfigError
from zerobook.utils.units import duration


@dataclass(frozen=True)
class PublishedRate:
    """Failures of a published training."""

    failures: float
    gpus: int
    days: float
    source: str

    @property
    def gpu_hours(self) -> float:
        """Mean GPU hours between two failures."""
        return self.gpus * self.days * 24 / self.failures


RATES = {
    "llama3": PublishedRate(419, 16_384, 54, "Llama 3 on H100, arXiv:2407.21783, section 3.3.4: unexpected interruptions"),
    "opt-175b": PublishedRate(
        105, 992, 60, "OPT-175B on A100, arXiv:2205.01068, section 2.5: 35 manual and 70 automatic restarts in 2 months"
    ),
    "bloom": PublishedRate(1.5, 384, 7, "BLOOM on A100, arXiv:2211.05100, section 3.4: 1 to 2 GPU failures a week"),
}
# Assumed bytes per second that a node writes of a checkpoint. A run assumes the same before its first save.
WRITE_RATE = 0.5e9
# Assumed time from a failure until the run trains again: noticing it, starting processes, loading the checkpoint.
RESTART_SECONDS = 300.0
# `math.exp` overflows for slightly larger exponents.
_LARGEST_EXPONENT = 700.0


def best_interval(save: float, mean_time: float) -> float:
    """Return the best seconds of work between two saves, by Daly, equation 37.

    Args:
        save: seconds of a save.
        mean_time: mean seconds between two failures of the run.
    """
    if save >= 2 * mean_time:
        return mean_time
    ratio = save / (2 * mean_time)
    # The root is Young's interval, which is the best if a save is much shorter than the mean time.
    return math.sqrt(2 * save * mean_time) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, save: float, restart: float, mean_time: float) -> float:
    """Return the expected share of the time in which the run works and loses nothing of it later, by Daly, equation 20.

    Args:
        interval: seconds of work between two saves.
        save: seconds of a save.
        restart: seconds of a restart.
        mean_time: mean seconds between two failures of the run.
    """
    segment = (interval + save) / mean_time
    restarts = restart / mean_time
    # So long a segment practically never ends without a failure.
    if segment + restarts > _LARGEST_EXPONENT:
        return 0.0
    return interval / mean_time / math.expm1(segment) * math.exp(-restarts)


@dataclass(frozen=True)
class FailurePlan:
    """Expected failures of a run on ``gpus`` GPUs. Times are seconds."""

    gpus: int
    # where the rate of failures comes from
    source: str
    # between two failures of the run
    mean_time: float
    save: float
    restart: float
    interval: float
    goodput: float

    def describe(self) -> str:
        return (
            f"failures: expect one every {duration(self.mean_time)} on {self.gpus:,} GPUs ({self.source})\n"
            f"  save every {duration(self.interval)}: goodput {self.goodput:.1%}, with {duration(self.save)} a save and "
            f"{duration(self.restart)} a restart"
        )


def plan_failures(request: str, gpus: int, nodes: int, checkpoint_bytes: float) -> FailurePlan:
    """Return the expected failures of a run.

    Args:
        request: the value of ``--failures``: a name in `RATES` or the mean hours between failures of one GPU, then optionally
            ``,save=SECONDS`` and ``,restart=SECONDS``.
        checkpoint_bytes: bytes of a checkpoint. If ``request`` has no ``save``, a save takes the time to write them.

    Raises:
        ConfigError: the request has another form.
    """
    rate, *settings = request.split(",")
    # Every node writes its part at the same time.
    seconds = {"save": checkpoint_bytes / nodes / WRITE_RATE, "restart": RESTART_SECONDS}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in seconds:
            raise ConfigError(f"--failures: {setting!r} is neither save=SECONDS nor restart=SECONDS.")
        seconds[name] = _parse_positive(value, setting)
    published = RATES.get(rate)
    if published is not None:
        gpu_hours = published.gpu_hours
        source = published.source
    else:
        gpu_hours = _parse_positive(rate, rate)
        source = f"{gpu_hours:,.0f} hours of one GPU"
    # GPUs fail independently, so a run on many fails as often as all of them together.
    mean_time = 3600 * gpu_hours / gpus
    interval = best_interval(seconds["save"], mean_time)
    return FailurePlan(
        gpus=gpus,
        source=source,
        mean_time=mean_time,
        interval=interval,
        goodput=goodput(interval, seconds["save"], seconds["restart"], mean_time),
        **seconds,
    )


def _parse_positive(text: str, setting: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(
            f"--failures: {setting!r}: give {', '.join(RATES)} or the hours between failures of one GPU, such as 50000, and "
            "then save=SECONDS and restart=SECONDS, with commas between."
        )
    return value
