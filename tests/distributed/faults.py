"""Runs a recipe in which something goes wrong, as it does on real machines and with real data.

    ZEROBOOK_FAULT=labels ZEROBOOK_FAULT_AT=31 ZEROBOOK_FAULT_STEPS=6 accelerate launch ... faults.py recipes/NAME.py [flags]

labels  the rows that rank 1 takes in those steps have wrong labels, whenever they are taken
burst   labels, and rank 1's gradient is a million times too large in those steps, until those rows are left out
rate    the learning rate is 60 times too high in those steps, once
sharp   a rate above 0.95 of the scheduled one acts a hundred times as strong in those steps, whatever the data: every time
nan     a gradient on rank 1 is not a number from that step on, until the run goes back
bit     an exponent bit of one weight flips on rank 1 at that step, once
drift   the last bit of one weight flips on rank 1 at that step, once: no loss ever shows it
again   nothing is wrong, but every time that step is reached the run is sent back, as many times as there are steps

It writes every poisoned row that reaches a model to ``fault-RANK.jsonl`` in the output folder.
"""

import json
import math
import os
import runpy
import signal
import sys
from pathlib import Path

import torch

FAULT = os.environ.get("ZEROBOOK_FAULT")
AT = int(os.environ.get("ZEROBOOK_FAULT_AT", 0))
STEPS = int(os.environ.get("ZEROBOOK_FAULT_STEPS", 1))
KILL_AFTER = int(os.environ.get("ZEROBOOK_FAULT_KILL_AFTER", 0))
"""rollbacks after which every process is killed, two steps on"""
RANK = int(os.environ.get("RANK", 0))
recipe, *flags = sys.argv[1:]
output = Path(flags[flags.index("--output_dir") + 1])


def window(loop):
    return AT <= loop.progress.step + 1 < AT + STEPS


def wrong_labels(loop):
    """Every word is followed by the same one, these rows say."""
    from zerobook.data import feed

    layout, order = loop.layout, loop.feed.order
    cursor = 0
    bad = set()
    for step in range(1, AT + STEPS):
        ids, cursor = order.take(cursor, layout.global_batch, loop.feed.end)
        if step >= AT:
            micro = [ids[(m * layout.world_size + 1) * layout.micro :][: layout.micro] for m in range(layout.accumulation)]
            bad |= {int(row) for part in micro for row in part}
    file = output / "poisoned.json"
    if file.exists():  # rows that are left out have moved the others since
        bad = set(json.loads(file.read_text()))
    loop.strategy.barrier()
    if RANK == 0:
        file.write_text(json.dumps(sorted(bad)))
    get = feed._Rows.__getitem__

    def poisoned(self, index):
        row = get(self, index)
        if index in bad and self.rows is loop.feed.part:
            with (output / f"fault-{RANK}.jsonl").open("a") as file:
                file.write(json.dumps({"row": index, "redone": loop.progress.redone, "step": loop.progress.step + 1}) + "\n")
            labels = row["labels"].copy()
            labels[labels >= 0] = 5
            row = row | {"labels": labels}
        return row

    feed._Rows.__getitem__ = poisoned


def burst(loop):
    wrong_labels(loop)

    def hook(module, args, result):
        if RANK == 1 and result.requires_grad and window(loop) and not loop.progress.skip_ranges:
            result.register_hook(lambda gradient: gradient * 1e6)

    loop.strategy.unwrapped.get_output_embeddings().register_forward_hook(hook)


def high_rate(loop):
    rate = loop.rate
    loop.rate = lambda: rate() * (60 if window(loop) and not loop.progress.redone else 1)


def sharp(loop):
    """As where the loss is so sharp that the scheduled rate diverges and a lower one does not."""
    from zerobook.runlog.policy import rate_share

    rate = loop.rate

    def acting():
        above = rate_share(loop.progress.rate_cuts, loop.progress.step) > 0.95
        return rate() * (100 if window(loop) and above else 1)

    loop.rate = acting


def not_a_number(loop):
    def hook(module, args, result):
        if RANK == 1 and result.requires_grad and loop.progress.step + 1 >= AT and not loop.progress.redone:
            result.register_hook(lambda gradient: gradient * math.nan)

    loop.strategy.unwrapped.get_input_embeddings().register_forward_hook(hook)


def flipped_bit(loop, bit=30):
    step = loop._step
    done = []

    def stepping(plan, batches):
        if loop.progress.step + 1 == AT and not done:
            done.append(True)
            for piece in loop.strategy.pieces():
                if RANK == 1 and piece.key is None:
                    piece.values.view(torch.int32)[0] ^= 1 << bit
                    break
        step(plan, batches)

    loop._step = stepping


def sent_back(loop):
    """Writes down each time's resident memory, losses, and seconds beside those of a plain load of the same checkpoint."""
    import ctypes
    import gc
    import time

    import psutil

    from zerobook.runlog.policy import Measure

    see, go_back = loop.watch.see, loop.recovery.go_back
    times = []

    def seeing(records):
        see(records)
        if records[-1]["step"] >= AT and len(times) < STEPS:
            to = (AT - 1) // 10 * 10
            return Measure(kind="replay", rule="a test", reason="a test", options=(), onset=AT, noticed=AT, to_step=to)
        return None

    def going_back(measure, *rest):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is in use, not what the allocator keeps for later
        rss = psutil.Process().memory_info().rss
        start = time.perf_counter()
        loop.keeper.load(measure.to_step)
        plain = time.perf_counter() - start
        start = time.perf_counter()
        go_back(measure, *rest)
        times.append({"rss": rss, "load": plain, "rollback": time.perf_counter() - start})
        (output / f"again-{RANK}.json").write_text(json.dumps(times))

    loop.watch.see, loop.recovery.go_back = seeing, going_back


def main():
    from zerobook.loop import TrainingLoop
    from zerobook.recovery import Recovery

    run = TrainingLoop.run

    def running(self):
        output.mkdir(parents=True, exist_ok=True)
        {
            "labels": wrong_labels,
            "burst": burst,
            "rate": high_rate,
            "sharp": sharp,
            "nan": not_a_number,
            "bit": flipped_bit,
            "again": sent_back,
            "drift": lambda loop: flipped_bit(loop, 0),
        }[FAULT](self)
        return run(self)

    act, step, rollbacks = Recovery.act, TrainingLoop._step, []

    def acting(self, measure):
        act(self, measure)
        rollbacks.append(self.loop.progress.step)

    def stepping(self, plan, batches):
        step(self, plan, batches)
        if KILL_AFTER and len(rollbacks) == KILL_AFTER and self.progress.step == rollbacks[-1] + 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if FAULT:
        TrainingLoop.run, Recovery.act, TrainingLoop._step = running, acting, stepping
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
