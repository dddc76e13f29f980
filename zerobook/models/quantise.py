"""Frozen base weights in 4 and 8 bits. bitsandbytes quantises them while they are loaded, or has quantised the saved model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from zerobook.errors import ConfigError
from zerobook.launch.quantised import explain_refused_base
from zerobook.utils.dtypes import compute_dtype
from zerobook.utils.replaced import replaced

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

    from zerobook.config import RecipeConfig
    from zerobook.strategy.launch_plan import LaunchPlan


def nf4(precision: str) -> BitsAndBytesConfig:
    """Return the config of QLoRA's base weights: 4-bit NormalFloat with double quantisation (Dettmers et al., 2023).

    The dtype that the packed weights are stored in equals the compute dtype, so that FSDP2 and ZeRO-3 can shard them together
    with the other weights.
    """
    from transformers import BitsAndBytesConfig

    dtype = compute_dtype(precision)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def int8() -> BitsAndBytesConfig:
    """Return the config of base weights in int8 with a scale for each row (LLM.int8, Dettmers et al., 2022)."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def find_base_format(model_config: PreTrainedConfig) -> str | None:
    """Return the format in which bitsandbytes has quantised a saved model: ``nf4`` (or FP4, of the same size) or ``int8``.

    Returns:
        None if the model is not quantised, or by another library.
    """
    facts = _quantisation_facts(model_config) or {}
    if facts.get("load_in_4bit"):
        return "nf4"
    return "int8" if facts.get("load_in_8bit") else None


# Return the model's quantisation config as a dictionary; None if it is not quantised.
def _quantisation_facts(model_config: PreTrainedConfig) -> dict[str, Any] | None:
    facts = getattr(model_config, "quantization_config", None)
    if facts is None or isinstance(facts, dict):
        return facts
    return facts.to_dict()


def check_base(model_config: PreTrainedConfig, config: RecipeConfig, plan: LaunchPlan) -> None:
    """Check that this run can train adapters on a model that was saved quantised. Any other model passes.

    Raises:
        ConfigError: the run trains the weights themselves, or their format is not supported, by recipes or by the strategy.
    """
    facts = _quantisation_facts(model_config)
    if facts is None:
        return
    base = find_base_format(model_config)
    name = f"model_name_or_path: {config.model_name_or_path}"
    # Another library has quantised the model, such as GPTQ.
    if base is None:
        raise ConfigError(
            f"{name} is quantised with {facts.get('quant_method', 'an unnamed method')}, and recipes only support weights "
            "that are quantised by bitsandbytes. Use the version of the model that is not quantised. --load_in_4bit and "
            "--load_in_8bit of recipes/lora_finetune.py quantise it while loading."
        )
    bits = {"nf4": 4, "int8": 8}[base]
    if not config.trains_adapters:
        raise ConfigError(
            f"{name} is quantised to {bits} bits, and quantised weights cannot be trained. Take the model's version that is "
            "not quantised, or train adapters with recipes/lora_finetune.py."
        )
    if config.base_format not in (None, base):
        other_flag = {"nf4": "load_in_8bit", "int8": "load_in_4bit"}[base]
        raise ConfigError(
            f"{name} is quantised to {bits} bits already, and {other_flag} is set. Drop the flag, or take the "
            "model's version that is not quantised."
        )
    # bitsandbytes packs 4-bit weights in uint8 unless the config names a dtype.
    storage = str(facts.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
    problem = explain_refused_base(plan, f"{name} is quantised to {bits} bits", base, storage)
    if problem is not None:
        raise ConfigError(problem)


@contextmanager
def quantisable_layers() -> Iterator[None]:
    """Return a context in which Falcon is built of ``nn.Linear``.

    Falcon's linear layers are a subclass with the same weights and the same product, and transformers quantises no subclass.
    """
    from transformers.models.falcon import modeling_falcon

    with replaced(modeling_falcon, "FalconLinear", nn.Linear):
        yield


def check_layers(model: PreTrainedModel, base: str) -> None:
    """Check that a model has at least one layer that is quantised or that transformers can quantise.

    Raises:
        ConfigError: all layers are of other classes. transformers quantises none of them, without a message.
    """
    from transformers.pytorch_utils import Conv1D

    # transformers does not quantise the output head.
    head = model.get_output_embeddings()
    for module in model.modules():
        is_quantised = type(module).__module__.startswith("bitsandbytes.")
        # transformers quantises no subclass of nn.Linear.
        can_be_quantised = type(module) is nn.Linear or isinstance(module, Conv1D)
        if module is not head and (is_quantised or can_be_quantised):
            return
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, nn.Linear) and module is not head}
    flag = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}[base]
    raise ConfigError(
        f"{flag}: transformers quantises torch.nn.Linear alone, and the layers of {type(model).__name__} are "
        f"{', '.join(sorted(layers))}: nothing would be quantised. Remove the flag, and shard the base with "
        "accelerate_configs/zero3.yaml or fsdp.yaml."
    )


def keep_4bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes' 4-bit weights in the layout in which they were loaded.

    On CPUs with AVX512-BF16, bitsandbytes repacks them in place at the first forward pass in evaluation mode, and rounds
    their scales to bf16. FSDP2 and ZeRO-3 do not know that they gather repacked bytes, and every loss after that is wrong.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # an attribute of bitsandbytes' layers
