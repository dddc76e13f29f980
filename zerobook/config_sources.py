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
PYTHON = "Python"
"""Source of a value that was set in Python."""
LISTS_OF_PATHS = ("eval_tasks", "hooks")
LAUNCH_KEYS = ("strategy", "num_processes")
"""Keys of a recipe's YAML that are for ``zerobook launch``, which reads them before there are processes."""
LONGEST_SHOWN = 200
"""Characters of a wrong value that a message repeats."""


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
    """Flags and YAML, read.

    Attributes:
        config: the config of all values that are valid.
        sources: the source of each of its values.
        dry_run: ``--dry-run`` was given.
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
    """Read flags and the YAML they name, and gather the problems: those of the launch can then be told together with them.

    Args:
        config_class: the recipe's config.
        argv: the flags, without the program's name; ``sys.argv[1:]`` when None.
        data: training data has to be named.

    Raises:
        ConfigError: the YAML cannot be read. What it would have set is not known, so only the flags themselves are checked.
    """
    if argv is None:
        argv = sys.argv[1:]
    arguments, other_words, problems = _read_flags(_parser(config_class), argv)
    # Flags that are not given are not attributes, so these are the user's alone.
    flags = {key: value for key, value in vars(arguments).items() if key not in ("config", "dry_run")}
    flag_values = _single_values(flags)
    flag_sources = {key: f"flag --{key}" for key in flags}
    problems += _problems_of_words(other_words, config_class)

    values: dict[str, Any] = {}
    launch_keys = {}
    sources = ConfigSources(dict.fromkeys(config_class.model_fields, "default"))
    if arguments.config:
        try:
            # An empty file sets nothing.
            file_values = read_mapping(arguments.config, "config", lambda text: load_yaml_as_text(text) or {}, may_be_pipe=True)
        except ConfigError as error:
            _, invalid = _valid(config_class, flag_values, ConfigSources(flag_sources))
            raise ConfigError([*error.problems, *problems, *invalid]) from None
        # A recipe may have a key of such a name.
        for key in LAUNCH_KEYS:
            if key in file_values and key not in config_class.model_fields:
                value = file_values.pop(key)
                if value is not None:
                    launch_keys[key] = str(value)
        values, file_problems = _name_values(arguments.config, file_values, config_class)
        problems += file_problems
        sources.update(dict.fromkeys(values, arguments.config))
    # Flags override the file.
    values |= flag_values
    sources.update(flag_sources)

    config, invalid = _valid(config_class, values, sources)
    problems += invalid
    # What is missing may be there under a wrong name, or with a wrong value.
    if data and not config.names_data() and not any(_is_about(key, problems) for key in DATA):
        problems.append("dataset_name: no training data is named. Give --dataset_name, --train_file, or datasets in the YAML.")
    # A refused value was replaced by its default, so a second problem of that key would be about the default.
    problems += [problem for problem in config.problems() if not _is_about(problem.partition(":")[0], problems)]
    return Parsed(config, sources, arguments.dry_run, problems, launch_keys)


def _problems_of_words(words: list[str], config_class: type[RecipeConfig]) -> list[str]:
    """Return a problem for each word of a command line that is not a flag of the recipe, nor a value of one."""
    names = set(config_class.model_fields) | set(ALIASES)
    problems = []
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-").split("=")[0].replace("-", "_")
            problems.append(f"{word}: no such flag.{_hint(name, names, '--')}")
    # Words behind an unknown flag are its values.
    if words and not problems:
        problems.append(f"{' '.join(words)}: a value without a flag. Flags look like --learning_rate 5e-4.")
    return problems


def _name_values(
    yaml_file: str, file_values: dict[str, Any], config_class: type[RecipeConfig]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a YAML file under their names, without aliases, and a problem for each key that is not taken."""
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
            values[name] = _beside(yaml_file, name, value)
    return values, problems


def _valid(config_class: type[ConfigT], values: dict[str, Any], sources: ConfigSources) -> tuple[ConfigT, list[str]]:
    """Return the config of the values that are valid, and a problem for each that is not. Takes its source away."""
    try:
        return config_class(**values), []
    except ValidationError as error:
        errors = error.errors()
    problems = [_explain(error, sources) for error in errors]
    invalid_keys = {str(error["loc"][0]) for error in errors}
    sources.update(dict.fromkeys(invalid_keys, "default"))
    # Disagreements between keys are looked for in the config of what is left.
    valid_values = {key: value for key, value in values.items() if key not in invalid_keys}
    config, _ = _valid(config_class, valid_values, sources)
    return config, problems


def _is_about(key: str, problems: list[str]) -> bool:
    """Return whether one of ``problems`` is about a key, or says that it was meant."""
    pattern = re.compile(rf"(^|mean )(--)?{re.escape(key)}\b")
    return any(pattern.search(problem) for problem in problems)


class ConfigDraft(Generic[ConfigT]):
    """A config while its launch is resolved. A strategy file, or the checkpoint that is resumed, may set what no person set.

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
        """Validate the config again, and return a sentence for each value that it does not take."""
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
    """Return the values given for one recipe as another recipe's config; keys that the other does not have are left out.

    Raises:
        ConfigError: with every disagreement, or every value that is not valid there.
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


def _parser(config_class: type[RecipeConfig]) -> _Parser:
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
        if name == "datasets":
            # A list of mappings is written in YAML.
            continue
        extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        metavar = _kind(field.annotation)
        if "choices" in extra:
            metavar = "{" + ",".join(extra["choices"]) + "}"
        # Without a default, a flag that is not given cannot hide the value of the YAML. pydantic converts the text.
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "metavar": metavar}
        if field.annotation is bool or "bare" in extra:
            options |= {"nargs": "?", "const": extra.get("bare", "true")}
        elif get_origin(field.annotation) is list or "list[" in str(field.annotation):
            options |= {"nargs": "*"}
        # argparse formats help texts with %.
        help_text = f"{field.description or ''} (default: {field.default})".replace("%", "%%")
        parser.add_argument(f"--{name}", *alias_flags.get(name, []), help=help_text, **options)
    return parser


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    # The first type of a union or a list says enough.
    inner = [argument for argument in get_args(annotation) if argument is not type(None)]
    if inner:
        return _kind(inner[0])
    return getattr(annotation, "__name__", str(annotation)).upper()


class _FlagError(Exception):
    """A flag that argparse refuses."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _FlagError(message)


def _read_flags(parser: _Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the flags, the words that are none, and a problem for each flag without its value."""
    problems: list[str] = []
    words = list(argv)
    # argparse stops at the first of them, so that one is taken away and the rest is read again.
    while True:
        try:
            arguments, other_words = parser.parse_known_args(words)
        except _FlagError as error:
            flags = words
            reason = str(error)
            # The flag is named with all its spellings: "argument --max_train_steps/--max_steps: expected one argument".
            refusal = re.match(r"argument ([^:]+): (.*)", reason, re.S)
            if refusal:
                flags = refusal[1].split("/")
                reason = refusal[2]
            words, removed = _without_first(words, flags)
            problems.append(f"{removed}: {reason}.")
        else:
            return arguments, other_words, problems


def _without_first(words: list[str], flags: list[str]) -> tuple[list[str], str]:
    """Return the words without the first of ``flags`` that has no value, and that one."""
    for index, word in enumerate(words):
        following = words[index + 1 : index + 2]
        has_value = bool(following) and not following[0].startswith("--")
        if word in flags and not has_value:
            return words[:index] + words[index + 1 :], word
    return [], " ".join(words)


def _single_values(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the values of flags, where a list of one text is that text: it may be a list of its own."""
    values = dict(flags)
    for key, value in flags.items():
        if isinstance(value, list) and len(value) == 1:
            values[key] = value[0]
    return values


def _beside(yaml_file: str, key: str, value: Any) -> Any:
    """Return a value of a YAML file whose relative paths start beside that file, where nothing of that name is in the working
    folder."""
    if isinstance(value, list):
        return [_beside(yaml_file, key, item) for item in value]
    if key == "datasets" and isinstance(value, dict) and isinstance(value.get("path"), str):
        return value | {"path": _path_beside(yaml_file, value["path"])}
    # `optimizer` is the name of a shipped one, or code.
    if isinstance(value, str) and (key in PATHS or (key == "optimizer" and ".py:" in value)):
        return _path_beside(yaml_file, value)
    return value


def _path_beside(yaml_file: str, name: str) -> str:
    path = name
    class_name = ""
    # Code is named as FILE.py:Class.
    if ".py:" in name:
        path, _, class_name = name.partition(":")
    path_beside = Path(yaml_file).expanduser().parent / path
    if Path(path).expanduser().exists() or Path(path).is_absolute() or not path_beside.exists():
        return name
    if class_name:
        return f"{path_beside}:{class_name}"
    return str(path_beside)


def _hint(name: str, names: set[str], prefix: str = "") -> str:
    """Return a sentence about the key that is meant: by its name in another trainer, or by its spelling."""
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
    # The value may be a file's content in the place of its name.
    shown = repr(error["input"])
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}..."
    correction = ""
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        correction = nearest_value(str(error["loc"][0]), str(error["input"]), choices)
    return f"{path}: got {shown} (from {source}), expected {message}.{correction}"
