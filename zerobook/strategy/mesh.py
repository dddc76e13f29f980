"""The processes of a run: their ranks and sizes, and the exchange of values between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

from zerobook.errors import ZerobookError
from zerobook.utils import messages

T = TypeVar("T")


class Mesh:
    """The processes of a run, as accelerate has formed them.

    ``rank`` and ``world_size`` count processes. ``data_parallel_rank`` and ``data_parallel_size`` count groups of processes
    that read different samples: they decide how a batch is divided. ``token_parallel_rank`` and ``token_parallel_size`` count
    groups that compute different tokens: they decide the seeds of a step. The processes of a group have adjacent ranks.

    Args:
        data_parallel_size: the number of groups; None if each process reads samples of its own.
        tensor_parallel_size: processes that compute the same losses, each with its part of the weights.
    """

    def __init__(self, accelerator: Accelerator, data_parallel_size: int | None = None, tensor_parallel_size: int = 1):
        self.accelerator = accelerator
        self.data_parallel_size = data_parallel_size or accelerator.num_processes
        self._tensor_parallel_size = tensor_parallel_size
        self._wait_count = 0

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
        """Number of groups that compute different tokens: of different samples, or different tokens of shared samples."""
        return self.world_size // self._tensor_parallel_size

    @property
    def token_parallel_rank(self) -> int:
        return self.rank // self._tensor_parallel_size

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
        """All-reduce sums over this rank's samples, or over its part of their tokens. Return the sums over all samples.

        Args:
            values: any shape; changed in place.
        """
        # Of the processes that compute the same samples and tokens, only the first counts.
        if self.rank % self._tensor_parallel_size:
            values.zero_()
        return self.sum_over_ranks(values)

    def from_main(self, value: T | None) -> T:
        """Return rank 0's ``value`` on every rank. Collective.

        Args:
            value: of the types that `zerobook.utils.messages.encode` takes, here and in the methods below.
        """
        if self.world_size == 1:
            return cast("T", value)
        data = messages.encode(value) if self.is_main else b""
        # The other ranks have to know the size before they can receive.
        size = torch.tensor([len(data)], device=self._message_device)
        dist.broadcast(size, src=0)
        content = self._as_tensor(data, self._check_size(int(size)))
        dist.broadcast(content, src=0)
        if self.is_main:
            return cast("T", value)
        return messages.decode(_bytes_of(content))

    def gather(self, value: T) -> list[T]:
        """Return a list of every rank's ``value``, by rank, on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        data = messages.encode(value)
        size = torch.tensor([len(data)], device=self._message_device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        lengths = [self._check_size(int(size_of_rank)) for size_of_rank in sizes]
        # An all-gather takes tensors of one size.
        content = self._as_tensor(data, max(lengths))
        contents = [torch.empty_like(content) for _ in range(self.world_size)]
        dist.all_gather(contents, content)
        values: list[T] = []
        for content_of_rank, length in zip(contents, lengths, strict=True):
            values.append(messages.decode(_bytes_of(content_of_rank[:length])))
        # This rank's own value needs no copy.
        values[self.rank] = value
        return values

    def on_main(self, work: Callable[[], T], *, takes_long: bool = False) -> T:
        """Run ``work`` on rank 0; return its result, or raise its error, on every rank. Collective.

        Args:
            takes_long: ``work`` may take longer than a collective waits, as reading all of a checkpoint does.
        """
        result: Any = None
        error: Exception | None = None
        if self.is_main:
            result, error = _run_and_catch(work)
        if takes_long and self.world_size > 1:
            self._wait_for_all()
        result, error = self.from_main((result, error))
        if error is not None:
            raise error
        return result

    def once_per_node(self, work: Callable[[], T]) -> T:
        """Run ``work`` in one process of each node, and return its result in all. The others wait without a limit. Collective.

        Args:
            work: its result must be valid for all processes of a node.

        Raises:
            The first error of any node, on every process. The message of a `ZerobookError` names the node if there are several.
        """
        result: Any = None
        error: Exception | None = None
        if self.accelerator.is_local_main_process:
            result, error = _run_and_catch(work)
        if self.world_size > 1:
            # A collective alone would time out while a node works for hours.
            self._wait_for_all()
            outcomes = self.gather((result, error, socket.gethostname()))
            # Ranks of a node are adjacent, and its first one has done the work.
            if not self.accelerator.is_local_main_process:
                first_of_node = self.rank - self.accelerator.local_process_index
                result = outcomes[first_of_node][0]
            # All ranks raise the same error: the first one by rank.
            for _, error_of_rank, host in outcomes:
                if isinstance(error_of_rank, ZerobookError) and self.nodes > 1:
                    error_of_rank.args = (f"{error_of_rank} This happened on {host}.",)
                if error_of_rank is not None:
                    raise error_of_rank
        if error is not None:
            raise error
        return result

    def _wait_for_all(self) -> None:
        """Wait up to a week until all ranks have called this. A collective would time out while a rank tokenizes for days.

        Ranks set keys in torch's store. Only the existence of a key counts. Values are not read, so that a program that writes
        to the store cannot pass data to a rank.
        """
        store = dist.distributed_c10d._get_default_store()
        # Keys stay in the store, so each wait has names of its own.
        self._wait_count += 1
        keys = [f"zerobook/wait/{self._wait_count}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], "")
        store.wait(keys, timedelta(days=7))

    # --- bytes in tensors
    @property
    def _message_device(self) -> torch.device:
        # If gloo is available beside NCCL, it sends tensors in host memory, without a copy to the device.
        return torch.device("cpu") if "cpu" in str(dist.get_backend_config()) else self.device

    def _as_tensor(self, data: bytes, size: int) -> torch.Tensor:
        """Return a message as a tensor, uint8 [size], with zeros after the message."""
        content = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        return content.to(self._message_device)

    # Return the size of a message from another rank. It is checked before memory of this size is reserved.
    @staticmethod
    def _check_size(size: int) -> int:
        if not 0 < size <= messages.MOST_BYTES:
            raise messages.MessageError(f"a rank sends a message of {size} bytes; at most {messages.MOST_BYTES} are taken.")
        return size


def _run_and_catch(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result of ``work``, None), or (None, the error that it raised)."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _bytes_of(content: torch.Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
