"""The typed recipe config, read from YAML and flags, with the source of every value.

Keys have the names of the transformers examples. A YAML file (``--config FILE.yaml``) holds the
same keys as the flags, and flags override it. All problems are reported at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Generic, Literal, NoReturn, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from zerobook.constants import POLYNOMIAL_END
from zerobook.errors import ConfigError
from zerobook.utils import hub, other_trainers, user_code
from zerobook.utils.chat_template import NAMES, template_file
from zerobook.utils.nearest import nearest, nearest_file, nearest_value
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import plain
from zerobook.utils.written_values import as_list, as_whole_number, is_none
from zerobook.utils.yaml_text import load_yaml_as_text, read_mapping

# Names that published command lines use for the same thing.
ALIASES = {
    "max_steps": "max_train_steps",
    "warmup_steps": "num_warmup_steps",
    "checkpointing_steps": "save_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_dtype": "dtype",
    "n_train": "max_train_samples",
    "n_val": "max_eval_samples",
}
Precision = Literal["no", "bf16", "fp16"]
Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
CHECKPOINTING = ("none", "full", "every:N", "selective", "offload")
Interval = int | float | Literal["epoch"]
"""A number of steps, a share of the run's steps between 0 and 1, or ``epoch``."""
AUTOMATIC: Literal["auto"] = "auto"
"""Value of ``save_steps``: the run decides by the measured time, see `zerobook.training.intervals`."""
KEPT_AUTOMATICALLY = 2
"""Checkpoints that are kept if the run decides when to save, and no limit is set."""
OnSpike = Literal["log", "skip", "rollback", "lower_rate", "stop"]
PolicyAction = Literal["replay", "skip", "lower_rate", "further_back", "stop"]
"""A recovery action of ``--on_spike rollback``, see `zerobook.monitor.policy`."""
Format = Literal["text", "instruction", "sharegpt", "messages", "prompt_completion", "pairs", "tokenized"]


class _Keys(BaseModel):
    """Keys of a config, with values as people write them: see `zerobook.utils.written_values`."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_value(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        # pydantic would take ``true`` as 1.
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise PydanticCustomError("number", "Input should be a number")
        if type(None) in kinds and is_none(value):
            return None
        lists = [kind for kind in kinds if get_origin(kind) is list]
        if lists:
            has_choices = get_origin(get_args(lists[0])[0]) is Literal
            # A list in YAML may hold the word; where the items are free text, it may be one of them.
            if has_choices and value == ["none"]:
                return []
            return as_list(value)
        # Flags and YAML give a whole number as 1e3 too, which pydantic takes for a float alone.
        return as_whole_number(value) if int in kinds else value


def _number(value: Any) -> float | None:
    """Return ``value``, which may be a flag's text, as a number; None if it is not a number."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _kinds(annotation: Any) -> set[Any]:
    """Return the classes in a union."""
    if get_origin(annotation) in (Union, UnionType):
        return set(get_args(annotation))
    return {annotation}


class DatasetSpec(_Keys):
    """One dataset of a mixture, an entry under ``datasets:`` in the YAML."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="hub name, local file or folder, embedded:NAME")
    name: str = Field("", description="name in the logs; unset: the last part of the path")
    config_name: str | None = Field(None, description="configuration of a dataset from the hub")
    revision: str | None = Field(None, description="branch, tag or commit of the dataset on the hub")
    split: str | None = Field(
        None, description="use this split only, or some of its rows (train[:10%]); held-out samples are taken from it"
    )
    format: Format | None = Field(None, description="see the recipe's format")
    weight: float | None = Field(None, gt=0, description="share of the rows; if unset for all datasets, all rows count equally")
    limit: int | None = Field(None, ge=1, description="maximum number of samples to read")
    text_column: str | None = Field(None, description="see the recipe's text_column")
    summary_column: str | None = Field(None, description="see the recipe's summary_column")

    def model_post_init(self, context: Any) -> None:
        name = self.name or Path(self.path.removeprefix("embedded:")).name.split(".")[0]
        self.name = plain(name, lines=False)  # it begins lines of the output


@dataclass(frozen=True)
class OrderSettings:
    """The settings that decide the order of the samples. Each field has the name of its key in `RecipeConfig`.

    The order is made from them, and from the data, the seed and the position that a checkpoint records. A run resumes only with
    the settings of its checkpoint: in another order, samples would be used twice or never. A new key that changes the order has
    to be a field here.
    """

    group_by_length: bool
    datasets: dict[str, float | None] | None
    """name -> weight"""

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings of a config that was dumped. A key that an earlier version did not have has its default."""
        settings = {}
        for field in fields(cls):
            settings[field.name] = values.get(field.name, RecipeConfig.model_fields[field.name].default)
        if settings["datasets"] is not None:
            settings["datasets"] = {spec["name"]: spec.get("weight") for spec in settings["datasets"]}
        return cls(**settings)


class RecipeConfig(_Keys):
    """The keys that every recipe shares. Units: *steps* are optimizer steps, sizes are per process."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False, frozen=True)

    length_key: ClassVar[str]
    """The field that limits a row's ``input_ids``, in tokens. Advice names it."""

    # --- model
    model_name_or_path: str | None = Field(None, description="model to start from: hub name, local folder, or embedded:smollm2")
    tokenizer_name: str | None = Field(None, description="hub name or folder of the tokenizer; unset: the model's")
    model_revision: str = Field("main", description="branch, tag or commit on the hub")
    trust_remote_code: bool = Field(False, description="run the Python code of a hub repository")
    dtype: Dtype = Field(
        "float32",
        description="dtype of the loaded weights; trained weights have fp32 masters. Unset: float32, or the dtype of "
        "mixed_precision for a frozen base",
    )
    attn_implementation: Literal["auto", "flash_attention_2", "flex_attention", "sdpa", "eager"] = Field(
        "auto", description="attention kernel; auto chooses the fastest that this device supports"
    )
    torch_compile: bool = Field(
        False,
        description="compile the model's layers with torch.compile: fewer, fused operations, after half a minute at the start",
    )
    fast: bool = Field(
        False, description="enable the optimisations for this hardware that compute the same; the run prints which ones"
    )
    activation_checkpointing: str = Field(
        "none",
        description="activations that are recomputed in the backward pass: none, full (all of each layer; also true), every:N "
        "(all of every N-th layer), selective (all except the results of matrix products and attention), or offload (full, "
        "with the layers' inputs in host memory)",
        json_schema_extra={"choices": [*CHECKPOINTING], "bare": "full"},
    )

    # --- data
    dataset_name: str | None = Field(None, description="hub name, local file or folder, embedded:chatterbot or embedded:stdlib")
    dataset_config_name: str | None = Field(None, description="configuration of a dataset from the hub")
    dataset_revision: str | None = Field(None, description="branch, tag or commit of the dataset on the hub")
    datasets: list[DatasetSpec] | None = Field(
        None, description="a mixture, as a list in YAML; each entry has path, format, weight, split, limit"
    )
    train_file: str | None = Field(None, description="file or folder with the training data, or embedded:NAME")
    validation_file: str | None = Field(None, description="file or folder with the held-out data, or embedded:NAME")
    validation_split_percentage: float = Field(
        5, ge=0, lt=100, description="percent of the data that is held out, if it has no validation split"
    )
    streaming: bool = Field(False, description="prepare the training data shard by shard during training, not before it")
    max_train_samples: int | None = Field(None, ge=1, description="maximum number of training samples (for text: blocks)")
    max_eval_samples: int | None = Field(
        None, ge=1, description="maximum number of held-out samples of each dataset (for text: blocks)"
    )
    format: Format | None = Field(None, description="format of the samples; unset: detected from the columns")
    text_column: str | None = Field(None, description="column with the source text of a pair, if its name is not detected")
    summary_column: str | None = Field(None, description="column with the target text of a pair, if its name is not detected")
    new_tokens: list[str] = Field([], description="tokens to add to the tokenizer; the embeddings get trained rows for them")
    chat_template: str | None = Field(
        None, description=f"Jinja file with a chat template, or {', '.join(NAMES[:-1])} or {NAMES[-1]}; unset: the tokenizer's"
    )
    on_bad_sample: Literal["error", "skip"] = Field("error", description="action for a sample that cannot be used")
    packing: bool = Field(False, description="put several samples into a row, with attention isolated, to reduce padding")
    padding_free: bool = Field(
        False, description="join the samples of a micro-batch into one row without padding, with attention isolated"
    )
    group_by_length: bool = Field(False, description="put rows of similar length into a batch, to reduce padding")
    cache_dir: str | None = Field(None, description="folder for prepared data; unset: ~/.cache/zerobook")
    preprocessing_num_workers: int | None = Field(None, ge=1, description="processes that tokenize")
    dataloader_num_workers: int = Field(0, ge=0, description="processes that collate, per rank")

    # --- optimisation
    output_dir: str = Field("outputs/run", description="folder for checkpoints, runlog and the final model")
    per_device_train_batch_size: int = Field(8, ge=1, description="samples per micro-batch and process")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches per optimizer step")
    global_batch_size: int | None = Field(
        None, ge=1, description="samples per optimizer step over all processes; gradient_accumulation_steps follows from it"
    )
    num_train_epochs: float = Field(3.0, gt=0, description="passes over the training data")
    max_train_steps: int | None = Field(None, ge=1, description="maximum number of optimizer steps; overrides num_train_epochs")
    learning_rate: float = Field(5e-5, gt=0, description="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = Field(
        "linear", description="shape of the learning rate over the steps"
    )
    num_warmup_steps: int = Field(
        0, ge=0, description="steps in which the rate rises to its peak; the k-th of N steps has k/N of the peak rate"
    )
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="num_warmup_steps as a share of all steps")
    warmup_from_zero: bool = Field(
        False, description="the k-th of N warm-up steps has (k-1)/N of the peak, as in transformers; the first changes nothing"
    )
    optimizer: str = Field(
        "adamw", description="adamw, sgd, adafactor, adamw_8bit, paged_adamw, paged_adamw_8bit, or your own as FILE.py:Class"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, on every trained matrix")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first beta")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second beta")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="maximum global gradient norm; 0: no clipping")
    router_aux_loss_coef: float | None = Field(
        None, ge=0, description="factor of the router's load-balancing loss; unset: from the model's config"
    )
    mixed_precision: Precision | None = Field(
        None, description="no, bf16 or fp16; unset: from the launcher's flag, its YAML, then the DeepSpeed JSON"
    )
    seed: int = Field(42, ge=0, lt=2**32, description="seed of weights, sample order and dropout")

    # --- evaluation, checkpoints, logs
    per_device_eval_batch_size: int = Field(8, ge=1, description="held-out samples per batch and process")
    eval_steps: Interval | Literal["auto"] = Field(
        AUTOMATIC,
        description="evaluate every N steps, and at the end; epoch: at each epoch's end; a share, as 0.1: of the run's steps; "
        "0: at the end only; auto: at checkpoints, using at most 5 % of the run's time",
        json_schema_extra={"choices": ["N", "share", "epoch", AUTOMATIC]},
    )
    eval_tasks: list[str] = Field(
        [], description="task files (.jsonl) and tasks of lm-evaluation-harness (names or .yaml), measured at every evaluation"
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, description="end the run after this many evaluations in a row without a lower held-out loss"
    )
    final_model: Literal["last", "best"] = Field(
        "last", description="the model that is written: of the last step, or of the checkpoint with the lowest held-out loss"
    )
    eval_on_start: bool = Field(False, description="evaluate before the first step too")
    save_steps: Interval | Literal["auto"] = Field(
        AUTOMATIC,
        description="save a checkpoint every N steps, and at the end; epoch: at each epoch's end; a share, as 0.1: of the "
        "run's steps; 0: at the end only; auto: one early checkpoint, then ten over the run, at most 30 minutes apart, using "
        "at most 5 % of the run's time",
        json_schema_extra={"choices": ["N", "share", "epoch", AUTOMATIC]},
    )
    save_total_limit: int | None = Field(
        None,
        ge=1,
        description=f"maximum number of checkpoints that are kept; unset: {KEPT_AUTOMATICALLY} with save_steps auto, else all",
    )
    async_save: bool = Field(False, description="write checkpoints in the background, from a copy in host memory")
    on_save_error: Literal["stop", "continue"] = Field("stop", description="action if a checkpoint cannot be saved")
    on_low_disk: Literal["error", "warn"] = Field("error", description="action if the disk is too small for the checkpoints")
    resume_from_checkpoint: str | None = Field(
        None, description="auto (the newest complete checkpoint), best (lowest held-out loss), or a folder"
    )
    on_spike: OnSpike = Field(
        "rollback",
        description="log: record it only; skip: leave its samples out; rollback: return to a checkpoint, with a stronger "
        "recovery action each time; lower_rate: return and lower the learning rate; stop: end the run",
    )
    policy: list[PolicyAction] | None = Field(
        None,
        min_length=1,
        description="recovery actions of on_spike rollback, in this order: some of replay, skip, lower_rate, further_back and "
        "stop; unset: replay, skip, lower_rate, stop; the replay is left out if it would abandon more than a tenth of the run",
    )
    max_rollbacks: int = Field(8, ge=0, description="maximum number of rollbacks; then the run stops")
    rollback_lr_factor: float = Field(
        0.5, gt=0, lt=1, description="factor of the learning rate after a rollback that lowers it"
    )
    rollback_lr_steps: int = Field(500, ge=1, description="steps in which the lowered rate returns to its schedule")
    expect: list[str] = Field(
        [],
        description="events that raise the loss or its noise and damage nothing, such as '200 the mixture changes'",
    )
    logging_steps: int = Field(10, ge=1, description="log losses, gradient norms and rates every N steps")
    profile: str | None = Field(
        None, description="steps to profile, as 12 or 10-12; each rank writes a Chrome trace into the runlog's folder"
    )
    hang_timeout: float = Field(
        300.0, ge=0, description="seconds without progress of a process after which the run stops and names it; 0: never"
    )
    report_to: list[Tracker] = Field([], description="experiment trackers, each of which has to be installed")
    project: str | None = Field(None, description="project of the trackers; unset: WANDB_PROJECT, or zerobook")
    run_name: str | None = Field(None, description="name of the run in the trackers; unset: WANDB_NAME, or output_dir's name")
    hooks: list[str] = Field([], description="hooks of your own, each as FILE.py:Class or module:Class")

    @property
    def order_settings(self) -> OrderSettings:
        """The settings that decide the order of the samples."""
        keys = {field.name for field in fields(OrderSettings)}
        return OrderSettings.from_config(self.model_dump(include=keys))

    @property
    def initialised_from(self) -> str | None:
        """The architecture that is trained from scratch: a hub name or a folder. None if weights are loaded."""
        return None

    @property
    def rows_shared_by(self) -> str | None:
        """The flag by which samples share a row of a batch: ``packing`` or ``padding_free``; None if none does."""
        if self.packing:
            return "packing"
        return "padding_free" if self.padding_free else None

    @property
    def eval_rows(self) -> int:
        """Held-out samples per batch and process.

        With ``padding_free``, at most those of a training micro-batch: the memory of attention can grow with the square of the
        joined row.
        """
        if self.padding_free:
            return min(self.per_device_eval_batch_size, self.per_device_train_batch_size)
        return self.per_device_eval_batch_size

    @property
    def row_length(self) -> int:
        """Tokens that a row's ``input_ids`` may have."""
        if not hasattr(type(self), "length_key"):
            raise TypeError(f"{type(self).__name__}: set length_key to the name of the field that limits a row's tokens.")
        return getattr(self, self.length_key)

    @property
    def trains_adapters(self) -> bool:
        """Return whether the loaded weights are frozen, and adapters are trained beside them."""
        return False

    @property
    def base_format(self) -> str | None:
        """The format that frozen weights are quantised to while loading: ``nf4`` or ``int8``; None if they are not."""
        return None

    @property
    def result(self) -> str:
        """The folder in ``output_dir`` that the trained weights are saved in."""
        return "adapter" if self.trains_adapters else "model"

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_content_as_path(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name not in FILES or not isinstance(value, str):
            return value
        if info.field_name == "chat_template" and re.search(r"{[{%#]|\n", value):
            raise PydanticCustomError("choice", "Input should be a file: write the template into FILE.jinja, and name that")
        # The system answers a longer name with an error of its own.
        if "\0" in value or any(len(name.encode()) > LONGEST_NAME for name in value.split("/")):
            raise PydanticCustomError("choice", "Input should be a path")
        return value

    @field_validator("output_dir")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return os.path.expanduser(value)

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _read_mixed_precision(cls, value: Any) -> Any:
        # Others write none and false for it. Here none would mean unset, and another file might turn half precision on.
        if value is False or value in ("none", "false", "off"):
            return "no"
        return value

    @field_validator("new_tokens", mode="before")
    @classmethod
    def _refuse_joined_tokens(cls, value: Any) -> Any:
        if as_list(value) == [value] and re.search("[^,],[^,]", str(value)):
            raise PydanticCustomError(
                "choice", "Input should be a list, since a token may have a comma: [A, B] in YAML, --new_tokens A B as a flag"
            )
        return value

    @field_validator("profile", mode="before")
    @classmethod
    def _read_profile(cls, value: Any) -> Any:
        if is_none(value):
            return None
        steps = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", str(value))
        if steps is None or int(steps[1]) > int(steps[2] or steps[1]):
            raise PydanticCustomError("choice", "Input should be a step or a range of steps, as 12 or 10-12")
        return str(value)

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _read_resume(cls, value: Any) -> Any:
        """Read true and false as transformers' scripts do: the newest checkpoint, and none."""
        return {"true": AUTOMATIC, "false": None}.get(str(value).lower(), value)

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step to profile; None for none."""
        if self.profile is None:
            return None
        first, _, last = self.profile.partition("-")
        return int(first), int(last or first)

    @field_validator("eval_steps", "save_steps", mode="before")
    @classmethod
    def _read_interval(cls, value: Any) -> Any:
        if value is None:
            return AUTOMATIC
        if value in ("no", False):
            return 0
        if value in ("epoch", AUTOMATIC):
            return value
        number = _number(value)
        if number is not None and 0 < number < 1:
            return number
        if number is None or not number.is_integer() or number < 0:
            raise PydanticCustomError(
                "choice", "Input should be a number of steps, a share of the run as 0.1, epoch, auto, or 0 for none"
            )
        return int(number)

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _read_checkpointing(cls, value: Any) -> Any:
        # In the transformers examples, gradient_checkpointing, the other name of the key, is true or false.
        with suppress(ValidationError):
            return "full" if TypeAdapter(bool).validate_python(value) else "none"
        # In the list of choices, every:N stands for any number, so the word itself is not a value.
        is_choice = value in CHECKPOINTING and value != "every:N"
        if not is_choice and not re.fullmatch(r"every:([2-9]|[1-9]\d+)", str(value)):
            raise PydanticCustomError("choice", "Input should be none, full, every:N with N from 2, selective or offload")
        return value

    def loaded_dtype(self, precision: str) -> Dtype:
        """Return the dtype that the model is loaded in: ``dtype`` where the user set it, or where its weights are trained.

        A frozen base has no use for fp32 in mixed precision, which computes in half precision anyway. In a 4-bit base,
        the weights that are not quantised decide the dtype of the activations between its layers.

        Args:
            precision: of the run: ``no``, ``bf16`` or ``fp16``.
        """
        if not self.trains_adapters or "dtype" in self.model_fields_set:
            return self.dtype
        halves: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16"}
        return halves.get(precision, self.dtype)

    def accumulation_on(self, readers: int) -> int:
        """Return the micro-batches of a step where ``readers`` processes read different samples."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return max(1, self.global_batch_size // (self.per_device_train_batch_size * readers))

    def warmup_steps(self, total: int) -> int:
        """Return the steps of the warm-up in a run of ``total`` steps."""
        return self.num_warmup_steps or math.ceil(self.warmup_ratio * total)

    def dependent_defaults(self) -> dict[str, Any]:
        """Return defaults that depend on other keys, and replace the class's if the user gave none."""
        return {}

    def model_post_init(self, context: Any) -> None:
        # They are not fields that the user set, so they are not in `model_fields_set`; the config is frozen for all others.
        for key, value in self.dependent_defaults().items():
            if key not in self.model_fields_set:
                vars(self)[key] = value

    def dataset_specs(self) -> list[DatasetSpec]:
        """Return the training datasets."""
        if self.datasets:
            return self.datasets
        path = self.dataset_name or self.train_file
        return [self._spec(path=str(path), config_name=self.dataset_config_name, revision=self.dataset_revision)]

    def with_data_revisions(self, revisions: Sequence[str | None]) -> Self:
        """Return the config with other revisions of its training datasets, in the order of `dataset_specs`."""
        if not self.datasets:
            return self.model_copy(update={"dataset_revision": revisions[0]})
        pairs = zip(self.datasets, revisions, strict=True)
        return self.model_copy(update={"datasets": [spec.model_copy(update={"revision": new}) for spec, new in pairs]})

    def validation_spec(self) -> DatasetSpec:
        """Return the validation file as a dataset of its own, all of it held out."""
        return self._spec(path=str(self.validation_file), name="validation")

    def _spec(self, **keys: Any) -> DatasetSpec:
        return DatasetSpec(**keys, format=self.format, text_column=self.text_column, summary_column=self.summary_column)

    def problems(self) -> list[str]:
        """Return disagreements between keys, and files that are not there. Subclasses add their own."""
        problems = [*self._data_problems(), *self._row_problems()]
        if self.streaming:
            problems += self._streaming_problems()
        problems += self._missing_files()
        problems += _unusable_folder("output_dir", self.output_dir)
        problems += self._missing_code()
        resume = self.resume_from_checkpoint
        if resume and resume not in ("auto", "best") and not Path(resume).expanduser().exists():
            problems.append(f"resume_from_checkpoint: no such folder: {resume}. Give a folder, auto, or best.")
        problems += self._schedule_problems()
        problems += self._policy_problems()
        return problems

    def _policy_problems(self) -> list[str]:
        """Return a problem for an order of recovery actions that cannot be followed, and for events without a step."""
        problems = []
        for entry in self.expect:
            event = re.fullmatch(r"(\d{1,9}) \S.*", entry)
            # A text with a later step is several events, which a list would tell apart.
            numbers = re.findall(r", *(\d{1,9}) ", entry)
            if event is None or any(int(number) > int(event[1]) for number in numbers):
                problems.append(
                    f"expect: {entry!r} is not one step and what happens there. Write '200 the mixture changes', and an entry "
                    "for each event."
                )
        if self.policy is None:
            return problems
        for action, count in Counter(self.policy).items():
            if count > 1:
                problems.append(f"policy: {action} occurs {count} times. Name each action once; lower_rate is tried twice.")
        if "stop" in self.policy and self.policy[-1] != "stop":
            problems.append("policy: nothing can follow stop, which ends the run. Put it last.")
        if self.on_spike != "rollback":
            problems.append(f"policy: on_spike {self.on_spike} follows no order. Drop policy, or set on_spike to rollback.")
        return problems

    def _data_problems(self) -> list[str]:
        """Return a problem for data that are named twice, or alike."""
        problems = []
        settings = [f"{key}={getattr(self, key)!r}" for key in DATA if getattr(self, key)]
        if len(settings) > 1:
            problems.append(f"dataset_name: {' and '.join(settings)} are set together. Keep one.")
        # The logs tell the datasets apart by these names.
        counts = Counter(spec.name for spec in self.datasets or [])
        for name, count in sorted(counts.items()):
            if count > 1:
                problems.append(f"datasets: {count} of them are called {name!r}. Give each a name of its own.")
        return problems

    def _row_problems(self) -> list[str]:
        """Return a problem for each two settings of rows that do not go together."""
        problems = []
        if self.packing and self.group_by_length:
            problems.append(
                "group_by_length: packed rows have equal lengths, so grouping has no effect. Drop group_by_length or packing."
            )
        if self.packing and self.padding_free:
            problems.append("padding_free: packed rows are nearly full already. Drop padding_free or packing.")
        if self.padding_free and self.group_by_length:
            problems.append("group_by_length: joined rows have no padding, so grouping has no effect. Drop it or padding_free.")
        if self.padding_free and self.attn_implementation == "flex_attention":
            problems.append(
                "padding_free: every joined row has another length, and flex_attention is compiled for each. Use --packing, or "
                "another --attn_implementation."
            )
        return problems

    def _streaming_problems(self) -> list[str]:
        """Return a problem for each setting that needs the number of samples, which a stream does not have."""
        problems = []
        specs = self.datasets or []
        if self.max_train_steps is None:
            problems.append("streaming: the number of samples is unknown, so an epoch has no length. Give --max_train_steps.")
        if self.max_train_samples is not None or any(spec.limit or "[" in (spec.split or "") for spec in specs):
            problems.append(
                "streaming: max_train_samples, limit and a range of rows in split need the number of samples, which is "
                "unknown. Drop them, or streaming."
            )
        if len(specs) > 1 and not all(spec.weight for spec in specs):
            problems.append("streaming: a mixture of streams needs weights. Give each entry of datasets a weight.")
        return problems

    def _missing_files(self) -> list[str]:
        """Return a problem for each file or folder that is named and not there."""
        problems = []
        # Not every recipe has all of the keys.
        for key in ("train_file", "validation_file", "model_name_or_path", "tokenizer_name", "config_name", "dataset_name"):
            value = getattr(self, key, None) or ""
            # The other keys may also have names on the hub, which are not looked up here.
            is_local = key.endswith("_file") and not value.startswith("embedded:")
            if value and (is_local or hub.is_path(value)):
                problems += _missing_path(key, value)
        template = self.chat_template
        if template and not template_file(template).exists():
            # It may be meant as the name of a shipped one.
            near = nearest(template, set(NAMES))
            problems.append(f"chat_template: no such file or folder: {template}, looked for in {Path.cwd()}.{near}")
        return problems

    def _missing_code(self) -> list[str]:
        """Return a problem for each tracker, hook and task that the run would not be able to use."""
        problems = []
        for tracker in self.report_to:
            # accelerate leaves out a tracker that is not installed.
            if importlib.util.find_spec(tracker) is None:
                problems.append(f"report_to: {tracker} is not installed. Run: pip install {tracker.replace('_', '-')}")
        for spec in self.hooks:
            hook_problem = user_code.problem("hooks", spec)
            if hook_problem:
                problems.append(hook_problem)
        for task in self.eval_tasks:
            if task.endswith((".jsonl", ".json", ".yaml", ".yml")) and not Path(task).expanduser().is_file():
                problems.append(f"eval_tasks: no such file: {task}")
        harness_tasks = [task for task in self.eval_tasks if not task.endswith((".jsonl", ".json"))]
        if harness_tasks and importlib.util.find_spec("lm_eval") is None:
            problems.append(
                f"eval_tasks: {harness_tasks[0]} is a task of lm-evaluation-harness, which is not installed. Run: pip install "
                "'zerobook[eval]'. A task file ends in .jsonl."
            )
        return problems

    def _schedule_problems(self) -> list[str]:
        """Return a problem for each two settings of the rate, the steps and the evaluations that do not go together."""
        problems = []
        if self.num_warmup_steps and self.warmup_ratio:
            problems.append(
                f"warmup_ratio: it is {self.warmup_ratio:g}, and num_warmup_steps is {self.num_warmup_steps}. Keep one of them."
            )
        if self.early_stopping_patience and self.eval_steps in (0, AUTOMATIC):
            problems.append(
                "early_stopping_patience: it counts evaluations, and automatic ones are at other steps in each run. Give "
                "--eval_steps."
            )
        if self.lr_scheduler_type == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            problems.append(
                f"learning_rate: {self.learning_rate:g} is not above {POLYNOMIAL_END:g}, where lr_scheduler_type polynomial "
                "ends. Raise it, or take linear."
            )
        if self.max_train_steps is not None and self.num_warmup_steps > self.max_train_steps:
            problems.append(
                f"num_warmup_steps: {self.num_warmup_steps} warm-up steps do not fit into "
                f"max_train_steps={self.max_train_steps}. Lower one or raise the other."
            )
        return problems

    @cached_property
    def chat_template_text(self) -> str | None:
        """The text of ``chat_template``; None if the tokenizer's own is used. The file is read once.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return read_text(template_file(self.chat_template))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"chat_template: {self.chat_template} cannot be read: {reason}. Give a Jinja file.") from None

    def with_chat_template(self, name: str) -> Self:
        """Return the config with another ``chat_template``."""
        changed = self.model_copy(update={"chat_template": name})
        vars(changed).pop("chat_template_text", None)  # cached for the value before
        return changed

    def names_data(self) -> bool:
        """Return whether the config names training data."""
        return bool(self.dataset_name or self.train_file or self.datasets)

    @property
    def limits_checkpoints_itself(self) -> bool:
        """Whether the run decides when to save and how many checkpoints it keeps: nobody has set either."""
        return self.save_total_limit is None and self.save_steps == AUTOMATIC

    @property
    def kept_checkpoints(self) -> int | None:
        """The most checkpoints that are kept, besides those that are protected; None for all."""
        return KEPT_AUTOMATICALLY if self.limits_checkpoints_itself else self.save_total_limit

    def checkpoints_at_once(self, steps: int | None, *, has_held_out: bool = True) -> int | None:
        """Return how many checkpoints are on the disk at the same time; None if that depends on the number of steps.

        Args:
            steps: of the run; None if it is not known.
            has_held_out: there are held-out data, so that one checkpoint is the best.
        """
        saves = self._saves(steps)
        if self.kept_checkpoints is None:
            return saves
        # The best and the newest that is proven good are protected as well; one more is there while it is written.
        goes_back = self.on_spike in ("rollback", "lower_rate")
        has_best = has_held_out and self.eval_steps != 0
        most = self.kept_checkpoints + has_best + goes_back + 1
        if saves is None:
            return most
        return min(saves, most)

    def _saves(self, steps: int | None) -> int | None:
        """Return the most checkpoints that a run of ``steps`` steps writes. Its end is always saved."""
        if self.save_steps == 0:
            return 1
        if isinstance(self.save_steps, float):
            return 1 + int(1 / self.save_steps)
        if self.save_steps == "epoch" and self.max_train_steps is None:
            return math.ceil(self.num_train_epochs)
        if steps is None:
            return None
        # An automatic interval may be a single step, and so may an epoch.
        interval = self.save_steps if isinstance(self.save_steps, int) else 1
        return 1 + max(steps - 1, 0) // interval


def _missing_path(key: str, value: str) -> list[str]:
    """Return a problem if ``value`` is not a file or folder, else an empty list."""
    path = Path(value).expanduser()
    if path.exists():
        return []
    return [f"{key}: no such file or folder: {value}, looked for in {Path.cwd()}.{nearest_file(path)}"]


def _unusable_folder(key: str, path: str) -> list[str]:
    """Return why ``path``, which may not exist yet, cannot be a folder to write to; an empty list where it can."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return [f"{key}: {path} cannot be a folder: {folder} is a file. Give another {key}."]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"{key}: {path} cannot be written: {folder} is not writable for this user. Give another {key}."]
    return []


ConfigT = TypeVar("ConfigT", bound=RecipeConfig)


PYTHON = "Python"
"""Source of a value that was set in Python."""


class ConfigSources(dict[str, str]):
    """Source of the value of each key: ``default``, ``FILE.yaml``, ``flag --x`` or a strategy file."""

    def given(self, key: str) -> bool:
        """Return whether the user set the key, in YAML or by flag."""
        return not self.get(key, "default").startswith("default")

    def typed(self, key: str) -> bool:
        """Return whether the user set the key by flag."""
        return self.get(key, "default").startswith("flag ")

    def from_yaml(self, key: str) -> bool:
        """Return whether the key was set in a recipe's YAML, which somebody else may have written."""
        return self.given(key) and not self.typed(key) and self[key] != PYTHON


@dataclass(frozen=True)
class Parsed(Generic[ConfigT]):
    """Flags and YAML, read.

    Attributes:
        config: the config of all values that are valid.
        sources: the source of each of its values.
        dry_run: ``--dry-run`` was given.
        problems: every unknown key, wrong type, missing file and disagreement.
        launch_keys: the `LAUNCH_KEYS` of the YAML.
    """

    config: ConfigT
    sources: ConfigSources
    dry_run: bool
    problems: list[str]
    launch_keys: dict[str, str]


def parse(
    config_class: type[ConfigT], argv: list[str] | None = None, *, data: bool = True
) -> tuple[ConfigT, ConfigSources, bool]:
    """Read flags and the YAML they name. See `read` for the arguments.

    Returns:
        (config, source of each value, whether ``--dry-run`` was asked for).

    Raises:
        ConfigError: with every unknown key, wrong type, missing file and disagreement at once.
    """
    parsed = read(config_class, argv, data=data)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.config, parsed.sources, parsed.dry_run


def read(config_class: type[ConfigT], argv: list[str] | None = None, *, data: bool = True) -> Parsed[ConfigT]:
    """Read flags and the YAML they name, and gather the problems: those of the launch can then be told together with them.

    Args:
        config_class: the recipe's config.
        argv: the flags, without the program's name; ``sys.argv[1:]`` when None.
        data: training data has to be named.

    Raises:
        ConfigError: the YAML cannot be read. What it would have set is not known, so only the flags themselves are checked.
    """
    if argv is None:
        argv = sys.argv[1:]
    arguments, other_words, problems = _read_flags(_parser(config_class), argv)
    # Flags that are not given are not attributes, so these are the user's alone.
    flags = {key: value for key, value in vars(arguments).items() if key not in ("config", "dry_run")}
    flag_values = _single_values(flags)
    flag_sources = {key: f"flag --{key}" for key in flags}
    problems += _problems_of_words(other_words, config_class)

    values: dict[str, Any] = {}
    launch_keys = {}
    sources = ConfigSources(dict.fromkeys(config_class.model_fields, "default"))
    if arguments.config:
        try:
            # An empty file sets nothing.
            file_values = read_mapping(arguments.config, "config", lambda text: load_yaml_as_text(text) or {}, may_be_pipe=True)
        except ConfigError as error:
            _, invalid = _valid(config_class, flag_values, ConfigSources(flag_sources))
            raise ConfigError([*error.problems, *problems, *invalid]) from None
        # A recipe may have a key of such a name.
        for key in LAUNCH_KEYS:
            if key in file_values and key not in config_class.model_fields:
                value = file_values.pop(key)
                if value is not None:
                    launch_keys[key] = str(value)
        values, file_problems = _name_values(arguments.config, file_values, config_class)
        problems += file_problems
        sources.update(dict.fromkeys(values, arguments.config))
    # Flags override the file.
    values |= flag_values
    sources.update(flag_sources)

    config, invalid = _valid(config_class, values, sources)
    problems += invalid
    # What is missing may be there under a wrong name, or with a wrong value.
    if data and not config.names_data() and not any(_is_about(key, problems) for key in DATA):
        problems.append("dataset_name: no training data is named. Give --dataset_name, --train_file, or datasets in the YAML.")
    # A refused value was replaced by its default, so a second problem of that key would be about the default.
    problems += [problem for problem in config.problems() if not _is_about(problem.partition(":")[0], problems)]
    return Parsed(config, sources, arguments.dry_run, problems, launch_keys)


def _problems_of_words(words: list[str], config_class: type[RecipeConfig]) -> list[str]:
    """Return a problem for each word of a command line that is not a flag of the recipe, nor a value of one."""
    names = set(config_class.model_fields) | set(ALIASES)
    problems = []
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-").split("=")[0].replace("-", "_")
            problems.append(f"{word}: no such flag.{_hint(name, names, '--')}")
    # Words behind an unknown flag are its values.
    if words and not problems:
        problems.append(f"{' '.join(words)}: a value without a flag. Flags look like --learning_rate 5e-4.")
    return problems


def _name_values(
    yaml_file: str, file_values: dict[str, Any], config_class: type[RecipeConfig]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a YAML file under their names, without aliases, and a problem for each key that is not taken."""
    names = set(config_class.model_fields) | set(ALIASES)
    values: dict[str, Any] = {}
    problems = []
    for key, value in file_values.items():
        name = ALIASES.get(key, key)
        if name not in config_class.model_fields:
            problems.append(f"{yaml_file}: {key}: no such key.{_hint(str(key), names)}")
        elif name in values:
            problems.append(f"{yaml_file}: {key}: the key is given twice; its other name is {name}.")
        else:
            if name in LISTS_OF_PATHS:
                value = as_list(value)
            values[name] = _beside(yaml_file, name, value)
    return values, problems


def _valid(config_class: type[ConfigT], values: dict[str, Any], sources: ConfigSources) -> tuple[ConfigT, list[str]]:
    """Return the config of the values that are valid, and a problem for each that is not. Takes its source away."""
    try:
        return config_class(**values), []
    except ValidationError as error:
        errors = error.errors()
    problems = [_explain(error, sources) for error in errors]
    invalid_keys = {str(error["loc"][0]) for error in errors}
    sources.update(dict.fromkeys(invalid_keys, "default"))
    # Disagreements between keys are looked for in the config of what is left.
    valid_values = {key: value for key, value in values.items() if key not in invalid_keys}
    config, _ = _valid(config_class, valid_values, sources)
    return config, problems


def _is_about(key: str, problems: list[str]) -> bool:
    """Return whether one of ``problems`` is about a key, or says that it was meant."""
    pattern = re.compile(rf"(^|mean )(--)?{re.escape(key)}\b")
    return any(pattern.search(problem) for problem in problems)


class ConfigDraft(Generic[ConfigT]):
    """A config while its launch is resolved. A strategy file, or the checkpoint that is resumed, may set what no person set.

    Attributes:
        config: the config with the values set so far. Configs are frozen, so each change makes another one.
        sources: the source of each value.
    """

    def __init__(self, config: ConfigT, sources: ConfigSources):
        self.config = config
        self.sources = ConfigSources(sources)

    def set(self, source: str, **values: Any) -> None:
        """Set values of the config, all of them from ``source``."""
        self.config = self.config.model_copy(update=values)
        self.sources.update(dict.fromkeys(values, source))

    def problems(self) -> list[str]:
        """Validate the config again, and return a sentence for each value that it does not take."""
        try:
            type(self.config)(**self.config.model_dump(exclude_unset=True))
        except ValidationError as error:
            return [_explain(detail, self.sources) for detail in error.errors()]
        return []


def from_python(config: RecipeConfig) -> ConfigSources:
    """Return the sources of a config that was made in Python.

    Raises:
        ConfigError: with every missing file and disagreement at once.
    """
    problems = config.problems()
    if not config.names_data():
        problems.insert(0, "dataset_name: no training data is named. Set dataset_name or train_file.")
    if problems:
        raise ConfigError(problems)
    sources = ConfigSources(dict.fromkeys(type(config).model_fields, "default"))
    sources.update(dict.fromkeys(config.model_fields_set, PYTHON))
    return sources


def changed(
    config: RecipeConfig, sources: ConfigSources, kind: type[ConfigT], changes: dict[str, Any]
) -> tuple[ConfigT, ConfigSources]:
    """Return the values given for one recipe as another recipe's config; keys that the other does not have are left out.

    Raises:
        ConfigError: with every disagreement, or every value that is not valid there.
    """
    values = {key: getattr(config, key) for key in type(config).model_fields if sources.given(key)} | changes
    common_values = {key: value for key, value in values.items() if key in kind.model_fields}
    new_sources = ConfigSources({key: sources.get(key, "default") for key in kind.model_fields})
    new_sources.update(dict.fromkeys(changes, "advice"))
    try:
        new_config = kind(**common_values)
    except ValidationError as error:
        raise ConfigError([_explain(detail, new_sources) for detail in error.errors()]) from None
    problems = new_config.problems()
    if problems:
        raise ConfigError(problems)
    return new_config, new_sources


def _parser(config_class: type[RecipeConfig]) -> _Parser:
    doc = sys.modules[config_class.__module__].__doc__ or ""
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="the same keys as below, and those of zerobook launch; flags override it"
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        dest="dry_run",
        action="store_true",
        help="print the resolved config, the source of each value and the batch arithmetic; train nothing",
    )
    alias_flags: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        alias_flags.setdefault(name, []).append(f"--{alias}")
    for name, field in config_class.model_fields.items():
        if name == "datasets":
            # A list of mappings is written in YAML.
            continue
        extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        metavar = _kind(field.annotation)
        if "choices" in extra:
            metavar = "{" + ",".join(extra["choices"]) + "}"
        # Without a default, a flag that is not given cannot hide the value of the YAML. pydantic converts the text.
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "metavar": metavar}
        if field.annotation is bool or "bare" in extra:
            options |= {"nargs": "?", "const": extra.get("bare", "true")}
        elif get_origin(field.annotation) is list or "list[" in str(field.annotation):
            options |= {"nargs": "*"}
        # argparse formats help texts with %.
        help_text = f"{field.description or ''} (default: {field.default})".replace("%", "%%")
        parser.add_argument(f"--{name}", *alias_flags.get(name, []), help=help_text, **options)
    return parser


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    # The first type of a union or a list says enough.
    inner = [argument for argument in get_args(annotation) if argument is not type(None)]
    if inner:
        return _kind(inner[0])
    return getattr(annotation, "__name__", str(annotation)).upper()


class _FlagError(Exception):
    """A flag that argparse refuses."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _FlagError(message)


def _read_flags(parser: _Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the flags, the words that are none, and a problem for each flag without its value."""
    problems: list[str] = []
    words = list(argv)
    # argparse stops at the first of them, so that one is taken away and the rest is read again.
    while True:
        try:
            arguments, other_words = parser.parse_known_args(words)
        except _FlagError as error:
            flags = words
            reason = str(error)
            # The flag is named with all its spellings: "argument --max_train_steps/--max_steps: expected one argument".
            refusal = re.match(r"argument ([^:]+): (.*)", reason, re.S)
            if refusal:
                flags = refusal[1].split("/")
                reason = refusal[2]
            words, removed = _without_first(words, flags)
            problems.append(f"{removed}: {reason}.")
        else:
            return arguments, other_words, problems


def _without_first(words: list[str], flags: list[str]) -> tuple[list[str], str]:
    """Return the words without the first of ``flags`` that has no value, and that one."""
    for index, word in enumerate(words):
        following = words[index + 1 : index + 2]
        has_value = bool(following) and not following[0].startswith("--")
        if word in flags and not has_value:
            return words[:index] + words[index + 1 :], word
    return [], " ".join(words)


def _single_values(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the values of flags, where a list of one text is that text: it may be a list of its own."""
    values = dict(flags)
    for key, value in flags.items():
        if isinstance(value, list) and len(value) == 1:
            values[key] = value[0]
    return values


PATHS = (
    "train_file",
    "validation_file",
    "chat_template",
    "eval_tasks",
    "hooks",
    "model_name_or_path",
    "tokenizer_name",
    "config_name",
    "adapter_path",
    "dataset_name",
)
"""Keys that may name a file or a folder."""
LISTS_OF_PATHS = ("eval_tasks", "hooks")
FILES = (*PATHS, "output_dir", "cache_dir", "resume_from_checkpoint")
LAUNCH_KEYS = ("strategy", "num_processes")
"""Keys of a recipe's YAML that are for ``zerobook launch``, which reads them before there are processes."""
DATA = ("dataset_name", "train_file", "datasets")
"""Keys that name the training data."""
LONGEST_SHOWN = 200
"""Characters of a wrong value that a message repeats."""
LONGEST_NAME = 255
"""Bytes that a name in a path may have, on all common file systems."""


def _beside(yaml_file: str, key: str, value: Any) -> Any:
    """Return a value of a YAML file whose relative paths start beside that file, where nothing of that name is in the working
    folder."""
    if isinstance(value, list):
        return [_beside(yaml_file, key, item) for item in value]
    if key == "datasets" and isinstance(value, dict) and isinstance(value.get("path"), str):
        return value | {"path": _path_beside(yaml_file, value["path"])}
    # `optimizer` is the name of a shipped one, or code.
    if isinstance(value, str) and (key in PATHS or (key == "optimizer" and ".py:" in value)):
        return _path_beside(yaml_file, value)
    return value


def _path_beside(yaml_file: str, name: str) -> str:
    path = name
    class_name = ""
    # Code is named as FILE.py:Class.
    if ".py:" in name:
        path, _, class_name = name.partition(":")
    path_beside = Path(yaml_file).expanduser().parent / path
    if Path(path).expanduser().exists() or Path(path).is_absolute() or not path_beside.exists():
        return name
    if class_name:
        return f"{path_beside}:{class_name}"
    return str(path_beside)


def _hint(name: str, names: set[str], prefix: str = "") -> str:
    """Return a sentence about the key that is meant: by its name in another trainer, or by its spelling."""
    translation = other_trainers.translate(name, names, prefix)
    if translation:
        return f" {translation}"
    return nearest(name, names, prefix)


def _explain(error: Any, sources: ConfigSources) -> str:
    """Return the sentence for one of pydantic's errors."""
    path = ".".join(map(str, error["loc"]))
    source = sources.get(str(error["loc"][0]), "default")
    if error["type"] == "extra_forbidden":
        return f"{source}: {path}: no such key.{_hint(str(error['loc'][-1]), set(DatasetSpec.model_fields))}"
    if error["type"] == "missing":
        return f"{source}: {path}: the key is missing."
    # Keep the first half of "a valid number, unable to parse string as a number".
    message = error["msg"].removeprefix("Input should be ").partition(", unable to parse")[0].rstrip(".")
    # The value may be a file's content in the place of its name.
    shown = repr(error["input"])
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}..."
    correction = ""
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        correction = nearest_value(str(error["loc"][0]), str(error["input"]), choices)
    return f"{path}: got {shown} (from {source}), expected {message}.{correction}"
