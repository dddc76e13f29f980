"""The position of this process in its run: a phase, the step it belongs to, and since when.

The main thread calls `enter` at places that every rank passes in the same order, so the number of phases entered so far says
which of two ranks is behind. A heartbeat reads the position from another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LIMITS = {
    "start": 0.0, "prepare data": 0.0, "load": 0.0,
    "data": 2.0, "forward": 1.0, "backward": 1.0, "optimizer": 2.0, "reduce": 1.0,
    "evaluate": 12.0, "save": 12.0, "roll back": 12.0, "export": 12.0, "ended": 0.0, "failed": 0.0,
}  # fmt: skip
"""Phase -> how many times ``hang_timeout`` it may take; 0: without a limit. One process may tokenize or download for hours
while the others wait for it."""
OF_A_STEP = ("data", "forward", "backward", "optimizer", "reduce")
FIRST = 4.0
"""Factor for the first step of a process, which compiles kernels and allocates memory."""


class Position(NamedTuple):
    """``entered`` counts the phases so far. ``began`` is when the phase was entered and ``since`` when it last made progress,
    in seconds of `time.monotonic`. ``first``: in the first step."""

    phase: str
    step: int
    entered: int
    began: float
    since: float
    first: bool = False

    def limit(self, hang_timeout: float) -> float:
        """Return the seconds that the phase may take; infinity for no limit."""
        factor = LIMITS[self.phase] * (FIRST if self.first else 1.0)
        return factor * hang_timeout or float("inf")


class Window(NamedTuple):
    """Seconds that this process spent between two log points: in all, waiting for data, and in forward passes.

    A process enters ``backward`` after its own work and may wait there for the others, so these are its own seconds.
    """

    step: int
    steps: int
    total: float
    data: float
    forward: float

    def after(self, earlier: Window | None) -> Window:
        """Return the window of the steps of ``earlier`` and of this one."""
        if earlier is None:
            return self
        steps, *seconds = (a + b for a, b in zip(self[1:], earlier[1:], strict=True))
        return Window(self.step, int(steps), *seconds)


WORK = ("forward", "backward", "optimizer")
"""Phases in which a CPU process computes, or waits for the other processes."""


class Spent(NamedTuple):
    """Seconds of this process between two log points: by phase, and those in which its main thread did not run in `WORK`."""

    phases: dict[str, float]
    waited: float


_here = Position("start", 0, 0, time.monotonic(), time.monotonic())
_first_step: int | None = None
_spent: dict[str, float] = {}
_waited = 0.0
_ran = time.thread_time()
_window: Window | None = None
_logged = (0, time.monotonic())


_listeners: list[Callable[[str], None]] = []


def here() -> Position:
    """Return the position of this process."""
    return _here


def enter(phase: str, step: int | None = None) -> None:
    """Enter a phase. Every rank calls it at the same places, from the main thread.

    Args:
        step: optimizer step that the phase belongs to, counted from 1; None: the same step as before.
    """
    global _here, _first_step, _waited, _ran
    now, ran, before = time.monotonic(), time.thread_time(), _here
    took = now - before.began
    _spent[before.phase] = _spent.get(before.phase, 0.0) + took
    if before.phase in WORK:
        _waited += max(0.0, took - (ran - _ran))
    _ran = ran
    step = before.step if step is None else step
    if _first_step is None and phase == "data":
        _first_step = step
    _here = Position(phase, step, before.entered + 1, now, now, step == _first_step and phase in OF_A_STEP)
    if phase not in ("ended", "failed"):  # a device that has failed raises for every call
        for listener in _listeners:
            listener(phase)


def on_enter(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with the name of each phase that is entered, until `reset`; not for the end of a run."""
    _listeners.append(listener)


def log_point(step: int) -> Spent:
    """Close the window of the steps since the last log point, and return the seconds in it."""
    global _window, _logged, _waited
    now = time.monotonic()
    before, then = _logged
    _window = Window(step, max(1, step - before), now - then, _spent.get("data", 0.0), _spent.get("forward", 0.0))
    spent = Spent(_spent.copy(), _waited)
    _spent.clear()
    _logged, _waited = (step, now), 0.0
    return spent


def window() -> Window | None:
    """Return the newest closed window."""
    return _window


def touch() -> None:
    """Note that the current phase makes progress, for long phases that consist of many parts."""
    global _here
    _here = _here._replace(since=time.monotonic())


@contextmanager
def during(phase: str, step: int | None = None) -> Iterator[None]:
    """Return a context for a phase inside of another, which is entered again after it."""
    before = _here
    enter(phase, step)
    yield
    enter(before.phase, before.step)


def reset() -> None:
    """Return to the start, for another run in the same process."""
    global _here, _first_step, _window, _logged, _waited, _ran
    now, _waited, _ran = time.monotonic(), 0.0, time.thread_time()
    _here, _first_step, _window, _logged = Position("start", 0, 0, now, now), None, None, (0, now)
    _listeners.clear()
    _spent.clear()
