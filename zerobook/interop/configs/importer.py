"""Import a config of another trainer: collect the recipe's values and files, and make a line of the account for each key."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from zerobook.config import RecipeConfig
from zerobook.errors import ConfigError
from zerobook.interop.configs import data, strategies, translations
from zerobook.interop.configs.foreign import Foreign, NoCounterpart
from zerobook.interop.configs.table import (
    DEFAULT,
    NO_EFFECT,
    NOT_POSSIBLE,
    TRAINERS,
    UNKNOWN,
    Entry,
    load_table,
)
from zerobook.models.adapters import AdapterConfig
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.shipped import shipped

# Name -> function, for the key ``by`` of the tables.
_FUNCTIONS = {**vars(translations), **vars(data), **vars(strategies)}
# What the tables write instead of the flag for the tokens of a row, which has another name in each recipe.
LENGTH = "LENGTH"
# Flags that choose the recipe for adapters.
ADAPTER_KEYS = ("adapter", "adapter_path")
# Keys of transformers' scripts that choose the recipe for encoder-decoders.
SEQ2SEQ_KEYS = ("max_source_length", "max_target_length", "source_prefix")


class Refused(ConfigError):
    """A config of something that no recipe trains. ``what`` is its name, in words."""

    def __init__(self, what: str, message: str):
        super().__init__(message)
        self.what = what


class Line(NamedTuple):
    """A line of the account: what became of one key of the foreign config.

    ``key`` is its path, such as ``datasets[0].path``. ``kind`` is one of the kinds in `zerobook.interop.configs.table`.
    ``flags`` has the flags that the key becomes, and ``say`` a sentence that explains it.
    """

    key: str
    value: Any
    kind: str
    flags: dict[str, Any]
    say: str


@dataclass
class Imported:
    """The result of an import: the recipe, its settings, the strategy and the account.

    Attributes:
        trainer: the name of the other trainer, in words.
        recipe: the stem of the recipe's file.
        values: the content of the recipe's YAML.
        lines: a line of the account for each key.
        strategy: the strategy file of the launch.
        default_lines: a line for each default of the trainer that differs from the recipe's, and is therefore in ``values``.
        foreign: the foreign config, with further files to write.
    """

    trainer: str
    recipe: str
    values: dict[str, Any]
    lines: list[Line]
    default_lines: list[Line]
    foreign: Foreign
    strategy: strategies.Strategy

    @property
    def changes_training(self) -> bool:
        """Whether a key that may change the training has no counterpart."""
        return any(line.kind in (NOT_POSSIBLE, UNKNOWN) for line in self.lines)

    @property
    def names_data(self) -> bool:
        """Whether the recipe's YAML names training data."""
        return not self.values.keys().isdisjoint(("dataset_name", "train_file", "datasets"))


def recognise_trainer(config: dict[str, Any], name: str) -> str:
    """Return the value of ``--from`` for a config: the trainer of which it has the most characteristic keys.

    Args:
        name: what an error message calls the config.

    Raises:
        ConfigError: the config has no trainer's characteristic keys.
    """
    scores = {}
    for trainer, table in TRAINERS.items():
        # Of each set of characteristic keys, all must be in the config.
        scores[trainer] = sum(len(keys) for keys in load_table(table).recognised_by if config.keys() >= set(keys))
    best = max(scores, key=scores.__getitem__)
    if not scores[best]:
        raise ConfigError(
            f"{name}: it is not recognised as a config of another trainer. Name the trainer with --from: {', '.join(TRAINERS)}."
        )
    return best


def import_config(config: dict[str, Any], file: Path, trainer: str, *, recipe: str = "") -> Imported:
    """Import a config.

    Args:
        config: the content of the config.
        file: the path of the config, since it may name files relative to it.
        trainer: a key of `TRAINERS`.
        recipe: stem of the recipe's file; empty to choose the recipe by the keys.

    Raises:
        Refused: no recipe trains what the config trains.
    """
    foreign = Foreign(config, file, load_table(TRAINERS[trainer]))
    _refuse(foreign)

    # Translate the keys of the config, and the defaults of the trainer for keys that the config does not set.
    lines: list[Line] = []
    for key, value in foreign.config.items():
        lines += _list_lines(foreign, key, value, None)
    default_lines = []
    for key, value in foreign.table.defaults.items():
        entry = foreign.table.entries.get(key)
        # The trainer's default of logging_steps is not taken over: it does not change the training, and spikes are noticed only
        # at log points.
        if entry is not None and value is not None and foreign.config.get(key) is None and key != "logging_steps":
            default_lines.append(_translate(foreign, key, value, entry)._replace(kind=DEFAULT))

    # Take the flags that the recipe has.
    if not recipe:
        # The defaults count too, since some trainers train adapters by default.
        recipe = _choose_recipe(foreign, lines + default_lines)
    config_class = recipe_class(str(shipped(f"recipes/{recipe}.py"))).config_class
    lines = [_check_flags(line, config_class) for line in lines]
    values: dict[str, Any] = {}
    for line in lines:
        values |= line.flags
    # Write out a default of the trainer if the recipe has another one.
    default_values = vars(config_class(**values))
    written_lines = []
    for line in default_lines:
        checked = _check_flags(line, config_class)
        new_flags = {key: value for key, value in checked.flags.items() if key not in values and value != default_values[key]}
        if new_flags:
            values |= new_flags
            written_lines.append(checked._replace(flags=new_flags))
    strategy = strategies.choose_strategy(foreign)
    return Imported(foreign.table.trainer, recipe, values, lines, written_lines, foreign, strategy)


# Return the stem of the recipe's file.
def _choose_recipe(foreign: Foreign, lines: list[Line]) -> str:
    for line in lines:
        if any(line.flags.get(key) is not None for key in ADAPTER_KEYS):
            return "lora_finetune"
    return "seq2seq_chatbot" if foreign.config.keys() & set(SEQ2SEQ_KEYS) else "causal_lm"


def _refuse(foreign: Foreign) -> None:
    """Raise `Refused` if a key or a value shows that the config trains something that no recipe trains."""
    for key, what in foreign.table.refused.items():
        # The table has either KEY, or KEY=VALUE for one value of the key.
        name, has_value, refused_value = key.partition("=")
        value = foreign.config.get(name)
        is_refused = str(value).lower() == refused_value if has_value else not foreign.is_default(name, value)
        if is_refused:
            raise Refused(
                what,
                f"{foreign.file}: {name} is {value!r:.60}, so this is a config for {what}. The recipes finetune language "
                "models on text. Nothing was written.",
            )


def _list_lines(foreign: Foreign, path: str, value: Any, outer_line: Line | None) -> Iterator[Line]:
    """Yield the lines of a key and of all keys inside of it.

    Args:
        path: the path of the key, such as ``datasets[0].path``.
        outer_line: the line of the nearest key around it that the table has; None if there is none.
    """
    # The tables write a list without indices.
    pattern = re.sub(r"\[\d+\]", "[]", path)
    # A table may write a mapping where a config has a list of such mappings.
    entry = foreign.table.entries.get(pattern) or foreign.table.entries.get(pattern.replace("[].", "."))
    line = Line(path, value, UNKNOWN, {}, "")
    # A key that refuses a config is turned off here, since this config was not refused.
    if value is None or path in foreign.table.refused:
        line = line._replace(kind=DEFAULT, say="It is not set.")
    elif entry is not None:
        line = _translate(foreign, path, value, entry)
    # A key that the table lacks shares the meaning of the key around it. In a data set, only a mapping does, whose keys have
    # lines of their own: what other keys of a data set mean is not known.
    elif outer_line is not None and (
        isinstance(value, dict) or outer_line.flags.keys().isdisjoint({"dataset_name", "datasets"})
    ):
        line = outer_line._replace(key=path, value=value, flags={})
    children: dict[str, Any] = {}
    if isinstance(value, dict):
        children = {f"{path}.{key}": child for key, child in value.items()}
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        children = {f"{path}[{index}]": child for index, child in enumerate(value)}
    # A key with keys inside has a line only if it becomes a flag, or if the whole of it has no counterpart.
    is_refused = line.kind == NOT_POSSIBLE and entry is not None and bool(entry.by)
    if not children or line.flags or is_refused:
        yield line
    for child_path, child in children.items():
        yield from _list_lines(foreign, child_path, child, line if entry is not None else outer_line)


def _translate(foreign: Foreign, path: str, value: Any, entry: Entry) -> Line:
    """Return the line of a key for which the table has ``entry``."""
    if entry.kind == NO_EFFECT:
        return Line(path, value, NO_EFFECT, {}, entry.say)
    if entry.kind == NOT_POSSIBLE:
        kind = DEFAULT if foreign.is_default(path, value) else NOT_POSSIBLE
        return Line(path, value, kind, {}, entry.say)
    foreign.entry = entry
    foreign.sentence = entry.say
    try:
        flags = _translate_value(foreign, value, entry)
    except NoCounterpart as error:
        return Line(path, value, NOT_POSSIBLE, {}, str(error))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, OSError):
        # A function of the tables fails on a value of another type than it expects.
        return Line(
            path, value, NOT_POSSIBLE, {}, "The value is none that is known for this key. Correct it, or remove the key."
        )
    return Line(path, value, entry.kind, flags, foreign.sentence)


def _translate_value(foreign: Foreign, value: Any, entry: Entry) -> dict[str, Any]:
    """Return flag -> value for a value of a key with ``entry``. Raise `NoCounterpart`, or any error for an odd value."""
    if isinstance(value, str | int | float) and value in entry.values:
        return entry.values[value]
    if entry.otherwise:
        raise NoCounterpart(entry.otherwise)
    if entry.by:
        return _FUNCTIONS[entry.by](foreign, value)
    if entry.to:
        return {entry.to: value}
    return {}


def _check_flags(line: Line, config_class: type[RecipeConfig]) -> Line:
    """Return the line with only those of its flags that are set; a line without flags if the recipe refuses one of them."""
    flags = {}
    for key, value in line.flags.items():
        name = config_class.length_key if key == LENGTH else key
        if value is None:
            continue
        if name not in config_class.model_fields:
            # A recipe without adapters has no such flags.
            if name in AdapterConfig.model_fields or name.startswith("load_in"):
                return line._replace(kind=NO_EFFECT, flags={}, say="No adapter is trained, so that it says nothing.")
            return line._replace(kind=NOT_POSSIBLE, flags={}, say=f"The recipe has no {name}.")
        try:
            # Pydantic checks and converts the value.
            flags[name] = config_class(**{name: value}).model_dump(include={name}, exclude_unset=True)[name]
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            return line._replace(kind=NOT_POSSIBLE, flags={}, say=f"{name} here: {reason}.")
    return line._replace(flags=flags)
