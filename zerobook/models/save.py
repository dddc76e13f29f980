"""The folder in which a run saves the trained weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from zerobook.config import RecipeConfig
from zerobook.strategy import Strategy
from zerobook.utils.files import disk_errors_named, modes_by_umask, put_in_place, staging_of
from zerobook.utils.reading import read_json
from zerobook.utils.terminal import say

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(
    strategy: Strategy, tokenizer: PreTrainedTokenizerBase, config: RecipeConfig, make_card: Callable[[], str] | None = None
) -> Path:
    """Write the trained model (or adapter) as a folder that ``from_pretrained`` takes, and return the folder. Collective.

    Rank 0 gathers one weight after another. Trained weights are read from their fp32 master copies. A full model is written
    with its frozen weights, in ``config.dtype``, whatever precision it was trained in. Weights that transformers always loads
    in fp32 are written in fp32, and buffers in the dtypes in which they were loaded. An adapter is written in fp32.

    The folder is written under another name, flushed to disk and renamed. Until then, the result of an earlier attempt stays.

    Args:
        make_card: makes the folder's README.md; called on rank 0.

    Raises:
        ConfigError: the folder cannot be written.
    """
    model = cast("PreTrainedModel | PeftModel", strategy.unwrapped)
    dtype = _saved_dtype(model, config)
    folder = Path(config.output_dir) / config.result
    weights: dict[str, Any] = {}
    for key, parameter in strategy.saved():
        tensor = strategy.get_tensor(parameter)
        if strategy.is_main:
            # transformers loads some weights in fp32, whatever dtype the model has.
            saved_dtype = torch.float32 if strategy.loaded_dtypes.get(key) == torch.float32 else dtype
            weights[key] = tensor.to("cpu", saved_dtype, copy=True)
        # The gathered weight is freed before the next one is gathered.
        del tensor

    def write() -> None:
        staging = staging_of(folder)
        # With --on_save_error continue, the last checkpoint may be older than the model, or missing.
        advice = "Free some space, and resume from the last checkpoint with --resume_from_checkpoint auto."
        with disk_errors_named(folder, advice):
            try:
                _write_result(model, tokenizer, staging, weights | strategy.buffers(), dtype)
                if make_card is not None:
                    (staging / "README.md").write_text(make_card(), encoding="utf-8")
                modes_by_umask(staging)
                put_in_place(staging, folder)
            except BaseException:
                # The incomplete folder would take disk space that the next checkpoint may need.
                shutil.rmtree(staging, ignore_errors=True)
                raise
        say(f"saved {folder} ({str(dtype).removeprefix('torch.')})")

    strategy.on_main(write, takes_long=True)
    return folder


def compute_result_bytes(strategy: Strategy, config: RecipeConfig) -> int:
    """Return the bytes of the tensors that `save_model` will write."""
    dtype = _saved_dtype(strategy.unwrapped, config)
    return sum(math.prod(strategy.shape(parameter)) * dtype.itemsize for _, parameter in strategy.saved())


# Return the dtype of the saved weights, except for those that transformers always loads in fp32.
def _saved_dtype(model: Any, config: RecipeConfig) -> torch.dtype:
    from transformers import PreTrainedModel

    from zerobook.models.load import DTYPES

    # An adapter is small, and stays in fp32.
    if not isinstance(model, PreTrainedModel):
        return torch.float32
    return cast("torch.dtype", model.config.dtype if config.dtype == "auto" else DTYPES[config.dtype])


# Write the model with ``weights`` in place of its own, which may be sharded, its configs, and the tokenizer.
def _write_result(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    from peft import PeftModel

    from zerobook.models.adapters import save_adapter
    from zerobook.models.generation_config import save_generation_config, save_weights

    if isinstance(model, PeftModel):
        save_adapter(model, folder, weights)
    else:
        save_weights(model, folder, state_dict=weights)
        # save_pretrained writes the settings of training: the dtype that the strategy computes in, and no cache.
        file = folder / "config.json"
        facts = read_json(file) | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
        if "text_config" in facts:
            facts["text_config"]["use_cache"] = True
        file.write_text(json.dumps(facts, indent=2) + "\n")
    save_generation_config(model, tokenizer, folder)
    tokenizer.save_pretrained(folder)
