"""Show what the spike monitor does on a published spike: `python scripts/replays.py` writes docs/guides/replays.md.

The curve is a reconstruction. Points that the source lists are as they are there; all others are made up, and say so.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # scripts/ is not part of the installed package

from scripts.other_runs import judge_run, points_of  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "replays.md"
CHRONICLES = "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles.md"
OPT_NOTES = "https://github.com/facebookresearch/metaseq/blob/main/projects/OPT/chronicles/56_percent_update.md"

BLOOM = {
    31214: (2.198845, 0.242),
    31215: (2.220424, 0.947),
    31216: (2.595213, 2.390),
    31217: (2.241558, 15.886),
    31218: (2.345279, 145.119),
    31219: (5.098124, 960.351),
    31220: (3.492029, 353.201),
    31221: (3.213059, 379.330),
    31222: (2.804948, 650.246),
    31250: (2.215699, 0.267),
    31251: (2.235667, 0.205),
}
"""Iteration -> (loss, gradient norm), as the chronicles list them."""
BLOOM_SAVES = (31000, 31100, 31200)
"""The run saved every 100 iterations since 22 March 2022."""
FIRST = 31000
LAST = 31350


def bloom() -> list[dict[str, Any]]:
    """Return the reconstruction of iterations 31,000 to 31,350 of BLOOM-176B.

    Before and after the listed points, the loss is 2.21 with noise of 0.02, and the norm about 0.2. Between 31,222 and 31,250
    loss and norm fall exponentially.
    """
    noise = random.Random(0)
    high_loss, high_norm = BLOOM[31222]
    low_loss, low_norm = BLOOM[31250]
    records = []
    for step in range(FIRST, LAST + 1):
        loss = 2.21 + noise.gauss(0, 0.02)
        norm = 0.2 * math.exp(noise.gauss(0, 0.15))
        if 31222 < step < 31250:
            share = (step - 31222) / 28
            loss = high_loss * (low_loss / high_loss) ** share
            norm = high_norm * (low_norm / high_norm) ** share
        if step in BLOOM:
            loss, norm = BLOOM[step]
        records.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": 5.28e-5})
    return records


def page() -> str:
    """Return the page. Its table ends at the first rollback, since the curve would have been another one after it."""
    rows = ["| noticed at | began at | what | why | Zerobook would |", "|---|---|---|---|---|"]
    for _, finding, reaction, action in judge_run(points_of(bloom()), BLOOM_SAVES).judgements:
        rows.append(f"| {finding.step:,} | {finding.onset:,} | {finding.kind} | {finding.reason} | {reaction} |")
        if action is not None:
            break
    table = "\n".join(rows)
    return f"""# Published spikes, and what Zerobook does about them

## BLOOM-176B, iteration 31,216

**Reconstructed from [the chronicles of the training]({CHRONICLES})
(entry of 2022-04-12), not the original curve.** The chronicles list loss and gradient norm of {len(BLOOM)} iterations,
{min(BLOOM):,} to {max(BLOOM):,}, and these are used as they are. All other points are made up: noise around 2.21
before and after, and an exponential fall from 31,222 to 31,250. The norm rose from 0.2 to 960 within five iterations, and the
loss from 2.2 to 5.1. The run saved every 100 iterations.

What the team did: nothing. The loss came back within about 30 iterations.

{table}

*Damage* means that the loss falls back too slowly. Such a finding leads to a rollback.

A rollback at this place repeats about as many iterations as the spike lasted. So the rollback gains no time here, but it does
not rely on the loss recovering by itself.

## The rule of PaLM

[PaLM](https://arxiv.org/abs/2204.02311) (section 5.1) had about 20 such spikes. Each time, the team restarted from a checkpoint
about 100 steps before the spike and skipped about 200 to 500 batches. The loss did not spike again. Training on the same
batches from an earlier checkpoint did not cause a spike. Zerobook first repeats the steps without a change. If the spike
returns, Zerobook leaves out the samples from the step before the spike to the step at which it was noticed.

## OPT-175B

[The notes on the training]({OPT_NOTES})
(16 December 2021) describe two cases. On run 12.43, the norms of gradients and activations began to rise, and the team lowered
the learning rate by 10 %. On run 12.45.2, the perplexity began to diverge after a few large gradient norms, and the team
lowered the rate to two thirds of that of GPT-3. The text has no numbers of these curves, so there is no reconstruction.
`--on_spike lower_rate` goes back and [lowers the rate automatically](runlog.md#recovery-actions).

This page is made by `python scripts/replays.py`.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
