"""Runs a recipe under a byte budget that is enforced, times it, and saves nothing.

    accelerate launch ... zerobook/tables/capped.py RESULT.json BUDGET recipes/NAME.py [flags]

The budget is for the model, its states and its activations. On a GPU the allocator refuses what goes beyond it. On a CPU the
kernel does: RLIMIT_DATA counts a process's private writable memory, malloc is told to hand every larger block straight back,
and libraries and data are left out, by counting from where they are in memory. 0 is no budget.

Every rank writes ``RESULT.RANK.json``: seconds of each step and of the evaluation, each ended by waiting for the device, bytes
held at the seam of the last step; or what was refused.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

REFUSED = (
    "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror", "start new thread",
    "nullptr != pinned_buffer",
)  # fmt: skip
"""What a refused allocation is called by torch's CPU allocator, the kernel, CUDA's allocator, C++, Python, and DeepSpeed's
pinned buffers."""


def is_refusal(text: str) -> bool:
    """True where an allocation was refused to the run itself, and not to a compiler that it called."""
    said = text.lower()
    return any(word in said for word in REFUSED) and "error building extension" not in said


def limit(budget: int, model: torch.nn.Module) -> None:
    """Let this process have ``budget`` bytes, of which the model, all that it holds so far of them, takes its share."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / torch.cuda.get_device_properties(0).total_memory))
        return
    import resource

    gc.collect()
    weights = [t for p in model.parameters() for t in (p, getattr(p, "ds_tensor", None)) if t is not None]
    before = private() - sum(t.numel() * t.element_size() for t in weights)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget, hard))


def lift() -> None:
    """So that what was refused can still be told."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def private() -> int:
    """Bytes of private writable memory, as RLIMIT_DATA counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def watch(budget: int, found: dict[str, Any]) -> None:
    """Wrap what the recipe calls."""
    from transformers import PreTrainedModel

    from zerobook.loop import TrainingLoop

    load = PreTrainedModel.from_pretrained.__func__
    # mapped, the whole file counts as the process's own memory until the last view of it is gone
    PreTrainedModel.from_pretrained = classmethod(lambda cls, *given, **named: load(cls, *given, disable_mmap=True, **named))
    begin, run, step, evaluate = TrainingLoop.__init__, TrainingLoop.run, TrainingLoop._step, TrainingLoop.evaluate

    def beginning(self: Any, config: Any, sources: Any, strategy: Any, model: Any, *given: Any, **named: Any) -> None:
        if budget:
            limit(budget, model)
        begin(self, config, sources, strategy, model, *given, **named)

    def now(loop: Any) -> float:
        if loop.strategy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def running(self: Any) -> Any:
        apply = self.strategy.apply

        def applied(rate: Any) -> Any:
            found["held"] = self.strategy.memory()
            return apply(rate)

        self.strategy.apply = applied
        found["times"] = [now(self)]
        done = run(self)
        if self.strategy.device.type == "cuda":
            found["peak"] = torch.cuda.max_memory_allocated()
        return done

    def stepping(self: Any, *given: Any) -> None:
        step(self, *given)
        found["times"].append(now(self))

    def evaluating(self: Any) -> Any:
        start = now(self)
        result = evaluate(self)
        found["evaluation"] = now(self) - start
        found["result"] = {key: value for key, value in (result or {}).items() if key in ("loss", "metrics")}
        return result

    TrainingLoop.__init__ = beginning
    TrainingLoop.run, TrainingLoop._step, TrainingLoop.evaluate = running, stepping, evaluating
    TrainingLoop.save = lambda self: None


def main() -> None:
    result, budget, recipe, *flags = sys.argv[1:]
    found: dict[str, Any] = {}
    target = Path(result).with_suffix(f".{os.environ.get('RANK', 0)}.json")
    watch(int(budget), found)
    import zerobook.training.result
    import zerobook.training.run

    # what was trained is of no use to anybody
    zerobook.training.result.save_model = lambda *given, **named: None
    zerobook.training.run.leave = lambda code=0: None
    sys.argv = [recipe, *flags]
    sys.path.insert(0, os.path.dirname(recipe))
    try:
        runpy.run_path(recipe, run_name="__main__")
    except Exception as error:
        if not is_refusal(f"{type(error).__name__}: {error}"):
            raise
        lift()
        target.write_text(json.dumps({"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}))
        os._exit(3)  # without waiting for ranks that wait for this one
    target.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
