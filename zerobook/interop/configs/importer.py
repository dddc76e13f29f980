"""Import of a config: each of its keys becomes a line of the account, and the recipe's values and files are gathered."""

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

_FUNCTIONS = {**vars(translations), **vars(data), **vars(strategies)}
"""What the tables name in ``by``."""
LENGTH = "LENGTH"
"""Flag of the tables for the tokens of a row, which each recipe names in its own way."""
ADAPTER_KEYS = ("adapter", "adapter_path")
"""Flags that choose the recipe for adapters."""
SEQ2SEQ_KEYS = ("max_source_length", "max_target_length", "source_prefix")
"""Keys of transformers' scripts that choose the recipe for encoder-decoders."""


class Refused(ConfigError):
    """A config of something that no recipe trains. ``what`` names it."""

    def __init__(self, what: str, message: str):
        super().__init__(message)
        self.what = what


class Line(NamedTuple):
    """One key of the foreign config in the account: its path, its value, one of the kinds, flags here, and why."""

    key: str
    value: Any
    kind: str
    flags: dict[str, Any]
    say: str


@dataclass
class Imported:
    """The recipe, its settings and the account that a foreign config becomes.

    Attributes:
        trainer: whose config it is, in words.
        recipe: the stem of the recipe's file.
        values: the recipe's YAML.
        lines: the account: a line for each key.
        strategy: the strategy file of the launch.
        default_lines: a line for each default of the trainer that differs from the recipe's, and is written out.
        foreign: the config, with further files to write.
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


def recognise(config: dict[str, Any], name: str) -> str:
    """Return the value of ``--from`` for a config: the trainer of which it has the most characteristic keys.

    Raises:
        ConfigError: it has none of any trainer.
    """
    scores = {}
    for trainer, table in TRAINERS.items():
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
        config: its content.
        file: where it is, for paths that are relative to it.
        trainer: a key of `TRAINERS`.
        recipe: stem of the recipe's file, if it is known already.

    Raises:
        Refused: no recipe trains what it trains.
    """
    foreign = Foreign(config, file, load_table(TRAINERS[trainer]))
    _refuse(foreign)
    lines: list[Line] = []
    for key, value in foreign.config.items():
        lines += _lines(foreign, key, value, None)
    default_lines = []
    for key, value in foreign.table.defaults.items():
        entry = foreign.table.entries.get(key)
        # Losses are read, and spikes noticed, at log points alone. Their number changes nothing in the training.
        if entry is not None and value is not None and foreign.config.get(key) is None and key != "logging_steps":
            default_lines.append(_translate(foreign, key, value, entry)._replace(kind=DEFAULT))
    if not recipe:
        # Some trainers train adapters by default.
        keys = {key for line in lines + default_lines for key, value in line.flags.items() if value is not None}
        recipe = "causal_lm"
        if keys & set(ADAPTER_KEYS):
            recipe = "lora_finetune"
        elif foreign.config.keys() & set(SEQ2SEQ_KEYS):
            recipe = "seq2seq_chatbot"
    config_class = recipe_class(str(shipped(f"recipes/{recipe}.py"))).config_class
    lines = [_check(line, config_class) for line in lines]
    values: dict[str, Any] = {}
    for line in lines:
        values |= line.flags
    # What the trainer does where the config says nothing is written out, if the recipe would do something else.
    default_values = vars(config_class(**values))
    written_lines = []
    for line in default_lines:
        checked = _check(line, config_class)
        new_flags = {key: value for key, value in checked.flags.items() if key not in values and value != default_values[key]}
        if new_flags:
            values |= new_flags
            written_lines.append(checked._replace(flags=new_flags))
    strategy = strategies.choose(foreign)
    return Imported(foreign.table.trainer, recipe, values, lines, written_lines, foreign, strategy)


def _refuse(foreign: Foreign) -> None:
    """Raise `Refused` for a key, or a value, that says that the config trains something else."""
    for key, what in foreign.table.refused.items():
        name, has_value, refused_value = key.partition("=")
        value = foreign.config.get(name)
        is_refused = str(value).lower() == refused_value if has_value else not foreign.is_default(name, value)
        if is_refused:
            raise Refused(
                what,
                f"{foreign.file}: {name} is {value!r:.60}, so this is a config for {what}. The recipes finetune language "
                "models on text. Nothing was written.",
            )


def _lines(foreign: Foreign, path: str, value: Any, around: Line | None) -> Iterator[Line]:
    """Yield the lines of a key and of all keys in it. ``around`` is the line of the key that it is in, if a table has that."""
    pattern = re.sub(r"\[\d+\]", "[]", path)
    # A mapping may also be a list of such mappings.
    entry = foreign.table.entries.get(pattern) or foreign.table.entries.get(pattern.replace("[].", "."))
    line = Line(path, value, UNKNOWN, {}, "")
    # A key that would have refused the config is off.
    if value is None or path in foreign.table.refused:
        line = line._replace(kind=DEFAULT, say="It is not set.")
    elif entry is not None:
        line = _translate(foreign, path, value, entry)
    # What a data set's key means is not known from the keys around it.
    elif around is not None and (isinstance(value, dict) or around.flags.keys().isdisjoint({"dataset_name", "datasets"})):
        line = around._replace(key=path, value=value, flags={})
    children: dict[str, Any] = {}
    if isinstance(value, dict):
        children = {f"{path}.{key}": child for key, child in value.items()}
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        children = {f"{path}[{index}]": child for index, child in enumerate(value)}
    # The keys inside say the rest, unless all of them together have no counterpart.
    is_refused = line.kind == NOT_POSSIBLE and entry is not None and bool(entry.by)
    if not children or line.flags or is_refused:
        yield line
    for child_path, child in children.items():
        yield from _lines(foreign, child_path, child, line if entry is not None else around)


def _translate(foreign: Foreign, path: str, value: Any, entry: Entry) -> Line:
    """Return the line of a key that a table has."""
    if entry.kind == NO_EFFECT:
        return Line(path, value, NO_EFFECT, {}, entry.say)
    if entry.kind == NOT_POSSIBLE:
        kind = DEFAULT if foreign.is_default(path, value) else NOT_POSSIBLE
        return Line(path, value, kind, {}, entry.say)
    foreign.entry = entry
    foreign.sentence = entry.say
    try:
        flags = _flags(foreign, value, entry)
    except NoCounterpart as error:
        return Line(path, value, NOT_POSSIBLE, {}, str(error))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, OSError):
        # A value may be anything that YAML can say.
        return Line(
            path, value, NOT_POSSIBLE, {}, "The value is none that is known for this key. Correct it, or remove the key."
        )
    return Line(path, value, entry.kind, flags, foreign.sentence)


def _flags(foreign: Foreign, value: Any, entry: Entry) -> dict[str, Any]:
    """Return what a value is here, by its table's entry. Raises `NoCounterpart`, and errors of many kinds for odd values."""
    if isinstance(value, str | int | float) and value in entry.values:
        return entry.values[value]
    if entry.otherwise:
        raise NoCounterpart(entry.otherwise)
    if entry.by:
        return _FUNCTIONS[entry.by](foreign, value)
    if entry.to:
        return {entry.to: value}
    return {}


def _check(line: Line, config_class: type[RecipeConfig]) -> Line:
    """Return the line with flags that the recipe takes. A value that it refuses has no counterpart."""
    flags = {}
    for key, value in line.flags.items():
        name = config_class.length_key if key == LENGTH else key
        if value is None:
            continue
        if name not in config_class.model_fields:
            if name in AdapterConfig.model_fields or name.startswith("load_in"):
                return line._replace(kind=NO_EFFECT, flags={}, say="No adapter is trained, so that it says nothing.")
            return line._replace(kind=NOT_POSSIBLE, flags={}, say=f"The recipe has no {name}.")
        try:
            flags[name] = config_class(**{name: value}).model_dump(include={name}, exclude_unset=True)[name]
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            return line._replace(kind=NOT_POSSIBLE, flags={}, say=f"{name} here: {reason}.")
    return line._replace(flags=flags)
