"""The loss on held-out data: its measurement, and its output as text and for trackers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zerobook.data.batch_loader import BatchLayout, BatchLoader
from zerobook.data.sampler import SampleOrder
from zerobook.health.position import touch
from zerobook.strategy import Strategy
from zerobook.utils.bars import tqdm
from zerobook.utils.model_config import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOGITS = 2**30
"""Maximum number of logits in a forward pass of the evaluation: 2 GiB in half precision, 4 in fp32."""


def rows_at_once(asked: int, positions: int, vocabulary: int) -> int:
    """Return the number of rows in an evaluation's forward pass: ``asked``, or fewer where these have more than `LOGITS`.

    One row is always taken. Training keeps activations beside the logits, so its micro-batches are smaller, and an evaluation
    with a larger batch would otherwise run out of memory where training fits.

    Args:
        asked: the config's ``per_device_eval_batch_size``.
        positions: of the longest row for which there are logits.
        vocabulary: logits of a position.

    >>> rows_at_once(8, 1024, 50_257), rows_at_once(8, 4096, 128_256)
    (8, 2)
    """
    return max(1, min(asked, LOGITS // (positions * vocabulary)))


def vocabulary(config: PreTrainedConfig) -> int:
    """Return the number of logits per position, by the model's config; 1 where the config names none."""
    return getattr(text_config(config), "vocab_size", None) or 1


@torch.no_grad()
def losses(
    strategy: Strategy,
    parts: Mapping[str, Any],
    micro: int,
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
    summed_loss: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    has_perplexity: bool,
) -> dict[str, Any]:
    """Measure the loss over all held-out data, and over each dataset where there are several. Collective.

    Args:
        parts: name -> held-out rows.
        micro: samples per micro-batch and process.
        summed_loss: batch -> the sum over its supervised tokens, in nats.
        has_perplexity: whether the loss is a cross-entropy.

    Returns:
        ``loss`` (nats per supervised token), ``tokens``, and ``perplexity`` of a cross-entropy; ``datasets``, the same by name.
    """
    mesh = strategy.mesh
    layout = BatchLayout(world_size=mesh.data_parallel_size, rank=mesh.data_parallel_rank, micro=micro)
    feeds = [
        BatchLoader(part, SampleOrder(part.sizes, seed=0, shuffle=False), layout, collate, end=len(part))
        for part in parts.values()
    ]
    bar = tqdm(total=sum(f.steps() for f in feeds), desc="evaluating", leave=False, disable=not strategy.is_main)
    sums = torch.zeros(len(parts), device=strategy.device, dtype=torch.float64)
    for index, feed in enumerate(feeds):
        for _, batches in feed:
            for batch in batches:
                sums[index] += summed_loss(batch)
            touch()
            bar.update(1)
    bar.close()
    tokens = [int(part.loss_weights.sum()) for part in parts.values()]
    totals = mesh.sum_over_samples(sums).tolist()
    result: dict[str, Any] = _mean(sum(totals), sum(tokens), has_perplexity)
    if len(parts) > 1:
        result["datasets"] = {
            name: _mean(total, number, has_perplexity) for name, total, number in zip(parts, totals, tokens, strict=True)
        }
    return result


def describe(result: dict[str, Any]) -> str:
    """Return a result as text: ``held-out loss 1.7716, perplexity 5.88 (code 1.2000, chat 2.1000), rougeL 21.3``."""
    words = []
    if "loss" in result:
        each = ", ".join(f"{name} {part['loss']:.4f}" for name, part in result.get("datasets", {}).items())
        perplexity = f", perplexity {result['perplexity']:.2f}" if "perplexity" in result else ""
        words.append(f"held-out loss {result['loss']:.4f}{perplexity}" + (f" ({each})" if each else ""))
    words += [f"{name} {value:.4g}" for name, value in result.get("metrics", {}).items()]
    return ", ".join(words)


def tracked(result: dict[str, Any]) -> dict[str, float]:
    """Return a result as a flat dict, for trackers."""
    flat = {f"eval_{key}": result[key] for key in ("loss", "perplexity") if key in result}
    flat |= {f"eval_loss/{name}": part["loss"] for name, part in result.get("datasets", {}).items()}
    return flat | {f"eval/{name}": value for name, value in result.get("metrics", {}).items()}


def _mean(total: float, tokens: int, has_perplexity: bool) -> dict[str, Any]:
    loss = total / tokens
    result = {"loss": loss, "tokens": tokens}
    if has_perplexity:
        # Above 709, e to the loss is more than a float holds.
        result["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    return result
