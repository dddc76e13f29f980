"""A config of another trainer while it is imported."""

import re
from pathlib import Path
from typing import Any

from zerobook.interop.configs.table import Entry, Table
from zerobook.utils.yaml_text import load_bounded


class NoCounterpart(Exception):
    """A value that nothing here does. The message says what to do."""


class Foreign:
    """The config, and what its import gathers besides the recipe's values.

    Attributes:
        config: its content, with numbers in place of texts such as ``1e-4``, and what the table translates without quotes.
        file: where it is.
        table: its trainer's.
        entry: the table's, of the key that is being translated.
        sentence: about that key; a function may say something else.
        files: files to write beside the recipe's YAML: name -> content.
        processes: of the launch.
        strategy: what the config says about the launch: ``name`` of a strategy file, or ``deepspeed``, a JSON's content.
    """

    def __init__(self, config: dict[str, Any], file: Path, table: Table):
        self.config: dict[str, Any] = {}
        for key, value in config.items():
            self.config[str(key)] = _as_number(value, config)
            entry = table.entries.get(str(key))
            # YAML keeps an integer or a boolean in quotes as text, and the other trainers read it by the type of the key.
            if entry is not None and (entry.by or entry.values) and re.fullmatch(r"-?\d{1,9}|[Tt]rue|[Ff]alse", str(value)):
                self.config[str(key)] = load_bounded(str(value))
        self.file = file
        self.table = table
        self.entry = Entry("")
        self.sentence = ""
        self.files: dict[str, str] = {}
        self.processes = 1
        self.strategy: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; the trainer's default if it is not set or null."""
        value = self.config.get(key)
        if value is None:
            value = self.table.defaults.get(key, default)
        return value

    def is_default(self, key: str, value: Any) -> bool:
        """Return whether a value is the trainer's default, so that it changes nothing."""
        if key in self.table.defaults:
            return value in (None, self.table.defaults[key])
        return not value or value in ("none", "no")

    def locate(self, name: str) -> Path | None:
        """Return a file that the config names: in the working folder, beside the config, or in a folder above it.

        Other trainers are started in the root of their clone, and name files from there.
        """
        if not name or "\0" in name:
            return None
        for folder in (Path.cwd(), *self.file.absolute().parents):
            path = folder / Path(name).expanduser()
            try:
                if path.exists():
                    return path
            except OSError:
                # The text cannot be the name of a file: it may be too long.
                return None
        return None


def _as_number(value: Any, config: dict[str, Any]) -> Any:
    """Return the value with numbers for texts such as ``1e-4``, which YAML does not take for numbers and other trainers do.

    ``${key}``, as torchtune writes it, is the value of another key.
    """
    if isinstance(value, dict):
        return {key: _as_number(inner, config) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_number(inner, config) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}", value):
        return float(value)
    reference = re.fullmatch(r"\$\{(\w+)\}", value) if isinstance(value, str) else None
    return config.get(reference[1]) if reference else value
