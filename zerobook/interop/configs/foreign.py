"""A config of another trainer while it is imported."""

import re
from pathlib import Path
from typing import Any

from zerobook.interop.configs.table import Entry, Table
from zerobook.utils.yaml_text import load_bounded


class NoCounterpart(Exception):
    """A value for which Zerobook has no counterpart. The message says what to do."""


class Foreign:
    """The config of another trainer, and what its import collects besides the recipe's values.

    Attributes:
        config: the content, in which texts that the trainer reads as numbers or booleans, such as ``1e-4``, are such.
        file: the path of the config.
        table: the table of its trainer.
        entry: the table's entry of the key that is being translated.
        sentence: what the account says about that key. The entry's sentence, unless a function sets another one.
        files: files to write beside the recipe's YAML: name -> content.
        processes: number of processes of the launch.
        strategy: what the config says about the strategy: the ``name`` of a strategy file, or ``deepspeed``, the content of a
            DeepSpeed JSON. Empty if it says nothing.
    """

    def __init__(self, config: dict[str, Any], file: Path, table: Table):
        self.config: dict[str, Any] = {}
        for key, value in config.items():
            self.config[str(key)] = _convert(value, config)
            entry = table.entries.get(str(key))
            # YAML reads an integer or a boolean in quotes as text. The other trainers convert it to the type of the key.
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
        # The table lacks defaults that turn something off.
        return not value or value in ("none", "no")

    def locate(self, name: str) -> Path | None:
        """Return the path of a file or folder that the config names; None if it does not exist.

        It may be in the working folder, beside the config, or in a folder above the config: other trainers are started in the
        root of their clone, and name files from there.
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


def _convert(value: Any, config: dict[str, Any]) -> Any:
    """Return the value with numbers for texts such as ``1e-4``, which other trainers read as numbers and YAML does not.

    torchtune's ``${key}`` is replaced by the value of that key in ``config``. Mappings and lists are converted recursively.
    """
    if isinstance(value, dict):
        return {key: _convert(inner, config) for key, inner in value.items()}
    if isinstance(value, list):
        return [_convert(inner, config) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}", value):
        return float(value)
    reference = re.fullmatch(r"\$\{(\w+)\}", value) if isinstance(value, str) else None
    return config.get(reference[1]) if reference else value
