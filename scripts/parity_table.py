"""Write pages of docs/measured/ from what the tests measure that run all strategies and recipes.

usage: parity_table.py MEASURED.jsonl FOLDER
"""

import json
import os
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from zerobook.config_sources import ConfigSources
from zerobook.plan.hardware import cluster
from zerobook.plan.rows import resolve_launch_plan
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.versions import versions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the installed package

from benchmarks.machine import processor  # noqa: E402

PARITY = """# Any strategy, the same training: measured

Ten steps of 4 chats each, in fp32, launched by `accelerate launch` with the shipped file, and compared with one process that
has the same settings. The chats have different lengths. The optimizer is AdamW if no other is named. Between the steps, every
run evaluates (before the first step, then every second one), generates, saves (every fourth step), and rolls back once, from
step 6 to step 4. The columns *loss*, *gradient norm* and *held-out loss* have the largest relative differences of the complete
run. The column *weights* has the largest absolute difference after it.
Written by `make test-full`.

Each row names its rate and AdamW's epsilon; the process that it is compared with has the same.

- `causal_lm` trains all weights of a tiny Llama.
- `lora_finetune` trains adapters of rank 32 on the same 4 chats at every step. Half of an adapter has no gradient at the first
  step. With a small epsilon, AdamW would turn rounding errors into full steps.
- `dora`, `pissa` and `ia3` are `lora_finetune` with that `--adapter`.
- `joined` is `lora_finetune` with `--padding_free`, against one process that pads.
- `moe` trains all weights of a tiny Mixtral with 4 experts in each layer, of which a token takes 2.
- `qlora` is `lora_finetune` with an NF4 base. On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights in evaluations, and
  Zerobook prevents it. To test this on any CPU, the test tells bitsandbytes that the CPU has AVX512-BF16.
- `int8` is `lora_finetune` with an int8 base. Its layers round activations to 256 values, so differences of 1e-6 between
  weights can change a held-out loss by 1e-4 (zero2_offload).
- `vocabulary` trains all weights of a Llama with an embedding of 49,152 x 576 (under zero3_nvme, of `wide`), for 6 steps
  without evaluations or saves between them. Sums over so many numbers lose digits in fp32.
- `causal_lm, sgd`, `causal_lm, adafactor` and `causal_lm, adamw_8bit` are `causal_lm` with another optimizer, without
  evaluations or saves between the steps. A strategy has a row if it supports the optimizer. 8-bit state has 256 values: if a
  sum in another order rounds a moment to another value, the moment changes by some percent.
- `router` trains a tiny Qwen3-MoE with the loss that balances its experts. This loss depends on the division into
  micro-batches, so both runs have the same ones.
- `gemma3`, `composite` (Gemma 3 beside a vision tower), `images` (Mllama), `marian`, `pegasus` and `mbart` train a tiny model
  of that class: all weights that text uses, except for fixed positions. `composite_lora` and `recurrent` (RecurrentGemma) train
  adapters.
- The model `wide` has tensors that are large enough to be swapped to disk.

On a CPU the offload rows run DeepSpeed's and FSDP2's real offload code, but there is no device memory to offload from.
zero3_hpz was launched as on two machines of two processes each.
"""
QUANTISED = """# Frozen bases and strategies: measured

`lora_finetune` on a tiny Llama, with fp32 adapters of rank 32, compared with one process. The runs are those of the recipes
`lora_finetune`, `qlora` and `int8` in [parity.md](parity.md), which has the numbers of processes. A cell has two figures: the
largest relative difference of a loss, and the bytes of parameters on the rank that has most. The row `single` is the one
process, so it has only the bytes. The row `zero3_nvme` is of a larger model (`wide` in parity.md), so its bytes cannot be
compared with those of other rows. The bytes include the scales of quantised layers, which every rank holds completely. In a
cell with `refused`, the run ends with a ConfigError before any process group exists. Below the table, each reason follows the
names of the strategy files that are refused for it. In a model this small, embeddings and adapters in fp32 are most of the
bytes, and the scales of a layer (1 KB) are as large as a small weight matrix.
Written by `make test-full`.
"""
RESUME = """# Any checkpoint, any strategy: measured

The first run of a row trains twenty AdamW steps on 4 chats in fp32, and saves a checkpoint of the tenth. The second run resumes
from this checkpoint under another strategy or number of processes, and trains the last ten steps. `accelerate launch` starts
both with the shipped files. Loss and gradient norm: the largest relative difference between the two runs over these ten steps.
Moments: the largest difference of Adam's moments after the last step, relative to the largest value of the tensor. The tokens
that reached the model were the same in every row. Rows of zero3_sequence, fsdp_context, fsdp_tensor and fsdp_experts have eight
steps, and continue from the fourth. The comparison finds errors: if Adam's moments or its step count are set to 0 in the
checkpoint, the losses differ by more than 1e-4. Written by `make test-full`.
"""

IMPORTED = """# Other trainers' checkpoints whose training was continued: measured

Each row is a training of six AdamW steps on CPUs, each step on the same batch of 8 chats. One program trains the first three
steps and saves a checkpoint. The rest is trained from this checkpoint, in most rows by another program or under another
strategy. The first program also trains all six steps itself. *Loss* is the largest relative difference between its losses and
those of the last program, at the steps that the last program trains.

The first column names the program that saved the checkpoint: `trainer-...` is transformers' Trainer, `accelerate-...` is a loop
on accelerate, and `zerobook ...` is Zerobook. The third column names what trained the rest:

- The name of a strategy: `zerobook checkpoint import` converted the checkpoint, and Zerobook trained under this strategy.
- `A, then trainer-...`: the same, but Zerobook trained only the fourth step. Trainer trained the last two, from a result of
  `zerobook checkpoint export`.
- `trainer-...-universal`: Trainer trained with DeepSpeed, from a result of `zerobook checkpoint export --to deepspeed`.
- `accelerate-...`: the checkpoint was imported and exported again, and the loop on accelerate trained.

`on N` is the number of processes. `accelerate-fsdp2-full` saves a full state dict, and `accelerate-fsdp2` a sharded one. With
`universal`, DeepSpeed loads a universal checkpoint (`load_universal`). In the rows with `adamw`, and in
`trainer-zero3-universal` (with offload), DeepSpeed's JSON sets the optimizer. In the other rows of Trainer, Trainer creates
it. Written by `make test-full`.
"""

HOST = """# Host RAM while a model is loaded: measured

The table has the memory (anonymous and shared) of all 4 ranks of a host together, above what they had before `causal_lm`
loads and prepares a Llama. A figure of 1 is one copy of its weights in fp32 (0.86 GB; the file, in bf16, has 0.43 GB).
Pages of the mapped file are page cache, and are not included. *Planned* is what `zerobook plan` computes for the column
*loading, peak*. On a CPU, the preparation of ZeRO-3 also allocates its master copies and gradients, which are kept. Written by
`make test-full`.
"""

NODES = """# Faults of several hosts: measured

`causal_lm` runs on two simulated hosts (network namespaces with a link each) with `--hang_timeout 6` (15 in the rows *link cut
for 5 s*, 60 in the rows that say so; the default is 300). Nothing was run on real hosts or with NCCL. Written by
`make test-nodes`.

- *Ranks*: the number of ranks on the first and on the second host.
- *Seconds*: the time from the fault until
  - the launcher of the other host has ended, if the run stops (both launchers, if a link is cut or a data loader hangs)
  - the runlog names the cause, if the ranks are restarted
  - the run has done six more steps, in the rows *link cut for 5 s*.

  In the other rows, no time was measured (-).
- *Reported cause* is empty (-) if the run continues without a restart.
- Runs in which fewer ranks train, also for a while only, were launched with `zerobook launch --min_machines 1`. The other runs
  that were restarted were launched with `--rdzv_backend c10d --max_restarts 3`.
- In the phase *data*, a process may be without progress for twice `--hang_timeout`.
- "7 s later" counts from the fault, or, if the host or the link comes back, from its return.
"""

TRAFFIC = """# Bytes between hosts: planned and measured

The table has the bytes that a host sends to the other host in a step, as the mean of 20 steps. `causal_lm` and `lora_finetune`
trained a Llama of 3.3M parameters in fp32 on two simulated hosts. The bytes were counted at the hosts' network devices. These
also count headers and acknowledgements. gloo's
reduce-scatter sends as much as its all-reduce, twice what NCCL's ring sends, so ZeRO-3 and FSDP2 send less on GPUs. hpZ saves
traffic if weights are frozen. In a full finetune of a model this small, ZeRO-3 keeps all weights until the backward pass, so
hpZ saves nothing.
Written by `make test-nodes`.
"""

PLAN = """# Planned against measured

This page compares planned and measured bytes in the fourth step of real runs. (The first steps differ: memory is still being
allocated.) The runs were launched by `accelerate launch` with the project's strategy files, with micro-batches of two rows of
at most 64 tokens and tiny models of transformers' classes. The figures are those of the rank with the largest error:

- *weights*, *gradients* and *optimizer* state: bytes after the backward pass and before the optimizer step. The test requires
  that they equal the plan.
- *activations*: bytes that autograd saved in the forward pass
- *sent*: bytes that a rank sends in the step if every collective goes around a ring, computed from the sizes of the tensors
- *state error*: planned / measured - 1, for the sum of weights, gradients and optimizer; *activations error* and *sent error*:
  the same for the column before

*job* is the model and what is special in the run. `llama`, `gpt2` (two micro-batches in a step), `bart` and `wide` are tiny
models of which all weights are trained. `bf16` is `llama` with this `--mixed_precision`. Three jobs have an
`--activation_checkpointing`: `checkpointing` (true, the same as full) and `selective` are `gpt2` with one micro-batch, and
`every second layer` (every:2) is `llama`. `lora`, `packed lora`, `qlora` and `int8` train adapters of the `llama`, `wide lora`
those of `wide`. `evaluated first` is `lora` with an evaluation before the first step.

`zero3_hpz` ran with groups of two, as on two nodes. `zero3_nvme_little` is `zero3_nvme` with `max_in_cpu` 10^5, the number of
elements per rank that stay in host RAM. In the rows named *forgetting*, ZeRO-3 frees gathered weights at once
(`stage3_max_reuse_distance` and `stage3_prefetch_bucket_size` are 0). In the rows named *narrow*, `stage3_max_reuse_distance`
is 60,000 and `stage3_max_live_parameters` is 70,000, so that a tiny model reaches these limits, as large models reach the
defaults of 10^9. Written by `make test-full`.

The part `planner` of `python benchmarks/gpu.py all` compares planned and measured peaks of the CUDA allocator.
[gpu.md](gpu.md) says whether it has run.
"""

PARITY_FIGURES = {"epsilon": "g", "loss": ".1e", "norm": ".1e", "held_out": ".1e", "weight": ".1e", "fall": ".0%"}
"""Columns of the parity table that a row may lack, with their format."""
BASES = {"lora_finetune": {}, "qlora": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}
"""Case of the parity tests -> the flags of its frozen base."""
STATE = ("parameters", "gradients", "optimizer")

# A line of MEASURED.jsonl: the measurement of one test. Its key ``table`` names the table to which it belongs.
Record = dict[str, Any]


def main(source: str, target: str) -> None:
    measured: dict[str, list[Record]] = {}
    for line in Path(source).read_text().splitlines():
        record = json.loads(line)
        measured.setdefault(record["table"], []).append(record)
    for name, (table, text, columns, make_row) in PAGES.items():
        rows = [make_row(record) for record in measured.get(table, [])]
        write(Path(target) / name, text, columns, rows)
    # This page has a row for each strategy file, with several records of the parity table in it.
    if "parity" in measured:
        rows, reasons = quantised_rows(measured["parity"])
        columns = ["strategy file", "fp32 base", "NF4 base", "int8 base"]
        write(Path(target) / "quantised.md", QUANTISED, columns, rows, notes=[f"- {reason}" for reason in reasons])


def write(file: Path, text: str, columns: list[str], rows: list[list[str]], notes: list[str] | None = None) -> None:
    """Write a page, unless nothing was measured for it. ``notes`` are lines below the table."""
    if not rows:
        return
    content = page(text, columns, rows)
    if notes:
        content = "\n".join([content, *notes, ""])
    file.write_text(content)
    print(f"wrote {file}: {len(rows)} rows")


def page(text: str, columns: list[str], rows: list[list[str]]) -> str:
    """Return Markdown: the text, the hardware and versions of the measurement, and a table."""
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "zerobook")
    lines = [f"Hardware: {processor()}, {os.cpu_count()} cores, gloo. Date: {date.today()}. {libraries}.", ""]
    for row in (columns, ["---"] * len(columns), *rows):
        lines.append(f"| {' | '.join(row)} |")
    return text + "\n" + "\n".join(lines) + "\n"


# --- the row of a record, for each table
def parity_row(record: Record) -> list[str]:
    row = [record["strategy"], record["recipe"], record["model"], str(record["processes"]), f"{record['rate']:g}"]
    for key, form in PARITY_FIGURES.items():
        row.append("" if record[key] is None else f"{record[key]:{form}}")
    return row


def resume_row(record: Record) -> list[str]:
    differences = [f"{record[key]:.1e}" for key in ("loss", "norm", "moments")]
    return [record["recipe"], record["writer"], record["reader"], *differences]


def imported_row(record: Record) -> list[str]:
    # Some names of the test end with the number of processes, which follows anyway.
    names = [record[key].replace("-on-4 on 4", " on 4") for key in ("trainer", "recipe", "reader")]
    return [*names, f"{record['loss']:.1e}"]


def plan_row(record: Record) -> list[str]:
    # Each figure of the record is (planned, measured).
    planned_state = sum(record[kind][0] for kind in STATE)
    measured_state = sum(record[kind][1] for kind in STATE)
    return [
        record["strategy"],
        str(record["ranks"]),
        record["job"],
        *(f"{record[kind][1]:,}" for kind in STATE),
        error(planned_state, measured_state),
        f"{record['activations saved'][1]:,}",
        error(*record["activations saved"]),
        f"{record['sent'][1]:,.0f}",
        error(*record["sent"]),
    ]


def host_row(record: Record) -> list[str]:
    figures = [f"{record[key] / record['weights']:.2f}" for key in ("planned", "load", "prepare", "after")]
    return [record["strategy"], *figures]


def traffic_row(record: Record) -> list[str]:
    planned, measured = record["sent"]
    figures = [f"{planned / 1e6:.2f}", f"{measured / 1e6:.2f}", error(planned, measured)]
    return [record["strategy"], record["recipe"], record["ranks"], *figures]


def nodes_row(record: Record) -> list[str]:
    seconds = "-" if record["seconds"] is None else f"{record['seconds']:.1f}"
    cause = shorten_report(record["named"])
    return [record["fault"], record["strategy"], record["ranks"], seconds, cause, record["ends"]]


def error(planned: float, measured: float) -> str:
    """Return the error relative to the measured figure."""
    if planned == measured:
        return "0"
    ratio = planned / measured - 1
    return "< 0.01%" if abs(ratio) < 1e-4 else f"{ratio:+.2%}"


def shorten_report(report: str) -> str:
    """Return the message of an error without its class and without folders, which are those of the test."""
    without_class = re.sub(r"^\w+: ", "", report)
    return re.sub(r"/\S*/", "", without_class).rstrip(".") or "-"


def quantised_rows(parity: list[Record]) -> tuple[list[list[str]], list[str]]:
    """Return the rows of quantised.md from the records of the parity table, and the reasons why bases are refused."""
    records = {(record["strategy"], record["recipe"]): record for record in parity if record["recipe"] in BASES}
    # Every record has the bytes of the rank that holds most, and those of the one process that it was compared with.
    bytes_of_one_process = {}
    for record in records.values():
        bytes_of_one_process.setdefault(record["recipe"], record["held"][1])
    rows = []
    # Reason -> the strategy files that are refused for it.
    reasons: dict[str, list[str]] = {}
    for file in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        row = [file.stem]
        for case, flags in BASES.items():
            problems = find_problems(file, flags)
            record = records.get((file.stem, case))
            if problems:
                row.append("refused")
                reasons |= {problem: [*reasons.get(problem, []), file.stem] for problem in problems}
            elif file.stem == "single" and case in bytes_of_one_process:
                row.append(f"{bytes_of_one_process[case]:,} bytes")
            elif record is None:
                row.append("not run")
            else:
                row.append(f"{record['loss']:.1e}, {record['held'][0]:,} bytes")
        rows.append(row)
    return rows, [f"{', '.join(dict.fromkeys(files))}: {reason}" for reason, files in reasons.items()]


def find_problems(strategy_file: Path, flags: dict[str, bool]) -> list[str]:
    """Return why a finetuning with these flags is refused under a strategy, as far as the launch plan tells."""
    config_class = recipe_class(str(ROOT / "recipes" / "lora_finetune.py")).config_class
    config = config_class(model_name_or_path="NAME", dataset_name="NAME", **flags)
    sources = ConfigSources(dict.fromkeys(config_class.model_fields, "default"))
    plan = resolve_launch_plan(strategy_file, cluster(gpus="4", gpu="a100-80gb"), config, sources)
    # Several strategies are refused for the same reason, which is listed once.
    return [problem.replace(plan.name, "this strategy", 1) for problem in plan.problems]


PARITY_COLUMNS = [
    "strategy file",
    "recipe",
    "model",
    "processes",
    "rate",
    "epsilon",
    "loss",
    "gradient norm",
    "held-out loss",
    "weights",
    "loss fell by",
]
PLAN_COLUMNS = [
    "strategy file",
    "ranks",
    "job",
    "weights",
    "gradients",
    "optimizer",
    "state error",
    "activations",
    "activations error",
    "sent",
    "sent error",
]
RESUME_COLUMNS = ["recipe", "saved under", "continued under", "loss", "gradient norm", "moments"]
IMPORTED_COLUMNS = ["saved by", "recipe", "continued by", "loss"]
HOST_COLUMNS = ["strategy file", "planned", "loading, peak", "preparing, peak", "afterwards"]
TRAFFIC_COLUMNS = ["strategy file", "recipe", "ranks", "planned, MB", "measured, MB", "error"]
NODES_COLUMNS = ["fault", "strategy file", "ranks", "seconds", "reported cause", "what happens"]
PAGES = {
    "parity.md": ("parity", PARITY, PARITY_COLUMNS, parity_row),
    "resume.md": ("resume", RESUME, RESUME_COLUMNS, resume_row),
    "imported_checkpoints.md": ("imported", IMPORTED, IMPORTED_COLUMNS, imported_row),
    "host_memory.md": ("host", HOST, HOST_COLUMNS, host_row),
    "plan_errors.md": ("plan", PLAN, PLAN_COLUMNS, plan_row),
    "traffic.md": ("traffic", TRAFFIC, TRAFFIC_COLUMNS, traffic_row),
    "nodes.md": ("nodes", NODES, NODES_COLUMNS, nodes_row),
}
"""File of a page -> (table of the records, text above the table, columns, function that makes a row of a record)."""


if __name__ == "__main__":
    main(*sys.argv[1:])
