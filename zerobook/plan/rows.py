"""Rows of a plan, one for every strategy file: whether the run fits, what it holds and sends, how long a step takes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch.groups import find_config_problems
from zerobook.launch.resolve import Hardware, resolve
from zerobook.launch.worker_environment import worker_environment
from zerobook.models.quantise import check_base
from zerobook.plan.gather_schedule import follow_gathers
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import UnplannableModelError, make_job
from zerobook.plan.literature import PaperFigures, paper_figures
from zerobook.plan.memory import PeakMemory, peak_memory
from zerobook.plan.roofline import NODES_RATE_RANGE, RATE_RANGE, StepSeconds, step_seconds
from zerobook.plan.sharding import ShardingSpec, sharding_spec
from zerobook.plan.state_bytes import FP32_BYTES, checkpoint_numbers, count_states, optimizer_numbers
from zerobook.plan.trace import TimelinePoint, Trace
from zerobook.plan.traced_job import TracedJob
from zerobook.plan.traffic import count_sent, count_sent_between_nodes, list_token_transfers, list_transfers
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.training.recipe import Recipe
from zerobook.utils.replaced import replaced
from zerobook.utils.units import size


@dataclass(kw_only=True)
class Row:
    """Plan of one strategy file on one cluster. Amounts are bytes."""

    # stem of the strategy file, such as zero3
    file: str
    # the strategy's name for people, such as ZeRO-3
    name: str
    sharding: ShardingSpec | None = None
    memory: PeakMemory | None = None
    # states on the GPU between the backward pass and the step
    states: float = 0.0
    # the literature's figures
    paper: PaperFigures | None = None
    # bytes that each rank sends in a step, and that leave each node
    sent: float = 0.0
    between: float = 0.0
    # bytes of all checkpoints that are on the disk at once; of one of them if their number is not known
    checkpoint: int = 0
    # number of these checkpoints; None if it follows from the run's length, which is not known
    checkpoints: int | None = 1
    time: StepSeconds | None = None
    tokens_per_step: int = 0
    # lowest and highest tokens per second to expect, relative to the planned ones
    rate_range: tuple[float, float] = (1.0, 1.0)
    # The highest peak to expect exceeds the GPU, so the run may run out of memory.
    tight: bool = False
    # The states alone exceed a GPU, so activations were not traced and there is no time.
    bare: bool = False
    # The run may work, but its figures cannot be computed; ``problems`` has the reason.
    untraced: bool = False
    # matrix products that the time does not include
    uncounted: list[str] = field(default_factory=list)
    # reasons why it cannot run, or cannot be planned; then there are no figures
    problems: list[str] = field(default_factory=list)
    # resources that do not suffice, with the bytes; and what would help
    exceeded: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.problems and not self.exceeded

    @property
    def offloads(self) -> bool:
        """Whether the strategy keeps weights or optimizer state outside of the GPU."""
        return self.sharding is not None and self.sharding.offloads

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.step if self.time else 0.0

    @property
    def rates(self) -> tuple[float, float]:
        """Lowest and highest tokens per second to expect."""
        low, high = self.rate_range
        return low * self.tokens_per_second, high * self.tokens_per_second


def launch_flags(file: str, cluster: Cluster, *, machine_rank: str, address: str) -> list[str]:
    """Return the flags of ``accelerate launch`` for a strategy file on a cluster.

    Args:
        machine_rank: the number of the machine on which the command is run, if there are several.
        address: the address of the first machine.
    """
    stem = Path(file).stem
    ranks = cluster.ranks
    nodes = cluster.nodes
    if stem == "single":
        ranks = nodes = 1
    flags = ["--config_file", file, "--num_processes", str(ranks)]
    if nodes > 1:
        flags += ["--num_machines", str(nodes), "--machine_rank", machine_rank, "--main_process_ip", address]
    # With one replica per node, no weights are sent between nodes.
    if stem == "fsdp_hybrid" and nodes > 1:
        flags += ["--parallelism_config_dp_replicate_size", str(nodes)]
        flags += ["--parallelism_config_dp_shard_size", str(cluster.gpus)]
    return flags


def resolve_launch_plan(file: Path, cluster: Cluster, config: RecipeConfig, sources: ConfigSources) -> LaunchPlan:
    """Resolve a strategy file for a cluster, which may be another than this machine.

    The plan's ``problems`` say where the file, the config and the cluster do not fit together.

    Raises:
        ConfigError: accelerate refuses the file.
    """
    flags = launch_flags(str(file), cluster, machine_rank="0", address="127.0.0.1")
    # accelerate reads a strategy file six times, so replace PyYAML's loader by libyaml's, which is ten times as fast.
    with replaced(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        environ, precision = worker_environment(flags)
    # This variable may be set for the devices of this machine, and the cluster may have others.
    environ.pop("DS_ACCELERATOR", None)
    hardware = Hardware()
    if not cluster.cpu:
        hardware = Hardware(
            gpus=cluster.gpus,
            gpu_name=cluster.device.name,
            bf16=cluster.device.bf16,
            flash_attention=cluster.device.fused,
            no_flash_attention=f"it does not run on {cluster.device.name}",
        )
    return resolve(environ, hardware, config, sources, precision)[0]


def plan_row(file: Path, traced: TracedJob, cluster: Cluster, sources: ConfigSources) -> Row:
    """Return the plan of one strategy file."""
    job = traced.job
    row = Row(file=file.stem, name=file.stem)

    # Stop if the strategy file cannot run, or if its figures cannot be computed.
    try:
        plan = resolve_launch_plan(file, cluster, job.config, sources)
        check_base(job.model_config, job.config, plan)
    except ConfigError as error:
        row.problems = error.problems
        return row
    row.name = plan.name
    row.problems = plan.problems or find_config_problems(plan, job.model_config)
    if row.problems:
        return row
    if plan.is_loaded_in_parts:
        row.untraced = True
        row.problems = ["the memory and the traffic of layers whose parts stay with their processes are not computed"]
        return row
    sharding = sharding_spec(plan, job.model_config, min(cluster.gpus, plan.world_size))

    # A trace takes seconds. It changes nothing if the states alone exceed a GPU.
    row.states = count_states(traced.model, sharding).device.total
    row.bare = row.states > cluster.device.memory
    try:
        if row.bare:
            # Without activations: before the backward pass there are no gradients, and after it all of them.
            trace = Trace(0, [TimelinePoint(0, 0), TimelinePoint(traced.model.trained_elements, 0)])
        else:
            trace = traced.trace(sharding)
    except UnplannableModelError as error:
        row.untraced = True
        row.problems = error.problems
        return row

    row.sharding = sharding
    _set_figures(row, traced, trace, sharding, cluster, job.config.accumulation_steps_on(plan.data_parallel_size))
    check_limits(row, job.config, cluster)
    return row


def _set_figures(
    row: Row, traced: TracedJob, trace: Trace, sharding: ShardingSpec, cluster: Cluster, accumulation: int
) -> None:
    """Set memory, traffic, time and checkpoints of a row."""
    model = traced.model
    config = traced.job.config
    shape = traced.job.shape
    gathers = follow_gathers(model.weights, sharding, trace.visits, accumulation)
    row.memory = peak_memory(
        model,
        sharding,
        trace,
        accumulation=accumulation,
        gpus_per_node=sharding.ranks_per_node,
        on_gpu=not cluster.cpu,
        gathers=gathers,
    )
    row.paper = paper_figures(
        model.parameters,
        model.trained_elements,
        sharding,
        cluster.nodes,
        density=model.density,
        state_numbers=optimizer_numbers(model, sharding),
    )
    transfers = list_transfers(model, sharding, accumulation, gathers)
    transfers += list_token_transfers(traced.job.model_config, shape.rows * shape.source, sharding, accumulation)
    row.sent = count_sent(transfers)
    row.between = count_sent_between_nodes(transfers, cluster.nodes, gloo=cluster.cpu)
    row.checkpoint, row.checkpoints = count_checkpoints(checkpoint_numbers(model, sharding), config)
    if not row.bare:
        row.time = step_seconds(
            trace.work,
            len(trace.visits),
            transfers,
            model,
            sharding,
            cluster,
            accumulation=accumulation,
            gathers=gathers,
            compiled=config.torch_compile,
        )
        # Activations that are moved to host memory cross PCIe twice, and the passes wait for them.
        activation_seconds = 2 * accumulation * trace.host_bytes / cluster.device.pcie
        row.time = replace(row.time, offload=row.time.offload + activation_seconds)
        # The rates of a CPU are assumed, and no published run says how far off they are.
        if not cluster.cpu:
            row.rate_range = NODES_RATE_RANGE if cluster.nodes > 1 else RATE_RANGE
    row.uncounted = list(trace.uncounted)
    row.tokens_per_step = shape.rows * (shape.source + shape.target) * accumulation * sharding.ranks // sharding.token_ranks


def count_checkpoints(numbers: int, config: RecipeConfig) -> tuple[int, int | None]:
    """Return the bytes of the checkpoints that are on the disk at once, and their number, as `Row` has them.

    Args:
        numbers: fp32 numbers in one checkpoint, of weights and optimizer state.
    """
    checkpoint_bytes = FP32_BYTES * numbers
    checkpoints = config.checkpoints_at_once(config.max_train_steps)
    if checkpoints is None:
        return checkpoint_bytes, None
    return checkpoints * checkpoint_bytes, checkpoints


def check_limits(row: Row, config: RecipeConfig, cluster: Cluster) -> None:
    """Set ``exceeded``, ``remedies`` and ``tight`` of a row whose figures are set."""
    assert row.memory is not None and row.sharding is not None
    capacity = cluster.device.memory
    # The run cannot fit if even the lowest peak to expect exceeds the GPU.
    if row.memory.low > capacity:
        _exceeds(row, "GPU memory", row.memory.total, capacity)
    exceeds_at_load = _exceeds(row, "host RAM while loading", row.memory.host_at_load, cluster.host_memory)
    exceeds_host = _exceeds(row, "host RAM", row.memory.host, cluster.host_memory)
    exceeds_disk = _exceeds(row, "disk", row.checkpoint + row.memory.disk, cluster.disk)
    row.tight = row.memory.high > capacity
    # A run whose planned peak exceeds the GPU, but not the lowest peak to expect, may fit. It gets remedies too.
    if row.memory.total > capacity:
        row.remedies += _gpu_remedies(row.memory, row.sharding, config, cluster)
    elif exceeds_at_load:
        # Only without remedies for the GPU, since those save host RAM too.
        loads_one_copy = row.sharding.is_zero3 or row.sharding.rank_0_loads or row.sharding.ranks == 1
        row.remedies.append("more host RAM" if loads_one_copy else "zero3, whose ranks do not load a copy each")
    if exceeds_host:
        row.remedies.append("zero3_nvme" if row.sharding.offload_optimizer == "cpu" else "more host RAM")
    if exceeds_disk:
        # A single checkpoint cannot be limited any further.
        has_fewer = row.checkpoints is None or row.checkpoints > 1
        row.remedies.append("a lower --save_total_limit" if has_fewer else "a larger --disk")


def _exceeds(row: Row, resource: str, needed_bytes: int, available_bytes: int | None) -> bool:
    """Return whether more bytes of a resource are needed than available. If so, add it to the row."""
    if available_bytes is None or needed_bytes <= available_bytes:
        return False
    row.exceeded.append(f"{resource}: {size(needed_bytes)} of {size(available_bytes)}")
    return True


def _gpu_remedies(memory: PeakMemory, sharding: ShardingSpec, config: RecipeConfig, cluster: Cluster) -> list[str]:
    """Return alternatives of which each may make the run fit the GPU."""
    # While it is loaded, each GPU holds all of a quantised base, however many GPUs there are.
    if memory.when == "load":
        return ["larger GPUs"]
    # With the blocks of freed activations that the allocator keeps.
    activations = memory.device.activations * memory.device.reserved / memory.device.allocated
    capacity = cluster.device.memory
    room = capacity - (memory.total - activations)
    rows = config.per_device_train_batch_size
    remedies = []
    if room > LEAST_ROOM * capacity:
        # Smaller activations suffice.
        if memory.when == "evaluation" and config.per_device_eval_batch_size > 1:
            return ["a smaller --per_device_eval_batch_size"]
        if config.activation_checkpointing not in ("full", "offload"):
            remedies.append("--activation_checkpointing")
        if activations / rows < room:
            remedies.append("a smaller --per_device_train_batch_size, with --gradient_accumulation_steps")
        else:
            # The activations of a single row do not fit.
            remedies.append(f"a smaller --{config.length_key}")
        return remedies
    # The states have to become smaller. All GPUs may share them already, and a quantised base cannot be offloaded.
    if sharding.shard_ranks < cluster.ranks:
        remedies.append("more sharding")
    if sharding.offload_param == "none" and config.base_format is None:
        remedies.append("offload")
    # Adapters need a trained model.
    if not (config.trains_adapters or config.initialised_from):
        remedies.append("LoRA")
    return remedies or ["more or larger GPUs"]


# Share of a GPU's memory that states and buffers have to leave free. With less, smaller activations do not help.
LEAST_ROOM = 0.1
# Strategy files, the simplest first. If rates differ by less than `SAME_RATE`, the simpler file comes first, unless it is
# tight.
SIMPLEST = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_hybrid", "zero3", "zero3_hpz")
# Rates whose ratio is below this count as the same, since planned times are no more exact.
SAME_RATE = 1.1


# Settings that change only the micro-batches, and not the model.
SIZES = {"per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"}


def plan_recipe(
    recipe: Recipe[Any], sources: ConfigSources, cluster: Cluster, files: Iterable[Path], models: dict[str, TracedJob]
) -> tuple[TracedJob, list[Row]]:
    """Return the traced job of a recipe, and the rows of the strategy files, the best first.

    Args:
        models: jobs of earlier calls, to which a new one is added. They are used again if no settings but `SIZES` differ, since
            building a model takes a quarter of a plan's time.

    Raises:
        ConfigError: the recipe does not train such a model.
        UnplannableModelError: the model's class cannot be built, or its step cannot be traced under any of the files.
    """
    job = make_job(recipe)
    is_encoder_decoder = bool(job.model_config.is_encoder_decoder)
    if is_encoder_decoder != recipe.encoder_decoder:
        kind = "no encoder-decoder"
        name = "causal_lm"
        if is_encoder_decoder:
            kind = "an encoder-decoder"
            name = "seq2seq_chatbot"
        raise ConfigError(f"{job.name}: it is {kind}, which this recipe does not train. Plan it with recipes/{name}.py.")
    settings = job.config.model_dump_json(exclude=SIZES)
    key = f"{type(recipe)} {cluster.kernels} {settings} {job.model_config.to_json_string(use_diff=False)}"
    if key not in models:
        models[key] = TracedJob.of(job, cluster.kernels)
    traced = replace(models[key], job=job)
    rows = rank_rows([plan_row(file, traced, cluster, sources) for file in files])
    if traced.failure is not None:
        raise traced.failure
    return traced, rows


def rank_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, the best first.

    Rows that fit are sorted by tokens per second. Then come rows that would fit with smaller activations, then rows whose
    states alone do not fit, both by the memory that they need, and at last rows without figures.
    """
    fastest = max((row.tokens_per_second for row in rows if row.fits), default=0.0)

    def sort_key(row: Row) -> tuple:
        if row.problems or row.memory is None:
            return (3, 0.0, 0)
        if not row.fits:
            return (2 if row.bare else 1, float(row.memory.total), 0)
        simplicity = SIMPLEST.index(row.file) if row.file in SIMPLEST else len(SIMPLEST)
        slowdown = fastest / row.tokens_per_second if row.tokens_per_second else 1.0
        return (
            0,
            # A row that fits and has remedies is planned to exceed the GPU, and fits only by its range.
            bool(row.remedies),
            # Rates that are about the same have the same whole number, so that the values after it decide.
            int(math.log(slowdown, SAME_RATE)),
            row.tight,
            row.memory.host > 0,
            simplicity,
            slowdown,
        )

    return sorted(rows, key=sort_key)
