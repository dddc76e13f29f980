"""Answers to held-out prompts, written at every evaluation, so that a person sees what the model has learnt."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from zerobook.constants import IGNORE
from zerobook.evaluation.generation import Generates, Rows
from zerobook.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 64
"""Tokens of an answer at most."""


class AnswerSampler:
    """Writes greedy answers to the first held-out prompts; a `zerobook.training.recipe.Scorer` of a decoder.

    A prompt is a row up to its first supervised token. Each process answers every N-th prompt, and all processes make the same
    number of ``generate`` calls, as sharded weights require.

    Args:
        rows: held-out rows, with ``input_ids`` and ``labels``.
        count: prompts that are answered.
        ends: ids of the tokens that end an answer.

    Returns (by calling):
        No metrics. The table: ``prompt``, ``expected`` and ``answer`` of each prompt, on every rank.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, *, count: int, ends: Collection[int]):
        self.rows, self.tokenizer = rows, tokenizer
        self.count, self.ends = min(count, len(rows)), sorted(ends)

    @torch.no_grad()
    def __call__(self, strategy: Strategy, model: nn.Module, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        from transformers import GenerationConfig

        decoding = GenerationConfig(
            max_new_tokens=LONGEST, do_sample=False, use_cache=True, eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        mine: list[tuple[int, dict[str, str]]] = []
        for first in range(0, self.count, strategy.world_size):
            number = first + strategy.rank
            prompt, expected = _split(self.rows[number if number < self.count else 0])
            ids = torch.tensor(prompt[None], dtype=torch.int64, device=strategy.device)
            with strategy.inference():
                written = cast("Generates", strategy.unwrapped).generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=decoding,
                    synced_gpus=strategy.generation_in_step,
                )  # fmt: skip
            answer = written[0, len(prompt) :].tolist()
            if number < self.count:
                parts = {"prompt": prompt, "expected": expected, "answer": answer}
                mine.append((number, {name: self._text(ids) for name, ids in parts.items()}))
        found = sorted(chain.from_iterable(strategy.gather(mine)), key=lambda pair: pair[0])
        return {}, [row for _, row in found]

    def _text(self, ids: object) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()  # type: ignore[arg-type]  # ids of any kind


def _split(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids before the first supervised token, and those of the supervised stretch that begins there.

    >>> _split({"input_ids": np.arange(6), "labels": np.array([-100, -100, 2, 3, -100, 5])})
    (array([0, 1]), array([2, 3]))
    """
    ids, supervised = np.asarray(row["input_ids"]), np.asarray(row["labels"]) != IGNORE
    start = max(1, int(supervised.argmax()))  # a model does not begin with nothing
    rest = np.flatnonzero(~supervised[start:])
    return ids[:start], ids[start : start + int(rest[0]) if len(rest) else len(ids)]
