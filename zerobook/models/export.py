"""Export of a checkpoint to a transformers folder, which is reloaded and compared with the checkpoint's model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from zerobook.checkpoint import origin, store
from zerobook.checkpoint.state import Reader, read_buffers
from zerobook.data import embedded
from zerobook.errors import CheckpointError
from zerobook.models.adapters import adapt_model, grow_for_adapter, merge_adapter, save_adapter
from zerobook.models.card import Training, format_card
from zerobook.models.load import drop_foreign_attention, open_tokenizer, use_cache
from zerobook.models.quantise import find_base_format
from zerobook.models.unused_modules import freeze_unused
from zerobook.models.vocabulary import grow_embeddings
from zerobook.runlog.facts import trains_adapters
from zerobook.strategy.weights import persistent_buffers
from zerobook.utils import hub
from zerobook.utils.files import disk_errors_named, modes_by_umask, require_new, staged
from zerobook.utils.library_messages import hush_loading
from zerobook.utils.model_config import auto_class, text_config

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Model = PreTrainedModel | PeftModel

# Tokens of each row of the compared batch.
_TOKENS = 24
# Largest allowed difference of logits, as a share of the largest, between the written and the reloaded model.
_ALLOWED = 1e-5


def export_checkpoint(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype, merge: bool, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write ``checkpoint``'s model to ``folder``, reload it, and compare the logits of a fixed batch.

    Args:
        dtype: of the written weights, except those that transformers always loads in fp32.
        merge: fold the adapter's weights into the model's; without it the adapter alone is written.
        trust_remote_code: run code that comes with the model. The checkpoint's own setting is ignored.

    Returns:
        ``folder``, ``difference`` (of logits, as a share of the largest), and ``notes`` for people.

    Raises:
        CheckpointError: an adapter that has not been trained or cannot be merged, or a folder that does not reload to the same
            model.
        ConfigError: the model or the tokenizer that the checkpoint names cannot be loaded.
    """
    hush_loading()
    require_new(folder, "--output")
    recorded = store.read_json(checkpoint / "config.json")
    config = recorded["config"]
    adapts = trains_adapters(config)
    # `zerobook checkpoint import` does not know all settings that adapters are made by.
    if adapts and "lora_target_modules" not in config:
        raise CheckpointError(
            f"{checkpoint}: its adapter was imported, and is in the folder that it came from. Continue it here first, and "
            "export a later checkpoint."
        )

    # Rebuild the model of the checkpoint, in fp32. A branch may have moved since, so the recorded commit comes first.
    revision = recorded.get("base_commit") or config["model_revision"]
    base_model, base = _load_base(recorded, checkpoint, revision, trust_remote_code)
    tokenizer = _load_tokenizer(config, recorded.get("chat_template"), base, revision, trust_remote_code)
    base_class = type(base_model)
    if merge and find_base_format(base_model.config) is not None:
        raise CheckpointError(
            f"{checkpoint}: its base, {base}, is quantised, and adapters cannot be merged into quantised weights. Export the "
            "adapter alone with --keep_adapter."
        )
    model = _restore_model(base_model, recorded, checkpoint, revision)
    # The adapted model refers to its base. Another reference would keep the base in memory below.
    del base_model
    notes = _describe_limits(recorded, adapts)

    # Bring it into the form that is written.
    writes_adapter = adapts and not merge
    if adapts and merge:
        model = merge_adapter(cast("PeftModel", model))
    model.eval()
    if not writes_adapter:
        # This model shows the dtype in which transformers loads each weight. On the meta device, no weights are read.
        reloadable = base_class.from_pretrained(
            base,
            dtype=dtype,
            device_map="meta",
            attn_implementation="eager",
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        _cast_as_loaded(model, reloadable, dtype)
    card = format_card(
        config,
        Training.of_checkpoint(checkpoint),
        seq2seq=model.config.is_encoder_decoder,
        adapter=writes_adapter,
        notes=notes,
    )

    # Write it, and compare what was written.
    with staged(folder) as staging:
        with disk_errors_named(folder, "Free some space, or give another --output."):
            _write_model(model, tokenizer, config, staging)
            (staging / "README.md").write_text(card, encoding="utf-8")
        if writes_adapter:
            # Compute the logits and free the model before the other is loaded: most hosts cannot hold a large base twice.
            expected = _compute_logits(model)
            del model
            reloaded: Model = _reload_adapter(staging, base_class, base)
        else:
            kind = auto_class(type(model.config), encoder_decoder=model.config.is_encoder_decoder)
            reloaded = kind.from_pretrained(staging, dtype=dtype, trust_remote_code=trust_remote_code).eval()
            _cast_buffers(model, reloaded)
            expected = _compute_logits(model)
        difference = float((expected - _compute_logits(reloaded)).abs().max() / expected.abs().max())
        # If logits are NaN, so is the difference, and every comparison with it is False.
        if not difference <= _ALLOWED:
            raise CheckpointError(
                f"{folder}: what was written does not reload to the same model: logits differ by {difference:.1e} of the "
                f"largest, allowed is {_ALLOWED:.0e} (nan: numbers exceed the range of {dtype}). Nothing was kept."
            )
        # Another export to this folder may have ended since the first check.
        require_new(folder, "--output")
    return {"folder": folder, "difference": difference, "notes": notes}


# Return the checkpoint's model, made from its base. ``recorded`` is the checkpoint's config.json.
def _restore_model(base_model: PreTrainedModel, recorded: dict[str, Any], checkpoint: Path, revision: str) -> Model:
    base_facts = recorded.get("base") or {}
    grow_embeddings(base_model, base_facts.get("embedding_rows", 0))
    model: Model = base_model
    adapts = trains_adapters(recorded["config"])
    if adapts:
        model = adapt_model(base_model, recorded["config"], revision=revision, recorded=base_facts.get("adapter"))
    _restore_weights(model, checkpoint, adapts)
    return model


def _describe_limits(recorded: dict[str, Any], adapts: bool) -> list[str]:
    """Return notes for people on how the exported model may differ. ``recorded`` is the checkpoint's config.json."""
    config = recorded["config"]
    notes = []
    if config["chat_template"] and "chat_template" not in recorded:
        notes.append(
            f"the checkpoint does not hold the text of {config['chat_template']}; the tokenizer's own template is kept"
        )
    if adapts and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        notes.append(
            "the adapter was trained beside quantised weights, and stands here beside the full ones: answers can differ"
        )
    return notes


def _cast_as_loaded(model: Model, reloadable: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the weights to the dtypes in which transformers loads them: some are fp32, whatever ``dtype`` is.

    Buffers keep their dtype: a router's bias in half precision chooses other experts.

    Args:
        reloadable: a model of the same class, as transformers loads it with ``dtype``.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(reloadable.get_parameter(name).dtype)
    model.config.dtype = dtype


def _load_base(
    recorded: dict[str, Any], checkpoint: Path, revision: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, str]:
    """Return the model that the run began with, in fp32, and its location. ``recorded`` is the checkpoint's config.json."""
    import transformers

    name = recorded["config"]["model_name_or_path"]
    # A run from scratch has no name of a model. It saves the weights that it begins with.
    source = str(checkpoint.parents[1] / "initial_model")
    if name is not None:
        source = embedded.locate_model(name)
    options = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        model_config = transformers.AutoConfig.from_pretrained(source, **options)
        drop_foreign_attention(model_config)
        kind = auto_class(type(model_config), encoder_decoder=model_config.is_encoder_decoder)
        model = kind.from_pretrained(source, config=model_config, dtype=torch.float32, **options)
    except (OSError, ValueError, SafetensorError) as error:
        advice = ""
        if "custom code" in str(error):
            advice = " Pass --trust_remote_code to run its code, if you trust it."
        raise CheckpointError(
            f"{checkpoint}: the model that it was trained from, {name or source}, does not load: "
            f"{str(error).splitlines()[0]}{advice}"
        ) from error
    freeze_unused(model)
    # A digest reads the files of weights, so it is computed only if the checkpoint has one to compare with.
    has_digest = (recorded.get("base") or {}).get("weights") is not None
    current = origin.facts(model_config, hub.folder(source, revision) if has_digest else None)
    # Weights that were loaded at the recorded commit of the hub are the same, and need no comparison of digests.
    origin.check(checkpoint, recorded, current, weights=not recorded.get("base_commit") or Path(source).exists())
    return model, source


def _load_tokenizer(
    config: dict[str, Any], template: str | None, base: str, revision: str, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer, with the chat template ``template``. ``base`` and ``revision`` locate the base model."""
    name = base
    if config["tokenizer_name"]:
        name = embedded.locate_model(config["tokenizer_name"])
        revision = config["model_revision"]
    tokenizer, _ = open_tokenizer(
        name,
        template=template,
        revision=revision,
        trust_remote_code=trust_remote_code,
        tokens=config.get("new_tokens", ()),
    )
    return tokenizer


def _restore_weights(model: nn.Module, checkpoint: Path, adapts: bool) -> None:
    """Copy the checkpoint's trained weights and buffers into ``model``.

    Raises:
        CheckpointError: the weights do not fit the model, one is missing, or ``model`` has an adapter that was not trained.
    """
    reader = Reader(checkpoint)
    shapes = reader.index["shapes"]
    parameters = dict(model.named_parameters())
    # Only an adapter is checked for having been trained.
    is_trained = not adapts
    for name, shape in shapes.items():
        model_shape = list(parameters[name].shape) if name in parameters else "not there"
        if model_shape != shape:
            raise CheckpointError(
                f"{checkpoint}: {name} is {shape} in it, and {model_shape} in the model that its config names."
            )
        value = reader.read_tensor(f"weight/{name}")
        # An adapter is trained if a weight differs from its initial value in this model. Another version or machine may begin
        # with other values of lora_A, which is drawn at random, and of DoRA's magnitudes, which are norms of the base weights.
        # So a difference in these shows nothing.
        has_known_start = "lora_A" not in name and "lora_magnitude" not in name
        if not is_trained and has_known_start:
            is_trained = not torch.equal(value, parameters[name])
        with torch.no_grad():
            parameters[name].copy_(value)
    buffers = dict(persistent_buffers(model))
    for name, value in read_buffers(checkpoint, buffers).items():
        buffers[name].copy_(value)
    # A trained weight that the checkpoint lacks would keep its initial value.
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in shapes]
    if missing:
        raise CheckpointError(
            f"{checkpoint}: it does not hold {missing[0]} (and {len(missing) - 1} more), which a run trains in the "
            "model that its config names. Bring back the model that it was trained from."
        )
    if not is_trained:
        raise CheckpointError(f"{checkpoint}: its adapter is what it was before training: its weights are the initial ones.")


def _write_model(model: Model, tokenizer: PreTrainedTokenizerBase, config: dict[str, Any], folder: Path) -> None:
    """Write weights, configs and tokenizer, as a run saves them when it ends."""
    from zerobook.models.generation_config import RULES, save_decoding_settings, save_generation_config, save_weights

    # Training turns the cache off, and generation needs it.
    use_cache(model, True)
    # Only recipes of encoder-decoders have settings of generation.
    if "num_beams" in config:
        # A checkpoint of an earlier version may lack some of the rules.
        rules = {name: config.get(name) for name in RULES}
        save_decoding_settings(
            model,
            tokenizer,
            source_prefix=config["source_prefix"],
            num_beams=config["num_beams"],
            max_tokens=config["val_max_target_length"] or config["max_target_length"],
            min_tokens=config["val_min_target_length"],
            **rules,
        )
    if hasattr(model, "peft_config"):
        adapter = cast("PeftModel", model)
        weights = {name: weight.detach() for name, weight in adapter.named_parameters() if weight.requires_grad}
        save_adapter(adapter, folder, weights | dict(persistent_buffers(adapter)))
    else:
        save_weights(cast("PreTrainedModel", model), folder)
    save_generation_config(model, tokenizer, folder)
    tokenizer.save_pretrained(folder)
    modes_by_umask(folder)


def _reload_adapter(folder: Path, base_class: type[PreTrainedModel], base: str) -> PeftModel:
    """Load the written adapter onto its base, as its users will do."""
    from peft import PeftConfig, PeftModel

    revision = PeftConfig.from_pretrained(str(folder)).revision or "main"
    base_model = base_class.from_pretrained(base, dtype=torch.float32, revision=revision)
    # The embeddings of an adapter may have more rows than the base's. AutoPeftModel resizes the base, and PeftModel does not.
    grow_for_adapter(base_model, folder)
    return PeftModel.from_pretrained(base_model, folder).eval()


def _cast_buffers(model: Model, reloaded: Model) -> None:
    """Cast the buffers of ``model`` to the dtypes of ``reloaded``: transformers casts some if it loads in half precision."""
    reloaded_buffers = dict(persistent_buffers(reloaded))
    for name, buffer in persistent_buffers(model):
        buffer.data = buffer.data.to(reloaded_buffers[name].dtype)


@torch.no_grad()
def _compute_logits(model: Model) -> torch.Tensor:
    """Return the logits of fixed random tokens, fp32 [2, _TOKENS, vocabulary]."""
    # The first ids are left out, since they are often special tokens, and padding would be masked.
    vocabulary_size = text_config(model.config).vocab_size
    ids = torch.randint(3, min(vocabulary_size, 1000), (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    return model(**batch).logits.float()
