"""The config.json of a run's model, where it is on this machine."""

from __future__ import annotations

import json
from typing import Any

from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.utils import hub


def model_facts(config: RecipeConfig) -> dict[str, Any] | None:
    """Return the config.json of the model; None if it is not on this machine. Downloads nothing."""
    name = config.model_name_or_path or config.initialised_from
    try:
        folder = (embedded.converted(name) or hub.folder(name, config.model_revision)) if name else None
        if folder is None:
            return None
        found = json.loads((folder / "config.json" if folder.is_dir() else folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no such model, or no such file: `load_config` says so
    return found if isinstance(found, dict) else None
