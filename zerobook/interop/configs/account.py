"""The account of an import, as text: a report on what became of each key, grouped by kind."""

import re
import textwrap
from typing import Any

from zerobook.interop.configs.importer import Imported, Line
from zerobook.interop.configs.table import DEFAULT, NO_EFFECT, NOT_POSSIBLE, SAME, TRANSLATED, UNKNOWN
from zerobook.utils.units import counted

HEADINGS = {
    SAME: "the same",
    TRANSLATED: "translated",
    DEFAULT: "changes nothing: not set, or the trainer's own default",
    NO_EFFECT: "no effect here",
    NOT_POSSIBLE: "NOT POSSIBLE",
    UNKNOWN: "UNKNOWN: no table has this key, so it was left out. Remove it, or see whether it changes the training",
}
_WIDTH = 120
# Maximum number of characters of a value; a longer one is cut.
_LONGEST = 60


def format_account(imported: Imported) -> str:
    """Return the account: the keys of the config, grouped by what became of them, and notes on the trainer."""
    texts = []
    for kind, heading in HEADINGS.items():
        lines = [line for line in imported.lines if line.kind == kind]
        if lines:
            texts.append(f"{heading} ({len(lines)})")
            texts += _format_lines(lines)
    if imported.default_lines:
        texts.append(f"defaults of {imported.trainer} that are written out ({len(imported.default_lines)})")
        texts += _format_lines(imported.default_lines)
    texts.append("in any case")
    for note in imported.foreign.table.notes:
        texts.append(textwrap.fill(note, _WIDTH, initial_indent="  ", subsequent_indent="  "))
    return "\n".join(texts) + "\n"


def _format_lines(lines: list[Line]) -> list[str]:
    """Return the lines as text. Keys with the same sentence stand together, and the sentence follows the last of them."""
    # Sentence -> key without the indices of lists -> the lines of that key.
    groups: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        # A key that several entries of a list have is printed once, with the number of the others.
        pattern = re.sub(r"\[\d+\]", "[]", line.key)
        groups.setdefault(line.say, {}).setdefault(pattern, []).append(line)
    texts = []
    for sentence, patterns in groups.items():
        for pattern, group in patterns.items():
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            texts.append(f"  {_format_key(group[0]._replace(key=pattern))}{more}")
        if sentence:
            texts.append(textwrap.fill(sentence, _WIDTH, initial_indent="      ", subsequent_indent="      "))
    return texts


# Return ``KEY: VALUE  ->  FLAG: VALUE, FLAG: VALUE``.
def _format_key(line: Line) -> str:
    # Hide passwords, since a user may show the account to others.
    is_secret = re.search(r"(hub|auth|swanlab|wandb)_?(token|api_key)$|^token$", line.key) and line.value
    text = f"{line.key}: {'***' if is_secret else _format_value(line.value)}"
    separator = "  ->  "
    for flag, value in line.flags.items():
        # A flag with the same name and value is not repeated.
        if flag != line.key or value != line.value:
            text += f"{separator}{flag}: {_format_value(value)}"
            separator = ", "
    return text


def _format_value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return counted(len(value), "data set")
    text = " ".join(str(value).split())
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
