"""The types of events of a runlog. A new one is declared in one of the modules here; nothing else names it."""

from __future__ import annotations

from zerobook.runlog.events.attempts import ATTEMPT_EVENTS
from zerobook.runlog.events.checkpoints import CHECKPOINT_EVENTS
from zerobook.runlog.events.event_type import Event, EventType
from zerobook.runlog.events.recovery import RECOVERY_EVENTS
from zerobook.runlog.events.training import TRAINING_EVENTS
from zerobook.utils.terminal import plain

__all__ = ["COMMON_FIELDS", "ENDING_EVENTS", "EVENT_TYPES", "STEP_FIELDS", "Event", "EventType", "is_quiet", "mood", "sentence"]

EVENT_TYPES: dict[str, EventType] = ATTEMPT_EVENTS | TRAINING_EVENTS | RECOVERY_EVENTS | CHECKPOINT_EVENTS
"""Name of a type -> its declaration."""

ENDING_EVENTS = tuple(name for name, event_type in EVENT_TYPES.items() if event_type.ends_attempt)
"""Names of the types that end an attempt. An attempt without one of them was killed."""

COMMON_FIELDS = {
    "seq": "number of the event, from 0, without gaps over the whole file",
    "attempt": "number of the process start, from 1",
    "branch": "number of the branch, from 0; a new one begins whenever steps are done again",
    "type": "type of the event",
    "utc": "time of day, UTC, ISO 8601 with milliseconds",
    "monotonic": "seconds of a clock that only runs forward; comparable within an attempt",
    "parent": "seq of the event that caused this one; left out where nothing did",
    "crc": "CRC-32 of the bytes of the line before this field",
}
"""Fields of every event."""

STEP_FIELDS = {name: COMMON_FIELDS[name] for name in ("attempt", "branch", "crc")}
"""Fields of a line of ``steps.jsonl`` besides those of `zerobook.runlog.records.StepRecord`."""


def sentence(event: Event) -> str:
    """Return one event in words, on one line and without control characters. HTML has to escape it."""
    event_type = EVENT_TYPES.get(event["type"])
    if event_type is None or event_type.sentence is None:
        own_fields = {name: value for name, value in event.items() if name not in COMMON_FIELDS}
        words = f"{event['type']}: " + ", ".join(f"{name} {value}" for name, value in own_fields.items())
    else:
        words = event_type.sentence(event)
    return plain(words, lines=False)


def mood(event: Event) -> str:
    """Return the style of the event's entry on the page; an empty string for none."""
    event_type = EVENT_TYPES.get(event["type"])
    if event_type is None:
        return ""
    return event_type.mood(event) if callable(event_type.mood) else event_type.mood


def is_quiet(event: Event) -> bool:
    """Return whether lists of events leave the event out."""
    event_type = EVENT_TYPES.get(event["type"])
    return event_type is not None and event_type.is_quiet
