"""Run a recipe for two steps and record the dtypes of its tensors, read from the live objects.

    accelerate launch ... benchmarks/published/dtypes.py RESULT.json accelerate|zerobook recipes/NAME.py [flags]

``accelerate`` passes the model to ``Accelerator.prepare`` as it was loaded; ``zerobook`` prepares it as the recipes do.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from zerobook.config import RecipeConfig
from zerobook.runlog.records import StepRecord
from zerobook.strategy.fsdp import FullyShardedStrategy
from zerobook.training.hooks import Hook, TrainerView

RESULT, HOW = "ZEROBOOK_DTYPES_RESULT", "ZEROBOOK_DTYPES_HOW"
"""Environment variables that the hook reads."""
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def names(tensors: Iterable[torch.Tensor]) -> str:
    """Return the dtypes of the floating-point tensors among ``tensors``, ``-`` if there are none."""
    found = {SHORT.get(t.dtype, str(t.dtype)) for t in tensors if t.is_floating_point() and t.numel() > 1}
    return ", ".join(sorted(found)) or "-"


class AsLoaded(FullyShardedStrategy):
    """FSDP2 without fp32 master weights, as accelerate alone prepares a model."""

    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.model, self.optimizer = self.accelerator.prepare(model, self._build_optimizer(model, config))


class Types(Hook):
    """Hook that reads the dtypes, writes them on rank 0, and turns off saving."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def before_prepare(self, trainer: TrainerView, model: nn.Module) -> None:
        trainer.save_results = False
        self.found["loaded"] = names(getattr(p, "ds_tensor", p) for p in model.parameters())  # ZeRO-3 holds parts already
        strategy = trainer.strategy
        if os.environ[HOW] == "accelerate" and isinstance(strategy, FullyShardedStrategy):
            trainer.strategy = AsLoaded(strategy.accelerator, strategy.plan)

    def on_start(self, trainer: TrainerView) -> None:
        linear = next(m for m in trainer.strategy.model.modules() if isinstance(m, nn.Linear))
        linear.register_forward_hook(lambda module, given, out: self.found.update(compute=names([out])))
        master = trainer.strategy.describe()["master_dtype"]
        self.found["prepared"] = master.replace("float32", "fp32").replace("bfloat16", "bf16")

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        self.found["gradients"] = names(trainer.strategy.live_tensors()["gradients"])

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        self.found["moments"] = names(trainer.strategy.live_tensors()["optimizer"])

    def on_end(self, trainer: TrainerView) -> None:
        if trainer.strategy.is_main:
            Path(os.environ[RESULT]).write_text(json.dumps(self.found))


def main() -> None:
    os.environ[RESULT], os.environ[HOW], recipe, *flags = sys.argv[1:]
    sys.argv = [recipe, *flags, "--hooks", f"{Types.__module__}:{Types.__name__}"]
    sys.path.insert(0, os.path.dirname(recipe))
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tables are not part of the installed package
    from benchmarks.published import dtypes  # the hook is imported from this module, not from __main__

    dtypes.main()
