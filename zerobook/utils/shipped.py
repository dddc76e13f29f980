"""Files that come with Zerobook and are no modules: recipes with their configs, strategy files, DeepSpeed configs.

In a clone they stand beside the package, where users type their paths. A wheel has the recipes there too, because
``from recipes.causal_lm import CausalLM`` imports them, and the rest inside of the package, because ``accelerate_configs``
is no name for a folder of site-packages.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).absolute().parents[1]
_INSTALLED = _PACKAGE / "_shipped"  # setup.py writes it into a wheel


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder.

    Args:
        name: its path in a clone, such as ``accelerate_configs/zero3.yaml`` or ``recipes``.
    """
    inside = _INSTALLED / name
    return inside if inside.exists() else _PACKAGE.parent / name


def clone() -> Path | None:
    """Return the root of the clone that this code is run from; None where it was installed from a wheel."""
    return None if _INSTALLED.exists() else _PACKAGE.parent
