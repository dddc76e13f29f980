"""Planned changes that a run announces, since they may raise the loss or its noise without damage to the weights."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from zerobook.monitor.excursion import MAX_EXCURSION_POINTS

# Number of steps after the announced step in which the effect of an event may begin.
WINDOW = 32
# The same for the first step of an epoch. A run has many epochs, and a long window in each would hide damage by data.
EPOCH_WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class ExpectedEvent:
    """An event whose effect on the loss begins at one of the steps from ``first`` to ``last``. ``what`` names it in words."""

    first: int
    last: int
    what: str


class ExpectedEvents:
    """The announced events of a run. All ranks must announce the same events, since each rank decides from them by itself.

    Args:
        state: what `state` returned; empty for a new run.
    """

    def __init__(self, state: Iterable[dict[str, Any]] = ()):
        self._events = [ExpectedEvent(**event) for event in state]

    def state(self, step: int) -> list[dict[str, Any]]:
        """Return the events that may explain an excursion that goes on at ``step`` or begins after it, JSON-ready."""
        return [asdict(event) for event in self._events if event.last + MAX_EXCURSION_POINTS >= step]

    def add(self, step: int, what: str, *, window: int = WINDOW) -> None:
        """Announce ``what``, such as "the mixture changes", from ``step`` on."""
        event = ExpectedEvent(first=step, last=step + window, what=what)
        # A step that is repeated after a rollback announces its event a second time.
        if event not in self._events:
            self._events.append(event)

    def at(self, onset: int) -> ExpectedEvent | None:
        """Return the newest event that explains a change that began at ``onset``; None if there is none."""
        # The onset may be a few steps after the event, if the loss rises slowly, but never before it.
        return next((event for event in reversed(self._events) if event.first <= onset <= event.last), None)

    def during(self, first: int, last: int) -> ExpectedEvent | None:
        """Return the newest event that explains a slow rise of the loss between two steps; None if there is none."""
        # The beginning of an epoch does not raise the loss slowly, so these events are left out. Their windows are short.
        lasting = [event for event in self._events if event.last - event.first > EPOCH_WINDOW]
        return next((event for event in reversed(lasting) if event.first <= last and first <= event.last), None)
