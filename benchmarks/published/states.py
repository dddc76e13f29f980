"""Tables C and D: bytes that each ZeRO stage holds and sends, counted in live runs, against the paper's formulas."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.published.bench import Bench
from benchmarks.published.formulas import ring
from benchmarks.published.table import Finding, Line, Table
from zerobook.plan import formulas

SOURCE = "ZeRO, arXiv 1910.02054: {}."
FILES = {"ddp": ("DDP", 0), "zero1": ("ZeRO-1", 1), "zero2": ("ZeRO-2", 2), "zero3": ("ZeRO-3", 3), "fsdp": ("FSDP2", 3)}
MB = 1e6


def run(bench: Bench) -> list[Table]:
    """Run a few steps of every stage on every number of processes."""
    worlds = " and ".join(map(str, bench.worlds))
    settings = (
        f"a Llama in fp32, {worlds} process(es), measured between backward pass and step, on the rank that differs most from "
        "the plan (rank 0 if none does); an MB is 10^6 bytes."
    )
    held = Table("C", "Memory of the states", SOURCE.format("section 5, with fp32 Adam: 16 bytes a parameter in all"), settings)
    traffic = (
        "the same runs; bytes that a process sends in a step of one micro-batch if its collectives go around a ring, computed "
        "from their sizes."
    )
    moved = Table(
        "D",
        "Traffic of a step",
        SOURCE.format("section 7; each of N processes sends (N - 1)/N of the formula's bytes around a ring"),
        traffic,
    )
    totals: dict[tuple[str, int], float] = {}
    for ranks in bench.worlds:
        for file, (name, stage) in FILES.items():
            if file == "ddp" and ranks == 1:
                file = "single"
            found = bench.measured(file, ranks)
            parameters = bench.measured("single", 1).figures["parameters"].measured / 4
            paper = formulas.model_states(parameters, stage, ranks, mixed=False)
            figures = {kind: found.figures[kind].measured for kind in ("parameters", "gradients", "optimizer")}
            total = totals[name, ranks] = sum(figures.values())
            label = f"{name}, {ranks} process{'es' if ranks > 1 else ''}"
            held.lines.append(
                Line(
                    label,
                    {"MB": paper.total / MB, "bytes a parameter": paper.total / parameters},
                    {"weights, MB": figures["parameters"] / MB, "gradients, MB": figures["gradients"] / MB,
                     "optimizer, MB": figures["optimizer"] / MB, "MB": total / MB, "bytes a parameter": total / parameters},
                )
            )  # fmt: skip
            if ranks > 1:
                law = ring(formulas.traffic(stage), ranks)
                sent = found.figures["sent"].measured
                worth = {"MB": sent / MB, "times the parameters": sent / (4 * parameters), "collectives": found.calls}
                moved.lines.append(Line(label, {"MB": law * 4 * parameters / MB, "times the parameters": law}, worth))
    most = bench.worlds[-1]
    if most > 1:
        order = [totals[name, most] for name, _ in FILES.values()][:4]
        less = all(after < 0.999 * before for before, after in pairwise(order))
        said = ", ".join(f"{total / MB:.2f}" for total in order) + " MB"
        if not less and order[1] == order[2]:
            said += (
                ": in a step of one micro-batch, ZeRO-1 also frees the gradients of other ranks' parts after they are reduced"
            )
        held.findings.append(Finding(f"On {most} processes every stage holds less than the one before", less, said))
        sent = {line.name.split(",")[0]: line.here["times the parameters"] for line in moved.lines}
        moved.findings.append(
            Finding("ZeRO-1 and 2 send what DDP sends", abs(sent["ZeRO-2"] / sent["DDP"] - 1) < 0.02,
                    f"ZeRO-2 sends {sent['ZeRO-2']:.2f} times the parameters, DDP {sent['DDP']:.2f}: DeepSpeed all-reduces "
                    "gradients where the paper reduce-scatters them, and gathers weights after the step")
        )  # fmt: skip
        moved.findings.append(
            Finding("ZeRO-3 sends 1.5 times as much as DDP", abs(sent["ZeRO-3"] / sent["DDP"] - 1.5) < 0.03,
                    f"{sent['ZeRO-3']:.2f} against {sent['DDP']:.2f} times the parameters: DeepSpeed keeps gathered weights "
                    "within `stage3_max_reuse_distance` until the backward pass, and does not gather them again")
        )  # fmt: skip
    else:
        moved.not_run = "there is one process, which sends nothing."
    held.notes.append(
        "DeepSpeed keeps fp32 master copies also if the weights are in fp32. They are 4 more bytes a parameter, sharded like "
        "the optimizer state. torch's DDP also has buckets of 4 bytes a parameter, which are not counted as gradients here."
    )
    return [held, moved]
