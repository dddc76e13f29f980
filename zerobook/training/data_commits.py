"""Commits of a run's datasets on the hub: every rank, and every attempt of a run, reads the same one."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zerobook.checkpoint import store
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.config import RecipeConfig
from zerobook.data.sources import is_on_hub
from zerobook.errors import CheckpointError
from zerobook.strategy import Strategy
from zerobook.utils import hub


def with_data_commits(config: RecipeConfig, strategy: Strategy) -> RecipeConfig:
    """Return the config with a commit as the revision of each training dataset on the hub. Collective.

    A branch on the hub can move while a run is stopped. A resumed run reads the commits that its checkpoint names, unless
    the user asks for other revisions than before.
    """
    return config.with_data_revisions(strategy.on_main(lambda: _find_commits(config)))


def _find_commits(config: RecipeConfig) -> list[str | None]:
    specs = config.dataset_specs()
    recorded: dict[tuple[str, str | None], str | None] = {}
    # Do not look for a checkpoint in a run without datasets on the hub.
    if any(is_on_hub(spec.path) for spec in specs):
        recorded = _recorded_commits(config)
    commits = []
    for spec in specs:
        commit = None
        if is_on_hub(spec.path):
            commit = recorded.get((spec.path, spec.revision)) or hub.dataset_commit(spec.path, spec.revision)
        commits.append(commit or spec.revision)
    return commits


def _recorded_commits(config: RecipeConfig) -> dict[tuple[str, str | None], str | None]:
    """Return (name of a dataset, revision that the user asked for) -> revision that the run reads, as the checkpoint says."""
    checkpoint = None
    # A run without a checkpoint that it could resume is refused later.
    with suppress(CheckpointError):
        checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    if checkpoint is None:
        return {}
    saved = store.read_json(checkpoint / "config.json")
    asked = _revisions(saved["asked"])
    used = _revisions(saved["config"])
    return {key: revision for key, (_, revision) in zip(asked, used, strict=True)}


def _revisions(saved: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the name and the revision of each dataset. ``saved``: a config; one of an earlier version lacks newer keys."""
    if not saved.get("datasets"):
        return [(str(saved.get("dataset_name")), saved.get("dataset_revision"))]
    return [(spec["path"], spec.get("revision")) for spec in saved["datasets"]]
