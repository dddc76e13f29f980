"""Run a recipe under an enforced budget of bytes, time it, and save nothing.

    accelerate launch ... benchmarks/published/capped.py RESULT.json BUDGET recipes/NAME.py [flags]

The budget is for the model, its states and its activations. On a GPU, the allocator refuses what exceeds it. On a CPU, the
kernel does: RLIMIT_DATA counts a process's private writable memory, malloc is set to return every larger block at once, and
libraries and data are left out, because counting starts when they are in memory. 0 means no budget.

Every rank writes ``RESULT.RANK.json``: seconds of each step and of the evaluation, each ended by waiting for the device,
and bytes held between the backward pass and the update of the last step; or the allocation that was refused.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from zerobook.runlog.records import EvaluationRecord, StepRecord
from zerobook.training.hooks import Hook, TrainerView

RESULT, BUDGET = "ZEROBOOK_CAPPED_RESULT", "ZEROBOOK_CAPPED_BUDGET"
"""Environment variables that the hook reads."""
REFUSED = (
    "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror", "start new thread",
    "nullptr != pinned_buffer",
)  # fmt: skip
"""Words for a refused allocation in the messages of torch's CPU allocator, the kernel, CUDA's allocator, C++, Python, and
DeepSpeed's pinned buffers."""


def is_refusal(text: str) -> bool:
    """Return whether an allocation was refused to the run itself, and not to a compiler that it called."""
    said = text.lower()
    return any(word in said for word in REFUSED) and "error building extension" not in said


def limit(budget: int, model: torch.nn.Module) -> None:
    """Limit this process to ``budget`` bytes more than it has without the model's weights, which count towards the budget."""
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
    """Remove the limit, so that the refusal can be reported."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def private() -> int:
    """Return the bytes of private writable memory, as RLIMIT_DATA counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def import_lazy() -> None:
    """Import what `Accelerator.prepare` imports, so that it does not count towards the budget."""
    importlib.import_module("peft")
    importlib.import_module("deepspeed.runtime.engine")


def own_memory(model: torch.nn.Module) -> None:
    """Move the weights into memory of this process.

    While they are mapped from a file, the whole file counts as the process's own memory until the last view of it is freed.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())  # a buffer can be a view, which keeps its base in memory


class Capped(Hook):
    """Hook that sets the budget before the strategy prepares the model, times the steps, and turns off saving."""

    def __init__(self) -> None:
        self.result, self.budget = result_file(), int(os.environ[BUDGET])
        self.found: dict[str, Any] = {}

    def before_prepare(self, trainer: TrainerView, model: torch.nn.Module) -> None:
        trainer.save_results = False  # the trained weights are not needed
        if self.budget:
            import_lazy()
            own_memory(model)
            limit(self.budget, model)

    def on_start(self, trainer: TrainerView) -> None:
        self.found["times"] = [_now(trainer)]

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        self.found["held"] = trainer.strategy.memory()

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        self.found["times"].append(_now(trainer))

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        self.found["evaluation"] = record.seconds
        self.found["result"] = {key: value for key, value in record.result.items() if key in ("loss", "metrics")}

    def on_end(self, trainer: TrainerView) -> None:
        if trainer.strategy.device.type == "cuda":
            self.found["peak"] = torch.cuda.max_memory_allocated()
        self.result.write_text(json.dumps(self.found))


def result_file() -> Path:
    """Return the file of this rank."""
    return Path(os.environ[RESULT]).with_suffix(f".{os.environ.get('RANK', 0)}.json")


def _now(trainer: TrainerView) -> float:
    if trainer.strategy.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    os.environ[RESULT], os.environ[BUDGET], recipe, *flags = sys.argv[1:]
    sys.argv = [recipe, *flags, "--hooks", f"{Capped.__module__}:{Capped.__name__}"]
    sys.path.insert(0, os.path.dirname(recipe))
    try:
        runpy.run_path(recipe, run_name="__main__")
    except Exception as error:
        if not is_refusal(f"{type(error).__name__}: {error}"):
            raise
        lift()
        result_file().write_text(json.dumps({"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}))
        os._exit(3)  # without waiting for ranks that wait for this one


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tables are not part of the installed package
    from benchmarks.published import capped  # the hook is imported from this module, not from __main__

    capped.main()
