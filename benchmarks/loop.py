"""Cost of the training loop: a recipe's run against loops that do less, step by step in turns, on the same model.

    python benchmarks/loop.py [--out benchmarks/results/loop.json] [--steps 60]

compute     forward pass, loss, backward pass, clipping and AdamW, on batches in memory, without a wrapper
+ wrapper   the same through DDP or FSDP2
+ data      the same with a DataLoader
accelerate  the loop of accelerate's documentation, with its DataLoader, backward, clipping and optimizer; the loss is read
            every 10 steps
recipe      the recipe's run, with its spike monitor, runlog, watch of the ranks and log points every 10 steps

The model is a tiny Llama (hidden size 64, 4 layers), 4 rows of 64 tokens, fp32, one thread a rank: compute is small, so that
differences between loops show. Every round runs each loop for one step, in another order each time. Differences are medians
over rounds of pairs of one round. Counts do not depend on other programs: Python and C calls, times that the host reads a
tensor, collectives and the bytes of their buffers (not those that a DTensor makes by itself), and memory blocks that Python
holds more after a step than before (a mean of 5 steps). Takes about three minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerobook.data.batch_loader import BatchLayout, BatchLoader
from zerobook.data.collate import to_device
from zerobook.data.sampler import SampleOrder
from zerobook.objective import NextToken
from zerobook.training.hooks import Hook, TrainerView

ROOT = Path(__file__).resolve().parents[1]
RESULT, STEPS = "ZEROBOOK_LOOP_RESULT", "ZEROBOOK_LOOP_STEPS"
"""Environment variables: the file of the result, and the number of measured rounds."""
WARM_UP = 12
LOGGED_EVERY = 10
ROWS, LENGTH = 4, 64
BLOCKS_OVER = 5
"""Steps over which kept blocks of memory are counted."""
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}
"""Strategy file -> processes."""


class Floor(Hook):
    """Hook that runs one step of every other loop after each step of the recipe."""

    def on_start(self, trainer: TrainerView) -> None:
        strategy = trainer.strategy
        self.trainer, self.rounds = trainer, int(os.environ[STEPS])
        trainer.save_results = False
        self.model, self.optimizer = strategy.model, getattr(strategy.optimizer, "optimizer", strategy.optimizer)
        self.objective, self.clipped = NextToken(), trainer.config.max_grad_norm
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.stored = [batch for batch, _ in zip(self._batches(), range(16), strict=False)]
        self.streams = {name: self._batches() for name in ("+ data", "accelerate")}
        self.pending: list[torch.Tensor] = []
        self.loops: dict[str, Callable[[], object]] = {
            "+ wrapper": lambda: self.step(self.model, self.stored[self.number % 16]),
            "+ data": lambda: self.step(self.model, next(self.streams["+ data"])),
            "accelerate": self.accelerate,
        }
        plain = strategy.unwrapped
        if not strategy.shards_parameters:
            self.loops = {"compute": lambda: self.step(plain, self.stored[self.number % 16])} | self.loops
        self.seconds: dict[str, list[float]] = {name: [] for name in ("recipe", *self.loops)}
        self.number, self.left = 0, time.perf_counter()

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yield batches of this rank without end, by a DataLoader."""
        trainer, part = self.trainer, self.trainer.data.train
        layout = BatchLayout(world_size=trainer.strategy.world_size, rank=trainer.strategy.rank, micro=ROWS)
        while True:
            order = SampleOrder(part.sizes, seed=1, shuffle=True)
            for _, batches in BatchLoader(part, order, layout, trainer.collate, end=len(part) // 8 * 8):
                yield from batches

    def step(self, model: Any, batch: dict[str, Any]) -> None:
        loss = self.objective.loss(model, to_device(batch, self.trainer.strategy.device))
        (loss / (ROWS * LENGTH)).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, self.clipped)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accelerate(self) -> None:
        accelerator, optimizer = self.trainer.strategy.accelerator, self.trainer.strategy.optimizer
        with accelerator.accumulate(self.model):
            loss = self.objective.loss(self.model, next(self.streams["accelerate"])) / (ROWS * LENGTH)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(self.trained, self.clipped)
            optimizer.step()
            optimizer.zero_grad()
        self.pending.append(loss.detach())
        if len(self.pending) == LOGGED_EVERY:
            torch.stack(self.pending).tolist()
            self.pending.clear()

    def after_step(self, trainer: TrainerView, record: Any) -> None:
        now = time.perf_counter()
        if self.number >= WARM_UP:
            self.seconds["recipe"].append(now - self.left)
        names = [*self.loops]
        turned = self.number % len(names)
        for name in names[turned:] + names[:turned]:
            if trainer.strategy.world_size > 1:
                trainer.strategy.barrier()  # no loop pays for a rank that another loop has delayed
            begun = time.perf_counter()
            self.loops[name]()
            if self.number >= WARM_UP:
                self.seconds[name].append(time.perf_counter() - begun)
        self.number += 1
        if trainer.strategy.world_size > 1:
            trainer.strategy.barrier()
        self.left = time.perf_counter()

    def on_end(self, trainer: TrainerView) -> None:
        counts = {name: counted(loop) for name, loop in self.loops.items()}
        if trainer.strategy.is_main:
            Path(os.environ[RESULT]).write_text(json.dumps({"seconds": self.seconds, "counts": counts}))


class Counted(Hook):
    """Hook that counts what one step of the recipe does, from the end of a step to the end of the next, between log points."""

    STEP = 27

    def on_start(self, trainer: TrainerView) -> None:
        trainer.save_results = False
        self.counter = Counter()
        self.blocks = 0

    def after_step(self, trainer: TrainerView, record: Any) -> None:
        if record.step == self.STEP - BLOCKS_OVER - 1:
            self.blocks = sys.getallocatedblocks()
        if record.step == self.STEP - 1:
            self.blocks = sys.getallocatedblocks() - self.blocks
        if record.step == self.STEP:
            self.counter.start()
        if record.step == self.STEP + 1:
            found = self.counter.stop() | {"blocks kept": self.blocks / BLOCKS_OVER}
            if trainer.strategy.is_main:
                Path(os.environ[RESULT]).write_text(json.dumps(found))


class Counter:
    """Counts calls and reads of tensors between `start` and `stop`."""

    def start(self) -> None:
        self.operations = Operations()
        self.operations.__enter__()
        self.profile = cProfile.Profile()
        self.profile.enable()

    def stop(self) -> dict[str, int]:
        self.profile.disable()
        self.operations.__exit__(None, None, None)
        seen = self.operations
        calls = pstats.Stats(self.profile).total_calls - 3 * seen.count  # the mode's own
        return {"calls": calls, "reads": seen.reads, "collectives": seen.collectives, "bytes": seen.bytes}


class Operations(TorchDispatchMode):
    """Counter of operations, of those by which the host reads a tensor, and of collectives with their bytes."""

    count = reads = collectives = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func._schema.name
        self.reads += name in ("aten::_local_scalar_dense", "aten::is_nonzero")
        if name[:6] == "c10d::":
            self.collectives += 1
            # the whole buffer: all-gather has it as output, reduce-scatter as input
            sizes = [sum(tensor.nbytes for tensor in tree_leaves(arg) if isinstance(tensor, torch.Tensor)) for arg in args]
            self.bytes += max(sizes)
        return func(*args, **(kwargs or {}))


def counted(loop: Callable[[], object]) -> dict[str, float]:
    """Return the counts of one step of a loop."""
    counter = Counter()
    loop()
    blocks = sys.getallocatedblocks()
    for _ in range(BLOCKS_OVER):
        loop()
    blocks = sys.getallocatedblocks() - blocks
    counter.start()
    loop()
    return counter.stop() | {"blocks kept": blocks / BLOCKS_OVER}


def launched(folder: Path, file: str, processes: int, hook: str, steps: int) -> dict[str, Any]:
    """Run the recipe under a strategy file with a hook of this file. Return what the hook wrote."""
    from transformers import LlamaConfig

    sys.path.insert(0, str(ROOT))  # benchmarks are not part of the installed package
    from benchmarks.published.materials import Materials
    from zerobook.utils import subprocess_launch

    made = Materials(folder)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, **made.special
    )
    flags = {
        "model_name_or_path": made.model("llama", config), "train_file": made.text, "cache_dir": folder / "data",
        "block_size": LENGTH, "per_device_train_batch_size": ROWS, "validation_split_percentage": 0,
        "max_train_steps": WARM_UP + steps, "logging_steps": LOGGED_EVERY, "learning_rate": 1e-4,
        "hooks": f"{Path(__file__).resolve()}:{hook}", "output_dir": folder / f"{file}-{hook}",
    }  # fmt: skip
    result = folder / f"{file}-{hook}.json"
    line = subprocess_launch.command(
        ["--config_file", str(ROOT / "accelerate_configs" / f"{file}.yaml")], processes, ROOT / "recipes" / "causal_lm.py",
        *subprocess_launch.flags(flags),
    )  # fmt: skip
    code, text = subprocess_launch.run(line, 600, {RESULT: str(result), STEPS: str(steps)}, cwd=ROOT)
    if code:
        raise SystemExit(f"{file}: exit status {code}\n{text[-3000:]}")
    return json.loads(result.read_text())


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the median of each loop, and of the differences within a round, in ms, with their quartiles."""

    def spread(values: list[float]) -> dict[str, float]:
        low, middle, high = statistics.quantiles([1000 * v for v in values], n=4)
        return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}

    pairs = [("+ wrapper", "compute"), ("+ data", "+ wrapper"), ("accelerate", "+ data"), ("recipe", "+ data"),
             ("recipe", "accelerate")]  # fmt: skip
    differences = {
        f"{one} - {other}": spread([a - b for a, b in zip(seconds[one], seconds[other], strict=True)])
        for one, other in pairs
        if one in seconds and other in seconds
    }
    return {"ms": {name: spread(values) for name, values in seconds.items()}, "ms more": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="measured rounds, at least 30")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    asked = parser.parse_args()
    from zerobook.utils.versions import versions

    found: dict[str, Any] = {"date": str(date.today()), "machine": platform.machine(), "cores": os.cpu_count(),
                             "versions": versions(), "rounds": asked.steps, "strategies": {}}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        for file in asked.strategies:
            processes = STRATEGIES[file]
            raw = launched(Path(name), file, processes, "Floor", asked.steps)
            counts = raw["counts"] | {"recipe": launched(Path(name), file, processes, "Counted", 30)}
            found["strategies"][file] = {"processes": processes, **summary(raw["seconds"]), "counts": counts}
            print(file, json.dumps(found["strategies"][file], indent=1), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
