"""Choice of a recipe's settings for a model on a cluster, by the planner: method, strategy file, micro-batch, checkpointing.

The rules are few. Full finetuning comes before LoRA, and LoRA before QLoRA; the first that fits without offload is taken.
Activations are kept if they fit, and recomputed otherwise. The micro-batch is then made larger as long as it fits, up to 8192
tokens: the planner's times do not include what small kernels leave unused. The settings of the training itself are published
ones, with their source.
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
from zerobook.plan.recommend import nearest_to_fitting, offloads, preferred
from zerobook.plan.rows import Row, Traced, planned
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.shipped import shipped

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

METHODS = ("full", "lora", "qlora")
WORDS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
_ENOUGH = 8192
"""Tokens of a micro-batch that is not made larger."""
_NO_SLOWER = 0.99
"""Share of the tokens a second that a larger micro-batch may cost."""
_LLAMA2 = "rate, schedule and weight decay of Llama 2's paper, section 3.1 (https://arxiv.org/abs/2307.09288), batches of 64"
_QLORA = "rate, rank and schedule of QLoRA's paper, table 9 (https://arxiv.org/abs/2305.14314), batches of 16"
_T5 = "rate and schedule of https://www.philschmid.de/fine-tune-flan-t5, batches of 8"
_T5_LORA = "rate and rank of https://www.philschmid.de/fine-tune-flan-t5-peft, batches of 8"
_LARGE = 20e9
"""Parameters from which QLoRA's paper halves the rate, and the dropout of adapters."""


@dataclass(frozen=True)
class Choice:
    """Settings that fit.

    Attributes:
        method: one of `METHODS`.
        recipe: stem of the recipe's file.
        values: key -> value of the YAML.
        traced, row: the plan.
        source: where rate, schedule and rank come from.
        reasons: pairs (what was chosen, why).
    """

    method: str
    recipe: str
    values: dict[str, Any]
    traced: Traced
    row: Row
    source: str
    reasons: list[tuple[str, str]] = field(default_factory=list)


def choose(
    model: str, where: Cluster, *, method: str | None, global_batch: int, length: int | None, data: dict[str, str],
    progress: Callable[[Iterable[Path], str], Iterable[Path]],
) -> Choice | list[str]:  # fmt: skip
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
    encoder_decoder = bool(model_config.is_encoder_decoder)
    if encoder_decoder and method == "qlora":
        raise ConfigError("--method: qlora: the encoder-decoder recipe has no quantised base. Choose full or lora.")
    methods = [method] if method else [name for name in METHODS if not (encoder_decoder and name == "qlora")]
    per_rank = max(1, (global_batch + where.ranks // 2) // where.ranks)
    tried: list[str] = []
    for name in methods:
        search = _Search(model, model_config, where, name, per_rank, length, data, progress)
        try:
            found = search.best(offload=name == methods[-1])
        except ConfigError as error:  # such as a model whose layers are not quantised
            if name == methods[0]:
                raise
            found, search.lacking = None, error.problems[0]
        if found is not None:
            others = [("not taken", "; ".join(tried))] if tried else []
            return Choice(name, search.recipe, *found, search.source, others + search.reasons)
        tried.append(f"{WORDS[name]}: {search.lacking}")
    return tried


class _Search:
    """The search for one method's settings."""

    def __init__(
        self, model: str, model_config: PreTrainedConfig, where: Cluster, method: str, per_rank: int, length: int | None,
        data: dict[str, str], progress: Callable[[Iterable[Path], str], Iterable[Path]],
    ):  # fmt: skip
        self.where, self.method, self.per_rank, self.progress = where, method, per_rank, progress
        self.encoder_decoder = bool(model_config.is_encoder_decoder)
        self.recipe = "seq2seq_chatbot" if self.encoder_decoder else "causal_lm" if method == "full" else "lora_finetune"
        self.reasons: list[tuple[str, str]] = []
        self.lacking = ""
        self.source = ""
        half = "bf16" if where.device.bf16 else "fp16"
        self.fixed = {"model_name_or_path": model, **data, **self._lengths(model_config, length), "mixed_precision": half}

    def _lengths(self, model_config: PreTrainedConfig, length: int | None) -> dict[str, Any]:
        if self.encoder_decoder:
            positions = getattr(model_config, "max_position_embeddings", None) or 512
            return {"max_source_length": length or min(512, positions), "max_target_length": min(128, positions)}
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2048
        key = "block_size" if self.method == "full" else "max_seq_length"
        return {key: length or min(2048, positions), "packing": True}

    def _training(self, parameters: int) -> dict[str, Any]:
        """Return published settings, and set their source."""
        small = parameters < _LARGE
        if self.encoder_decoder:
            self.source = _T5 if self.method == "full" else _T5_LORA
            adapter = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
            full = {"learning_rate": 5e-5, "lr_scheduler_type": "linear"}
            return full if self.method == "full" else adapter | {"learning_rate": 1e-3, "lr_scheduler_type": "linear"}
        if self.method == "full":
            self.source = _LLAMA2
            return {"learning_rate": 2e-5, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
        self.source = _QLORA
        dropout, rate = (0.1, 2e-4) if small else (0.05, 1e-4)
        adapter = {"lora_r": 64, "lora_alpha": 16, "lora_dropout": dropout}
        quantised = {"load_in_4bit": True} if self.method == "qlora" else {}
        return quantised | adapter | {"learning_rate": rate, "lr_scheduler_type": "constant"}

    def _values(self, parameters: int, micro: int, checkpointing: str) -> dict[str, Any]:
        batch = {
            "activation_checkpointing": checkpointing, "per_device_train_batch_size": micro,
            "per_device_eval_batch_size": micro, "gradient_accumulation_steps": self.per_rank // micro,
        }  # fmt: skip
        return self.fixed | batch | self._training(parameters) | {"validation_split_percentage": 1}

    def _plan(self, parameters: int, micro: int, checkpointing: str) -> tuple[dict[str, Any], Traced, list[Row]]:
        """Return the settings, their plan, and the rows that fit, the best first."""
        values = self._values(parameters, micro, checkpointing)
        kind = recipe_class(str(shipped(f"recipes/{self.recipe}.py")))
        config, sources, _ = parse(kind.config_class, flags(values), data=False)
        what = f"{WORDS[self.method]}, micro-batch {micro}, activations {'kept' if checkpointing == 'none' else 'recomputed'}"
        files = [
            file for file in sorted(shipped("accelerate_configs").glob("*.yaml"))
            if file.stem != "single" or self.where.ranks == 1  # it would leave the other GPUs idle
        ]  # fmt: skip
        files = [*self.progress(files, what)]
        traced, rows = planned(kind(config), sources, self.where, files)
        self.lacking = nearest_to_fitting(rows)
        return values, traced, [row for row in rows if row.fits and not row.tight]

    def best(self, *, offload: bool) -> tuple[dict[str, Any], Traced, Row] | None:
        """Return the fastest settings that fit, and their plan; None if nothing fits.

        Args:
            offload: take a strategy that offloads if no other fits.
        """
        values, traced, rows = self._plan(0, 1, "full")
        if traced.parameters >= _LARGE:
            values = self._values(traced.parameters, 1, "full")
        on_gpu = [row for row in rows if not offloads(row)]
        if not on_gpu:
            if rows and offload:
                self.reasons.append(("offload", "nothing fits without it"))
                return values, traced, rows[0]
            if rows:
                self.lacking = f"it fits with offload only, which --method {self.method} takes"
            return None
        reasons: list[tuple[str, str]] = []
        best = values, traced, preferred(traced, on_gpu, self.where, reasons)
        checkpointing, why = "full", "they are recomputed: kept, they do not fit"
        if kept := self._try(traced.parameters, 1, "none", best[2]):
            best, reasons = kept
            checkpointing, why = "none", "they are kept: they fit, and nothing is computed twice"
        shape, micro = traced.job.shape, 1
        for more in range(2, self.per_rank + 1):
            if self.per_rank % more or more < 2 * micro:
                continue
            if more * (shape.source + shape.target) > _ENOUGH:
                break
            larger = self._try(traced.parameters, more, checkpointing, best[2])
            if larger is None:
                break
            (best, reasons), micro = larger, more
        self.reasons += [("activations", why), *reasons]
        return best

    def _try(
        self, parameters: int, micro: int, checkpointing: str, before: Row
    ) -> tuple[tuple[dict[str, Any], Traced, Row], list[tuple[str, str]]] | None:
        """Return other settings with their plan, and the reasons for their strategy, if they fit and are no slower."""
        values, traced, rows = self._plan(parameters, micro, checkpointing)
        reasons: list[tuple[str, str]] = []
        fitting = [row for row in rows if not offloads(row)]
        row = preferred(traced, fitting, self.where, reasons) if fitting else None
        if row is None or row.tokens_per_second < _NO_SLOWER * before.tokens_per_second:
            return None
        return (values, traced, row), reasons


def flags(values: dict[str, Any]) -> list[str]:
    """Return the settings as command-line flags."""
    return [word for key, value in values.items() for word in (f"--{key}", str(value).lower() if value is True else str(value))]
