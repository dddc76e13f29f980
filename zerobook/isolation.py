"""Whether samples that share a row really cannot see each other: measured on the model, not believed."""

from __future__ import annotations

import numpy as np
import torch

from zerobook.data.collate import PackedCollator
from zerobook.errors import ConfigError
from zerobook.strategy import Strategy

_LENGTH = 12


def isolating(strategy: Strategy, collate: PackedCollator) -> PackedCollator:
    """Return a collator under which the prepared model keeps a row's samples apart. Collective.

    Most models of transformers take the samples' borders from ``position_ids``; some do not look (Falcon), and need the
    mask spelt out. Which one this is, is measured by `leakage`.

    Raises:
        ConfigError: neither way keeps them apart, as in recurrent models, or the model takes no such mask, as those with
            ALiBi that count positions in a mask of padding (Bloom).
    """
    config = strategy.unwrapped.config
    attention = str(getattr(config, "_attn_implementation", None))
    ways = [collate]
    # a mask spelt out would replace a sliding window; flash and flex attention take none
    if attention in ("sdpa", "eager") and not getattr(config, "sliding_window", None):
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(strategy.plan.precision, torch.float32)
        ways.append(collate.masking(torch.bool if attention == "sdpa" else half))
    found = []
    for way in ways:
        by = "a mask of the samples" if way.mask else "position_ids"
        try:
            leak, allowed = leakage(strategy, way)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each architecture raises an error of its own where it takes no such mask
            found.append(f"the model fails with {by} ({type(error).__name__}: {error})")
            continue
        if leak <= allowed:
            return way
        found.append(f"with {by}, logits differ by {leak:.1e} of the largest, and {allowed:.0e} is allowed")
    raise ConfigError(
        f"packing: in {type(strategy.unwrapped).__name__} with attn_implementation {attention}, samples that share a row see "
        f"each other: {'; '.join(found)}. Pass --packing false (and --group_by_length to pad less), or another "
        "--attn_implementation."
    )


@torch.no_grad()
def leakage(strategy: Strategy, collate: PackedCollator) -> tuple[float, float]:
    """Compare a sample's logits behind another one in its row with those of the sample alone. Collective.

    Two tiny forwards in evaluation mode. Position ids that the model ignores, a mask that its attention does not take, a
    recurrent layer that carries over: each shows as a difference.

    Returns:
        (the largest difference over all ranks, as a share of the largest logit; what rounding may make of it).
    """
    model, device = strategy.model, strategy.device
    ids = np.random.default_rng(0).integers(3, min(strategy.unwrapped.config.vocab_size, 1000), 2 * _LENGTH)
    second = ids[_LENGTH:]
    pack = {"input_ids": ids, "labels": ids, "position_ids": np.tile(np.arange(_LENGTH), 2)}
    alone = {"input_ids": second, "labels": second, "position_ids": np.arange(_LENGTH)}
    was_training = model.training
    model.eval()
    logits = []
    try:
        for row, start in ((pack, _LENGTH), (alone, 0)):
            batch = {key: value.to(device) for key, value in collate([row]).items() if key != "labels"}
            logits.append(model(**batch).logits[0, start : start + _LENGTH].float())
    finally:
        model.train(was_training)
        strategy.after_forwards()  # also behind an error: the next forward must not meet weights that stayed gathered
    difference = (logits[0] - logits[1]).abs().max() / logits[1].abs().max().clamp_min(1e-6)
    # kernels may sum in another order for another length
    full = strategy.plan.precision == "no" and next(model.parameters()).dtype == torch.float32
    # a sum over ranks is enough of a maximum, and what one rank sees all decide by
    return strategy.sum_over_ranks(difference.reshape(1)).item() / strategy.world_size, 1e-4 if full else 3e-2
