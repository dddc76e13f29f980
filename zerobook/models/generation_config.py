"""Generation settings of a trained model: the config that is saved with it, and its stop tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.data.templates import end_tokens
from zerobook.utils.replaced import replaced

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


# Settings of the search that a recipe may set, by their names in a generation config.
RULES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "repetition_penalty", "length_penalty")


def decoding(
    model_settings: GenerationConfig, *, num_beams: int, max_tokens: int, min_tokens: int = 0, **rules: float | None
) -> GenerationConfig:
    """Return a generation config for deterministic beam search (greedy with one beam).

    ``generate`` reads some settings from the model, so set the result as ``model.generation_config``.

    Args:
        model_settings: the model's own generation config. The result has its special tokens, but not its lengths, beams and
            sampling, which would override the arguments or conflict with them.
        max_tokens: maximum number of tokens of a text, with its end token and without the decoder's start token, as in labels.
        min_tokens: minimum number of tokens before the end token.
        rules: values of `RULES`. If a value is None or missing, the model's own value stays. With one beam,
            ``length_penalty`` is always removed.
    """
    config = copy.deepcopy(model_settings)
    config.update(
        num_beams=num_beams,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens or None,
        max_length=None,
        min_length=None,
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        typical_p=None,
        use_cache=True,
    )
    config.update(**{name: value for name, value in rules.items() if value is not None})
    if num_beams == 1:
        # transformers refuses to save these settings of beam search with one beam.
        config.update(early_stopping=None, length_penalty=None)
    return config


def list_stop_tokens(
    model_settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, *, encoder_decoder: bool
) -> list[int]:
    """Return the ids of all tokens that end an answer: those of the model's own config, and those that end texts in training.

    A base model's config often names the end of a document only, while its chat template ends turns with another token.
    """
    end_ids = model_settings.eos_token_id
    # A config has one id, a list of ids, or None.
    model_ends = set(end_ids if isinstance(end_ids, list) else [end_ids]) - {None}
    return sorted(model_ends | end_tokens(tokenizer, chats=not encoder_decoder))


def _as_config_value(tokens: list[int]) -> int | list[int] | None:
    """Return stop tokens as a config holds them: one token as a number, since some readers accept no list; None if empty."""
    return tokens[0] if len(tokens) == 1 else tokens or None


def save_weights(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Write the model with transformers' ``save_pretrained`` and its ``options``, without its generation config.

    Call `save_generation_config` afterwards.
    """
    from transformers import GenerationConfig

    # Before 5.23, transformers refuses to write a model whose generation config is invalid. Many published configs are invalid,
    # such as those with a temperature but without sampling. So an empty config takes its place.
    with replaced(model, "generation_config", GenerationConfig()):
        model.save_pretrained(str(folder), **options)


def save_generation_config(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write ``generation_config.json`` into ``folder``, with every token at which the model stops. See `save_weights`."""
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = _as_config_value(list_stop_tokens(config, tokenizer, encoder_decoder=model.config.is_encoder_decoder))
    # Otherwise the file would say that it was derived from config.json, which names fewer stop tokens.
    config._from_model_config = False
    # An adapter has no config.json that could hold the prefix.
    if read_source_prefix(model) and hasattr(model, "peft_config"):
        config.source_prefix = read_source_prefix(model)  # type: ignore[union-attr]  # it keeps keys that it does not know
    config.to_json_file(folder / "generation_config.json", use_diff=True)


def read_source_prefix(model: PreTrainedModel | PeftModel) -> str:
    """Return the text that precedes every source, as `save_decoding_settings` wrote it to the config; else an empty text."""
    tasks = getattr(model.config, "task_specific_params", None) or {}
    return str(tasks.get("chatbot", {}).get("prefix", ""))


def save_decoding_settings(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source_prefix: str,
    num_beams: int,
    max_tokens: int,
    min_tokens: int,
    **rules: float | None,
) -> None:
    """Write an encoder-decoder's generation settings and its source prefix to its configs, which are saved with the model.

    So it later generates as it did in the evaluation. `decoding` explains the settings.
    """
    settings = model.generation_config
    model.generation_config = decoding(settings, num_beams=num_beams, max_tokens=max_tokens, min_tokens=min_tokens, **rules)
    model.generation_config.eos_token_id = _as_config_value(list_stop_tokens(settings, tokenizer, encoder_decoder=True))
    tasks = getattr(model.config, "task_specific_params", None) or {}
    model.config.task_specific_params = tasks | {"chatbot": {"prefix": source_prefix}}
