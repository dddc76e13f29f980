"""Frozen base weights in 4 and 8 bits, made by bitsandbytes while loading or before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobook.errors import ConfigError
from zerobook.launch.quantised import refused_base
from zerobook.utils.dtypes import compute_dtype

if TYPE_CHECKING:
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedConfig

    from zerobook.config import RecipeConfig
    from zerobook.strategy.launch_plan import LaunchPlan


def nf4(precision: str) -> BitsAndBytesConfig:
    """Return the config of QLoRA's base weights: 4-bit NormalFloat with double quantisation (Dettmers et al., 2023).

    The storage dtype equals the compute dtype, so that FSDP2 and ZeRO-3 shard the packed weights like the others.
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


def check_base(model_config: PreTrainedConfig, config: RecipeConfig, plan: LaunchPlan) -> None:
    """Check that this run can train beside the weights of a model that is quantised already.

    Raises:
        ConfigError: it trains the weights themselves, they have a format that is not supported, or the strategy cannot hold it.
    """
    facts = getattr(model_config, "quantization_config", None)
    if facts is None:
        return
    facts = facts if isinstance(facts, dict) else facts.to_dict()
    name = f"model_name_or_path: {config.model_name_or_path}"
    bits = 4 if facts.get("load_in_4bit") else 8 if facts.get("load_in_8bit") else None
    if bits is None:
        raise ConfigError(
            f"{name} is quantised with {facts.get('quant_method', 'an unnamed method')}, and recipes train beside weights that "
            "are quantised by bitsandbytes alone. Take the model's version that is not quantised; --load_in_4bit and "
            "--load_in_8bit of recipes/lora_finetune.py quantise it while loading."
        )
    if not config.trains_adapters:
        raise ConfigError(
            f"{name} is quantised to {bits} bits, and quantised weights cannot be trained. Take the model's version that is "
            "not quantised, or train adapters with recipes/lora_finetune.py."
        )
    asked = {"nf4": 4, "int8": 8}.get(config.base_format or "")
    if asked not in (None, bits):
        raise ConfigError(
            f"{name} is quantised to {bits} bits already, and load_in_{asked}bit asks for {asked}. Drop the flag, or take the "
            "model's version that is not quantised."
        )
    storage = str(facts.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
    problem = refused_base(plan, name, "int8" if bits == 8 else "nf4", storage)
    if problem is not None:
        raise ConfigError(problem)


def keep_4bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes' 4-bit weights in the layout in which they were loaded.

    On CPUs with AVX512-BF16, bitsandbytes repacks them in place at the first forward pass in evaluation mode, and rounds
    their scales to bf16. FSDP2 and ZeRO-3 then gather the repacked bytes as plain ones, and every loss after that is wrong.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # an attribute of bitsandbytes' layers
