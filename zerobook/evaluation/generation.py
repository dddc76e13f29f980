"""Generation of text for held-out rows, on all ranks together, and its scores against the targets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from zerobook.constants import IGNORE
from zerobook.data.collate import Seq2SeqCollator, to_device
from zerobook.evaluation.text_metrics import text_metrics
from zerobook.health.position import touch
from zerobook.strategy import Strategy
from zerobook.utils.bars import tqdm

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


class Generates(Protocol):
    """A model that writes text: one of transformers, or with adapters."""

    def generate(self, **options: object) -> torch.Tensor: ...


class Rows(Protocol):
    """Prepared rows of one or several datasets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class GenerationScorer:
    """Generates for held-out rows and scores the texts; a `zerobook.training.recipe.Scorer`.

    The rows are divided into batches of ``batch_size`` per process, and every process makes the same number of ``generate``
    calls, as sharded weights require. The last batch is filled up with rows whose texts are dropped. So each row counts once,
    in dataset order, with any number of rows and processes.

    Args:
        rows: ``input_ids`` and ``labels`` of the sources and targets.
        tokenizer: decodes sources, targets and predictions.
        collate: pads the sources.
        decoding: the settings of ``generate``, such as the number of beams.
        batch_size: rows per process and ``generate`` call.
        batches: maximum number of ``generate`` calls; None: as many as all rows need.
        samples: number of rows in the table.

    Returns (by calling):
        Metrics, the same on every rank: those of `text_metrics`, and ``generated_tokens``, the mean length of a prediction with
        its end token. The table: ``source``, ``target`` and ``prediction`` of the first ``samples`` rows.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
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
        result = None
        # Every rank has all predictions. Only the main process scores them, since this takes long for many rows.
        if strategy.is_main:
            result = self._score(predictions)
        return strategy.from_main(result)

    @torch.no_grad()
    def generate(self, strategy: Strategy) -> list[list[int]]:
        """Return the predicted token ids of each row, in the order of the rows, on every rank. Collective."""
        # All ranks make the same number of calls, also if the last rows do not fill them: each call is collective.
        # Processes that compute the same tokens, each with its part of the weights, have the same `token_parallel_rank`, and
        # so the same batch.
        mesh = strategy.mesh
        rows_per_call = self.batch_size * mesh.token_parallel_size
        # Rounded up: the last call may have fewer rows.
        calls = -(-len(self.rows) // rows_per_call)
        if self.batches:
            calls = min(calls, self.batches)
        predictions_of_this_rank: list[tuple[int, list[int]]] = []
        for call in tqdm(range(calls), desc="generating", leave=False, disable=not strategy.is_main):
            start = call * rows_per_call + mesh.token_parallel_rank * self.batch_size
            indices = range(start, min(start + self.batch_size, len(self.rows)))
            rows = [self.rows[index] for index in indices]
            # A batch with too few rows is filled up with the first row. These predictions are dropped.
            rows += [self.rows[0]] * (self.batch_size - len(rows))
            batch = to_device(self.collate.sources(rows), strategy.device)
            with strategy.inference():
                generated = cast("Generates", strategy.unwrapped).generate(
                    **batch, generation_config=self.decoding, synced_gpus=strategy.generation_in_step
                )
            # ``zip`` ends with the indices, before the predictions of the rows that fill up the batch.
            for index, ids in zip(indices, generated.tolist(), strict=False):
                predictions_of_this_rank.append((index, self._strip(ids)))
            # All calls together may take longer than the hang timeout of an evaluation, so each call reports progress.
            touch()
        # Of processes that computed the same batch, all have the same predictions, so any of them counts.
        predictions_by_index = dict(chain.from_iterable(strategy.gather(predictions_of_this_rank)))
        return [predictions_by_index[index] for index in sorted(predictions_by_index)]

    def _strip(self, ids: list[int]) -> list[int]:
        """Return ``ids`` without the decoder's start token and the padding after the end token (which may be the same id)."""
        # transformers allows a single id or a list of ids here.
        end_ids = self.decoding.eos_token_id
        if not isinstance(end_ids, list):
            end_ids = [end_ids]
        # The first id is the decoder's start token.
        generated = ids[1:]
        for position, token in enumerate(generated):
            if token in end_ids:
                return generated[: position + 1]
        return generated

    def _score(self, predictions: list[list[int]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        # If the number of calls is limited, only the first rows have predictions.
        rows = [self.rows[index] for index in range(len(predictions))]
        texts = self._decode(predictions)
        targets = self._decode([row["labels"] for row in rows])
        metrics = text_metrics(texts, targets)
        metrics["generated_tokens"] = sum(map(len, predictions)) / len(predictions)
        # The table has only the first ``samples`` rows, so ``zip`` ends before the other targets and texts.
        sources = self._decode([row["input_ids"] for row in rows[: self.samples]])
        samples = zip(sources, targets, texts, strict=False)
        return metrics, [{"source": source, "target": target, "prediction": text} for source, target, text in samples]

    # Return the text of each sequence of token ids. Labels that are `IGNORE` are left out.
    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        texts = []
        for sequence in sequences:
            ids = [int(token) for token in sequence if token != IGNORE]
            texts.append(str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip())
        return texts
