"""The micro-batches of this process, in the sample order, for one optimizer step after another."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zerobook.constants import FILLER, IGNORE
from zerobook.data.sampler import SampleOrder
from zerobook.data.stream import Stream, StreamOrder
from zerobook.data.views import PreparedRows
from zerobook.utils.units import counted

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig
    from zerobook.strategy.launch_plan import LaunchPlan

Rows = PreparedRows | Stream
Order = SampleOrder | StreamOrder


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Division of a global batch.

    ``world_size`` and ``rank`` count processes that read different samples, or groups of ``sharing`` processes that read the
    same. ``micro`` is the number of samples per micro-batch, in each process of a group.
    """

    world_size: int
    rank: int
    micro: int
    accumulation: int = 1
    sharing: int = 1

    @classmethod
    def from_plan(cls, config: RecipeConfig, plan: LaunchPlan, rank: int = 0) -> BatchLayout:
        """Return the layout of a run.

        Args:
            rank: of this process among those that read different samples.
        """
        return cls(
            world_size=plan.data_parallel_size,
            rank=rank,
            micro=config.per_device_train_batch_size,
            accumulation=config.gradient_accumulation_steps,
            # Ranks that share rows (tensor or sequence parallelism) read the same samples.
            sharing=plan.world_size // plan.data_parallel_size,
        )

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all processes."""
        return self.world_size * self.micro * self.accumulation

    @property
    def arithmetic(self) -> str:
        """The global batch as a product: ``2 micro x 4 accumulation x 8 processes = 64 samples a step``."""
        if self.sharing == 1:
            readers = counted(self.world_size, "process")
        else:
            readers = f"{counted(self.world_size, 'group')} of {counted(self.sharing, 'process')}"
        samples = counted(self.global_batch, "sample")
        return f"{self.micro} micro x {self.accumulation} accumulation x {readers} = {samples} a step"


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The rows of one optimizer step. Every process computes them without communication.

    ``ids``: row numbers in the order of the run, int64 [global batch]; at the end of a run, `FILLER` where rows are missing.
    ``samples``: number of rows without fillers. ``tokens``: sum of their loss weights, for most objectives their supervised
    tokens. ``all_tokens``: sum of their lengths, without padding. ``cursor``: position in the sample order after them.
    """

    ids: np.ndarray
    cursor: int
    samples: int
    tokens: int
    all_tokens: int


# Rows for a DataLoader, which asks for `FILLER` where a global batch has no more rows.
class _Rows(Dataset):
    def __init__(self, rows: Rows):
        self.rows = rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index != FILLER:
            return self.rows[index]
        # A filler is a copy of a real row in which no token is supervised.
        row = dict(self.rows[self.rows.filler])
        for name, values in row.items():
            if name.endswith("labels"):
                row[name] = np.full_like(values, IGNORE)
        return row


class BatchLoader:
    """Iterates over (`StepPlan`, this process's micro-batches of that step).

    Args:
        rows: the tokenized rows.
        order: the rows' order.
        layout: how a global batch is divided into micro-batches and among ranks.
        collate: list of rows -> dict of tensors.
        cursor: position to start from.
        end: position to stop at; the last step is filled up with rows of weight 0.
        workers: processes that collate in advance.
    """

    def __init__(
        self,
        rows: Rows,
        order: Order,
        layout: BatchLayout,
        collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
        *,
        cursor: int = 0,
        end: int,
        workers: int = 0,
        pin_memory: bool = False,
    ):
        self.order = order
        self.layout = layout
        self.cursor = cursor
        self.end = end
        self.collate = collate
        self.rows = rows
        self.workers = workers
        self.pin_memory = pin_memory
        self._planned: deque[StepPlan] = deque()

    def steps(self) -> int:
        """Return the number of optimizer steps from the cursor to the end. It is not known for a stream."""
        assert isinstance(self.order, SampleOrder)
        return -(-self.order.remaining(self.cursor, self.end) // self.layout.global_batch)

    def padding(self, rows: int = 2_000) -> float:
        """Return the share of padding in the micro-batches of the next ``rows`` rows; 0 if no rows are left."""
        ids = self.order.preview(self.cursor, min(rows, self.end - self.cursor))
        if not len(ids):
            return 0.0
        micro = min(self.layout.micro, len(ids))
        # Rows that fill no micro-batch are left out. Each micro-batch is padded to its longest row.
        ids = ids[: len(ids) // micro * micro]
        lengths = self.rows.lengths_of(ids).reshape(-1, micro)
        return 1 - float(lengths.sum() / (lengths.max(axis=1).sum() * micro))

    def __iter__(self) -> Iterator[tuple[StepPlan, Iterator[dict[str, torch.Tensor]]]]:
        loader = DataLoader(
            _Rows(self.rows),
            batch_sampler=self._batches(),
            collate_fn=self.collate,
            num_workers=self.workers,
            worker_init_fn=_leave_process_group,
            pin_memory=self.pin_memory,
        )
        batches = iter(loader)
        for first in batches:
            # The loader plans further steps in advance; the oldest plan belongs to the batch just received.
            plan = self._planned.popleft()
            yield plan, self._micro_batches(first, batches)

    # Yield the micro-batches of one step, of which the first was received already.
    def _micro_batches(self, first: dict[str, torch.Tensor], batches: Iterator) -> Iterator[dict[str, torch.Tensor]]:
        yield first
        for _ in range(self.layout.accumulation - 1):
            yield next(batches)

    # Yield the row numbers of each micro-batch of this process, and plan the steps that they belong to.
    def _batches(self) -> Iterator[list[int]]:
        # Every process computes the same order, and takes its own samples from it without communication.
        layout = self.layout
        cursor = self.cursor
        while True:
            ids, cursor = self.order.take(cursor, layout.global_batch, self.end)
            if not len(ids):
                return
            # At the end of the run, fillers of weight 0 take the place of samples.
            padded = np.full(layout.global_batch, FILLER, dtype=np.int64)
            padded[: len(ids)] = ids
            plan = StepPlan(
                ids=padded,
                cursor=cursor,
                samples=len(ids),
                # Of all processes, since the loss of a step is divided by the sum over the global batch.
                tokens=int(self.rows.loss_weights_of(ids).sum()),
                all_tokens=int(self.rows.lengths_of(ids).sum()),
            )
            self._planned.append(plan)
            # The samples of a micro-step are consecutive in the order, and those of a process are consecutive among them.
            for micro in range(layout.accumulation):
                start = (micro * layout.world_size + layout.rank) * layout.micro
                yield padded[start : start + layout.micro].tolist()


def _leave_process_group(worker: int) -> None:
    """Move this worker process into a process group of its own, so that no SIGTERM to its rank ends it.

    torchrun sends SIGTERM to the process group of each rank. If it ended a worker, torch would raise an error in the rank, and
    the rank could not save a checkpoint.
    """
    os.setpgid(0, 0)
