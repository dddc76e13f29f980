"""Progress bars, and lines that are printed while a bar is shown."""

import sys
from typing import Any

from tqdm import tqdm as _tqdm

from zerobook.utils.terminal import plain

# Seconds between the lines that are written instead of a bar if the output is a file.
LINE_EVERY_S = 60


class tqdm(_tqdm):
    """Progress bar of tqdm without control characters in its text: names of datasets and paths come from files.

    A bar overwrites its own line, which is not possible in a file or a pipe. There, a new line is written every `LINE_EVERY_S`
    seconds instead. If the work takes less time, no line is written.
    """

    def __init__(self, *args: Any, desc: str = "", **options: Any):
        self.is_on_terminal = (options.get("file") or sys.stderr).isatty()
        # Write a line every minute, the first one after a minute.
        if not self.is_on_terminal:
            options |= {"mininterval": LINE_EVERY_S, "maxinterval": LINE_EVERY_S, "delay": LINE_EVERY_S}
        super().__init__(*args, desc=plain(desc, lines=False), **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.is_on_terminal:
            return super().display(msg, pos)
        # tqdm calls this method with None to draw the bar, and with an empty message to erase it, which a file cannot.
        if msg != "":
            self.fp.write(f"{self}\n" if msg is None else f"{msg}\n")
            self.fp.flush()
        return True

    @classmethod
    def write(cls, s: str, *args: Any, **options: Any) -> None:
        super().write(plain(s), *args, **options)
