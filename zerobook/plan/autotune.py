"""Search for the fastest way to train at a given global batch on this machine.

Candidates are planned first; then the best of them are measured in fresh processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from zerobook.config import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch.deepspeed_json import find_json
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import Job
from zerobook.plan.measure import measure
from zerobook.plan.rows import Row, Traced, row
from zerobook.plan.sharding import ShardingSpec
from zerobook.utils.reading import read_text
from zerobook.utils.yaml_text import load_yaml

TRIED = 6
"""Number of candidates that are measured. The plan ranks hundreds of them well enough to leave out the others."""
KNEE = 0.95
"""Share of the best rate. From the smallest micro-batch that reaches this share, throughput hardly rises."""


@dataclass
class Candidate:
    """A strategy file with a split of the global batch into micro-batches. ``rate`` is measured, in samples a second; 0
    where the run failed."""

    file: Path
    micro: int
    accumulation: int
    checkpointing: bool
    planned: Row
    rate: float = 0.0
    died: str = ""

    @property
    def flags(self) -> dict[str, object]:
        return {
            "per_device_train_batch_size": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "activation_checkpointing": "full" if self.checkpointing else "none",
        }

    @property
    def words(self) -> str:
        kept = "recomputed" if self.checkpointing else "kept"
        return f"{self.file.stem}, {self.micro} samples a micro-batch x {self.accumulation}, activations {kept}"


@dataclass
class Tuned:
    """Result of `autotune`. ``tried`` holds the candidates by measured rate, the best first. ``curve`` holds (micro-batch,
    samples a second) for the strategy of the best one. ``knee`` is the micro-batch from which the curve is flat."""

    tried: list[Candidate]
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> Candidate | None:
        return self.tried[0] if self.tried and self.tried[0].rate else None

    @property
    def knee(self) -> int | None:
        most = max((rate for _, rate in self.curve), default=0.0)
        return min((micro for micro, rate in self.curve if rate >= KNEE * most), default=None) if most else None


def cuts(global_batch: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield each (micro-batch, accumulation) that gives ``global_batch`` on ``ranks``. The micro-batch doubles from 1.

    Raises:
        ConfigError: ``global_batch`` is not divisible by ``ranks``.
    """
    if global_batch % ranks:
        raise ConfigError(f"--global_batch: {global_batch} samples do not divide among {ranks} processes.")
    share, micro = global_batch // ranks, 1
    while micro <= share:
        if share % micro == 0:
            yield micro, share // micro
        micro *= 2


def candidates(
    job: Job, files: Sequence[Path], where: Cluster, sources: ConfigSources, global_batch: int
) -> Iterable[Candidate]:
    """Return all candidates that fit, the fastest by plan first."""
    kernels = "cpu" if where.cpu else "cuda"
    found: list[Candidate] = []
    for micro, accumulation in cuts(global_batch, where.ranks):
        for checkpointing in (False, True):
            changed = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation,
                       "activation_checkpointing": "full" if checkpointing else "none"}  # fmt: skip
            given = ConfigSources(sources | dict.fromkeys(changed, "autotune"))
            traced = Traced.of(job.changed(**changed), kernels)
            for file in files:
                planned = row(file, traced, where, given)
                if planned.fits and planned.spread is not None and planned.spread.ranks == where.ranks:
                    found.append(Candidate(file, micro, accumulation, checkpointing, planned))
            if traced.untraced is not None:
                raise traced.untraced
    return sorted(found, key=lambda c: -c.planned.tokens_per_second)


def autotune(
    job: Job,
    recipe: Path,
    flags: Sequence[str],
    files: Sequence[Path],
    where: Cluster,
    sources: ConfigSources,
    global_batch: int,
    progress: Callable[[str], None],
) -> Tuned:
    """Measure the best planned candidates, and then every micro-batch of the fastest one's strategy.

    A run that fails, most often because it is out of memory, does not stop the search: each run has its own processes.
    """
    planned = list(candidates(job, files, where, sources, global_batch))
    if not planned:
        raise ConfigError(
            f"nothing is planned to fit {where.name} at a global batch of {global_batch}. Try zerobook plan --recommend."
        )
    # for each strategy and choice of checkpointing, only the split with the best plan; the curve covers the others
    seen: dict[tuple[ShardingSpec | None, bool], Candidate] = {}
    for candidate in planned:  # on one node, hpZ has the same spread as ZeRO-3
        seen.setdefault((candidate.planned.spread, candidate.checkpointing), candidate)
    tried = list(seen.values())[:TRIED]
    for candidate in tried:
        progress(candidate.words)
        _measure(candidate, job, recipe, flags, where, sources)
    tried.sort(key=lambda c: -c.rate)
    tuned = Tuned(tried)
    if tuned.best is not None:
        like = (tuned.best.file.stem, tuned.best.checkpointing)
        for candidate in [c for c in planned if (c.file.stem, c.checkpointing) == like]:
            if candidate is not tuned.best:
                progress(candidate.words)
                _measure(candidate, job, recipe, flags, where, sources)
                tuned.tried.append(candidate)
            if candidate.rate:
                tuned.curve.append((candidate.micro, candidate.rate))
        tuned.tried.sort(key=lambda c: -c.rate)
        tuned.curve.sort()
    return tuned


def _measure(
    candidate: Candidate, job: Job, recipe: Path, flags: Sequence[str], where: Cluster, sources: ConfigSources
) -> None:
    line = [*flags, *(word for key, value in candidate.flags.items() for word in (f"--{key}", str(value)))]
    given = ConfigSources(sources | dict.fromkeys(candidate.flags, "autotune"))
    found = measure(candidate.file, job.changed(**candidate.flags), recipe, line, where, given)
    candidate.died = found.died
    if not found.died:
        candidate.rate = candidate.micro * candidate.accumulation * where.ranks / found.seconds


def write(tuned: Tuned, recipe: Path, where: Cluster, folder: Path) -> tuple[Path, Path]:
    """Write the best candidate as a strategy file and a YAML file of recipe flags for ``--config``. Return both paths."""
    best = tuned.best
    assert best is not None
    folder.mkdir(parents=True, exist_ok=True)
    strategy, override = folder / f"{best.file.stem}.yaml", folder / "recipe.yaml"
    strategy.write_text(_readable_from_anywhere(best.file))
    header = (
        f"# Measured on {where.name}: {best.rate:.4g} samples a second, {len(tuned.tried)} candidates tried.\n"
        f"# Launch: accelerate launch --config_file {strategy} --num_processes {where.ranks} {recipe} --config {override} ...\n"
    )
    override.write_text(header + yaml.safe_dump(best.flags))
    return strategy, override


def _readable_from_anywhere(file: Path) -> str:
    """Return a strategy file's text; the DeepSpeed JSON in it with its whole path, where it is not in the working folder."""
    text = read_text(file)
    deepspeed_file = (load_yaml(text).get("deepspeed_config") or {}).get("deepspeed_config_file")
    return text.replace(deepspeed_file, find_json(deepspeed_file, file)) if deepspeed_file else text
