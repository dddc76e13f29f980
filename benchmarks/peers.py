"""The same finetuning by this project, TRL's SFTTrainer and transformers' Trainer, in turns, on CPUs.

    python benchmarks/peers.py [--peers .cache/peers] [--out benchmarks/results/peers.json] [--jobs lora full packed seq2seq]

The others run in an environment of their own, which is made if it is missing. Every job has the same model, data, rows, dtype
(fp32), optimizer and number of steps for all; runs alternate, `ROUNDS` each, one thread. TRL computes token accuracy and
entropy in every step; ``trl, bare`` is the same without them, and ``trl, compiled`` compiles it. ``zerobook, flags`` has
--torch_compile and --padding_free. Figures are medians over the steps after the first two.

lora     SmolLM2-135M-Instruct, LoRA r 16 on all linear layers, 4 x 128 tokens
full     SmolLM2-135M-Instruct, all weights, 2 x 128 tokens
packed   lora, with samples packed into rows of 256 tokens, 2 rows
seq2seq  a T5 of 20 million random weights, 8 x 64 to 64 tokens

Takes about 25 minutes on two cores. In ``seq2seq``, the other one is transformers' Seq2SeqTrainer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2", "datasets==5.2.0"]
STEPS, WARM_UP, ROUNDS = 10, 2, 2
"""Steps of a run; the first ones, which are not measured; runs of each arm."""
OURS, TRL = ("zerobook", "zerobook, flags"), ("trl", "trl, bare", "trl, compiled")
JOBS: dict[str, dict[str, Any]] = {
    "lora": {"rows": 4, "length": 128, "rate": 2e-4, "arms": (*OURS, *TRL, "trainer")},
    "full": {"rows": 2, "length": 128, "rate": 2e-5, "arms": (*OURS, *TRL, "trainer")},
    "packed": {"rows": 2, "length": 256, "rate": 2e-4, "arms": ("zerobook", "trl", "trl, bare")},
    "seq2seq": {"rows": 8, "length": 64, "rate": 1e-3, "arms": ("zerobook", "trainer")},
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORE = -100


class Steps:
    """The steps of a run: when each ended, its supervised tokens, and its loss."""

    def __init__(self) -> None:
        import psutil

        self.started = psutil.Process().create_time()
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []

    def ended(self) -> None:
        self.ends.append(time.time())

    def write(self, file: str) -> None:
        seconds = [b - a for a, b in pairwise(self.ends)]
        record = {
            "first step after": self.ends[0] - self.started, "seconds": seconds, "tokens": self.tokens[: len(self.ends)],
            "losses": self.losses, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        Path(file).write_text(json.dumps(record))


# --- this project
def zerobook(job: str, folder: Path, out: str, *, fast: bool) -> None:
    import torch

    from zerobook.config_sources import parse
    from zerobook.recipes.causal_lm import CausalLM
    from zerobook.recipes.lora_finetune import LoraFinetune
    from zerobook.recipes.seq2seq_chatbot import Seq2SeqChatbot
    from zerobook.training.hooks import Hook
    from zerobook.training.run import train

    torch.set_num_threads(1)
    facts, steps = JOBS[job], Steps()

    class Watch(Hook):
        def after_step(self, trainer: Any, record: Any) -> None:
            steps.ended()
            steps.tokens.append(record.tokens)

        def on_log(self, trainer: Any, records: Sequence[Any]) -> None:
            steps.losses += [record.loss for record in records]

        def on_start(self, trainer: Any) -> None:
            trainer.save_results = False

    flags: dict[str, Any] = {
        "model_name_or_path": folder / ("t5" if job == "seq2seq" else "smollm2"), "train_file": folder / f"{job}.jsonl",
        "cache_dir": folder / "data", "validation_split_percentage": 0, "per_device_train_batch_size": facts["rows"],
        "max_train_steps": STEPS, "learning_rate": facts["rate"], "logging_steps": 10, "lr_scheduler_type": "constant",
        "warmup_ratio": 0, "output_dir": tempfile.mkdtemp(dir=folder), "on_spike": "log",
    }  # fmt: skip
    recipe: Any = {"full": CausalLM, "seq2seq": Seq2SeqChatbot}.get(job, LoraFinetune)
    if job == "seq2seq":
        flags |= {"max_source_length": 64, "max_target_length": 64}
    elif job == "full":
        flags |= {"block_size": facts["length"], "format": "prompt_completion"}
    else:
        flags |= {"max_seq_length": facts["length"], "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0}
        flags |= {"packing": "true"} if job == "packed" else {}
    flags |= {"torch_compile": "true", "padding_free": "true"} if fast else {}
    config, sources, _ = parse(recipe.config_class, [w for key, value in flags.items() for w in (f"--{key}", str(value))])
    train(recipe(config), sources=sources, hooks=[Watch()])
    steps.write(out)


# --- the others
def counting(collate: Any, steps: Steps, *, shifted: bool) -> Any:
    """Return ``collate`` that also counts the supervised tokens of each batch."""

    def collated(rows: Any) -> Any:
        batch = collate(rows)
        labels = batch["labels"][:, 1:] if shifted else batch["labels"]
        steps.tokens.append(int((labels != IGNORE).sum()))
        return batch

    return collated


def watching(steps: Steps) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.ended()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                steps.losses.append(float(logs["loss"]))

    return Watch()


def common(job: str, folder: Path) -> dict[str, Any]:
    facts = JOBS[job]
    return {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": facts["rows"], "max_steps": STEPS,
        "learning_rate": facts["rate"], "lr_scheduler_type": "constant", "logging_steps": 10, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "bf16": False, "dataloader_pin_memory": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "optim": "adamw_torch_fused", "weight_decay": 0.0, "seed": 42,
    }  # fmt: skip


def trl(job: str, folder: Path, out: str, *, bare: bool, compiled: bool) -> None:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    steps, facts = Steps(), JOBS[job]

    class Bare(SFTTrainer):
        """SFTTrainer with the loss of its base class: no accuracy and no entropy."""

        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            return Trainer.compute_loss(self, model, inputs | {"use_cache": False}, **options)

        def log(self, *args: Any, **options: Any) -> None:
            Trainer.log(self, *args, **options)

    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder / "smollm2", dtype=torch.float32)
    data = load_dataset("json", data_files=str(folder / f"{job}.jsonl"), split="train", cache_dir=str(folder / "hf"))
    config = SFTConfig(**common(job, folder), max_length=facts["length"], packing=job == "packed", torch_compile=compiled)
    adapters = None if job == "full" else LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
    kind = Bare if bare else SFTTrainer
    trainer = kind(
        model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=adapters, callbacks=[watching(steps)]
    )
    trainer.data_collator = counting(trainer.data_collator, steps, shifted=True)
    trainer.train()
    steps.write(out)


def trainer(job: str, folder: Path, out: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    torch.set_num_threads(1)
    steps, facts = Steps(), JOBS[job]
    seq2seq = job == "seq2seq"
    name = folder / ("t5" if seq2seq else "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(name)
    kind = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model = kind.from_pretrained(name, dtype=torch.float32)
    if job == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS))

    def encoded(pair: dict[str, str]) -> dict[str, list[int]]:
        if seq2seq:
            source = tokenizer(pair["source"], truncation=True, max_length=64)["input_ids"]
            target = tokenizer(pair["target"], truncation=True, max_length=63)["input_ids"] + [tokenizer.eos_token_id]
            return {"input_ids": source, "labels": target}
        prompt = tokenizer(pair["prompt"])["input_ids"]
        ids = (prompt + tokenizer(pair["completion"])["input_ids"] + [tokenizer.eos_token_id])[: facts["length"]]
        labels = [IGNORE] * len(prompt) + ids[len(prompt) :]
        return {"input_ids": ids, "labels": labels[: len(ids)]}

    pairs = [json.loads(line) for line in (folder / f"{job}.jsonl").read_text().splitlines()]
    data = Dataset.from_list([encoded(pair) for pair in pairs])
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    made = Seq2SeqTrainer(
        model, args=Seq2SeqTrainingArguments(**common(job, folder)), train_dataset=data, processing_class=tokenizer,
        data_collator=counting(collate, steps, shifted=not seq2seq), callbacks=[watching(steps)],
    )  # fmt: skip
    made.train()
    steps.write(out)


# --- materials and the driver
def prepare(folder: Path) -> None:
    """Write the models and the data: completions of code of the Python standard library, and pairs."""
    import torch
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    from benchmarks.published.materials import Materials
    from zerobook.data import embedded

    made = Materials(folder)
    (folder / "smollm2").symlink_to(embedded.locate_model("embedded:smollm2"))
    lines = [line for line in Path(made.text).read_text().splitlines() if line.strip()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    for job, facts in JOBS.items():  # as many samples as a run has rows, and none is cut: each is seen once, whole
        count, index, kept = facts["rows"] * STEPS * (4 if job == "packed" else 1), 0, []
        names = ("source", "target") if job == "seq2seq" else ("prompt", "completion")
        while len(kept) < count:
            start, size, index = 10 * index, 2 + index * 7 % 4, index + 1
            pair = "\n".join(lines[start : start + size]) + "\n", "\n".join(lines[start + size : start + 2 * size])
            if 40 < len(tokenizer("".join(pair))["input_ids"]) < facts["length"] - 4:
                kept.append(json.dumps(dict(zip(names, pair, strict=True))))
        (folder / f"{job}.jsonl").write_text("\n".join(kept) + "\n")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(made.tokenizer), d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8, pad_token_id=2,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    made.tokenizer.save_pretrained(folder / "t5")


def environment(folder: Path) -> Path:
    """Return the Python of the others' environment, which is made if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} (about 2 minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        import torch

        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={torch.__version__.partition('+')[0]}"], check=True)
        subprocess.run([*install, *PACKAGES, "psutil"], check=True)
    return python


def measured(job: str, arm: str, python: Path, folder: Path) -> dict[str, Any]:
    """Run an arm of a job once, in a process of its own. Return what it wrote."""
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    ours = arm in OURS
    line = [str(sys.executable if ours else python), __file__, "--arm", arm, job, str(folder), str(out)]
    given = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    given["PYTHONPATH"] = str(ROOT) if ours else ""
    ran = subprocess.run(line, env=given, capture_output=True, text=True, timeout=900, check=False)
    if not out.exists():
        raise SystemExit(f"{job}, {arm}: exit status {ran.returncode}\n{(ran.stdout + ran.stderr)[-3000:]}")
    return json.loads(out.read_text())


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all rounds of an arm."""
    seconds = [s for run in runs for s in run["seconds"][WARM_UP - 1 :]]
    tokens = [t for run in runs for t in run["tokens"]]
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "supervised tokens/s": round(statistics.mean(tokens) / middle, 1), "seconds a step": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)], "tokens a step": round(statistics.mean(tokens), 1),
        "first step after, s": round(statistics.median(run["first step after"] for run in runs), 1),
        "peak memory, MB": round(statistics.median(run["peak"] for run in runs) / 1e6),
        "mean loss": round(statistics.mean(loss for run in runs for loss in run["losses"]), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS])
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache" / "peers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    known, rest = parser.parse_known_args()
    if known.arm:
        job, folder, out = rest
        if known.arm in OURS:
            zerobook(job, Path(folder), out, fast=known.arm == "zerobook, flags")
        elif known.arm == "trainer":
            trainer(job, Path(folder), out)
        else:
            trl(job, Path(folder), out, bare=known.arm != "trl", compiled=known.arm == "trl, compiled")
        return
    sys.path.insert(0, str(ROOT))
    from zerobook.utils.versions import versions

    python = environment(known.peers)
    found = json.loads(known.out.read_text()) if known.out.exists() else {}
    found |= {"machine": platform.machine(), "cores": os.cpu_count(), "packages": PACKAGES, "rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for job in known.jobs:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in JOBS[job]["arms"]}
            for _ in range(ROUNDS):
                for arm, records in runs.items():
                    records.append(measured(job, arm, python, folder))
            arms = {arm: summary(records) for arm, records in runs.items()}
            found[job] = {"date": str(date.today()), "versions": versions(), "arms": arms}
            print(job, json.dumps(arms, indent=1), flush=True)
            known.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
