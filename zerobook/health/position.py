"""The position of this process in its run: a phase, the step it belongs to, and since when.

The main thread calls `enter` at places that every rank passes in the same order, so the number of phases entered so far says
which of two ranks is behind. A heartbeat reads the position from another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LIMIT_FACTORS = {
    "start": 0.0,
    "prepare data": 0.0,
    "load": 0.0,
    "data": 2.0,
    "forward": 1.0,
    "backward": 1.0,
    "optimizer": 2.0,
    "reduce": 1.0,
    "evaluate": 12.0,
    "save": 12.0,
    "roll back": 12.0,
    "export": 12.0,
    "ended": 0.0,
    "failed": 0.0,
}
"""Phase -> how many times ``hang_timeout`` it may take; 0: without a limit. One process may tokenize or download for hours
while the others wait for it."""
STEP_PHASES = ("data", "forward", "backward", "optimizer", "reduce")
FINISHED_PHASES = ("ended", "failed")
"""Phases of ranks that send no more heartbeats, and that nobody waits for."""
FIRST_STEP_FACTOR = 4.0
"""Factor on the limits in the first step of a process, which compiles kernels and allocates memory."""
LONGEST_FACTOR = 2.0
"""A phase may take this many times as long as before, even if that is longer than its limit: a large model on a CPU,
or an optimizer's state on NVMe, makes every step slow."""


class Position(NamedTuple):
    """``entered`` counts the phases so far. ``began`` is when the phase was entered and ``since`` when it last made progress,
    in seconds of `time.monotonic`. ``first``: in the first step. ``longest``: the most seconds that this process has spent in
    the phase without progress, and got on."""

    phase: str
    step: int
    entered: int
    began: float
    since: float
    first: bool = False
    longest: float = 0.0

    def limit(self, hang_timeout: float) -> float:
        """Return the seconds that the phase may take; infinity for no limit."""
        factor = LIMIT_FACTORS[self.phase]
        if factor == 0:
            return float("inf")
        if self.first:
            factor *= FIRST_STEP_FACTOR
        return max(factor * hang_timeout, LONGEST_FACTOR * self.longest)


class Window(NamedTuple):
    """Seconds that this process spent between two log points: in all, waiting for data, and in forward passes.

    They are its own seconds, since it waits for other processes in ``backward`` alone. ``forward`` is None if forward passes
    have collectives, in which it waits too. If it has a GPU they are the GPU's: the host only says when work was given to
    it.
    """

    step: int
    steps: int
    total: float
    data: float
    forward: float | None

    def after(self, earlier: Window | None) -> Window:
        """Return the window of the steps of ``earlier`` and of this one."""
        if earlier is None:
            return self
        return Window(
            step=self.step,
            steps=self.steps + earlier.steps,
            total=self.total + earlier.total,
            data=self.data + earlier.data,
            forward=None if self.forward is None or earlier.forward is None else self.forward + earlier.forward,
        )


class _State:
    """Phase, step and time window of this process. The main thread writes it, and the thread of the heartbeats reads it."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.position = Position("start", 0, 0, now, now)
        self.first_step: int | None = None
        self.longest_seconds: dict[str, float] = {}
        self.window: Window | None = None
        self.listeners: list[Callable[[str], None]] = []
        # seconds since the last log point
        self.phase_seconds: dict[str, float] = {}
        self.log_step = 0
        self.log_time = now


_state = _State()


def here() -> Position:
    """Return the position of this process."""
    return _state.position


def enter(phase: str, step: int | None = None) -> None:
    """Enter a phase. Every rank calls it at the same places, from the main thread.

    Args:
        step: optimizer step that the phase belongs to, counted from 1; None: the same step as before.
    """
    now = time.monotonic()
    previous = _state.position

    # Account for the phase that ends.
    _state.phase_seconds[previous.phase] = _state.phase_seconds.get(previous.phase, 0.0) + (now - previous.began)
    longest = _state.longest_seconds
    longest[previous.phase] = max(longest.get(previous.phase, 0.0), now - previous.since)

    if step is None:
        step = previous.step
    if _state.first_step is None and phase == "data":
        _state.first_step = step
    # A process that resumes begins at a later step than 1, and compiles in it all the same.
    is_first = step == _state.first_step and phase in STEP_PHASES
    _state.position = Position(phase, step, previous.entered + 1, now, now, is_first, longest.get(phase, 0.0))

    # Listeners use the device, and a device that has failed raises for every call.
    if phase not in FINISHED_PHASES:
        for listener in _state.listeners:
            listener(phase)


def on_enter(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with the name of each phase that is entered, until `reset`; not for the end of a run."""
    _state.listeners.append(listener)


def log_point(step: int, device_phases: dict[str, float] | None = None, *, forward_waits: bool = False) -> dict[str, float]:
    """Close the window of the steps since the last log point, and return its seconds by phase.

    Args:
        device_phases: seconds of each phase on the device, which then take the place of the host's.
        forward_waits: forward passes have collectives.
    """
    now = time.monotonic()
    phases = _state.phase_seconds if device_phases is None else device_phases
    # In the first step, kernels are compiled, which takes longer on a host whose cache has none. So its window is left out.
    if _state.first_step is not None and _state.log_step >= _state.first_step:
        _state.window = Window(
            step=step,
            steps=max(1, step - _state.log_step),
            total=now - _state.log_time,
            data=phases.get("data", 0.0),
            forward=None if forward_waits else phases.get("forward", 0.0),
        )
    _state.phase_seconds = {}
    _state.log_step = step
    _state.log_time = now
    return phases


def window() -> Window | None:
    """Return the newest closed window; None before the second one."""
    return _state.window


def touch() -> None:
    """Note that the current phase makes progress, for long phases that consist of many parts. Call it from the main thread."""
    _state.position = _state.position._replace(since=time.monotonic())


@contextmanager
def during(phase: str, step: int | None = None) -> Iterator[None]:
    """Return a context for a phase inside of another, which is entered again after it."""
    outer = here()
    enter(phase, step)
    yield
    enter(outer.phase, outer.step)


def reset() -> None:
    """Return to the start, for another run in the same process."""
    global _state
    _state = _State()
