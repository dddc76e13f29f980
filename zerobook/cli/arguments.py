"""Types of flags that several commands take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return an integer of at least 1; argparse prints the error of another text."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
