"""Bytes that ZeRO-2 sends with DeepSpeed's all-reduce of gradients, and with a reduction to their owner.

    python benchmarks/reduction.py [--out benchmarks/results/reduction.json]

`use_multi_rank_bucket_allreduce` of the DeepSpeed JSON is true (the default) or false. All processes run on this machine, and
the loopback device counts what they send: the difference between a run of 15 steps and one of 5, for each step, in multiples of
the bytes of the weights. Takes about two minutes. Nothing else may use the loopback device meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FEW, MANY = 5, 15


def sent() -> int:
    """Return the bytes that the loopback device has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "reduction.json")
    asked = parser.parse_args()
    from transformers import LlamaConfig

    sys.path.insert(0, str(ROOT))  # benchmarks are not part of the installed package
    from benchmarks.published.materials import Materials
    from zerobook.utils import subprocess_launch
    from zerobook.utils.versions import versions

    found: dict[str, Any] = {"date": str(date.today()), "cores": os.cpu_count(), "versions": versions(), "runs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = Materials(folder)
        config = LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            **made.special,
        )  # fmt: skip
        model = made.model("llama", config)
        weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        for processes in (2, 4):
            for by_all in (True, False):
                zero = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
                zero["zero_optimization"]["use_multi_rank_bucket_allreduce"] = by_all
                (folder / "zero2.json").write_text(json.dumps(zero))
                counted, losses = {}, []
                for steps in (FEW, MANY):
                    output = folder / f"{processes}-{by_all}-{steps}"
                    flags = {
                        "model_name_or_path": model, "train_file": made.text, "cache_dir": folder / "data", "block_size": 64,
                        "per_device_train_batch_size": 1, "validation_split_percentage": 0, "max_train_steps": steps,
                        "logging_steps": 100, "output_dir": output,
                    }  # fmt: skip
                    line = subprocess_launch.command(
                        ["--use_deepspeed", "--deepspeed_config_file", str(folder / "zero2.json")], processes,
                        ROOT / "recipes" / "causal_lm.py", *subprocess_launch.flags(flags),
                    )  # fmt: skip
                    before = sent()
                    code, text = subprocess_launch.run(line, 300, {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
                    if code:
                        raise SystemExit(f"exit status {code}\n{text[-3000:]}")
                    counted[steps] = sent() - before
                    losses = [json.loads(step)["loss"] for step in (output / "runlog" / "steps.jsonl").read_text().splitlines()]
                times = (counted[MANY] - counted[FEW]) / (MANY - FEW) / weights
                found["runs"].append(
                    {"processes": processes, "all-reduce": by_all, "weights": round(times, 2), "loss": losses[-1]}
                )
                print(json.dumps(found["runs"][-1]), flush=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
