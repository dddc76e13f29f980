"""Plans of the shipped recipes, for the tests of the planner."""

from __future__ import annotations

from pathlib import Path

from zerobook.config import ConfigSources
from zerobook.plan.job import Job, job
from zerobook.plan.rows import Row, Traced, rank, row
from zerobook.training.recipe_file import recipe_class

ROOT = Path(__file__).resolve().parents[1]

MODELS = ROOT / "benchmarks" / "models"

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def made(recipe: str, model: str | Path, **flags) -> Job:
    kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    return job(kind(kind.config_class(model_name_or_path=str(model), **flags)))


def rows_of(recipe: str, model: str, where, files=None, **flags) -> dict[str, Row]:
    """The planned rows, the best first."""
    return planned_rows(recipe, model, where, files, **flags)[1]


def planned_rows(recipe: str, model: str, where, files=None, **flags) -> tuple[Traced, dict[str, Row]]:
    planned = made(recipe, MODELS / f"{model}.json", **flags)
    traced = Traced.of(planned, "cuda")
    sources = ConfigSources({key: f"flag --{key}" if key in flags else "default" for key in type(planned.config).model_fields})
    chosen = [file for file in FILES if files is None or file.stem in files]
    return traced, {made.file: made for made in rank([row(file, traced, where, sources) for file in chosen])}


UNPLANNED = {"zero3_sequence", "fsdp_context", "fsdp_tensor", "fsdp_experts"}
"""Strategy files that the planner has no figures for."""

HALF = {"mixed_precision": "bf16", "per_device_train_batch_size": 1, "activation_checkpointing": True}
