"""Turns what the parity tests measured into docs/parity.md.

usage: parity_table.py MEASURED.jsonl OUT.md
"""

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

from zerobook.loop import versions


def cpu() -> str:
    """The processor's name where the kernel tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else f"{platform.machine()} CPU"


def main(source: str, target: str) -> None:
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    found = versions()
    lines = [
        "# Any strategy, the same training: measured",
        "",
        "Ten AdamW steps of 4 chats of uneven lengths, fp32, through `accelerate launch` with the shipped file, against one",
        "process with the same settings. The loss and norm columns are the largest relative difference over the ten steps,",
        "the weight column the largest absolute difference after them. Written by `make test-full`.",
        "",
        "Not all rows train alike; each is compared with one process that trains as it does:",
        "",
        "- causal_lm: all weights of a tiny Llama, rate 3e-3 after 2 steps of warm-up, Adam's epsilon 1e-8;",
        "- lora_finetune: adapters of rank 32, the same 4 chats at every step, rate 2.5e-3 after 2 steps of warm-up, epsilon",
        "  1e-6, since half of an adapter has no gradient at the first step, where Adam would blow rounding up to whole steps;",
        "- zero3_nvme with causal_lm: a wider model, whose tensors are large enough to be swapped, rate 4e-3 without warm-up,",
        "  epsilon 1e-6.",
        "",
        "On a CPU the offload rows run DeepSpeed's and FSDP2's real offload code, but there is no device memory to offload",
        "from.",
        "",
        f"Hardware: {cpu()}, {os.cpu_count()} cores, gloo. Date: {date.today()}. "
        + ", ".join(f"{name} {version}" for name, version in found.items() if name != "zerobook") + ".",
        "",
        "| strategy file | recipe | processes | loss | gradient norm | weights | loss fell by |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        lines.append(
            f"| {row['strategy']} | {row['recipe']} | {row['processes']} | {row['loss']:.1e} | {row['norm']:.1e} | "
            f"{row['weight']:.1e} | {row['fall']:.0%} |"
        )
    Path(target).write_text("\n".join(lines) + "\n")
    print(f"wrote {target}: {len(rows)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
