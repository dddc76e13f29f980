"""Answers to held-out prompts, written at every evaluation, so that a user can read what the model generates."""

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
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

MAX_ANSWER_TOKENS = 64


class AnswerSampler:
    """Writes greedy answers to the first held-out prompts; a `zerobook.training.recipe.Scorer` of a decoder.

    A prompt is a row up to its first supervised token. Of N processes, each answers every N-th prompt, and all make the same
    number of ``generate`` calls, as sharded weights require. An answer ends after `MAX_ANSWER_TOKENS`, or at the model's last
    position.

    Args:
        rows: held-out rows, with ``input_ids`` and ``labels``.
        count: prompts that are answered.
        ends: ids of the tokens that end an answer.

    Returns (by calling):
        No metrics. The table: ``prompt``, ``expected`` and ``answer`` of each prompt, on every rank.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, *, count: int, ends: Collection[int]):
        self.rows = rows
        self.tokenizer = tokenizer
        self.count = min(count, len(rows))
        self.ends = sorted(ends)

    @torch.no_grad()
    def __call__(self, strategy: Strategy, model: nn.Module, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        from transformers import GenerationConfig

        from zerobook.models.load import absolute_positions

        answers_of_this_rank: list[tuple[int, dict[str, str]]] = []
        # Every rank makes as many generate calls as rank 0: sharded weights are gathered in each of them.
        # Processes that compute the same tokens, each with its part of the weights, have the same `token_parallel_rank`, and
        # so the same prompt.
        mesh = strategy.mesh
        for first in range(0, self.count, mesh.token_parallel_size):
            # Every rank looks at the prompts of all ranks in this call, to limit the answers alike.
            numbers = range(first, min(first + mesh.token_parallel_size, self.count))
            pairs = [_split_at_answer(self.rows[number]) for number in numbers]
            # A rank whose answer has ended computes further tokens until the answers of all ranks have ended. So the rank with
            # the longest prompt decides how many tokens fit into the model's positions.
            longest_prompt = max(len(prompt) for prompt, _ in pairs)
            # None if the model has no table of positions. Then it has no last position.
            positions = absolute_positions(cast("PreTrainedModel", strategy.unwrapped))
            answer_tokens = MAX_ANSWER_TOKENS
            if positions:
                answer_tokens = min(MAX_ANSWER_TOKENS, positions - longest_prompt)
            decoding = GenerationConfig(
                max_new_tokens=answer_tokens,
                do_sample=False,
                use_cache=True,
                eos_token_id=self.ends,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            number = first + mesh.token_parallel_rank
            # In the last call, a rank without a prompt answers the first prompt of the call, and drops the answer.
            is_filler = number >= self.count
            prompt, expected = pairs[0 if is_filler else mesh.token_parallel_rank]
            answer = self._generate(strategy, prompt, decoding)
            if not is_filler:
                texts = {"prompt": self._decode(prompt), "expected": self._decode(expected), "answer": self._decode(answer)}
                answers_of_this_rank.append((number, texts))
        # Of processes that answered the same prompt, all have the same answer, so any of them counts.
        answers_by_number = dict(chain.from_iterable(strategy.gather(answers_of_this_rank)))
        # Each rank has answered every N-th prompt. Bring the answers into the order of the prompts.
        return {}, [answers_by_number[number] for number in sorted(answers_by_number)]

    def _generate(self, strategy: Strategy, prompt: np.ndarray, decoding: GenerationConfig) -> list[int]:
        """Return the ids of the answer to a prompt. Collective."""
        # A prompt alone needs no padding, so all of its tokens are attended to.
        input_ids = torch.tensor(prompt[None], dtype=torch.int64, device=strategy.device)
        with strategy.inference():
            generated = cast("Generates", strategy.unwrapped).generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=decoding,
                synced_gpus=strategy.generation_in_step,
            )
        return cast("list[int]", generated[0, len(prompt) :].tolist())

    def _decode(self, ids: object) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()  # type: ignore[arg-type]  # ids of any kind


def _split_at_answer(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids before the first supervised token, and those of the supervised segment that begins there.

    >>> _split_at_answer({"input_ids": np.arange(6), "labels": np.array([-100, -100, 2, 3, -100, 5])})
    (array([0, 1]), array([2, 3]))
    """
    ids = np.asarray(row["input_ids"])
    supervised = np.asarray(row["labels"]) != IGNORE
    # A prompt has at least one token, also if the first token of the row is supervised.
    start = max(1, int(supervised.argmax()))
    unsupervised_after = np.flatnonzero(~supervised[start:])
    # In a chat of several turns, further prompts follow the answer, so it ends where the supervision ends.
    end = len(ids)
    if len(unsupervised_after):
        end = start + int(unsupervised_after[0])
    return ids[:start], ids[start:end]
