"""Rows whose tokens are split among the processes of a group: DeepSpeed-Ulysses, and torch's context parallelism.

Each process computes a part of each row, in all layers but attention. In attention, the processes of a group exchange data.
Ulysses exchanges heads for tokens (all-to-all), so that each process computes some heads over the complete row. Context
parallelism passes keys and values on (ring attention). No other layer of a model may use other tokens.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from zerobook.constants import IGNORE
from zerobook.errors import ConfigError
from zerobook.objective import TARGETS, shifted
from zerobook.utils.attention import attend_fused

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The ``attn_implementation`` that a model must have if rows are split. On GPUs, it runs flash kernels in half precision.
ATTENTION = "sdpa"
# Keys that a batch may have. ``past_key_values`` is a `zerobook.data.collate.NoCache`.
_KEYS = {"input_ids", "labels", "past_key_values"}

Attention = Callable[..., tuple[torch.Tensor, None]]


class TokenSplit(ABC):
    """The split of rows among the ``size`` processes of a group.

    Each row is cut into ``chunk_count`` equal chunks. ``chunks`` has the indices of this process's chunks.
    """

    size: int
    chunks: list[int]
    chunk_count: int

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this process's tokens of a batch of complete rows.

        Labels are shifted before they are split: the target of a process's last token is the first token of another process.
        Rows are padded on the right to a multiple of ``chunk_count``. Attention is causal, so no token sees this padding.

        Args:
            batch: ``input_ids``, ``labels`` (int64 [rows, length]), padded on the right if at all.

        Returns:
            ``input_ids``, ``position_ids`` and `zerobook.objective.TARGETS`, int64 [rows, part of the length].

        Raises:
            ConfigError: the batch has something that this function cannot split.
        """
        # An unknown key might be a mask or an embedding, which would have to be split in another way.
        unknown = sorted(batch.keys() - _KEYS)
        if unknown:
            raise ConfigError(
                f"the batch has {', '.join(unknown)}, and processes that share the tokens of a row can split input_ids and "
                "labels only. Use a strategy file that does not split rows."
            )
        ids = batch["input_ids"]
        rows, length = ids.shape
        padding = -length % self.chunk_count
        # A model's table of positions may end with the row, so padding repeats the last position.
        positions = torch.arange(length + padding, device=ids.device).clamp(max=length - 1).expand(rows, -1)
        tokens: dict[str, Any] = {
            "input_ids": self._cut_rows(pad(ids, (0, padding))),
            "position_ids": self._cut_rows(positions),
            TARGETS: self._cut_rows(pad(shifted(batch["labels"]), (0, padding), value=IGNORE)),
        }
        if "past_key_values" in batch:
            tokens["past_key_values"] = batch["past_key_values"]
        return tokens

    def _cut_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this process's chunks of complete rows, joined."""
        chunks = rows.chunk(self.chunk_count, dim=1)
        return torch.cat([chunks[index] for index in self.chunks], dim=1)

    @abstractmethod
    def attention(self, rows: int | None = None) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes in which attention covers the complete rows of a group.

        Outside of the context, each process computes complete rows by itself, as in generation.

        Args:
            rows: number of rows of the batch; None keeps the last number.
        """


class Ulysses(TokenSplit):
    """DeepSpeed's sequence parallelism for models of transformers, as accelerate has registered it.

    accelerate replaces transformers' attention for the rest of the process, and drops every mask. Both would be wrong in
    generation. So `ZeroStrategy` takes the function out again, and it is used in `attention` only.

    Args:
        registered: the function that accelerate has left in transformers' table of attention functions.
    """

    def __init__(self, registered: Attention):
        self._attention = registered
        # DeepSpeed's object, which exchanges heads for tokens, is only reachable through the closure of accelerate's function.
        self._exchange = inspect.getclosurevars(registered).nonlocals["uattn"]
        # accelerate sets this to True, so that evaluations would compute complete rows in each process.
        self._exchange.disable_in_eval = False
        self.size = self._exchange.world_size
        self.chunk_count = self.size
        self.chunks = [self._exchange.sp_rank]

    @contextmanager
    def attention(self, rows: int | None = None) -> Iterator[None]:
        if rows is not None:
            # DeepSpeed's object is made for one batch size, and batches may have fewer rows. Set the rows in its
            # shapes, which are [length, rows, ...].
            self._exchange.batch_size = rows
            for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
                length, _, *rest = getattr(self._exchange, name)
                setattr(self._exchange, name, torch.Size([length, rows, *rest]))
        # Here, transformers calls the function of accelerate, without masks.
        with without_masks(self._attention):
            yield


class Ring(TokenSplit):
    """torch's context parallelism, which passes keys and values around the group.

    A process has a chunk of the first half of each row and one of the second half, since later tokens attend to more tokens.

    Args:
        mesh: the group, of one dimension.
    """

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self.size = mesh.size()
        self.chunk_count = 2 * self.size
        if mesh.device_type == "cpu":
            _register_cpu_attention()
        # torch decides which chunks a process gets.
        with self._attending_around_ring() as chunks:
            self.chunks = chunks.tolist()

    @contextmanager
    def attention(self, rows: int | None = None) -> Iterator[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # torch passes keys and values on for these kernels only. Its math kernel consists of other operations, which would
        # attend to this process's tokens only. The order is set because torch's own order differs among GPUs: on Hopper it
        # begins with cuDNN.
        fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with self._attending_around_ring(), sdpa_kernel(fused, set_priority=True), without_masks(attend_fused):
            yield

    @contextmanager
    def _attending_around_ring(self) -> Iterator[torch.Tensor]:
        """Return a context in which torch's attention passes keys and values on. It yields the value of ``chunks``."""
        from torch.distributed.tensor.experimental import context_parallel

        # torch splits the buffers that it gets. This row has one token in each chunk, the chunk's index.
        row = torch.arange(self.chunk_count, device=self._mesh.device_type)
        with context_parallel(self._mesh, buffers=[row], buffer_seq_dims=[0], no_restore_buffers={row}):
            yield row


@contextmanager
def without_masks(attention: Attention) -> Iterator[None]:
    """Return a context in which transformers calls ``attention`` for `ATTENTION`, and makes no masks, so that it is causal.

    A mask would cover this process's tokens only.

    Args:
        attention: takes the place of transformers' own function.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original_attention = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    original_mask = ALL_MASK_ATTENTION_FUNCTIONS[ATTENTION]
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
    ALL_MASK_ATTENTION_FUNCTIONS[ATTENTION] = lambda *_, **__: None
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = original_attention
        ALL_MASK_ATTENTION_FUNCTIONS[ATTENTION] = original_mask


def _register_cpu_attention() -> None:
    """Let torch's context parallelism use the CPU's flash attention. Nothing changes outside of `context_parallel`.

    torch 2.13 passes keys and values on only for the attention kernels of GPUs.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    handlers: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attend,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _differentiate,
    }
    _attention.custom_ops.update(handlers)


# The arguments of a handler are the operation, its positional arguments with DTensors, and its other arguments.
def _attend(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return (output, log-sum-exp) of attention over all processes' tokens."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention

    query, key, value = (tensor.to_local() for tensor in args[:3])
    # Callers pass ``dropout_p`` and ``is_causal`` by position or by name.
    keywords = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | options
    # 2 is the dimension of the tokens.
    outputs = _templated_ring_attention(args[0].device_mesh.get_group(), 2, op, query, key, value, **keywords)
    return _shard_like(args[0], outputs)


def _differentiate(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of (query, key, value)."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention_backward

    # The order of ``_scaled_dot_product_flash_attention_for_cpu_backward``'s arguments.
    gradient, query, key, value, out, logsumexp = (tensor.to_local() for tensor in args[:6])
    dropout, causal = args[6:8]
    # 2 is the dimension of the tokens, and "grad_out" is the name of the first argument.
    gradients = _templated_ring_attention_backward(
        args[1].device_mesh.get_group(),
        2,
        op,
        gradient,
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        causal,
        dropout_p=dropout,
        scale=options.get("scale"),
    )
    return _shard_like(args[1], gradients)


def _shard_like(example: Any, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return local tensors as DTensors, sharded as ``example`` is."""
    from torch.distributed.tensor import DTensor

    mesh = example.device_mesh
    return tuple(DTensor.from_local(tensor, mesh, example.placements, run_check=False) for tensor in tensors)
