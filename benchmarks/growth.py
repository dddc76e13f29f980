"""Growth of time and memory: with processes, length, micro-batch, data, the length of a run, and the size of a model.

    python benchmarks/growth.py [--out benchmarks/results/growth.json] [--only ranks length rows data run model]

ranks   1, 2 and 4 processes under DDP, the same rows for each
length  tokens of a row, from 64 to 1,024
rows    rows of a micro-batch, from 1 to 16
data    rows of the training data, from 10^4 to 10^6
run     99,000 steps of a very small model: step time and memory along the run, and resumes from its checkpoints
model   widths from 64 to 512: bytes of a checkpoint, and seconds of a save

Models are Llamas with random weights, in fp32, with one thread a process. Takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from array import array
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerobook.training.hooks import Hook, TrainerView

ROOT = Path(__file__).resolve().parents[1]
RESULT = "ZEROBOOK_GROWTH_RESULT"
"""Environment variable: the file of the result."""
EVERY = 100
"""Steps between two points of a long run."""


class Watch(Hook):
    """Hook that writes the time and the memory of rank 0."""

    def on_start(self, trainer: TrainerView) -> None:
        import psutil

        self.process = psutil.Process()
        self.until_training = time.time() - self.process.create_time()
        self.times = array("d")  # a list would grow by 32 bytes a step
        self.points: list[tuple[int, float, int]] = []
        self.tokens = 0

    def after_step(self, trainer: TrainerView, record: Any) -> None:
        self.times.append(time.perf_counter())
        self.tokens = record.tokens
        if len(self.times) % EVERY == 0:
            stretch = self.times[-EVERY:]
            middle = statistics.median(b - a for a, b in pairwise(stretch))
            self.points.append((record.step, middle, self.process.memory_info().rss))

    def on_end(self, trainer: TrainerView) -> None:
        if not trainer.strategy.is_main:
            return
        late = self.times[len(self.times) // 3 :]
        seconds = statistics.median(b - a for a, b in pairwise(late))
        saves = [e["seconds"] for e in _events(trainer.config.output_dir) if e["type"] == "checkpoint" and "seconds" in e]
        found = {
            "seconds": seconds, "tokens": self.tokens, "rss": self.process.memory_info().rss, "points": self.points,
            "until training": self.until_training, "saves": saves, "rows": len(trainer.data.train),
        }  # fmt: skip
        Path(os.environ[RESULT]).write_text(json.dumps(found))


def _events(output: str) -> list[dict[str, Any]]:
    from zerobook.runlog.jsonl import stream
    from zerobook.runlog.writer import EVENTS

    return list(stream(Path(output) / "runlog" / EVENTS))


class Setting:
    """A folder with models and data, and launches in it."""

    def __init__(self, folder: Path):
        sys.path.insert(0, str(ROOT))  # benchmarks are not part of the installed package
        from benchmarks.published.materials import Materials

        self.folder, self.made = folder, Materials(folder)

    def model(self, width: int, layers: int = 4) -> Path:
        from transformers import LlamaConfig

        config = LlamaConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=max(1, width // 16),
            num_key_value_heads=max(1, width // 16), max_position_embeddings=2048, **self.made.special,
        )  # fmt: skip
        return self.made.model(f"llama-{width}-{layers}", config)

    def run(self, name: str, strategy: str = "single", processes: int = 1, **flags: Any) -> dict[str, Any]:
        """Train, and return what `Watch` wrote."""
        from zerobook.utils import subprocess_launch

        result = self.folder / f"{name}.json"
        given = {
            "train_file": self.made.text, "cache_dir": self.folder / "data", "validation_split_percentage": 0,
            "logging_steps": 10, "learning_rate": 1e-4, "on_spike": "log", "hooks": f"{Path(__file__).resolve()}:Watch",
            "output_dir": self.folder / name,
        } | flags  # fmt: skip
        line = subprocess_launch.command(
            ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")], processes,
            ROOT / "recipes" / "causal_lm.py", *subprocess_launch.flags(given),
        )  # fmt: skip
        code, text = subprocess_launch.run(line, 3000, {RESULT: str(result)}, cwd=ROOT)
        if code:
            raise SystemExit(f"{name}: exit status {code}\n{text[-3000:]}")
        return json.loads(result.read_text())


def ranks(setting: Setting) -> list[dict[str, Any]]:
    found = []
    for count in (1, 2, 4):
        flags = {"model_name_or_path": setting.model(128), "block_size": 128, "per_device_train_batch_size": 4}
        ran = setting.run(f"ranks-{count}", "ddp" if count > 1 else "single", count, max_train_steps=40, **flags)
        found.append({"processes": count, "tokens/s": ran["tokens"] / ran["seconds"], "rss of rank 0": ran["rss"]})
    return found


def length(setting: Setting) -> list[dict[str, Any]]:
    found = []
    for tokens in (64, 128, 256, 512, 1024):
        flags = {"model_name_or_path": setting.model(128), "block_size": tokens, "per_device_train_batch_size": 2}
        ran = setting.run(f"length-{tokens}", max_train_steps=30, **flags)
        found.append({"tokens": tokens, "seconds a step": ran["seconds"], "rss": ran["rss"]})
    return found


def rows(setting: Setting) -> list[dict[str, Any]]:
    found = []
    for count in (1, 2, 4, 8, 16):
        flags = {"model_name_or_path": setting.model(128), "block_size": 128, "per_device_train_batch_size": count}
        ran = setting.run(f"rows-{count}", max_train_steps=30, **flags)
        found.append({"rows": count, "seconds a step": ran["seconds"], "rss": ran["rss"]})
    return found


def data(setting: Setting) -> list[dict[str, Any]]:
    found = []
    source = Path(setting.made.text).read_text()
    for power in (4, 5, 6):
        block, file = 16, setting.folder / f"text-{power}.txt"
        tokens = len(setting.made.tokenizer(source)["input_ids"])
        with open(file, "w") as text:
            for _ in range(-(-(10**power * block) // tokens)):
                text.write(source)
        flags = {"model_name_or_path": setting.model(32, 1), "block_size": block, "per_device_train_batch_size": 4}
        first = setting.run(f"data-{power}", max_train_steps=400, train_file=file, **flags)
        again = setting.run(f"data-{power}-again", max_train_steps=400, train_file=file, **flags)
        found.append(
            {
                "rows": first["rows"], "prepared and started, s": first["until training"],
                "started again, s": again["until training"], "seconds a step": again["seconds"], "rss": again["rss"],
            }
        )  # fmt: skip
    return found


def run(setting: Setting, steps: int = 99_000) -> dict[str, Any]:
    flags = {
        "model_name_or_path": setting.model(16, 1), "block_size": 16, "per_device_train_batch_size": 2,
        "save_steps": steps // 3, "output_dir": setting.folder / "run",
    }  # fmt: skip
    ran = setting.run("run", max_train_steps=steps, **flags)
    points = [(step, seconds, rss) for step, seconds, rss in ran["points"] if step > steps // 10]
    resumes = []
    for part in (1, 2, 3):
        saved = setting.folder / "run" / "checkpoints" / f"step-{part * (steps // 3):06d}"
        flags |= {"output_dir": setting.folder / f"resumed-{part}", "resume_from_checkpoint": saved}
        again = setting.run(f"resumed-{part}", max_train_steps=part * (steps // 3) + EVERY, **flags)
        resumes.append({"step": part * (steps // 3), "until training, s": again["until training"]})
    return {
        "steps": steps, "step, seconds, rss": points[:: max(1, len(points) // 300)], "resumes": resumes,
        "step time, growth": growth([(step, seconds) for step, seconds, _ in points]),
        "rss, growth": growth([(step, rss) for step, _, rss in points]),
    }  # fmt: skip


def model(setting: Setting) -> list[dict[str, Any]]:
    from zerobook.utils.host_memory import weight_bytes

    found = []
    for width in (64, 128, 256, 512):
        folder = setting.model(width)
        flags = {"model_name_or_path": folder, "block_size": 32, "per_device_train_batch_size": 1, "save_steps": 4}
        ran = setting.run(f"model-{width}", max_train_steps=12, **flags)
        saved = sorted((setting.folder / f"model-{width}" / "checkpoints").glob("step-*"))[-1]
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        found.append(
            {"parameters": weight_bytes(folder, "auto") // 4, "checkpoint": size, "save, s": statistics.median(ran["saves"])}
        )
    return found


def growth(points: list[tuple[int, float]]) -> float:
    """Return the growth over the points as a share of their median, by Theil and Sen's slope: the median of all slopes."""
    thin = points[:: max(1, len(points) // 150)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(thin) for b in thin[i + 1 :]]
    return statistics.median(slopes) * (thin[-1][0] - thin[0][0]) / statistics.median(value for _, value in thin)


MEASURES = {"ranks": ranks, "length": length, "rows": rows, "data": data, "run": run, "model": model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=[*MEASURES])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "growth.json")
    asked = parser.parse_args()
    from zerobook.utils.versions import versions

    found = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    found |= {"machine": platform.machine(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        setting = Setting(Path(name))
        for measure in asked.only:
            figures = MEASURES[measure](setting)
            found[measure] = {"date": str(date.today()), "versions": versions(), "figures": figures}
            print(measure, json.dumps(figures)[:2000], flush=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
