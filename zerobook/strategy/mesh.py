"""The processes of a run: their ranks and sizes, and the exchange of Python objects."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from zerobook.errors import ZerobookError

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Mesh:
    """The processes of a run, as accelerate has formed them.

    ``rank`` and ``world_size`` count processes. ``data_parallel_rank`` and ``data_parallel_size`` count groups of processes
    that read different samples: they decide the cut of a batch. ``token_parallel_rank`` and ``token_parallel_size`` count
    those that compute different tokens: they decide the seeds of a step. The processes of a group have adjacent ranks.

    Args:
        data_parallel_size: the number of groups; None if each process reads samples of its own.
        computing_the_same: processes of a group that compute the same losses, each with its part of the weights.
    """

    def __init__(self, accelerator: Accelerator, data_parallel_size: int | None = None, computing_the_same: int = 1):
        self.accelerator = accelerator
        self.data_parallel_size = data_parallel_size or accelerator.num_processes
        self._computing_the_same = computing_the_same
        self._waits = 0

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // (self.world_size // self.data_parallel_size)

    @property
    def token_parallel_size(self) -> int:
        """Processes that compute different tokens: samples of their own, or tokens of their own of shared samples."""
        return self.world_size // self._computing_the_same

    @property
    def token_parallel_rank(self) -> int:
        return self.rank // self._computing_the_same

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def nodes(self) -> int:
        """Machines of the run, as the launcher says."""
        return self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce ``values`` (any shape, in place) and return it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce sums over this rank's samples, or over its tokens of them, and return the sums over all samples.

        Args:
            values: any shape; changed in place. Of the processes that compute the same samples and tokens, one counts.
        """
        if self.rank % self._computing_the_same:
            values.zero_()
        return self.sum_over_ranks(values)

    def from_main(self, value: T | None) -> T:
        """Return rank 0's picklable ``value`` on every rank. Collective."""
        box: list[Any] = [value]
        if self.world_size == 1:
            return box[0]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return a list of every rank's picklable ``value``, by rank, on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def to_main(self, value: T) -> list[T] | None:
        """Return a list of every rank's picklable ``value``, by rank, on rank 0; None on the others. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values)
        return values

    def on_main(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; return its picklable result, or raise its error, on every rank. Collective."""
        result: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as caught:
                error = caught
        result, error = self.from_main((result, error))
        if error is not None:
            raise error
        return result

    def once_per_node(self, work: Callable[[], T]) -> T:
        """Run ``work`` in one process of each node, and return its result in all. The others wait without a limit. Collective.

        Args:
            work: its result must be picklable, and valid for all processes of a node.

        Raises:
            The first error that any node met, on every process. A `ZerobookError` names the node where there are several.
        """
        result: Any = None
        error: Exception | None = None
        if self.accelerator.is_local_main_process:
            try:
                result = work()
            except Exception as caught:
                error = caught
        if self.world_size > 1:
            # Waiting happens at the store: a collective would time out after 10 to 30 minutes.
            store = dist.distributed_c10d._get_default_store()
            self._waits += 1
            keys = [f"zerobook/once/{self._waits}/{rank}" for rank in range(self.world_size)]
            store.set(keys[self.rank], pickle.dumps(result))  # type: ignore[arg-type]  # torch's stub knows str alone
            store.wait(keys, timedelta(days=7))
            result = pickle.loads(store.get(keys[self.rank - self.accelerator.local_process_index]))
            met = self.gather(None if error is None else (socket.gethostname(), error))
            where, error = next((found for found in met if found is not None), ("", None))
            if isinstance(error, ZerobookError) and self.nodes > 1:
                error.args = (f"{error} This happened on {where}.",)
        if error is not None:
            raise error
        return result
