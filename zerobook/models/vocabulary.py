"""New tokens: add them to the tokenizer, and add a row for each to the embeddings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from zerobook.utils.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add ``tokens`` to the tokenizer. Its attribute ``new_token_ids`` lists the ids of those that it did not have.

    A token that the chat template writes becomes a special token: texts may not contain it, and decoding skips it. The other
    tokens are parts of texts.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    template = str(tokenizer.chat_template or "")
    # Repeated tokens are dropped. Ids are assigned in the order of the flag.
    new_tokens = [token for token in dict.fromkeys(tokens) if token not in vocabulary]
    for token in new_tokens:
        tokenizer.add_tokens(AddedToken(token, special=token in template, normalized=False))
    tokenizer.new_token_ids = sorted(cast("list[int]", tokenizer.convert_tokens_to_ids(new_tokens)))


def fit_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give the embeddings a row for each new token, which begins as the mean of the other rows. Collective.

    Returns:
        A note for people; None if the run adds no tokens.
    """
    new_ids = getattr(tokenizer, "new_token_ids", [])
    if not new_ids:
        return None
    rows = embedding_rows(model)
    grow_embeddings(model, len(tokenizer))
    _start_at_mean(model, new_ids)
    size = f"{rows} rows, as before"
    if len(tokenizer) > rows:
        size = f"{rows} -> {len(tokenizer)} rows"
    return f"{counted(len(new_ids), 'new token')}, which start at the mean of the others; embeddings: {size}"


def grow_embeddings(model: PreTrainedModel, rows: int) -> None:
    """Give the input and output embeddings at least ``rows`` rows, and record their number in the model's ``base_facts``."""
    if rows <= embedding_rows(model):
        return
    # `resize_token_embeddings` ties weights. Let it tie those that are tied now: a config may also tie weights that differ in
    # the model's file, as that of Flan-T5.
    model.tie_weights = partial(model.tie_weights, recompute_mapping=False)  # type: ignore[method-assign]
    # With `mean_resizing`, transformers would draw the new rows at random around the mean.
    model.resize_token_embeddings(rows, mean_resizing=False)
    del model.tie_weights
    facts = getattr(model, "base_facts", None)
    if facts is not None:
        # An export loads the base again, and has to give it as many rows.
        facts["embedding_rows"] = rows


def embedding_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embeddings."""
    embeddings = model.get_input_embeddings()
    # A module with an adapter has the original embeddings as its `base_layer`.
    return cast("nn.Embedding", getattr(embeddings, "base_layer", embeddings)).num_embeddings


def are_tied(model: PreTrainedModel) -> bool:
    """Return whether the output embeddings are the input embeddings."""
    inputs = model.get_input_embeddings()
    outputs = model.get_output_embeddings()
    return outputs is not None and cast("nn.Embedding", inputs).weight is cast("nn.Linear", outputs).weight


def embedding_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the input embeddings and, if they are not tied, of the output embeddings.

    Names are the last parts of paths, as peft's ``modules_to_save`` takes them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)].rsplit(".", 1)[-1] for module in _embeddings(model)]


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Return the input embeddings and, if they are not tied, the output embeddings, where the model has them."""
    embeddings = [model.get_input_embeddings()]
    if not are_tied(model):
        embeddings.append(model.get_output_embeddings())
    return [module for module in embeddings if module is not None]


def _start_at_mean(model: PreTrainedModel, new_ids: list[int]) -> None:
    """Set the rows of new tokens to the mean of the rows before them: Hewitt, 2021, "Initializing New Word Embeddings".

    The model then gives a new token about the probability of an average token. With small random rows, it would give it a
    higher probability than all others together.
    """
    from peft.utils.integrations import gather_params_ctx

    for module in _embeddings(model):
        # Some output embeddings have a bias, too.
        for weight in module.parameters(recurse=False):
            # Under FSDP2, rank 0 alone has loaded the weights.
            if weight.is_meta:
                continue
            with torch.no_grad(), gather_params_ctx([weight]):
                # Under ZeRO-3, every rank has all rows here, and rank 0's change is sent to the others when the context ends.
                if len(weight):
                    weight[new_ids] = weight[: new_ids[0]].float().mean(0).to(weight.dtype)
