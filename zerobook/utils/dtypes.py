"""The dtypes that the names of precisions stand for."""

import torch

# Mixed precision -> the dtype that it computes in.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype in which a run with the mixed precision ``no``, ``bf16`` or ``fp16`` computes."""
    return HALF.get(precision, torch.float32)
