"""The typed config of a recipe. Keys have the names of the transformers examples."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from zerobook.constants import POLYNOMIAL_END
from zerobook.errors import ConfigError
from zerobook.utils import hub, user_code
from zerobook.utils.chat_template import NAMES, template_file
from zerobook.utils.nearest import nearest, nearest_file
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import plain
from zerobook.utils.written_values import as_list, as_whole_number, is_none

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
# A number of steps, a share of the run's steps between 0 and 1, or ``epoch``.
Interval = int | float | Literal["epoch"]
# Value of ``save_steps``: the run decides by the measured time, see `zerobook.training.intervals`.
AUTOMATIC: Literal["auto"] = "auto"
# Checkpoints that are kept if the run decides when to save, and no limit is set.
KEPT_AUTOMATICALLY = 2
OnSpike = Literal["log", "skip", "rollback", "lower_rate", "stop"]
# A recovery action of ``--on_spike rollback``, see `zerobook.monitor.policy`.
PolicyAction = Literal["replay", "skip", "lower_rate", "further_back", "stop"]
Format = Literal["text", "instruction", "sharegpt", "messages", "prompt_completion", "pairs", "tokenized"]
# Keys that may name a file or a folder.
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
FILES = (*PATHS, "output_dir", "cache_dir", "resume_from_checkpoint")
# Keys that name the training data.
DATA = ("dataset_name", "train_file", "datasets")
# Bytes that a name in a path may have, on all common file systems.
LONGEST_NAME = 255


class _Keys(BaseModel):
    """Keys of a config, with values as people write them: see `zerobook.utils.written_values`."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_value(cls, value: Any, info: ValidationInfo) -> Any:
        # The types that the field may have.
        types = _union_members(cls.model_fields[str(info.field_name)].annotation)
        # pydantic would take ``true`` as 1.
        if isinstance(value, bool) and bool not in types and types & {int, float}:
            raise PydanticCustomError("number", "Input should be a number")
        if type(None) in types and is_none(value):
            return None
        list_types = [kind for kind in types if get_origin(kind) is list]
        if list_types:
            has_choices = get_origin(get_args(list_types[0])[0]) is Literal
            # In YAML, [none] means an empty list. If the items are free text, none may be one of them.
            if has_choices and value == ["none"]:
                return []
            return as_list(value)
        # In flags and YAML, a whole number may be written as 1e3, which pydantic refuses for an int.
        return as_whole_number(value) if int in types else value


def _number(value: Any) -> float | None:
    """Return ``value``, which may be a flag's text, as a number; None if it is not a number."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _union_members(annotation: Any) -> set[Any]:
    """Return the types in a union. Another type is returned as the only one."""
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
    weight: float | None = Field(
        None,
        gt=0,
        description="relative share of the rows: 3 and 1 mean three rows for one; unset: 1 if another dataset has a weight; if "
        "none has, each dataset has the share of its rows",
    )
    limit: int | None = Field(None, ge=1, description="maximum number of samples to read")
    text_column: str | None = Field(None, description="see the recipe's text_column")
    summary_column: str | None = Field(None, description="see the recipe's summary_column")

    def model_post_init(self, context: Any) -> None:
        name = self.name or Path(self.path.removeprefix("embedded:")).absolute().name.split(".")[0]
        # Lines of the output begin with the name, so control characters are removed from it.
        self.name = plain(name, lines=False)


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
        description="dtype of the loaded weights; trained weights are kept in fp32. If you do not set it, a frozen base is "
        "loaded in the dtype of mixed_precision",
    )
    attn_implementation: Literal["auto", "flash_attention_2", "flex_attention", "sdpa", "eager"] = Field(
        "auto", description="attention kernel; auto chooses the fastest that this device supports"
    )
    torch_compile: bool = Field(
        False,
        description="compile the model's layers with torch.compile, which fuses operations and takes about half a minute at "
        "the start",
    )
    fast: bool = Field(
        False,
        description="turn on torch_compile and data workers where they help on this hardware; losses stay the same, up to "
        "rounding; the run prints what it turns on",
    )
    activation_checkpointing: str = Field(
        "none",
        description="activations that are recomputed in the backward pass: none, full (all of each layer; true means the "
        "same), every:N (all of every N-th layer), selective (all except the results of matrix products and attention), or "
        "offload (full, with the layers' inputs in host memory)",
        json_schema_extra={"choices": [*CHECKPOINTING], "bare": "full"},
    )

    # --- data
    dataset_name: str | None = Field(None, description="hub name, local file or folder, embedded:chatterbot or embedded:stdlib")
    dataset_config_name: str | None = Field(None, description="configuration of a dataset from the hub")
    dataset_revision: str | None = Field(None, description="branch, tag or commit of the dataset on the hub")
    datasets: list[DatasetSpec] | None = Field(
        None, description="a mixture of datasets: a list in YAML, whose entries have a path and optional keys such as weight"
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
    new_tokens: list[str] = Field(
        [], description="tokens to add to the tokenizer; the embeddings get a row for each, and are trained"
    )
    chat_template: str | None = Field(
        None, description=f"Jinja file with a chat template, or {', '.join(NAMES[:-1])} or {NAMES[-1]}; unset: the tokenizer's"
    )
    on_bad_sample: Literal["error", "skip"] = Field("error", description="action for a sample that cannot be used")
    packing: bool = Field(
        False, description="put several samples into a row, to reduce padding; they do not attend to each other"
    )
    padding_free: bool = Field(
        False,
        description="join the samples of a micro-batch into one row without padding; they do not attend to each other",
    )
    group_by_length: bool = Field(False, description="put rows of similar length into a batch, to reduce padding")
    cache_dir: str | None = Field(
        None, description="folder for prepared data; unset: zerobook in $XDG_CACHE_HOME, or in ~/.cache"
    )
    preprocessing_num_workers: int | None = Field(
        None, ge=1, description="processes that tokenize; unset: 1, and one per core in zerobook data prepare"
    )
    dataloader_num_workers: int = Field(0, ge=0, description="processes per rank that collate batches; 0: the rank itself does")

    # --- optimisation
    output_dir: str = Field("outputs/run", description="folder for checkpoints, runlog and the final model")
    per_device_train_batch_size: int = Field(
        8, ge=1, description="rows per micro-batch and process: samples, or packs with packing"
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches per optimizer step")
    global_batch_size: int | None = Field(
        None, ge=1, description="rows per optimizer step over all processes; gradient_accumulation_steps follows from it"
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
        False,
        description="the k-th of N warm-up steps has (k-1)/N of the peak, as in transformers; the first step has the rate 0",
    )
    optimizer: str = Field(
        "adamw",
        description="adamw, sgd, adafactor, adamw_8bit, paged_adamw, paged_adamw_8bit, or your own as FILE.py:Class or "
        "module:Class",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of trained matrices; biases and norms do not decay")
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
        description="evaluate every N steps, and at the end; epoch: at each epoch's end; a share such as 0.1: every tenth "
        "of the run's steps; 0: at the end only; auto: at checkpoints, using at most 5 % of the run's time",
        json_schema_extra={"choices": ["N", "share", "epoch", AUTOMATIC]},
    )
    eval_tasks: list[str] = Field(
        [], description="task files (.jsonl) and tasks of lm-evaluation-harness (names or .yaml), measured at every evaluation"
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        description="end the run after this many evaluations in a row without a lower held-out loss; needs eval_steps "
        "with a value other than auto and 0",
    )
    final_model: Literal["last", "best"] = Field(
        "last", description="the model that is written: of the last step, or of the checkpoint with the lowest held-out loss"
    )
    eval_on_start: bool = Field(False, description="evaluate before the first step too")
    save_steps: Interval | Literal["auto"] = Field(
        AUTOMATIC,
        description="save a checkpoint every N steps, and at the end; epoch: at each epoch's end; a share such as 0.1: every "
        "tenth of the run's steps; 0: at the end only; auto: one early checkpoint, then ten over the run; fewer if they would "
        "be less than a minute apart, or take more than 5 % of the run's time; never more than 30 minutes apart",
        json_schema_extra={"choices": ["N", "share", "epoch", AUTOMATIC]},
    )
    save_total_limit: int | None = Field(
        None,
        ge=1,
        description="number of the newest checkpoints that are kept; pinned and protected ones are kept in addition; unset: "
        f"{KEPT_AUTOMATICALLY} with save_steps auto, else all",
    )
    async_save: bool = Field(False, description="write checkpoints in the background, from a copy in host memory")
    on_save_error: Literal["stop", "continue"] = Field("stop", description="action if a checkpoint cannot be saved")
    on_low_disk: Literal["error", "warn"] = Field("error", description="action if the disk is too small for the checkpoints")
    resume_from_checkpoint: str | None = Field(
        None, description="auto (the newest complete checkpoint), best (lowest held-out loss), or a folder"
    )
    on_spike: OnSpike = Field(
        "rollback",
        description="log: record it only; skip: leave out the samples of the spike's steps from now on, without going back; "
        "rollback: return to a checkpoint, with a stronger recovery action each time; lower_rate: return and lower the "
        "learning rate; stop: end the run",
    )
    policy: list[PolicyAction] | None = Field(
        None,
        min_length=1,
        description="recovery actions of on_spike rollback, in the order in which they are taken: any of replay (go back, and "
        "do the same steps again), skip (go back, and leave their samples out), lower_rate (go back, and lower the rate), "
        "further_back (as skip, from an earlier checkpoint) and stop; unset: replay, skip, lower_rate, stop, without the "
        "replay if it would abandon more than a tenth of the run",
    )
    max_rollbacks: int = Field(
        8, ge=0, description="maximum number of rollbacks; after them, the run stops at the next spike that needs one"
    )
    rollback_lr_factor: float = Field(
        0.5, gt=0, lt=1, description="factor of the learning rate after a rollback that lowers it"
    )
    rollback_lr_steps: int = Field(500, ge=1, description="steps in which the lowered rate returns to its schedule")
    expect: list[str] = Field(
        [],
        description="planned changes that may raise the loss, each as 'STEP TEXT', such as '200 the mixture changes'; no "
        "rollback follows a moderate rise",
    )
    logging_steps: int = Field(10, ge=1, description="log losses, gradient norms and rates every N steps")
    profile: str | None = Field(
        None, description="steps to profile, such as 12 or 10-12; each rank writes a Chrome trace into the runlog's folder"
    )
    hang_timeout: float = Field(
        300.0,
        ge=0,
        description="the run stops, and names the process, if a process makes no progress for so many seconds; longer for some "
        "phases, such as evaluations and saves; 0: never",
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
    def eval_batch_size(self) -> int:
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
        """Whether the loaded weights are frozen, and adapters are trained beside them."""
        return False

    @property
    def base_format(self) -> str | None:
        """The format that frozen weights are quantised to while they are loaded: ``nf4`` or ``int8``; None if they are not
        quantised."""
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
        # An empty text is mostly a shell variable that is not set, and a path without characters is the working folder. With a
        # NUL or a name that is too long, a later error would not name the key.
        if not value or "\0" in value or any(len(name.encode()) > LONGEST_NAME for name in value.split("/")):
            raise PydanticCustomError("choice", "Input should be a path")
        return value

    @field_validator("output_dir")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return os.path.expanduser(value)

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _read_mixed_precision(cls, value: Any) -> Any:
        # Other trainers write none and false for fp32. Here none would mean unset, and the strategy file would then decide.
        if value is False or value in ("none", "false", "off"):
            return "no"
        return value

    @field_validator("new_tokens", mode="before")
    @classmethod
    def _refuse_joined_tokens(cls, value: Any) -> Any:
        # One text with a comma inside may be a token, or several tokens that were joined.
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
        # The first step, and the last one if there is a range.
        steps = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", str(value))
        if steps is None or int(steps[1]) > int(steps[2] or steps[1]):
            raise PydanticCustomError("choice", "Input should be a step or a range of steps, such as 12 or 10-12")
        return str(value)

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _read_resume(cls, value: Any) -> Any:
        """Read true and false as transformers' scripts do: true is the newest checkpoint, false is no checkpoint."""
        return {"true": AUTOMATIC, "false": None}.get(str(value).lower(), value)

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step to profile; None if no step is profiled."""
        if self.profile is None:
            return None
        first, _, last = self.profile.partition("-")
        return int(first), int(last or first)

    @field_validator("eval_steps", "save_steps", mode="before")
    @classmethod
    def _read_interval(cls, value: Any) -> Any:
        if value is None:
            return AUTOMATIC
        # In transformers, the word no turns evaluations and saves off.
        if value in ("no", False):
            return 0
        if value in ("epoch", AUTOMATIC):
            return value
        number = _number(value)
        if number is not None and 0 < number < 1:
            return number
        if number is None or not number.is_integer() or number < 0:
            raise PydanticCustomError(
                "choice", "Input should be a number of steps, a share of the run such as 0.1, epoch, auto, or 0 for none"
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
        """Return the dtype that the model is loaded in.

        It is ``dtype`` if the user set it, or if the loaded weights are trained. A frozen base is loaded in the half precision
        of the run, since mixed precision computes in it anyway. In a 4-bit base, the weights that are not quantised decide the
        dtype of the activations between its layers.

        Args:
            precision: of the run: ``no``, ``bf16`` or ``fp16``.
        """
        if not self.trains_adapters or "dtype" in self.model_fields_set:
            return self.dtype
        halves: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16"}
        return halves.get(precision, self.dtype)

    def accumulation_steps_on(self, readers: int) -> int:
        """Return the micro-batches of a step on each process, if ``readers`` processes read different samples."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return max(1, self.global_batch_size // (self.per_device_train_batch_size * readers))

    def warmup_steps(self, total: int) -> int:
        """Return the steps of the warm-up in a run of ``total`` steps."""
        return self.num_warmup_steps or math.ceil(self.warmup_ratio * total)

    def dependent_defaults(self) -> dict[str, Any]:
        """Return key -> default, for defaults that depend on other keys. A value of the user replaces them."""
        return {}

    def model_post_init(self, context: Any) -> None:
        # Write past pydantic: the config is frozen, and an assignment would add the key to `model_fields_set`, which are the
        # keys that the user set.
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
        datasets = []
        for spec, revision in zip(self.datasets, revisions, strict=True):
            datasets.append(spec.model_copy(update={"revision": revision}))
        return self.model_copy(update={"datasets": datasets})

    def validation_spec(self) -> DatasetSpec:
        """Return the validation file as a dataset of its own, all of it held out."""
        return self._spec(path=str(self.validation_file), name="validation")

    def _spec(self, **keys: Any) -> DatasetSpec:
        return DatasetSpec(**keys, format=self.format, text_column=self.text_column, summary_column=self.summary_column)

    def problems(self) -> list[str]:
        """Return a sentence for each pair of keys that contradict each other, and for each file that does not exist.

        Subclasses add their own problems.
        """
        problems = [*self._data_problems(), *self._row_problems()]
        if self.streaming:
            problems += self._streaming_problems()
        problems += self._missing_files()
        problems += _output_folder_problems("output_dir", self.output_dir)
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
            # If a later step follows a comma, several events were written as one entry.
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
        """Return a problem if several keys name training data, and for each name that several datasets of a mixture have."""
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
        """Return a problem for each pair of settings of rows that exclude each other."""
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
        has_limit = any(spec.limit for spec in specs)
        has_range = any("[" in (spec.split or "") for spec in specs)
        if self.max_train_samples is not None or has_limit or has_range:
            problems.append(
                "streaming: max_train_samples, limit and a range of rows in split need the number of samples, which is "
                "unknown. Drop them, or streaming."
            )
        # Without weights, each dataset would count by its number of samples.
        if len(specs) > 1 and not all(spec.weight for spec in specs):
            problems.append("streaming: a mixture of streams needs weights. Give each entry of datasets a weight.")
        return problems

    def _missing_files(self) -> list[str]:
        """Return a problem for each file or folder that a key names and that does not exist."""
        problems = []
        # Not every recipe has all of these keys.
        for key in ("train_file", "validation_file", "model_name_or_path", "tokenizer_name", "config_name", "dataset_name"):
            value = getattr(self, key, None) or ""
            # The keys ``..._file`` name files, except for a dataset of a Python package, such as embedded:stdlib. The other
            # keys may name a model or dataset of the hub. Their value is looked up on the disk only if no name on the hub has
            # this form.
            names_file = key.endswith("_file") and not value.startswith("embedded:")
            if value and (names_file or hub.is_path(value)):
                problems += _missing_path(key, value)
        template = self.chat_template
        if template and not template_file(template).exists():
            # The value may be the misspelt name of a shipped template, such as chatml.
            near = nearest(template, set(NAMES))
            problems.append(f"chat_template: no such file or folder: {template}, looked for in {Path.cwd()}.{near}")
        return problems

    def _missing_code(self) -> list[str]:
        """Return a problem for each tracker, hook and evaluation task that is not installed or does not exist."""
        problems = []
        for tracker in self.report_to:
            # accelerate would leave out such a tracker without an error.
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
        """Return a problem for each pair of settings of the rate, the steps and the evaluations that exclude each other."""
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
        """The text of ``chat_template``; None if the tokenizer's template is used. The file is read once.

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
        # The copy has the cached text of the previous template.
        vars(changed).pop("chat_template_text", None)
        return changed

    def names_data(self) -> bool:
        """Return whether the config names training data."""
        return bool(self.dataset_name or self.train_file or self.datasets)

    @property
    def limits_checkpoints_itself(self) -> bool:
        """Whether the run decides when to save and how many checkpoints it keeps, since the user has set neither."""
        return self.save_total_limit is None and self.save_steps == AUTOMATIC

    @property
    def kept_checkpoints(self) -> int | None:
        """The maximum number of checkpoints that are kept besides the protected ones; None if all are kept."""
        return KEPT_AUTOMATICALLY if self.limits_checkpoints_itself else self.save_total_limit

    def checkpoints_at_once(self, steps: int | None, *, share_left: float = 1.0, has_held_out: bool = True) -> int | None:
        """Return the largest number of new checkpoints that are on the disk at the same time.

        None if all are kept, and their number depends on a number of steps that is not known.

        Args:
            steps: remaining steps of the run; None if their number is not known.
            share_left: the remaining steps as a share of the run.
            has_held_out: there are held-out data, so one checkpoint is the best.
        """
        saves = self._most_saves(steps, share_left)
        if self.kept_checkpoints is None:
            return saves
        # One more checkpoint than are kept exists while it is written.
        most = self.kept_checkpoints + 1
        # The best checkpoint is protected.
        if has_held_out and self.eval_steps != 0:
            most += 1
        # The newest proven good checkpoint is protected if a rollback may need it.
        if self.on_spike in ("rollback", "lower_rate"):
            most += 1
        return most if saves is None else min(saves, most)

    def _most_saves(self, steps: int | None, share_left: float) -> int | None:
        """Return the largest number of checkpoints that a run writes in its remaining steps, the one at its end included.

        None if that depends on ``steps``, and ``steps`` is None. See `checkpoints_at_once`.
        """
        if self.save_steps == 0:
            return 1
        if isinstance(self.save_steps, float):
            return 1 + int(share_left / self.save_steps)
        if self.save_steps == "epoch" and self.max_train_steps is None:
            return max(1, math.ceil(self.num_train_epochs * share_left))
        if steps is None:
            return None
        # The shortest interval counts: an automatic interval and an epoch may both be a single step.
        return 1 + max(steps - 1, 0) // (self.save_steps if isinstance(self.save_steps, int) else 1)


def _missing_path(key: str, value: str) -> list[str]:
    """Return a problem if no file or folder ``value`` exists, else an empty list."""
    path = Path(value).expanduser()
    if path.exists():
        return []
    return [f"{key}: no such file or folder: {value}, looked for in {Path.cwd()}.{nearest_file(path)}"]


def _output_folder_problems(key: str, path: str) -> list[str]:
    """Return a problem if the folder ``path``, which may not exist yet, cannot be made or written to; else an empty list."""
    folder = Path(path).absolute()
    # Missing folders are made in the nearest folder above that exists.
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return [f"{key}: {path} cannot be a folder: {folder} is a file. Give another {key}."]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"{key}: {path} cannot be written: {folder} is not writable for this user. Give another {key}."]
    return []
