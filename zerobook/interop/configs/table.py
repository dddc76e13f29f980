"""The tables of other trainers' keys: ``tables/*.yaml``, data that says for each key what it is here.

A table has the sections of `KINDS`, which say what becomes of a key, and:

``trainer``         the trainer's name in sentences
``extends``         the table whose keys and defaults this trainer takes over
``recognised by``   sets of keys; a config that has all of one set is this trainer's
``refused``         key -> what a config with that key trains; such a config is not imported. ``KEY=VALUE`` refuses one value
``notes``           sentences about every config
``defaults``        key -> the trainer's default, if it is none of null, false, 0 and empty

An entry of ``same`` is the name of the flag here. An entry of ``translated`` is a mapping, with ``say``, a sentence about the
meaning, and further:

``to``              the flag that takes the value
``values``          value -> the flag's value here, or flag -> value
``otherwise``       what to do if ``values`` lacks the value, which then has no counterpart
``by``              a function of `zerobook.interop.configs.translations`, `data` or `strategies` for all other values

With none of these four, the entry of the key around this one does the translation. The entries of the other two sections are
sentences. A key inside of others is written ``outer.inner``, and in a list of mappings ``outer[].inner``.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from zerobook.utils.reading import read_text
from zerobook.utils.yaml_text import load_yaml

SAME = "same"
TRANSLATED = "translated"
DEFAULT = "default"
NO_EFFECT = "no effect"
NOT_POSSIBLE = "not possible"
UNKNOWN = "unknown"
# Sections of a table. `DEFAULT` and `UNKNOWN` follow from a config.
KINDS = (SAME, TRANSLATED, NO_EFFECT, NOT_POSSIBLE)
# Value of ``--from`` -> table.
TRAINERS = {
    "axolotl": "axolotl",
    "llamafactory": "llamafactory",
    "trl": "trl",
    "alignment-handbook": "trl",
    "ms-swift": "ms_swift",
    "torchtune": "torchtune",
    "trainer": "examples",
}


@dataclass(frozen=True)
class Entry:
    """The translation of a key. The attributes are those of the module's docstring."""

    kind: str
    say: str = ""
    to: str = ""
    values: dict[Any, dict[str, Any]] = field(default_factory=dict)
    otherwise: str = ""
    by: str = ""


@dataclass(frozen=True)
class Table:
    """The keys of a trainer, with those that it takes over from another one."""

    trainer: str
    entries: dict[str, Entry]
    defaults: dict[str, Any]
    refused: dict[str, str]
    recognised_by: list[list[str]]
    notes: list[str]


@cache
def load_table(name: str) -> Table:
    """Return the table in ``tables/NAME.yaml``."""
    content = load_yaml(read_text(Path(__file__).with_name("tables") / f"{name}.yaml"))
    entries: dict[str, Entry] = {}
    defaults: dict[str, Any] = {}
    refused: dict[str, str] = {}
    notes: list[str] = []
    if "extends" in content:
        base = load_table(content["extends"])
        entries |= base.entries
        defaults |= base.defaults
        refused |= base.refused
        notes += base.notes
    for kind in KINDS:
        for key, value in (content.get(kind) or {}).items():
            entries[key] = _make_entry(kind, value)
    defaults |= content.get("defaults") or {}
    refused |= content.get("refused") or {}
    notes += content.get("notes") or []
    return Table(content["trainer"], entries, defaults, refused, content.get("recognised by") or [], notes)


# Return the entry that a section ``kind`` of the YAML file has for a key.
def _make_entry(kind: str, value: Any) -> Entry:
    if kind == SAME:
        return Entry(kind, to=value)
    if kind != TRANSLATED:
        return Entry(kind, value)
    values = {}
    for foreign_value, counterpart in value.get("values", {}).items():
        values[foreign_value] = counterpart
        # A value that is no mapping of flags is that of the flag ``to``.
        if not isinstance(counterpart, dict):
            values[foreign_value] = {value["to"]: counterpart}
    return Entry(kind, **value | {"values": values})
