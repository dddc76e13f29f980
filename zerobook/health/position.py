"""The position of this process in its run: its phase, the step that the phase belongs to, and since when.

The main thread calls `enter` at places that every rank passes in the same order. So of two ranks, the one that has entered
fewer phases is behind. The thread that sends heartbeats reads the position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Phase -> its time limit without progress, as a factor on ``hang_timeout``. 0 means no limit: one process may tokenize or
# download for hours while the others wait for it.
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
STEP_PHASES = ("data", "forward", "backward", "optimizer", "reduce")
# Phases of ranks that send no more heartbeats. No other rank waits for them.
FINISHED_PHASES = ("ended", "failed")
# Factor on the limits in the first step of a process, which compiles kernels and allocates memory.
FIRST_STEP_FACTOR = 4.0
# A phase may take this many times as long as it has taken before in this process, even if that is more than its limit. A large
# model on a CPU, or an optimizer's state on NVMe, makes every step slow.
LONGEST_FACTOR = 2.0


class Position(NamedTuple):
    """The phase that a process is in.

    Attributes:
        entered: number of phases that the process has entered so far.
        began: when it entered this phase, as a time of `time.monotonic`.
        since: when the phase last made progress, as such a time.
        first: whether the phase belongs to the first step of the process.
        longest: the longest time in seconds that the process was in this phase without progress, and then continued.
    """

    phase: str
    step: int
    entered: int
    began: float
    since: float
    first: bool = False
    longest: float = 0.0

    def limit(self, hang_timeout: float) -> float:
        """Return the seconds that the phase may take without progress; infinity for no limit."""
        factor = LIMIT_FACTORS[self.phase]
        if factor == 0:
            return float("inf")
        if self.first:
            factor *= FIRST_STEP_FACTOR
        return max(factor * hang_timeout, LONGEST_FACTOR * self.longest)


class Window(NamedTuple):
    """Seconds that this process spent between two log points: in all, waiting for data, and in forward passes.

    In these two phases a process does not wait for others, so a long time means that this process is slow. Forward passes with
    collectives do wait for others; ``forward`` is then None. With a GPU, the seconds are measured on it, since the host only
    hands over work to it.
    """

    step: int
    steps: int
    total: float
    data: float
    forward: float | None

    def joined_with(self, earlier: Window | None) -> Window:
        """Return a window for the steps of ``earlier`` and of this one together."""
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
        # The first step of this process. It is larger than 1 after a resume.
        self.first_step: int | None = None
        self.longest_seconds: dict[str, float] = {}
        self.window: Window | None = None
        self.listeners: list[Callable[[str], None]] = []
        # Seconds of each phase since the last log point.
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

    # Add up the time of the phase that ends here.
    _state.phase_seconds[previous.phase] = _state.phase_seconds.get(previous.phase, 0.0) + (now - previous.began)
    longest = _state.longest_seconds
    longest[previous.phase] = max(longest.get(previous.phase, 0.0), now - previous.since)

    if step is None:
        step = previous.step
    if _state.first_step is None and phase == "data":
        _state.first_step = step
    # The first step of a process that resumes is a later one than 1, and it too compiles kernels.
    is_first = step == _state.first_step and phase in STEP_PHASES
    _state.position = Position(phase, step, previous.entered + 1, now, now, is_first, longest.get(phase, 0.0))

    # A listener may use the device. If the run ends because the device has failed, that would raise another error.
    if phase not in FINISHED_PHASES:
        for listener in _state.listeners:
            listener(phase)


def on_enter(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with the name of each phase that is entered from now on, except `FINISHED_PHASES`, until `reset`."""
    _state.listeners.append(listener)


def log_point(step: int, device_phases: dict[str, float] | None = None, *, forward_waits: bool = False) -> dict[str, float]:
    """Store the `Window` of the steps since the last log point, and return phase -> its seconds in these steps.

    Args:
        step: the step of this log point.
        device_phases: phase -> its seconds on the device. They are used instead of the seconds on the host.
        forward_waits: whether forward passes have collectives. If so, their time also depends on other ranks, and is left out.
    """
    now = time.monotonic()
    phases = _state.phase_seconds if device_phases is None else device_phases
    # The window with the first step is left out: compiling kernels takes longer on a host that has none in its cache.
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
    """Return the window that ends at the newest log point; None if there is none yet."""
    return _state.window


def touch() -> None:
    """Note that the current phase has made progress. Long phases call it after each of their parts, from the main thread."""
    _state.position = _state.position._replace(since=time.monotonic())


@contextmanager
def during(phase: str, step: int | None = None) -> Iterator[None]:
    """Return a context in which this process is in ``phase``. Afterwards, it enters the phase of before again."""
    outer = here()
    enter(phase, step)
    yield
    enter(outer.phase, outer.step)


def reset() -> None:
    """Forget everything, for another run in the same process."""
    global _state
    _state = _State()
