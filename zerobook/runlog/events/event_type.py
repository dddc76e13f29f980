"""The declaration of a type of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
"""A line of ``events.jsonl``."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How an event is drawn on the loss curve of the page."""

    colour: str
    """name of a colour in the page's palette, or any colour of CSS"""
    symbol: str
    """one character, which is drawn"""
    step: Callable[[Event], int | None]
    """returns the step at which the event is drawn; None where it is not drawn"""
    height: Callable[[Event], float | None] | None = None
    """returns the loss at which the event is drawn; the loss of the step where there is no such function or it returns None"""


@dataclass(frozen=True, kw_only=True)
class EventType:
    """Everything that is known about a type of event."""

    when: str
    """when the event is written, as a sentence of the reference"""
    fields: dict[str, str]
    """name -> meaning of the event's own fields. A field without a value is left out of the event, or null"""
    sentence: Callable[[Event], str] | None = None
    """returns the event in words, which may hold text from data or people; None: its type and fields are listed"""
    mood: str | Callable[[Event], str] = ""
    """style of the entry on the page: bad, warn, good, note or none"""
    mark: Mark | None = None
    is_quiet: bool = False
    """the lists of events on the page and in the terminal leave it out"""
    ends_attempt: bool = False
    """it is the last event of an attempt that ended by itself"""
