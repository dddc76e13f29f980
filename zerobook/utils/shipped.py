"""Files that are shipped beside the modules of Zerobook: recipes with their configs, strategy files, DeepSpeed configs.

In a clone they are beside the package, where users type their paths. A wheel has all of them inside the package, because
other projects have a folder ``recipes`` of their own in site-packages.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).absolute().parents[1]
_INSTALLED = _PACKAGE / "_shipped"
"""Folder that setup.py writes into a wheel."""


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder.

    Args:
        name: its path in a clone, such as ``accelerate_configs/zero3.yaml`` or ``recipes``.
    """
    if clone() is not None:
        return _PACKAGE.parent / name
    # Recipes are modules: zerobook.recipes.causal_lm.
    folder = _PACKAGE if Path(name).parts[0] == "recipes" else _INSTALLED
    return folder / name


def clone() -> Path | None:
    """Return the root of the clone that this code is run from; None where it was installed from a wheel."""
    return None if _INSTALLED.exists() else _PACKAGE.parent
