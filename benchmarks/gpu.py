"""Measure what one GPU can show, without a network: a list of cases, each recorded when it ends.

    python benchmarks/gpu.py all [--minutes 8]
    python benchmarks/gpu.py machine|tests|parity|precision|planner|tables|speed|models

machine     versions, kernels, compiled ops, measured rates of matrix products and copies
tests       the tests that are marked ``gpu``
parity      fp32 training on the GPU under every strategy that one GPU has, against one process on the CPU: with evaluation,
            generation, a rollback between the steps, and a resume
precision   losses in bf16, in fp16, under each attention backend and with the published DeepSpeed files, against eager fp32
planner     planned against measured peaks of CUDA's allocator, over 27 configurations of three architectures
tables      the published batches of tables A and B of scripts/reproduce_tables.py, under 24 GB
speed       seconds and tokens a second of a step under every strategy
models      tokens a second, memory and MFU of well-known shapes from 0.4 to 8 10^9 parameters, beside the card's own rate on
            their matrices

Cases that already have results are skipped, also those that failed: to run one again, delete its row or its file. With
``--minutes``, no case starts after that time, and a case that was cut short is run again by the next call. Models are made
here with random weights, their tokenizer from the source text of the Python standard library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tables are no part of the installed package

from benchmarks.gpu_models import models, seconds
from benchmarks.gpu_setting import Case, Row, Setting
from benchmarks.published.bench import Bench
from benchmarks.published.trial import Arm, attempt
from zerobook.cli.plan import here
from zerobook.runlog.writer import EVENTS, read
from zerobook.runlog.writer import STEPS as STEPS_FILE
from zerobook.utils import subprocess_launch
from zerobook.utils.devices import find_device
from zerobook.utils.versions import versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT_S = 300.0
"""Seconds that a case may take."""


# --- the machine
def machine(setting: Setting) -> dict[str, Case]:
    return {"libraries": partial(_libraries, setting), "compiled ops": _ops, "rates": partial(_measured_rates, setting)}


def _libraries(setting: Setting, left: float, rows: dict[str, Row]) -> Row:
    import torch

    found: Row = {"packages": {}}
    for package in ("bitsandbytes", "flash-attn", "triton", "datasets", "nvidia-ml-py"):
        try:
            found["packages"][package] = version(package)
        except PackageNotFoundError:
            found["packages"][package] = None
    found |= {"nvcc": shutil.which("nvcc"), "cores": os.cpu_count(), "CUDA of torch": torch.version.cuda}
    if not setting.cpu:
        facts, like = torch.cuda.get_device_properties(0), find_device(torch.cuda.get_device_name(0))
        found |= {
            "memory": facts.total_memory, "multiprocessors": facts.multi_processor_count,
            "capability": f"{facts.major}.{facts.minor}", "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())), "planner knows it as": like.name if like else None,
        }  # fmt: skip
        if shutil.which("nvidia-smi"):
            line = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
            found["driver"] = subprocess_launch.run(line, left)[1].strip()
    return found


def _ops(left: float, rows: dict[str, Row]) -> Row:
    """Compile the DeepSpeed ops that cases need, CPU Adam and pinned memory, before the time of a case is counted."""
    wanted = ("cpu_adam", "pin_memory")
    line = [sys.executable, "-c", f"import json; from zerobook.launch import ops; print(json.dumps(ops.compile_ops({wanted})))"]
    code, text = subprocess_launch.run(line, left, cwd=ROOT)
    return _died(code, text, left) or {"ops": dict(json.loads(text.strip().splitlines()[-1]))}


def _measured_rates(setting: Setting, left: float, rows: dict[str, Row]) -> Row:
    """Run `rates` in its own process, since its CUDA context would stay on the device afterwards."""
    size, device = 256 if setting.tiny else 8192, "cpu" if setting.cpu else "cuda"
    line = [sys.executable, "-c", f"import json; from benchmarks import gpu; print(json.dumps(gpu.rates({size}, {device!r})))"]
    code, text = subprocess_launch.run(line, left, cwd=ROOT)
    return _died(code, text, left) or json.loads(text.strip().splitlines()[-1])


def rates(size: int, device: str) -> Row:
    """Return operations a second of matrix products and bytes a second of a copy, the median of 10 on random numbers."""
    import torch

    median = partial(seconds, device=device, rounds=10)
    found: Row = {"size": size}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"{name}, operations/s"] = 2 * size**3 / median(partial(torch.matmul, one, other))
    source = torch.randn(size * size * 8, device=device)
    target = torch.empty_like(source)
    found["copy, bytes/s read and written"] = 2 * source.numel() * 4 / median(partial(target.copy_, source))
    return found


def _died(code: int, text: str, limit: float) -> Row:
    """Return ``died`` of a run that failed; empty where it succeeded."""
    if code == 0:
        return {}
    how = (
        f"stopped after {limit:.0f} s"
        if code == subprocess_launch.TIMED_OUT
        else f"exit status {code}: {subprocess_launch.last_error(text)}"
    )
    return {"died": how, "output": text[-3000:]}


# --- tests
TESTS_NEED = {"pytest": "pytest", "hypothesis": "hypothesis", "chatterbot_corpus": "chatterbot-corpus"}
"""Module -> package, of the imports of tests that training does not need."""


def tests(setting: Setting) -> dict[str, Case]:
    """Return a case for each file with tests that are marked ``gpu``."""
    files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text())
    return {file.name: partial(_marked, setting, file) for file in files}


def _marked(setting: Setting, file: Path, left: float, rows: dict[str, Row]) -> Row:
    missing = [package for module, package in TESTS_NEED.items() if not find_spec(module)]
    if missing:
        return {"not run": f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"}
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(file)]
    code, text = subprocess_launch.run(line, left, {"DS_ACCELERATOR": "cpu" if setting.cpu else "cuda"}, cwd=ROOT)
    return _died(code, text, left) or {"said": text.strip().splitlines()[-1], "output": text[-3000:]}


# --- the GPU against the CPU
BETWEEN = ROOT / "tests" / "distributed" / "between.py"
"""Script that generates at every evaluation, and rolls back once."""
BACK_AT, SAVED_AT, LENGTH = 6, 4, 10
TOLERANCE = 1e-5
"""Relative tolerance of the loss and gradient norm of every step, and of held-out losses."""
ZERO = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
PAIRS = {
    "causal_lm": ("single", *ZERO, "fsdp"),
    "lora_finetune": ("single", "zero2", "zero3", "fsdp"),
    "qlora": ("single", "zero2", "zero3", "fsdp"),
}
"""Kind of finetuning -> strategy files, one process each."""


def parity(setting: Setting) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for kind, strategies in PAIRS.items():
        found[f"{kind}, CPU"] = partial(_trained, setting, kind, "single", None)
        for strategy in strategies:
            found[f"{kind}, {strategy}"] = partial(_trained, setting, kind, strategy, f"{kind}, CPU")
    return found


def _trained(setting: Setting, kind: str, strategy: str, reference: str | None, left: float, rows: dict[str, Row]) -> Row:
    """Train, evaluate, save, generate and roll back; then resume from the first checkpoint as after a kill."""
    if kind == "qlora" and not find_spec("bitsandbytes"):
        return {"not run": "bitsandbytes is not installed"}
    until = time.monotonic() + left
    environment = {"ZEROBOOK_BETWEEN_BACK_AT": str(BACK_AT)} | ({"CUDA_VISIBLE_DEVICES": ""} if reference is None else {})
    recipe = ROOT / "recipes" / f"{'lora_finetune' if kind == 'qlora' else kind}.py"
    flags: dict[str, object] = {
        "model_name_or_path": setting.model("small"), "cache_dir": setting.folder / "data", "max_train_samples": 8,
        "max_eval_samples": 3, "per_device_train_batch_size": 4, "max_train_steps": LENGTH, "num_warmup_steps": 2,
        "eval_on_start": "true", "eval_steps": 2, "save_steps": SAVED_AT, "logging_steps": 5, "mixed_precision": "no",
    }  # fmt: skip
    if kind == "causal_lm":
        text = setting.materials.text
        flags |= {"train_file": text, "validation_file": text, "block_size": 64, "learning_rate": 3e-3}
    else:  # Half of an adapter has no gradient at the first step; a small epsilon turns rounding errors into whole steps.
        pairs = setting.materials.pairs
        flags |= {"train_file": pairs, "validation_file": pairs, "max_seq_length": 64, "learning_rate": 5e-3}
        flags |= {"lora_r": 32, "adam_epsilon": 1e-6} | ({"load_in_4bit": "true"} if kind == "qlora" else {})
    launcher = ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        output = Path(name)
        words = [str(recipe), *subprocess_launch.flags(flags | {"output_dir": output})]
        line = subprocess_launch.command(launcher, 1, BETWEEN, *words)
        code, said = subprocess_launch.run(line, until - time.monotonic(), environment, cwd=ROOT)
        if code:
            return _died(code, said, left)
        steps, events = read(output / "runlog" / STEPS_FILE), read(output / "runlog" / EVENTS)
        saved = output / "checkpoints" / f"step-{SAVED_AT:06d}"
        line = subprocess_launch.command(launcher, 1, Path(words[0]), *words[1:], "--resume_from_checkpoint", str(saved))
        code, said = subprocess_launch.run(line, max(1.0, until - time.monotonic()), environment, cwd=ROOT)
        resumed = [step for step in read(output / "runlog" / STEPS_FILE) if step["attempt"] == 2]
    row: Row = {
        "losses": [step["loss"] for step in steps], "norms": [step["grad_norm"] for step in steps],
        "held out": [event["loss"] for event in events if event["type"] == "eval" and "loss" in event],
        "resumed": [step["loss"] for step in resumed], "rolled back": any(event["type"] == "rollback" for event in events),
    }  # fmt: skip
    if code:
        return row | _died(code, f"after the resume: {said}", left)
    if reference is not None and "losses" in rows.get(reference, {}):
        row["from the CPU"] = {what: _furthest(row[what], rows[reference][what]) for what in CURVES}
        row["alike"] = max(row["from the CPU"].values()) < TOLERANCE
    return row


CURVES = ("losses", "norms", "held out", "resumed")


def _furthest(ours: list[float], reference: list[float]) -> float:
    """Return the largest relative difference; infinite where the lengths differ or nothing was measured."""
    if len(ours) != len(reference) or not ours:
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(ours, reference, strict=True))


# --- precisions
NEEDS = {"flash_attention_2": "flash_attn", "load_in_4bit": "bitsandbytes"}
ATTENTION = (
    ("eager", {"attn_implementation": "eager"}),
    ("sdpa", {"attn_implementation": "sdpa"}),
    ("sdpa, bf16", {"attn_implementation": "sdpa", "mixed_precision": "bf16"}),
    ("sdpa, fp16", {"attn_implementation": "sdpa", "mixed_precision": "fp16"}),
    ("flex_attention", {"attn_implementation": "flex_attention"}),
    ("flex_attention, bf16", {"attn_implementation": "flex_attention", "mixed_precision": "bf16"}),
    ("flash_attention_2, bf16", {"attn_implementation": "flash_attention_2", "mixed_precision": "bf16"}),
)
"""Cases with the same training. The first is the reference."""
PUBLISHED = ("zero2_config_accelerate", "zero3_offload_config_accelerate")
"""Published DeepSpeed files. They fix fp16 and their own schedule, so their losses are close to the others, but not equal."""


def precision(setting: Setting) -> dict[str, Case]:
    steps = 8 if setting.tiny else 40
    common = setting.text | {
        "model_name_or_path": "llama", "per_device_train_batch_size": 4, "max_train_steps": steps, "learning_rate": 1e-4,
    }  # fmt: skip
    causal = common | {"block_size": 256}
    lora = common | {"train_file": setting.materials.pairs, "max_seq_length": 256, "mixed_precision": "bf16"}
    single = Arm.of("single", 1)
    found: dict[str, Case] = {}
    for name, flags in ATTENTION:
        found[name] = partial(_curve, setting, single, "causal_lm", causal | flags, ATTENTION[0][0])
    for name in PUBLISHED:
        file = ROOT / "ds_configs" / "published" / f"{name}.json"
        arm = Arm(name, ("--use_deepspeed", "--deepspeed_config_file", str(file)), 1)
        found[f"{name}, fp16"] = partial(_curve, setting, arm, "causal_lm", causal, ATTENTION[0][0])
    for name, flags in (("LoRA, bf16", {}), ("QLoRA, bf16", {"load_in_4bit": "true"})):
        found[name] = partial(_curve, setting, single, "lora_finetune", lora | flags, "LoRA, bf16")
    return found


def _curve(
    setting: Setting, arm: Arm, recipe: str, flags: dict[str, object], reference: str, left: float, rows: dict[str, Row]
) -> Row:
    named = {*flags, *map(str, flags.values())}
    for key, package in NEEDS.items():
        if key in named and not find_spec(package):
            return {"not run": f"{package} is not installed"}
    outcome = attempt(arm, recipe, flags | {"model_name_or_path": setting.model("llama")}, 0, left)
    row: Row = {"losses": outcome.losses, "seconds a step": outcome.step, "peak": outcome.peak}
    if "losses" in rows.get(reference, {}):
        row[f"from {reference}"] = _furthest(outcome.losses, rows[reference]["losses"])
    return row


# --- the planner
def planner(setting: Setting) -> dict[str, Case]:
    """Return a case for every architecture under every strategy of one GPU, in fp32 and bf16, with and without
    checkpointing."""
    half = {"mixed_precision": "bf16"}
    variants = [("fp32", 4, {}), ("bf16", 8, half), ("bf16, checkpointing", 8, half | {"activation_checkpointing": "true"})]
    found: dict[str, Case] = {}
    for (words, rows, flags), strategy, model in itertools.product(
        variants, ("single", "zero2", "zero3"), ("gpt2", "llama", "bart")
    ):
        found[f"{model}, {strategy}, {words}"] = partial(_planned, setting, model, strategy, rows, flags)
    return found


def _planned(
    setting: Setting, model: str, strategy: str, batch: int, flags: dict[str, object], left: float, rows: dict[str, Row]
) -> Row:
    """Return planned and measured figures of a few steps."""
    from zerobook.config import parse
    from zerobook.plan.job import make_job
    from zerobook.plan.measure import measure
    from zerobook.plan.rows import plan_row
    from zerobook.plan.traced_job import TracedJob
    from zerobook.training.recipe_file import recipe_class

    until, where, tiny = time.monotonic() + left, here("1"), setting.tiny
    given = setting.text | {"model_name_or_path": setting.model(model), "per_device_train_batch_size": batch, **flags}
    if model == "bart":
        given |= {"train_file": setting.materials.pairs, "max_source_length": 64 if tiny else 256,
                  "max_target_length": 32 if tiny else 128, "pad_to_max_length": "true"}  # fmt: skip
    else:
        given |= {"block_size": 64 if tiny else 512}
    recipe = ROOT / "recipes" / f"{'seq2seq_chatbot' if model == 'bart' else 'causal_lm'}.py"
    line, file = subprocess_launch.flags(given), ROOT / "accelerate_configs" / f"{strategy}.yaml"
    kind = recipe_class(str(recipe))
    config, sources, _ = parse(kind.config_class, line)
    made = make_job(kind(config))
    plan = plan_row(file, TracedJob.of(made, "cpu" if where.cpu else "cuda"), where, sources)
    found = measure(file, made, recipe, line, where, sources, max(1.0, until - time.monotonic()))
    row: Row = {"figures": {key: asdict(figure) for key, figure in found.figures.items()}, "seconds a step": found.seconds}
    if plan.time is not None:
        row["planned seconds a step"] = plan.time.step
    return row | ({"died": found.failure} if found.failure else {})


# --- the published tables
def tables(setting: Setting) -> dict[str, Case]:
    """Return the published comparisons that one GPU can run."""
    from benchmarks.published import dialogue, one_device

    return {"A": partial(_table, setting, dialogue.shape), "B": partial(_table, setting, one_device.run)}


def _table(setting: Setting, make: Callable[[Bench], Any], left: float, rows: dict[str, Row]) -> Row:
    where, until = here("1"), time.monotonic() + left
    budget = None if where.cpu else 24 * 10**9
    say = partial(print, "   ", flush=True)
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        made = make(Bench(Path(name), setting.tiny, 1, where, budget, say, quick=True, until=until))
    return {key: value for key, value in made.to_json().items() if key != "died" or value}


# --- speed
def speed(setting: Setting) -> dict[str, Case]:
    """Return a case for every strategy but ddp.yaml: accelerate does not wrap one process on a GPU in DDP."""
    found: dict[str, Case] = {}
    block, rows = (64, 4) if setting.tiny else (1024, 8)
    for strategy, checkpointing in itertools.product(("single", "zero1", "zero2", "zero3", "fsdp"), ("false", "true")):
        flags = setting.text | {
            "block_size": block, "per_device_train_batch_size": rows, "max_train_steps": 6 if setting.tiny else 20,
            "mixed_precision": "bf16", "activation_checkpointing": checkpointing,
        }  # fmt: skip
        name = f"{strategy}, checkpointing" if checkpointing == "true" else strategy
        found[name] = partial(_timed, setting, strategy, flags, rows * block)
    return found


def _timed(setting: Setting, strategy: str, flags: dict[str, object], tokens: int, left: float, rows: dict[str, Row]) -> Row:
    outcome = attempt(Arm.of(strategy, 1), "causal_lm", flags | {"model_name_or_path": setting.model("llama")}, 0, left)
    return {"seconds a step": outcome.step, "tokens/s": tokens / outcome.step, "peak": outcome.peak, "steps": outcome.steps}


# --- all parts
PARTS: dict[str, Callable[[Setting], dict[str, Case]]] = {
    "machine": machine, "tests": tests, "parity": parity, "precision": precision, "planner": planner, "tables": tables,
    "speed": speed, "models": models,
}  # fmt: skip
"""Parts of the benchmark, the most useful first."""


def run(cases: dict[str, Case], file: Path, until: float = math.inf, say: Callable[[str], None] = print) -> bool:
    """Run the cases without a row in ``file``, and write each row when its case ends, with its date, versions and seconds.

    A case that fails is recorded with its error, and the next one runs.

    Args:
        until: `time.monotonic` after which no case starts. A case that fails because this time is over is not recorded.

    Returns:
        Whether all cases have rows now.
    """
    rows: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    for name, case in cases.items():
        if name in rows:
            continue
        start = time.monotonic()
        if start >= until:
            return False
        say(f"{file.stem}: {name}")
        try:
            row = case(min(LIMIT_S, until - start), rows)
        except Exception as error:  # other versions of the libraries may raise other errors
            row = {"died": f"{type(error).__name__}: {error}"[:3000], "output": traceback.format_exc()[-3000:]}
        if "died" in row and time.monotonic() >= until:
            say("  cut short; the next call begins it again")
            return False
        say(f"  {row.get('died') or row.get('not run') or 'ran'}"[:300])
        rows[name] = row | {"date": str(date.today()), "versions": versions(), "wall": time.monotonic() - start}
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_suffix(".new")
        staged.write_text(json.dumps(rows, indent=1) + "\n")
        staged.replace(file)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("all", *PARTS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so many (unset: run all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the cases themselves")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--limit", type=int, help="only the first so many cases of each part")
    parser.add_argument("--out", type=Path, help="folder for the results; unset: benchmarks/results/gpu/DEVICE")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here. --device cpu --scale tiny --out FOLDER tries the same cases on a CPU.")
    if asked.device == "cpu" and asked.out is None:
        sys.exit("--device cpu: benchmarks/results/ is for GPUs. Give --out FOLDER.")
    device = "CPU" if asked.device == "cpu" else torch.cuda.get_device_name(0)
    target = asked.out or RESULTS / device.replace(" ", "_")
    whole = True
    with tempfile.TemporaryDirectory() as name:
        setting = Setting(asked.scale == "tiny", asked.device == "cpu", Path(name))
        for part in PARTS if asked.part == "all" else (asked.part,):
            cases = dict(itertools.islice(PARTS[part](setting).items(), asked.limit))
            whole = run(cases, target / f"{part}.json", until, partial(print, flush=True)) and whole
    print(f"{'all cases have results' if whole else 'cases are left for the next call'}: {target}")
    if asked.out is None:
        subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu_status.py")], check=True)


if __name__ == "__main__":
    main()
