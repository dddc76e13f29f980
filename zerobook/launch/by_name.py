"""Names of recipes and strategies on a command line, and the keys of a recipe's YAML that say how it is launched.

``zerobook launch`` turns names and keys into paths and flags, since ``accelerate launch`` knows only these.
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

# Flags with which accelerate starts a module or another program instead of a recipe file.
OTHER_PROGRAMS = {"-m", "--module", "--no_python", "--no-python"}
# Flags of accelerate that choose a strategy.
_STRATEGY_FLAGS = {"config_file", "use_deepspeed", "use_fsdp", "multi_gpu", "cpu"}


def replace_names(arguments: list[str], strategy: str | None) -> list[str]:
    """Return the arguments of ``accelerate launch`` for those of ``zerobook launch``.

    Names of recipes and strategies become paths, and the launch keys of the recipe's YAML become flags.

    Args:
        arguments: those of ``zerobook launch`` without ``--strategy``.
        strategy: the value of ``--strategy``, which overrides the recipe's YAML; None without the flag.

    Raises:
        ConfigError: there is no such recipe or strategy, or two strategies are named.
    """
    flags, recipe, recipe_flags = split_at_recipe(arguments)
    has_config_file = _has_flag(flags, "config_file")
    if strategy and has_config_file:
        raise ConfigError(f"--strategy {strategy}: --config_file names a strategy file, too. Give one of them.")
    launch_keys: Mapping[str, str] = {}
    folder = Path()
    # accelerate may also start another program than a recipe, which has no launch keys.
    if recipe is not None and OTHER_PROGRAMS.isdisjoint(flags):
        # A name becomes a path. A path stays as it was typed.
        if not recipe.endswith(".py"):
            recipe = str(find(recipe, "recipes"))
        launch_keys, folder = _read_launch_keys(recipe_flags)
    # The user's flags override the keys of the recipe's YAML.
    if strategy:
        flags = ["--config_file", str(find(strategy, "accelerate_configs")), *flags]
    elif "strategy" in launch_keys and not has_config_file:
        strategy_file = find(launch_keys["strategy"], "accelerate_configs", beside=folder)
        flags = ["--config_file", str(strategy_file), *flags]
    if "num_processes" in launch_keys and not _has_flag(flags, "num_processes"):
        flags = [*flags, "--num_processes", launch_keys["num_processes"]]
    if recipe is None:
        return flags
    return [*flags, recipe, *recipe_flags]


# accelerate takes --config_file, --config-file and --config_file=FILE.
def _has_flag(flags: list[str], name: str) -> bool:
    return any(flag.partition("=")[0].replace("-", "_") == f"__{name}" for flag in flags)


def _read_launch_keys(recipe_flags: list[str]) -> tuple[Mapping[str, str], Path]:
    """Return the launch keys of the YAML that the recipe's flags name, and the folder of that file."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--config", nargs="?")
    config = Path(parser.parse_known_args(recipe_flags)[0].config or "").expanduser()
    # A pipe can be read only once, and the recipe has to read it.
    if not config.is_file():
        return {}, Path()
    values = read_mapping(str(config), "config", lambda text: load_yaml_as_text(text) or {})
    return {key: str(values[key]) for key in LAUNCH_KEYS if values.get(key) is not None}, config.parent


def compare_with_launch(values: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Compare the launch keys of a run's YAML with the launch of this process.

    Returns:
        (problems, notes). A difference is a note if the user typed a flag for the setting, since flags override the YAML; it is
        a problem otherwise.
    """
    if not values:
        return [], []
    flags = parent_flags()
    typed = typed_flags(flags) if flags else {}
    # Key -> (its value in this launch, the flags that set it).
    launched = {
        "strategy": (Path(typed.get("config_file") or "single").stem, _STRATEGY_FLAGS),
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
