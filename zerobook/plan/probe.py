"""Run a recipe for a few steps, and measure the memory and the traffic of each rank in one of them.

    accelerate launch ... zerobook/plan/probe.py RESULT.json recipes/NAME.py [flags]

The recipe runs unchanged, but nothing is saved. Collectives are counted by wrapping torch.distributed before other modules
import it. A hook records everything else. Step `STEP` is measured, since the first steps are different: memory is still being
allocated, and ZeRO-3 has not yet recorded the order of the modules. (It records the order again after every forward pass
without a backward pass.) The step after it is timed, because inspecting every saved tensor takes longer than a GPU's forward
pass. Each rank writes its figures to ``RESULT.RANK.json``:

- bytes of live tensors by kind, between the backward pass and the optimizer step
- bytes of activations that autograd saves in the forward pass of the first micro-batch
- bytes sent by each collective
- seconds of a step
- on CUDA, the peaks of the allocator
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from zerobook.runlog.records import StepRecord
from zerobook.training.hooks import Hook, TrainerView

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

STEP = 4
# Environment variable with the path of the result file.
RESULT = "ZEROBOOK_PROBE_RESULT"

# Collective -> bytes that this rank sent in step `STEP`, and the number of calls.
SENT_BYTES: dict[str, float] = defaultdict(float)
CALLS: Counter[str] = Counter()
# A list, so that functions can change its element.
_IS_COUNTING = [False]

# Position and names of the argument whose bytes count.
_OUTPUT = (0, ("tensor", "output_tensor", "output", "tensor_list"))
_INPUT = (1, ("input", "input_tensor", "input_list"))
# Collective -> the argument that counts, and how many times a ring sends (N - 1)/N of it.
_COLLECTIVES = {
    "all_reduce": (_OUTPUT, 2),
    "all_gather_into_tensor": (_OUTPUT, 1),
    # torch 2.13's name of the one above
    "all_gather_single": (_OUTPUT, 1),
    "all_gather": (_OUTPUT, 1),
    "reduce_scatter_tensor": (_INPUT, 1),
    "reduce_scatter_single": (_INPUT, 1),
    "reduce_scatter": (_INPUT, 1),
    "broadcast": (_OUTPUT, 1),
    "reduce": (_OUTPUT, 1),
    "all_to_all_single": (_OUTPUT, 1),
}


# Return a function that counts a call of a collective of torch.distributed, and runs it.
def _wrap_collective(name: str, collective: Any) -> Any:
    (position, keywords), passes = _COLLECTIVES[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if _IS_COUNTING[0]:
            # The argument may be given by one of its names, which differ between collectives, or by its position.
            tensors = [kwargs[keyword] for keyword in keywords if keyword in kwargs] or [args[position]]
            groups = [argument for argument in (kwargs.get("group"), *args) if isinstance(argument, dist.ProcessGroup)]
            # Without a group, all ranks take part.
            group = groups[0] if groups else None
            record_collective(name, _count_bytes(tensors[0]), passes, dist.get_world_size(group))
        return collective(*args, **kwargs)

    return call


def _count_bytes(tensors: Any) -> int:
    if isinstance(tensors, list | tuple):
        return sum(map(_count_bytes, tensors))
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else 0


def record_collective(name: str, size_bytes: int, passes: int, ranks: int) -> None:
    """Record a collective of ``ranks``: in a ring, each rank sends ``passes`` x (N - 1)/N of ``size_bytes``."""
    if ranks > 1 and _IS_COUNTING[0]:
        SENT_BYTES[name] += size_bytes * passes * (ranks - 1) / ranks
        CALLS[name] += 1


def _reduce_bucket(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations other than its own
    """Run DDP's all-reduce through torch.distributed, where it is counted. Without this hook, DDP calls it from C++."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(group, bucket)


class Probe(Hook):
    """Hook that measures step `STEP`, times the step after it, writes the figures, and turns off saving."""

    def __init__(self) -> None:
        self.result = Path(os.environ[RESULT])
        self.measured: dict[str, Any] = {}
        self.began = 0.0

    def on_start(self, trainer: TrainerView) -> None:
        # Saving the trained weights takes time, and nobody needs them.
        trainer.save_results = False
        if hasattr(trainer.strategy.model, "register_comm_hook"):
            cast("DistributedDataParallel", trainer.strategy.model).register_comm_hook(None, _reduce_bucket)

    def before_step(self, trainer: TrainerView, step: int) -> None:
        if trainer.strategy.device.type == "cuda" and step == STEP:
            torch.cuda.reset_peak_memory_stats()
        _IS_COUNTING[0] = step == STEP
        if step == STEP + 1:
            self.began = _now(trainer)

    @contextmanager
    def around_loss(self, trainer: TrainerView, batch: dict[str, Any]) -> Iterator[None]:
        # Only the first micro-batch of step `STEP` is measured.
        if trainer.progress.step + 1 != STEP or "saved" in self.measured:
            yield
            return
        from zerobook.plan.trace import SavedTensors

        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        self.measured["batch"] = {key: list(value.shape) for key, value in tensors.items()}
        mask = tensors.get("attention_mask")
        self.measured["padded"] = mask is not None and not bool(mask.all())
        model = trainer.strategy.model
        # Weights, buffers and inputs are not activations, although autograd saves some of them. They are listed again for each
        # saved tensor, since sharded weights have other storages while they are gathered.
        with SavedTensors(lambda: [*model.parameters(), *model.buffers(), *tensors.values()]) as saved:
            yield
        self.measured["saved"] = saved.bytes

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        if trainer.progress.step + 1 == STEP:
            self.measured["held"] = trainer.strategy.memory()

    def after_step(self, trainer: TrainerView, record: StepRecord) -> None:
        _IS_COUNTING[0] = False
        if record.step == STEP:
            if trainer.strategy.device.type == "cuda":
                self.measured["cuda"] = {
                    "allocated": torch.cuda.max_memory_allocated(),
                    "reserved": torch.cuda.max_memory_reserved(),
                }
            self.measured.update(sent=dict(SENT_BYTES), calls=dict(CALLS), rank=trainer.strategy.rank)
        # The measurements slow down step `STEP`, so the step after it is timed.
        elif record.step == STEP + 1:
            self.measured["seconds"] = _now(trainer) - self.began
            self.result.with_suffix(f".{trainer.strategy.rank}.json").write_text(json.dumps(self.measured))


def _now(trainer: TrainerView) -> float:
    if trainer.strategy.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    os.environ[RESULT], recipe, *flags = sys.argv[1:]
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, _wrap_collective(name, getattr(dist, name)))
    sys.argv = [recipe, *flags, "--hooks", f"{Probe.__module__}:{Probe.__name__}"]
    sys.path.insert(0, os.path.dirname(recipe))
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    from zerobook.plan import probe  # the hook is imported from this module, not from __main__

    probe.main()
