"""Plan the configs of recipes/configs/*/ on their hardware, and write docs/reference/recipes.md from their headers.

usage: recipes_table.py                  write the page alone
       recipes_table.py --plan           first plan all configs and write the line Plan of their headers; about 15 minutes
       recipes_table.py --plan FILE...   first plan these
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources, parse
from zerobook.plan.hardware import Cluster, cluster
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.subprocess_launch import flags
from zerobook.utils.units import counted

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # scripts/ is not part of the installed package
PAGE = ROOT / "docs" / "reference" / "recipes.md"
PRICES = {"a100-80gb": 1.79, "a10g": 1.39, "a6000": 1.99}
"""GPU -> assumed US dollars an hour. `TEXT` names the sources."""
DATA = {
    "databricks/databricks-dolly-15k": (15_011, 3_250_000),
    "HuggingFaceH4/ultrachat_200k": (207_865, 286_000_000),
    "abisee/cnn_dailymail": (287_113, 0),
    "knkarthick/samsum": (14_732, 0),
}
"""Data -> (training samples, tokens). The tokens count only if samples are packed. They are assumed, for Llama's tokenizer."""
WITH_VALIDATION_SPLIT = ("abisee/cnn_dailymail", "knkarthick/samsum")
METHODS = {"causal_lm": "full", "seq2seq_chatbot": "full", "lora_finetune": "LoRA"}
TEXT = """\
# Configs for well-known models

<!-- written by scripts/recipes_table.py -->

Each row is a file in [recipes/configs/](../../recipes/configs). Its header has the launch line, the computation of the global
batch, and the source of the learning rate. Models and data come from the hub.

All figures are planned with [`zerobook plan`](../guides/plan.md). None was measured. Memory is the peak on one GPU. Time is the
time of the optimizer steps, if every row has the maximum length. It does not include loading, evaluations and checkpoints. The
number of steps is computed with about 3.25 million tokens in dolly-15k and 286 million in UltraChat (Llama's tokenizer). The
data of encoder-decoders is counted in samples.

Prices are assumptions, in US dollars a GPU hour: {prices}. The first is the on-demand price of RunPod's
Secure Cloud, from [a list of November 2026](https://github.com/datareceipts/data-receipts/tree/main/109-gpu-pricing). The
others are from [RunComfy's list](https://docs.runcomfy.com/about-billing), read in November 2026.

| config | model | method | strategy | hardware | global batch | GPU memory | time | price | status |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class RecipeFile:
    """A config in a folder of recipes/configs/, and what its header says."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.relative_to(ROOT / "recipes" / "configs").as_posix()

    @cached_property
    def header(self) -> dict[str, str]:
        from scripts.reference import header

        return header(self.file)

    @property
    def launch(self) -> list[str]:
        """The words of the launch line after ``accelerate launch``."""
        return shlex.split(self.header["Launch"])[2:]

    @property
    def recipe(self) -> str:
        return next(Path(word).stem for word in self.launch if word.endswith(".py"))

    @property
    def strategy(self) -> Path:
        return ROOT / self.launch[self.launch.index("--config_file") + 1]

    @property
    def model(self) -> Path:
        return ROOT / self.header["Model"].partition(",")[0]

    @cached_property
    def hardware(self) -> Cluster:
        match = re.fullmatch(
            r"(\d+) nodes? of (\d+) x ([\w-]+), (\w+) of host RAM a node(?:, (\w+) between nodes)?", self.header["Hardware"]
        )
        assert match, f"{self.name}: {self.header['Hardware']}"
        nodes, gpus, gpu, host, network = match.groups()
        return cluster(nodes=nodes, gpus=gpus, gpu=gpu, host_memory=host, interconnect=network)

    def read(self, **changes: Any) -> tuple[RecipeConfig, ConfigSources]:
        """Return the config and the sources of its values. ``changes`` are flags that override the file."""
        words = flags(changes)
        kind = recipe_class(str(ROOT / "recipes" / f"{self.recipe}.py"))
        config, sources, _ = parse(kind.config_class, ["--config", str(self.file), *words], data=False)
        return config, sources

    def global_batch(self, config: RecipeConfig) -> int:
        return config.per_device_train_batch_size * config.gradient_accumulation_steps * self.hardware.ranks

    def steps(self, config: RecipeConfig) -> int:
        """Return the number of optimizer steps, with the sizes of `DATA`."""
        (data,) = config.dataset_specs()
        samples, tokens = DATA[data.path]
        rows = tokens / config.row_length if config.packing else samples
        # Data with a validation split of its own gives no training rows to the held-out data.
        if data.path not in WITH_VALIDATION_SPLIT:
            rows *= 1 - config.validation_split_percentage / 100
        return math.ceil(rows * config.num_train_epochs / self.global_batch(config))

    def plan(self) -> Any:
        """Return what the planner computes for the config's strategy file and hardware."""
        from zerobook.plan.job import make_job
        from zerobook.plan.rows import plan_row
        from zerobook.plan.traced_job import TracedJob

        config, sources = self.read(model_name_or_path=self.model)
        kind = recipe_class(str(ROOT / "recipes" / f"{self.recipe}.py"))
        return plan_row(self.strategy, TracedJob.of(make_job(kind(config)), "cuda"), self.hardware, sources)

    def figures(self, row: Any) -> str:
        """Return the header's line ``Plan`` for the result of `plan`."""
        assert row.fits, f"{self.name}: {row.problems or row.exceeded}"
        config, _ = self.read()
        steps = self.steps(config)
        device = self.hardware.device
        hours = steps * row.time.step / 3600
        price = hours * self.hardware.ranks * PRICES[device.name]
        # Tight: a tenth of such runs need more memory than the GPU has.
        tight = " (tight)" if row.tight else ""
        memory = f"{row.memory.total / 1e9:.1f} of {device.memory / 1e9:.0f} GB{tight} a GPU"
        return f"{memory}; {steps:,} steps of {row.time.step:.1f} s: {duration(hours)}, ${price:,.2f}"

    def write(self, figures: str) -> None:
        """Replace the header's line ``Plan``."""
        line = f"# Plan:      {figures}"
        text = re.sub(r"^# Plan: .*$", lambda _: line, self.file.read_text(), count=1, flags=re.M)
        self.file.write_text(text)

    def table_row(self) -> list[str]:
        # The line is written by `figures`: MEMORY a GPU; STEPS: TIME, PRICE
        memory, _, rest = self.header["Plan"].partition(" a GPU; ")
        _, _, time_and_price = rest.partition(": ")
        time, _, price = time_and_price.partition(", ")
        config, _ = self.read()
        method = "QLoRA" if getattr(config, "load_in_4bit", False) else METHODS[self.recipe]
        status = self.header["Status"]
        if "Published" in self.header:
            status += f"; published: {self.header['Published']}"
        return [
            f"[{self.name}](../../recipes/configs/{self.name})",
            str(config.model_name_or_path),
            method,
            f"`{self.strategy.stem}`",
            self.hardware.name,
            str(self.global_batch(config)),
            memory,
            time,
            price,
            status,
        ]


def duration(hours: float) -> str:
    """Return a duration in minutes, or in hours from three hours on."""
    return counted(round(60 * hours), "minute") if hours < 3 else f"{hours:.1f} hours"


def files() -> list[RecipeFile]:
    """Return the configs for well-known models. They are in a folder for each family of models."""
    return [RecipeFile(file) for file in sorted((ROOT / "recipes" / "configs").glob("*/*.yaml"))]


def page() -> str:
    """Return the page as Markdown."""
    prices = ", ".join(f"{gpu} {price:.2f}" for gpu, price in PRICES.items())
    return TEXT.format(prices=prices) + "".join(f"| {' | '.join(file.table_row())} |\n" for file in files())


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] == "--plan":
        requested = [RecipeFile(Path(name).resolve()) for name in arguments[1:]]
        for file in requested or files():
            figures = file.figures(file.plan())
            file.write(figures)
            print(f"{file.name}: {figures}", flush=True)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
