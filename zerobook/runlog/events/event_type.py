"""The declaration of a type of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
"""A line of ``events.jsonl``."""
# A function that describes an event in words.
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
    """returns the step at which the event is drawn; None if it is not drawn"""


@dataclass(kw_only=True)
class EventType:
    """A type of event. `declare` describes the attributes."""

    when: str
    fields: dict[str, str]
    sentence: Words | None
    style: str | Words
    mark: Mark | None
    is_quiet: bool | Callable[[Event], bool]
    ending: str | Words


def declare(
    name: str,
    *,
    when: str,
    fields: dict[str, str],
    style: str | Words = "",
    mark: Mark | None = None,
    is_quiet: bool | Callable[[Event], bool] = False,
    ending: str | Words = "",
) -> Callable[[Words], Words]:
    """Declare a type of event, as a decorator of the function that describes such an event in words.

    Without such a function, readers of the log see the event's type and fields.

    Args:
        when: a sentence on when the event is written, for docs/reference/runlog.md.
        fields: name -> meaning of the fields of this type alone. A field without a value is left out of the event, or null.
        style: CSS class of the event's entry on the report page: ``bad``, ``warn``, ``good``, or empty.
        mark: how the event is drawn on the loss curve; None if it is not drawn.
        is_quiet: leave the event out of the list of events on the page and in the terminal.
        ending: only for events that end an attempt: the status of the run after such an event, such as "finished".

    Returns:
        The decorator. Its function may return text from data or users: `sentence` makes it safe for a terminal, not for HTML.
    """
    event_type = EventType(when=when, fields=fields, sentence=None, style=style, mark=mark, is_quiet=is_quiet, ending=ending)
    EVENT_TYPES[name] = event_type

    def add_sentence(sentence: Words) -> Words:
        event_type.sentence = sentence
        return sentence

    return add_sentence
