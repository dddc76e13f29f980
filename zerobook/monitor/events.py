"""Events that a run announces: changes that raise the loss or its noise, and damage nothing."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from zerobook.monitor.excursion import MAX_EXCURSION_POINTS

WINDOW = 32
"""Steps after an announced one in which its effect may begin."""
EPOCH_WINDOW = 4
"""The same after the first step of an epoch. A run has many epochs, and a long window after each would hide damage by data."""


@dataclass(frozen=True, kw_only=True)
class ExpectedEvent:
    """An event whose effect on the loss begins at one of the steps from ``first`` to ``last``."""

    first: int
    last: int
    what: str


class ExpectedEvents:
    """The announced events of a run. Announce the same on every rank, since all ranks decide from them.

    Args:
        state: what `state` returned; empty for a new run.
    """

    def __init__(self, state: Iterable[dict[str, Any]] = ()):
        self._events = [ExpectedEvent(**event) for event in state]

    def state(self, step: int) -> list[dict[str, Any]]:
        """Return the events that may explain an excursion that lasts at ``step`` or begins later, JSON-ready."""
        return [asdict(event) for event in self._events if event.last + MAX_EXCURSION_POINTS >= step]

    def add(self, step: int, what: str, *, window: int = WINDOW) -> None:
        """Announce ``what``, such as "the mixture changes", from ``step`` on."""
        event = ExpectedEvent(first=step, last=step + window, what=what)
        # Steps that are repeated after a rollback announce their events again.
        if event not in self._events:
            self._events.append(event)

    def at(self, onset: int) -> ExpectedEvent | None:
        """Return the newest event that explains a change that began at ``onset``; None if there is none."""
        # A loss that rises slowly is noticed as high a few steps late, and never early.
        return next((event for event in reversed(self._events) if event.first <= onset <= event.last), None)

    def during(self, first: int, last: int) -> ExpectedEvent | None:
        """Return the newest event that explains a slow rise of the loss between two steps; None if there is none."""
        # The beginning of an epoch does not raise the loss slowly.
        lasting = [event for event in self._events if event.last - event.first > EPOCH_WINDOW]
        return next((event for event in reversed(lasting) if event.first <= last and first <= event.last), None)
