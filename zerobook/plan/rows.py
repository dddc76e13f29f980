"""A row for every strategy file: does it fit, what does it hold and send, how long does it take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerobook.config import RecipeConfig, Resolved
from zerobook.doctor import worker_environment
from zerobook.errors import ConfigError
from zerobook.plan import formulas
from zerobook.plan.hardware import Cluster
from zerobook.plan.holdings import Groups, Weight, hold
from zerobook.plan.job import Job
from zerobook.plan.memory import Memory, memory
from zerobook.plan.roofline import Time, time
from zerobook.plan.spread import Spread, spread
from zerobook.plan.trace import Trace, trace
from zerobook.plan.traffic import between_nodes, flows, sent
from zerobook.plan.units import size
from zerobook.resolve import Hardware, LaunchPlan, resolve

STATE_BYTES = 12
"""A trained parameter in a checkpoint of this project: fp32 weight and two moments."""
TIGHT = 0.92
"""Of a GPU's memory; above it a plan fits on paper, and fragmentation may end the run."""


@dataclass(kw_only=True)
class Row:
    """One strategy file on one cluster. ``problems`` say why it cannot run at all, and then there is nothing else;
    ``over`` what does not fit. ``bare``: the states alone do not fit a GPU, so no activations were traced, and no time."""

    file: str
    name: str
    spread: Spread | None = None
    memory: Memory | None = None
    paper: formulas.States | None = None
    sent: float = 0.0
    between: float = 0.0
    checkpoint: int = 0
    time: Time | None = None
    tokens_per_step: int = 0
    bare: bool = False
    problems: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.problems and not self.over

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.step if self.time else 0.0


@dataclass
class Traced:
    """A job's weights, and the traces of a micro-batch that its strategies need, each made once."""

    job: Job
    weights: list[Weight]
    groups: Groups
    device: str
    _traces: dict[tuple[str, str], Trace] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, device: str) -> Traced:
        weights, groups = job.weights()
        return cls(job, weights, groups, device)

    def trace(self, spread: Spread) -> Trace:
        key = (spread.cast, spread.autocast)
        if key not in self._traces:
            with self.job.made(cast=spread.cast) as (model, batch):
                self._traces[key] = trace(model, batch, self.job.objective.loss, spread.autocast, kernels=self.device)
        return self._traces[key]

    @property
    def parameters(self) -> int:
        return sum(w.numel for w in self.weights)

    @property
    def trained(self) -> int:
        return sum(w.numel for w in self.weights if w.trained)


def launch_plan(file: Path, cluster: Cluster, config: RecipeConfig, sources: Resolved) -> LaunchPlan:
    """Where a strategy file leads on a cluster that need not be here. Disagreements stand in the plan's ``problems``.

    Raises:
        ConfigError: accelerate refuses the file.
    """
    ranks = 1 if file.stem == "single" else cluster.ranks
    nodes = 1 if file.stem == "single" else cluster.nodes
    flags = ["--config_file", str(file), "--num_processes", str(ranks), "--num_machines", str(nodes)]
    if nodes > 1:
        flags += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    environ, precision = worker_environment(flags)
    hardware = Hardware() if cluster.cpu else Hardware(
        gpus=cluster.gpus, gpu_name=cluster.device.name, bf16=cluster.device.bf16, flash_attention=cluster.device.fused
    )  # fmt: skip
    return resolve(environ, hardware, config.model_copy(deep=True), Resolved(sources), precision)


def row(file: Path, traced: Traced, cluster: Cluster, sources: Resolved) -> Row:
    """The plan of one strategy file."""
    job, config = traced.job, traced.job.config
    try:
        plan = launch_plan(file, cluster, config, sources)
    except ConfigError as error:
        return Row(file=file.stem, name=file.stem, problems=error.problems)
    if plan.problems:
        return Row(file=file.stem, name=plan.name, problems=plan.problems)
    accumulation = config.gradient_accumulation_steps
    spreads = spread(plan, job.model_config, min(cluster.gpus, plan.world_size))
    states = sum(hold(traced.weights, traced.groups, spreads).on_device.values())
    bare = states > cluster.device.memory
    micro = Trace(0, 0, 0, [(0, 0), (traced.trained, 0)]) if bare else traced.trace(spreads)
    held = memory(traced.weights, traced.groups, spreads, micro, accumulation=accumulation, gpus_per_node=spreads.node)
    found = flows(traced.weights, traced.groups, spreads, accumulation, packed=config.packing)
    stage = spreads.stage if spreads.kind != "fsdp" else 3
    share = spreads.shard if stage == 3 else spreads.ranks
    keep = config.save_total_limit or max(
        1, (config.max_train_steps or 1) // (config.save_steps or config.max_train_steps or 1)
    )
    made = Row(
        file=file.stem,
        name=plan.name,
        spread=spreads,
        memory=held,
        paper=formulas.model_states(traced.trained, stage, share, mixed=spreads.precision != "no"),
        sent=sent(found),
        between=between_nodes(found, cluster.nodes),
        checkpoint=STATE_BYTES * traced.trained * keep,
        time=None if bare else time(micro.flops, found, traced.groups, spreads, cluster, accumulation=accumulation),
        bare=bare,
        tokens_per_step=config.per_device_train_batch_size * sum(job.lengths) * accumulation * spreads.ranks,
    )  # fmt: skip
    _judge(made, traced, cluster)
    return made


def _judge(made: Row, traced: Traced, cluster: Cluster) -> None:
    """What does not fit, and what would help."""
    assert made.memory is not None and made.spread is not None
    limits = [
        ("GPU memory", made.memory.total, cluster.device.memory),
        ("host RAM while loading", made.memory.host_at_load, cluster.host_memory),
        ("host RAM", made.memory.host, cluster.host_memory),
        ("disk", made.checkpoint + made.memory.disk, cluster.disk),
    ]
    for what, needed, there in limits:
        if there is not None and needed > there:
            made.over.append(f"{what}: {size(needed)} of {size(there)}")
    parts, config = made.memory.device, traced.job.config
    excess = made.memory.total - cluster.device.memory
    if excess > 0:
        if parts["activations"] > excess and not config.activation_checkpointing:
            made.remedies.append("--activation_checkpointing")
        if parts["activations"] > excess and config.per_device_train_batch_size > 1:
            made.remedies.append("a smaller --per_device_train_batch_size, with --gradient_accumulation_steps")
        if not made.remedies:
            if made.spread.stage < 3 or made.spread.offload_param == "none":
                made.remedies.append("more sharding or offload")
            if not traced.job.lora:
                made.remedies.append("LoRA")


SIMPLEST = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_hybrid", "zero3")
"""Strategy files, the one with the least machinery first; where rates are within a twentieth, it goes first."""


def rank(rows: Sequence[Row]) -> list[Row]:
    """The best first: those that fit, by tokens a second; then the others, by how little they lack."""

    def key(made: Row) -> tuple:
        if made.problems or made.memory is None:
            return (2, 0.0, 0)
        if not made.fits:
            return (1, float(made.memory.total), 0)
        place = SIMPLEST.index(made.file) if made.file in SIMPLEST else len(SIMPLEST)
        return (0, -round(math.log(made.tokens_per_second, 1.05)), place)

    return sorted(rows, key=key)
