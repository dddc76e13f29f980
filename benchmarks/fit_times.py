"""Fit the constants of the model of time to published runs: to all of them, or to all sources but one.

A constant begins at an estimate that comes from none of these runs, and moves as far as the runs need: a distance
costs the square of its size. The constants that ``zerobook/plan/roofline.py`` has are such a fit, rounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from zerobook.plan import hardware, roofline
from zerobook.utils.replaced import replaced

Shares = tuple[float, float]
"""Product share and attention share of a generation of GPUs."""


@dataclass(frozen=True)
class Constant:
    """One number of the model of time.

    Args:
        name: a constant of roofline.py or hardware.py, or the key of `roofline.OVERLAP` after ``overlap of``.
        start: the value at which a fit begins.
        width: natural logarithm of the factor that is a distance of 1.
    """

    name: str
    start: float
    width: float


CONSTANTS = (
    Constant("HALF_RATE_ROWS", 150, 0.4),
    Constant("HALF_RATE_WIDTH", 200, 0.4),
    Constant("MEMORY_SHARE", 0.8, 0.07),
    Constant("DEQUANTISED_BYTES", 6.25, 0.3),
    Constant("FUSED_SHARE", 0.25, 0.4),
    Constant("LAUNCH_SECONDS", 11e-6, 0.15),
    Constant("HOOK_SECONDS", 1e-4, 0.5),
    Constant("CPU_ADAM_BYTES_PER_S", 150e9, 0.2),
    Constant("NETWORK", 0.65, 0.15),
    Constant("LINKS", 0.7, 0.15),
    Constant("overlap of deepspeed", 0.3, 0.6),
    Constant("overlap of fsdp", 0.85, 0.12),
)
GENERATIONS: dict[str, tuple[Shares, Shares]] = {
    "a100-80gb": ((0.82, 0.58), (0.05, 0.15)),
    "h100-80gb": ((0.68, 0.33), (0.08, 0.15)),
    "v100-32gb": ((0.65, 0.3), (0.25, 0.15)),
    "rtx-4090": ((0.85, 0.5), (0.1, 0.15)),
    "l40s": ((0.55, 0.5), (0.12, 0.15)),
    "b200": ((0.62, 0.35), (0.1, 0.15)),
}
"""A GPU of each generation -> the shares at which a fit begins, and their widths as in `Constant`."""
LARGEST_CERTAIN_ERROR = 0.3
"""Logarithm of the ratio from which an error counts for less: such a run has a cause that no constant is for."""
DISTANCE_COST = 0.001
ROUNDS = 8


@dataclass(frozen=True)
class Fit:
    """Values of the constants, and the shares of a GPU's generation, by their start."""

    values: dict[str, float]
    shares: dict[str, Shares]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the planner computes with these constants."""
        overlap = dict(roofline.OVERLAP)
        with ExitStack() as stack:
            for name, value in self.values.items():
                if name.startswith("overlap of "):
                    overlap[name.removeprefix("overlap of ")] = min(value, 1.0)
                    continue
                module = hardware if hasattr(hardware, name) else roofline
                stack.enter_context(replaced(module, name, value))
            overlap["ddp"] = overlap["fsdp"]
            stack.enter_context(replaced(roofline, "OVERLAP", overlap))
            yield


def _make_fit(distances: Sequence[float]) -> Fit:
    values = {}
    for constant, distance in zip(CONSTANTS, distances, strict=False):
        values[constant.name] = constant.start * math.exp(distance * constant.width)
    shares = {}
    remaining = iter(distances[len(CONSTANTS) :])
    for gpu, (starts, widths) in GENERATIONS.items():
        product, attention = (start * math.exp(next(remaining) * width) for start, width in zip(starts, widths, strict=True))
        shares[gpu] = (product, attention)
    return Fit(values, shares)


def fit(sources: Sequence[str], ratios: Callable[[Fit], Sequence[float]]) -> Fit:
    """Return the constants under which plans are nearest to published times.

    Args:
        sources: the source of each run. A source counts little more if it has many runs.
        ratios: returns planned over published rates of the runs, under given constants.
    """
    runs_of = Counter(sources)
    weights = [runs_of[source] ** -0.8 for source in sources]
    total_weight = sum(weights)

    def cost(distances: Sequence[float]) -> float:
        total = 0.0
        for weight, ratio in zip(weights, ratios(_make_fit(distances)), strict=True):
            error = abs(math.log(ratio))
            if error > LARGEST_CERTAIN_ERROR:
                error = LARGEST_CERTAIN_ERROR + 0.6 * (error - LARGEST_CERTAIN_ERROR)
            total += weight * error
        return total / total_weight + DISTANCE_COST * sum(distance**2 for distance in distances)

    # Coordinate descent: one constant at a time goes a step up or down, and its step is halved where neither helps.
    distances = [0.0] * (len(CONSTANTS) + 2 * len(GENERATIONS))
    steps = [0.8] * len(distances)
    lowest = cost(distances)
    for _ in range(ROUNDS):
        for index, step in enumerate(steps):
            for moved in (distances[index] + step, distances[index] - step):
                tried = [*distances[:index], moved, *distances[index + 1 :]]
                tried_cost = cost(tried)
                if tried_cost < lowest:
                    distances = tried
                    lowest = tried_cost
                    break
            else:
                steps[index] /= 2
    return _make_fit(distances)
