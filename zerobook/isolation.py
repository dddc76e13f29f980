"""Whether samples that share a row really cannot see each other: measured on the model, not believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zerobook.errors import ConfigError
from zerobook.strategy import Strategy

_LENGTH = 12


@torch.no_grad()
def check_isolation(strategy: Strategy, collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]) -> float:
    """Compare a sample's logits behind another sample in one row with those of the sample alone. Collective.

    Two tiny forwards in evaluation mode. Position ids that the model ignores, a mask that its attention does not take, a
    recurrent layer that carries over: each shows as a difference.

    Args:
        collate: the training's packed collator.

    Returns:
        The largest difference, as a share of the largest logit.

    Raises:
        ConfigError: the difference is more than rounding.
    """
    model, device = strategy.model, strategy.device
    config = strategy.unwrapped.config
    ids = np.random.default_rng(0).integers(3, min(config.vocab_size, 1000), 2 * _LENGTH)
    first, second = ids[:_LENGTH], ids[_LENGTH:]
    pack = {"input_ids": ids, "labels": ids, "position_ids": np.tile(np.arange(_LENGTH), 2)}
    alone = {"input_ids": second, "labels": second, "position_ids": np.arange(_LENGTH)}
    was_training = model.training
    model.eval()
    logits = []
    for row, start in ((pack, len(first)), (alone, 0)):
        batch = {key: value.to(device) for key, value in collate([row]).items() if key != "labels"}
        logits.append(model(**batch).logits[0, start : start + _LENGTH].float())
    model.train(was_training)
    scale = logits[1].abs().max().clamp_min(1e-6)
    difference = float((logits[0] - logits[1]).abs().max() / scale)
    # rounding: kernels may sum in another order for another length
    allowed = 1e-4 if strategy.plan.precision == "no" and logits[1].dtype == torch.float32 else 3e-2
    worst = strategy.sum_over_ranks(torch.tensor(float(difference > allowed), device=device)).item()
    if worst:
        attention = getattr(config, "_attn_implementation", "unknown")
        raise ConfigError(
            f"packing: in {type(strategy.unwrapped).__name__} with attn_implementation {attention}, samples that share a row "
            f"see each other: logits differ by {difference:.1e} of the largest, allowed is {allowed:.0e}. "
            "Pass --packing false (and --group_by_length), or another --attn_implementation."
        )
    return difference
