"""The recipes, for ``from zerobook.recipes.causal_lm import CausalLM``. In a clone, their files are at its root, where users
type their paths. A wheel has them in this folder, without this file."""

from pathlib import Path

__path__ = [str(Path(__file__).absolute().parents[2] / "recipes")]
