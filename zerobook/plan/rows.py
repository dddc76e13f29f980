"""Rows of a plan, one for every strategy file: whether the run fits, what it holds and sends, how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from zerobook.config import ConfigSources, RecipeConfig
from zerobook.errors import ConfigError
from zerobook.launch.groups import unfit_config
from zerobook.launch.resolve import Hardware, resolve
from zerobook.launch.worker_environment import worker_environment
from zerobook.models.quantise import check_base
from zerobook.plan.gather_schedule import gathered
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import Job, NoClass
from zerobook.plan.job import job as job_of
from zerobook.plan.literature import Paper, paper
from zerobook.plan.memory import Memory, memory
from zerobook.plan.roofline import Time, time
from zerobook.plan.sharding import ShardingSpec, spread
from zerobook.plan.state_bytes import Groups, Weight, hold, saved_numbers, state_ratio, unswappable
from zerobook.plan.trace import Trace, evaluated, trace
from zerobook.plan.traffic import between_nodes, flows, sent
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.training.recipe import BatchShape, Recipe
from zerobook.utils.units import size

TIGHT = 0.92
"""Share of a GPU's memory. Above it, a plan still fits by its figures, but fragmentation may end the run."""


@dataclass(kw_only=True)
class Row:
    """Plan of one strategy file on one cluster. ``problems`` say why it cannot run; then nothing else is set. ``over``
    lists what does not fit. ``states`` are bytes on the GPU between the backward pass and the step; ``paper`` has the
    literature's figures. ``checkpoint`` is the bytes of all ``checkpoints`` that are on the disk at once; where the length
    of the run is not given, ``checkpoints`` is None and ``checkpoint`` is the bytes of one. ``tight``: it fits, but
    fragmentation may end the run. ``bare``: the states alone exceed a GPU, so activations were not traced and there is no
    time. ``untraced``: the run may work, but its step was not traced, and ``problems`` say why. ``uncounted``: matrix
    products that ``time`` does not include. ``by_formula``: nothing was counted or traced; ``formula`` says what was
    computed instead."""

    file: str
    name: str
    spread: ShardingSpec | None = None
    memory: Memory | None = None
    states: float = 0.0
    paper: Paper | None = None
    sent: float = 0.0
    between: float = 0.0
    checkpoint: int = 0
    checkpoints: int | None = 1
    time: Time | None = None
    tokens_per_step: int = 0
    tight: bool = False
    bare: bool = False
    untraced: bool = False
    uncounted: list[str] = field(default_factory=list)
    by_formula: bool = False
    formula: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.problems and not self.over

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.step if self.time else 0.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that rows are about, and the ``shape`` of its micro-batches. ``by_formula`` is the reason why its class
    could not be built; empty where it could."""

    name: str
    parameters: int
    trained: int
    shape: BatchShape
    accumulation: int
    by_formula: str = ""


@dataclass
class Traced:
    """Weights of a job, and the traces of a micro-batch that its strategies need, each made once."""

    job: Job
    weights: list[Weight]
    groups: Groups
    device: str
    _traces: dict[tuple[str, str], Trace | NoClass] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, device: str) -> Traced:
        weights, groups = job.weights()
        return cls(job, weights, groups, device)

    def trace(self, spread: ShardingSpec) -> Trace:
        """Return the trace of a micro-batch with the casts of ``spread``.

        Raises:
            NoClass: the model's step cannot be traced with these casts.
        """
        key = (spread.cast, spread.autocast)
        if key not in self._traces:
            self._traces[key] = self._trace(*key)
        found = self._traces[key]
        if isinstance(found, NoClass):
            raise found
        return found

    def _trace(self, cast: str, autocast: str) -> Trace | NoClass:
        job, evaluation = self.job, self.job.evaluated
        with job.made(cast=cast) as (model, batch):
            try:
                found = trace(model, batch, job.objective.loss, autocast, kernels=self.device)
                if evaluation is not None:
                    held_out = job.recipe.example_batch(evaluation)
                    found.evaluation = evaluated(model, held_out, job.objective.loss, autocast, kernels=self.device)
                return found
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                why: Exception = ValueError(f"its code looks at what tensors hold, as a loop over experts does ({error})")
            except Exception as error:  # some kernels do not accept fake tensors
                why = error
        cannot = "its step cannot be traced on tensors without contents"
        return NoClass(self.job.name, self.job.model_config.to_dict(), why, cannot)

    @property
    def untraced(self) -> NoClass | None:
        """The reason why the model's step cannot be traced, where every trace that was needed failed; otherwise None."""
        failed = [found for found in self._traces.values() if isinstance(found, NoClass)]
        return failed[0] if failed and len(failed) == len(self._traces) else None

    @property
    def parameters(self) -> int:
        return sum(w.parameters for w in self.weights)

    @property
    def density(self) -> float:
        """Stored elements for each parameter; below 1 where weights are packed."""
        return sum(w.numel for w in self.weights) / self.parameters

    @property
    def trained(self) -> int:
        return sum(w.numel for w in self.weights if w.trained)

    @property
    def subject(self) -> Subject:
        job = self.job
        return Subject(
            name=job.name, parameters=self.parameters, trained=self.trained, shape=job.shape,
            accumulation=job.config.gradient_accumulation_steps,
        )  # fmt: skip


def launch_plan(file: Path, cluster: Cluster, config: RecipeConfig, sources: ConfigSources) -> LaunchPlan:
    """Resolve a strategy file for a cluster, which may be another than this machine. The plan's ``problems`` list
    disagreements.

    Raises:
        ConfigError: accelerate refuses the file.
    """
    ranks = 1 if file.stem == "single" else cluster.ranks
    nodes = 1 if file.stem == "single" else cluster.nodes
    flags = ["--config_file", str(file), "--num_processes", str(ranks), "--num_machines", str(nodes)]
    if nodes > 1:
        flags += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    environ, precision = worker_environment(flags)
    environ.pop("DS_ACCELERATOR", None)  # it describes this machine, not the planned one
    hardware = Hardware() if cluster.cpu else Hardware(
        gpus=cluster.gpus, gpu_name=cluster.device.name, bf16=cluster.device.bf16, flash_attention=cluster.device.fused,
        no_flash_attention=f"it does not run on {cluster.device.name}",
    )  # fmt: skip
    return resolve(environ, hardware, config, sources, precision)[0]


def unplanned(plan: LaunchPlan) -> str | None:
    """Return why no figures are computed for a strategy that could run; None where they are."""
    if plan.loaded_in_parts:
        return "the memory and the traffic of layers whose parts stay with their processes are not computed"
    if plan.sequence * plan.context == 1:
        return None
    like = "zero3" if plan.zero_stage == 3 else "fsdp" if plan.kind == "fsdp" else f"zero{plan.zero_stage}"
    return (
        "the activations of split rows, and the traffic of their attention, are not computed. Weights, gradients and optimizer "
        f"state are those of {like} on as many processes"
    )


def row(file: Path, traced: Traced, cluster: Cluster, sources: ConfigSources) -> Row:
    """Return the plan of one strategy file."""
    job, config = traced.job, traced.job.config
    try:
        plan = launch_plan(file, cluster, config, sources)
        check_base(job.model_config, config, plan)
    except ConfigError as error:
        return Row(file=file.stem, name=file.stem, problems=error.problems)
    if plan.problems:
        return Row(file=file.stem, name=plan.name, problems=plan.problems)
    if unfit := unfit_config(plan, job.model_config):
        return Row(file=file.stem, name=plan.name, problems=unfit)
    if why := unplanned(plan):
        return Row(file=file.stem, name=plan.name, untraced=True, problems=[why])
    accumulation = config.accumulation_on(plan.data_parallel_size)
    spreads = spread(plan, job.model_config, min(cluster.gpus, plan.world_size))
    problems = unswappable(traced.weights, traced.groups, spreads)
    if problems:
        return Row(file=file.stem, name=plan.name, problems=problems)
    states = sum(hold(traced.weights, traced.groups, spreads).on_device.values())
    bare = states > cluster.device.memory
    try:
        micro = Trace(0, 0, 0, [(0, 0), (traced.trained, 0)]) if bare else traced.trace(spreads)
    except NoClass as error:
        return Row(file=file.stem, name=plan.name, untraced=True, problems=error.problems)
    passes = gathered(traced.weights, spreads, micro.visits, accumulation)
    held = memory(
        traced.weights, traced.groups, spreads, micro,
        accumulation=accumulation, gpus_per_node=spreads.node, context=cluster.context, passes=passes,
    )  # fmt: skip
    states_each = state_ratio(traced.groups, spreads)
    found = flows(traced.weights, traced.groups, spreads, accumulation, passes)
    made = Row(
        file=file.stem,
        name=plan.name,
        spread=spreads,
        memory=held,
        states=states,
        paper=paper(traced.parameters, traced.trained, spreads, cluster.nodes, density=traced.density, states=states_each),
        sent=sent(found),
        between=between_nodes(found, cluster.nodes, gloo=cluster.cpu),
        **checkpoints(saved_numbers(traced.groups, spreads), config),
        time=None if bare else time(
            micro.flops, found, traced.groups, spreads, cluster,
            accumulation=accumulation, weights=traced.weights, passes=passes,
        ),
        bare=bare,
        uncounted=list(micro.uncounted),
        tokens_per_step=job.shape.rows * (job.shape.source + job.shape.target) * accumulation * spreads.ranks,
    )  # fmt: skip
    judge(made, job.recipe, cluster)
    return made


def checkpoints(numbers: int, config: RecipeConfig) -> dict[str, Any]:
    """Return `Row.checkpoint` and `Row.checkpoints`, with ``numbers`` fp32 numbers in one checkpoint: weights and optimizer
    state."""
    one = 4 * numbers
    most = config.checkpoints_at_once(config.max_train_steps)
    return {"checkpoint": one if most is None else most * one, "checkpoints": most}


def judge(made: Row, recipe: Recipe[Any], cluster: Cluster) -> None:
    """Add to a row what does not fit, and what would help."""
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
    made.tight = made.memory.total > TIGHT * cluster.device.memory
    over = {words.partition(":")[0] for words in made.over}
    if "GPU memory" in over:
        made.remedies += _for_the_gpu(made, recipe, made.memory.total - cluster.device.memory)
    elif "host RAM while loading" in over:  # sharding helps here too
        loads_once = made.spread.kind == "deepspeed" and made.spread.stage == 3
        made.remedies.append("more host RAM" if loads_once else "zero3, whose ranks do not load a copy each")
    if "host RAM" in over:
        made.remedies.append("zero3_nvme" if made.spread.offload_optimizer == "cpu" else "more host RAM")
    if "disk" in over:
        fewer = made.checkpoints is None or made.checkpoints > 1
        made.remedies.append("a lower --save_total_limit" if fewer else "a larger --disk")


def _for_the_gpu(made: Row, recipe: Recipe[Any], excess: int) -> list[str]:
    """Return what would save ``excess`` bytes of a GPU's memory."""
    assert made.memory is not None and made.spread is not None
    config = recipe.config
    activations, rows = made.memory.device["activations"], config.per_device_train_batch_size
    found = []
    if activations > excess:
        if made.memory.when == "evaluation" and config.per_device_eval_batch_size > 1:
            return ["a smaller --per_device_eval_batch_size"]
        if config.activation_checkpointing not in ("full", "offload"):
            found.append("--activation_checkpointing")
        if activations * (rows - 1) / rows > excess:
            found.append("a smaller --per_device_train_batch_size, with --gradient_accumulation_steps")
        else:  # one row alone is too long
            found.append(f"a smaller --{config.length_key}")
        return found
    if made.spread.stage < 3 or made.spread.offload_param == "none":
        found.append("more sharding or offload")
    if not (config.trains_adapters or config.initialised_from):  # adapters need trained weights
        found.append("LoRA")
    return found or ["more or larger GPUs"]


SIMPLEST = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_hybrid", "zero3", "zero3_hpz")
"""Strategy files, the simplest first. Where rates differ by less than about a twentieth, the simpler file comes first,
unless it is tight."""


def planned(recipe: Recipe[Any], sources: ConfigSources, cluster: Cluster, files: Iterable[Path]) -> tuple[Traced, list[Row]]:
    """Return the traced job of a recipe, and the rows of the strategy files, the best first.

    Raises:
        ConfigError: the recipe does not train such a model.
        NoClass: its class cannot be built, or its step cannot be traced.
    """
    made = job_of(recipe)
    encoder_decoder = bool(made.model_config.is_encoder_decoder)
    if encoder_decoder != recipe.encoder_decoder:
        kind, name = ("an encoder-decoder", "seq2seq_chatbot") if encoder_decoder else ("no encoder-decoder", "causal_lm")
        raise ConfigError(f"{made.name}: it is {kind}, which this recipe does not train. Plan it with recipes/{name}.py.")
    traced = Traced.of(made, "cpu" if cluster.cpu else "cuda")
    rows = rank([row(file, traced, cluster, sources) for file in files])
    if traced.untraced is not None:
        raise traced.untraced
    return traced, rows


def rank(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, the best first: rows that fit, by tokens a second; then the others, by how much memory they need.
    Rows whose states alone do not fit come after rows that would fit with smaller activations."""

    def key(made: Row) -> tuple:
        if made.problems or made.memory is None:
            return (3, 0.0, 0)
        if not made.fits:
            return (2 if made.bare else 1, float(made.memory.total), 0)
        place = SIMPLEST.index(made.file) if made.file in SIMPLEST else len(SIMPLEST)
        return (0, -round(math.log(made.tokens_per_second, 1.05)), made.tight, place)

    return sorted(rows, key=key)
