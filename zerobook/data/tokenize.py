"""Raw samples to token ids and labels, by the shape of the sample.

``text``                    documents, joined by the end-of-text token and cut into blocks
``messages``                chats; only the assistant's turns are supervised
``input_ids`` (``labels``)  already tokenized, taken as they are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from zerobook.data.feed import IGNORE
from zerobook.data.sources import Rows
from zerobook.errors import DataError


@dataclass
class Tokenized:
    """Token rows and what was done to get them. ``report`` counts samples by what happened."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        self.report[what] = self.report.get(what, 0) + number


def supervised_tokens(rows: list[dict[str, Any]]) -> np.ndarray:
    """Tokens per row that a causal loss counts, int64 [rows]: position i is predicted from those before it."""
    return np.array([sum(label != IGNORE for label in row["labels"][1:]) for row in rows], dtype=np.int64)


def tokenize(rows: Rows, tokenizer: Any, *, length: int, limit: int | None = None, progress: bool = False) -> Tokenized:
    """Tokenize ``rows``, whatever known shape they have.

    Args:
        rows: samples of one shape.
        tokenizer: a transformers tokenizer.
        length: tokens per block of text, and the most a chat may have (longer ones are cut).
        limit: make at most so many samples (blocks, for text), from the front; the rest is not read.
        progress: show a bar.

    Raises:
        DataError: an unknown shape, or nothing left that is supervised.
    """
    columns = set(rows[0])
    read = next((_SHAPES[column] for column in _SHAPES if column in columns), None)
    if read is None:
        raise DataError(f"the samples have the columns {', '.join(sorted(columns))}; expected one of {', '.join(_SHAPES)}.")
    result = Tokenized()
    bar = tqdm(rows, desc="tokenizing", unit=" samples", disable=not progress, leave=False)
    for sample in read(bar, tokenizer, length, result):
        result.rows.append(sample)
        if len(result.rows) == limit:
            break
    bar.close()
    kept = supervised_tokens(result.rows) > 0
    result.count("dropped, nothing supervised", int((~kept).sum()))
    result.rows = [row for row, keep in zip(result.rows, kept, strict=True) if keep]
    result.count("samples", len(result.rows))
    if not result.rows:
        raise DataError(f"of {len(rows)} samples none has a supervised token within {length} tokens: {result.report}.")
    return result


def _text(rows: Any, tokenizer: Any, length: int, result: Tokenized) -> Iterator[dict[str, list[int]]]:
    stream: list[int] = []
    blocks = 0
    for row in rows:
        stream += tokenizer(row["text"] or "", add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            stream.append(tokenizer.eos_token_id)
        whole = len(stream) // length * length
        for start in range(0, whole, length):
            block = stream[start : start + length]
            blocks += 1
            yield {"input_ids": block, "labels": list(block)}
        stream = stream[whole:]
    if not blocks:
        raise DataError(f"the text has {len(stream)} tokens, fewer than one block of {length}. Lower --block_size.")
    result.count("tokens dropped at the end", len(stream))


def _messages(rows: Any, tokenizer: Any, length: int, result: Tokenized) -> Iterator[dict[str, list[int]]]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError("the samples are chats, but the tokenizer has no chat template. Use an instruct model's tokenizer.")
    for index, row in enumerate(rows):
        sample = encode_chat(row["messages"], tokenizer, where=f"sample {index}")
        if len(sample["input_ids"]) > length:
            result.count("cut to the maximum length")
            sample = {key: ids[:length] for key, ids in sample.items()}
        yield sample


def encode_chat(messages: list[dict[str, str]], tokenizer: Any, where: str = "the chat") -> dict[str, list[int]]:
    """Token ids of a chat, with labels on the assistant's turns and their end-of-turn tokens only.

    What belongs to a turn is read off the template itself: rendered up to the turn with the
    generation prompt, and rendered with the turn; the difference is what the model must say.

    Raises:
        DataError: a template that does not extend its own prefix, or a malformed message.
    """

    def render(upto: int, prompt: bool) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = render(len(messages), False)
    labels = [IGNORE] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(turn, True), render(turn + 1, False)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise DataError(f"{where}: the chat template renders turn {turn} differently once the chat goes on.")
        labels[len(before) : len(after)] = ids[len(before) : len(after)]
    return {"input_ids": ids, "labels": labels}


def _ready(rows: Any, tokenizer: Any, length: int, result: Tokenized) -> Iterator[dict[str, list[int]]]:
    for index, row in enumerate(rows):
        ids, labels = list(row["input_ids"]), list(row.get("labels") or row["input_ids"])
        if len(ids) != len(labels):
            raise DataError(f"sample {index}: {len(ids)} input_ids but {len(labels)} labels. They must match.")
        if ids and not 0 <= min(ids) <= max(ids) < len(tokenizer):
            raise DataError(f"sample {index}: token id {max(ids)} is outside the tokenizer's {len(tokenizer)} ids.")
        if len(ids) > length:
            result.count("cut to the maximum length")
        yield {"input_ids": ids[:length], "labels": labels[:length]}


_SHAPES: dict[str, Callable[[Any, Any, int, Tokenized], Iterator[dict[str, list[int]]]]] = {
    "input_ids": _ready,
    "messages": _messages,
    "text": _text,
}
