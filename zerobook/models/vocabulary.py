"""New tokens: the tokenizer gets them, and the embeddings get rows for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from zerobook.utils.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add ``tokens`` to the tokenizer. Its ``new_token_ids`` lists the ids of those that it did not have.

    A token that the chat template writes is a special token: texts may not contain it, and decoding skips it. The others are
    parts of texts.
    """
    from tokenizers import AddedToken

    known, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    for token in new:
        tokenizer.add_tokens(AddedToken(token, special=token in template, normalized=False))
    tokenizer.new_token_ids = sorted(cast("list[int]", tokenizer.convert_tokens_to_ids(new)))


def fit_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give the embeddings a row for each new token, which starts at the mean of the others. Collective.

    Returns:
        A note for people; None where the run adds no tokens.
    """
    new = getattr(tokenizer, "new_token_ids", [])
    if not new:
        return None
    rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    grow_embeddings(model, len(tokenizer))
    _start_at_mean(model, new)
    size = f"{rows} -> {len(tokenizer)} rows" if len(tokenizer) > rows else f"{rows} rows, as before"
    return f"{counted(len(new), 'new token')}, which start at the mean of the others; embeddings: {size}"


def grow_embeddings(model: PreTrainedModel, rows: int) -> None:
    """Give the input and output embeddings at least ``rows`` rows. ``base_facts`` of the model records their number."""
    if rows <= cast("nn.Embedding", model.get_input_embeddings()).num_embeddings:
        return
    model.resize_token_embeddings(rows, mean_resizing=False)  # the mean of transformers is drawn at random
    facts = getattr(model, "base_facts", None)
    if facts is not None:
        facts["embedding_rows"] = rows


def are_tied(model: PreTrainedModel) -> bool:
    """Return whether the output embeddings are the input embeddings."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    return last is not None and cast("nn.Embedding", first).weight is cast("nn.Linear", last).weight


def embedding_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the input and, where they are not tied, the output embeddings, as peft's ``modules_to_save`` takes
    them."""
    wanted = [model.get_input_embeddings(), *([] if are_tied(model) else [model.get_output_embeddings()])]
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)].rsplit(".", 1)[-1] for module in wanted if module is not None]


def _start_at_mean(model: PreTrainedModel, new: list[int]) -> None:
    """Set the rows of new tokens to the mean of the rows before them: Hewitt, 2021, "Initializing New Word Embeddings".

    The model then gives a new token about the probability of an average one; with small random rows it would give it more than
    all others together.
    """
    from peft.utils.integrations import gather_params_ctx

    modules = [model.get_input_embeddings(), *([] if are_tied(model) else [model.get_output_embeddings()])]
    for module in filter(None, modules):
        weight = cast("nn.Parameter", cast("nn.Embedding", module).weight)
        if weight.is_meta:  # under FSDP2, rank 0 alone has loaded the weights
            continue
        with torch.no_grad(), gather_params_ctx([weight]):
            if len(weight):  # under ZeRO-3, rank 0's change is sent to the others
                weight[new] = weight[: new[0]].float().mean(0).to(weight.dtype)
