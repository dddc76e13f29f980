"""Runs a recipe for two steps and writes down the types of its numbers, read from the live objects.

    accelerate launch ... zerobook/tables/dtypes.py RESULT.json accelerate|zerobook recipes/NAME.py [flags]

``accelerate`` hands the model to ``Accelerator.prepare`` as it was loaded; ``zerobook`` prepares it as the recipes do.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def names(tensors: Iterable[torch.Tensor]) -> str:
    """The types of floating-point numbers among ``tensors``, ``-`` where there are none."""
    found = {SHORT.get(t.dtype, str(t.dtype)) for t in tensors if t.is_floating_point() and t.numel() > 1}
    return ", ".join(sorted(found)) or "-"


def watch(plain: bool, found: dict[str, str]) -> None:
    """Wrap what the recipe calls."""
    from zerobook.loop import TrainingLoop
    from zerobook.strategy import Strategy

    begin, run = TrainingLoop.__init__, TrainingLoop.run

    def beginning(self: Any, config: Any, sources: Any, strategy: Any, model: Any, *given: Any, **named: Any) -> None:
        found["loaded"] = names(getattr(p, "ds_tensor", p) for p in model.parameters())  # ZeRO-3 holds parts already
        begin(self, config, sources, strategy, model, *given, **named)

    def running(self: Any) -> Any:
        strategy, apply = self.strategy, self.strategy.apply
        linear = next(m for m in strategy.model.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(lambda module, given, out: found.update(compute=names([out])))
        found["prepared"] = strategy.describe()["master_dtype"].replace("float32", "fp32").replace("bfloat16", "bf16")

        def applied(rate: Any) -> Any:
            found["gradients"] = names(strategy.held()["gradients"])
            norm = apply(rate)
            found["moments"] = names(t for state in strategy._states() for t in state.values() if isinstance(t, torch.Tensor))
            return norm

        strategy.apply = applied
        return run(self)

    def prepared(self: Any, model: Any, config: Any, total_steps: int) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.model, self.optimizer = self.accelerator.prepare(model, self._build_optimizer(model, config))

    TrainingLoop.__init__, TrainingLoop.run = beginning, running
    TrainingLoop.save = lambda self: None
    if plain:
        Strategy.prepare = prepared


def main() -> None:
    result, how, recipe, *flags = sys.argv[1:]
    found: dict[str, str] = {}
    watch(how == "accelerate", found)
    import zerobook.recipe

    zerobook.recipe.save_model = lambda *given, **named: None
    zerobook.recipe.leave = lambda code=0: None
    sys.argv = [recipe, *flags]
    sys.path.insert(0, os.path.dirname(recipe))
    runpy.run_path(recipe, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
