"""Attributes that have another value during a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context in which ``owner`` has ``value`` as its attribute ``name``."""
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        # An attribute of the class shows again when the attribute of the object is deleted.
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
