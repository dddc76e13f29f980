"""The model that a recipe trains, built of tensors that have shapes and no contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from zerobook.launch.model_facts import find_text_problems
from zerobook.launch.resolve import Hardware
from zerobook.models import recompute
from zerobook.models.load import (
    DTYPES,
    attention_dropout,
    check_length,
    choose_attention,
    drop_foreign_attention,
    fuse_tanh_gelu,
    keep_all_layers,
    use_cache,
)
from zerobook.models.quantise import check_layers, find_base_format, quantisable_layers
from zerobook.models.unused_modules import freeze_unused
from zerobook.models.vocabulary import grow_embeddings
from zerobook.objective import Objective
from zerobook.plan.repetition import Repetition, keep_few
from zerobook.plan.state_bytes import ModelWeights, Weight, ceil_div
from zerobook.strategy.weights import parameter_groups
from zerobook.training.recipe import BatchShape, Recipe
from zerobook.utils import hub
from zerobook.utils.dtypes import HALF, compute_dtype
from zerobook.utils.library_messages import hush
from zerobook.utils.model_config import auto_class
from zerobook.utils.reading import read_json
from zerobook.utils.replaced import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from zerobook.config import RecipeConfig


class UnplannableModelError(ConfigError):
    """Error for a model whose config can be read, but which cannot be built here, or whose step cannot be traced."""

    def __init__(self, name: str, facts: dict[str, Any], error: Exception, cannot: str = "its class cannot be built here"):
        """Shorten the libraries' ``error`` to its reason.

        Args:
            facts: the values of the model's config.json.
            cannot: a clause that says what cannot be done.
        """
        self.facts = facts
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        # If a line ends with a colon, the reason is on the next line.
        while len(lines) > 1 and lines[0].endswith(":"):
            heading = lines.pop(0)
            lines[0] = f"{heading} {lines[0]}"
        # The first sentence is the reason. After it, the libraries list all classes that they know.
        reason = lines[0].split(". ")[0][:300].rstrip(". ")
        advice = " By the literature's formulas alone: zerobook plan --formulas --parameters 7B."
        if "auto_map" in facts:
            advice = f" The code that comes with it is run with --trust_remote_code.{advice}"
        super().__init__(f"model_name_or_path: {name}: {cannot}: {reason}.{advice}")


@dataclass(frozen=True)
class Job:
    """A recipe with its model's config, as one rank trains it."""

    recipe: Recipe[Any]
    model_config: PreTrainedConfig
    # the model's name in tables
    name: str
    # The loss is computed from all logits at once, as other programs do, and not in chunks.
    whole_logits: bool = False
    # ranks that share the tokens of a row
    token_ranks: int = 1
    # The model is trained as transformers and peft build it for other programs: in the dtype in which it is loaded, and without
    # Zerobook's kernels.
    is_plain: bool = False

    @property
    def config(self) -> RecipeConfig:
        return self.recipe.config

    @property
    def objective(self) -> Objective:
        return self.recipe.objective()

    @property
    def shape(self) -> BatchShape:
        """Shape of a rank's part of the largest possible micro-batch."""
        shape = self.recipe.batch_shape()
        return shape._replace(source=ceil_div(shape.source, self.token_ranks))

    def on_device(self, kernels: str) -> Job:
        """Return the job with the attention that its run uses on a device, if the flash-attn package is not installed there.
        Packed rows then use flex attention.

        Args:
            kernels: the device, as `Cluster.kernels` names it.
        """
        if kernels != "cuda":
            return self
        kind = auto_class(type(self.model_config), encoder_decoder=self.recipe.encoder_decoder)
        model_class = kind._model_mapping.get(type(self.model_config), None)
        attention = choose_attention(
            self.config, self.model_config, model_class, Hardware(gpus=1), self.config.mixed_precision or "no"
        )
        changes = {"attn_implementation": attention or self.config.attn_implementation}
        return replace(self, recipe=type(self.recipe)(self.config.model_copy(update=changes)))

    def evaluation_shape(self, *, keeps_logits: bool = True) -> BatchShape | None:
        """Return the shape of an evaluation's largest batch; None if no data is held out.

        A held-out split that is part of the dataset is not known here.

        Args:
            keeps_logits: the logits of a batch are kept, which limits its rows.
        """
        if not (self.config.validation_file or self.config.validation_split_percentage):
            return None
        rows = self.config.eval_batch_size
        if keeps_logits:
            rows = rows_at_once(rows, self.shape.target or self.shape.source, vocabulary(self.model_config))
        return self.shape._replace(rows=rows)

    @contextmanager
    def build(
        self,
        shape: BatchShape | None = None,
        *,
        cast: str = "no",
        precision: str | None = None,
        model: nn.Module | None = None,
        repetitions: Sequence[Repetition] = (),
    ) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
        """Yield the model in training mode and a micro-batch for it, both valid inside this context.

        Args:
            shape: shape of the micro-batch; None means the largest.
            cast: ``bf16`` or ``fp16`` if the strategy casts the complete model, as DeepSpeed does. With ``no``, trained weights
                are in fp32, and frozen weights keep their dtype.
            precision: the run's precision, in which a frozen base is loaded and quantised layers compute; None means the
                config's.
            model: the result of `build_on_meta`; None builds it.
            repetitions: equal layers, of which the model keeps few inside this context.
        """
        model = model or self.build_on_meta(precision)
        with ExitStack() as stack:
            stack.enter_context(keep_few(model, repetitions))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_fake_tensors(model, HALF.get(cast)))
            yield model.train(), self.recipe.example_batch(shape or self.shape)

    def build_on_meta(self, precision: str | None = None) -> nn.Module:
        """Return the model with its tensors on the meta device.

        Raises:
            ConfigError: the recipe does not train this model.
        """
        self.recipe.check_model_config(self.model_config)
        with torch.device("meta"), _silence_libraries():
            return self._build(precision or self.config.mixed_precision or "no")

    def _build(self, precision: str) -> nn.Module:
        """Return the model as a run has it after loading and adapting. The steps are in the same order as there."""
        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        if self.config.attn_implementation == "eager":
            options["attn_implementation"] = "eager"
        model_class = auto_class(type(self.model_config), encoder_decoder=self.recipe.encoder_decoder)
        # A checkpoint may be quantised already, without a flag.
        base_format = self.config.base_format or find_base_format(self.model_config)
        layers = quantisable_layers() if base_format is not None else nullcontext()
        try:
            with layers:
                model = model_class.from_config(self.model_config, dtype=self._dtype(precision), **options)
        except Exception as error:  # whatever the code of a class raises
            raise UnplannableModelError(self.name, self.model_config.to_dict(), error) from error
        # The output layers of Flan-T5, T5 1.1 and mT5 are not tied to the embeddings, although transformers 5.23 ties them for
        # these models' configs.
        kind = self.model_config.model_type
        if kind in ("mt5", "umt5") or (kind == "t5" and not self.model_config.scale_decoder_outputs):
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        use_cache(model, False)
        if not self.is_plain:
            fuse_tanh_gelu(model)
        keep_all_layers(model)
        freeze_unused(model)
        dropout = attention_dropout(self.model_config.to_dict())
        recompute.enable(model, self.config.activation_checkpointing, attention_dropout=dropout)
        if base_format is not None:
            check_layers(model, base_format)
            _quantise(model, base_format, compute_dtype(precision))
        if self.config.new_tokens:
            grow_embeddings(model, model.get_input_embeddings().num_embeddings + len(self.config.new_tokens))
        # peft imports bitsandbytes, which compiles kernels for the CPU. Loading torch's compiler for that takes time, and a
        # plan runs no kernels.
        with replaced(torch, "compile", lambda function, **_: function):
            model = self.recipe.adapt(model)
        if not self.whole_logits:
            head.install(model)
        # Trained weights are fp32, whatever dtype the model is loaded in.
        for parameter in model.parameters():
            if parameter.requires_grad and not self.is_plain:
                parameter.data = parameter.data.float()
        return model

    def _dtype(self, precision: str) -> torch.dtype:
        """Return the dtype in which the model is loaded. If the recipe does not decide it, it is that of the model's config, or
        fp32 if that names none."""
        dtype = DTYPES[self.config.loaded_dtype(precision)]
        if isinstance(dtype, torch.dtype):
            return dtype
        return getattr(self.model_config, "dtype", None) or torch.float32

    def weights(self, model: nn.Module | None = None) -> ModelWeights:
        """Return the model's weights and their parameter groups.

        Args:
            model: the result of `build_on_meta`; None builds it.

        Raises:
            ConfigError: rows are longer than the model has positions for. The run raises the same error.
        """
        model = model or self.build_on_meta()
        check_length(cast("PreTrainedModel", model), max(self.shape.source, self.shape.target))
        units = _units(model)
        quantised_layers = {layer.weight: layer for layer in model.modules() if isinstance(layer, _QuantisedLinear)}
        weights: dict[nn.Parameter, Weight] = {}
        for name, parameter in model.named_parameters():
            weight = Weight(
                name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad, units.get(name, "")
            )
            if parameter in quantised_layers:
                layer = quantised_layers[parameter]
                weight = replace(
                    weight, packed_parameters=layer.in_features * layer.out_features, scale_bytes=layer.scale_bytes
                )
            weights[parameter] = weight
        groups = []
        for group in parameter_groups(model, self.config.weight_decay):
            groups.append([weights[parameter] for parameter in group["params"]])
        return ModelWeights(list(weights.values()), groups)


def make_job(recipe: Recipe[Any]) -> Job:
    """Return the job of a recipe. Of the model, only config.json is downloaded.

    Raises:
        ConfigError: the model does not exist, or is of a kind that no recipe trains.
        UnplannableModelError: transformers does not know its class.
    """
    config = recipe.config
    name = config.model_name_or_path or config.initialised_from
    if name is None:
        raise ConfigError("model_name_or_path: no model is named. Give a hub name, a folder or a config.json.")
    name = find_result(name).model
    model_config = read_config(name, config.model_revision, trust=config.trust_remote_code)
    unfit = find_text_problems(model_config.to_dict())
    if unfit:
        raise ConfigError(unfit)
    return Job(recipe, model_config, _display_name(name))


def _display_name(name: str) -> str:
    return Path(name).stem if name.endswith(".json") else name


def read_config(name: str, revision: str = "main", *, trust: bool = False) -> PreTrainedConfig:
    """Return transformers' config of a model.

    Args:
        name: a hub name, a folder, a config.json or the embedded model.
        trust: run the code that a repository ships for its own class.

    Raises:
        ConfigError: there is no config.
        UnplannableModelError: transformers does not know the config's class, or the class refuses the config's values.
    """
    from transformers import AutoConfig, PretrainedConfig

    path = str(embedded.smollm2()) if name.startswith(embedded.PREFIX) else name
    # A config.json is enough for a plan. The model itself need not be on this machine.
    is_file = path.endswith(".json")
    if not is_file:
        hub.check_reachable(path, revision)
    try:
        if is_file:
            facts = read_json(path)
        else:
            facts, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        if not isinstance(facts, dict):
            raise ValueError(f"it holds a {type(facts).__name__} where keys and values belong")
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model_name_or_path: {name}: no model config can be read there: {lines[0]}{hub.advice(error)}"
        ) from error
    # From here on, errors contain the config's values, with which the caller can still apply the papers' formulas.
    try:
        if is_file:
            values = {key: value for key, value in facts.items() if key != "model_type"}
            model_config = AutoConfig.for_model(facts["model_type"], **values)
        else:
            model_config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust)
    except KeyError as error:
        raise UnplannableModelError(_display_name(name), facts, ValueError(f"its config has no {error}")) from error
    except Exception as error:  # whatever the code of a class raises
        raise UnplannableModelError(_display_name(name), facts, error) from error
    drop_foreign_attention(model_config)
    return model_config


def _units(model: nn.Module) -> dict[str, str]:
    """Return parameter name -> path of its unit: the layer that a sharding strategy gathers as one.

    Layers are the modules whose classes transformers lists in ``_no_split_modules``. Parameters outside of them are left out.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    units: dict[str, str] = {}
    for path, module in model.named_modules():
        if type(module).__name__ in classes:
            for name, _ in module.named_parameters():
                units[f"{path}.{name}"] = path
    return units


@torch.library.custom_op("zerobook::dequantise", mutates_args=())
def _dequantise(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return weights [rows, columns] that are unpacked for a product with ``like``."""
    raise NotImplementedError("it has shapes and no contents")


@_dequantise.register_fake
def _shape_of_dequantised(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return like.new_empty(rows, columns)


class _DequantisedProduct(torch.autograd.Function):
    """Product with quantised weights. They are unpacked for the product and again for the gradient of its input, and get no
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.in_features = x.shape[-1]
        return x @ _dequantise(x, ctx.in_features, out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ _dequantise(grad, grad.shape[-1], ctx.in_features), None


class _Int8Product(torch.autograd.Function):
    """Product in int8, whose sums are int32. The input is kept, and weights are unpacked for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.out_features = out_features
        # Allocate the quantised input, which is freed after the product.
        x.new_empty(x.shape, dtype=torch.int8)
        # Allocate the sums.
        return x.new_empty(*x.shape[:-1], out_features, dtype=torch.int32).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad @ grad.new_empty(ctx.out_features, x.shape[-1]), None


class _QuantisedLinear(nn.Linear):
    """Linear layer that allocates as much memory as bitsandbytes' quantised ones, and computes nothing.

    NF4 with double quantisation (Dettmers et al., 2023, section 3) needs half a byte for each element, a byte of scale for
    every 64 elements, 4 bytes for every 256 scales, and two tables. int8 needs a byte for each element and 4 for each row.
    """

    # bytes of scales and tables
    scale_bytes: int
    product: type[torch.autograd.Function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.product.apply(x.to(self.weight.dtype), self.out_features)
        return product if self.bias is None else product + self.bias.to(product.dtype)


# Bytes of the values of NF4, those of the 8-bit type of its scales, and their mean, which every layer has.
_NF4_TABLE_BYTES = 4 * (16 + 256 + 1)


def _quantise(model: PreTrainedModel, base_format: str, dtype: torch.dtype) -> None:
    """Replace all linear layers but the output head with quantised ones, as transformers does.

    Args:
        base_format: ``int8`` or ``nf4``.
        dtype: dtype in which the layers compute, and of the tensors that hold the packed weights.
    """
    output_head = model.get_output_embeddings()
    for module in model.modules():
        for name, layer in module.named_children():
            if type(layer) is nn.Linear and layer is not output_head:
                setattr(module, name, _make_quantised(layer, base_format, dtype))


def _make_quantised(layer: nn.Linear, base_format: str, dtype: torch.dtype) -> _QuantisedLinear:
    quantised = _QuantisedLinear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype)
    elements = layer.in_features * layer.out_features
    if base_format == "int8":
        packed_bytes = elements
        quantised.scale_bytes = 4 * layer.out_features
        quantised.product = _Int8Product
    else:
        packed_bytes = ceil_div(elements, 2)
        scales = ceil_div(elements, 64)
        quantised.scale_bytes = scales + 4 * ceil_div(scales, 256) + _NF4_TABLE_BYTES
        quantised.product = _DequantisedProduct
    packed = torch.empty(ceil_div(packed_bytes, dtype.itemsize), 1, dtype=dtype)
    quantised.weight = nn.Parameter(packed, requires_grad=False)
    return quantised


@contextmanager
def _fake_tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Replace the model's meta tensors by fake CPU tensors inside this context, since meta tensors have no storage to count.

    Args:
        dtype: dtype of the floating-point tensors; None keeps theirs.
    """
    # id of a meta tensor -> its fake tensor
    fakes: dict[int, torch.Tensor] = {}
    originals = []
    try:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                originals.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    # A layer without a bias has None under the name bias.
                    if tensor is None:
                        continue
                    # A tensor that modules share gets one fake tensor, so that it stays shared.
                    if id(tensor) not in fakes:
                        fake_dtype = dtype if tensor.is_floating_point() else None
                        fake: torch.Tensor = torch.empty_like(tensor, device="cpu", dtype=fake_dtype)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        fakes[id(tensor)] = fake
                    tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for tensors, original_tensors in originals:
            tensors.update(original_tensors)  # type: ignore[arg-type]


@contextmanager
def _silence_libraries() -> Iterator[None]:
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
