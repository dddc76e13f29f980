"""From the order of samples to this process's micro-batches, one optimizer step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zerobook.data.sampler import SampleOrder

FILLER = -1
"""Id of a row that fills up the last batch: real tokens, no supervised one, so its loss weighs nothing."""
IGNORE = -100
"""Label of a token that is not supervised, as in torch's cross_entropy and transformers."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a global batch is cut. ``micro`` is samples per micro-batch and process."""

    world_size: int
    rank: int
    micro: int
    accumulation: int = 1

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all processes."""
        return self.world_size * self.micro * self.accumulation


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step's samples, known on every process without asking another.

    ``ids`` is int64 [global batch] in run order, fillers at the end; ``tokens`` counts the
    supervised tokens of all of them; ``cursor`` is the run's position behind them.
    """

    ids: np.ndarray
    cursor: int
    tokens: int

    @property
    def samples(self) -> int:
        return int((self.ids != FILLER).sum())


class _Rows(Dataset):
    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index != FILLER:
            return self.rows[index]
        row = dict(self.rows[0])
        return row | {"labels": [IGNORE] * len(row["labels"])}


class Feed:
    """Iterates over (`StepPlan`, this process's micro-batches of that step).

    Args:
        rows: the tokenized samples; each a dict with ``input_ids`` and ``labels``.
        supervised: int [len(rows)], supervised tokens per sample as the loss counts them.
        order: the samples' order.
        layout: this process's cut of each global batch.
        collate: list of rows -> dict of tensors.
        cursor: position to start from.
        end: position to stop at; the last step is filled up with rows that weigh nothing.
        workers: processes that collate ahead.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        supervised: np.ndarray,
        order: SampleOrder,
        layout: Layout,
        collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
        *,
        cursor: int = 0,
        end: int,
        workers: int = 0,
        pin_memory: bool = False,
    ):
        self.supervised = supervised
        self.order = order
        self.layout = layout
        self.cursor = cursor
        self.end = end
        self._planned: deque[StepPlan] = deque()
        self._loader = DataLoader(
            _Rows(rows), batch_sampler=self._batches(), collate_fn=collate, num_workers=workers, pin_memory=pin_memory
        )

    def steps(self) -> int:
        """Optimizer steps left from the cursor on."""
        return -(-self.order.remaining(self.cursor, self.end) // self.layout.global_batch)

    def __iter__(self) -> Iterator[tuple[StepPlan, Iterator[dict[str, torch.Tensor]]]]:
        batches = iter(self._loader)
        for first in batches:
            # the loader plans ahead of us; the oldest plan belongs to the batch just received
            plan = self._planned.popleft()
            yield plan, self._micro_batches(first, batches)

    def _micro_batches(self, first: dict[str, torch.Tensor], batches: Iterator) -> Iterator[dict[str, torch.Tensor]]:
        yield first
        for _ in range(self.layout.accumulation - 1):
            yield next(batches)

    def _batches(self) -> Iterator[list[int]]:
        layout, cursor = self.layout, self.cursor
        while True:
            ids, cursor = self.order.take(cursor, layout.global_batch, self.end)
            if not len(ids):
                return
            tokens = int(self.supervised[ids].sum())
            padded = np.full(layout.global_batch, FILLER, dtype=np.int64)
            padded[: len(ids)] = ids
            self._planned.append(StepPlan(ids=padded, cursor=cursor, tokens=tokens))
            for micro in range(layout.accumulation):
                start = (micro * layout.world_size + layout.rank) * layout.micro
                yield padded[start : start + layout.micro].tolist()
