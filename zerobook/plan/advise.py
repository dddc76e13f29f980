"""Advice on a run, for ``zerobook plan --recommend`` and ``zerobook recipe``: the fastest candidate that fits a cluster.

A candidate is a strategy file with settings: the micro-batch, activation checkpointing, the optimizer, and the training
method. Candidates are compared by the rates of their plans, except for two rules: a run that fits with room is better than one
that may run out of memory, and if two rates are about the same, the simpler strategy is better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources, changed
from zerobook.errors import ConfigError
from zerobook.plan.hardware import Cluster
from zerobook.plan.rows import SAME_RATE, Row, plan_recipe, rank_rows
from zerobook.plan.traced_job import TracedJob
from zerobook.plan.whole_run import WholeRun, plan_whole_run
from zerobook.training.recipe import Recipe
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.bars import tqdm
from zerobook.utils.shipped import shipped
from zerobook.utils.units import duration, size, with_range

# Method -> its name in messages, in the order in which they are tried.
METHODS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
# Largest micro-batch to try, in tokens, unless the user sets the micro-batch.
MICRO_BATCH_TOKENS = 8192
# Activation checkpointing that is tried, from the fastest to the one with the least memory.
CHECKPOINTING = ("none", "full", "offload")
# Matches the names of strategy files that keep weights or optimizer state outside of the GPU.
_OFFLOADS = re.compile("offload|nvme")
# Matches the names of strategy files whose ranks share the tokens of a row.
_SHARES_ROWS = re.compile("context|sequence|tensor")
_LORA_RECIPE = "lora_finetune"
_ACTIVATIONS = {"none": "activations kept", "full": "activations recomputed", "offload": "activations recomputed and offloaded"}


@dataclass(frozen=True)
class Request:
    """A run to be advised on: a recipe with its config, the source of each value, and the strategy files to compare."""

    # the recipe's file, such as recipes/causal_lm.py
    file: Path
    recipe: Recipe[Any]
    sources: ConfigSources
    files: list[Path]
    # method -> flags to add if a run is planned with this method
    settings: Callable[[str], dict[str, Any]] = lambda method: {}
    # tokens of the complete run; None: its length follows from the config and its data
    tokens: int | None = None
    # GPU -> dollars an hour; "" for every GPU
    prices: dict[str, float] = field(default_factory=dict)
    # tokens of each sample of the data, if they are known
    lengths: np.ndarray | None = None
    # models that were built, see `plan_recipe`
    models: dict[str, TracedJob] = field(default_factory=dict)

    @property
    def method(self) -> str:
        config = self.recipe.config
        if not config.trains_adapters:
            return "full"
        return "qlora" if config.base_format == "nf4" else "lora"

    def method_settings(self, method: str) -> tuple[str | None, dict[str, Any]]:
        """Return the recipe that trains by this method, and the flags for it. None stands for the request's recipe; another one
        is named by the stem of its file."""
        config = self.recipe.config
        settings = self.settings(method)
        recipe = None
        # The recipe for encoder-decoders trains adapters by a flag. For other models there is a recipe with adapters.
        if method != "full" and not config.trains_adapters:
            if self.recipe.encoder_decoder:
                settings = {"adapter": "lora"} | settings
            else:
                recipe = _LORA_RECIPE
                # The other recipe has another name for the length of a row.
                settings = {"max_seq_length": config.row_length} | settings
        if method == "qlora" and config.base_format is None:
            settings = {"load_in_4bit": True} | settings
        return recipe, settings

    def recipe_file(self, recipe: str | None) -> Path:
        """Return the file of a shipped recipe; None stands for the request's."""
        # A file of this name in the working folder is not run, since the user did not name it.
        return self.file if recipe is None else shipped(f"recipes/{recipe}.py")

    def plan(
        self, recipe: str | None, flags: dict[str, Any], cluster: Cluster, files: list[Path]
    ) -> tuple[TracedJob, list[Row]]:
        """Return the traced job and the plans of strategy files, with ``flags`` added to the request's.

        Args:
            recipe: the stem of a shipped recipe; None stands for the request's.

        Raises:
            ConfigError: the flags do not suit the recipe or the model.
        """
        recipe_type = type(self.recipe)
        if recipe is not None:
            recipe_type = recipe_class(str(self.recipe_file(recipe)))
        config, sources = changed(self.recipe.config, self.sources, recipe_type.config_class, flags)
        description = f"planning micro-batch {config.per_device_train_batch_size}, {_describe_activations(config)}"
        progress = tqdm(files, desc=description, unit=" files", leave=False)
        return plan_recipe(recipe_type(config), sources, cluster, progress, self.models)

    def on(self, cluster: Cluster) -> Request:
        """Return the request in the half precision of a cluster's GPUs, which is faster than fp32, unless the user set a
        precision."""
        if cluster.cpu or self.sources.is_set("mixed_precision"):
            return self
        config = self.recipe.config.model_copy(update={"mixed_precision": cluster.half_precision})
        return replace(self, recipe=type(self.recipe)(config))

    def whole_run(self, candidate: Candidate, cluster: Cluster) -> WholeRun | None:
        """Return the length and the cost of a candidate's run, if they are known."""
        price = self.prices.get(cluster.device.name, self.prices.get(""))
        return plan_whole_run(candidate.row, candidate.config, candidate.samples, cluster, self.tokens, price, self.lengths)

    @property
    def can_pack(self) -> bool:
        """Whether the adviser may turn packing on: the user has not decided about it, and no other setting excludes it."""
        config = self.recipe.config
        is_excluded = config.rows_shared_by or config.group_by_length or self.recipe.encoder_decoder
        return not (is_excluded or self.sources.is_set("packing"))


@dataclass(frozen=True)
class Candidate:
    """A run under one strategy file, with its plan."""

    method: str
    # the stem of a shipped recipe; None: the request's recipe
    recipe: str | None
    # flags to add to the request's
    flags: dict[str, Any]
    traced: TracedJob
    row: Row

    @property
    def config(self) -> RecipeConfig:
        return self.traced.job.config

    @property
    def readers(self) -> int:
        """Number of processes that read different samples. A group that shares rows counts once."""
        assert self.row.sharding is not None
        return self.row.sharding.ranks // self.row.sharding.token_ranks

    @property
    def samples(self) -> int:
        """Samples of a step."""
        readers = self.readers
        return self.config.per_device_train_batch_size * self.config.accumulation_steps_on(readers) * readers

    def describe_batch(self) -> str:
        config = self.config
        shape = self.traced.job.shape
        readers = self.readers
        accumulation = config.accumulation_steps_on(readers)
        # Processes of a group that share rows are one reader.
        assert self.row.sharding is not None
        kind = "processes" if self.row.sharding.token_ranks == 1 else "groups of processes"
        batch = f"{config.per_device_train_batch_size} micro x {accumulation} accumulation x {readers} {kind}"
        lengths = f"{shape.source:,} tokens"
        if shape.target:
            lengths += f" and {shape.target:,} of target"
        unit = "packed rows" if config.packing else "samples"
        return f"{batch} = {self.samples} {unit} of {lengths}"

    def describe_memory(self, cluster: Cluster) -> str:
        assert self.row.memory is not None
        memory = f"{self.row.memory.total / 1e9:.1f} of {cluster.device.memory / 1e9:.0f} GB a GPU"
        if self.row.tight:
            memory += f", which is tight: it may need up to {self.row.memory.high / 1e9:.1f}"
        # The plan does not compare host RAM with the machine's if its size is not given, so the reader has to.
        if self.row.memory.host:
            memory += f", and {size(self.row.memory.host)} of host RAM a node"
        return memory

    def describe_time(self) -> str:
        assert self.row.time is not None
        rate = with_range(self.row.tokens_per_second, self.row.rates, "{:,.0f}".format)
        return f"{duration(self.row.time.step)} a step, {rate} tokens/s"

    def describe(self, cluster: Cluster) -> str:
        """Return the strategy, the settings, the memory and the rate in one line."""
        assert self.row.memory is not None
        config = self.config
        words = [self.row.file, METHODS[self.method], f"micro-batch {config.per_device_train_batch_size}"]
        words.append(_describe_activations(config))
        if config.optimizer != "adamw":
            words.append(config.optimizer)
        return f"{', '.join(words)}: {self.describe_memory(cluster)}; {self.describe_time()}"


def _describe_activations(config: RecipeConfig) -> str:
    checkpointing = config.activation_checkpointing
    return _ACTIVATIONS.get(checkpointing, f"activation_checkpointing {checkpointing}")


@dataclass(frozen=True)
class Advice:
    """The best candidate, alternatives to it, and why methods do not fit."""

    # None: nothing fits
    best: Candidate | None
    # the fastest other candidate of the same method
    second: Candidate | None
    # the best candidate of another method, if the best one of all needs offload
    alternative: Candidate | None
    # method of which nothing fits -> what the strategy that is nearest to fitting lacks
    shortfalls: dict[str, str]
    # length and cost of the best candidate's run; None: its length is not known
    run: WholeRun | None = None

    def describe(self, cluster: Cluster) -> list[tuple[str, str]]:
        """Return (heading, text) for each part of the advice."""
        lines = [("does not fit", f"{METHODS[method]}: {shortfall}") for method, shortfall in self.shortfalls.items()]
        best = self.best
        if best is None:
            return lines
        assert best.row.memory is not None and best.row.time is not None and best.row.sharding is not None
        config = best.config
        precision: str = config.mixed_precision or "no"
        # fp16 can overflow, so a user wants to know why it was chosen.
        if precision == "fp16":
            precision += f"; {cluster.device.name} has no bf16"
        if cluster.device.fused:
            precision += "; flash attention where the package is installed"
        lines += [
            ("strategy", f"accelerate_configs/{best.row.file}.yaml ({best.row.name})"),
            ("method", METHODS[best.method]),
            ("precision", precision),
            ("batch", best.describe_batch()),
            ("activations", _describe_activations(config)),
            ("optimizer", config.optimizer),
            ("memory", f"{best.describe_memory(cluster)}, planned for the fullest at its peak"),
            ("time", f"{best.describe_time()}, planned"),
        ]
        if self.run is not None:
            lines.append(("run", self.run.describe()))
        if best.row.memory.host_at_load:
            lines.append(("host RAM", f"{size(best.row.memory.host_at_load)} a node while the model is loaded"))
        if self.second is not None:
            change = self.second.row.tokens_per_second / best.row.tokens_per_second - 1
            lines.append(("second best", f"{self.second.describe(cluster)} ({change:+.0%})"))
        if self.alternative is not None:
            lines.append(("alternative", self.alternative.describe(cluster)))
        return lines

    def record(self) -> dict[str, Any]:
        """Return the advice as JSON values."""
        best = self.best
        values: dict[str, Any] = {"strategy": None, "recipe": None, "flags": {}, "does_not_fit": self.shortfalls}
        if best is not None and best.row.memory is not None:
            values |= {
                "strategy": best.row.file,
                "recipe": best.recipe,
                "method": best.method,
                "flags": best.flags,
                "memory": best.row.memory.total,
                "memory_range": (best.row.memory.low, best.row.memory.high),
                "tokens_per_second": best.row.tokens_per_second,
                "tokens_per_second_range": best.row.rates,
            }
        if self.run is not None:
            values["run"] = asdict(self.run)
        return values


class _Search:
    """The search for the runs of one method that fit."""

    def __init__(self, request: Request, cluster: Cluster, method: str):
        self.request = request
        self.cluster = cluster
        self.method = method
        self.recipe, self.settings = request.method_settings(method)
        # candidates that fit with room, and candidates that may run out of memory
        self.roomy: list[Candidate] = []
        self.tight: list[Candidate] = []
        # plans that do not fit
        self.misfits: list[Row] = []

    def run(self) -> list[Candidate]:
        """Return the fastest candidate of each strategy that fits, the best first; those that are tight come last.

        Raises:
            ConfigError: the method does not suit the model.
        """
        offloading = [file for file in self.request.files if _OFFLOADS.search(file.stem)]
        sharding = [file for file in self.request.files if file not in offloading]
        # `single` would leave other GPUs idle, and one GPU has no other to share with.
        useful = [file for file in sharding if (file.stem == "single") == (self.cluster.ranks == 1)]
        # On one node hpZ is off, so its file is that of ZeRO-3 again.
        if self.cluster.nodes == 1:
            useful = [file for file in useful if file.stem != "zero3_hpz"] or useful
        # The user may have named no other files.
        useful = useful or sharding
        # Sharing each row among ranks costs traffic. So these files come last, and are planned only with settings with which
        # they could be faster than all others.
        sharing_rows = [file for file in useful if _SHARES_ROWS.search(file.stem)]
        self._plan_strategies([file for file in useful if file not in sharing_rows], {})
        self._plan_strategies(sharing_rows, {})
        # Offload and states of 8 bits are compared only if nothing fits without them.
        if not self.roomy:
            self._plan_strategies(offloading, {})
            is_default = self.request.recipe.config.optimizer == "adamw" and not self.request.sources.is_set("optimizer")
            if self.method == "full" and is_default:
                self._plan_8_bit_states([file for file in useful if file.stem in ("single", "ddp")])
        return self._rank_fastest()

    def _plan_8_bit_states(self, files: list[Path]) -> None:
        """Plan with Adam's states in 8 bits. They are an approximation, so only clearly faster candidates become part of the
        search."""
        candidates = list(self.roomy)
        fastest = max((candidate.row.tokens_per_second for candidate in candidates), default=0.0)
        self._plan_strategies(files, {"optimizer": "adamw_8bit"})
        # The new candidates stand behind those that were there.
        for candidate in self.roomy[len(candidates) :]:
            if candidate.row.tokens_per_second > SAME_RATE * fastest:
                candidates.append(candidate)
        self.roomy = candidates

    def _rank_fastest(self) -> list[Candidate]:
        """Return the fastest candidate of each strategy and optimizer, the best first; those that are tight come last."""
        best: dict[tuple[str, str], Candidate] = {}
        for candidate in [*self.roomy, *self.tight]:
            key = (candidate.row.file, candidate.config.optimizer)
            # Candidates stand in the order in which they were planned. A later one saves memory where the first need not, so it
            # replaces the first only if it is clearly faster.
            is_faster = key in best and candidate.row.tokens_per_second > SAME_RATE * best[key].row.tokens_per_second
            if key not in best or (is_faster and not candidate.row.tight):
                best[key] = candidate
        candidates_by_row = {id(candidate.row): candidate for candidate in best.values()}
        ranked_rows = rank_rows([candidate.row for candidate in best.values()])
        ranked = [candidates_by_row[id(row)] for row in ranked_rows]
        # Sorting keeps the order of the candidates that fit with room, and of those that are tight.
        return sorted(ranked, key=lambda candidate: candidate.row.tight)

    def _plan_strategies(self, files: list[Path], more_settings: dict[str, Any]) -> None:
        """Plan strategy files with one setting after another, the fastest settings first, and collect what fits.

        A plan is left out if it cannot give the fastest candidate. Smaller micro-batches and recomputed activations are never
        faster, so the rate of an earlier plan of the strategy is the highest that it can reach. A plan is also left out if its
        micro-batch cannot fit: activations grow at least in proportion to the micro-batch.
        """
        first = self.request.recipe.config.activation_checkpointing
        # A setting that is not in the list, such as ``every:2``, keeps more than ``full`` does.
        stronger: tuple[str, ...] = CHECKPOINTING[1:]
        if first in CHECKPOINTING:
            stronger = CHECKPOINTING[CHECKPOINTING.index(first) + 1 :]
        remaining = {file.stem: file for file in files}
        # strategy -> the rate of its first plan
        first_rates: dict[str, float] = {}
        for checkpointing in (first, *stronger):
            # strategy -> the highest rate that it can reach with this checkpointing
            highest_rates = dict(first_rates)
            # strategy -> the largest micro-batch that may fit with this checkpointing
            largest_sizes: dict[str, float] = {}
            for micro_batch in self._list_micro_batches():
                fastest = max((candidate.row.tokens_per_second for candidate in self.roomy), default=0.0)
                files_to_plan = []
                for name, file in remaining.items():
                    may_be_fastest = highest_rates.get(name, math.inf) > SAME_RATE * fastest
                    if may_be_fastest and micro_batch <= largest_sizes.get(name, math.inf):
                        files_to_plan.append(file)
                if not files_to_plan:
                    continue
                flags = self._make_flags(checkpointing, micro_batch) | more_settings
                traced, rows = self.request.plan(self.recipe, flags, self.cluster, files_to_plan)
                for row in rows:
                    self._add_row(row, traced, flags)
                    if not _may_fit_with_less(row):
                        del remaining[row.file]
                        continue
                    highest_rates[row.file] = row.tokens_per_second
                    first_rates.setdefault(row.file, row.tokens_per_second)
                    # If this micro-batch fits with room, no smaller one is planned.
                    is_roomy = row.fits and not row.tight
                    largest_sizes[row.file] = 0 if is_roomy else micro_batch * self._fitting_share(row)

    def _fitting_share(self, row: Row) -> float:
        """Return the share of a planned row's activations for which the GPU has room beside everything else."""
        assert row.memory is not None
        activations = row.memory.device.activations
        return (self.cluster.device.memory - row.memory.total + activations) / max(activations, 1)

    def _list_micro_batches(self) -> list[int]:
        """Return the micro-batches to try, the largest first. Each is at most half of the one before, and divides a rank's
        samples of a step."""
        config = self.request.recipe.config
        shape = self.request.recipe.batch_shape()
        samples = config.per_device_train_batch_size * config.gradient_accumulation_steps
        if config.global_batch_size is not None:
            samples = max(1, config.global_batch_size // self.cluster.ranks)
        largest = max(1, MICRO_BATCH_TOKENS // (shape.source + shape.target))
        if self.request.sources.is_set("per_device_train_batch_size"):
            largest = config.per_device_train_batch_size
        sizes: list[int] = []
        for micro_batch in range(min(largest, samples), 0, -1):
            if samples % micro_batch == 0 and (not sizes or 2 * micro_batch <= sizes[-1]):
                sizes.append(micro_batch)
        return sizes

    def _make_flags(self, checkpointing: str, micro_batch: int) -> dict[str, Any]:
        config = self.request.recipe.config
        flags: dict[str, Any] = {
            "activation_checkpointing": checkpointing,
            "per_device_train_batch_size": micro_batch,
            "per_device_eval_batch_size": min(micro_batch, config.per_device_eval_batch_size),
        }
        if config.mixed_precision is not None:
            flags["mixed_precision"] = config.mixed_precision
        # With a global batch, the accumulation follows from it.
        if config.global_batch_size is None:
            samples = config.per_device_train_batch_size * config.gradient_accumulation_steps
            flags["gradient_accumulation_steps"] = samples // micro_batch
        # Packing saves the computation on padding.
        is_padded = self.method != "full" or self.request.recipe.batch_shape().padded or self.request.lengths is not None
        if is_padded and self.request.can_pack:
            flags["packing"] = True
        return self.settings | flags

    def _add_row(self, row: Row, traced: TracedJob, flags: dict[str, Any]) -> None:
        # Remedies mean that the plan exceeds the GPU, even if its range begins below.
        if not row.fits or row.remedies:
            self.misfits.append(row)
            return
        candidates = self.tight if row.tight else self.roomy
        candidates.append(Candidate(self.method, self.recipe, self._select_new_flags(flags), traced, row))

    def _select_new_flags(self, flags: dict[str, Any]) -> dict[str, Any]:
        """Return the flags that the user did not set, or set to another value."""
        config = self.request.recipe.config
        new_flags = {}
        for key, value in flags.items():
            if not (self.request.sources.is_set(key) and getattr(config, key) == value):
                new_flags[key] = value
        return new_flags

    def describe_nearest_misfit(self) -> str:
        """Return what the strategy that is nearest to fitting lacks."""
        nearest = rank_rows(self.misfits)[0]
        reasons = nearest.exceeded or nearest.problems or ["it may need more than the GPU has"]
        text = f"{nearest.file} comes nearest: {'; '.join(reasons)}"
        if nearest.remedies:
            text += f". It needs {' or '.join(nearest.remedies)}"
        return text


def _may_fit_with_less(row: Row) -> bool:
    """Return whether it is useful to plan a strategy again with smaller activations: it fits already, or lacks GPU memory."""
    if row.problems or row.bare:
        return False
    return row.fits or any(limit.startswith("GPU memory") for limit in row.exceeded)


def advise(request: Request, cluster: Cluster, methods: list[str] | None = None) -> Advice:
    """Return the best run for a request, and what to do if it does not fit or needs offload.

    Args:
        methods: the methods to try; None means the request's and those that need less memory.

    Raises:
        ConfigError: there is no such model, or the recipe does not train it.
    """
    # Each method needs less memory than those before it.
    methods = methods or list(METHODS)[list(METHODS).index(request.method) :]
    # Adapters need a trained base.
    if request.recipe.config.initialised_from:
        methods = [request.method]
    # The recipe for encoder-decoders cannot quantise its model.
    if request.recipe.encoder_decoder and "qlora" in methods:
        methods.remove("qlora")
    ranked: dict[str, list[Candidate]] = {}
    shortfalls: dict[str, str] = {}
    for method in methods:
        search = _Search(request, cluster, method)
        try:
            candidates = search.run()
        except ConfigError as error:
            # A method that the user did not choose may not suit the model: not all layers can be quantised.
            if method == request.method:
                raise
            shortfalls[method] = error.problems[0]
            continue
        if not candidates:
            shortfalls[method] = search.describe_nearest_misfit()
            continue
        ranked[method] = candidates
        # A method with less memory is an alternative only to a run that needs offload.
        if not candidates[0].row.offloads:
            break
    on_gpu = [candidates[0] for candidates in ranked.values() if not candidates[0].row.offloads]
    if not ranked:
        return Advice(None, None, None, shortfalls)
    # The request's method is preferred, even if it needs offload; then a method that needs none.
    best = next(iter(ranked.values()))[0]
    if request.method in ranked:
        best = ranked[request.method][0]
    elif on_gpu:
        best = on_gpu[0]
    # The second best may be faster than the best: candidates that are tight come last.
    second = max(ranked[best.method][1:], key=lambda run: run.row.tokens_per_second, default=None)
    alternative = next((candidate for candidate in on_gpu if candidate is not best), None)
    return Advice(best, second, alternative, shortfalls, request.whole_run(best, cluster))
