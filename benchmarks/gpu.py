"""What a real GPU says, without a network; every subcommand ends within 8 minutes and writes one JSON.

    python benchmarks/gpu.py planner [--out benchmarks/results/planner_NAME.json]

planner   planned against measured peaks of CUDA's allocator, over configurations of three architectures, one GPU.

Models are made here with random weights, their tokenizer from the Python standard library's own source text. With
``--device cpu`` the same runs go through on a CPU, where there is no allocator's peak to compare.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 440
"""After which no further configuration is begun."""


@dataclass(frozen=True)
class Case:
    """A configuration: a model, a strategy file, and the recipe's flags."""

    model: str
    strategy: str
    rows: int
    flags: tuple[tuple[str, str], ...]


def models(folder: Path, scale: str) -> dict[str, tuple[str, Path]]:
    """name -> (recipe, folder of a model with random weights), of about 0.3 10^9 parameters, or tiny."""
    import torch
    import transformers

    tokenizer = _tokenizer(folder)
    tiny = scale == "tiny"
    special = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    width, layers, heads = (64, 2, 4) if tiny else (1024, 24, 16)
    sides = {f"{side}_{what}": number for side in ("encoder", "decoder")
             for what, number in (("layers", layers // 2), ("attention_heads", heads), ("ffn_dim", 4 * width))}  # fmt: skip
    configs = {
        "gpt2": ("causal_lm", transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, **special)),
        "llama": (
            "causal_lm",
            transformers.LlamaConfig(
                hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads // 2, **special,
            ),
        ),
        "bart": (
            "seq2seq_chatbot",
            transformers.BartConfig(d_model=width, decoder_start_token_id=2, max_position_embeddings=1024, **sides, **special),
        ),
    }  # fmt: skip
    made = {}
    for name, (recipe, config) in configs.items():
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        torch.manual_seed(0)
        target = folder / name
        kind.from_config(config).save_pretrained(target)
        tokenizer.save_pretrained(target)
        made[name] = (recipe, target)
    return made


def _tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer of the standard library's text, and in ``folder`` that text and pairs of it as data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    text = "\n".join(file.read_text(errors="ignore") for file in files)
    (folder / "text.txt").write_text(text)
    lines = [line for line in text.splitlines() if line.strip()]
    pairs = [
        {"source": " ".join(lines[i : i + 12]), "target": " ".join(lines[i + 12 : i + 18])} for i in range(0, 18 * 400, 18)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs) + "\n")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


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
    from zerobook.doctor import _config_class
    from zerobook.plan.command import _here
    from zerobook.plan.job import job
    from zerobook.plan.measure import measure

    start, here = time.monotonic(), _here("1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = models(folder, asked.scale)
        chosen = cases(list(made))[: asked.limit]
        for case in tqdm(chosen, unit=" runs"):
            if time.monotonic() - start > SECONDS:
                break
            recipe, model = made[case.model]
            flags = {"model_name_or_path": model, "per_device_train_batch_size": case.rows, "validation_split_percentage": 0}
            short = asked.scale == "tiny"
            if recipe == "seq2seq_chatbot":
                flags |= {"train_file": folder / "pairs.jsonl", "max_source_length": 64 if short else 256,
                          "max_target_length": 32 if short else 128, "pad_to_max_length": "true"}  # fmt: skip
            else:
                flags |= {"train_file": folder / "text.txt", "block_size": 64 if short else 512}
            flags |= {"cache_dir": folder / "data", **dict(case.flags)}
            line = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
            file = ROOT / "recipes" / f"{recipe}.py"
            config, sources, _ = parse(_config_class(str(file)), line)
            found = measure(ROOT / "accelerate_configs" / f"{case.strategy}.yaml", job(config), file, line, here, sources)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"planner": planner}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=int, help="only so many cases")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import torch

    from zerobook.loop import versions

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
