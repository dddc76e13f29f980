"""Runs a recipe for a few steps and writes down what its ranks really hold and send in one of them.

    accelerate launch ... zerobook/plan/probe.py RESULT.json recipes/NAME.py [flags]

The recipe runs unchanged, but nothing is saved; what it calls is watched from outside: collectives by wrapping
torch.distributed before anything imports it, the rest around the loop's own methods. Step `STEP` is measured: allocations have
settled by then, and so has the order of modules that ZeRO-3 learns anew after every forward pass without a backward one. The
step after it is timed: a look at every saved tensor takes longer than a GPU's forward pass. Every rank's figures go to
``RESULT.RANK.json``: bytes of live tensors by kind between backward pass and step, of activations saved by autograd in the
first micro-batch's forward pass, bytes sent by each collective, seconds, and on CUDA the allocator's peaks.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEP = 4

SENT: Counter = Counter()
CALLS: Counter = Counter()
_COUNTING = [False]


def _size(*tensors: Any) -> int:
    flat = [t for part in tensors for t in (part if isinstance(part, list | tuple) else [part])]
    return sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))


# name -> (the argument whose bytes count, how many times a ring sends (N - 1)/N of them)
_LAWS = {
    "all_reduce": (0, 2),
    "all_gather_into_tensor": (0, 1),
    "all_gather_single": (0, 1),  # what torch 2.13 calls the one above
    "all_gather": (0, 1),
    "reduce_scatter_tensor": (1, 1),
    "reduce_scatter_single": (1, 1),
    "reduce_scatter": (1, 1),
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "all_to_all_single": (0, 1),
}
_NAMES = {0: ("tensor", "output_tensor", "output", "tensor_list"), 1: ("input", "input_tensor", "input_list")}


def _watched(name: str, inner: Any) -> Any:
    place, worth = _LAWS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if _COUNTING[0]:
            given = args[place] if len(args) > place else next(kwargs[key] for key in _NAMES[place] if key in kwargs)
            group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
            note(name, _size(given), worth, dist.get_world_size(group))
        return inner(*args, **kwargs)

    return call


def note(name: str, size: int, worth: int, ranks: int) -> None:
    """A collective of ``ranks`` on ``size`` bytes: a ring sends ``worth`` x (N - 1)/N of them from each."""
    if ranks > 1 and _COUNTING[0]:
        SENT[name] += size * worth * (ranks - 1) / ranks
        CALLS[name] += 1


def watch_collectives() -> None:
    for name in [name for name in _LAWS if hasattr(dist, name)]:
        setattr(dist, name, _watched(name, getattr(dist, name)))


def _bucket(group, bucket):  # torch refuses annotations other than its own
    """DDP's own all-reduce, which it calls from C++; this one goes through torch.distributed, where it is watched."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(group, bucket)


@contextmanager
def _counting() -> Any:
    _COUNTING[0] = True
    try:
        yield
    finally:
        _COUNTING[0] = False


def watch_loop(result: Path) -> None:
    """Measure the loop's step `STEP`, time the next one, write both down, and save nothing."""
    import zerobook.training.result
    from zerobook.loop import TrainingLoop
    from zerobook.plan.trace import Saved

    step, forward, run = TrainingLoop._step, TrainingLoop._summed_loss, TrainingLoop.run
    found: dict[str, Any] = {}

    def running(self: Any) -> Any:
        if hasattr(self.strategy.model, "register_comm_hook"):
            self.strategy.model.register_comm_hook(None, _bucket)
        apply = self.strategy.apply

        def applied(rate: Any) -> Any:
            if self.progress.step + 1 == STEP:
                found["held"] = self.strategy.memory()
            return apply(rate)

        self.strategy.apply = applied
        return run(self)

    def stepping(self: Any, *given: Any) -> None:
        on_gpu = self.strategy.device.type == "cuda"
        if self.progress.step + 1 == STEP:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            with _counting():
                step(self, *given)
            if on_gpu:
                found["cuda"] = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            found.update(sent=dict(SENT), calls=dict(CALLS), rank=self.strategy.rank)
        elif self.progress.step + 1 == STEP + 1:
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step(self, *given)
            if on_gpu:
                torch.cuda.synchronize()
            found["seconds"] = time.perf_counter() - start
            result.with_suffix(f".{self.strategy.rank}.json").write_text(json.dumps(found))
        else:
            step(self, *given)

    def forwarding(self: Any, batch: Any) -> Any:
        if self.progress.step + 1 != STEP or "saved" in found:
            return forward(self, batch)
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        found["batch"] = {key: list(value.shape) for key, value in tensors.items()}
        mask = tensors.get("attention_mask")
        found["padded"] = mask is not None and not bool(mask.all())
        model = self.strategy.model
        with Saved(lambda: [*model.parameters(), *model.buffers(), *tensors.values()]) as saved:
            loss = forward(self, batch)
        found["saved"] = saved.bytes
        return loss

    TrainingLoop._step, TrainingLoop._summed_loss, TrainingLoop.run = stepping, forwarding, running
    # what a few steps have trained is of no use to anybody
    TrainingLoop.save = lambda self: None
    zerobook.training.result.save_model = lambda *given, **named: None


def main() -> None:
    result, recipe, *flags = sys.argv[1:]
    watch_collectives()
    watch_loop(Path(result))
    sys.argv = [recipe, *flags]
    sys.path.insert(0, os.path.dirname(recipe))
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
