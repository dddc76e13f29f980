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

# Maximum number of logits in a forward pass of the evaluation: 2 GiB in half precision, 4 in fp32.
LOGITS = 2**30


def rows_at_once(batch_size: int, positions: int, vocabulary: int) -> int:
    """Return the number of rows in an evaluation's forward pass: ``batch_size``, or as many as fit into `LOGITS`.

    It is at least one. Batches of the evaluation may be larger than those of training, which could exhaust the memory.

    Args:
        batch_size: the config's ``per_device_eval_batch_size``.
        positions: number of positions with logits in the longest row.
        vocabulary: number of logits per position.

    >>> rows_at_once(8, 1024, 50_257), rows_at_once(8, 4096, 128_256)
    (8, 2)
    """
    return max(1, min(batch_size, LOGITS // (positions * vocabulary)))


def vocabulary(config: PreTrainedConfig) -> int:
    """Return the number of logits per position, by the model's config; 1 if the config names none."""
    return getattr(text_config(config), "vocab_size", None) or 1


@torch.no_grad()
def losses(
    strategy: Strategy,
    datasets: Mapping[str, Any],
    micro: int,
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
    summed_loss: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    has_perplexity: bool,
) -> dict[str, Any]:
    """Measure the loss over all held-out data, and over each dataset if there are several. Collective.

    Args:
        datasets: name -> held-out rows.
        micro: samples per batch and process.
        summed_loss: batch -> the sum over its supervised tokens, in nats.
        has_perplexity: whether the loss is a cross-entropy.

    Returns:
        ``loss`` (nats per supervised token), ``tokens`` (supervised ones) and, if the loss is a cross-entropy, ``perplexity``.
        If there are several datasets, also ``datasets``: name -> the same figures of one dataset.
    """
    mesh = strategy.mesh
    layout = BatchLayout(world_size=mesh.data_parallel_size, rank=mesh.data_parallel_rank, micro=micro)
    loaders = []
    for rows in datasets.values():
        # The loss does not depend on the order, so the rows are not shuffled.
        order = SampleOrder(rows.sizes, seed=0, shuffle=False)
        loaders.append(BatchLoader(rows, order, layout, collate, end=len(rows)))
    steps = sum(loader.steps() for loader in loaders)
    bar = tqdm(total=steps, desc="evaluating", leave=False, disable=not strategy.is_main)
    # In float64, since a sum over millions of tokens loses digits in float32.
    sums = torch.zeros(len(datasets), device=strategy.device, dtype=torch.float64)
    for index, loader in enumerate(loaders):
        for _, batches in loader:
            for batch in batches:
                sums[index] += summed_loss(batch)
            # An evaluation may take longer than its hang timeout, so each batch reports progress.
            touch()
            bar.update(1)
    bar.close()
    # One collective for all datasets, after the last step.
    totals = mesh.sum_over_samples(sums).tolist()
    # The weights of all rows are known on every rank, so their sum needs no collective.
    tokens = [int(rows.loss_weights.sum()) for rows in datasets.values()]
    result: dict[str, Any] = _mean_loss(sum(totals), sum(tokens), has_perplexity)
    if len(datasets) > 1:
        result["datasets"] = {}
        for name, total, number in zip(datasets, totals, tokens, strict=True):
            result["datasets"][name] = _mean_loss(total, number, has_perplexity)
    return result


def describe(result: dict[str, Any]) -> str:
    """Return a result as text: ``held-out loss 1.7716, perplexity 5.88 (code 1.2000, chat 2.1000), rougeL 21.3``."""
    phrases = []
    if "loss" in result:
        phrases.append(f"held-out loss {result['loss']:.4f}")
    if "perplexity" in result:
        phrases.append(f"perplexity {result['perplexity']:.2f}")
    if "datasets" in result:
        losses_by_dataset = ", ".join(f"{name} {dataset['loss']:.4f}" for name, dataset in result["datasets"].items())
        # In brackets after the last phrase, which is about the loss of all datasets.
        phrases[-1] += f" ({losses_by_dataset})"
    for name, value in result.get("metrics", {}).items():
        phrases.append(f"{name} {value:.4g}")
    return ", ".join(phrases)


def tracked(result: dict[str, Any]) -> dict[str, float]:
    """Return a result as a flat dict, for trackers."""
    flat = {f"eval_{key}": result[key] for key in ("loss", "perplexity") if key in result}
    # Trackers put the charts of names with the same text before the slash into one group.
    flat |= {f"eval_loss/{name}": dataset["loss"] for name, dataset in result.get("datasets", {}).items()}
    return flat | {f"eval/{name}": value for name, value in result.get("metrics", {}).items()}


# Return the figures of `losses` for a loss that is summed over some number of supervised tokens.
def _mean_loss(total: float, tokens: int, has_perplexity: bool) -> dict[str, Any]:
    loss = total / tokens
    result = {"loss": loss, "tokens": tokens}
    if has_perplexity:
        # From 710 on, e to the power of the loss is larger than any float, and ``exp`` raises an error.
        result["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    return result
