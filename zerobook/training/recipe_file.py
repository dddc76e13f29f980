"""Recipe files: check a file before it is run, and load its recipe class. A recipe is Python code."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest_file
from zerobook.utils.shipped import find, names, shipped

if TYPE_CHECKING:
    from zerobook.training.recipe import Recipe

_RUN = "zerobook.training.run"


def check_recipe(name: str) -> tuple[Path, str]:
    """Return the path of a recipe's file, and the name of the class that it runs. The file is read and not run.

    Args:
        name: a file, or the name of a shipped recipe.

    Raises:
        ConfigError: there is no such file, it is not a ``.py``, or it runs no recipe.
    """
    path = find(name, "recipes") if name in names("recipes") else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{name}: there is no such recipe file.{nearest_file(path)} Zerobook's own are in {shipped('recipes')}; zerobook "
            "init FOLDER copies them."
        )
    if path.suffix != ".py":
        raise ConfigError(
            f"{name}: this is not a recipe, so it was not run. Give a recipe, such as recipes/lora_finetune.py. A flag of the "
            f"recipe names its data, such as --train_file {name}."
        )
    # Parse the file and do not import it: a launcher must not run a user's file before it is known to be a recipe.
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: this is not valid Python: {error}.") from None
    class_name = _find_class_name(tree)
    if class_name is None:
        raise ConfigError(
            f"{name}: it declares no recipe, so it was not run. A recipe declares a class that derives from "
            f"zerobook.training.recipe.Recipe, and ends with run(ThatClass) of {_RUN}; see recipes/causal_lm.py."
        )
    return path, class_name


def is_recipe(name: str) -> bool:
    """Return whether a file is a recipe. It is read and not run."""
    try:
        check_recipe(name)
    except ConfigError:
        return False
    return True


def recipe_class(name: str) -> type[Recipe[Any]]:
    """Run a recipe's file, without the training, and return its class.

    Raises:
        ConfigError: the file is not a recipe. Such a file is run only if it calls `zerobook.training.run.run` with a class.
    """
    from zerobook.training.recipe import Recipe

    path, class_name = check_recipe(name)
    # Do not run a file again that is loaded already.
    for loaded in sys.modules.values():
        if _is_loaded_from(loaded, path):
            return getattr(loaded, class_name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Register the module and its folder: processes that prepare data import the file by its name, for encoder and objective.
    sys.modules[path.stem] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    recipe = getattr(module, class_name, None)
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        raise ConfigError(
            f"{name}: {class_name}, which it runs, is no class that derives from zerobook.training.recipe.Recipe."
        )
    return recipe


def _is_loaded_from(module: ModuleType, file: Path) -> bool:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if not origin:
        return False
    try:
        # Thousands of modules are loaded, and `samefile` is ten times as fast as a comparison of resolved paths.
        return os.path.samefile(origin, file)
    except OSError:
        # Built-in modules have an origin that is not a file, and a file may have been deleted.
        return False


def _find_class_name(tree: ast.Module) -> str | None:
    """Return the name in ``run(NAME)``, where ``run`` is imported from `zerobook.training.run`; None if there is none."""
    # `run` may be imported under other names.
    run_names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == _RUN:
            run_names |= {alias.asname or alias.name for alias in node.names if alias.name == "run"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            continue
        if isinstance(node.func, ast.Name) and node.func.id in run_names:
            argument = node.args[0]
            return argument.id if isinstance(argument, ast.Name) else None
    return None
