"""Command lines of other trainers, read as configs."""

import re
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerobook.errors import ConfigError
from zerobook.interop.configs.importer import Refused, recognise_trainer
from zerobook.utils.yaml_text import load_bounded, read_mapping

# Program or script -> (value of ``--from``, its subcommand for training, stem of the recipe's file). An empty text: none.
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
# Recipes of torchtune that can be imported.
TORCHTUNE_RECIPES = (
    "full_finetune_single_device",
    "full_finetune_distributed",
    "lora_finetune_single_device",
    "lora_finetune_distributed",
)


class Command(NamedTuple):
    """A command line as a config; see `zerobook.interop.configs.importer.import_config` for the attributes."""

    config: dict[str, Any]
    file: Path
    trainer: str
    recipe: str


def read_command(words: list[str]) -> Command:
    """Return a command line as a config: the keys of the config file that it names, and its flags, which override them.

    Args:
        words: the words of the command line.

    Raises:
        ConfigError: it is not a command of a known trainer.
        Refused: it trains something that no recipe trains.
    """
    position = find_program(words)
    if position is None:
        raise ConfigError(
            f"{' '.join(words) or 'command'}: there is none of {', '.join(PROGRAMS)} in it, and no script. Nothing was written."
        )
    program = Path(words[position]).name
    # A script with another name may be built on a known trainer. Its trainer is recognised below, by its flags.
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
        launcher_flags, rest = _split_torchtune(rest)
        launcher_words = launcher_words + launcher_flags
        advice = "If it is the name of one of torchtune's own configs, copy it with `tune cp`, and name the copy."
    file = Path("command")
    config: dict[str, Any] = {}
    flags = dict(_parse_flags(rest))
    # A config file is the value of the flag `--config`, or a word without a flag, which has the key "".
    config_file = flags.pop("config", None) or flags.pop("", None)
    if config_file is not None:
        file = Path(str(config_file)).expanduser()
        config = read_mapping(str(config_file), "config", load_bounded, advice=advice)
    for name, value in flags.items():
        _set_value(config, name, value)
    # The launcher's words are variables of the environment (NAME=VALUE), its name, and its flags.
    launcher = dict(_parse_flags([word for word in launcher_words if "=" in word and not word.startswith("-")]))
    launcher |= _parse_flags(list(dropwhile(lambda word: not word.startswith("--"), launcher_words)))
    # A YAML file that is not the value of a flag says nothing of a launcher.
    launcher.pop("", None)
    if launcher:
        config["launcher"] = launcher
    return Command(config, file, trainer or recognise_trainer(config, program), recipe)


# torchtune's command is `tune run LAUNCHER_FLAGS RECIPE FLAGS`.
def _split_torchtune(words: list[str]) -> tuple[list[str], list[str]]:
    """Return (flags of the launcher, flags of the recipe), of the words that follow ``tune run``."""
    recipe_names = set(words).intersection(TORCHTUNE_RECIPES)
    if not recipe_names:
        raise Refused("tune run", f"tune run: only {', '.join(TORCHTUNE_RECIPES)} can be imported. Nothing was written.")
    position = words.index(recipe_names.pop())
    flags = words[position + 1 :]
    # Settings (KEY=VALUE) come first. Behind `--config FILE`, they would be read as further values of that flag.
    settings = [word for word in flags if re.match(r"[\w.]+=", word)]
    return words[:position], settings + [word for word in flags if word not in settings]


def _set_value(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a value of a config. The name ``a.b`` means the key ``b`` in the mapping ``a``, if the config has that mapping."""
    outer, _, inner = name.partition(".")
    if inner and isinstance(config.get(outer), dict):
        _set_value(config[outer], inner, value)
    else:
        config[name] = value


def find_program(words: list[str]) -> int | None:
    """Return the index of the trainer's program, which is the first word, or else of the script; None if there is neither."""
    # Variables of the environment (NAME=VALUE) may come before the first word.
    first = next((index for index, word in enumerate(words) if not re.match(r"\w+=", word)), None)
    if first is not None and Path(words[first]).name in PROGRAMS:
        return first
    return next((index for index, word in enumerate(words) if word.endswith(".py")), None)


def _parse_flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each flag and of each ``key=value``.

    A YAML or JSON file without a flag has the name "". Any other word has a name that no table has, so that the account reports
    it as unknown.
    """
    index = 0
    while index < len(words):
        name, has_value, text = words[index].partition("=")
        values = [text] if has_value else []
        index += 1
        if not name.startswith("--"):
            if has_value and re.fullmatch(r"[\w.]+", name):
                yield name.lower(), _parse_value(text)
            elif name.endswith((".yaml", ".yml", ".json")):
                yield "", name
            else:
                yield f"the word {name}", True
            continue
        # All words up to the next flag are values of this one.
        while not has_value and index < len(words) and not words[index].startswith("--"):
            values.append(words[index])
            index += 1
        name = name.lstrip("-").replace("-", "_")
        # A flag without a value is true. With several values, it is a list.
        parsed: Any = [_parse_value(value) for value in values] or True
        if len(values) == 1:
            parsed = parsed[0]
        # For each setting that is true by default, transformers' parser has a flag `--no_NAME`, which makes it false.
        if parsed is True and name.startswith("no_") and name != "no_cuda":
            name = name.removeprefix("no_")
            parsed = False
        yield name, parsed


def _parse_value(text: str) -> Any:
    """Return a word as YAML reads it; the text itself if it is not YAML."""
    try:
        value = load_bounded(text)
    except (yaml.YAMLError, ValueError):
        return text
    # YAML reads a text such as ``summarize: `` as a mapping. Only one in braces is meant as such.
    return text if isinstance(value, dict) and not text.startswith("{") else value
