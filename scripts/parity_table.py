"""Turns what the parity tests measured into docs/parity.md.

usage: parity_table.py MEASURED.jsonl OUT.md
"""

import json
import platform
import sys
from datetime import date
from pathlib import Path

from zerobook.loop import versions


def main(source: str, target: str) -> None:
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    found = versions()
    lines = [
        "# Any strategy, the same training: measured",
        "",
        "Ten AdamW steps of 4 chats of uneven lengths, fp32, through `accelerate launch` with the shipped file, against one",
        "process. The loss and norm columns are the largest relative difference over the ten steps, the weight column the",
        "largest absolute difference after them. Written by `make test-full`.",
        "",
        f"Hardware: {platform.machine()} CPU, gloo. Date: {date.today()}. "
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
