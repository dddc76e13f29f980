"""Text that the model generates for held-out rows, on all ranks together, and how close it comes to the targets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerobook.constants import IGNORE
from zerobook.data.collate import Seq2SeqCollator
from zerobook.data.templates import end_tokens
from zerobook.evaluation.text_metrics import text_metrics
from zerobook.strategy import Strategy
from zerobook.utils.bars import tqdm

if TYPE_CHECKING:
    from transformers import GenerationConfig


def decoding(own: GenerationConfig, *, num_beams: int, max_tokens: int, min_tokens: int = 0) -> GenerationConfig:
    """Beam search (greedy with one beam), always the same for the same weights; set it as ``model.generation_config``.

    Args:
        own: what the model came with. Its special tokens and repetition rules stay; lengths, beams and sampling do not,
            so nothing of its own wins over the arguments or conflicts with them.
        max_tokens: tokens a text may have, its end token included and the decoder's start token not, as labels count.
        min_tokens: tokens it must have before its end token.
    """
    config = copy.deepcopy(own)
    config.update(
        num_beams=num_beams, max_new_tokens=max_tokens, min_new_tokens=min_tokens or None, max_length=None, min_length=None,
        do_sample=False, temperature=None, top_k=None, top_p=None, typical_p=None, use_cache=True,
    )  # fmt: skip
    config._from_model_config = False  # or the file says that it was derived from config.json
    if num_beams == 1:
        config.update(early_stopping=None, length_penalty=None)  # transformers refuses to save these without beams
    return config


def stop_tokens(own: GenerationConfig, tokenizer: Any, *, encoder_decoder: bool) -> list[int]:
    """Return every token that ends an answer: those of the model's own generation config, and those that training ends with.

    A base model's config often names the end of a document only, while its chat template ends turns with another token.
    """
    ends = own.eos_token_id
    named = set(ends if isinstance(ends, list) else [ends]) - {None}
    return sorted(named | end_tokens(tokenizer, chats=not encoder_decoder))


def _one_or_all(tokens: list[int]) -> int | list[int] | None:
    """Return stop tokens as a config holds them: a single one as a number, since some readers accept no list."""
    return tokens[0] if len(tokens) == 1 else tokens or None


def save_generation_config(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write ``generation_config.json`` into ``folder``, with every token at which the model stops.

    ``save_pretrained`` does not write it, because its checks refuse many published configs once they are changed.
    """
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = _one_or_all(stop_tokens(config, tokenizer, encoder_decoder=model.config.is_encoder_decoder))
    config._from_model_config = False  # otherwise the file says that it was derived from config.json, which names fewer tokens
    config.to_json_file(folder / "generation_config.json", use_diff=True)


def answer_as_measured(
    model: Any, tokenizer: Any, *, source_prefix: str, num_beams: int, max_tokens: int, min_tokens: int
) -> None:
    """Write to an encoder-decoder's configs how it generates, and its prefix. Both are saved with the model, so that it
    answers later as it did when it was measured.
    """
    own = model.generation_config
    model.generation_config = decoding(own, num_beams=num_beams, max_tokens=max_tokens, min_tokens=min_tokens)
    model.generation_config.eos_token_id = _one_or_all(stop_tokens(own, tokenizer, encoder_decoder=True))
    tasks = getattr(model.config, "task_specific_params", None) or {}
    model.config.task_specific_params = tasks | {"chatbot": {"prefix": source_prefix}}


class GenerationScorer:
    """Generates for held-out rows and scores the texts; a `zerobook.training.recipe.Scorer`.

    The rows are cut into batches of ``batch_size`` per process, and every process makes the same number of ``generate``
    calls, which is what sharded weights need. The last batch is filled with rows whose texts are dropped again, so each
    row counts once, in dataset order, whatever the number of rows and processes.

    Args:
        rows: ``input_ids`` and ``labels`` of the sources and targets.
        tokenizer: decodes sources, targets and predictions.
        collate: pads the sources.
        decoding: see `decoding`.
        batch_size: rows per process and ``generate`` call.
        batches: generate for the first so many batches only; None: for all rows.
        samples: rows of the table.

    Returns (by calling):
        Metrics, the same on every rank: `text_metrics` and ``generated_tokens``, the mean length of a prediction (end
        token included). The table: the first ``samples`` rows' ``source``, ``target`` and ``prediction``.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        tokenizer: Any,
        collate: Seq2SeqCollator,
        *,
        decoding: GenerationConfig,
        batch_size: int,
        batches: int | None = None,
        samples: int = 8,
    ):
        self.rows = rows
        self.tokenizer = tokenizer
        self.collate = collate
        self.decoding = decoding
        self.batch_size = batch_size
        self.batches = batches
        self.samples = samples

    def __call__(self, strategy: Strategy, model: nn.Module, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        predictions = self.generate(strategy)
        result = self._score(predictions) if strategy.is_main else None
        return strategy.from_main(result)

    @torch.no_grad()
    def generate(self, strategy: Strategy) -> list[list[int]]:
        """Predicted token ids of the rows, in their order, on every rank. Collective."""
        together = self.batch_size * strategy.world_size
        calls = -(-len(self.rows) // together)
        calls = min(calls, self.batches or calls)
        mine: list[tuple[int, list[int]]] = []
        for call in tqdm(range(calls), desc="generating", leave=False, disable=not strategy.is_main):
            start = call * together + strategy.rank * self.batch_size
            indices = range(start, start + self.batch_size)
            rows = [self.rows[index if index < len(self.rows) else 0] for index in indices]
            batch = {key: value.to(strategy.device) for key, value in self.collate.sources(rows).items()}
            with strategy.inference():
                generated = strategy.unwrapped.generate(
                    **batch, generation_config=self.decoding, synced_gpus=strategy.generation_in_step
                )
            texts = [self._text(ids) for ids in generated.tolist()]
            mine += [(index, text) for index, text in zip(indices, texts, strict=True) if index < len(self.rows)]
        return [text for _, text in sorted(pair for rank in strategy.gather(mine) for pair in rank)]

    def _text(self, ids: list[int]) -> list[int]:
        """Without the decoder's start token and what pads behind the end token (which may be the same id)."""
        ends = self.decoding.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        ids = ids[1:]
        first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return ids[: first + 1]

    def _score(self, predictions: list[list[int]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        rows = [self.rows[index] for index in range(len(predictions))]
        texts = self._decode(predictions)
        targets = self._decode([[int(token) for token in row["labels"] if token != IGNORE] for row in rows])
        metrics = text_metrics(texts, targets)
        metrics["generated_tokens"] = sum(len(ids) for ids in predictions) / len(predictions)
        sources = self._decode([[int(token) for token in row["input_ids"]] for row in rows[: self.samples]])
        shown = zip(sources, targets, texts, strict=False)
        return metrics, [{"source": source, "target": target, "prediction": text} for source, target, text in shown]

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]
