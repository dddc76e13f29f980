"""A recipe's file: the check that it is one, before it is run, and its config class. A recipe is Python code."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zerobook.errors import ConfigError

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig

RUNS = "a recipe is Python code, and it is run"
"""A sentence of the commands' help."""


def check_recipe(name: str) -> Path:
    """Return the path of a recipe's file. The file is read and not run.

    Raises:
        ConfigError: there is no such file, it is not a ``.py``, or it declares no config class of a recipe.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name}: there is no such recipe file. Zerobook's own are in recipes/.")
    if path.suffix != ".py":
        raise ConfigError(
            f"{name}: this is no recipe, so it was not run. Give a recipe, such as recipes/lora_finetune.py. A flag of the "
            f"recipe names its data, such as --train_file {name}."
        )
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: this is not valid Python, so it is no recipe: {error}.") from None
    if not _declares_recipe(tree):
        raise ConfigError(
            f"{name}: it declares no recipe, so it was not run. A recipe imports from zerobook, and its config class derives "
            "from zerobook.config.RecipeConfig or from the config class of another recipe; see recipes/causal_lm.py."
        )
    return path


def config_class(recipe: str) -> type[RecipeConfig]:
    """Run a recipe's file and return its config class.

    Raises:
        ConfigError: the file is no recipe. It was not run then, unless it looked like one.
    """
    from zerobook.config import RecipeConfig

    path = check_recipe(recipe)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    own = [c for _, c in inspect.getmembers(module, inspect.isclass)
           if issubclass(c, RecipeConfig) and c.__module__ == path.stem]  # fmt: skip
    if not own:
        raise ConfigError(f"{recipe}: it defines no config class, so it is no recipe. See recipes/causal_lm.py.")
    return own[0]


def _declares_recipe(tree: ast.Module) -> bool:
    """Return whether the file imports from zerobook and a class in it derives from a ``...Config``."""
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    bases = [base for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
    names = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases]
    return any(m.split(".")[0] == "zerobook" for m in modules) and any(n.endswith("Config") for n in names)
