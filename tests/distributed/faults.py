"""Runs a recipe in which something goes wrong, as it does on real machines and with real data.

    ZEROBOOK_FAULT=labels ZEROBOOK_FAULT_AT=31 ZEROBOOK_FAULT_STEPS=6 accelerate launch ... faults.py recipes/NAME.py [flags]

labels  the rows that rank 1 takes in those steps have wrong labels, whenever they are taken
burst   labels, and rank 1's gradient is a million times too large in those steps, until those rows are left out
rate    the learning rate is 60 times too high in those steps, once
sharp   a rate above 0.95 of the scheduled one acts a hundred times as strong in those steps, whatever the data: every time
nan     a gradient on rank 1 is not a number from that step on, until the run goes back
bit     an exponent bit of one weight flips on rank 1 at that step, once
drift   the last bit of one weight flips on rank 1 at that step, once: no loss ever shows it
moment  the first bit after the point of one of Adam's moments flips on rank 1 at that step, once
copy    the last bit of a weight flips on rank 1 after that step, and not in its fp32 master, once
again   nothing is wrong, but every time that step is reached the run is sent back, as many times as there are steps

It writes every poisoned row that reaches a model to ``fault-RANK.jsonl`` in the output folder.
"""

import ctypes
import gc
import json
import math
import os
import runpy
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from zerobook.monitor.policy import RecoveryAction, compute_rate_share
from zerobook.training.hooks import Hook

AT = int(os.environ.get("ZEROBOOK_FAULT_AT", 0))
STEPS = int(os.environ.get("ZEROBOOK_FAULT_STEPS", 1))
KILL_AFTER = int(os.environ.get("ZEROBOOK_FAULT_KILL_AFTER", 0))
"""rollbacks after which every process is killed, two steps on"""
RANK = int(os.environ.get("RANK", 0))


def during(trainer):
    return AT <= trainer.progress.step + 1 < AT + STEPS


class WrongLabels(Hook):
    """Every word is followed by the same one, these rows say."""

    def before_prepare(self, trainer, model):
        self.bad, self.trainer, self.output = set(), trainer, Path(trainer.config.output_dir)
        trainer.data = replace(trainer.data, train=Poisoned(trainer.data.train, self))

    def on_start(self, trainer):
        layout, feed = trainer.state.layout, trainer.state.loader
        cursor = 0
        bad = set()
        for step in range(1, AT + STEPS):
            ids, cursor = feed.order.take(cursor, layout.global_batch, feed.end)
            if step >= AT:
                micro = [ids[(m * layout.world_size + 1) * layout.micro :][: layout.micro] for m in range(layout.accumulation)]
                bad |= {int(row) for part in micro for row in part}
        file = self.output / "poisoned.json"
        if file.exists():  # rows that are left out have moved the others since
            bad = set(json.loads(file.read_text()))
        trainer.strategy.barrier()
        if RANK == 0:
            file.write_text(json.dumps(sorted(bad)))
        self.bad |= bad

    def spoil(self, index, row):
        if index not in self.bad:
            return row
        progress = self.trainer.progress
        with (self.output / f"fault-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps({"row": index, "redone": progress.redone, "step": progress.step + 1}) + "\n")
        labels = row["labels"].copy()
        supervised = labels >= 0
        labels[supervised] = self.falsify(labels[supervised], index)
        return row | {"labels": labels}

    def falsify(self, labels, index):
        return 5


class ShuffledLabels(WrongLabels):
    """The labels of these rows are in a random order, the same one whenever a row is read."""

    def falsify(self, labels, index):
        return np.random.default_rng(index).permutation(labels)


class Poisoned:
    """The training rows, some with wrong labels."""

    def __init__(self, part, fault):
        self.part, self.fault = part, fault

    def __getattr__(self, name):
        return getattr(self.part, name)

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return self.fault.spoil(index, self.part[index])

    def without_samples(self, ranges):
        return Poisoned(self.part.without_samples(ranges), self.fault)


class Burst(WrongLabels):
    def on_start(self, trainer):
        super().on_start(trainer)

        def hook(module, args, result):
            if RANK == 1 and result.requires_grad and during(trainer) and not trainer.progress.skip_ranges:
                result.register_hook(lambda gradient: gradient * 1e6)

        trainer.strategy.unwrapped.get_output_embeddings().register_forward_hook(hook)


class HighRate(Hook):
    def on_start(self, trainer):
        schedule = trainer.state.schedule
        trainer.state.schedule = lambda step: schedule(step) * self.factor(trainer)

    def factor(self, trainer):
        return 60 if during(trainer) and not trainer.progress.redone else 1


class Sharp(HighRate):
    """Imitates a loss so sharp that the scheduled rate diverges and a lower one does not."""

    def factor(self, trainer):
        return 100 if during(trainer) and compute_rate_share(trainer.progress.rate_cuts, trainer.progress.step) > 0.95 else 1


class NotANumber(Hook):
    def on_start(self, trainer):
        def hook(module, args, result):
            if RANK == 1 and result.requires_grad and trainer.progress.step + 1 >= AT and not trainer.progress.redone:
                result.register_hook(lambda gradient: gradient * math.nan)

        trainer.strategy.unwrapped.get_input_embeddings().register_forward_hook(hook)


class FlippedBit(Hook):
    bit = 30
    key = None

    def __init__(self):
        self.done = False

    def before_step(self, trainer, step):
        if step == AT and not self.done:
            self.done = True
            for piece in trainer.strategy.pieces():
                if RANK == 1 and piece.key == self.key:
                    piece.values.view(torch.int32)[0] ^= 1 << self.bit
                    break


class Drift(FlippedBit):
    bit = 0


class FlippedMoment(FlippedBit):
    bit = 22
    key = "exp_avg"


class FlippedCopy(Hook):
    def after_step(self, trainer, record):
        if record.step == AT and RANK == 1 and not trainer.progress.redone:
            weight = next(trainer.strategy.unwrapped.parameters())
            weight.data.view(torch.int32)[0, 0] ^= 1


class SentBack(Hook):
    """Writes down each time's resident memory, and seconds beside those of a plain load of the same checkpoint."""

    def __init__(self):
        self.times = []

    def on_log(self, trainer, records):
        if records[-1].step < AT or len(self.times) == STEPS:
            return None
        to = (AT - 1) // 10 * 10
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is in use, not what the allocator keeps for later
        self.rss = psutil.Process().memory_info().rss
        start = time.perf_counter()
        trainer.manager.load(to)
        self.start = time.perf_counter()
        self.plain = self.start - start
        return RecoveryAction(kind="replay", rule="a test", reason="a test", options=(), onset=AT, noticed=AT, to_step=to)

    def on_rollback(self, trainer, action):
        self.times.append({"rss": self.rss, "load": self.plain, "rollback": time.perf_counter() - self.start})
        (Path(trainer.config.output_dir) / f"again-{RANK}.json").write_text(json.dumps(self.times))


class Kill(Hook):
    def __init__(self):
        self.rollbacks = []

    def on_rollback(self, trainer, action):
        self.rollbacks.append(trainer.progress.step)

    def after_step(self, trainer, record):
        if KILL_AFTER and len(self.rollbacks) == KILL_AFTER and record.step == self.rollbacks[-1] + 2:
            os.kill(os.getpid(), signal.SIGKILL)


HOOKS = {
    "labels": WrongLabels,
    "shuffled": ShuffledLabels,
    "burst": Burst,
    "rate": HighRate,
    "sharp": Sharp,
    "nan": NotANumber,
    "bit": FlippedBit,
    "drift": Drift,
    "moment": FlippedMoment,
    "copy": FlippedCopy,
    "again": SentBack,
}


if __name__ == "__main__":
    recipe, *flags = sys.argv[1:]
    if fault := os.environ.get("ZEROBOOK_FAULT"):
        flags += ["--hooks", f"{__file__}:{HOOKS[fault].__name__}", f"{__file__}:Kill"]
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")
