"""Choice of the kernels that compute torch's scaled dot product attention (SDPA) on CUDA."""

import os
from typing import Any

import torch


def prepare_attention() -> None:
    """Let SDPA use fused kernels, but not cuDNN's. Call this function before a model computes attention.

    On compute capability 9.0, 10.0 and 10.3, torch from 2.9 on tries cuDNN first. With the cuDNN of torch 2.13, a mask can give
    NaN gradients (https://github.com/pytorch/pytorch/issues/196678), and models with few key heads generate false tokens
    (https://github.com/pytorch/pytorch/issues/193893). cuDNN also builds a plan for every new shape, and padded batches have
    many. torch's own variable ``TORCH_CUDNN_SDPA_DEPRIORITIZED``, with any value, leaves the choice to torch.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # torch reads the variable only at the first attention of the process, and this setting at each attention. So the setting
    # still works if something has computed attention before.
    if "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ:
        torch.backends.cuda.enable_cudnn_sdp(False)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend_fused


def attend_fused(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers does with SDPA, but repeat keys and values if no fused kernel can share them.

    With grouped-query attention, several query heads share the keys and values of one key head. If there is a mask,
    transformers repeats the keys and values for each query head. Without a mask, it passes them on once. If flash attention
    cannot be used (in fp32, or before compute capability 8.0), torch 2.13 then has no fused kernel, and its math kernel keeps
    all scores for the backward pass (https://github.com/huggingface/transformers/issues/48633).

    Args:
        query: (batch, query heads, tokens, head size).
        key: (batch, key heads, tokens, head size). ``value`` has the same shape.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    queries_per_key = query.shape[1] // key.shape[1]
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    if queries_per_key > 1 and attention_mask is None and not has_flash_attention(dtype, query.shape[-1], query.device):
        key = key.to(dtype).repeat_interleave(queries_per_key, dim=1)
        value = value.to(dtype).repeat_interleave(queries_per_key, dim=1)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        # transformers takes the number of queries per key from the module, and would repeat the keys once more.
        module = None
    return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)


# torch's compiler cannot trace `SDPAParams`, and would divide the graph of each layer here. So it calls this function once, and
# takes the result as a constant.
@torch.compiler.assume_constant_result
def has_flash_attention(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Return whether torch has a flash kernel for the dtype, head size and device. On a CPU it has one for all of them."""
    query = torch.empty(1, 1, 1, head_size, dtype=dtype, device=device, requires_grad=True)
    # Keys and values have the same dtype, head size and device, so the query stands for them. The other arguments: no mask, no
    # dropout, causal, keys not shared.
    parameters = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, True, False)
    return device.type == "cpu" or torch.backends.cuda.can_use_flash_attention(parameters)
