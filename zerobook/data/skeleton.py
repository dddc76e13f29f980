"""Skeletons of chats: the text that a chat template writes around the contents, computed once for all chats of the same roles.

The general way to find the turns of a chat is to render it up to each of them. In most templates, the text around the contents
depends on the roles only. Then the chat is the skeleton with the contents inserted, and rendering it once is enough.
"""

from __future__ import annotations

from typing import NamedTuple


class TurnSpan(NamedTuple):
    """Range of characters of an assistant's turn. ``has_end``: the last of them are its end-of-turn token."""

    start: int
    stop: int
    has_end: bool


class TurnSlot(NamedTuple):
    """A turn of a skeleton: the text before its content and, for an assistant's turn, its span.

    ``trims``: the template trims the content. ``span``: relative to the content, ``start`` to its first character and
    ``stop`` to its end.
    """

    lead: str
    trims: bool
    span: TurnSpan | None


class Skeleton(NamedTuple):
    """The turns of a chat, and the text after the last."""

    slots: list[TurnSlot]
    tail: str

    def find_turns(self, messages: list[dict[str, str]], text: str) -> list[TurnSpan] | None:
        """Return the assistant's turns in a rendered chat; None if it is not exactly the skeleton with the contents."""
        pieces: list[str] = []
        spans: list[TurnSpan] = []
        position = 0
        for slot, message in zip(self.slots, messages, strict=True):
            content = message["content"].strip() if slot.trims else message["content"]
            pieces += (slot.lead, content)
            start = position + len(slot.lead)
            position = start + len(content)
            # The span is relative to the content: its start to the beginning, its stop to the end.
            if slot.span:
                spans.append(TurnSpan(start + slot.span.start, position + slot.span.stop, slot.span.has_end))
        # The comparison finds templates that change a content, or that depend on more than the roles.
        pieces.append(self.tail)
        return spans if "".join(pieces) == text else None
