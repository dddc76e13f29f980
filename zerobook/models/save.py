"""The folder in which a run saves the trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from zerobook.config import RecipeConfig
from zerobook.strategy import Strategy
from zerobook.utils.files import modes_by_umask, put_in_place, staging_of
from zerobook.utils.terminal import say

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


def save_model(strategy: Strategy, tokenizer: PreTrainedTokenizerBase, config: RecipeConfig) -> Path:
    """Write the trained model (or adapter) as a plain folder that ``from_pretrained`` takes. Collective.

    Weights are gathered whole, one at a time, to rank 0, from their fp32 masters. A whole model is written in
    ``config.dtype``, whatever precision it was trained in; an adapter in fp32. Weights that transformers loads in fp32
    whatever the dtype stay in fp32, and buffers keep the dtypes they were loaded in. The folder is complete when it
    appears: until then, the result of an earlier attempt stays.
    """
    from transformers import PreTrainedModel

    from zerobook.models.adapters import save_adapter
    from zerobook.models.generation_config import save_generation_config
    from zerobook.models.load import DTYPES

    model = cast("PreTrainedModel | PeftModel", strategy.unwrapped)
    dtype: torch.dtype = torch.float32
    if isinstance(model, PreTrainedModel):
        dtype = cast("torch.dtype", model.config.dtype if config.dtype == "auto" else DTYPES[config.dtype])
    folder = Path(config.output_dir) / config.result
    weights: dict[str, Any] = {}
    for key, parameter in strategy.trainable():
        tensor = strategy.get_tensor(parameter)
        if strategy.is_main:
            kept = torch.float32 if strategy.loaded_dtypes.get(key) == torch.float32 else dtype
            weights[key] = tensor.to("cpu", kept, copy=True)
        del tensor
    if strategy.is_main:
        weights |= strategy.buffers()
        staging = staging_of(folder)
        if isinstance(model, PreTrainedModel):
            model.save_pretrained(str(staging), state_dict=weights)
            # save_pretrained writes the live settings: the strategy's compute dtype, the cache that training switches off
            file = staging / "config.json"
            facts = json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
            file.write_text(json.dumps(facts, indent=2) + "\n")
        else:
            save_adapter(model, staging, weights)
        save_generation_config(model, tokenizer, staging)
        tokenizer.save_pretrained(staging)
        modes_by_umask(staging)
        put_in_place(staging, folder)
        say(f"saved {folder} ({str(dtype).removeprefix('torch.')})")
    strategy.barrier()
    return folder
