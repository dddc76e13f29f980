"""Write docs/measured/performance.md, and its picture, from the results of the programs in benchmarks/.

usage: performance.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured" / "performance.md"
PICTURE = PAGE.with_name("growth.png")
ARMS = {
    "zerobook": "this project", "zerobook, flags": "this project with `--torch_compile --padding_free`", "trl": "TRL",
    "trl, bare": "TRL without its metrics", "trl, compiled": "TRL without its metrics, with `torch_compile`",
    "trainer": "Trainer",
}  # fmt: skip
PACKED = {
    "long tail, 4096": " whose lengths have a long tail into rows of 4,096 tokens",
    "dialogues, 2048": " with the lengths of dialogues into rows of 2,048 tokens",
    "the embedded dialogues, 1024": " (the embedded dialogues) into rows of 1,024 tokens",
}
COMPILED = ("zerobook, flags", "trl, compiled")
"""Arms that compile in their first step, for minutes, or seconds where the compiled code is on the disk."""
JOBS = {
    "lora": "LoRA r 16, SmolLM2-135M, 4 x 128 tokens", "full": "all weights, SmolLM2-135M, 2 x 128 tokens",
    "packed": "LoRA r 16, packed into 2 rows of 256 tokens",
    "seq2seq": "all weights, a T5 of 20 million, 8 pairs of 64 source and 64 target tokens",
}  # fmt: skip
GOALS = {"lora": ("trl, bare", 1.25), "full": ("trl, bare", 1.15), "packed": ("trl, bare", 1.0), "seq2seq": ("trainer", 1.05)}
"""Job -> (the arm that it is compared with, the goal for the ratio)."""


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
    if (RESULTS / "growth.json").exists():
        draw(load("growth"), PICTURE)
        print(f"wrote {PICTURE}")


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def page() -> str:
    """Return the page as Markdown."""
    saved, data, log = load("checkpoint"), load("data"), load("runlog")
    machine = saved["machine"]
    data_dates = ", ".join(f"{part} {data[part]['date']}" for part in ("packing", "tokenizing", "preparing", "saving"))
    parts = [
        "# Performance\n",
        "<!-- written by scripts/performance.py -->\n",
        "Ratios compare two programs that were measured in turns in one run, so a slow machine makes both slower. Training\n"
        "speed on GPUs is measured by the part `speed` of `python benchmarks/gpu.py all`: [gpu.md](gpu.md) says what\n"
        "has run.\n",
        *(write(load(name)) for name, write in TRAINING.items() if (RESULTS / f"{name}.json").exists()),
        section(
            "Checkpoints",
            "benchmarks/checkpoint.py",
            f"SmolLM2-135M on two processes, {saved['checkpoint_bytes'] / 1e9:.1f} GB a checkpoint. {machine['cores']} cores "
            f"({machine['architecture']}), {saved['date']}, torch {machine['versions']['torch']}.",
            [
                ["speed of a save with digests / speed of a plain write", f"{saved['save_rate_of_raw_write']:.2f}"],
                ["memory of a save above what training holds", f"{saved['extra_memory_of_a_save_bytes'] / 1e6:.0f} MB"],
                [
                    "pause of training at a background save / time of one copy in memory",
                    f"{saved['background_stall_of_memory_copy']:.1f}",
                ],
                [
                    "speed of checking digests, with the files in the page cache",
                    f"{saved['verify_gigabytes_a_second']:.0f} GB/s",
                ],
                [
                    "time to load another strategy's checkpoint / time to load one's own",
                    span(saved["load_of_the_writers_own"].values()),
                ],
            ],
        ),
        section("Data", "benchmarks/data.py", f"{data['cpu']}, {data['cores']} cores; {data_dates}.", of_data(data)),
        section(
            "Runlog",
            "benchmarks/runlog.py",
            f"{log['cores']} cores ({log['machine']}), {log['date']}, medians of {log['rounds']} rounds.",
            [
                ["time of the spike monitor in a step", f"{log['step']['watch_us']} us"],
                ["time of the runlog in a step", f"{log['step']['log_us']} us"],
                ["time of one event, flushed to the disk", f"{log['durable_event_s'] * 1000:.2f} ms"],
                ["time of `runlog status` on a log with a million events", f"{log['status_of_a_million_events_s']:.2f} s"],
                ["time of `runlog report` on a million steps", f"{log['report_of_a_million_steps_s']:.1f} s"],
            ],
        ),
    ]
    return "\n".join(parts)


def of_data(data: dict[str, Any]) -> list[list[str]]:
    rows = [
        [f"packing {found['samples']:,} samples{PACKED[name]}", f"{found['seconds']} s, rows filled to {found['fill']:.3%}"]
        for name, found in data["packing"]["figures"].items()
    ]
    rows += [
        [
            f"tokenizing, {name}",
            f"{found['tokens/s']:,} tokens/s; {found['median ratio of pairs']:.2f} of the tokenizers library's speed "
            "(median of pairs)",
        ]
        for name, found in data["tokenizing"]["figures"].items()
    ]
    rows += [
        [
            f"preparing {found['bytes'] / 1e9:.1f} GB of text, {counted(int(name[0]), 'process', 'processes')}",
            f"{found['tokens/s']:,} tokens/s",
        ]
        for name, found in data["preparing"]["figures"].items()
        if "bytes" in found
    ]
    return [*rows, ["saving: supervised tokens a second, packed / padded", str(data["saving"]["figures"]["ratio"])]]


def counted(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def where(found: dict[str, Any]) -> str:
    """Return hardware, date and versions of a result."""
    kept = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "transformers", "accelerate"))
    return f"{found.get('cores', 2)} cores, one thread a process, {found['date']}, {kept}."


def of_the_loop(found: dict[str, Any]) -> str:
    """Return the section on the loop's own cost."""
    rows, counts = [], []
    for file, facts in found["strategies"].items():
        for pair, spread in facts["ms more"].items():
            low, high = spread["quartiles"]
            difference = " minus ".join(f"*{loop}*" for loop in pair.split(" - "))
            rows.append([file, difference, f"{spread['median']:+.2f}", f"{low:+.2f} to {high:+.2f}"])
        for loop, counted in facts["counts"].items():
            counts.append([
                file, loop, f"{counted['calls']:,}", f"{counted['reads']}", f"{counted['collectives']}",
                f"{counted['bytes'] / 1e6:.2f}", f"{counted['blocks kept']:.0f}",
            ])  # fmt: skip
    single = found["strategies"]["single"]["ms more"]["recipe - accelerate"]
    met = "met" if single["median"] <= 0.1 else "missed"
    low, high = single["quartiles"]
    if high - low > 0.1:
        met += f"; the spread, {low:+.2f} to {high:+.2f} ms, is larger than the goal"
    return (
        "## Cost of the training loop\n\n"
        f"Measured with `python benchmarks/loop.py`: {where(found)}\n\n"
        "A tiny Llama (hidden size 64, 4 layers), 4 rows of 64 tokens, so that the loop takes a large part of a step. In each\n"
        f"of {found['rounds']} rounds, every loop takes one step on the same model. *compute*: the model, clipping and AdamW.\n"
        "*+ wrapper*: through DDP or FSDP2. *+ data*: with a DataLoader. *accelerate*: the loop of accelerate's\n"
        "documentation. *recipe*: the recipe's run, with spike monitor, runlog, hang monitor and a log point every 10\n"
        "steps.\n\n"
        f"Goal: at most 0.10 ms a step above accelerate's own loop. One process: {single['median']:+.2f} ms ({met}).\n\n"
        + table(["strategy", "difference", "ms a step, median of pairs", "quartiles"], rows)
        + "\nCounts of one step between log points: Python and C calls, times that the host reads a tensor, collectives,\n"
        "MB of their buffers, and blocks of memory that Python keeps after a step. Under FSDP2, there is no *compute* loop,\n"
        "since the model does not run without its wrapper, and the all-reduce of the gradient norm is counted for the recipe\n"
        "only: the other loops do it inside a DTensor.\n\n"
        + table(["strategy", "loop", "calls", "tensor reads", "collectives", "MB", "memory blocks kept"], counts)
    )


def of_peers(found: dict[str, Any]) -> str:
    """Return the section on the same finetuning by others."""
    rows, goals = [], []
    for job, title in JOBS.items():
        if job not in found:
            continue
        arms = found[job]["arms"]
        for arm, facts in arms.items():
            rows.append([
                title, ARMS[arm], f"{facts['supervised tokens/s']:.1f}",
                f"{facts['seconds a step']:.2f} ({facts['quartiles'][0]:.2f} to {facts['quartiles'][1]:.2f})",
                f"{facts['peak memory, MB']:,}", "" if arm in COMPILED else f"{facts['first step after, s']:.0f}",
                f"{facts['mean loss']:.3f}",
            ])  # fmt: skip
        other, goal = GOALS[job]
        for one in [other, *(["trainer"] if other != "trainer" and "trainer" in arms else [])]:
            wanted = goal if one == other else 1.05
            pairs = [("zerobook", one)]
            if one == other:
                pairs += [("zerobook, flags", one), ("zerobook, flags", "trl, compiled")]
            for ours, theirs in pairs:
                if ours in arms and theirs in arms:
                    ratio = arms[ours]["supervised tokens/s"] / arms[theirs]["supervised tokens/s"]
                    met = "met" if ratio >= wanted else "missed"
                    goals.append([title, ARMS[ours], ARMS[theirs], f"{ratio:.2f}", f"{wanted:.2f}", met])
    first = next(found[job] for job in JOBS if job in found)
    missing = [title for job, title in JOBS.items() if job not in found]
    names = ["job", "trainer", "supervised tokens/s", "seconds a step (quartiles)", "peak memory, MB"]
    names += ["seconds until the first step", "mean loss of all steps"]
    return (
        "## The same finetuning by TRL and by Trainer\n\n"
        f"Measured with `python benchmarks/peers.py`: {where(first | {'cores': found['cores']})}\n"
        f"{found['packages'][0].replace('==', ' ')}, fp32. All have the same model, data, rows and optimizer, and see each\n"
        "sample once, each in its own random order, so their losses differ. "
        f"{counted(found['rounds'], 'run', 'runs')} of 10 steps. TRL\ncomputes token accuracy and entropy in each step. "
        "Seconds a step are medians over the steps after the first\ntwo, without compilation.\n\n"
        + table(names, rows) + "\n"
        + table(["job", "trainer", "compared with", "ratio of supervised tokens/s", "goal", "goal met?"], goals)
        + (f"\nNot run: {'; '.join(missing)}.\n" if missing else "")
        + "\nLikely cause of the goals that are missed without flags: fp32 matrix products take most of a step, and are\n"
        "equally fast in all trainers.\n"
    )  # fmt: skip


def of_flags(found: dict[str, Any]) -> str:
    """Return the section on single settings."""
    words = {
        "masked": "loss of all logits, with an attention mask", "unmasked": "loss of all logits, no mask",
        "in the head": "loss in the output layer, of supervised tokens only (the default)",
        "compiled": "the default and `--torch_compile`", "joined": "the default and `--padding_free`",
        "both": "the default and both flags",
    }  # fmt: skip
    first = found["seconds"]["masked"]
    rows = [[words[name], f"{found['seconds'][name]:.2f}", f"{first / found['seconds'][name]:.2f}"] for name in words]
    return (
        "## Effect of single settings\n\n"
        f"Measured with `python benchmarks/flags.py`: {where(found)}\n\n"
        "Forward and backward pass of LoRA r 16 on SmolLM2-135M, 4 chats of 70 to 128 tokens, half of them supervised.\n"
        f"The losses differ by at most {found['losses differ by']:.1e}. Compiling takes "
        f"{found['first compiled step, s']:.0f} s once.\n\n" + table(["setting", "seconds a step", "speedup"], rows)
    )


def of_growth(found: dict[str, Any]) -> str:
    """Return the section on growth."""
    run, data, model = (found[name]["figures"] for name in ("run", "data", "model"))
    rows = [
        [what, f"{run[key]:+.2%}", "below 1 %", "met" if run[key] < 0.01 else "missed"]
        for what, key in (
            (f"step time over {run['steps']:,} steps", "step time, growth"),
            ("resident memory over these steps", "rss, growth"),
        )
    ]
    low, middle, high = statistics.quantiles([1000 * seconds for _, seconds, _ in run["step, seconds, rss"]], n=4)
    if 0.01 <= run["step time, growth"] < (high - low) / middle:
        rows[0][-1] += " (within the noise, see below)"
    more = [[f"{one['rows']:,}", f"{one['prepared and started, s']:.1f}", f"{one['started again, s']:.1f}",
             f"{1000 * one['seconds a step']:.1f}", f"{one['rss'] / 1e6:,.0f}"] for one in data]  # fmt: skip
    resumes = [[f"{one['step']:,}", f"{one['until training, s']:.1f}"] for one in run["resumes"]]
    sizes = [
        [f"{one['parameters']:,}", f"{one['checkpoint'] / one['parameters']:.1f}", f"{one['save, s']:.2f}"] for one in model
    ]
    return (
        "## Scaling\n\n"
        f"Measured with `python benchmarks/growth.py`: {where(found['run'] | {'cores': found['cores']})}\n"
        "Llamas with random weights, fp32.\n\n"
        "![time and memory against processes, length, rows, data, steps and parameters](growth.png)\n\n"
        + table(["a long run", "growth", "goal", "goal met?"], rows)
        + f"\nThe medians of 100 steps vary with the machine (quartiles {low:.2f}, {middle:.2f} and {high:.2f} ms), so\n"
        f"growth of the step time below about {(high - low) / middle:.0%} cannot be detected. Growth is the Theil-Sen\n"
        "slope of these medians, as a share of their median.\n"
        + "\n" + table(["rows of data", "first start with preparation, s", "second start, s", "ms a step", "memory, MB"], more)
        + "\n" + table(["resumed at step", "until training, s"], resumes)
        + "\n" + table(["parameters", "checkpoint bytes per parameter", "save, s"], sizes)
    )  # fmt: skip


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw the growth: points are measured, dashed lines are laws."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    figures = {name: found[name]["figures"] for name in ("ranks", "length", "rows", "data", "run", "model")}

    def plot(axis: Any, x: list[float], y: list[float], title: str, label: str, law: list[float], said: str) -> None:
        axis.plot(x, y, "o-", color="#1f5fa8", label="measured")
        axis.plot(x, law, "--", color="#d55e00", label=said)
        axis.set(title=title, xlabel=label, ylim=(0, 1.15 * max([*y, *law])))
        axis.legend(frameon=False)

    cores = found["cores"]
    one = figures["ranks"]
    x = [r["processes"] for r in one]
    law = [one[0]["tokens/s"] * min(n, cores) for n in x]
    plot(
        axes[0, 0], x, [r["tokens/s"] for r in one], "tokens a second, DDP", "processes", law, f"one process x cores ({cores})"
    )
    one = figures["length"]
    x, y = [r["tokens"] for r in one], [1000 * r["seconds a step"] for r in one]
    plot(axes[0, 1], x, y, "ms a step", "tokens of a row", *fitted(x, y, 2))
    one = figures["rows"]
    x, y = [r["rows"] for r in one], [1000 * r["seconds a step"] for r in one]
    plot(axes[0, 2], x, y, "ms a step", "rows of a micro-batch", *fitted(x, y, 1))
    one = figures["data"]
    x, y = [r["rows"] for r in one], [1000 * r["seconds a step"] for r in one]
    plot(axes[1, 0], x, y, "ms a step", "rows of data", [y[0]] * len(y), "constant")
    axes[1, 0].set_xscale("log")
    one = figures["run"]["step, seconds, rss"]
    x, y = [p[0] for p in one], [1000 * p[1] for p in one]
    axes[1, 1].plot(x, y, ".", color="#1f5fa8", markersize=3, label="ms a step, median of 100")
    axes[1, 1].plot(x, [p[2] / 1e6 / 100 for p in one], "-", color="#1a7f37", label="resident memory, 100 MB")
    axes[1, 1].set(title="a long run", xlabel="step", ylim=(0, None))
    axes[1, 1].legend(frameon=False)
    one = figures["model"]
    x, y = [r["parameters"] / 1e6 for r in one], [r["checkpoint"] / 1e6 for r in one]
    plot(axes[1, 2], x, y, "MB of a checkpoint", "million parameters", [12 * n for n in x], "12 bytes a parameter (fp32 AdamW)")
    figure.savefig(file, dpi=80)
    plt.close(figure)


def fitted(x: list[float], y: list[float], degree: int) -> tuple[list[float], str]:
    """Return (a fitted polynomial at ``x``, its description)."""
    import numpy as np

    coefficients = np.polyfit(x, y, degree, w=1 / np.array(y))
    return np.polyval(coefficients, x).tolist(), {1: "a + b n", 2: "a + b n + c n²"}[degree]


def table(columns: list[str], rows: list[list[str]]) -> str:
    head = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def span(values: Any) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def section(title: str, program: str, where: str, rows: list[list[str]]) -> str:
    table = "".join(f"| {what} | {figure} |\n" for what, figure in rows)
    return f"## {title}\n\nMeasured with `python {program}`: {where}\n\n| measurement | value |\n| --- | --- |\n{table}"


TRAINING = {"loop": of_the_loop, "peers": of_peers, "flags": of_flags, "growth": of_growth}
"""Result of a program that measures training -> its section. A program that was not run has none."""


if __name__ == "__main__":
    main()
