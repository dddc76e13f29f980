"""The declaration of a type of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A line of ``events.jsonl``.
Event = dict[str, Any]
# A function that makes a text of an event: a sentence, the name of a CSS class, or the status of the run after the event.
MakeText = Callable[[Event], str]

# Name of a type -> its declaration. `declare` fills it.
EVENT_TYPES: dict[str, EventType] = {}


def _get_step(event: Event) -> int | None:
    return event.get("step")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How an event is drawn on the loss curve of the page."""

    colour: str
    """name of a colour in the page's palette, or any colour of CSS"""
    symbol: str
    """one character, which is drawn"""
    step: Callable[[Event], int | None] = _get_step
    """function that returns the step at which an event is drawn; None if it is not drawn"""


@dataclass(kw_only=True)
class EventType:
    """A type of event. The docstring of `declare` describes the attributes."""

    when: str
    fields: dict[str, str]
    sentence: MakeText | None
    style: str | MakeText
    mark: Mark | None
    is_quiet: bool | Callable[[Event], bool]
    ending: str | MakeText


def declare(
    name: str,
    *,
    when: str,
    fields: dict[str, str],
    style: str | MakeText = "",
    mark: Mark | None = None,
    is_quiet: bool | Callable[[Event], bool] = False,
    ending: str | MakeText = "",
) -> Callable[[MakeText], MakeText]:
    """Declare a type of event, and return a decorator for the function that describes such an event in a sentence.

    If nothing is decorated, lists show the event's type and fields instead of a sentence.

    Args:
        when: a sentence on when the event is written, for docs/reference/runlog.md.
        fields: name -> meaning of the fields of this type alone. A field without a value is left out of the event, or null.
        style: CSS class of the event's entry on the report page: ``bad``, ``warn``, ``good``, or empty.
        mark: how the event is drawn on the loss curve; None if it is not drawn.
        is_quiet: whether the lists of events on the page and in the terminal leave the event out.
        ending: status of the run after the event, such as "Finished"; empty if the event does not end an attempt.

    Returns:
        The decorator. The decorated function may put text of data or users into its sentence: the function `sentence` of this
        package makes the text safe for a terminal, but not for HTML.
    """
    # The type is declared now, so that a type without a sentence needs no decorated function.
    event_type = EventType(when=when, fields=fields, sentence=None, style=style, mark=mark, is_quiet=is_quiet, ending=ending)
    EVENT_TYPES[name] = event_type

    def add_sentence(sentence: MakeText) -> MakeText:
        event_type.sentence = sentence
        return sentence

    return add_sentence
