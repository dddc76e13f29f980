"""Time of a LoRA step (r 16, SmolLM2-135M-Instruct) with single measures: the same batch, in turns, fp32, one thread.

    python benchmarks/flags.py [--out benchmarks/results/flags.json] [--rounds 9]

masked        transformers' own loss of all logits, with an attention mask
unmasked      without the mask, which causal attention does not need
in the head   the loss in the output layer, of supervised tokens alone: how a recipe runs
compiled      the same with --torch_compile
joined        the samples in one row, without padding, with --padding_free; not compiled
both          compiled and joined

Half of the tokens are supervised, and a fifth of the padded batch is padding. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

LENGTHS = (128, 110, 70, 100)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compiling is measured, not loading
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from zerobook import head
    from zerobook.data import embedded
    from zerobook.data.collate import CausalCollator, PackedCollator
    from zerobook.models.compiled import compile_layers
    from zerobook.objective import NextToken
    from zerobook.utils.versions import versions

    torch.set_num_threads(1)
    base: Any = AutoModelForCausalLM.from_pretrained(embedded.locate_model("embedded:smollm2"), dtype=torch.float32)
    base.config.use_cache = False
    model: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS)).train()
    random = np.random.default_rng(0)
    rows = []
    for size in LENGTHS:
        ids = random.integers(5, 40_000, size)
        rows.append({"input_ids": ids, "labels": np.where(np.arange(size) < size // 2, -100, ids)})
    masked, unmasked = CausalCollator(2)(rows), CausalCollator(2, mask=False, no_cache=True)(rows)
    supervised = CausalCollator(2, mask=False, no_cache=True, supervised=True)(rows)
    joined = PackedCollator(2, flatten=True, supervised=True)(rows)
    objective = NextToken()

    def step(batch: dict[str, Any]) -> float:
        begun = time.perf_counter()
        loss = objective.loss(model, dict(batch))
        (loss / 200).backward()  # type: ignore[operator]
        model.zero_grad()
        losses.append(loss.item())  # type: ignore[union-attr]
        return time.perf_counter() - begun

    losses: list[float] = []
    seconds: dict[str, list[float]] = {}

    def measure(arms: dict[str, dict[str, Any]], before: Callable[[str], object]) -> None:
        for _ in range(asked.rounds + 1):
            for name, batch in arms.items():
                before(name)
                seconds.setdefault(name, []).append(step(batch))

    installed = head.install(model)
    assert installed is not None

    def switch(name: str) -> None:
        model.__dict__.pop("loss_head", None)
        if name not in ("masked", "unmasked"):
            model.loss_head = installed

    measure({"masked": masked, "unmasked": unmasked, "in the head": supervised, "joined": joined}, switch)
    compile_layers(model)
    begun = time.perf_counter()
    step(supervised)
    compiling = time.perf_counter() - begun
    step(joined)
    measure({"compiled": supervised, "both": joined}, lambda name: None)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    found = {
        "date": str(date.today()), "machine": platform.machine(), "cores": os.cpu_count(), "versions": versions(),
        "rounds": asked.rounds, "seconds": {name: round(value, 3) for name, value in medians.items()},
        "first compiled step, s": round(compiling, 1), "losses differ by": max(losses) / min(losses) - 1,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
