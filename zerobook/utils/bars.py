"""Progress bars, and lines printed beside them."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm as _tqdm

from zerobook.utils.terminal import plain


class tqdm(_tqdm):
    """tqdm whose description and lines are `plain`: names of datasets and paths come from files."""

    def __init__(self, *args: Any, desc: str | None = None, **options: Any):
        super().__init__(*args, desc=desc and plain(desc, lines=False), **options)

    @classmethod
    def write(cls, s: str, *args: Any, **options: Any) -> None:
        super().write(plain(s), *args, **options)
