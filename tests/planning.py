"""Plans of the shipped recipes, for the tests of the planner."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from zerobook.config_sources import ConfigSources
from zerobook.launch.worker_environment import worker_environment
from zerobook.plan.job import Job, make_job
from zerobook.plan.rows import Row, plan_row, rank_rows
from zerobook.plan.traced_job import TracedJob
from zerobook.training.recipe_file import recipe_class

ROOT = Path(__file__).resolve().parents[1]

MODELS = ROOT / "benchmarks" / "models"

WIDE = ROOT / "tests" / "fixtures" / "wide_gpt2.json"
"""A GPT-2 of the size of GPT-2 XL in 4 layers, which are traced ten times as fast as 48."""

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def made(recipe: str, model: str | Path, **flags) -> Job:
    kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    return make_job(kind(kind.config_class(model_name_or_path=str(model), **flags)))


IRRELEVANT = {
    "dataset_name", "gradient_accumulation_steps", "learning_rate", "max_train_steps", "model_name_or_path", "output_dir",
    "save_steps", "save_total_limit", "train_file",
}  # fmt: skip
"""Settings of a recipe that change neither its weights nor what a micro-batch does, where the model's config is the same."""

_build = TracedJob.of
_traced: dict[tuple, TracedJob] = {}
_environments: dict[tuple, tuple[dict[str, str], str | None]] = {}


def traced_once(job: Job, device: str) -> TracedJob:
    """Return ``TracedJob.of(job, device)`` with the traces that were made of an equal job earlier in this process."""
    config = job.config.model_dump_json(exclude=IRRELEVANT)
    key = (type(job.recipe), config, type(job.model_config), job.model_config.to_json_string(use_diff=False), device)
    if key not in _traced:
        _traced[key] = _build(job, device)
    return dataclasses.replace(_traced[key], job=job)


def worker_environment_once(flags: list[str]) -> tuple[dict[str, str], str | None]:
    """Return ``worker_environment(flags)``, for which a strategy file is parsed once in this process."""
    inherited = sorted((name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST")
    key = (*flags, *inherited)
    if key not in _environments:
        _environments[key] = worker_environment(flags)
    environ, precision = _environments[key]
    return dict(environ), precision


def shortened(folder: Path, model: str, **changes: int) -> Path:
    """Write a shipped config with other numbers, mostly of layers, and return its file."""
    facts = json.loads((MODELS / f"{model}.json").read_text())
    file = folder / f"{model}.json"
    file.write_text(json.dumps(facts | changes))
    return file


def rows_of(recipe: str, model: str | Path, where, files=None, **flags) -> dict[str, Row]:
    """The planned rows, the best first."""
    return planned_rows(recipe, model, where, files, **flags)[1]


def planned_rows(recipe: str, model: str | Path, where, files=None, **flags) -> tuple[TracedJob, dict[str, Row]]:
    planned = made(recipe, model if isinstance(model, Path) else MODELS / f"{model}.json", **flags)
    traced = traced_once(planned, "cuda")
    sources = ConfigSources({key: f"flag --{key}" if key in flags else "default" for key in type(planned.config).model_fields})
    chosen = [file for file in FILES if files is None or file.stem in files]
    return traced, {made.file: made for made in rank_rows([plan_row(file, traced, where, sources) for file in chosen])}


UNPLANNED = {"zero3_sequence", "fsdp_context", "fsdp_tensor", "fsdp_experts"}
"""Strategy files that cannot run a GPT-2."""

HALF = {"mixed_precision": "bf16", "per_device_train_batch_size": 1, "activation_checkpointing": True}


def logits_bytes(batch: int, length: int, vocabulary: int) -> int:
    """The bytes that cross-entropy holds at its peak: 2-byte logits, their fp32 copy, its log-softmax and its gradient."""
    return batch * length * vocabulary * (2 + 3 * 4)
