"""Context parallelism on a CPU: torch 2.13 passes keys and values on for the attention kernels of GPUs only."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Let torch's context parallelism use the CPU's flash attention. It changes nothing outside of `context_parallel`."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    handlers: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
    }
    _attention.custom_ops.update(handlers)


def _forward(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return (output, log-sum-exp) of attention over all processes' tokens."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention

    query, key, value = (t.to_local() for t in args[:3])
    # Callers pass these two by position or by name.
    keywords = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | options
    group = args[0].device_mesh.get_group()
    outputs = _templated_ring_attention(group, 2, op, query, key, value, **keywords)
    return _shard_like(args[0], outputs)


def _backward(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of (query, key, value)."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention_backward

    gradient, query, key, value, out, logsumexp = (t.to_local() for t in args[:6])
    dropout, causal = args[6:8]
    group = args[1].device_mesh.get_group()
    gradients = _templated_ring_attention_backward(
        group,
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
