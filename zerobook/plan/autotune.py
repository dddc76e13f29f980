"""Search for the fastest way to train at a given global batch on this machine.

Candidates are planned first; then the best of them are measured in fresh processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from zerobook.config import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch.deepspeed_json import find_json
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import Job
from zerobook.plan.measure import measure
from zerobook.plan.rows import Row, plan_row
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.traced_job import TracedJob
from zerobook.utils.reading import read_text
from zerobook.utils.yaml_text import load_yaml

MEASURED_CANDIDATES = 6
"""Number of candidates that are measured. The plan ranks hundreds of them well enough to leave out the others."""
KNEE = 0.95
"""Share of the best rate. From the smallest micro-batch that reaches this share, throughput hardly rises."""


@dataclass
class Candidate:
    """A strategy file with a split of the global batch into micro-batches, and its plan."""

    file: Path
    micro_batch: int
    accumulation: int
    checkpointing: bool
    row: Row
    # measured samples a second; 0 where the run failed
    rate: float = 0.0
    failure: str = ""

    @property
    def flags(self) -> dict[str, object]:
        return _batch_flags(self.micro_batch, self.accumulation, self.checkpointing)

    @property
    def description(self) -> str:
        activations = "recomputed" if self.checkpointing else "kept"
        return f"{self.file.stem}, {self.micro_batch} samples a micro-batch x {self.accumulation}, activations {activations}"


def _batch_flags(micro_batch: int, accumulation: int, checkpointing: bool) -> dict[str, object]:
    return {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "activation_checkpointing": "full" if checkpointing else "none",
    }


@dataclass
class Tuned:
    """Result of `autotune`: the measured candidates, the best first, and for the strategy of the best one (micro-batch,
    samples a second)."""

    candidates: list[Candidate]
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and self.candidates[0].rate else None

    @property
    def knee(self) -> int | None:
        """The micro-batch from which the curve is flat; None without a curve."""
        best_rate = max((rate for _, rate in self.curve), default=0.0)
        if not best_rate:
            return None
        return min(micro_batch for micro_batch, rate in self.curve if rate >= KNEE * best_rate)


def split_batch(global_batch: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield each (micro-batch, accumulation) that gives ``global_batch`` on ``ranks``. The micro-batch doubles from 1.

    Raises:
        ConfigError: ``global_batch`` is not divisible by ``ranks``.
    """
    if global_batch % ranks:
        raise ConfigError(f"--global_batch: {global_batch} samples do not divide among {ranks} processes.")
    samples_per_rank = global_batch // ranks
    micro_batch = 1
    while micro_batch <= samples_per_rank:
        if samples_per_rank % micro_batch == 0:
            yield micro_batch, samples_per_rank // micro_batch
        micro_batch *= 2


def list_candidates(
    job: Job, files: Sequence[Path], cluster: Cluster, sources: ConfigSources, global_batch: int
) -> list[Candidate]:
    """Return all candidates that fit, the fastest by plan first."""
    candidates: list[Candidate] = []
    for micro_batch, accumulation in split_batch(global_batch, cluster.ranks):
        for checkpointing in (False, True):
            changes = _batch_flags(micro_batch, accumulation, checkpointing)
            changed_sources = ConfigSources(sources | dict.fromkeys(changes, "autotune"))
            traced = TracedJob.of(job.with_config(**changes), cluster.kernels)
            for file in files:
                row = plan_row(file, traced, cluster, changed_sources)
                # A file for one process would leave the other GPUs idle.
                if row.fits and row.sharding is not None and row.sharding.ranks == cluster.ranks:
                    candidates.append(Candidate(file, micro_batch, accumulation, checkpointing, row))
            if traced.failure is not None:
                raise traced.failure
    return sorted(candidates, key=lambda candidate: -candidate.row.tokens_per_second)


def autotune(
    job: Job,
    recipe: Path,
    flags: Sequence[str],
    files: Sequence[Path],
    cluster: Cluster,
    sources: ConfigSources,
    global_batch: int,
    progress: Callable[[str], None],
) -> Tuned:
    """Measure the best planned candidates, and then every micro-batch of the fastest one's strategy.

    A run that fails, most often because it is out of memory, does not stop the search: each run has its own processes.
    """
    planned = list_candidates(job, files, cluster, sources, global_batch)
    if not planned:
        raise ConfigError(
            f"nothing is planned to fit {cluster.name} at a global batch of {global_batch}. Try zerobook plan --recommend."
        )

    def measure_rate(candidate: Candidate) -> None:
        progress(candidate.description)
        words = list(flags)
        for key, value in candidate.flags.items():
            words += [f"--{key}", str(value)]
        changed_sources = ConfigSources(sources | dict.fromkeys(candidate.flags, "autotune"))
        measurement = measure(candidate.file, job.with_config(**candidate.flags), recipe, words, cluster, changed_sources)
        candidate.failure = measurement.failure
        if not candidate.failure:
            samples = candidate.micro_batch * candidate.accumulation * cluster.ranks
            candidate.rate = samples / measurement.seconds

    # For each strategy and choice of checkpointing, only the split with the best plan; the curve covers the others. On one
    # node, hpZ has the same sharding as ZeRO-3.
    best_splits: dict[tuple[ShardingSpec | None, bool], Candidate] = {}
    for candidate in planned:
        best_splits.setdefault((candidate.row.sharding, candidate.checkpointing), candidate)
    tuned = Tuned(list(best_splits.values())[:MEASURED_CANDIDATES])
    for candidate in tuned.candidates:
        measure_rate(candidate)
    tuned.candidates.sort(key=lambda candidate: -candidate.rate)
    best = tuned.best
    if best is None:
        return tuned

    # The curve: the other splits of the best one's strategy.
    for candidate in planned:
        if candidate.file.stem != best.file.stem or candidate.checkpointing != best.checkpointing:
            continue
        if candidate is not best:
            measure_rate(candidate)
            tuned.candidates.append(candidate)
        if candidate.rate:
            tuned.curve.append((candidate.micro_batch, candidate.rate))
    tuned.candidates.sort(key=lambda candidate: -candidate.rate)
    tuned.curve.sort()
    return tuned


def write_best(best: Candidate, candidates: int, recipe: Path, cluster: Cluster, folder: Path) -> tuple[Path, Path]:
    """Write the best of a number of ``candidates`` as a strategy file and a YAML file of recipe flags for ``--config``. Return
    both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    strategy = folder / f"{best.file.stem}.yaml"
    override = folder / "recipe.yaml"
    strategy.write_text(_with_absolute_json(best.file))
    launch = f"accelerate launch --config_file {strategy} --num_processes {cluster.ranks} {recipe} --config {override}"
    header = (
        f"# Measured on {cluster.name}: {best.rate:.4g} samples a second, {candidates} candidates tried.\n"
        f"# Launch: {launch} ...\n"
    )
    override.write_text(header + yaml.safe_dump(best.flags))
    return strategy, override


def _with_absolute_json(file: Path) -> str:
    """Return a strategy file's text; the DeepSpeed JSON in it with its absolute path, where it is not in the working folder."""
    text = read_text(file)
    deepspeed_file = (load_yaml(text).get("deepspeed_config") or {}).get("deepspeed_config_file")
    return text.replace(deepspeed_file, find_json(deepspeed_file, file)) if deepspeed_file else text
