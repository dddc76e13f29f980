"""Loading of a run's result, or of any other model, for chat and evaluation."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.result import find_result, holds_result
from zerobook.data import embedded
from zerobook.errors import ConfigError
from zerobook.models.generation_config import read_source_prefix
from zerobook.utils import hub, locks
from zerobook.utils.attention import prepare_attention
from zerobook.utils.library_messages import hush_loading
from zerobook.utils.model_config import auto_class, text_config
from zerobook.utils.reading import file_digest, read_json
from zerobook.utils.terminal import say
from zerobook.utils.units import size

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["causal", "seq2seq"]


@dataclass
class Loaded:
    """A model ready to answer: in evaluation mode, on the GPU if there is one."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    """``causal``: the answer continues the prompt. ``seq2seq``: an encoder reads the prompt."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens that the model reads, on each side of a seq2seq model; None if there is no limit."""
        return find_context_length(self.model.config)

    @property
    def source_prefix(self) -> str:
        """Prefix that recipes/seq2seq_chatbot.py put before every source, from the model's or the adapter's config."""
        return read_source_prefix(self.model) or str(getattr(self.model.generation_config, "source_prefix", ""))


def find_context_length(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of positions in a transformers config; None if the architecture sets no limit."""
    config = text_config(config)
    # T5 has relative positions, which work for any length. Its n_positions is the length that it was trained with.
    if getattr(config, "relative_attention_num_buckets", None):
        return None
    for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    return None


def load_result(path: str | Path, *, trust_remote_code: bool = False) -> Loaded:
    """Load a trained model with its tokenizer.

    Args:
        path: a model folder, an adapter folder (its config names the base), a run's output_dir, one of its checkpoints, a hub
            name, or ``embedded:smollm2``.
        trust_remote_code: run modelling code that comes with the model.

    Raises:
        ConfigError: no such folder, a folder with neither a model nor an adapter in it, an adapter whose base
            is not there, weights that cannot be read, or a model for which the GPU has too little memory.
    """
    from zerobook.models.load import use_cache

    hush_loading()
    prepare_attention()
    name = locate_result(str(path), trust_remote_code=trust_remote_code)
    options = {"trust_remote_code": trust_remote_code}
    tokenizer_name = name
    tokenizer_options = options
    if (Path(name) / "adapter_config.json").exists():
        adapted_model, base_name, base_options = _load_adapter(name, options)
        model: PreTrainedModel | PeftModel = adapted_model
        # An adapter that was saved without its tokenizer uses its base's.
        if not (Path(name) / "tokenizer_config.json").exists():
            tokenizer_name = base_name
            tokenizer_options = base_options
    else:
        model = _load_model(name, options, str(path))
    tokenizer = _load_tokenizer(tokenizer_name, tokenizer_options, str(path))
    kind: Kind = "seq2seq" if model.config.is_encoder_decoder else "causal"
    # Training switches the cache off, and models are saved with this setting. Without a cache, each new token would need a
    # forward pass over the complete answer.
    use_cache(model, True)
    model.generation_config.use_cache = True
    module = cast("nn.Module", model).eval()
    if torch.cuda.is_available():
        # Measure the free memory before the move: a move that fails leaves some of the weights on the GPU.
        free_bytes, _ = torch.cuda.mem_get_info()
        try:
            module.to("cuda")
        except torch.OutOfMemoryError as error:
            model_bytes = sum(weight.nbytes for weight in module.parameters())
            raise ConfigError(
                f"{path}: the weights of the model need {size(model_bytes)}, and the GPU has {size(free_bytes)} free. To use "
                "the CPU, set CUDA_VISIBLE_DEVICES to an empty value: write CUDA_VISIBLE_DEVICES= before the command."
            ) from error
    return Loaded(model, tokenizer, kind)


def locate_result(name: str, *, trust_remote_code: bool = False) -> str:
    """Return the folder of the model or adapter that ``name`` stands for, or ``name`` itself if it can only be on the hub.

    Args:
        name: as ``path`` of `load_result`.
        trust_remote_code: run modelling code that comes with a checkpoint's model.
    """
    if name.startswith(embedded.PREFIX):
        return _locate_embedded(name)
    folder = Path(name).expanduser()
    if not folder.exists():
        # ``owner/name`` may be on the hub, unless there is a folder ``owner`` here.
        is_in_local_folder = len(folder.parts) > 1 and folder.parent.is_dir()
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or is_in_local_folder:
            raise ConfigError(
                f"{name}: there is no such folder. Give a run's output_dir, or the model or adapter folder in it."
            )
        hub.check_reachable(name)
        return name
    if not folder.is_dir():
        raise ConfigError(f"{name}: this is a file. Give the folder that holds config.json or adapter_config.json.")
    if (folder / store.MANIFEST).exists():
        return _export_for_loading(folder, trust_remote_code)
    if holds_result(folder):
        return str(folder)
    # A run that has not ended has no result yet. Its newest checkpoint takes the place of the result.
    newest = store.list_complete(store.folder_of(name))[-1:]
    if newest and not any(holds_result(folder / kind) for kind in ("model", "adapter")):
        return _export_for_loading(newest[0], trust_remote_code)
    result = find_result(name)
    return str(result.adapter or result.model)


def export_if_checkpoint(name: str, *, trust_remote_code: bool = False) -> str:
    """Return a folder with the exported model if ``name`` is a checkpoint, so that a run can start from it; else ``name``."""
    folder = Path(name).expanduser()
    return str(_export_to_cache(folder, "", trust_remote_code)) if (folder / store.MANIFEST).exists() else name


def _export_for_loading(checkpoint: Path, trust_remote_code: bool) -> str:
    """Return a folder with the checkpoint's model. Load it soon: later calls delete folders that were not used for an hour."""
    folder = _export_to_cache(checkpoint, "loaded-", trust_remote_code)
    for other in folder.parent.glob("loaded-*/"):
        # A process that has just exported a folder may still be loading it, so only old folders are deleted. Another process
        # may delete this one at the same time.
        with suppress(FileNotFoundError), locks.locked(_lock_file(other), wait=0) as is_locked:
            if is_locked and time.time() - other.stat().st_mtime > 3600:
                shutil.rmtree(other)
    return str(folder)


def _export_to_cache(checkpoint: Path, prefix: str, trust_remote_code: bool) -> Path:
    """Return a folder of the cache with the checkpoint's model, and export it if it is missing. Adapters are not merged.

    While a process exports a checkpoint, others that need it wait. ``prefix`` begins the name of the folder.
    """
    from zerobook.models.export import export_checkpoint

    checkpoint = checkpoint.resolve()
    key = file_digest(checkpoint / store.MANIFEST)
    folder = embedded.cache_dir() / "exports" / f"{prefix}{checkpoint.parents[1].name}-{checkpoint.name}-{key[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # stdout is for answers, so messages go to stderr.
    with locks.locked(_lock_file(folder)), redirect_stdout(sys.stderr):
        if not folder.exists():
            say(f"{checkpoint}: making a model of this checkpoint in {folder}")
            # fp32 is the dtype of the weights in training and in the run's evaluations.
            export_checkpoint(checkpoint, folder, dtype=torch.float32, merge=False, trust_remote_code=trust_remote_code)
        # The folder's time is that of its last use. `_export_for_loading` deletes old folders.
        os.utime(folder)
    return folder


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _locate_embedded(name: str) -> str:
    # The conversion prints messages, and stdout is for answers.
    with redirect_stdout(sys.stderr):
        return embedded.locate_model(name)


def _load_adapter(folder: str, options: dict[str, Any]) -> tuple[PeftModel, str, dict[str, Any]]:
    """Return (the model with the adapter, the location of its base, the options for loading the base)."""
    from peft import PeftModel
    from transformers import GenerationConfig

    from zerobook.models.adapters import grow_for_adapter

    file = Path(folder) / "adapter_config.json"
    try:
        facts = read_json(file)
        base_name = facts.get("base_model_name_or_path")
        revision = facts.get("revision")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: this is not an adapter's config: {error}.") from None
    if not base_name:
        raise ConfigError(f"{file}: it names no base_model_name_or_path. Write the model it was trained on there.")
    base_location = base_name
    options = options | {"revision": revision or "main"}
    # On the machine that trained the adapter, or in another home directory, the embedded model has another path.
    embedded_folder = embedded.cache_dir() / "SmolLM2-135M-Instruct"
    if not Path(base_name).exists() and Path(base_name).parts[-2:] == embedded_folder.parts[-2:]:
        base_location = _locate_embedded(f"{embedded.PREFIX}smollm2")
    try:
        base_location = locate_result(base_location, trust_remote_code=options["trust_remote_code"])
        model = _load_model(base_location, options, base_name)
    except ConfigError as error:
        raise ConfigError(
            f"{folder}: this is an adapter for {base_name}, and that base cannot be loaded: {error} "
            f"Bring the base there, or write its place into {file} as base_model_name_or_path."
        ) from error
    try:
        # The generation config of the run names the tokens that end its chats.
        if (Path(folder) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        grow_for_adapter(model, Path(folder))
        return PeftModel.from_pretrained(model, folder), base_location, options
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(f"{folder}: the adapter does not load onto {base_name}: {_first_line(error)}") from error


# ``shown``, here and below: the name that the user gave, for messages.
def _load_model(name: str, options: dict[str, Any], shown: str) -> PreTrainedModel:
    from transformers import AutoConfig

    from zerobook.models.load import drop_foreign_attention

    try:
        config = AutoConfig.from_pretrained(name, **options)
        drop_foreign_attention(config)
        kind = auto_class(type(config), encoder_decoder=config.is_encoder_decoder)
        return kind.from_pretrained(name, config=config, dtype="auto", **options)
    # JSON, safetensors, the hub client and torch raise errors of their own about a file.
    except Exception as error:
        raise _not_loadable_error(name, shown, "model", error) from error


def _load_tokenizer(name: str, options: dict[str, Any], shown: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    # Readers of a tokenizer's files also raise errors of their own.
    except Exception as error:
        raise _not_loadable_error(name, shown, "tokenizer", error) from error
    if tokenizer.pad_token_id is None:
        # Padding is masked from attention by position, so any token works.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# ``part`` is "model" or "tokenizer".
def _not_loadable_error(name: str, shown: str, part: str, error: Exception) -> ConfigError:
    if Path(name).exists():
        return ConfigError(f"{shown}: the folder is here, but the {part} cannot be loaded: {_first_line(error)}")
    return ConfigError(
        f"{shown}: there is no such folder here, and the {part} cannot be loaded: {_first_line(error)}{hub.advice(error)}"
    )


# Return the first line of an error's text, or the name of its class if it has no text.
def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    if lines[0].endswith(":"):
        # A heading says nothing without the line after it.
        return " ".join(lines[:2])
    return lines[0]
