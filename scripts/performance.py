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
    "zerobook": "this project",
    "zerobook, flags": "this project with `--torch_compile --padding_free`",
    "trl": "TRL",
    "trl, bare": "TRL without its metrics",
    "trl, compiled": "TRL without its metrics, with `torch_compile`",
    "trainer": "Trainer",
}
"""Arm of benchmarks/peers.py -> its name on the page."""
PACKED = {
    "long tail, 4096": " whose lengths have a long tail into rows of 4,096 tokens",
    "dialogues, 2048": " with the lengths of dialogues into rows of 2,048 tokens",
    "the embedded dialogues, 1024": " (the embedded dialogues) into rows of 1,024 tokens",
}
"""Data of the packing benchmark -> the end of its row's title."""
COMPILED = ("zerobook, flags", "trl, compiled")
"""Arms that compile in their first step. This takes minutes, or seconds if the compiled code is on the disk already."""
JOBS = {
    "lora": "LoRA r 16, SmolLM2-135M, 4 x 128 tokens",
    "full": "all weights, SmolLM2-135M, 2 x 128 tokens",
    "packed": "LoRA r 16, packed into 2 rows of 256 tokens",
    "seq2seq": "all weights, a T5 of 20 million, 8 pairs of 64 source and 64 target tokens",
}
"""Job of benchmarks/peers.py -> its title on the page."""
GOALS = {"lora": ("trl, bare", 1.25), "full": ("trl, bare", 1.15), "packed": ("trl, bare", 1.0), "seq2seq": ("trainer", 1.05)}
"""Job -> (the arm with which Zerobook is compared, the goal for the ratio of their speeds)."""
TRAINER_GOAL = 1.05
"""Goal for the ratio of speeds if Trainer is compared too."""
LOOP_GOAL_MS = 0.1
"""Goal: milliseconds of a step that a recipe may take more than accelerate's own loop."""
GROWTH_GOAL = 0.01
"""Goal: share by which step time and memory may grow in a long run."""


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
    saved = load("checkpoint")
    data = load("data")
    log = load("runlog")
    machine = saved["machine"]
    training = [describe(load(name)) for name, describe in TRAINING.items() if (RESULTS / f"{name}.json").exists()]
    data_dates = ", ".join(
        f"{part.replace('saving', 'training')} {data[part]['date']}"
        for part in ("packing", "tokenizing", "preparing", "saving")
    )
    parts = [
        "# Performance\n",
        "<!-- written by scripts/performance.py -->\n",
        "Ratios compare two programs that were measured in turns in one run, so a slow machine makes both slower. Training\n"
        "speed on GPUs is measured by the part `speed` of `python benchmarks/gpu.py all`: [gpu.md](gpu.md) says what\n"
        "has run.\n",
        *training,
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
        section("Data", "benchmarks/data.py", f"{data['cpu']}, {data['cores']} cores; {data_dates}.", data_rows(data)),
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


def data_rows(data: dict[str, Any]) -> list[list[str]]:
    """Return the rows (measurement, value) of benchmarks/data.py."""
    rows = []
    for name, figures in data["packing"]["figures"].items():
        measurement = f"packing {figures['samples']:,} samples{PACKED[name]}"
        rows.append([measurement, f"{figures['seconds']} s, rows filled to {figures['fill']:.3%}"])
    for name, figures in data["tokenizing"]["figures"].items():
        ratio = f"{figures['median ratio of pairs']:.2f} of the tokenizers library's speed (median of pairs)"
        rows.append([f"tokenizing, {name}", f"{figures['tokens/s']:,} tokens/s; {ratio}"])
    for name, figures in data["preparing"]["figures"].items():
        # Other entries are ratios of these.
        if "bytes" in figures:
            processes = counted(int(name[0]), "process", "processes")
            measurement = f"preparing {figures['bytes'] / 1e9:.1f} GB of text, {processes}"
            rows.append([measurement, f"{figures['tokens/s']:,} tokens/s"])
    rows.append(
        [
            "speed of training on packed rows / on padded rows, in supervised tokens a second",
            str(data["saving"]["figures"]["ratio"]),
        ]
    )
    return rows


def counted(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def describe_conditions(result: dict[str, Any]) -> str:
    """Return hardware, date and versions of a result."""
    libraries = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers", "accelerate"))
    return f"{result.get('cores', 2)} cores, one thread a process, {result['date']}, {libraries}."


def describe_loop(results: dict[str, Any]) -> str:
    """Return the section on the training loop's own cost, from benchmarks/loop.py."""
    differences = []
    counts = []
    for strategy, figures in results["strategies"].items():
        for pair, spread in figures["ms more"].items():
            low, high = spread["quartiles"]
            difference = " minus ".join(f"*{loop}*" for loop in pair.split(" - "))
            differences.append([strategy, difference, f"{spread['median']:+.2f}", f"{low:+.2f} to {high:+.2f}"])
        for loop, count in figures["counts"].items():
            counts.append(
                [
                    strategy,
                    loop,
                    f"{count['calls']:,}",
                    f"{count['reads']}",
                    f"{count['collectives']}",
                    f"{count['bytes'] / 1e6:.2f}",
                    f"{count['blocks kept']:.0f}",
                ]
            )
    single = results["strategies"]["single"]["ms more"]["recipe - accelerate"]
    verdict = "met" if single["median"] <= LOOP_GOAL_MS else "missed"
    low, high = single["quartiles"]
    if high - low > LOOP_GOAL_MS:
        verdict += f"; the spread, {low:+.2f} to {high:+.2f} ms, is larger than the goal"
    return (
        "## Cost of the training loop\n\n"
        f"Measured with `python benchmarks/loop.py`: {describe_conditions(results)}\n\n"
        "A tiny Llama (hidden size 64, 4 layers), 4 rows of 64 tokens, so that the loop takes a large part of a step. In each\n"
        f"of {results['rounds']} rounds, every loop takes one step on the same model. *compute*: the model, clipping and "
        "AdamW.\n"
        "*+ wrapper*: through DDP or FSDP2. *+ data*: with a DataLoader. *accelerate*: the loop of accelerate's\n"
        "documentation. *recipe*: the recipe's run, with spike monitor, runlog, hang monitor and a log point every 10\n"
        "steps.\n\n"
        f"Goal: at most {LOOP_GOAL_MS:.2f} ms a step above accelerate's own loop. One process: {single['median']:+.2f} ms "
        f"({verdict}).\n\n"
        + table(["strategy", "difference", "ms a step, median of pairs", "quartiles"], differences)
        + "\nCounts of one step between log points: Python and C calls, times that the host reads a tensor, collectives,\n"
        "MB of their buffers, and blocks of memory that Python keeps after a step. Under FSDP2, there is no *compute* loop,\n"
        "since the model does not run without its wrapper, and the all-reduce of the gradient norm is counted for the recipe\n"
        "only: the other loops do it inside a DTensor.\n\n"
        + table(["strategy", "loop", "calls", "tensor reads", "collectives", "MB", "memory blocks kept"], counts)
    )


def describe_peers(peers: dict[str, Any]) -> str:
    """Return the section that compares the same finetuning in TRL and in Trainer, from benchmarks/peers.py."""
    measured_jobs = [job for job in JOBS if job in peers]
    rows = []
    comparisons = []
    for job in measured_jobs:
        arms = peers[job]["arms"]
        rows += [_peer_row(JOBS[job], arm, figures) for arm, figures in arms.items()]
        comparisons += _compare_with_goals(job, arms)
    # The machine and the versions are the same in all jobs.
    conditions = describe_conditions(peers[measured_jobs[0]] | {"cores": peers["cores"]})
    columns = ["job", "trainer", "supervised tokens/s", "seconds a step (quartiles)", "peak memory, MB"]
    columns += ["seconds until the first step", "mean loss of all steps"]
    missing = [title for job, title in JOBS.items() if job not in peers]
    not_run = f"\nNot run: {'; '.join(missing)}.\n" if missing else ""
    return (
        "## The same finetuning by TRL and by Trainer\n\n"
        f"Measured with `python benchmarks/peers.py`: {conditions}\n"
        f"{peers['packages'][0].replace('==', ' ')}, fp32. All trainers have the same model, data, rows and optimizer, and\n"
        "use every sample once. Their random orders of the samples differ, and so do their losses. "
        f"{counted(peers['rounds'], 'run', 'runs')} of 10 steps. TRL\ncomputes token accuracy and entropy in each step. "
        "Seconds a step are medians over the steps after the first\ntwo, without compilation. The column *seconds until the "
        "first step* is empty if that step compiles.\n\n"
        + table(columns, rows)
        + "\n"
        + table(["job", "trainer", "compared with", "ratio of supervised tokens/s", "goal", "goal met?"], comparisons)
        + not_run
        + "\nLikely cause of the goals that are missed without flags: fp32 matrix products take most of a step, and are\n"
        "equally fast in all trainers.\n"
    )


def _peer_row(title: str, arm: str, figures: dict[str, Any]) -> list[str]:
    low, high = figures["quartiles"]
    return [
        title,
        ARMS[arm],
        f"{figures['supervised tokens/s']:.1f}",
        f"{figures['seconds a step']:.2f} ({low:.2f} to {high:.2f})",
        f"{figures['peak memory, MB']:,}",
        "" if arm in COMPILED else f"{figures['first step after, s']:.0f}",
        f"{figures['mean loss']:.3f}",
    ]


def _compare_with_goals(job: str, arms: dict[str, Any]) -> list[list[str]]:
    """Return the rows that compare the speed of Zerobook with that of other trainers in a job."""
    peer, goal = GOALS[job]
    pairs = [("zerobook", peer, goal), ("zerobook, flags", peer, goal), ("zerobook, flags", "trl, compiled", goal)]
    if peer != "trainer":
        pairs.append(("zerobook", "trainer", TRAINER_GOAL))
    rows = []
    for arm, other, ratio_goal in pairs:
        if arm in arms and other in arms:
            ratio = arms[arm]["supervised tokens/s"] / arms[other]["supervised tokens/s"]
            verdict = "met" if ratio >= ratio_goal else "missed"
            rows.append([JOBS[job], ARMS[arm], ARMS[other], f"{ratio:.2f}", f"{ratio_goal:.2f}", verdict])
    return rows


def describe_flags(results: dict[str, Any]) -> str:
    """Return the section on the effect of single settings, from benchmarks/flags.py."""
    titles = {
        "masked": "loss of all logits, with an attention mask",
        "unmasked": "loss of all logits, no mask",
        "in the head": "loss in the output layer, of supervised tokens only (the default)",
        "compiled": "the default and `--torch_compile`",
        "joined": "the default and `--padding_free`",
        "both": "the default and both flags",
    }
    rows = []
    for setting, title in titles.items():
        seconds = results["seconds"][setting]
        speedup = results["seconds"]["masked"] / seconds
        rows.append([title, f"{seconds:.2f}", f"{speedup:.2f}"])
    return (
        "## Effect of single settings\n\n"
        f"Measured with `python benchmarks/flags.py`: {describe_conditions(results)}\n\n"
        "Forward and backward pass of LoRA r 16 on SmolLM2-135M, 4 chats of 70 to 128 tokens. Half of the tokens are\n"
        f"supervised. The losses differ by at most {results['losses differ by']:.1e} of their value. Compiling takes "
        f"{results['first compiled step, s']:.0f} s once.\n\n" + table(["setting", "seconds a step", "speedup"], rows)
    )


def describe_growth(growth: dict[str, Any]) -> str:
    """Return the section on long runs, and on many rows and parameters, from benchmarks/growth.py."""
    run = growth["run"]["figures"]
    milliseconds = [1000 * seconds for _, seconds, _ in run["step, seconds, rss"]]
    low, middle, high = statistics.quantiles(milliseconds, n=4)
    noise = (high - low) / middle
    long_run = [
        _growth_row(f"step time over {run['steps']:,} steps", run["step time, growth"]),
        _growth_row("resident memory over these steps", run["rss, growth"]),
    ]
    if GROWTH_GOAL <= run["step time, growth"] < noise:
        long_run[0][-1] += " (within the noise, see below)"
    data = [
        [
            f"{result['rows']:,}",
            f"{result['prepared and started, s']:.1f}",
            f"{result['started again, s']:.1f}",
            f"{1000 * result['seconds a step']:.1f}",
            f"{result['rss'] / 1e6:,.0f}",
        ]
        for result in growth["data"]["figures"]
    ]
    resumes = [[f"{resume['step']:,}", f"{resume['until training, s']:.1f}"] for resume in run["resumes"]]
    sizes = [
        [
            f"{result['parameters']:,}",
            f"{result['checkpoint'] / result['parameters']:.1f}",
            f"{result['save, s']:.2f}",
        ]
        for result in growth["model"]["figures"]
    ]
    conditions = describe_conditions(growth["run"] | {"cores": growth["cores"]})
    return (
        "## Scaling\n\n"
        f"Measured with `python benchmarks/growth.py`: {conditions}\n"
        "Llamas with random weights, fp32.\n\n"
        "![time and memory against processes, length, rows, data, steps and parameters](growth.png)\n\n"
        + table(["a long run", "growth", "goal", "goal met?"], long_run)
        + f"\nThe medians of 100 steps vary with the machine (quartiles {low:.2f}, {middle:.2f} and {high:.2f} ms), so\n"
        f"growth of the step time below about {noise:.0%} cannot be detected. Growth is the Theil-Sen\n"
        "slope of these medians times the number of steps, as a share of their median.\n\n"
        + table(["rows of data", "first start with preparation, s", "second start, s", "ms a step", "memory, MB"], data)
        + "\n"
        + table(["resumed at step", "until training, s"], resumes)
        + "\n"
        + table(["parameters", "checkpoint bytes per parameter", "save, s"], sizes)
    )


def _growth_row(quantity: str, growth: float) -> list[str]:
    verdict = "met" if growth < GROWTH_GOAL else "missed"
    return [quantity, f"{growth:+.2%}", f"below {100 * GROWTH_GOAL:.0f} %", verdict]


def draw(growth: dict[str, Any], file: Path) -> None:
    """Draw the results of benchmarks/growth.py: points are measured, dashed lines are what a simple formula gives."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    _draw_ranks(axes[0, 0], growth["ranks"]["figures"], growth["cores"])
    _draw_step_time(axes[0, 1], growth["length"]["figures"], "tokens", "tokens of a row", degree=2)
    _draw_step_time(axes[0, 2], growth["rows"]["figures"], "rows", "rows of a micro-batch", degree=1)
    _draw_step_time(axes[1, 0], growth["data"]["figures"], "rows", "rows of data", degree=0)
    axes[1, 0].set_xscale("log")
    _draw_long_run(axes[1, 1], growth["run"]["figures"]["step, seconds, rss"])
    _draw_checkpoint_size(axes[1, 2], growth["model"]["figures"])
    figure.savefig(file, dpi=80)
    plt.close(figure)


def _draw_ranks(axis: Any, results: list[dict[str, Any]], cores: int) -> None:
    processes = [result["processes"] for result in results]
    rates = [result["tokens/s"] for result in results]
    # With more processes than cores, the cores are shared.
    ideal = [rates[0] * min(number, cores) for number in processes]
    _plot(axis, processes, rates, ideal, f"one process x cores ({cores})")
    axis.set(title="tokens a second, DDP", xlabel="processes")


def _draw_step_time(axis: Any, results: list[dict[str, Any]], key: str, label: str, degree: int) -> None:
    """Draw the time of a step over ``results[...][key]``, and a polynomial; with degree 0, the first time as a constant."""
    x = [result[key] for result in results]
    milliseconds = [1000 * result["seconds a step"] for result in results]
    if degree == 0:
        expected, description = [milliseconds[0]] * len(x), "constant"
    else:
        expected, description = fitted(x, milliseconds, degree)
    _plot(axis, x, milliseconds, expected, description)
    axis.set(title="ms a step", xlabel=label)


def _draw_long_run(axis: Any, points: list[tuple[int, float, float]]) -> None:
    """Draw step times and resident memory of a long run. ``points`` are (step, seconds, bytes)."""
    steps = [step for step, _, _ in points]
    milliseconds = [1000 * seconds for _, seconds, _ in points]
    # In units of 100 MB, memory fits on the axis of the times.
    memory = [resident / 1e6 / 100 for _, _, resident in points]
    axis.plot(steps, milliseconds, ".", color="#1f5fa8", markersize=3, label="ms a step, median of 100")
    axis.plot(steps, memory, "-", color="#1a7f37", label="resident memory, 100 MB")
    axis.set(title="a long run", xlabel="step", ylim=(0, None))
    axis.legend(frameon=False)


def _draw_checkpoint_size(axis: Any, results: list[dict[str, Any]]) -> None:
    millions = [result["parameters"] / 1e6 for result in results]
    megabytes = [result["checkpoint"] / 1e6 for result in results]
    expected = [12 * number for number in millions]
    _plot(axis, millions, megabytes, expected, "12 bytes a parameter (fp32 AdamW)")
    axis.set(title="MB of a checkpoint", xlabel="million parameters")


def _plot(axis: Any, x: list[float], measured: list[float], expected: list[float], description: str) -> None:
    axis.plot(x, measured, "o-", color="#1f5fa8", label="measured")
    axis.plot(x, expected, "--", color="#d55e00", label=description)
    axis.set(ylim=(0, 1.15 * max([*measured, *expected])))
    axis.legend(frameon=False)


def fitted(x: list[float], y: list[float], degree: int) -> tuple[list[float], str]:
    """Return (the values at ``x`` of a polynomial that is fitted to the points, its formula). ``degree`` is 1 or 2."""
    import numpy as np

    # The weights make errors relative to ``y``.
    coefficients = np.polyfit(x, y, degree, w=1 / np.array(y))
    formula = {1: "a + b n", 2: "a + b n + c n²"}[degree]
    return np.polyval(coefficients, x).tolist(), formula


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    head = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def span(values: Any) -> str:
    """Return the smallest and the largest value as text."""
    return f"{min(values):.1f} to {max(values):.1f}"


def section(title: str, program: str, conditions: str, rows: list[list[str]]) -> str:
    """Return a section with one table of measurements and values."""
    measurements = table(["measurement", "value"], rows)
    return f"## {title}\n\nMeasured with `python {program}`: {conditions}\n\n{measurements}"


TRAINING = {"loop": describe_loop, "peers": describe_peers, "flags": describe_flags, "growth": describe_growth}
"""Result of a benchmark of training -> the function that writes its section. Without a result, the page has no section."""


if __name__ == "__main__":
    main()
