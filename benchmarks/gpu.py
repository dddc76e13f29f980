"""What one real GPU says, without a network; every subcommand ends within 8 minutes and writes one JSON.

    python benchmarks/gpu.py planner|tables|parity [--out benchmarks/results/NAME.json]

planner   planned against measured peaks of CUDA's allocator, over configurations of three architectures
tables    table B of scripts/reproduce_tables.py with 24 GB, and the published batches of table A, on one GPU
parity    losses under every attention backend, in bf16, in scaled fp16 and with a quantised base, against eager fp32

Models are made here with random weights, their tokenizer from the Python standard library's own source text. With
``--device cpu`` the same runs go through on a CPU, where there is no allocator's peak to compare.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from zerobook import fresh
from zerobook.plan.command import here
from zerobook.tables.bench import Bench
from zerobook.tables.materials import Materials, seq2seq_sides

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 460
"""After which every run is stopped and no further one begun."""


@dataclass(frozen=True)
class Case:
    """A configuration: a model, a strategy file, and the recipe's flags."""

    model: str
    strategy: str
    rows: int
    flags: tuple[tuple[str, str], ...]


def bench(asked: argparse.Namespace, folder: Path) -> Bench:
    """One process, with the published batches alone."""
    where = here("1")
    budget = None if where.cpu else 24 * 10**9
    tiny, until = asked.scale == "tiny", time.monotonic() + SECONDS
    return Bench(folder, tiny, 1, where, budget, lambda words: print(words, flush=True), quick=True, until=until)


def models(materials: Materials, tiny: bool) -> dict[str, tuple[str, Path]]:
    """name -> (recipe, folder of a model with random weights), of about 0.3 10^9 parameters, or tiny."""
    from transformers import BartConfig, GPT2Config, LlamaConfig

    special = materials.special
    width, layers, heads = (64, 2, 4) if tiny else (1024, 24, 16)
    bart = {"d_model": width, "decoder_start_token_id": 2, "max_position_embeddings": 1024}
    llama = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    configs = {
        "gpt2": ("causal_lm", GPT2Config(n_embd=width, n_layer=layers, n_head=heads, **special)),
        "llama": ("causal_lm", LlamaConfig(num_key_value_heads=heads // 2, **llama, **special)),
        "bart": ("seq2seq_chatbot", BartConfig(**bart, **seq2seq_sides(layers // 2, heads, width), **special)),
    }
    return {name: (recipe, materials.model(name, config)) for name, (recipe, config) in configs.items()}


def cases(names: list[str]) -> list[Case]:
    """Every architecture under every strategy that one GPU has, in fp32 and bf16, with and without checkpointing."""
    found = []
    variants = [(4, {}), (8, {"mixed_precision": "bf16"}), (8, {"mixed_precision": "bf16", "activation_checkpointing": "true"})]
    for (rows, flags), strategy, model in itertools.product(variants, ("single", "zero2", "zero3"), names):
        found.append(Case(model, strategy, rows, tuple(flags.items())))
    return found


def planner(asked: argparse.Namespace) -> dict[str, Any]:
    """Planned and measured figures of each case, and the errors of the peaks."""
    from tqdm import tqdm

    from zerobook.config import parse
    from zerobook.plan.job import job
    from zerobook.plan.measure import measure
    from zerobook.recipe_file import config_class

    until, where = time.monotonic() + SECONDS, here("1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        materials = Materials(Path(name))
        made = models(materials, asked.scale == "tiny")
        chosen = cases(list(made))[: asked.limit]
        for case in tqdm(chosen, unit=" runs"):
            left = until - time.monotonic()
            if left <= 0:
                break
            recipe, model = made[case.model]
            flags = {"model_name_or_path": model, "per_device_train_batch_size": case.rows, "validation_split_percentage": 0}
            short = asked.scale == "tiny"
            if recipe == "seq2seq_chatbot":
                flags |= {"train_file": materials.pairs, "max_source_length": 64 if short else 256,
                          "max_target_length": 32 if short else 128, "pad_to_max_length": "true"}  # fmt: skip
            else:
                flags |= {"train_file": materials.text, "block_size": 64 if short else 512}
            flags |= {"cache_dir": materials.folder / "data", **dict(case.flags)}
            line = fresh.flags(flags)
            file = ROOT / "recipes" / f"{recipe}.py"
            config, sources, _ = parse(config_class(str(file)), line)
            strategy = ROOT / "accelerate_configs" / f"{case.strategy}.yaml"
            found = measure(strategy, job(config), file, line, where, sources, left)
            figures = {key: {"planned": f.planned, "measured": f.measured} for key, f in found.figures.items()}
            rows.append(
                {**asdict(case), "flags": dict(case.flags), "died": found.died, "seconds": found.seconds, "figures": figures}
            )
    peaks = [row["figures"]["GPU memory, peak"] for row in rows if "GPU memory, peak" in row["figures"]]
    errors = sorted(abs(peak["planned"] / peak["measured"] - 1) for peak in peaks)
    summary: dict[str, Any] = {"cases": len(chosen), "run": len(rows), "died": sum(bool(row["died"]) for row in rows)}
    if errors:
        small = sum(peak["planned"] < peak["measured"] for peak in peaks)
        summary |= {"median error": statistics.median(errors), "p95 error": errors[int(0.95 * (len(errors) - 1))],
                    "largest error": errors[-1], "planned too small": small}  # fmt: skip
    return {"summary": summary, "rows": rows}


def tables(asked: argparse.Namespace) -> dict[str, Any]:
    """The published comparisons that one GPU can run."""
    from zerobook.tables import dialogue, one_device

    with tempfile.TemporaryDirectory() as name:
        where = bench(asked, Path(name))
        made = [one_device.run(where), dialogue.shape(where)]
    return {"summary": {table.letter: [line.here for line in table.lines] for table in made},
            "rows": [table.to_json() for table in made]}  # fmt: skip


PARITY = (
    ("eager", {"attn_implementation": "eager"}),
    ("sdpa", {"attn_implementation": "sdpa"}),
    ("flex_attention", {"attn_implementation": "flex_attention"}),
    ("sdpa, bf16", {"attn_implementation": "sdpa", "mixed_precision": "bf16"}),
    ("flash_attention_2, bf16", {"attn_implementation": "flash_attention_2", "mixed_precision": "bf16"}),
    ("flex_attention, bf16", {"attn_implementation": "flex_attention", "mixed_precision": "bf16"}),
    ("sdpa, fp16", {"attn_implementation": "sdpa", "mixed_precision": "fp16"}),
)
"""Trained alike, the first of them the reference."""
NEEDS = {"flash_attention_2": "flash_attn", "load_in_4bit": "bitsandbytes"}
STEPS = 8


def parity(asked: argparse.Namespace) -> dict[str, Any]:
    """Losses of the same steps, and how far each is from the first row's: the largest relative difference."""
    from importlib.util import find_spec

    from zerobook.errors import ZerobookError
    from zerobook.tables.trial import Arm, attempt

    rows: list[dict[str, Any]] = []
    until = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as name:
        materials = Materials(Path(name))
        _, model = models(materials, asked.scale == "tiny")["llama"]
        common = {"model_name_or_path": model, "train_file": materials.text, "cache_dir": materials.folder / "data",
                  "block_size": 256, "validation_split_percentage": 0, "per_device_train_batch_size": 4,
                  "max_train_steps": STEPS, "learning_rate": 1e-4}  # fmt: skip
        lora = {key: value for key, value in common.items() if key != "block_size"}
        lora |= {"max_seq_length": 256, "train_file": materials.pairs, "mixed_precision": "bf16"}
        runs = [(name, "causal_lm", common | flags) for name, flags in PARITY]
        runs += [("LoRA, bf16", "lora_finetune", lora), ("QLoRA, bf16", "lora_finetune", lora | {"load_in_4bit": "true"})]
        for words, recipe, flags in runs[: asked.limit]:
            print(words, flush=True)
            named = {*flags, *map(str, flags.values())}
            missing = [package for key, package in NEEDS.items() if key in named and not find_spec(package)]
            row: dict[str, Any] = {"name": words, "recipe": recipe}
            left = until - time.monotonic()
            if missing or left <= 0:
                row["not run"] = f"{missing[0]} is not installed" if missing else f"{SECONDS} s were over"
            else:
                try:
                    outcome = attempt(Arm.of("single", 1), recipe, flags, 0, left)
                    row |= {"losses": outcome.losses, "seconds a step": outcome.step, "peak": outcome.peak}
                except ZerobookError as error:
                    row["died"] = str(error)
            rows.append(row)
    rows.append({"name": "liger", "not run": "the recipes have no such option"})
    for like in ("causal_lm", "lora_finetune"):
        ran = [row for row in rows if row.get("recipe") == like and "losses" in row]
        for row in ran:
            pairs = zip(row["losses"], ran[0]["losses"], strict=True)
            row["from the first"] = max(abs(loss / reference - 1) for loss, reference in pairs)
    words = ("from the first", "not run", "died")
    return {"summary": {row["name"]: next(row[key] for key in words if key in row) for row in rows}, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"planner": planner, "tables": tables, "parity": parity}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=int, help="only so many cases")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import torch

    from zerobook.versions import versions

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here. With --device cpu the same runs go through on a CPU.")
    name = torch.cuda.get_device_name(0) if asked.device == "cuda" else "CPU"
    result = {"device": name, "date": str(date.today()), "versions": versions(), **commands[asked.command](asked)}
    out = asked.out or RESULTS / f"{asked.command}_{name.replace(' ', '_')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
