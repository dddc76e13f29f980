"""The model that a recipe's config trains, made of tensors that have shapes and no contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zerobook import head
from zerobook.checkpoint.result import find_result
from zerobook.data import embedded
from zerobook.errors import ConfigError
from zerobook.evaluation.held_out import rows_at_once, vocabulary
from zerobook.launch.model_facts import unfit_for_text
from zerobook.models import recompute
from zerobook.models.load import DTYPES, attention_dropout, check_length, drop_foreign_attention, keep_all_layers, use_cache
from zerobook.models.quantise import base_of, check_layers
from zerobook.models.reach import freeze_unreached
from zerobook.models.vocabulary import grow_embeddings
from zerobook.objective import Objective
from zerobook.plan.state_bytes import Weight
from zerobook.strategy.weights import parameter_groups
from zerobook.training.recipe import BatchShape, Recipe
from zerobook.utils import hub
from zerobook.utils.dtypes import HALF, compute_dtype
from zerobook.utils.library_messages import hush
from zerobook.utils.model_config import auto_class
from zerobook.utils.reading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from zerobook.config import RecipeConfig


class NoClass(ConfigError):
    """Error for a model whose config can be read, but whose class cannot be built here. ``facts`` are the values of its
    config.json, ``why`` is the reason. ``cannot`` says what cannot be done, where it is not building the class."""

    def __init__(self, name: str, facts: dict[str, Any], error: Exception, cannot: str = "its class cannot be built here"):
        self.name, self.facts = name, facts
        lines = [line.strip() for line in str(error).strip().splitlines()]
        while len(lines) > 1 and lines[0].endswith(":"):  # a heading; the reason is on the next line
            lines[:2] = [f"{lines[0]} {lines[1]}"]
        # the libraries continue with a list of all classes
        reason = lines[0].split(". ")[0][:300].rstrip(". ") if lines else type(error).__name__
        code = " The code that comes with it is run with --trust_remote_code." if "auto_map" in facts else ""
        self.why = f"{cannot}: {reason}.{code}"
        super().__init__(f"model_name_or_path: {name}: {self.why}")


@dataclass(frozen=True)
class Job:
    """A recipe with its model's config. ``name`` is the model's name in tables."""

    recipe: Recipe[Any]
    model_config: PreTrainedConfig
    name: str

    @property
    def config(self) -> RecipeConfig:
        return self.recipe.config

    @property
    def objective(self) -> Objective:
        return self.recipe.objective()

    @property
    def shape(self) -> BatchShape:
        """Shape of the largest possible micro-batch."""
        return self.recipe.batch_shape()

    def changed(self, **changes: Any) -> Job:
        """Return the same job with other values in its config."""
        return replace(self, recipe=type(self.recipe)(self.config.model_copy(update=changes)))

    @property
    def evaluated(self) -> BatchShape | None:
        """Shape of an evaluation's largest batch; None where nothing is held out. A held-out split that comes with the data
        is not known here."""
        config, shape = self.config, self.shape
        if not (config.validation_file or config.validation_split_percentage):
            return None
        asked = config.eval_rows
        return shape._replace(rows=rows_at_once(asked, shape.target or shape.source, vocabulary(self.model_config)))

    @contextmanager
    def made(
        self, shape: BatchShape | None = None, *, cast: str = "no", precision: str | None = None
    ) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
        """Yield the model in training mode and a micro-batch for it, both valid inside this context.

        Args:
            shape: shape of the micro-batch; None means the largest.
            cast: ``bf16`` or ``fp16`` where the strategy casts the whole model, as DeepSpeed does; with ``no``, trained weights
                are fp32 and others as loaded.
            precision: the run's precision, in which a frozen base is loaded and quantised weights compute; None means the
                config's.
        """
        precision = precision or self.config.mixed_precision or "no"
        kind = auto_class(type(self.model_config), encoder_decoder=self.recipe.encoder_decoder)
        attention = self.config.attn_implementation
        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        if attention == "eager":
            options["attn_implementation"] = attention
        with torch.device("meta"), _quiet():
            try:
                model = kind.from_config(self.model_config, dtype=self._dtype(precision), **options)
            except Exception as error:  # whatever the code of a class raises
                raise NoClass(self.name, self.model_config.to_dict(), error) from error
            use_cache(model, False)
            keep_all_layers(model)
            freeze_unreached(model)
            dropout = attention_dropout(self.model_config.to_dict())
            recompute.enable(model, self.config.activation_checkpointing, attention_dropout=dropout)
            base = self.config.base_format or base_of(self.model_config)
            if base is not None:
                check_layers(model, base)
                _quantise(model, base, compute_dtype(precision))
            if added := len(self.config.new_tokens):
                grow_embeddings(model, model.get_input_embeddings().num_embeddings + added)
            model = self.recipe.adapt(model)
            head.install(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            if cast != "no":
                model = model.to(HALF[cast])
        with FakeTensorMode(allow_non_fake_inputs=True):
            _to_fake(model)
            yield model.train(), self.recipe.example_batch(shape or self.shape)

    def _dtype(self, precision: str) -> torch.dtype:
        asked = DTYPES[self.config.loaded_dtype(precision)]
        return asked if isinstance(asked, torch.dtype) else getattr(self.model_config, "dtype", None) or torch.float32

    def weights(self) -> tuple[list[Weight], list[list[Weight]]]:
        """Return all weights, and the trained ones by the optimizer's groups.

        Raises:
            ConfigError: the lengths are more than the model has positions for, as in the recipe.
        """
        self.recipe.check_model_config(self.model_config)
        with self.made() as (model, _):
            check_length(cast("PreTrainedModel", model), max(self.shape.source, self.shape.target))
            units = _units(model)
            quantised = [m for m in model.modules() if isinstance(m, _Quantised)]
            packed = {m.weight: (m.in_features * m.out_features, m.scales) for m in quantised}
            made = {
                p: Weight(name, tuple(p.shape), p.element_size(), p.requires_grad, units.get(name, ""), *packed.get(p, ()))
                for name, p in model.named_parameters()
            }
            groups = parameter_groups(model, self.config.weight_decay)
            return list(made.values()), [[made[p] for p in group["params"]] for group in groups]


def job(recipe: Recipe[Any]) -> Job:
    """Return the job of a recipe. Downloads nothing but the model's config.json.

    Raises:
        ConfigError: there is no such model, or it is one that the recipes do not train.
        NoClass: transformers does not know its class.
    """
    config = recipe.config
    name = config.model_name_or_path or config.initialised_from
    if name is None:
        raise ConfigError("model_name_or_path: no model is named. Give a hub name, a folder or a config.json.")
    name = find_result(name).model
    model_config = read_config(name, config.model_revision, trust=config.trust_remote_code)
    if unfit := unfit_for_text(model_config.to_dict()):
        raise ConfigError(unfit)
    return Job(recipe, model_config, _called(name))


def _called(name: str) -> str:
    return Path(name).stem if name.endswith(".json") else name


def read_config(name: str, revision: str = "main", *, trust: bool = False) -> PreTrainedConfig:
    """Return transformers' config of a hub name, a folder, a config.json or the embedded model.

    Args:
        trust: run the code of a repository that ships its own class.

    Raises:
        ConfigError: there is no config.
        NoClass: the config's class is not known here, or refuses the config's values.
    """
    from transformers import AutoConfig, PretrainedConfig

    where = str(embedded.smollm2()) if name.startswith(embedded.PREFIX) else name
    if not where.endswith(".json"):
        hub.check_reachable(where, revision)
    try:
        if where.endswith(".json"):
            facts = read_json(where)
        else:
            facts = PretrainedConfig.get_config_dict(where, revision=revision)[0]
        if not isinstance(facts, dict):
            raise ValueError(f"it holds a {type(facts).__name__} where keys and values belong")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model_name_or_path: {name}: no model config can be read there: {reason}{hub.advice(error)}"
        ) from error
    try:
        if where.endswith(".json"):
            values = {key: facts[key] for key in facts if key != "model_type"}
            model_config = AutoConfig.for_model(facts["model_type"], **values)
        else:
            model_config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust)
    except KeyError as error:
        raise NoClass(_called(name), facts, ValueError(f"its config has no {error}")) from error
    except Exception as error:  # whatever the code of a class raises
        raise NoClass(_called(name), facts, error) from error
    drop_foreign_attention(model_config)
    return model_config


def _units(model: nn.Module) -> dict[str, str]:
    """Return parameter name -> the layer that it belongs to. Parameters outside layers are left out."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    units: dict[str, str] = {}
    for path, module in model.named_modules():
        if type(module).__name__ in classes:
            units |= {f"{path}.{name}": path for name, _ in module.named_parameters()}
    return units


class _Dequantised(torch.autograd.Function):
    """Product with weights that are unpacked for it, and again for the gradient of its input. The weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: int) -> torch.Tensor:
        ctx.width = x.shape[-1]
        return x @ x.new_empty(ctx.width, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ grad.new_empty(grad.shape[-1], ctx.width), None


class _Int8(torch.autograd.Function):
    """Product in int8, whose sums are int32. The input is kept, and weights are unpacked for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.out = out
        x.new_empty(x.shape, dtype=torch.int8)
        sums = x.new_empty(*x.shape[:-1], out, dtype=torch.int32)
        return sums.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad @ grad.new_empty(ctx.out, x.shape[-1]), None


class _Quantised(nn.Linear):
    """Model of the memory of bitsandbytes' linear layers.

    NF4 with double quantisation (Dettmers et al., 2023, section 3): half a byte an element; beside it a byte of scale for
    every 64 elements, 4 bytes for every 256 scales, and two tables. int8: a byte an element, and 4 bytes a row.
    """

    scales: int
    product: type[torch.autograd.Function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.product.apply(x.to(self.weight.dtype), self.out_features)
        return made if self.bias is None else made + self.bias.to(made.dtype)


_TABLES = 4 * (16 + 256 + 1)
"""Bytes of the values of NF4, those of the 8-bit type of its scales, and their mean, which every layer has."""


def _quantise(model: PreTrainedModel, base: str, dtype: torch.dtype) -> None:
    """Replace all linear layers but the output head with layers in the format ``base``, as transformers does. Weights are
    packed in ``dtype``, in which they compute."""
    head = model.get_output_embeddings()
    for module in model.modules():
        for name, layer in module.named_children():
            if type(layer) is nn.Linear and layer is not head:
                made = _Quantised(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype)
                elements = layer.in_features * layer.out_features
                packed = elements if base == "int8" else -(-elements // 2)
                made.weight = nn.Parameter(torch.empty(-(-packed // dtype.itemsize), 1, dtype=dtype), requires_grad=False)
                if base == "int8":
                    made.scales, made.product = 4 * layer.out_features, _Int8
                else:
                    blocks = -(-elements // 64)
                    made.scales, made.product = blocks + 4 * -(-blocks // 256) + _TABLES, _Dequantised
                setattr(module, name, made)


def _to_fake(model: nn.Module) -> None:
    """Replace the model's meta tensors with fake CPU tensors, since operations on meta tensors keep no account of memory."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        kinds: list[dict[str, Any]] = [module._parameters, module._buffers]
        for kind in kinds:
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: torch.Tensor = torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                kind[name] = made[id(tensor)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' messages about a model that will not be used."""
    import warnings

    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
