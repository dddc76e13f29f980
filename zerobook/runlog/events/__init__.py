"""The types of events of a runlog. To add a type, declare it in one of the modules here. No list has to be extended."""

from __future__ import annotations

from typing import Any

from zerobook.runlog.events import attempts, checkpoints, recovery, training
from zerobook.runlog.events.event_type import EVENT_TYPES, Event, EventType, Mark, declare
from zerobook.utils.terminal import plain

__all__ = [
    "COMMON_FIELDS",
    "EVENT_TYPES",
    "Event",
    "EventType",
    "Mark",
    "declare",
    "ending_in_words",
    "ending_types",
    "is_quiet",
    "sentence",
    "style",
]

# Importing these modules declares their events.
MODULES = (attempts, training, recovery, checkpoints)

# Fields of every event.
COMMON_FIELDS = {
    "seq": "number of the event, from 0, without gaps over the whole file",
    "attempt": "number of the process start, from 1",
    "branch": "number of the branch, from 0; a new one begins whenever steps are done again",
    "type": "type of the event",
    "utc": "time of day, UTC, ISO 8601 with milliseconds",
    "monotonic": "seconds of a clock that only runs forward; comparable within an attempt",
    "parent": "seq of the event that caused this one; left out if no event did",
    "crc": "CRC-32 of the bytes of the line before this field",
}


def sentence(event: Event) -> str:
    """Return one event in words, on one line and without control characters. The text is not escaped for HTML."""
    event_type = EVENT_TYPES.get(event["type"])
    # A log of another version may have types that are not known here.
    if event_type is None or event_type.sentence is None:
        fields = [f"{name} {value}" for name, value in event.items() if name not in COMMON_FIELDS]
        words = f"{event['type']}: {', '.join(fields)}"
    else:
        words = event_type.sentence(event)
    return plain(words, lines=False)


def style(event: Event) -> str:
    """Return the CSS class of the event's entry on the report page; an empty string if it has none."""
    return _read_setting(event, "style", "")


def is_quiet(event: Event) -> bool:
    """Return whether lists of events leave the event out."""
    return _read_setting(event, "is_quiet", False)


def ending_types() -> tuple[str, ...]:
    """Return the names of the types that end an attempt. An attempt without one of them was killed."""
    return tuple(name for name, event_type in EVENT_TYPES.items() if event_type.ending)


def ending_in_words(event: Event) -> str:
    """Return the status of a run after an event that ended it, such as ``Finished``; an empty string for other events."""
    return _read_setting(event, "ending", "")


def _read_setting(event: Event, name: str, default: Any) -> Any:
    """Return the attribute ``name`` of the event's type, or ``default`` if this version does not know the type.

    If the attribute is a function, it is called with the event.
    """
    event_type = EVENT_TYPES.get(event["type"])
    if event_type is None:
        return default
    setting = getattr(event_type, name)
    return setting(event) if callable(setting) else setting
