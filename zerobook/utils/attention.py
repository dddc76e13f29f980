"""The kernels that compute torch's scaled dot product attention (SDPA) on CUDA: which comes first, and which share keys."""

import os
from typing import Any

import torch


def prepare_attention() -> None:
    """Let SDPA compute with fused kernels, and without cuDNN's. Call it before a model of ours computes attention.

    On compute capability 9.0, 10.0 and 10.3, torch from 2.9 on tries cuDNN first. With the cuDNN of torch 2.13, a mask can give
    NaN gradients (https://github.com/pytorch/pytorch/issues/196678), and models with few key heads generate false tokens
    (https://github.com/pytorch/pytorch/issues/193893). cuDNN also builds a plan for every new shape, and padded batches have
    many. torch's own variable ``TORCH_CUDNN_SDPA_DEPRIORITIZED``, with any value, leaves the choice to torch.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # torch reads the variable once, at the first attention of the process. This setting counts at every call.
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
    """Attend as transformers does under SDPA, and repeat keys and values if no fused kernel shares them.

    Without a mask, transformers lets several query heads share keys. Without flash attention (in fp32, or before compute
    capability 8.0), torch 2.13 has no fused kernel for that, and its math kernel keeps all scores for the backward pass
    (https://github.com/huggingface/transformers/issues/48633). With a mask, transformers repeats the keys itself.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups = query.shape[1] // key.shape[1]
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    if groups > 1 and attention_mask is None and not has_flash_attention(dtype, query.shape[-1], query.device):
        key = key.to(dtype).repeat_interleave(groups, dim=1)
        value = value.to(dtype).repeat_interleave(groups, dim=1)
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # transformers would repeat the heads of a module that has groups.
        module = None
    return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)


# torch's compiler cannot trace `SDPAParams`: it would cut every layer in two.
@torch.compiler.assume_constant_result
def has_flash_attention(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Return whether torch has a flash kernel for the dtype, head size and device. The one of the CPU takes all."""
    query = torch.empty(1, 1, 1, head_size, dtype=dtype, device=device, requires_grad=True)
    # Keys have the same dtype, head size and device, so the query stands for them.
    parameters = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, True, False)
    return device.type == "cpu" or torch.backends.cuda.can_use_flash_attention(parameters)
