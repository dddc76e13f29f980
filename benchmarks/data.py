"""Cost of data preparation, measured on this machine: packing, tokenizing, preparing, and what packing saves.

    python benchmarks/data.py [--gigabytes 1] [--out benchmarks/results/data.json]

Each figure is a ratio of two things measured in turns in one run, so that a slow machine slows both. Takes about ten
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np

from zerobook.data import embedded
from zerobook.data.pack import best_fit_decreasing


def packing() -> dict[str, dict[str, float]]:
    """Measure the seconds to plan a million samples, and how full the rows are."""
    rng = np.random.default_rng(0)
    cases = {
        "long tail, 4096": (np.clip(rng.lognormal(5, 1.2, 1_000_000), 1, 4096), 4096),
        "dialogues, 2048": (np.clip(rng.lognormal(3.9, 0.4, 1_000_000), 1, 2048), 2048),
        "the embedded dialogues, 1024": (np.array([len(c.input_ids) for c in _encoded()]), 1024),
    }
    found = {}
    for name, (lengths, capacity) in cases.items():
        lengths = lengths.astype(int)
        start = time.perf_counter()
        plan = best_fit_decreasing(lengths, capacity)
        seconds = time.perf_counter() - start
        found[name] = {
            "samples": len(lengths),
            "seconds": round(seconds, 3),
            "rows": len(plan),
            "rows at least needed": int(-(-lengths.sum() // capacity)),
            "fill": round(float(lengths.sum() / (len(plan) * capacity)), 5),
        }
    return found


def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded.smollm2())


def _chats(turns: int):
    """Return the embedded dialogues, with ``turns`` of them joined into one chat."""
    from zerobook.data.formats import Chat

    found = [row["messages"] for row in embedded.rows("chatterbot") if row["messages"][0]["role"] == "user"]
    return [Chat([m for chat in found[i : i + turns] for m in chat]) for i in range(0, len(found) - turns, turns)]


def _encoded():
    from zerobook.data.templates import CausalEncoder

    return CausalEncoder(_tokenizer(), length=1024).encode(_chats(1))


def tokenizing(rounds: int = 15) -> dict[str, dict[str, float]]:
    """Measure tokens a second against the tokenizers library alone on texts that are already rendered; one thread each."""
    from zerobook.data.templates import CausalEncoder

    tokenizer = _tokenizer()
    found = {}
    for name, turns in (("one dialogue a chat", 1), ("ten dialogues a chat", 10)):
        chats = _chats(turns)
        encoder = CausalEncoder(tokenizer, length=None)
        rendered = [row.text for chat in chats for row in encoder.template.render(chat)]
        tokens = sum(len(e.input_ids) for e in encoder.encode(chats))
        pairs = []
        for _ in range(rounds):
            start = time.process_time()
            tokenizer.backend_tokenizer.encode_batch(rendered, add_special_tokens=False)
            middle = time.process_time()
            encoder.encode(chats)
            pairs.append((middle - start, time.process_time() - middle))
        library, ours = (min(p[k] for p in pairs) for k in (0, 1))
        found[name] = {
            "tokens per chat": round(tokens / len(chats)), "library tokens/s": round(tokens / library),
            "tokens/s": round(tokens / ours), "ratio": round(library / ours, 3),
            "median ratio of pairs": round(statistics.median(a / b for a, b in pairs), 3),
        }  # fmt: skip
    return found


PREPARE = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer
from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.data.prepare import Library
from zerobook.data.templates import CausalEncoder
from zerobook.objective import NextToken
if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(embedded.smollm2())
    config = RecipeConfig(cache_dir=sys.argv[1], train_file=sys.argv[2], packing=True)
    library = Library(config, tokenizer, CausalEncoder(tokenizer, length=1024), NextToken())
    start = time.perf_counter()
    shelves = library.tokenize(int(sys.argv[3]))
    seconds = time.perf_counter() - start
    data = library.open(shelves)
    # not ru_maxrss, which a process inherits from the one that started it
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    print(seconds, data.train.views[0].store.meta["tokens"], peak)
"""


def preparing(gigabytes: float) -> dict[str, dict[str, float]]:
    """Prepare a file of chats with one process and with two. Measure seconds and the peak memory of the parent."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "prepare.py"
        script.write_text(PREPARE)
        file = Path(folder) / "chats.jsonl"
        lines = [json.dumps({"messages": chat.messages}) + "\n" for chat in _chats(10)]
        block = "".join(lines)
        with file.open("w") as handle:
            while handle.tell() < gigabytes * 1e9:
                handle.write(block)
        for workers in (1, 2):
            line = [sys.executable, str(script), str(Path(folder) / f"cache{workers}"), str(file), str(workers)]
            result = subprocess.run(line, capture_output=True, text=True, check=True)
            seconds, tokens, peak = map(float, result.stdout.split()[-3:])
            found[f"{workers} process(es)"] = {
                "bytes": file.stat().st_size, "tokens": int(tokens), "seconds": round(seconds, 1),
                "tokens/s": round(tokens / seconds), "peak MB of the parent": round(peak),
            }  # fmt: skip
    found["two against one"] = {"ratio": round(found["1 process(es)"]["seconds"] / found["2 process(es)"]["seconds"], 2)}
    return found


def saving(steps: int = 4, padded_rows: int = 32, packed_rows: int = 4, capacity: int = 1024) -> dict[str, float]:
    """Measure supervised tokens a second of SmolLM2-135M on the dialogues: packed rows against padded micro-batches.

    Both train on about as many tokens a step, padding included. The weight gradients of a step cost the same however few
    tokens it has, which would favour the one with more tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from zerobook.data.collate import CausalCollator, PackedCollator
    from zerobook.objective import causal_lm_loss

    model = AutoModelForCausalLM.from_pretrained(embedded.smollm2(), dtype=torch.float32)
    model.config.use_cache = False
    encoded = _encoded()
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": e.input_ids.astype(np.int64), "labels": e.labels.astype(np.int64)}
        for e in encoded
        if len(e.input_ids) <= capacity
    ]
    plan = best_fit_decreasing(np.array([len(r["input_ids"]) for r in rows]), capacity)

    def packed(number: int):
        members = [rows[i] for i in plan.members[plan.offsets[number] : plan.offsets[number + 1]]]
        return {
            "input_ids": np.concatenate([m["input_ids"] for m in members]),
            "labels": np.concatenate([np.r_[-100, m["labels"][1:]] for m in members]),
            "position_ids": np.concatenate([np.arange(len(m["input_ids"])) for m in members]),
        }

    arms: dict[str, list[float]] = {"padded": [], "packed": []}
    sizes: dict[str, list[int]] = {"padded": [], "packed": []}
    for _ in range(steps):
        batches = {
            "padded": CausalCollator(0)([rows[i] for i in rng.choice(len(rows), padded_rows, replace=False)]),
            "packed": PackedCollator(0)([packed(int(i)) for i in rng.choice(len(plan), packed_rows, replace=False)]),
        }
        for name, batch in batches.items():
            labels = batch.pop("labels")
            sizes[name].append(labels.numel())
            start = time.perf_counter()
            causal_lm_loss(model(**batch).logits, labels).backward()
            arms[name].append(int((labels[:, 1:] != -100).sum()) / (time.perf_counter() - start))
            model.zero_grad()
    rates = {name: statistics.median(values) for name, values in arms.items()}
    return {
        **{f"{name}, tokens a step": round(statistics.mean(values)) for name, values in sizes.items()},
        **{f"{name}, supervised tokens/s": round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["packed"] / rates["padded"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    measures = {"packing": packing, "tokenizing": tokenizing, "saving": saving, "preparing": preparing}
    parser.add_argument("--only", nargs="+", choices=measures, default=list(measures), help="measure these; the rest stays")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data.json"))
    asked = parser.parse_args()
    from zerobook.utils.versions import versions

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    result = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    result |= {"cpu": cpu, "cores": os.cpu_count(), "machine": platform.machine()}
    for name in asked.only:
        figures = preparing(asked.gigabytes) if name == "preparing" else measures[name]()
        result[name] = {"date": str(date.today()), "versions": versions(), "figures": figures}
        print(name, json.dumps(figures, indent=1), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
