"""Runs a recipe unchanged and writes down what reaches its model and how often ranks talk.

    accelerate launch ... tests/distributed/spy.py recipes/NAME.py [flags]

For every training forward: hashes of the decoded token rows, taken from the tensors that the model is
given. Collectives are counted by wrapping torch.distributed before anything imports it, those that reduce also by the type of
their numbers; forwards of layers (recomputed ones too) by hooks; and so are the processes that load data. For every process
group: how many seconds its collectives wait. The devices and types of all their tensors. And the threads that torch computes
with.
``ZEROBOOK_SPY_HANG_AT_STEP=N`` stops for ever in step N, for a test to kill; ``..._SIGNAL=SIGUSR1``, ``..._SIGNAL_AT_STEP=N``,
``..._SIGNAL_RANK=R`` and ``..._SIGNAL_ATTEMPT=A`` (of torchrun's restarts) let a rank get that signal, and with
``..._SIGNAL_LAUNCHER=1`` its launcher as well, as from a scheduler that signals every process of a job. ``..._CORES=N`` is the
number of cores that the machine then seems to have.
"""

import hashlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zerobook.training.hooks import Hook
from zerobook.utils import user_code

COUNTS: Counter = Counter()
KINDS: Counter = Counter()
"""Collectives by name, device and type of their tensors, loading and evaluation included."""


def tensors_of(values):
    for value in values:
        yield from [value] if isinstance(value, torch.Tensor) else tensors_of(value) if isinstance(value, list | tuple) else []


def counted(name, inner):
    def wrapped(*args, **kwargs):
        COUNTS[name] += 1
        for tensor in tensors_of([*args, *kwargs.values()]):
            KINDS[f"{name} {tensor.device.type} {str(tensor.dtype).removeprefix('torch.')}"] += 1
        if "reduce" in name:
            tensor = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
            COUNTS[f"{name} {str(tensor.dtype).removeprefix('torch.')}"] += tensor.numel() > 1  # not the losses and norms
        return inner(*args, **kwargs)

    return wrapped


def count_collectives():
    names = ("all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_reduce", "broadcast")
    plain = {name: getattr(dist, name) for name in names}
    for name, inner in plain.items():
        setattr(dist, name, counted(name, inner))
    if hasattr(dist, "reduce_scatter_single"):  # what FSDP2 calls from torch 2.13 on
        plain["reduce_scatter_single"] = dist.reduce_scatter_single
        dist.reduce_scatter_single = counted("reduce_scatter_tensor", dist.reduce_scatter_single)
    wrapped = {id(inner): getattr(dist, name) for name, inner in plain.items()}
    for name, module in list(sys.modules.items()):
        # a forked rank has modules that took them by name; torch's own calls of its own functions are no collectives of a run
        if name not in ("torch.distributed", "torch.distributed.distributed_c10d"):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in wrapped:
                    setattr(module, key, wrapped[id(value)])


def reduced(group, bucket):
    """DDP's own all-reduce, which it calls from C++, where the wrappers above do not see it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    COUNTS["gradient buckets"] += 1
    return allreduce_hook(group, bucket)


rank = int(os.environ.get("RANK", 0))
asked = {
    key.removeprefix("ZEROBOOK_SPY_").lower(): value for key, value in os.environ.items() if key.startswith("ZEROBOOK_SPY")
}
hang_at = int(asked.get("hang_at_step", 0))
restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
signal_at = int(asked.get("signal_at_step", 0)) if asked.get("signal_attempt", restarts) == restarts else 0


def write(output, record):
    with (output / f"spy-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def samples(batch, pad):
    """The tokens of every sample in a batch, packed or not, without padding."""
    if "attention_mask" in batch and "position_ids" not in batch:
        return [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    if "position_ids" not in batch:  # causal rows have no mask; a last token that equals the padding is left out too
        return [ids[: int((ids != pad).nonzero().max()) + 1] for ids in batch["input_ids"]]
    found = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        cuts = (positions == 0).nonzero().flatten().tolist()[1:]
        # padding is a sample of its own, of one token over and over
        found += [part for part in ids.tensor_split(cuts) if len(set(part.tolist())) > 1]
    return found


def timeouts():
    """Seconds that each process group of this rank waits for its other ranks."""
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    return [
        min(group._get_backend(device).options._timeout.total_seconds() for device in group._device_types) for group in groups
    ]


class Spy(Hook):
    def on_start(self, trainer):
        from transformers import AutoTokenizer

        self.output = Path(trainer.config.output_dir)
        self.micro = Counter()
        self.watch(trainer, AutoTokenizer.from_pretrained(trainer.config.model_name_or_path))
        COUNTS.clear()
        if hasattr(trainer.strategy.model, "register_comm_hook"):
            trainer.strategy.model.register_comm_hook(None, reduced)

    def watch(self, trainer, tokenizer):
        output, micro = self.output, self.micro

        def before_forward(model, args, kwargs):
            if not model.training:
                return  # evaluation, and the probe of packed rows
            step = trainer.progress.step + 1
            if step == hang_at:
                (output / "hanging").touch()
                time.sleep(3600)
            if step == signal_at and str(rank) == asked["signal_rank"]:
                if "signal_launcher" in asked:
                    os.kill(os.getppid(), getattr(signal, asked["signal"]))
                os.kill(os.getpid(), getattr(signal, asked["signal"]))
            hashes = []
            for ids in samples(kwargs, tokenizer.pad_token_id):
                hashes.append(hashlib.sha256(tokenizer.decode(ids).encode()).hexdigest()[:16])
            write(output, {"kind": "rows", "step": step, "micro": micro[step], "rank": rank, "hashes": hashes})
            micro[step] += 1

        def before_layer(layer, args):
            COUNTS["layer_forwards"] += layer.training
            COUNTS["workers"] = max(COUNTS["workers"], len(multiprocessing.active_children()))

        trainer.strategy.model.register_forward_pre_hook(before_forward, with_kwargs=True)
        for layers in [m for m in trainer.strategy.unwrapped.modules() if isinstance(m, nn.ModuleList)]:
            for layer in layers:
                # transformers recomputes a layer's forward without the layer's own hooks, and with those of its parts
                next(layer.children(), layer).register_forward_pre_hook(before_layer)

    def after_step(self, trainer, record):
        record = {"kind": "calls", "counts": dict(COUNTS), "kinds": dict(KINDS), "timeouts": timeouts(),
                  "threads": torch.get_num_threads()}  # fmt: skip
        write(self.output, record)


def main():
    from zerobook.launch import build as launch

    count_collectives()
    if "cores" in asked:
        launch.usable_cores = lambda: int(asked["cores"])
    recipe, *flags = sys.argv[1:]
    Path(flags[flags.index("--output_dir") + 1]).mkdir(parents=True, exist_ok=True)
    sys.argv = [recipe, *flags, "--hooks", f"{__file__}:Spy"]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    user_code.load("hooks", f"{__file__}:main")()  # in the module that the hook is taken from, which counts
