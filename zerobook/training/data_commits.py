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


# Return the commit of each training dataset on the hub, and of each other dataset the revision in the config.
def _find_commits(config: RecipeConfig) -> list[str | None]:
    specs = config.dataset_specs()
    recorded: dict[tuple[str, str | None], str | None] = {}
    # Only datasets on the hub have recorded commits.
    if any(is_on_hub(spec.path) for spec in specs):
        recorded = _read_recorded_commits(config)
    commits = []
    for spec in specs:
        commit = None
        if is_on_hub(spec.path):
            commit = recorded.get((spec.path, spec.revision)) or hub.dataset_commit(spec.path, spec.revision)
        commits.append(commit or spec.revision)
    return commits


def _read_recorded_commits(config: RecipeConfig) -> dict[tuple[str, str | None], str | None]:
    """Return (dataset, revision in the user's config) -> commit that the run read, from the checkpoint to resume from.

    The result is empty if there is no such checkpoint.
    """
    checkpoint = None
    # A run without a checkpoint that it could resume is refused later.
    with suppress(CheckpointError):
        checkpoint = resolve_resume(config.output_dir, config.resume_from_checkpoint).checkpoint
    if checkpoint is None:
        return {}
    saved = store.read_json(checkpoint / "config.json")
    requested = _list_revisions(saved["asked"])
    used = _list_revisions(saved["config"])
    return {key: commit for key, (_, commit) in zip(requested, used, strict=True)}


def _list_revisions(saved: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the name and the revision of each dataset in a saved config."""
    # The config may lack keys, since an earlier version of Zerobook may have saved it.
    if not saved.get("datasets"):
        return [(str(saved.get("dataset_name")), saved.get("dataset_revision"))]
    return [(spec["path"], spec.get("revision")) for spec in saved["datasets"]]
