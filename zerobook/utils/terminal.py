"""Print text. Text that came from files (reasons of crashes, notes, samples, paths) must not control the terminal."""

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

_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
"""Escape sequences: CSI, strings such as a window's title, and short ones."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 without tab and newline, C1, line separators, all that changes a text's direction, and half surrogate pairs."""


_USER_OF_ADDRESS = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")


def plain(text: str, *, lines: bool = True) -> str:
    r"""Return ``text`` without escape sequences and control characters.

    Args:
        lines: keep newlines and tabs. Otherwise white space becomes single spaces, so that the text stays on its line.

    >>> plain("\x1b[31mred\x1b]0;title\x07\r\nnext\u202e"), plain("one\n[12] two", lines=False)
    ('red\nnext', 'one [12] two')
    """
    # Sequences first: a control character begins them.
    text = _CONTROLS.sub("", _SEQUENCES.sub("", text))
    return text if lines else " ".join(text.split())


def without_passwords(text: str) -> str:
    """Return ``text`` without the users and passwords in its addresses, such as a mirror's or a tracker's.

    >>> without_passwords("no answer from https://me:secret@mirror.example/models")
    'no answer from https://***@mirror.example/models'
    """
    return _USER_OF_ADDRESS.sub("***", text)


def visible(text: str, besides: str = "") -> str:
    r"""Return ``text`` with each control character, and each of ``besides``, written as its escape: nothing is left out.

    >>> visible("a\x1b[2J\u202e \xab\n", "\xab")
    'a\\x1b[2J\\u202e \\xab\n'
    """
    escape = _CONTROLS
    # An empty class of characters is not a regular expression.
    if besides:
        escape = re.compile(f"{_CONTROLS.pattern}|[{re.escape(besides)}]")
    return escape.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str, file: TextIO | None = None) -> None:
    """Print ``text`` as `plain` and `without_passwords` return it, and a line end."""
    print(plain(without_passwords(text)), file=file, flush=True)


def say_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as `plain` returns it, for ``sys.excepthook``: an error's message may quote a file."""
    say("".join(traceback.format_exception(kind, error, trace)), file=sys.stderr)


def keep_logs_plain(name: str) -> None:
    """Let the handlers of a library's logger print as `plain` returns it: messages may quote models' files."""
    for handler in logging.getLogger(name).handlers:
        if not isinstance(handler.formatter, _PlainFormatter):
            handler.setFormatter(_PlainFormatter(handler.formatter or logging.Formatter()))


class _PlainFormatter(logging.Formatter):
    def __init__(self, inner: logging.Formatter):
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return plain(self.inner.format(record))


def console(width: int = 140, *, markup: bool = False) -> Console:
    """Return a rich console that prints strings as `plain` returns them. It reads no emoji names and no markup in them.

    Args:
        width: columns if the output is not a terminal.
        markup: read strings as rich markup. The caller then escapes all text that is not the code's own.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(plain(text), **options)

    # Without a width, rich asks the terminal.
    columns = None if sys.stdout.isatty() else width
    return Plain(width=columns, markup=markup, emoji=False, highlight=False)


def make_table(title: str | None, columns: Sequence[str], *, numbers: Collection[str] = (), **options: Any) -> Table:
    """Return a rich table without rows. Long cells are wrapped, not cut.

    Args:
        numbers: names of the columns that are aligned at the right.
        options: of `rich.table.Table`.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table
