"""Print text on the terminal, without control characters: text from files (errors, notes, samples, paths) may hold some."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Escape sequences of terminals: CSI (colours, movements of the cursor), strings such as a window's title, and short ones.
_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# C0 without tab and newline, C1, line separators, characters that change the direction of text, and lone surrogates.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# What stands between :// and @ in a URL.
_USER_AND_PASSWORD = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")


def plain(text: str, *, lines: bool = True) -> str:
    r"""Return ``text`` without escape sequences and control characters.

    Args:
        lines: keep newlines and tabs. If False, white space becomes single spaces, so that the text has one line.

    >>> plain("\x1b[31mred\x1b]0;title\x07\r\nnext\u202e"), plain("one\n[12] two", lines=False)
    ('red\nnext', 'one [12] two')
    """
    # Sequences first, since the control character at their start tells them from other text.
    text = _CONTROL_CHARACTERS.sub("", _ESCAPE_SEQUENCES.sub("", text))
    return text if lines else " ".join(text.split())


def without_passwords(text: str) -> str:
    """Return ``text`` with ``***`` instead of the user and password of each URL, such as a mirror's or a tracker's.

    >>> without_passwords("no answer from https://me:secret@mirror.example/models")
    'no answer from https://***@mirror.example/models'
    """
    return _USER_AND_PASSWORD.sub("***", text)


def visible(text: str, besides: str = "") -> str:
    r"""Return ``text`` with its control characters written as escapes. Unlike `plain`, this removes nothing.

    Args:
        besides: other characters to write as escapes.

    >>> visible("a\x1b[2J\u202e \xab\n", "\xab")
    'a\\x1b[2J\\u202e \\xab\n'
    """
    characters = _CONTROL_CHARACTERS
    # An empty character class, [], is not a regular expression.
    if besides:
        characters = re.compile(f"{_CONTROL_CHARACTERS.pattern}|[{re.escape(besides)}]")
    return characters.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str, file: TextIO | None = None) -> None:
    """Print ``text`` and a line end, without control characters and without passwords in URLs."""
    print(plain(without_passwords(text)), file=file, flush=True)


def say_traceback(error_class: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback with `say`, since an error's message may quote a file. This function is for ``sys.excepthook``."""
    say("".join(traceback.format_exception(error_class, error, trace)), file=sys.stderr)


def keep_logs_plain(name: str) -> None:
    """Let the handlers of a library's logger remove control characters, since messages may quote a model's files."""
    for handler in logging.getLogger(name).handlers:
        if not isinstance(handler.formatter, _PlainFormatter):
            handler.setFormatter(_PlainFormatter(handler.formatter or logging.Formatter()))


# Formats a record as another formatter does, without control characters.
class _PlainFormatter(logging.Formatter):
    def __init__(self, inner: logging.Formatter):
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return plain(self.inner.format(record))


def console(width: int = 140, *, markup: bool = False) -> Console:
    """Return a rich console that prints strings as `plain` returns them, without colouring numbers or replacing emoji names.

    Args:
        width: columns if the output is not a terminal.
        markup: read strings as rich markup, such as ``[bold]``. The caller must then escape text from files.
    """
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(plain(text), **options)

    # With None, rich uses the width of the terminal.
    columns = None if sys.stdout.isatty() else width
    return PlainConsole(width=columns, markup=markup, emoji=False, highlight=False)


def make_table(title: str | None, columns: Sequence[str], *, numbers: Collection[str] = (), **options: Any) -> Table:
    """Return a rich table without rows. Long cells are wrapped, not cut.

    Args:
        numbers: names of the columns that are aligned at the right.
        options: other arguments of `rich.table.Table`.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table
