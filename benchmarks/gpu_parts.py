"""The parts of benchmarks/gpu.py but ``probe`` and ``models``, which have modules of their own."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_models import seconds
from benchmarks.gpu_setting import OUTPUT_TAIL, ROOT, Case, Row, Setting, call, failure
from benchmarks.published.bench import Bench
from benchmarks.published.trial import Arm, attempt
from zerobook.cli.plan import here
from zerobook.runlog.jsonl import stream
from zerobook.runlog.writer import EVENTS
from zerobook.runlog.writer import STEPS as STEPS_FILE
from zerobook.utils import subprocess_launch
from zerobook.utils.devices import find_device


# --- the machine
def machine(setting: Setting) -> dict[str, Case]:
    rates_size = 64 if setting.tiny else 8192
    return {
        "libraries": Case(partial(_libraries, setting), 5),
        "rates": Case(partial(_rates, rates_size, setting.device), 20),
    }


def _libraries(setting: Setting, limit: float, rows: dict[str, Row]) -> Row:
    import torch

    row: Row = {"packages": {}}
    for package in ("bitsandbytes", "flash-attn", "triton", "datasets", "nvidia-ml-py", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            row["packages"][package] = version(package)
        except PackageNotFoundError:
            row["packages"][package] = None
    row |= {"compiler": shutil.which("c++"), "nvcc": shutil.which("nvcc"), "cores": os.cpu_count()}
    row |= {"CUDA of torch": torch.version.cuda, "free disk": shutil.disk_usage(setting.folder).free}
    if setting.cpu:
        return row
    properties = torch.cuda.get_device_properties(0)
    sheet = find_device(torch.cuda.get_device_name(0))
    row |= {
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version(),
        "planner knows it as": sheet.name if sheet else None,
    }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        row["driver"] = subprocess_launch.run(command, limit)[1].strip()
    return row


def _rates(size: int, device: str, limit: float, rows: dict[str, Row]) -> Row:
    return call("benchmarks.gpu_parts.rates", limit, size=size, device=device)


def rates(size: int, device: str) -> Iterator[Row]:
    """Yield operations a second of matrix products and bytes a second of a copy, the median of 10 on random numbers."""
    import torch

    median = partial(seconds, device=device, rounds=10)
    row: Row = {"size": size}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        inputs = torch.randn(size, size, device=device).to(dtype)
        weight = torch.randn(size, size, device=device).to(dtype)
        row[f"{name}, operations/s"] = 2 * size**3 / median(partial(torch.matmul, inputs, weight))
        yield row
    source = torch.randn(size * size * 8, device=device)
    target = torch.empty_like(source)
    row["copy, bytes/s read and written"] = 2 * source.numel() * 4 / median(partial(target.copy_, source))
    yield row


# --- the GPU against the CPU
BETWEEN = ROOT / "tests" / "distributed" / "between.py"
"""Script that generates at every evaluation, and rolls back once."""
BACK_AT = 6
SAVED_AT = 4
LENGTH = 10
TOLERANCE = 1e-5
"""Relative tolerance of the loss and gradient norm of every step, and of held-out losses."""
OFFLOAD_TOLERANCE = 5e-5
"""The same where the optimizer is in host memory. DeepSpeed's CPU Adam rounds otherwise than torch's AdamW: on one CPU, whose
gradients are the same, norms differ by up to 1.1e-5 in these runs, and a GPU's gradients add to that."""
PAIRS = (
    ("causal_lm", "single"),
    ("causal_lm", "zero2"),
    ("causal_lm", "zero3"),
    ("causal_lm", "fsdp"),
    ("qlora", "single"),
    ("qlora", "zero2"),
    ("qlora", "zero3"),
    ("qlora", "fsdp"),
    ("lora_finetune", "single"),
    ("lora_finetune", "zero2"),
    ("lora_finetune", "zero3"),
    ("lora_finetune", "fsdp"),
    ("causal_lm", "zero1"),
    ("causal_lm", "zero2_offload"),
    ("causal_lm", "zero3_offload"),
)
"""(kind of finetuning, strategy file), one process each, the most useful first."""
CURVES = ("losses", "norms", "held out", "resumed")


def parity(setting: Setting) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind in dict.fromkeys(kind for kind, _ in PAIRS):
        cases[f"{kind}, CPU"] = Case(partial(_trained, setting, kind, "single", None), 70)
    # Compiling needs few cores, so it runs beside the references. The cases that need the ops have references, and wait for it.
    cases["compiled ops"] = Case(_compiled_ops, 90)
    for kind, strategy in PAIRS:
        reference = f"{kind}, CPU"
        cases[f"{kind}, {strategy}"] = Case(partial(_trained, setting, kind, strategy, reference), 70, reference)
    return cases


def _compiled_ops(limit: float, rows: dict[str, Row]) -> Row:
    """Compile the DeepSpeed ops that cases need, CPU Adam and pinned memory, before the time of a case is counted."""
    return call("benchmarks.gpu_parts.compiled_ops", limit, ops=["cpu_adam", "pin_memory"])


def compiled_ops(ops: list[str]) -> Iterator[Row]:
    from zerobook.launch.ops import compile_ops

    row = {"ops": dict(compile_ops(ops))}
    failed = [op for op, outcome in row["ops"].items() if outcome.startswith("FAILED")]
    yield row | ({"error": f"not compiled: {', '.join(failed)}"} if failed else {})


def _trained(setting: Setting, kind: str, strategy: str, reference: str | None, limit: float, rows: dict[str, Row]) -> Row:
    """Train, evaluate, save, generate and roll back; then resume from the first checkpoint as after a kill."""
    if kind == "qlora" and not find_spec("bitsandbytes"):
        return {"skipped": "bitsandbytes is not installed"}
    until = time.monotonic() + limit
    environment = {"ZEROBOOK_BETWEEN_BACK_AT": str(BACK_AT)}
    if reference is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    recipe = ROOT / "recipes" / ("causal_lm.py" if kind == "causal_lm" else "lora_finetune.py")
    flags = _parity_flags(setting, kind)
    launcher = ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        output = Path(name)
        words = subprocess_launch.flags(flags | {"output_dir": output})
        line = subprocess_launch.command(launcher, 1, BETWEEN, recipe, *words)
        code, text = subprocess_launch.run(line, limit, environment, cwd=ROOT)
        if code:
            return failure(code, text, limit)
        steps = list(stream(output / "runlog" / STEPS_FILE))
        events = list(stream(output / "runlog" / EVENTS))
        checkpoint = output / "checkpoints" / f"step-{SAVED_AT:06d}"
        line = subprocess_launch.command(launcher, 1, recipe, *words, "--resume_from_checkpoint", checkpoint)
        code, text = subprocess_launch.run(line, max(1.0, until - time.monotonic()), environment, cwd=ROOT)
        resumed = [step for step in stream(output / "runlog" / STEPS_FILE) if step["attempt"] == 2]
    row: Row = {
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "held out": [event["loss"] for event in events if event["type"] == "eval" and "loss" in event],
        "resumed": [step["loss"] for step in resumed],
        "rolled back": any(event["type"] == "rollback" for event in events),
    }
    if code:
        return row | failure(code, f"after the resume: {text}", limit)
    if reference is not None and "losses" in rows.get(reference, {}):
        row["tolerance"] = OFFLOAD_TOLERANCE if "offload" in strategy else TOLERANCE
        row["from the CPU"] = {curve: largest_difference(row[curve], rows[reference][curve]) for curve in CURVES}
        row["alike"] = max(row["from the CPU"].values()) < row["tolerance"]
    return row


def _parity_flags(setting: Setting, kind: str) -> dict[str, object]:
    flags: dict[str, object] = {
        "model_name_or_path": setting.model("small"),
        "cache_dir": setting.folder / "data",
        "max_train_samples": 8,
        "max_eval_samples": 3,
        "per_device_train_batch_size": 4,
        "max_train_steps": LENGTH,
        "num_warmup_steps": 2,
        # With the default of 1e-8, Adam turns rounding errors of gradients near 0 into whole steps: other vector instructions
        # of one CPU then change the norms by 2e-5, and with this by 1e-6.
        "adam_epsilon": 1e-6,
        "eval_on_start": "true",
        "eval_steps": 2,
        "save_steps": SAVED_AT,
        "logging_steps": 5,
        "mixed_precision": "no",
    }
    if kind == "causal_lm":
        text = setting.materials.text
        return flags | {"train_file": text, "validation_file": text, "block_size": 64, "learning_rate": 3e-3}
    pairs = setting.materials.pairs
    flags |= {"train_file": pairs, "validation_file": pairs, "max_seq_length": 64, "learning_rate": 5e-3, "lora_r": 32}
    if kind == "qlora":
        flags["load_in_4bit"] = "true"
    return flags


def largest_difference(curve: list[float | None], reference: list[float | None]) -> float:
    """Return the largest relative difference; infinite where the lengths differ, nothing was measured, or a value is not
    finite, which the runlog records as null."""
    if len(curve) != len(reference) or not curve:
        return math.inf
    differences = []
    for value, expected in zip(curve, reference, strict=True):
        if value is None or expected is None or not math.isfinite(value - expected):
            return math.inf
        differences.append(abs(value - expected) / abs(expected))
    return max(differences)


# --- precisions
NEEDS = {"flash_attention_2": "flash_attn", "load_in_4bit": "bitsandbytes"}
"""Flag, or value of a flag -> module that it needs."""
EAGER = "eager"
LORA = "LoRA, bf16"
PUBLISHED_ZERO2 = "zero2_config_accelerate"
PUBLISHED_ZERO3 = "zero3_offload_config_accelerate"
"""Published DeepSpeed files. They fix fp16 and their own schedule, so their losses are close to the others, but not equal."""


def precision(setting: Setting) -> dict[str, Case]:
    """Return cases with the same training, each compared with the first, and LoRA's with one another."""
    common = setting.text | {
        "per_device_train_batch_size": 4,
        "max_train_steps": 8 if setting.tiny else 40,
        "learning_rate": 1e-4,
    }
    causal = common | {"block_size": 256}
    lora = common | {"train_file": setting.materials.pairs, "max_seq_length": 256, "mixed_precision": "bf16"}
    single = Arm.of("single", 1)

    def attention(name: str, dtype: str = "no") -> Case:
        flags = causal | {"attn_implementation": name, "mixed_precision": dtype}
        seconds = 90 if name == "flex_attention" else 40
        return Case(partial(_curve, setting, single, "causal_lm", flags, EAGER), seconds, None if name == EAGER else EAGER)

    def published(file: str) -> Case:
        path = ROOT / "ds_configs" / "published" / f"{file}.json"
        arm = Arm(file, ("--use_deepspeed", "--deepspeed_config_file", str(path)), 1)
        return Case(partial(_curve, setting, arm, "causal_lm", causal, EAGER), 50, EAGER)

    return {
        EAGER: attention(EAGER),
        "sdpa": attention("sdpa"),
        "sdpa, bf16": attention("sdpa", "bf16"),
        "flex_attention, bf16": attention("flex_attention", "bf16"),
        "sdpa, fp16": attention("sdpa", "fp16"),
        f"{PUBLISHED_ZERO2}, fp16": published(PUBLISHED_ZERO2),
        LORA: Case(partial(_curve, setting, single, "lora_finetune", lora, LORA), 40),
        "QLoRA, bf16": Case(partial(_curve, setting, single, "lora_finetune", lora | {"load_in_4bit": "true"}, LORA), 50, LORA),
        "flex_attention": attention("flex_attention"),
        f"{PUBLISHED_ZERO3}, fp16": published(PUBLISHED_ZERO3),
        "flash_attention_2, bf16": attention("flash_attention_2", "bf16"),
    }


def _curve(
    setting: Setting, arm: Arm, recipe: str, flags: dict[str, object], reference: str, limit: float, rows: dict[str, Row]
) -> Row:
    words = {*flags, *map(str, flags.values())}
    for word, module in NEEDS.items():
        if word in words and not find_spec(module):
            return {"skipped": f"{module} is not installed"}
    outcome = attempt(arm, recipe, flags | {"model_name_or_path": setting.model("llama")}, 0, limit)
    row: Row = {"losses": outcome.losses, "seconds a step": outcome.step, "peak": outcome.peak}
    if "losses" in rows.get(reference, {}):
        row[f"from {reference}"] = largest_difference(outcome.losses, rows[reference]["losses"])
    return row


# --- tests
TESTS_NEED = {"pytest": "pytest", "hypothesis": "hypothesis", "chatterbot_corpus": "chatterbot-corpus"}
"""Module -> package, of the imports of tests that training does not need."""


def tests(setting: Setting) -> dict[str, Case]:
    """Return a case for each file with tests that are marked ``gpu``."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    return {file.name: Case(partial(_marked, setting, file), 60) for file in files}


def _marked(setting: Setting, file: Path, limit: float, rows: dict[str, Row]) -> Row:
    missing = [package for module, package in TESTS_NEED.items() if not find_spec(module)]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(file)]
    code, text = subprocess_launch.run(line, limit, {"DS_ACCELERATOR": setting.device}, cwd=ROOT)
    failed = failure(code, text, limit)
    # A case that was stopped may have printed nothing.
    return failed or {"summary": text.strip().splitlines()[-1], "output": text[-OUTPUT_TAIL:]}


# --- the planner
def planner(setting: Setting) -> dict[str, Case]:
    """Return a case for every architecture under every strategy of one GPU, in fp32 and bf16, with and without
    checkpointing."""
    bf16 = {"mixed_precision": "bf16"}
    checkpointing = bf16 | {"activation_checkpointing": "true"}
    variants = (("fp32", 4, {}), ("bf16", 8, bf16), ("bf16, checkpointing", 8, checkpointing))
    strategies = ("single", "zero2", "zero3")
    cases: dict[str, Case] = {}
    for variant, strategy, model in itertools.product(variants, strategies, ("gpt2", "llama", "bart")):
        name, batch, flags = variant
        cases[f"{model}, {strategy}, {name}"] = Case(partial(_planned, setting, model, strategy, batch, flags), 50)
    return cases


def _planned(
    setting: Setting, model: str, strategy: str, batch: int, flags: dict[str, object], limit: float, rows: dict[str, Row]
) -> Row:
    """Return planned and measured figures of a few steps."""
    from zerobook.config_sources import parse
    from zerobook.plan.job import make_job
    from zerobook.plan.measure import measure
    from zerobook.plan.rows import plan_row
    from zerobook.plan.traced_job import TracedJob
    from zerobook.training.recipe_file import recipe_class

    until = time.monotonic() + limit
    cluster = here("1")
    flags = setting.text | {"model_name_or_path": setting.model(model), "per_device_train_batch_size": batch, **flags}
    if model == "bart":
        recipe = ROOT / "recipes" / "seq2seq_chatbot.py"
        flags |= {
            "train_file": setting.materials.pairs,
            "max_source_length": 64 if setting.tiny else 256,
            "max_target_length": 32 if setting.tiny else 128,
            "pad_to_max_length": "true",
        }
    else:
        recipe = ROOT / "recipes" / "causal_lm.py"
        flags["block_size"] = 64 if setting.tiny else 512
    words = subprocess_launch.flags(flags)
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    recipe_type = recipe_class(str(recipe))
    config, sources, _ = parse(recipe_type.config_class, words)
    job = make_job(recipe_type(config))
    plan = plan_row(file, TracedJob.of(job, setting.device), cluster, sources)
    seconds_left = max(1.0, until - time.monotonic())
    measurement = measure(file, job, recipe, words, cluster, sources, seconds_left)
    row: Row = {
        "figures": {key: asdict(figure) for key, figure in measurement.figures.items()},
        "seconds a step": measurement.seconds,
    }
    if plan.time is not None:
        row["planned seconds a step"] = plan.time.step
    if measurement.failure:
        row["error"] = measurement.failure
    return row


# --- the published tables
def tables(setting: Setting) -> dict[str, Case]:
    """Return the published comparisons that one GPU can run."""
    from benchmarks.published import dialogue, one_device

    makers = {"A": dialogue.shape, "B": one_device.run}
    return {name: Case(partial(_table, setting, make), 240) for name, make in makers.items()}


def _table(setting: Setting, make: Callable[[Bench], Any], limit: float, rows: dict[str, Row]) -> Row:
    until = time.monotonic() + limit
    cluster = here("1")
    budget = None if cluster.cpu else 24 * 10**9
    show = partial(print, "   ", flush=True)
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        bench = Bench(Path(name), setting.tiny, 1, cluster, budget, show, quick=True, until=until)
        table = make(bench).to_json()
    error = table.pop("died", None)
    return table | ({"error": error} if error else {})


# --- speed
def speed(setting: Setting) -> dict[str, Case]:
    """Return a case for every strategy but ddp.yaml: accelerate does not wrap one process on a GPU in DDP."""
    block = 64 if setting.tiny else 1024
    batch = 4 if setting.tiny else 8
    cases: dict[str, Case] = {}
    for strategy, checkpointing in itertools.product(("single", "zero1", "zero2", "zero3", "fsdp"), ("false", "true")):
        flags = setting.text | {
            "block_size": block,
            "per_device_train_batch_size": batch,
            "max_train_steps": 6 if setting.tiny else 20,
            "mixed_precision": "bf16",
            "activation_checkpointing": checkpointing,
        }
        name = f"{strategy}, checkpointing" if checkpointing == "true" else strategy
        cases[name] = Case(partial(_timed, setting, strategy, flags, batch * block), 40)
    return cases


def _timed(setting: Setting, strategy: str, flags: dict[str, object], tokens: int, limit: float, rows: dict[str, Row]) -> Row:
    outcome = attempt(Arm.of(strategy, 1), "causal_lm", flags | {"model_name_or_path": setting.model("llama")}, 0, limit)
    row: Row = {"seconds a step": outcome.step, "tokens/s": tokens / outcome.step}
    return row | {"peak": outcome.peak, "steps": outcome.steps}
