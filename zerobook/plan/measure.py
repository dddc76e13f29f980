"""Measurement of a few steps under every strategy file, in fresh processes: what they hold and send, compared with the
plan."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.config import ConfigSources
from zerobook.errors import ConfigError
from zerobook.plan.gather_schedule import gathered
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import Job
from zerobook.plan.memory import memory
from zerobook.plan.rows import launch_plan
from zerobook.plan.sharding import spread
from zerobook.plan.state_bytes import hold
from zerobook.plan.trace import trace
from zerobook.plan.traffic import flows, sent
from zerobook.training.recipe import BatchShape
from zerobook.utils import subprocess_launch
from zerobook.utils.reading import read_json

if TYPE_CHECKING:
    from zerobook.strategy.launch_plan import LaunchPlan

PROBE = Path(__file__).with_name("probe.py")
LIMIT_S = 600.0
"""Default limit in seconds for one strategy's few steps."""
STEPS = 5
"""Steps of a run. The probe measures the last but one, and times the last."""


@dataclass
class Figure:
    """Planned and measured bytes of the rank with the largest error."""

    planned: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error; 0 where both figures are 0."""
        if self.measured == 0:
            return 0.0 if self.planned == 0 else float("inf")
        return self.planned / self.measured - 1


@dataclass
class Measured:
    """Figures of a strategy by name, or in ``died`` how its run failed. ``seconds`` is the time of a step on the slowest
    rank, ``calls`` the collectives in the measured step on rank 0."""

    file: str
    ranks: int
    figures: dict[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0
    calls: int = 0
    died: str = ""


def measure(
    file: Path,
    job: Job,
    recipe: Path,
    flags: Sequence[str],
    where: Cluster,
    sources: ConfigSources,
    limit: float = LIMIT_S,
) -> Measured:
    """Run the recipe for a few steps under one strategy file.

    Args:
        flags: the recipe's flags, as on the command line, including the model's weights and the data.
        limit: seconds that the run may take, including its start.
    """
    try:
        plan = launch_plan(file, where, job.config, sources)
    except ConfigError as error:
        return Measured(file.stem, where.ranks, died=error.problems[0])
    if plan.problems:
        return Measured(file.stem, plan.world_size, died=f"cannot run: {plan.problems[0]}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # nothing is saved, so a full disk is no problem
        ending = ["--max_train_steps", STEPS, "--output_dir", Path(folder) / "run", "--on_low_disk", "warn"]
        line = subprocess_launch.command(["--config_file", str(file)], plan.world_size, PROBE, result, recipe, *flags, *ending)
        code, text = subprocess_launch.run(line, limit)
        found = [result.with_suffix(f".{rank}.json") for rank in range(plan.world_size)]
        if not all(path.exists() for path in found):
            return Measured(file.stem, plan.world_size, died=_why(code, text, limit))
        ranks = [read_json(path) for path in found]
    return _compared(file, job, plan, ranks, where)


def _why(code: int, text: str, limit: float) -> str:
    if code == subprocess_launch.TIMED_OUT:
        return f"it was stopped after {limit:.0f} s"
    return f"exit status {code}: {subprocess_launch.last_error(text)}" if code else "it ended before the step that is measured"


def _compared(file: Path, job: Job, plan: LaunchPlan, ranks: list[dict[str, Any]], where: Cluster) -> Measured:
    weights, groups = job.weights()
    spreads = spread(plan, job.model_config, min(where.gpus, plan.world_size))
    accumulation = job.config.gradient_accumulation_steps
    pairs: dict[str, list[Figure]] = {}
    traced: dict[tuple, Any] = {}
    for rank, found in enumerate(ranks):
        held = hold(weights, groups, spreads, rank)
        labels = found["batch"]["labels"][1] if job.recipe.encoder_decoder else 0
        rows, source = found["batch"]["input_ids"]
        shape = BatchShape(rows, source, labels, found["padded"])
        if shape not in traced:
            with job.made(shape, cast=spreads.cast, precision=spreads.precision) as (model, batch):
                kernels = "cpu" if where.cpu else "cuda"
                traced[shape] = trace(model, batch, job.objective.loss, spreads.autocast, kernels=kernels)
        passes = gathered(weights, spreads, traced[shape].visits, accumulation)
        moved = sent(flows(weights, groups, spreads, accumulation, passes))
        planned = {**held.states, "activations saved": traced[shape].saved, "sent": moved}
        measured = {**found["held"], "activations saved": found["saved"], "sent": sum(found["sent"].values())}
        if "cuda" in found:
            peak = memory(
                weights, groups, spreads, traced[shape],
                accumulation=accumulation, gpus_per_node=spreads.node, passes=passes,
                context=0,  # the allocator does not see it
            )  # fmt: skip
            planned["GPU memory, peak"], measured["GPU memory, peak"] = peak.total, found["cuda"]["allocated"]
        for name, amount in planned.items():
            pairs.setdefault(name, []).append(Figure(amount, measured[name]))
    furthest = {name: max(figures, key=lambda figure: abs(figure.error)) for name, figures in pairs.items()}
    seconds = max(found["seconds"] for found in ranks)
    return Measured(file.stem, plan.world_size, furthest, seconds, sum(ranks[0]["calls"].values()))
