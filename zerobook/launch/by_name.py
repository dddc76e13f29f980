"""Recipes and strategies by name, and the keys of a recipe's YAML that say how it is launched.

``zerobook launch`` turns them into the paths and flags of ``accelerate launch``, which knows neither.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from zerobook.config_sources import LAUNCH_KEYS
from zerobook.errors import ConfigError
from zerobook.launch.accelerate_cli import parent_flags, split_at_recipe, typed_flags
from zerobook.utils.shipped import find
from zerobook.utils.yaml_text import load_yaml_as_text, read_mapping

OTHER_PROGRAMS = {"-m", "--module", "--no_python", "--no-python"}
"""Flags with which accelerate starts no file."""
_CHOOSING = {"config_file", "use_deepspeed", "use_fsdp", "multi_gpu", "cpu"}
"""Flags of accelerate that choose a strategy."""


def written_out(arguments: list[str], strategy: str | None) -> list[str]:
    """Return the arguments of ``accelerate launch`` that those of ``zerobook launch`` stand for.

    Args:
        arguments: without ``--strategy``.
        strategy: of ``--strategy``, which goes before the recipe's YAML.

    Raises:
        ConfigError: there is no such recipe or strategy, or two strategies are named.
    """
    flags, recipe, recipe_flags = split_at_recipe(arguments)
    is_other_program = not OTHER_PROGRAMS.isdisjoint(flags)
    names_file = _has_flag(flags, "config_file")
    if strategy and names_file:
        raise ConfigError(f"--strategy {strategy}: --config_file names a strategy file, too. Give one of them.")
    values: Mapping[str, str] = {}
    folder = Path()
    if recipe is not None and not is_other_program:
        # A file keeps the path that was typed.
        recipe = str(find(recipe, "recipes")) if not recipe.endswith(".py") else recipe
        values, folder = _read_launch_keys(recipe_flags)
    if strategy:
        flags = ["--config_file", str(find(strategy, "accelerate_configs")), *flags]
    elif "strategy" in values and not names_file:
        flags = ["--config_file", str(find(values["strategy"], "accelerate_configs", beside=folder)), *flags]
    if "num_processes" in values and not _has_flag(flags, "num_processes"):
        flags = [*flags, "--num_processes", values["num_processes"]]
    return [*flags, *([] if recipe is None else [recipe]), *recipe_flags]


def _has_flag(flags: list[str], name: str) -> bool:
    return any(flag.partition("=")[0].replace("-", "_") == f"__{name}" for flag in flags)


def _read_launch_keys(recipe_flags: list[str]) -> tuple[Mapping[str, str], Path]:
    """Return the launch keys of the YAML that the recipe's flags name, and the folder of that file."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--config", nargs="?")
    config = Path(parser.parse_known_args(recipe_flags)[0].config or "").expanduser()
    # A pipe can be read once, and the recipe reads it.
    if not config.is_file():
        return {}, Path()
    values = read_mapping(str(config), "config", lambda text: load_yaml_as_text(text) or {})
    return {key: str(values[key]) for key in LAUNCH_KEYS if values.get(key) is not None}, config.parent


def compare_with_launch(values: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Compare the launch keys of a run's YAML with the launch of this process. Typed flags go before them.

    Returns:
        (problems: what was not typed and is different, notes: what was typed and is different).
    """
    if not values:
        return [], []
    flags = parent_flags()
    typed = typed_flags(flags) if flags else {}
    # Key -> what the launch has, and the flags that decide about it.
    launched = {
        "strategy": (Path(typed.get("config_file") or "single").stem, _CHOOSING),
        "num_processes": (os.environ.get("WORLD_SIZE", "1"), {"num_processes"}),
    }
    problems = []
    notes = []
    for key, value in values.items():
        actual, deciding_flags = launched[key]
        if Path(value).stem == actual:
            continue
        difference = f"{key}: the config says {value}, and the launch {actual}"
        if deciding_flags.isdisjoint(typed):
            problems.append(
                f"{difference}. Only zerobook launch reads that key: start with it, or type the flag of the launcher."
            )
        else:
            notes.append(f"{difference}, by its flags")
    return problems, notes
