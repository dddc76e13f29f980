"""Choice of a recipe's settings for a model on a cluster, by the planner: method, strategy file, micro-batch, checkpointing.

There are few rules. Full finetuning is tried before LoRA, and LoRA before QLoRA. The first that fits without offload is taken.
Activations are kept if they fit, and recomputed otherwise. The micro-batch is then made larger as long as it fits and does not
slow the run, up to 8192 tokens. The training settings are published values, with their source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.config import parse
from zerobook.errors import ConfigError
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import read_config
from zerobook.plan.recommend import Reason, nearest_to_fitting, prefer
from zerobook.plan.rows import Row, plan_recipe
from zerobook.plan.traced_job import TracedJob
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.shipped import shipped

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

METHODS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
"""Method -> its name in messages, in the order in which they are tried."""
MICRO_BATCH_TOKENS = 8192
"""Tokens of a micro-batch that is not made larger."""
NO_SLOWER = 0.99
"""Share of the tokens a second that a larger micro-batch has to reach."""
LARGE_MODEL = 20e9
"""Parameters from which QLoRA's paper halves the rate, and the dropout of adapters."""

Progress = Callable[[Iterable[Path], str], Iterable[Path]]
"""(strategy files, what is planned) -> the strategy files"""


@dataclass(frozen=True)
class Choice:
    """Settings that fit, and their plan."""

    # one of `METHODS`
    method: str
    # stem of the recipe's file
    recipe: str
    # key -> value of the YAML
    values: dict[str, Any]
    traced: TracedJob
    row: Row
    # where rate, schedule and rank come from
    source: str
    # (what was chosen, why)
    reasons: list[Reason] = field(default_factory=list)


@dataclass
class _Plan:
    """Settings with their plan: the rows that fit with room, the best first, and the chosen one with the reasons for it."""

    values: dict[str, Any]
    traced: TracedJob
    rows: list[Row]
    row: Row | None = None
    reasons: list[Reason] = field(default_factory=list)


def choose(
    model: str,
    cluster: Cluster,
    *,
    method: str | None,
    global_batch: int,
    length: int | None,
    data: dict[str, str],
    progress: Progress,
) -> Choice | list[str]:
    """Return the settings for a model on a cluster; the reasons why nothing fits if nothing does.

    Args:
        model: a hub name, a folder or a config.json.
        method: one of `METHODS`; None takes the first that fits.
        global_batch: samples or packed rows of a step. The nearest multiple of the number of processes is taken.
        length: tokens of a row; None takes 2048 (512 of a source text), or the model's positions if they are fewer.
        data: the YAML's keys that name the data.
        progress: called with the strategy files and what is planned; returns them.

    Raises:
        ConfigError: there is no such model, or the recipes do not train it.
    """
    model_config = read_config(model)
    methods = [method] if method else list(METHODS)
    if model_config.is_encoder_decoder and "qlora" in methods:
        if method:
            raise ConfigError("--method: qlora: the encoder-decoder recipe has no quantised base. Choose full or lora.")
        methods.remove("qlora")
    # Round to the nearest.
    samples_per_rank = max(1, (global_batch + cluster.ranks // 2) // cluster.ranks)
    failures: list[str] = []
    for name in methods:
        search = _Search(model, model_config, cluster, name, samples_per_rank, length, data, progress)
        try:
            plan = search.find_best(offload=name == methods[-1])
        except ConfigError as error:
            # The first method's error is the model's. A later one may not suit it: not all layers can be quantised.
            if name == methods[0]:
                raise
            plan = None
            search.shortfall = error.problems[0]
        if plan is not None and plan.row is not None:
            if failures:
                plan.reasons.insert(0, ("not taken", "; ".join(failures)))
            _, source = search.published(plan.traced.model.parameters)
            return Choice(name, search.recipe, plan.values, plan.traced, plan.row, source, plan.reasons)
        failures.append(f"{METHODS[name]}: {search.shortfall}")
    return failures


class _Search:
    """The search for one method's settings."""

    def __init__(
        self,
        model: str,
        model_config: PreTrainedConfig,
        cluster: Cluster,
        method: str,
        samples_per_rank: int,
        length: int | None,
        data: dict[str, str],
        progress: Progress,
    ):
        self.cluster = cluster
        self.method = method
        self.samples_per_rank = samples_per_rank
        self.progress = progress
        # what the row that is nearest to fitting lacks
        self.shortfall = ""
        self.encoder_decoder = bool(model_config.is_encoder_decoder)
        self.recipe = "lora_finetune"
        if self.encoder_decoder:
            self.recipe = "seq2seq_chatbot"
        elif method == "full":
            self.recipe = "causal_lm"
        self.fixed_values = {
            "model_name_or_path": model,
            **data,
            **self._lengths(model_config, length),
            "mixed_precision": cluster.half_precision,
        }

    def _lengths(self, model_config: PreTrainedConfig, length: int | None) -> dict[str, Any]:
        if self.encoder_decoder:
            positions = getattr(model_config, "max_position_embeddings", None) or 512
            return {"max_source_length": length or min(512, positions), "max_target_length": min(128, positions)}
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2048
        key = "block_size" if self.method == "full" else "max_seq_length"
        return {key: length or min(2048, positions), "packing": True}

    def published(self, parameters: int) -> tuple[dict[str, Any], str]:
        """Return published settings for a model of this size, and their source."""
        if self.encoder_decoder and self.method == "full":
            source = "rate and schedule of https://www.philschmid.de/fine-tune-flan-t5, batches of 8"
            return {"learning_rate": 5e-5, "lr_scheduler_type": "linear"}, source
        if self.encoder_decoder:
            source = "rate and rank of https://www.philschmid.de/fine-tune-flan-t5-peft, batches of 8"
            values = {
                "adapter": "lora",
                "lora_r": 16,
                "lora_alpha": 32,
                "lora_dropout": 0.05,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "linear",
            }
            return values, source
        if self.method == "full":
            paper = "Llama 2's paper, section 3.1 (https://arxiv.org/abs/2307.09288)"
            source = f"rate, schedule and weight decay of {paper}, batches of 64"
            return {"learning_rate": 2e-5, "lr_scheduler_type": "cosine", "weight_decay": 0.1}, source
        source = "rate, rank and schedule of QLoRA's paper, table 9 (https://arxiv.org/abs/2305.14314), batches of 16"
        values = {"lora_r": 64, "lora_alpha": 16, "lora_dropout": 0.1, "learning_rate": 2e-4, "lr_scheduler_type": "constant"}
        if parameters >= LARGE_MODEL:
            values |= {"lora_dropout": 0.05, "learning_rate": 1e-4}
        if self.method == "qlora":
            # It stands before the others in the file.
            values = {"load_in_4bit": True} | values
        return values, source

    def _values(self, parameters: int, micro_batch: int, checkpointing: str) -> dict[str, Any]:
        batch = {
            "activation_checkpointing": checkpointing,
            "per_device_train_batch_size": micro_batch,
            "per_device_eval_batch_size": micro_batch,
            "gradient_accumulation_steps": self.samples_per_rank // micro_batch,
        }
        training, _ = self.published(parameters)
        return self.fixed_values | batch | training | {"validation_split_percentage": 1}

    def _plan(self, parameters: int, micro_batch: int, checkpointing: str) -> _Plan:
        """Plan settings under all strategy files."""
        values = self._values(parameters, micro_batch, checkpointing)
        kind = recipe_class(str(shipped(f"recipes/{self.recipe}.py")))
        config, sources, _ = parse(kind.config_class, to_flags(values), data=False)
        files = []
        for file in sorted(shipped("accelerate_configs").glob("*.yaml")):
            # One process would leave the other GPUs idle.
            if file.stem != "single" or self.cluster.ranks == 1:
                files.append(file)
        activations = "kept" if checkpointing == "none" else "recomputed"
        description = f"{METHODS[self.method]}, micro-batch {micro_batch}, activations {activations}"
        traced, rows = plan_recipe(kind(config), sources, self.cluster, list(self.progress(files, description)))
        self.shortfall = nearest_to_fitting(rows)
        return _Plan(values, traced, [row for row in rows if row.fits and not row.tight])

    def _plan_on_gpu(self, parameters: int, micro_batch: int, checkpointing: str) -> _Plan:
        """Plan settings, and choose the best row that fits without offload, if there is one."""
        plan = self._plan(parameters, micro_batch, checkpointing)
        on_gpu = [row for row in plan.rows if not row.offloads]
        if on_gpu:
            plan.row = prefer(plan.traced, on_gpu, self.cluster, plan.reasons)
        return plan

    def find_best(self, *, offload: bool) -> _Plan | None:
        """Return the fastest settings that fit, and their plan; None if nothing fits.

        Args:
            offload: take a strategy that offloads if no other fits.
        """
        # The least memory: one row, and activations that are recomputed.
        best = self._plan_on_gpu(0, 1, "full")
        parameters = best.traced.model.parameters
        if parameters >= LARGE_MODEL:
            best.values = self._values(parameters, 1, "full")
        if best.row is None:
            if not best.rows:
                return None
            if not offload:
                self.shortfall = f"it fits with offload only, which --method {self.method} takes"
                return None
            best.row = best.rows[0]
            best.reasons = [("offload", "nothing fits without it")]
            return best

        # Activations that are kept, if they fit.
        checkpointing = "full"
        checkpointing_reason = "they are recomputed: kept, they do not fit"
        kept_plan = self._plan_on_gpu(parameters, 1, "none")
        if _is_no_slower(kept_plan, best):
            best = kept_plan
            checkpointing = "none"
            checkpointing_reason = "they are kept: they fit, and nothing is computed twice"

        # Larger micro-batches, each at least twice the one before, as long as they fit.
        shape = best.traced.job.shape
        micro_batch = 1
        for larger in range(2, self.samples_per_rank + 1):
            if self.samples_per_rank % larger or larger < 2 * micro_batch:
                continue
            if larger * (shape.source + shape.target) > MICRO_BATCH_TOKENS:
                break
            plan = self._plan_on_gpu(parameters, larger, checkpointing)
            if not _is_no_slower(plan, best):
                break
            best = plan
            micro_batch = larger
        best.reasons.insert(0, ("activations", checkpointing_reason))
        return best


def _is_no_slower(plan: _Plan, best: _Plan) -> bool:
    """Return whether a plan fits, and is about as fast as the best one."""
    if plan.row is None or best.row is None:
        return False
    return plan.row.tokens_per_second >= NO_SLOWER * best.row.tokens_per_second


def to_flags(values: dict[str, Any]) -> list[str]:
    """Return the settings as command-line flags."""
    words = []
    for key, value in values.items():
        words += [f"--{key}", "true" if value is True else str(value)]
    return words
