"""Measurement of a few steps under a strategy file, in fresh processes: the bytes that the ranks hold and send, compared with
the plan."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.plan.gather_schedule import follow_gathers
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import Job
from zerobook.plan.memory import peak_memory
from zerobook.plan.rows import resolve_launch_plan
from zerobook.plan.sharding import sharding_spec
from zerobook.plan.state_bytes import count_states
from zerobook.plan.trace import Trace, trace_step
from zerobook.plan.traffic import count_sent, list_transfers
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.training.recipe import BatchShape
from zerobook.utils import subprocess_launch
from zerobook.utils.reading import read_json

PROBE = Path(__file__).with_name("probe.py")
# Default limit in seconds for one strategy's few steps.
LIMIT_S = 600.0
# Steps of a run. The probe measures the last but one, and times the last.
STEPS = 5


@dataclass
class Figure:
    """Planned and measured bytes of one kind, on the rank with the largest error."""

    planned: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error; 0 if both figures are 0."""
        if self.measured == 0:
            return 0.0 if self.planned == 0 else float("inf")
        return self.planned / self.measured - 1


@dataclass
class Measurement:
    """Result of a strategy's run: its figures by name, or in ``failure`` a sentence that says how it failed."""

    # stem of the strategy file
    file: str
    ranks: int
    figures: dict[str, Figure] = field(default_factory=dict)
    # seconds of a step on the slowest rank
    seconds: float = 0.0
    # collectives in the measured step on rank 0
    calls: int = 0
    failure: str = ""


def measure(
    file: Path,
    job: Job,
    recipe: Path,
    flags: Sequence[str],
    cluster: Cluster,
    sources: ConfigSources,
    limit_s: float = LIMIT_S,
) -> Measurement:
    """Run the recipe for a few steps under one strategy file, and return its figures beside the planned ones.

    Args:
        flags: the recipe's flags, as on the command line, including the model's weights and the data.
        limit_s: seconds that the run may take, including its start.
    """
    try:
        plan = resolve_launch_plan(file, cluster, job.config, sources)
    except ConfigError as error:
        return Measurement(file.stem, cluster.ranks, failure=error.problems[0])
    measurement = Measurement(file.stem, plan.world_size)
    if plan.problems:
        measurement.failure = f"cannot run: {plan.problems[0]}"
        return measurement
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # Nothing is saved, so a full disk is not a problem.
        run_flags = ["--max_train_steps", STEPS, "--output_dir", Path(folder) / "run", "--on_low_disk", "warn"]
        command = subprocess_launch.command(
            ["--config_file", str(file)], plan.world_size, PROBE, result, recipe, *flags, *run_flags
        )
        code, output = subprocess_launch.run(command, limit_s)
        results = [result.with_suffix(f".{rank}.json") for rank in range(plan.world_size)]
        # A rank writes its result at the end of its run, so one that failed has none.
        if not all(path.exists() for path in results):
            measurement.failure = _describe_failure(code, output, limit_s)
            return measurement
        probes = [read_json(path) for path in results]
    measurement.figures = _compare(job, plan, probes, cluster)
    measurement.seconds = max(probe["seconds"] for probe in probes)
    measurement.calls = sum(probes[0]["calls"].values())
    return measurement


def _describe_failure(code: int, output: str, limit_s: float) -> str:
    if code == subprocess_launch.TIMED_OUT:
        return f"it was stopped after {limit_s:.0f} s"
    if code:
        return f"exit status {code}: {subprocess_launch.last_error(output)}"
    return "it ended before the step that is measured"


def _compare(job: Job, plan: LaunchPlan, probes: list[dict[str, Any]], cluster: Cluster) -> dict[str, Figure]:
    """Return each figure of the rank on which it is furthest from the plan.

    Args:
        probes: the results of `zerobook.plan.probe`, by rank.
    """
    model = job.weights()
    sharding = sharding_spec(plan, job.model_config, min(cluster.gpus, plan.world_size))
    accumulation = job.config.accumulation_steps_on(plan.data_parallel_size)
    furthest: dict[str, Figure] = {}
    traces: dict[BatchShape, Trace] = {}
    for rank, probe in enumerate(probes):
        # Ranks can have micro-batches of different lengths.
        label_length = 0
        if job.recipe.encoder_decoder:
            label_length = probe["batch"]["labels"][1]
        rows, length = probe["batch"]["input_ids"]
        shape = BatchShape(rows, length, label_length, probe["padded"])
        # A trace takes seconds, and most ranks have the same shape.
        if shape not in traces:
            built = job.on_device(cluster.kernels).build(shape, cast=sharding.cast, precision=sharding.precision)
            with built as (module, batch):
                traces[shape] = trace_step(module, batch, job.objective.loss, sharding.autocast, device=cluster.kernels)
        trace = traces[shape]
        gathers = follow_gathers(model.weights, sharding, trace.visits, accumulation)
        planned: dict[str, float] = asdict(count_states(model, sharding, rank).live)
        planned["activations saved"] = trace.saved_bytes
        planned["sent"] = count_sent(list_transfers(model, sharding, accumulation, gathers))
        measured = {**probe["held"], "activations saved": probe["saved"], "sent": sum(probe["sent"].values())}
        if "cuda" in probe:
            peak = peak_memory(
                model,
                sharding,
                trace,
                accumulation=accumulation,
                gpus_per_node=sharding.ranks_per_node,
                gathers=gathers,
            )
            planned["GPU memory, peak"] = peak.device.allocated
            measured["GPU memory, peak"] = probe["cuda"]["allocated"]
        for name, planned_bytes in planned.items():
            figure = Figure(planned_bytes, measured[name])
            if name not in furthest or abs(figure.error) > abs(furthest[name].error):
                furthest[name] = figure
    return furthest
