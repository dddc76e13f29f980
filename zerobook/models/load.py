"""Models and tokenizers: from a hub name, a local folder, a bare config, or the embedded model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from zerobook.checkpoint import origin, resume, state, store
from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.errors import ConfigError
from zerobook.launch.groups import find_config_problems
from zerobook.launch.model_facts import find_text_problems, find_zero3_problems
from zerobook.launch.resolve import Hardware, explain_no_fp32_flash_attention, is_attention_in_half
from zerobook.models import recompute
from zerobook.models.quantise import check_base, check_layers, keep_4bit_layout, quantisable_layers
from zerobook.models.unused_modules import freeze_unused
from zerobook.models.vocabulary import add_tokens, embedding_rows
from zerobook.objective import router_coefficient
from zerobook.strategy import Strategy
from zerobook.utils import hub
from zerobook.utils.files import modes_by_umask, put_in_place, staging_of
from zerobook.utils.host_memory import freed_blocks_returned, too_many_copies
from zerobook.utils.model_config import auto_class, text_config
from zerobook.utils.reading import read_json
from zerobook.utils.terminal import say
from zerobook.utils.units import counted

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from zerobook.data.prepare import PreparedData

    class _Rotary(nn.Module):
        """A module of rotary embeddings, as transformers' models have them."""

        config: PreTrainedConfig
        rope_type: str | dict[str, str]
        original_max_seq_len: int
        inv_freq: torch.Tensor


# File beside an initial model that names the config and the seed that it was made with.
ORIGIN_FILE = "made_of.json"
# Errors that mean that the files of a model cannot be read. Others (memory, a kernel, a collective) need their traceback.
FILE_ERRORS = (OSError, ValueError, ImportError, SafetensorError)
DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}

# Largest head dimension that flash attention 2 takes.
FLASH_HEAD = 256


def fetch_to_node(name: str, strategy: Strategy, revision: str, *, weights: bool = False) -> str:
    """Make the files of a model available on this node, and return the name that ``from_pretrained`` takes. Collective.

    An embedded model is converted, and a model of the hub is downloaded, by one process of each node. The others wait for as
    long as that takes: in ``from_pretrained``, nodes with a slow network would make the others' collectives time out.

    Args:
        weights: also download the weights, not only the config or the tokenizer.
    """
    if name.startswith(embedded.PREFIX):
        return strategy.once_per_node(lambda: embedded.locate_model(name))
    # Each node has its own cache.
    strategy.once_per_node(lambda: hub.fetch(name, revision, weights=weights))
    return name


def load_tokenizer(config: RecipeConfig, strategy: Strategy) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the config names, see `open_tokenizer`. Collective."""
    name = config.tokenizer_name or config.model_name_or_path
    if name is None:
        raise ConfigError("tokenizer_name: a model from --config_name needs a tokenizer; give --tokenizer_name.")
    tokenizer, was_given_pad_token = open_tokenizer(
        fetch_to_node(name, strategy, config.model_revision),
        template=config.chat_template_text,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        tokens=config.new_tokens,
    )
    if was_given_pad_token and strategy.is_main:
        say(f"the tokenizer has no pad token; its end-of-text token {tokenizer.eos_token!r} pads, masked everywhere")
    return tokenizer


def open_tokenizer(
    name: str, *, template: str | None, revision: str, trust_remote_code: bool, tokens: Sequence[str] = ()
) -> tuple[Any, bool]:
    """Load a tokenizer as training uses it.

    If it has no pad token, the end-of-text token pads: padding is masked from attention and loss by position, not by
    id, so this teaches the model nothing.

    Args:
        name: a hub name or a folder.
        template: the chat template's text, in place of the tokenizer's own.
        tokens: tokens to add.

    Returns:
        (the tokenizer, whether the end-of-text token was set as its pad token).

    Raises:
        ConfigError: it cannot be loaded, or has neither a pad token nor an end-of-text token.
    """
    from transformers import AutoTokenizer

    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = _from_pretrained(AutoTokenizer, name, "tokenizer_name", options)
    if template is not None:
        tokenizer.chat_template = template
    add_tokens(tokenizer, tokens)
    if tokenizer.pad_token_id is not None:
        return tokenizer, False
    if tokenizer.eos_token is None:
        raise ConfigError(f"tokenizer_name: {name} has neither a pad nor an end-of-text token. Add one to it.")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, True


def choose_attention(
    config: RecipeConfig, model_config: PreTrainedConfig, model_class: Any, hardware: Hardware, precision: str
) -> str | None:
    """Resolve ``attn_implementation: auto``: flash attention 2 where the GPUs, the model's class and the precision support it.

    Packed rows on a GPU without flash attention take flex attention: it skips the scores between different samples, which SDPA
    would compute and then mask. Flex attention has no dropout, so a model with attention dropout does not take it.

    Args:
        model_config: transformers' config of the model.
        model_class: None if the model's code comes with the model. transformers then chooses.
        precision: of the run: ``no``, ``bf16`` or ``fp16``.

    Returns:
        None if transformers is to choose: SDPA, or eager for a model without it.

    Raises:
        ConfigError: the config names flash attention 2 in fp32 or for a model that does not train correctly with it, or flex
            attention with attention dropout.
    """
    request = config.attn_implementation
    dropout = attention_dropout(model_config.to_dict())
    unfit = unfit_for_flash(model_config)
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = str(model_config.dtype or torch.float32).removeprefix("torch.")
    is_half = is_attention_in_half(config, precision, dtype)
    if request == "flash_attention_2" and not is_half:
        raise ConfigError(explain_no_fp32_flash_attention(precision, dtype))
    if request == "flash_attention_2" and unfit:
        raise ConfigError(f"attn_implementation: flash_attention_2 was asked for, but {unfit}. Use auto, sdpa or eager.")
    if request == "flex_attention" and dropout:
        raise ConfigError(
            f"attn_implementation: flex_attention has no dropout, and the model's config asks for {dropout:g} in attention. "
            "Use auto, sdpa or eager, or set the dropout to 0 in the model's config.json."
        )
    if request != "auto":
        return request
    # On a CPU, the choice of transformers is right.
    if not hardware.gpus:
        return None
    supports_flash = getattr(model_class, "_supports_flash_attn", False) and not unfit
    # Some classes, such as GPT-OSS's, name the only flash kernels that they work with.
    kernels = getattr(model_class, "_compatible_flash_implementations", None) or ("flash_attention_2",)
    if hardware.flash_attention and is_half and supports_flash and "flash_attention_2" in kernels:
        return "flash_attention_2"
    supports_flex = getattr(model_class, "_supports_flex_attn", False)
    if config.packing and supports_flex and not dropout and hardware.missing_compiler is None:
        return "flex_attention"
    return None


def unfit_for_flash(model_config: PreTrainedConfig) -> str | None:
    """Return why a model does not train correctly with flash attention 2 in transformers 5.23; None if nothing is known.

    The model's class claims to support flash attention in all these cases.
    """
    facts = model_config.to_dict()
    kind = model_config.model_type
    if model_config.is_encoder_decoder:
        return (
            f"{kind} is an encoder-decoder: its cross-attention takes the mask of the source's padding for one of the target, "
            "and the encoder's gradients are wrong"
        )
    if kind == "gpt_neo":
        return "gpt_neo's flash attention leaves out the local window of every second layer"
    if facts.get("alibi"):
        return f"{kind} has ALiBi, for which transformers' flash attention raises an error"
    largest = _largest_head(facts)
    if largest > FLASH_HEAD:
        return f"{kind} has heads of {largest} numbers, and flash attention 2 takes at most {FLASH_HEAD}"
    return None


def _largest_head(facts: dict[str, Any]) -> int:
    """Return the largest head dimension in a model's config, also of the configs inside of it; 0 if there is none."""
    largest = 0
    for key, value in facts.items():
        if isinstance(value, int) and str(key).endswith("head_dim"):
            largest = max(largest, value)
        # The config of a part of the model is a value, or an item of a list.
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                largest = max(largest, _largest_head(inner))
    return largest


def attention_dropout(facts: dict[str, Any]) -> float:
    """Return the largest attention dropout in a model's config, also of the configs inside of it; 0 if there is none.

    Architectures call it attention_dropout, attn_pdrop or attention_probs_dropout_prob.

    >>> attention_dropout({"resid_pdrop": 0.2, "attn_config": {"attn_pdrop": 0.1}})
    0.1
    """
    largest = 0.0
    for key, value in facts.items():
        if isinstance(value, dict):
            largest = max(largest, attention_dropout(value))
        is_attention_dropout = isinstance(key, str) and "drop" in key and ("attn" in key or "attention" in key)
        if is_attention_dropout and isinstance(value, int | float):
            largest = max(largest, float(value))
    return largest


def load_config(config: RecipeConfig, strategy: Strategy) -> PreTrainedConfig:
    """Return transformers' config of the model that the recipe's config names. Collective. Loads no weights.

    Raises:
        ConfigError: there is no such model, the recipes or the strategy cannot train it, or ``router_aux_loss_coef`` has no
            effect on it.
    """
    from transformers import AutoConfig

    name = config.model_name_or_path
    # The flag that gave the name, for error messages.
    key = "model_name_or_path"
    # A run from scratch names a model's config instead, by ``config_name``.
    if name is None:
        name = config.initialised_from
        key = "config_name"
    assert name is not None
    options = {"trust_remote_code": config.trust_remote_code, "revision": config.model_revision}
    model_config = _from_pretrained(AutoConfig, fetch_to_node(name, strategy, config.model_revision), key, options)
    # The objective of encoder-decoders never adds the load-balancing loss.
    if config.router_aux_loss_coef is not None and (
        model_config.is_encoder_decoder or router_coefficient(model_config) is None
    ):
        raise ConfigError(
            f"router_aux_loss_coef: it is {config.router_aux_loss_coef:g}, and no loss that balances experts is added for "
            f"{name} ({model_config.model_type}). Leave the flag out."
        )
    facts = model_config.to_dict()
    problems = (
        find_text_problems(facts)
        + find_config_problems(strategy.plan, model_config)
        + find_zero3_problems(strategy.plan, facts)
    )
    if problems:
        raise ConfigError(problems)
    return model_config


def load_model(
    config: RecipeConfig, strategy: Strategy, *, encoder_decoder: bool = False, quantization: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    """Load the model that a run trains, in ``config.dtype``, and prepare it for training. Collective.

    A model from ``--config_name`` is initialised once, on rank 0, and saved; every rank then loads it, since random
    initialisation inside ZeRO-3 differs from that outside. So a run from scratch is the same under every strategy.

    The returned model has two more attributes. ``base_commit`` is its commit on the hub, or None. ``base_facts`` is what
    checkpoints record about the model.

    Args:
        encoder_decoder: the model is an encoder-decoder; otherwise it is a decoder.
        quantization: a transformers quantisation config, for frozen weights.
    """
    from transformers import AutoConfig

    # Find the model, and check that this run can train it.
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    name = config.model_name_or_path
    commit = None
    if name is None:
        assert config.initialised_from is not None
        name = _make_initial_model(config, config.initialised_from, strategy, encoder_decoder=encoder_decoder)
    else:
        name = fetch_to_node(name, strategy, config.model_revision, weights=True)
        # All nodes load rank 0's commit, since a branch in another node's cache can be an older one.
        commit = strategy.on_main(lambda: hub.commit(name, config.model_revision))
        options["revision"] = commit or config.model_revision
    model_config = _from_pretrained(AutoConfig, name, "model_name_or_path", options)
    check_base(model_config, config, strategy.plan)
    revision = options.get("revision", "main")
    # An adapter fits only the weights that it was trained beside, so the facts then have a digest of them.
    adapts = config.trains_adapters
    facts = strategy.on_main(lambda: origin.facts(model_config, hub.folder(name, revision) if adapts else None))

    # Load it, with the attention that this run's hardware and precision allow.
    kind = auto_class(type(model_config), encoder_decoder=encoder_decoder)
    model_class = kind._model_mapping.get(type(model_config), None)
    hardware = Hardware.detect() if strategy.device.type == "cuda" else Hardware()
    attention = choose_attention(config, model_config, model_class, hardware, strategy.plan.precision)
    options |= {"dtype": DTYPES[config.dtype], "attn_implementation": attention, "config": model_config}
    if quantization is not None:
        options["quantization_config"] = quantization
    if strategy.is_main and quantization is None:
        _warn_of_copies(hub.folder(name, revision), config.dtype, strategy)
    # The strategy may build a model without weights, to see their sizes.
    strategy.prepare_to_load(partial(kind.from_config, deepcopy(model_config), trust_remote_code=config.trust_remote_code))
    with freed_blocks_returned(), quantisable_layers() if quantization is not None else nullcontext():
        model: Any = strategy.load(partial(_load_weights, kind, name), options)
    if quantization is not None and config.base_format is not None:
        check_layers(model, config.base_format)
    model.base_commit = commit
    model.base_facts = facts
    if strategy.is_main and type(model.config) is not type(model_config):
        say(f"  note: of this {model_config.model_type}, the text model alone is loaded, trained and saved")
    _prepare_for_training(model, config, strategy)
    _check_complete(model, name)
    return model


# Print a warning if the copies of the weights that this host's processes load may exceed its memory.
def _warn_of_copies(folder: Path | None, dtype: str, strategy: Strategy) -> None:
    copies = strategy.plan.copies_at_load(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    warning = too_many_copies(folder, dtype, copies)
    if warning:
        say(warning)


def _prepare_for_training(model: Any, config: RecipeConfig, strategy: Strategy) -> None:
    """Change what would slow or break training, let activations be recomputed, and freeze weights that text does not use."""
    keep_4bit_layout(model)
    use_cache(model, False)
    fuse_tanh_gelu(model)
    if model.config._attn_implementation == "flex_attention":
        # Each combination of shape, kind of mask and need of gradients is compiled; after 8 of them, torch's default, flex
        # attention computes without kernels.
        torch._dynamo.config.recompile_limit = 64
    layerdrop = keep_all_layers(model)
    if strategy.is_main and layerdrop:
        say(f"layerdrop: {layerdrop:g} in the model's config, 0 here: ranks would leave out different layers, which ends a run")
    if strategy.is_main and config.attn_implementation == "auto":
        say(f"attention: {model.config._attn_implementation}")
    recompute.enable(model, config.activation_checkpointing, attention_dropout=attention_dropout(model.config.to_dict()))
    # `freeze_unused` builds a second model without weights, which ZeRO-3 would try to shard.
    with strategy.initialising_complete_weights():
        note = freeze_unused(model)
    if strategy.is_main and note:
        say(f"  note: {note}")


def use_cache(model: PreTrainedModel | PeftModel, cache: bool) -> None:
    """Turn the cache of keys and values on or off. In a composite model, the text model's config decides."""
    for config in (model.config, text_config(model.config)):
        config.use_cache = cache


def keep_all_layers(model: nn.Module) -> float:
    """Turn off layerdrop (Fan et al., 2019), by which models such as M2M100 leave out layers at random in training.

    Each rank would leave out other layers. Then DDP fails with an error about unused parameters, and ZeRO-3 and FSDP2 gather
    different weights on different ranks, and hang or abort.

    Returns:
        The largest rate that a module had; 0 if none had one. The model's config keeps its rate.
    """
    largest_rate = 0.0
    for module in model.modules():
        rate = getattr(module, "layerdrop", 0)
        if rate:
            largest_rate = max(largest_rate, float(rate))
            module.layerdrop = 0.0  # type: ignore[assignment]  # a number; nn.Module declares tensors and modules
    return largest_rate


def fuse_tanh_gelu(model: nn.Module) -> None:
    """Let torch's kernel compute GELU's tanh form (Hendrycks and Gimpel, 2016) in models that compute it step by step.

    GPT-2 and Phi do so. Values and gradients are equal up to rounding. For the backward pass, the kernel keeps only its input,
    and the steps keep seven tensors of this size.
    """
    from transformers import activations

    step_by_step = (activations.NewGELUActivation, activations.FastGELUActivation, activations.AccurateGELUActivation)
    for module in model.modules():
        for name, layer in module.named_children():
            if type(layer) in step_by_step:
                setattr(module, name, nn.GELU(approximate="tanh"))


def drop_foreign_attention(config: PreTrainedConfig) -> None:
    """Let the model's class choose its attention if the config names a kernel on the hub: native code by others."""
    if "/" in str(getattr(config, "_attn_implementation", None) or ""):
        config._attn_implementation = None


def pin_rotary(model: nn.Module, longest: int) -> str | None:
    """Fix rotary embeddings whose frequencies change with the lengths of a batch.

    transformers chooses the frequencies of ``dynamic`` and ``longrope`` embeddings in every forward pass, by its longest row,
    if this row is longer than the rows that the model was first trained on. ``dynamic`` also remembers the longest row of
    earlier passes. So the loss would depend on how a batch is cut, on evaluations between the steps, and on the earlier batches
    of an attempt. This function chooses the frequencies once, for the longest sample of the run.

    Args:
        longest: tokens of the longest sample, in training and held-out data.

    Returns:
        A note for the user; None if nothing was fixed.
    """
    note = None
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        if rope_types is None or not hasattr(module, "original_max_seq_len"):
            continue
        rotary = cast("_Rotary", module)
        # Some models have a type for each type of layer. The key None stands for all layers.
        type_by_layer = rope_types if isinstance(rope_types, dict) else {None: rope_types}
        for layer_type, rope_type in type_by_layer.items():
            limit = _find_rotary_limit(rotary, layer_type, rope_type)
            if limit is None or longest <= limit:
                continue
            # A forward pass chooses the frequencies for its positions. It leaves those of an unknown type as they are, so the
            # type is set to "pinned" afterwards.
            if layer_type is None:
                buffer = rotary.inv_freq
                module(buffer, torch.arange(longest, device=buffer.device)[None])
                rotary.rope_type = "pinned"
            else:
                buffer = getattr(module, f"{layer_type}_inv_freq")
                module(buffer, torch.arange(longest, device=buffer.device)[None], layer_type=layer_type)
                rotary.rope_type = cast("dict[str, str]", rotary.rope_type) | {layer_type: "pinned"}
            note = (
                f"rotary embeddings: {rope_type} changes its frequencies with the longest row of a batch beyond {limit} "
                f"tokens; in this run they are those of its longest sample, {longest} tokens"
            )
    return note


# Return the row length beyond which the frequencies change with the lengths of a batch; None if they never change.
def _find_rotary_limit(rotary: _Rotary, layer_type: str | None, rope_type: str) -> int | None:
    if rope_type == "longrope":
        parameters = rotary.config.rope_parameters
        if layer_type is not None:
            parameters = parameters[layer_type]
        return parameters["original_max_position_embeddings"]
    return rotary.original_max_seq_len if "dynamic" in rope_type else None


def check_positions(model_config: PreTrainedConfig, name: str, longest: int) -> None:
    """Raise `ConfigError` if texts of ``longest`` tokens exceed the model's position embeddings."""
    positions = getattr(text_config(model_config), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"model_name_or_path: {name} has {positions} positions, and texts of {longest} tokens are asked for. "
            f"Lower the maximum lengths of source, target and generated text to {positions}, or take another model."
        )


def check_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    """Raise `ConfigError` if ids or lengths in the data exceed the model's embeddings."""
    datasets = [data.train, *data.held_out.values()]
    rows = embedding_rows(model)
    # A token without an embedding does harm only if the data uses it.
    if len(tokenizer) > rows:
        largest = tokenizer.pad_token_id
        for dataset in datasets:
            largest = max(largest, dataset.largest_id)
        if largest >= rows:
            raise ConfigError(
                f"tokenizer_name: it has {len(tokenizer)} tokens, and the data or its padding uses id {largest}; "
                f"{type(model).__name__} has embeddings for {rows}. Give the tokenizer that belongs to the model."
            )
    check_length(model, max(dataset.longest_sample for dataset in datasets))


def check_length(model: PreTrainedModel, longest: int) -> None:
    """Raise `ConfigError` if a sample of ``longest`` tokens is longer than the model's table of positions."""
    positions = absolute_positions(model)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"model_name_or_path: {type(model).__name__} has {positions} positions, and the longest sample has {longest} "
            f"tokens. Lower --block_size (or --max_seq_length) to {positions}, or take another model."
        )


def absolute_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions in the model's table of position embeddings.

    Returns:
        None if it has no table: rotary and relative positions have no limit.
    """
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    # With adapters, the input embeddings may hold the original table of words and a trained copy.
    word_embeddings = {id(module) for module in model.get_input_embeddings().modules()}
    # Models with rotary positions also have a limit in their config. Only a table of that size shows that it is one.
    table_sizes = []
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in word_embeddings:
            table_sizes.append(module.num_embeddings)
    # GPT-J's table of sines is a buffer.
    table_sizes += [len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    # OPT's positions begin at 2, so its table has two more rows.
    if positions is not None and (positions in table_sizes or positions + 2 in table_sizes):
        return positions
    return None


def _make_initial_model(config: RecipeConfig, config_name: str, strategy: Strategy, *, encoder_decoder: bool) -> str:
    """Make the initial model of a run from scratch, unless an earlier attempt has made it, and return its folder. Collective.

    Rank 0 first locks the run's folder, so that it does not replace the model while another run loads it.
    """
    from accelerate.utils import set_seed
    from transformers import AutoConfig

    folder = Path(config.output_dir) / "initial_model"
    state.require_shared_folder(strategy, config.output_dir)
    source = fetch_to_node(config_name, strategy, config.model_revision)
    record = {"config_name": config_name, "model_revision": config.model_revision, "seed": config.seed}

    def make() -> None:
        resume.lock_run_folder(config)
        record["config_digest"] = _config_digest(source, config.model_revision)
        if _has_initial_model(folder, record, config.output_dir):
            return
        options = {"trust_remote_code": config.trust_remote_code, "revision": config.model_revision}
        model_config = _from_pretrained(AutoConfig, source, "config_name", options)
        # The config may name an attention kernel on the hub, which is native code by others. Do not use it.
        drop_foreign_attention(model_config)
        set_seed(config.seed)
        with strategy.initialising_complete_weights():
            kind = auto_class(type(model_config), encoder_decoder=encoder_decoder)
            model = kind.from_config(model_config, dtype=torch.float32)
        # The folder is renamed when it is complete, so that a killed run leaves no incomplete model.
        staging = staging_of(folder)
        model.save_pretrained(staging)
        modes_by_umask(staging)
        (staging / ORIGIN_FILE).write_text(json.dumps(record))
        put_in_place(staging, folder)

    strategy.on_main(make)
    return str(folder)


# Return whether ``folder`` holds the initial model that ``record`` describes. Raises `ConfigError` if it holds something else
# that may not be replaced.
def _has_initial_model(folder: Path, record: dict[str, Any], output_dir: str) -> bool:
    recorded = _read_origin(folder)
    if recorded is not None and _is_same_initial_model(recorded, record):
        return True
    if recorded is None and folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ConfigError(
            f"output_dir: {folder} was not made by a run: it has no {ORIGIN_FILE}, and this run would replace it with "
            "its own initial model. Move that folder away, or give another --output_dir."
        )
    # The export of a checkpoint needs the model that the run began with.
    checkpoints = store.list_all(store.folder_of(output_dir))
    if recorded is not None and checkpoints:
        raise ConfigError(_initial_model_differs_message(folder, recorded, record, len(checkpoints)))
    return False


def _load_weights(kind: Any, name: str, options: dict[str, Any]) -> Any:
    """Load a model. Its ``missing_weights`` names the weights that its file lacks, which transformers initialises at random."""
    options = options | {"output_loading_info": True}
    model, report = _from_pretrained(kind, name, "model_name_or_path", options, errors=FILE_ERRORS)
    model.missing_weights = report["missing_keys"]
    return model


def _check_complete(model: Any, name: str) -> None:
    """Raise `ConfigError` if the model's file lacks trained weights: their random values would depend on the strategy."""
    trainable = [path for path, parameter in model.named_parameters() if parameter.requires_grad]
    missing = [path for path in trainable if path in model.missing_weights]
    if missing:
        raise ConfigError(
            f"model_name_or_path: {name} lacks {len(missing)} of the {len(trainable)} weights of a {type(model).__name__}, "
            f"such as {missing[0]}, which would be initialised at random. Name a model that has them."
        )


def _read_origin(folder: Path) -> dict[str, Any] | None:
    """Return the settings that an initial model was made with, as its folder records them.

    Returns:
        None if there is no record, and an empty dict if it cannot be read.
    """
    try:
        record = read_json(folder / ORIGIN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _config_digest(source: str, revision: str) -> str | None:
    """Return a digest of a model's config file; None if there is no file to read.

    The file is used, not the config that transformers makes of it: another version of transformers has other defaults.
    """
    from transformers import PreTrainedConfig

    try:
        facts, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    except (OSError, ValueError):
        # The config may be gone when the run resumes.
        return None
    ignored_keys = ("_commit_hash", "_name_or_path", "transformers_version")
    facts = {key: value for key, value in facts.items() if key not in ignored_keys}
    if "auto_map" in facts:
        # The revision also decides which code of the model is loaded.
        facts["model_revision"] = revision
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _is_same_initial_model(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether two records describe the same initial model."""
    # A config file may move, so its digest is compared and not its name.
    keys = ["seed", "config_digest"]
    if before.get("config_digest") is None or now.get("config_digest") is None:
        keys = ["seed", "config_name", "model_revision"]
    return all(key in before and before[key] == now[key] for key in keys)


def _initial_model_differs_message(folder: Path, before: dict[str, Any], now: dict[str, Any], checkpoints: int) -> str:
    """Return the message that a run's checkpoints began from another initial model."""
    differing_keys = [key for key in now if before.get(key) is not None and before[key] != now[key]]
    # The old record may lack the value that differs. Then the message names all values.
    keys = differing_keys or list(now)
    old_values = ", ".join(f"{key} {before.get(key, 'unknown')}" for key in keys)
    new_values = ", ".join(f"{key} {now.get(key, 'unknown')}" for key in keys)
    return (
        f"config_name: {folder} is the initial model of {counted(checkpoints, 'checkpoint')} of this run. It was made with "
        f"{old_values}, and this run has {new_values}. The export of these checkpoints needs their initial model. Use "
        "the old values (and the old content of the config), or give another --output_dir."
    )


def _from_pretrained(
    kind: Any, name: str, key: str, options: dict[str, Any], errors: tuple[type[Exception], ...] = (Exception,)
) -> Any:
    """Load a config, a tokenizer or a model.

    Args:
        key: the flag that gave the name, for the message.
        errors: errors that mean that the files cannot be read, and become a `ConfigError`. Others keep their traceback.
    """
    # A host without a network fails here in seconds; the hub's client would try for minutes.
    hub.check_reachable(name, options.get("revision") or "main")
    try:
        return kind.from_pretrained(name, **options)
    except errors as error:
        lines = str(error).strip().splitlines() or ["no reason given"]
        reason = lines[0]
        # The text of another error may say little: that of a KeyError is only the key. So the type is named, too.
        if not isinstance(error, FILE_ERRORS):
            reason = f"{type(error).__name__}: {reason}"
        if Path(name).exists():
            raise ConfigError(f"{key}: {name} is a folder here, but {kind.__name__} cannot load it: {reason}") from error
        advice = hub.advice(error)
        raise ConfigError(f"{key}: {name} is no folder here, and {kind.__name__} cannot load it: {reason}{advice}") from error
