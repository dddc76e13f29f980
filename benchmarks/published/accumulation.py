"""Table G: collectives that gradient accumulation saves."""

from __future__ import annotations

from benchmarks.published.bench import Bench
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import Arm

SOURCE = (
    "Accelerate's guide on gradient synchronization "
    "(https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization): DDP on two "
    "T4 GPUs in one node, 16 samples a GPU, 4 micro-batches; seconds a micro-batch if gradients are reduced after each, and if "
    "after the last one only."
)
MICRO, STEPS = 2, 4
FILES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP2"}
PUBLISHED = {("DDP", 1): {"s a micro-batch": 0.50}, ("DDP", STEPS): {"s a micro-batch": 0.41}}


def _seconds(bench: Bench, file: str, ranks: int, steps: int) -> float:
    bench.say(f"G: {file}, the time of {steps} micro-batch(es)")
    flags = bench.plain | {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": steps, "max_train_steps": 12}
    return bench.attempt(Arm.of(file, ranks), "causal_lm", flags, 0).step / steps


def run(bench: Bench) -> Table:
    """Count collectives and bytes a sample, with and without accumulation, at the same micro-batch."""
    ranks = bench.worlds[-1]
    table = Table(
        "G",
        "Gradient accumulation",
        SOURCE,
        f"a Llama in fp32, {ranks} processes, micro-batches of {MICRO} samples; one step, counted.",
    )
    if ranks == 1:
        table.not_run = "there is one process, which has nobody to synchronise with."
        return table
    per: dict[tuple[str, int], float] = {}
    for file, name in FILES.items():
        for steps in (1, STEPS):
            found = bench.measured(file, ranks, **({} if steps == 1 else {"gradient_accumulation_steps": steps}))
            samples = MICRO * steps * ranks
            per[name, steps] = found.figures["sent"].measured / samples
            here = {"collectives a sample": found.calls / samples, "kB sent a sample": per[name, steps] / 1e3}
            if (name, steps) in PUBLISHED:
                here |= {"s a micro-batch": _seconds(bench, file, ranks, steps)}
            table.lines.append(
                Line(f"{name}, {steps} micro-batch{'es' if steps > 1 else ''}", PUBLISHED.get((name, steps), {}), here)
            )
    for name in FILES.values():
        saved = per[name, 1] / per[name, STEPS]
        whole = name in ("DDP", "ZeRO-1")
        claim = f"{name} sends less with accumulation"
        if whole:
            claim = f"With {STEPS} micro-batches, {name} sends {STEPS} times less for each sample"
        holds = abs(saved / STEPS - 1) < 0.02 if whole else saved > 1.02
        cause = f"{saved:.2f} times less" + (
            "" if holds else ": it reduces gradients after every micro-batch, so that a rank keeps its part only"
        )
        table.findings.append(Finding(claim, holds, cause))
    return table
