"""The recipes, for ``from zerobook.recipes.causal_lm import CausalLM``.

A wheel has their files in this folder. A clone has them at its root, where users type their paths.
"""

from pathlib import Path

_FOLDER = Path(__file__).absolute().parent
if not (_FOLDER / "causal_lm.py").exists():
    __path__ = [str(_FOLDER.parents[1] / "recipes")]
