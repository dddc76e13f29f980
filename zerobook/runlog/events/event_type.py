"""The declaration of a type of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
"""A line of ``events.jsonl``."""
Words = Callable[[Event], str]

EVENT_TYPES: dict[str, EventType] = {}
"""Name of a type -> its declaration. `declare` fills it."""


def step_of(event: Event) -> int | None:
    return event.get("step")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How an event is drawn on the loss curve of the page."""

    colour: str
    """name of a colour in the page's palette, or any colour of CSS"""
    symbol: str
    """one character, which is drawn"""
    step: Callable[[Event], int | None] = step_of
    """returns the step at which the event is drawn; None where it is not drawn"""
    height: Callable[[Event], float | None] | None = None
    """returns the loss at which the event is drawn; the loss of the step where there is no such function or it returns None"""


@dataclass(kw_only=True)
class EventType:
    """Everything that is known about a type of event. `declare` describes the attributes."""

    when: str
    fields: dict[str, str]
    sentence: Words | None
    mood: str | Words
    mark: Mark | None
    is_quiet: bool | Callable[[Event], bool]
    ending: str | Words


def declare(
    name: str,
    *,
    when: str,
    fields: dict[str, str],
    mood: str | Words = "",
    mark: Mark | None = None,
    is_quiet: bool | Callable[[Event], bool] = False,
    ending: str | Words = "",
) -> Callable[[Words], Words]:
    """Declare a type of event.

    Args:
        when: when the event is written, as a sentence of the reference.
        fields: name -> meaning of the event's own fields. A field without a value is left out of the event, or null.
        mood: style of the entry on the page: bad, warn, good or none.
        is_quiet: leave the event out of the list of events on the page and in the terminal.
        ending: for the last event of an attempt that ended by itself, how a run that ended so is called.

    Returns:
        a decorator for the function that returns the event in words, which may hold text from data or people. Without that
        function, the event's type and fields are listed.
    """
    event_type = EventType(when=when, fields=fields, sentence=None, mood=mood, mark=mark, is_quiet=is_quiet, ending=ending)
    EVENT_TYPES[name] = event_type

    def add_sentence(sentence: Words) -> Words:
        event_type.sentence = sentence
        return sentence

    return add_sentence
