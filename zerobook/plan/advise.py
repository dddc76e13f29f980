"""Advice on a run: the fastest of all candidates that fit a cluster, by their plans, and what comes next.

A candidate is a strategy file with settings: the micro-batch, activation checkpointing, the optimizer, and the training
method where other methods are alternatives. ``zerobook plan --recommend`` and ``zerobook recipe`` both ask here. The plan
alone decides: no candidate is preferred by a rule, except that of two rates that are about the same the simpler strategy
wins, and that a run with room is preferred to one that is tight.
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

METHODS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
"""Method -> its name in messages, in the order in which they are tried."""
MICRO_BATCH_TOKENS = 8192
"""Tokens of a micro-batch that is not made larger, unless the user asks for more."""
CHECKPOINTING = ("none", "full", "offload")
"""Activation checkpointing that is tried, from the fastest to the one with the least memory."""
# Names of the strategy files that keep weights or optimizer state outside of the GPU.
_OFFLOADS = re.compile("offload|nvme")
# Names of the strategy files that share each row among ranks.
_SHARES_ROWS = re.compile("context|sequence|tensor")
_LORA_RECIPE = "lora_finetune"
_ACTIVATIONS = {"none": "activations kept", "full": "activations recomputed", "offload": "activations recomputed and offloaded"}


@dataclass(frozen=True)
class Request:
    """A run to be advised on: a recipe with its config, the source of each value, and the strategy files to compare."""

    # the recipe's file
    file: Path
    recipe: Recipe[Any]
    sources: ConfigSources
    files: list[Path]
    # method -> settings that come with it
    settings: Callable[[str], dict[str, Any]] = lambda method: {}
    # of the whole run; None: the config and its data say its length
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
        """Return the stem of another recipe that trains by this method, None for the request's, and the flags for it."""
        config = self.recipe.config
        settings = self.settings(method)
        recipe = None
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
        """Return the file of the request's recipe, or of a shipped one that is named."""
        # A recipe of this name in the working folder is not run: nobody named it.
        return self.file if recipe is None else shipped(f"recipes/{recipe}.py")

    def plan(
        self, recipe: str | None, flags: dict[str, Any], cluster: Cluster, files: list[Path]
    ) -> tuple[TracedJob, list[Row]]:
        """Plan the request with more flags, for another recipe if one is named.

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
        """Return the request in the half precision of a cluster's GPUs, unless the user set a precision: nobody trains in fp32
        on a GPU that has a faster one."""
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
        """Whether samples may share rows, as far as the user decided."""
        config = self.recipe.config
        shares_rows = config.rows_shared_by or config.group_by_length or self.recipe.encoder_decoder
        return not (shares_rows or self.sources.is_set("packing"))


@dataclass(frozen=True)
class Candidate:
    """A run under one strategy file, with its plan. ``flags`` are added to the request's, for the recipe ``recipe`` where it is
    another than the request's."""

    method: str
    recipe: str | None
    flags: dict[str, Any]
    traced: TracedJob
    row: Row

    @property
    def config(self) -> RecipeConfig:
        return self.traced.job.config

    @property
    def readers(self) -> int:
        """Processes, or groups of them, that read different samples."""
        assert self.row.sharding is not None
        return self.row.sharding.ranks // self.row.sharding.token_ranks

    @property
    def samples(self) -> int:
        """Samples of a step."""
        ranks = self.readers
        return self.config.per_device_train_batch_size * self.config.accumulation_on(ranks) * ranks

    def describe_batch(self) -> str:
        config = self.config
        shape = self.traced.job.shape
        ranks = self.readers
        batch = f"{config.per_device_train_batch_size} micro x {config.accumulation_on(ranks)} accumulation x {ranks} processes"
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
        # Optimizer state or activations may be in host memory, which is not checked if nobody says how much there is.
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
    """The best candidate, None if nothing fits, and the second best.

    ``alternative`` is the best run of another method, where the one of the request needs offload. ``shortfalls`` has, for each
    method of which nothing fits, what the strategy that is nearest to fitting lacks.
    """

    best: Candidate | None
    second: Candidate | None
    alternative: Candidate | None
    shortfalls: dict[str, str]
    # the best candidate's, if its length is known
    run: WholeRun | None = None

    def describe(self, cluster: Cluster) -> list[tuple[str, str]]:
        """Return (what, text) for each part of the advice."""
        lines = [("does not fit", f"{METHODS[method]}: {shortfall}") for method, shortfall in self.shortfalls.items()]
        best = self.best
        if best is None:
            return lines
        assert best.row.memory is not None and best.row.time is not None and best.row.sharding is not None
        config = best.config
        precision: str = config.mixed_precision or "no"
        # The user did not ask for fp16, which can overflow: say why it was chosen.
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
            values |= {"strategy": best.row.file, "recipe": best.recipe, "method": best.method, "flags": best.flags}
            values |= {"memory": best.row.memory.total, "memory_range": (best.row.memory.low, best.row.memory.high)}
            values |= {"tokens_per_second": best.row.tokens_per_second, "tokens_per_second_range": best.row.rates}
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
        # fastest of each strategy file, with room and without
        self.roomy: list[Candidate] = []
        self.tight: list[Candidate] = []
        self.misfits: list[Row] = []

    def run(self) -> list[Candidate]:
        """Return the fastest candidate of each strategy that fits, the best first; those that are tight stand last.

        Raises:
            ConfigError: the method does not suit the model.
        """
        offloading = [file for file in self.request.files if _OFFLOADS.search(file.stem)]
        sharding = [file for file in self.request.files if file not in offloading]
        # One process would leave other GPUs idle, and alone it has nothing to share.
        useful = [file for file in sharding if (file.stem == "single") == (self.cluster.ranks == 1)]
        useful = useful or sharding
        # Sharing each row among ranks costs traffic, so it has to be faster than the others with the settings that fit them.
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
        """Plan with Adam's states in 8 bits. They are an approximation, so they are kept only if they are clearly faster."""
        exact = list(self.roomy)
        fastest = max((candidate.row.tokens_per_second for candidate in exact), default=0.0)
        self._plan_strategies(files, {"optimizer": "adamw_8bit"})
        for candidate in self.roomy[len(exact) :]:
            if candidate.row.tokens_per_second > SAME_RATE * fastest:
                exact.append(candidate)
        self.roomy = exact

    def _rank_fastest(self) -> list[Candidate]:
        """Return the fastest candidate of each strategy and optimizer, the best first; those that are tight stand last."""
        best: dict[tuple[str, str], Candidate] = {}
        for candidate in [*self.roomy, *self.tight]:
            key = (candidate.row.file, candidate.config.optimizer)
            # Settings that were planned later need less memory, and have to be faster by more than the rates are exact.
            is_faster = key in best and candidate.row.tokens_per_second > SAME_RATE * best[key].row.tokens_per_second
            if key not in best or (is_faster and not candidate.row.tight):
                best[key] = candidate
        order = [id(row) for row in rank_rows([candidate.row for candidate in best.values()])]
        return sorted(best.values(), key=lambda candidate: (candidate.row.tight, order.index(id(candidate.row))))

    def _plan_strategies(self, files: list[Path], more_settings: dict[str, Any]) -> None:
        """Plan the strategies with one setting after another, the fastest settings first.

        A smaller micro-batch is no faster, and neither are activations that are recomputed. So the rate of a strategy that does
        not fit is the most that it can reach with less memory. It is planned again only if that is more than the fastest that
        fits, and with micro-batches that may fit: activations grow at least in proportion.
        """
        first = self.request.recipe.config.activation_checkpointing
        # A setting that is not in the list, such as ``every:2``, keeps more than ``full`` does.
        stronger: tuple[str, ...] = CHECKPOINTING[1:]
        if first in CHECKPOINTING:
            stronger = CHECKPOINTING[CHECKPOINTING.index(first) + 1 :]
        remaining = {file.stem: file for file in files}
        ceilings: dict[str, float] = {}
        for checkpointing in (first, *stronger):
            rates = dict(ceilings)
            largest: dict[str, float] = {}
            for micro_batch in self._list_micro_batches():
                fastest = max((candidate.row.tokens_per_second for candidate in self.roomy), default=0.0)
                candidates = []
                for name, file in remaining.items():
                    if rates.get(name, math.inf) > SAME_RATE * fastest and micro_batch <= largest.get(name, micro_batch):
                        candidates.append(file)
                if not candidates:
                    continue
                flags = self._flags(checkpointing, micro_batch) | more_settings
                traced, rows = self.request.plan(self.recipe, flags, self.cluster, candidates)
                for row in rows:
                    self._add(row, traced, flags)
                    if not _may_fit_with_less(row):
                        del remaining[row.file]
                        continue
                    rates[row.file] = row.tokens_per_second
                    ceilings.setdefault(row.file, row.tokens_per_second)
                    is_roomy = row.fits and not row.tight
                    largest[row.file] = 0 if is_roomy else micro_batch * self._activation_limit(row)

    def _activation_limit(self, row: Row) -> float:
        """Return the share of a planned row's activations that fits."""
        assert row.memory is not None
        activations = row.memory.device.activations
        return (self.cluster.device.memory - row.memory.total + activations) / max(activations, 1)

    def _list_micro_batches(self) -> list[int]:
        """Return micro-batches that divide the samples of a step, the largest first, each at most half of the one before."""
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

    def _flags(self, checkpointing: str, micro_batch: int) -> dict[str, Any]:
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
        is_padded = self.method != "full" or self.request.recipe.batch_shape().padded or self.request.lengths is not None
        if is_padded and self.request.can_pack:
            flags["packing"] = True
        return self.settings | flags

    def _add(self, row: Row, traced: TracedJob, flags: dict[str, Any]) -> None:
        # Remedies mean that the plan exceeds the GPU, even if its range begins below.
        if not row.fits or row.remedies:
            self.misfits.append(row)
            return
        candidates = self.tight if row.tight else self.roomy
        candidates.append(Candidate(self.method, self.recipe, self._unset(flags), traced, row))

    def _unset(self, flags: dict[str, Any]) -> dict[str, Any]:
        """Return the flags that the user did not set, or set to another value."""
        config = self.request.recipe.config
        unset = {}
        for key, value in flags.items():
            if not (self.request.sources.is_set(key) and getattr(config, key) == value):
                unset[key] = value
        return unset

    def describe_nearest_misfit(self) -> str:
        """Return what the strategy that is nearest to fitting lacks."""
        nearest = rank_rows(self.misfits)[0]
        reasons = nearest.exceeded or nearest.problems or ["it may need more than the GPU has"]
        text = f"{nearest.file} comes nearest: {'; '.join(reasons)}"
        if nearest.remedies:
            text += f". It needs {' or '.join(nearest.remedies)}"
        return text


def _may_fit_with_less(row: Row) -> bool:
    """Return whether smaller activations can make a strategy fit, or allow a larger micro-batch than one that fits."""
    if row.problems or row.bare:
        return False
    return row.fits or any(limit.startswith("GPU memory") for limit in row.exceeded)


def advise(request: Request, cluster: Cluster, methods: list[str] | None = None) -> Advice:
    """Return the best run for a request, and what to do if it does not fit or needs offload.

    Args:
        methods: those that are tried; None means the request's and the ones with less memory.

    Raises:
        ConfigError: there is no such model, or the recipe does not train it.
    """
    methods = methods or list(METHODS)[list(METHODS).index(request.method) :]
    # Adapters need a trained base.
    if request.recipe.config.initialised_from:
        methods = [request.method]
    if request.recipe.encoder_decoder and "qlora" in methods:
        methods.remove("qlora")
    ranked: dict[str, list[Candidate]] = {}
    shortfalls: dict[str, str] = {}
    for method in methods:
        search = _Search(request, cluster, method)
        try:
            candidates = search.run()
        except ConfigError as error:
            # Another method may not suit the model: not all layers can be quantised.
            if method == request.method:
                raise
            shortfalls[method] = error.problems[0]
            continue
        if not candidates:
            shortfalls[method] = search.describe_nearest_misfit()
            continue
        ranked[method] = candidates
        if not candidates[0].row.offloads:
            break
    on_gpu = [candidates[0] for candidates in ranked.values() if not candidates[0].row.offloads]
    # The method of the request goes first, even where it needs offload; then one that needs none; then any.
    firsts = ranked.get(request.method) or on_gpu[:1] or [candidates[0] for candidates in ranked.values()]
    if not firsts:
        return Advice(None, None, None, shortfalls)
    best = firsts[0]
    # It may be faster, where it is tight.
    second = max(ranked[best.method][1:], key=lambda run: run.row.tokens_per_second, default=None)
    alternative = next((candidate for candidate in on_gpu if candidate is not best), None)
    return Advice(best, second, alternative, shortfalls, request.whole_run(best, cluster))
