"""Files that are shipped beside the modules of Zerobook: recipes with their configs, strategy files, DeepSpeed configs.

In a clone they are beside the package, where users type their paths. A wheel has the recipes there too, for
``from recipes.causal_lm import CausalLM``. It has the other files inside the package, because ``accelerate_configs`` is no
suitable name for a folder of site-packages.
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
