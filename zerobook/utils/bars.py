"""Progress bars, and lines printed beside them."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm as _tqdm

from zerobook.utils.terminal import plain

LINE_EVERY_S = 60
"""Seconds between the lines that stand for a bar in a log file."""


class tqdm(_tqdm):
    """tqdm whose description and lines are `plain`: names of datasets and paths come from files.

    A bar is made to be written over, which a file cannot do. Output that goes to a file or a pipe has a line every
    `LINE_EVERY_S` seconds in its place, and none where the work takes less.
    """

    def __init__(self, *args: Any, desc: str | None = None, **options: Any):
        self.is_on_terminal = (options.get("file") or sys.stderr).isatty()
        # One line a minute, and the first one after a minute.
        if not self.is_on_terminal:
            options |= {"mininterval": LINE_EVERY_S, "maxinterval": LINE_EVERY_S, "delay": LINE_EVERY_S}
        super().__init__(*args, desc=desc and plain(desc, lines=False), **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.is_on_terminal:
            return super().display(msg, pos)
        # tqdm erases a bar by an empty message.
        if msg != "":
            self.fp.write(f"{self}\n" if msg is None else f"{msg}\n")
            self.fp.flush()
        return True

    @classmethod
    def write(cls, s: str, *args: Any, **options: Any) -> None:
        super().write(plain(s), *args, **options)
