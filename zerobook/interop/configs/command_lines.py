"""Command lines of other trainers, read as configs."""

import re
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerobook.errors import ConfigError
from zerobook.interop.configs.importer import Refused, recognise
from zerobook.utils.yaml_text import load_bounded, read_mapping

PROGRAMS = {
    "trl": ("trl", "sft", ""),
    "llamafactory-cli": ("llamafactory", "train", ""),
    "axolotl": ("axolotl", "train", ""),
    "swift": ("ms-swift", "sft", ""),
    "tune": ("torchtune", "run", ""),
    "run_sft.py": ("trl", "", ""),
    "run_clm.py": ("trainer", "", "causal_lm"),
    "run_clm_no_trainer.py": ("trainer", "", "causal_lm"),
    "run_summarization.py": ("trainer", "", "seq2seq_chatbot"),
    "run_translation.py": ("trainer", "", "seq2seq_chatbot"),
}
"""Program or script -> (value of ``--from``, the word that trains, stem of the recipe if that is known)."""
TORCHTUNE_RECIPES = (
    "full_finetune_single_device",
    "full_finetune_distributed",
    "lora_finetune_single_device",
    "lora_finetune_distributed",
)
"""Recipes of torchtune that can be imported."""


class Command(NamedTuple):
    """A command line as a config; see `zerobook.interop.configs.importer.import_config` for the attributes."""

    config: dict[str, Any]
    file: Path
    trainer: str
    recipe: str


def read_command(words: list[str]) -> Command:
    """Return what a command line sets: its config's keys, and its flags, which override them.

    Raises:
        ConfigError: it is not a command of a trainer that is known.
        Refused: it trains something that no recipe trains.
    """
    position = find_program(words)
    if position is None:
        raise ConfigError(
            f"{' '.join(words) or 'command'}: there is none of {', '.join(PROGRAMS)} in it, and no script. Nothing was written."
        )
    program = Path(words[position]).name
    # The flags of another script may be those of a trainer that it is built on.
    trainer, subcommand, recipe = PROGRAMS.get(program, ("", "", ""))
    rest = words[position + 1 :]
    if subcommand:
        what = " ".join([program, *rest[:1]])
        if rest[:1] != [subcommand]:
            raise Refused(what, f"{what}: only {program} {subcommand} can be imported. Nothing was written.")
        rest = rest[1:]
    launcher_words = words[:position]
    advice = ""
    if trainer == "torchtune":
        recipe_names = set(rest).intersection(TORCHTUNE_RECIPES)
        if not recipe_names:
            raise Refused("tune run", f"tune run: only {', '.join(TORCHTUNE_RECIPES)} can be imported. Nothing was written.")
        # The launcher's flags are between `tune run` and the name of the recipe.
        recipe_position = rest.index(recipe_names.pop())
        launcher_words = launcher_words + rest[:recipe_position]
        rest = rest[recipe_position + 1 :]
        # Settings may follow `--config FILE`, and would be read as further values of that flag.
        settings = [word for word in rest if re.match(r"[\w.]+=", word)]
        rest = settings + [word for word in rest if word not in settings]
        advice = "If it is the name of one of torchtune's own configs, copy it with `tune cp`, and name the copy."
    file = Path("command")
    config: dict[str, Any] = {}
    flags = dict(_flags(rest))
    # A config is named by a flag, or is a word of its own.
    config_file = flags.pop("config", None) or flags.pop("", None)
    if config_file is not None:
        file = Path(str(config_file)).expanduser()
        config = read_mapping(str(config_file), "config", load_bounded, advice=advice)
    for name, value in flags.items():
        _override(config, name, value)
    # Before the flags are the launcher's own name, and variables of the environment.
    launcher = dict(_flags([word for word in launcher_words if "=" in word and not word.startswith("-")]))
    launcher |= _flags(list(dropwhile(lambda word: not word.startswith("--"), launcher_words)))
    launcher.pop("", None)
    if launcher:
        config["launcher"] = launcher
    return Command(config, file, trainer or recognise(config, program), recipe)


def _override(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a value of a config. ``a.b`` is the key ``b`` in the mapping ``a``, if the config has that mapping."""
    outer, _, inner = name.partition(".")
    if inner and isinstance(config.get(outer), dict):
        _override(config[outer], inner, value)
    else:
        config[name] = value


def find_program(words: list[str]) -> int | None:
    """Return where the trainer's program is: the first word, or a script behind its launcher. None if there is none."""
    # Variables of the environment may come before it.
    first = next((index for index, word in enumerate(words) if not re.match(r"\w+=", word)), None)
    if first is not None and Path(words[first]).name in PROGRAMS:
        return first
    return next((index for index, word in enumerate(words) if word.endswith(".py")), None)


def _flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each flag, of each ``key=value``, of a YAML or JSON file under an empty name, and other words."""
    index = 0
    while index < len(words):
        name, has_value, text = words[index].partition("=")
        values = [text] if has_value else []
        index += 1
        if not name.startswith("--"):
            if has_value and re.fullmatch(r"[\w.]+", name):
                yield name.lower(), _value(text)
            elif name.endswith((".yaml", ".yml", ".json")):
                yield "", name
            else:
                # No table has it, so that it is not left out in silence.
                yield f"the word {name}", True
            continue
        while not has_value and index < len(words) and not words[index].startswith("--"):
            values.append(words[index])
            index += 1
        name = name.lstrip("-").replace("-", "_")
        # A flag alone is true, and several words are a list.
        parsed: Any = [_value(value) for value in values] or True
        if len(values) == 1:
            parsed = parsed[0]
        # transformers' parser makes such a flag for each setting that is true by default.
        if parsed is True and name.startswith("no_") and name != "no_cuda":
            name = name.removeprefix("no_")
            parsed = False
        yield name, parsed


def _value(text: str) -> Any:
    """Return a word as YAML reads it; the text if it is not YAML, or a mapping without braces, such as ``summarize: ``."""
    try:
        value = load_bounded(text)
    except (yaml.YAMLError, ValueError):
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value
