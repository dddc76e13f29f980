"""Plan the published runs with ftuneai, a program of formulas from PyPI, for docs/measured/plan_accuracy.md.

usage: python -m venv ENV; ENV/bin/pip install ftuneai==0.4.1; ENV/bin/python benchmarks/published_ftuneai.py

It runs in an environment of its own, which needs nothing of Zerobook, and writes its figures to
``benchmarks/results/published_ftuneai.json``. Rows are left out that it cannot describe: offload, encoder-decoders, GPUs that
its table lacks, and adapters on other layers than its three sets.
"""

from __future__ import annotations

import json
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ftuneai.core.memory import MemoryEstimator
from ftuneai.core.models import FineTuneMethod, LoRATarget, ModelSpec, Quantization, ShardingStrategy, TrainingConfig
from ftuneai.core.time import TimeEstimator
from ftuneai.loader import load_gpus

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "published_ftuneai.json"
GPUS = {
    "a100-40gb": "A100-40GB",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100-80GB",
    "h200": "H200-141GB",
    "rtx-4090": "RTX-4090-24GB",
    "v100-16gb": "V100-16GB",
    "v100-32gb": "V100-32GB",
}
STRATEGIES = {
    "single": ShardingStrategy.NONE,
    "ddp": ShardingStrategy.NONE,
    "zero1": ShardingStrategy.ZERO_1,
    "zero2": ShardingStrategy.ZERO_2,
    "zero3": ShardingStrategy.ZERO_3,
    "fsdp1-full": ShardingStrategy.FSDP,
    "fsdp1-grad-op": ShardingStrategy.FSDP_SHARD_GRAD,
    "fsdp2-full": ShardingStrategy.FSDP,
}
TARGETS = {
    "q,v": LoRATarget.ATTENTION,
    "q,v,o": LoRATarget.ATTENTION_ALL,
    "q,v,o,mlp": LoRATarget.ALL_LINEAR,
    "all-linear": LoRATarget.ALL_LINEAR,
}
ROWS = 10**9
"""Rows of data. It rounds hours to two decimals, which so many rows make precise."""


def plan(run: dict[str, Any]) -> dict[str, float] | None:
    """Return what ftuneai says of a run: GB of one GPU and tokens a second of one GPU; None if it cannot."""
    gpus = load_gpus()
    method = run["method"]
    adapts = method["kind"] != "full"
    is_known = run["strategy"] in STRATEGIES and GPUS.get(run["plan_gpu"]) in gpus and not run["target_len"]
    if not is_known or (adapts and method["targets"] not in TARGETS):
        return None
    architecture = run["arch"]
    spec = ModelSpec(
        name=run["model"],
        parameters=int(run["params_b"] * 1e9),
        hidden_size=architecture["hidden_size"],
        num_layers=architecture["layers"],
        num_attention_heads=architecture["heads"],
        num_kv_heads=architecture["kv_heads"],
        intermediate_size=architecture["intermediate"],
        vocab_size=architecture["vocab"],
        max_seq_length=run["seq_len"],
        default_dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[run["precision"]],
    )
    num_gpus = run["nodes"] * run["gpus_per_node"]
    config = TrainingConfig(
        model=run["model"],
        method=FineTuneMethod(method["kind"]),
        quantization=Quantization.INT4 if method["kind"] == "qlora" else Quantization.NONE,
        batch_size=run["micro_batch"],
        seq_length=run["seq_len"],
        gradient_checkpointing=run["activation_checkpointing"] != "none",
        lora_rank=method.get("rank", 16),
        lora_target=TARGETS[method["targets"]] if adapts else LoRATarget.ATTENTION,
        flash_attention=not run["attention"].startswith(("eager", "megatron")),
        sharding=STRATEGIES[run["strategy"]],
        num_gpus=num_gpus,
    )
    memory = MemoryEstimator(spec, config).estimate()
    time = TimeEstimator(spec, config).estimate(gpus[GPUS[run["plan_gpu"]]], ROWS, epochs=1, num_gpus=num_gpus)
    seconds = time.total_hours * 3600
    # What it prints as GB are units of 2^30 bytes.
    return {
        "memory_gb": round(memory.total_gb * 2**30 / 1e9, 2),
        "tokens_per_s_per_gpu": round(time.total_tokens / seconds / num_gpus, 1),
    }


def main() -> None:
    """Plan all runs, and write the figures."""
    runs = {}
    for line in (FOLDER / "published_runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        planned = plan(run)
        if planned is not None:
            runs[run["id"]] = planned
    results = {"ftuneai": version("ftuneai"), "date": str(date.today()), "runs": runs}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(runs)} runs; wrote {RESULTS}")


if __name__ == "__main__":
    main()
