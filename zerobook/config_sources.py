"""The values of a recipe's config, read from flags and YAML, with the source of each.

A YAML file (``--config FILE.yaml``) holds the same keys as the flags, and flags override it. All problems are reported at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError

from zerobook.config import ALIASES, DATA, PATHS, DatasetSpec, RecipeConfig
from zerobook.errors import ConfigError
from zerobook.utils import other_trainers
from zerobook.utils.nearest import nearest, nearest_value
from zerobook.utils.written_values import as_list
from zerobook.utils.yaml_text import load_yaml_as_text, read_mapping

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)
# Source of a value that was set in Python.
PYTHON = "Python"
# Keys whose items may be paths, and which a YAML may write as one text with commas.
LISTS_OF_PATHS = ("eval_tasks", "hooks")
# Keys of a recipe's YAML that ``zerobook launch`` reads, before it starts the processes.
LAUNCH_KEYS = ("strategy", "num_processes")
# Characters of a wrong value that a message repeats.
LONGEST_SHOWN = 200


class ConfigSources(dict[str, str]):
    """Source of the value of each key: ``default``, ``FILE.yaml``, ``flag --x`` or a strategy file."""

    def is_set(self, key: str) -> bool:
        """Return whether the user set the key, in YAML or by flag."""
        return not self.get(key, "default").startswith("default")

    def is_flag(self, key: str) -> bool:
        """Return whether the user set the key by flag."""
        return self.get(key, "default").startswith("flag ")

    def is_from_yaml(self, key: str) -> bool:
        """Return whether the key was set in a recipe's YAML, which somebody else may have written."""
        return self.is_set(key) and not self.is_flag(key) and self[key] != PYTHON


@dataclass(frozen=True)
class Parsed(Generic[ConfigT]):
    """The settings that flags and a YAML file contain.

    Attributes:
        config: the config of all values that are valid.
        sources: the source of each of its values.
        dry_run: whether ``--dry-run`` is among the flags.
        problems: every unknown key, wrong type, missing file and disagreement.
        launch_keys: the `LAUNCH_KEYS` of the YAML.
    """

    config: ConfigT
    sources: ConfigSources
    dry_run: bool
    problems: list[str]
    launch_keys: dict[str, str]


def parse(
    config_class: type[ConfigT], argv: list[str] | None = None, *, data: bool = True
) -> tuple[ConfigT, ConfigSources, bool]:
    """Read flags and the YAML they name. See `read` for the arguments.

    Returns:
        (config, source of each value, whether ``--dry-run`` was asked for).

    Raises:
        ConfigError: with every unknown key, wrong type, missing file and disagreement at once.
    """
    parsed = read(config_class, argv, data=data)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.config, parsed.sources, parsed.dry_run


def read(config_class: type[ConfigT], argv: list[str] | None = None, *, data: bool = True) -> Parsed[ConfigT]:
    """Read flags and the YAML that they name. Problems are returned, so that the caller can report others with them.

    Args:
        config_class: the recipe's config.
        argv: the flags, without the program's name; ``sys.argv[1:]`` when None.
        data: whether training data has to be named.

    Raises:
        ConfigError: the YAML cannot be read. Since its values are not known, only those of the flags are checked as well.
    """
    if argv is None:
        argv = sys.argv[1:]
    arguments, other_words, problems = _read_flags(_make_parser(config_class), argv)
    # Only --config and --dry-run have defaults, so every other attribute is a flag that the user gave.
    flags = {key: value for key, value in vars(arguments).items() if key not in ("config", "dry_run")}
    flag_values = _without_lists_of_one(flags)
    flag_sources = {key: f"flag --{key}" for key in flags}
    problems += _problems_of_words(other_words, config_class)

    # Read the YAML file.
    values: dict[str, Any] = {}
    launch_keys: dict[str, str] = {}
    sources = ConfigSources(dict.fromkeys(config_class.model_fields, "default"))
    if arguments.config:
        try:
            # An empty file sets nothing.
            file_values = read_mapping(arguments.config, "config", lambda text: load_yaml_as_text(text) or {}, may_be_pipe=True)
        except ConfigError as error:
            _, invalid = _validate(config_class, flag_values, ConfigSources(flag_sources))
            raise ConfigError([*error.problems, *problems, *invalid]) from None
        launch_keys = _take_launch_keys(file_values, config_class)
        values, file_problems = _resolve_keys(arguments.config, file_values, config_class)
        problems += file_problems
        sources.update(dict.fromkeys(values, arguments.config))

    # Flags override the file.
    values |= flag_values
    sources.update(flag_sources)
    config, invalid = _validate(config_class, values, sources)
    problems += invalid
    # If a problem is about a key of the data, the user has named data, under a wrong key or with a wrong value.
    if data and not config.names_data() and not any(_is_about(key, problems) for key in DATA):
        problems.append("dataset_name: no training data is named. Give --dataset_name, --train_file, or datasets in the YAML.")
    # A refused value was replaced by its default, so a second problem of that key would be about the default.
    problems += [problem for problem in config.problems() if not _is_about(problem.partition(":")[0], problems)]
    return Parsed(config, sources, arguments.dry_run, problems, launch_keys)


# Remove the `LAUNCH_KEYS` from the values of a YAML file, and return them as text. Those that are null are left out.
def _take_launch_keys(file_values: dict[str, Any], config_class: type[RecipeConfig]) -> dict[str, str]:
    launch_keys = {}
    for key in LAUNCH_KEYS:
        # A key that the recipe has too is the recipe's.
        if key in file_values and key not in config_class.model_fields:
            value = file_values.pop(key)
            if value is not None:
                launch_keys[key] = str(value)
    return launch_keys


def _problems_of_words(words: list[str], config_class: type[RecipeConfig]) -> list[str]:
    """Return a problem for each unknown flag among the words of a command line that the parser did not take.

    If none of the words is a flag, there is one problem for all of them.
    """
    names = set(config_class.model_fields) | set(ALIASES)
    problems = []
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-").split("=")[0].replace("-", "_")
            problems.append(f"{word}: no such flag.{_hint(name, names, '--')}")
    # Words after an unknown flag are its values.
    if words and not problems:
        problems.append(f"{' '.join(words)}: a value without a flag. Flags look like --learning_rate 5e-4.")
    return problems


def _resolve_keys(
    yaml_file: str, file_values: dict[str, Any], config_class: type[RecipeConfig]
) -> tuple[dict[str, Any], list[str]]:
    """Replace the aliases among the keys of a YAML file, and resolve the paths among its values.

    Returns:
        (field of the config -> value, a problem for each key that is unknown or occurs twice).
    """
    names = set(config_class.model_fields) | set(ALIASES)
    values: dict[str, Any] = {}
    problems = []
    for key, value in file_values.items():
        name = ALIASES.get(key, key)
        if name not in config_class.model_fields:
            problems.append(f"{yaml_file}: {key}: no such key.{_hint(str(key), names)}")
        elif name in values:
            problems.append(f"{yaml_file}: {key}: the key is given twice; its other name is {name}.")
        else:
            if name in LISTS_OF_PATHS:
                value = as_list(value)
            values[name] = _resolve_paths(yaml_file, name, value)
    return values, problems


def _validate(config_class: type[ConfigT], values: dict[str, Any], sources: ConfigSources) -> tuple[ConfigT, list[str]]:
    """Return the config of the valid values, and a problem for each other value.

    A value that is not valid is replaced by its default, and so is its entry in ``sources``.
    """
    try:
        return config_class(**values), []
    except ValidationError as error:
        errors = error.errors()
    problems = [_explain(error, sources) for error in errors]
    invalid_keys = {str(error["loc"][0]) for error in errors}
    sources.update(dict.fromkeys(invalid_keys, "default"))
    # The caller looks for disagreements among the valid values, which need a config.
    valid_values = {key: value for key, value in values.items() if key not in invalid_keys}
    config, _ = _validate(config_class, valid_values, sources)
    return config, problems


def _is_about(key: str, problems: list[str]) -> bool:
    """Return whether one of ``problems`` begins with ``key``, or suggests it for a misspelt key ("Did you mean KEY?")."""
    pattern = re.compile(rf"(^|mean )(--)?{re.escape(key)}\b")
    return any(pattern.search(problem) for problem in problems)


class ConfigDraft(Generic[ConfigT]):
    """A config while its launch is resolved. A strategy file or a resumed checkpoint may set keys that the user has not set.

    Attributes:
        config: the config with the values set so far. Configs are frozen, so each change makes another one.
        sources: the source of each value.
    """

    def __init__(self, config: ConfigT, sources: ConfigSources):
        self.config = config
        self.sources = ConfigSources(sources)

    def set(self, source: str, **values: Any) -> None:
        """Set values of the config, all of them from ``source``."""
        self.config = self.config.model_copy(update=values)
        self.sources.update(dict.fromkeys(values, source))

    def problems(self) -> list[str]:
        """Validate the config again, and return a sentence for each value that is not valid."""
        try:
            type(self.config)(**self.config.model_dump(exclude_unset=True))
        except ValidationError as error:
            return [_explain(detail, self.sources) for detail in error.errors()]
        return []


def from_python(config: RecipeConfig) -> ConfigSources:
    """Return the sources of a config that was made in Python.

    Raises:
        ConfigError: with every missing file and disagreement at once.
    """
    problems = config.problems()
    if not config.names_data():
        problems.insert(0, "dataset_name: no training data is named. Set dataset_name or train_file.")
    if problems:
        raise ConfigError(problems)
    sources = ConfigSources(dict.fromkeys(type(config).model_fields, "default"))
    sources.update(dict.fromkeys(config.model_fields_set, PYTHON))
    return sources


def changed(
    config: RecipeConfig, sources: ConfigSources, kind: type[ConfigT], changes: dict[str, Any]
) -> tuple[ConfigT, ConfigSources]:
    """Return the values that the user set for one recipe, with changes, as a config of another recipe, and its sources.

    Keys that the other recipe does not have are left out.

    Args:
        kind: config class of the other recipe.
        changes: key -> value; its source is ``advice``.

    Raises:
        ConfigError: with every value that is not valid in the other config, or else with every disagreement.
    """
    values = {key: getattr(config, key) for key in type(config).model_fields if sources.is_set(key)} | changes
    common_values = {key: value for key, value in values.items() if key in kind.model_fields}
    new_sources = ConfigSources({key: sources.get(key, "default") for key in kind.model_fields})
    new_sources.update(dict.fromkeys(changes, "advice"))
    try:
        new_config = kind(**common_values)
    except ValidationError as error:
        raise ConfigError([_explain(detail, new_sources) for detail in error.errors()]) from None
    problems = new_config.problems()
    if problems:
        raise ConfigError(problems)
    return new_config, new_sources


# Return the parser of a recipe's command line, which has a flag for each field of the config.
def _make_parser(config_class: type[RecipeConfig]) -> _Parser:
    # The help of a recipe begins with the docstring of its file.
    doc = sys.modules[config_class.__module__].__doc__ or ""
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="the same keys as below, and those of zerobook launch; flags override it"
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        dest="dry_run",
        action="store_true",
        help="print the resolved config, the source of each value and the batch arithmetic; train nothing",
    )
    alias_flags: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        alias_flags.setdefault(name, []).append(f"--{alias}")
    for name, field in config_class.model_fields.items():
        # A list of mappings can be written only in YAML.
        if name == "datasets":
            continue
        # A field may have ``choices``, which the help lists, and ``bare``, the value of the flag without a value.
        extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        metavar = _metavar(field.annotation)
        if "choices" in extra:
            metavar = "{" + ",".join(extra["choices"]) + "}"
        # Without a default, a flag that is not given cannot override the YAML. Values stay text, which pydantic converts.
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "metavar": metavar}
        if field.annotation is bool or "bare" in extra:
            options |= {"nargs": "?", "const": extra.get("bare", "true")}
        elif get_origin(field.annotation) is list or "list[" in str(field.annotation):
            options |= {"nargs": "*"}
        # argparse formats help texts with the operator %, so a percent sign is doubled.
        help_text = f"{field.description or ''} (default: {field.default})".replace("%", "%%")
        parser.add_argument(f"--{name}", *alias_flags.get(name, []), help=help_text, **options)
    return parser


# Return the word for a flag's value in the help, such as INT or {no,bf16,fp16}.
def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    # A union is shown as its first type, and a list as the type of its items.
    inner_types = [argument for argument in get_args(annotation) if argument is not type(None)]
    if inner_types:
        return _metavar(inner_types[0])
    return getattr(annotation, "__name__", str(annotation)).upper()


class _FlagError(Exception):
    """A flag that argparse refuses."""


class _Parser(argparse.ArgumentParser):
    # argparse would print the message and exit.
    def error(self, message: str) -> NoReturn:
        raise _FlagError(message)


def _read_flags(parser: _Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the flags, the words that are not known, and a problem for each flag without its value."""
    problems: list[str] = []
    words = list(argv)
    # argparse stops at the first flag without a value. Remove this flag and read the other words again, to find all of them.
    while True:
        try:
            arguments, other_words = parser.parse_known_args(words)
        except _FlagError as error:
            reason = str(error)
            # If the message does not name a flag, any word may be the one that is refused.
            spellings = words
            # It names a flag by all its spellings: "argument --max_train_steps/--max_steps: expected one argument".
            refusal = re.match(r"argument ([^:]+): (.*)", reason, re.S)
            if refusal:
                spellings = refusal[1].split("/")
                reason = refusal[2]
            words, removed = _remove_flag_without_value(words, spellings)
            problems.append(f"{removed}: {reason}.")
        else:
            return arguments, other_words, problems


def _remove_flag_without_value(words: list[str], spellings: list[str]) -> tuple[list[str], str]:
    """Return the words without the first one that is among ``spellings`` and has no value, and this word.

    If there is no such word, return no words, and all of them as one text.
    """
    for index, word in enumerate(words):
        is_last = index + 1 == len(words)
        if word in spellings and (is_last or words[index + 1].startswith("--")):
            return words[:index] + words[index + 1 :], word
    return [], " ".join(words)


def _without_lists_of_one(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the values of flags, with the item itself for a list of one item, since a text may stand for a list: ``a,b``."""
    values = dict(flags)
    for key, value in flags.items():
        if isinstance(value, list) and len(value) == 1:
            values[key] = value[0]
    return values


def _resolve_paths(yaml_file: str, key: str, value: Any) -> Any:
    """Return a value of a YAML file, in which paths that exist only relative to the file's folder begin with that folder."""
    if isinstance(value, list):
        return [_resolve_paths(yaml_file, key, item) for item in value]
    if key == "datasets" and isinstance(value, dict) and isinstance(value.get("path"), str):
        return value | {"path": _resolve_path(yaml_file, value["path"])}
    # `optimizer` is the name of a shipped optimizer, or a class in a file.
    if isinstance(value, str) and (key in PATHS or (key == "optimizer" and ".py:" in value)):
        return _resolve_path(yaml_file, value)
    return value


def _resolve_path(yaml_file: str, name: str) -> str:
    path = name
    class_name = ""
    # Code is named as FILE.py:Class.
    if ".py:" in name:
        path, _, class_name = name.partition(":")
    path_beside_yaml = Path(yaml_file).expanduser().parent / path
    # A path that exists in the working folder comes first.
    if Path(path).expanduser().exists() or Path(path).is_absolute() or not path_beside_yaml.exists():
        return name
    if class_name:
        return f"{path_beside_yaml}:{class_name}"
    return str(path_beside_yaml)


def _hint(name: str, names: set[str], prefix: str = "") -> str:
    """Return a sentence with the key that the user may mean by ``name``: its name in another trainer, or a misspelt key."""
    translation = other_trainers.translate(name, names, prefix)
    if translation:
        return f" {translation}"
    return nearest(name, names, prefix)


def _explain(error: Any, sources: ConfigSources) -> str:
    """Return the sentence for one of pydantic's errors."""
    path = ".".join(map(str, error["loc"]))
    source = sources.get(str(error["loc"][0]), "default")
    if error["type"] == "extra_forbidden":
        return f"{source}: {path}: no such key.{_hint(str(error['loc'][-1]), set(DatasetSpec.model_fields))}"
    if error["type"] == "missing":
        return f"{source}: {path}: the key is missing."
    # Keep the first half of "a valid number, unable to parse string as a number".
    message = error["msg"].removeprefix("Input should be ").partition(", unable to parse")[0].rstrip(".")
    # The value may be long, such as a file's content instead of its name.
    shown = repr(error["input"])
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}..."
    correction = ""
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        correction = nearest_value(str(error["loc"][0]), str(error["input"]), choices)
    return f"{path}: got {shown} (from {source}), expected {message}.{correction}"
