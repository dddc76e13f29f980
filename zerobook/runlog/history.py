"""The history of a run, read from its log: attempts, branches, the steps that are still part of it, and the time spent."""

from __future__ import annotations

import mmap
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from zerobook.errors import RunLogError
from zerobook.runlog.events import Event, ending_types
from zerobook.runlog.jsonl import BadLine, Damage, check_format, decode, mapped, stream
from zerobook.runlog.writer import EVENTS, STEPS
from zerobook.utils import locks
from zerobook.utils.reading import open_regular
from zerobook.utils.terminal import say

_RECENT_S = 180.0


def folder_of(run: str | Path) -> Path:
    """Return the log's folder of a run's ``output_dir`` (or the folder itself). Raises `RunLogError` if there is none."""
    run = Path(run).expanduser()
    for folder in (run / "runlog", run):
        if (folder / EVENTS).exists():
            check_format(folder / EVENTS)
            return folder
    raise RunLogError(f"{run}: there is no runlog. Give the output_dir of a run.")


@contextmanager
def add_log_name_to_errors(folder: Path) -> Iterator[None]:
    """Turn the error of an event that lacks a field, or has another kind of value, into a `RunLogError` with the file's name.

    A log with sound lines can still be of another program, or have been changed by hand.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunLogError(
            f"{folder / EVENTS}: an event lacks a field, or has another kind of value than Zerobook writes "
            f"({type(error).__name__}: {error}). zerobook runlog verify reads every line."
        ) from error


def last_of(file: Path, event_types: Iterable[str]) -> dict[str, Event]:
    """Return the newest event of each type, without reading the events between them."""
    with open_regular(file) as handle, mapped(handle) as log:
        newest = {event_type: _newest_of_type(log, event_type) for event_type in event_types}
    return {event_type: event for event_type, event in newest.items() if event is not None}


def _newest_of_type(log: mmap.mmap | bytes, event_type: str) -> Event | None:
    """Return the newest sound event of a type. Searches backwards: the log may have millions of lines."""
    # A quote inside a JSON string is escaped, so the pattern matches keys only.
    pattern = b'"type":"%b"' % event_type.encode()
    search_end = len(log)
    while True:
        position = log.rfind(pattern, 0, search_end)
        if position < 0:
            return None
        line_start = log.rfind(b"\n", 0, position) + 1
        line_end = log.find(b"\n", position)
        search_end = line_start
        # A line without a newline is still being written, or was torn.
        if line_end < 0:
            continue
        try:
            event = decode(log[line_start:line_end])
        except BadLine:
            continue
        # The pattern may also match in an object inside of another event.
        if event["type"] == event_type:
            return event


def is_being_written(folder: Path) -> bool:
    """Return whether a process holds the log, or may hold it: on a file system without locks this is not known."""
    with open_regular(folder / EVENTS) as handle:
        # Only a writer refuses a shared lock: readers do not refuse each other.
        if locks.lock(handle.fileno(), shared=True) is not True:
            return True
    return is_written_elsewhere(folder)


def is_written_elsewhere(folder: Path) -> bool:
    """Return whether a process of another host has written the log lately, and has not ended.

    Some network file systems grant a lock to a process of each host. A run that lives writes at least twice a minute.
    """
    log = folder / EVENTS
    if time.time() - log.stat().st_mtime > _RECENT_S:
        return False
    newest = last_of(log, ["env", *ending_types()])
    attempt = newest.pop("env", None)
    if attempt is None or attempt["host"] == socket.gethostname():
        return False
    return all(ending["seq"] < attempt["seq"] for ending in newest.values())


def when(event: Event) -> datetime:
    return datetime.fromisoformat(event["utc"])


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch of a run: its steps after ``start``. Those up to ``lives_to`` are part of the run, later ones were abandoned."""

    number: int
    attempt: int
    start: int
    end: int
    lives_to: int
    cause: Event | None
    """the rollback or resume that began it; None for the first"""


@dataclass
class History:
    """The events of a run. `STEPS` is read by `steps` only, since there may be many."""

    folder: Path
    events: list[Event]

    @classmethod
    def read(cls, run: str | Path) -> History:
        folder = folder_of(run)
        damaged: list[Damage] = []
        events = list(stream(folder / EVENTS, damaged))
        if damaged:
            say(
                f"WARNING: {folder / EVENTS}: line {damaged[0].line} is damaged and left out. zerobook runlog verify names all "
                "damaged lines.",
                file=sys.stderr,
            )
        return cls(folder, events)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["type"] in kinds]

    def by_seq(self, seq: int) -> Event | None:
        # The numbers go up. Damaged lines leave gaps between them.
        index = bisect_left(self.events, seq, key=lambda event: event["seq"])
        if index == len(self.events) or self.events[index]["seq"] != seq:
            return None
        return self.events[index]

    def causes(self, event: Event) -> list[Event]:
        """Return the chain of parents, oldest first, ``event`` last."""
        chain = [event]
        while chain[0].get("parent") is not None:
            cause = self.by_seq(chain[0]["parent"])
            # The cause may stand on a damaged line.
            if cause is None:
                break
            chain.insert(0, cause)
        return chain

    def effects(self, event: Event) -> list[Event]:
        """Return all events that ``event`` caused, directly or not, in order."""
        # A cause stands before its effects, so one pass finds them all.
        caused = {event["seq"]}
        effects = []
        for later in self.events:
            if later.get("parent") in caused:
                caused.add(later["seq"])
                effects.append(later)
        return effects

    def branch_starts(self) -> dict[int, tuple[int, Event]]:
        """Return branch -> (the step it starts from, the event that started it)."""
        starts: dict[int, tuple[int, Event]] = {}
        for event in self.events:
            # A rollback starts its branch when it is done, and not when it is decided.
            is_rollback = event["type"] == "rollback" and event.get("phase") == "outcome"
            # A resume that does no step a second time continues its branch. The first start of a branch is its start.
            if (event["type"] == "run_start" or is_rollback) and event["branch"] not in starts:
                starts[event["branch"]] = (event["step"], event)
        return starts

    def last_current_steps(self) -> dict[int, float]:
        """Return branch -> its last step that is still part of the run, because no later branch began before it."""
        last_step = float("inf")
        last_current_steps = {}
        # From the newest branch to the oldest: a branch ends where any later one began.
        for branch, (start, _) in sorted(self.branch_starts().items(), reverse=True):
            last_current_steps[branch] = last_step
            last_step = min(last_step, start)
        return last_current_steps

    def current_evaluations(self) -> list[Event]:
        """Return the evaluations that are part of the run as it is now, oldest first."""
        last_steps = self.last_current_steps()
        return [event for event in self.of("eval") if event["step"] <= last_steps.get(event["branch"], float("inf"))]

    def branches(self) -> list[Branch]:
        ends: dict[int, int] = {}
        for event in self.of("metrics"):
            # The log points are in order, so the last one of a branch stays.
            ends[event["branch"]] = event["steps"][1]
        last_steps = self.last_current_steps()
        branches = []
        for number, (start, event) in sorted(self.branch_starts().items()):
            end = ends.get(number, start)
            is_first = event["type"] == "run_start" and not event.get("step") and number == 0
            branches.append(
                Branch(
                    number=number,
                    attempt=event["attempt"],
                    start=start,
                    end=end,
                    lives_to=int(min(end, last_steps[number])),
                    cause=None if is_first else event,
                )
            )
        return branches

    def steps(self, *, current: bool = False) -> Iterator[Event]:
        """Yield the records of steps, in the order in which the steps were done.

        Args:
            current: leave out the steps that were abandoned.
        """
        last_steps = self.last_current_steps() if current else {}
        for record in stream(self.folder / STEPS):
            if record["step"] <= last_steps.get(record["branch"], float("inf")):
                yield record

    def attempts(self) -> list[list[Event]]:
        """Return the events of each attempt."""
        by_attempt: dict[int, list[Event]] = {}
        for event in self.events:
            by_attempt.setdefault(event["attempt"], []).append(event)
        return list(by_attempt.values())

    def ending(self, attempt: list[Event]) -> str:
        """Return how an attempt ended: ``finished``, ``crash``, ``preempted``, ``stop``, ``killed`` or ``running``."""
        types = ending_types()
        # An attempt may hold the crash event of the one before it.
        last = [event for event in attempt if event["type"] in types and event.get("of_attempt") is None]
        if last:
            kind = str(last[-1]["type"])
            return "finished" if kind == "run_end" else kind
        # Only the newest attempt can still be running.
        if attempt[-1]["attempt"] == self.events[-1]["attempt"] and is_being_written(self.folder):
            return "running"
        return "killed"


@dataclass
class TimeSpent:
    """Time from the first event to the last, in seconds by use."""

    total: float = 0.0
    training: float = 0.0
    """steps that are part of the run as it is now, without saving and evaluating"""
    abandoned: dict[str, float] = field(default_factory=dict)
    """steps that were done and are not part of the run any more, by cause"""
    evaluating: float = 0.0
    saving: float = 0.0
    going_back: float = 0.0
    stopped: float = 0.0
    """between the end of one attempt and the start of the next"""
    abandoned_steps: dict[str, int] = field(default_factory=dict)

    @property
    def other(self) -> float:
        """Seconds of all other uses, mostly startup."""
        steps = self.training + sum(self.abandoned.values())
        return max(0.0, self.total - steps - self.evaluating - self.saving - self.going_back - self.stopped)

    @property
    def ratio(self) -> float:
        """The effective-training-time ratio: the share of the time for steps that are part of the run as it is now."""
        return self.training / self.total if self.total else 0.0


def time_spent(history: History) -> TimeSpent:
    spent = TimeSpent()
    if not history.events:
        return spent
    last_current_step = history.last_current_steps()
    starts = history.branch_starts()
    # Monotonic time at which the present block of steps began; None between two attempts.
    block_start: float | None = None
    # Evaluations and saves are written within the block of steps in which they took place.
    seconds_beside_steps = 0.0
    previous = history.events[0]
    for event in history.events:
        # The wall clock may be set while a run trains, so it measures only the time between two attempts.
        elapsed = event["monotonic"] - previous["monotonic"]
        if event["attempt"] != previous["attempt"]:
            elapsed = max(0.0, (when(event) - when(previous)).total_seconds())
            spent.stopped += elapsed
            block_start = None
        spent.total += elapsed
        previous = event
        event_type = event["type"]
        is_rollback = event_type == "rollback" and event["phase"] == "outcome"
        # Evaluations of another trainer, which an import writes, took no time of this run.
        if event_type == "eval" and block_start is not None:
            spent.evaluating += event["seconds"]
            seconds_beside_steps += event["seconds"]
        # The steps go on during a save in the background.
        elif event_type == "checkpoint" and event.get("seconds") is not None and not event.get("background"):
            spent.saving += event["seconds"]
            seconds_beside_steps += event["seconds"]
        elif is_rollback:
            spent.going_back += event["seconds"]
        elif event_type == "metrics" and block_start is not None:
            seconds = max(0.0, event["monotonic"] - block_start - seconds_beside_steps)
            _add_block(spent, event, seconds, last_current_step, starts)
        # A resumed attempt loads its checkpoint between the first two.
        if event_type in ("run_start", "resume", "metrics") or is_rollback:
            block_start = event["monotonic"]
            seconds_beside_steps = 0.0
    return spent


def _add_block(
    spent: TimeSpent,
    log_point: Event,
    seconds: float,
    last_current_step: dict[int, float],
    starts: dict[int, tuple[int, Event]],
) -> None:
    """Divide the seconds of the steps of a log point into those of current steps and those of abandoned steps."""
    first, last = log_point["steps"]
    steps = last - first + 1
    last_current = min(last, last_current_step.get(log_point["branch"], last))
    current_steps = max(0, int(last_current) - first + 1)
    spent.training += seconds * current_steps / steps
    steps_abandoned = steps - current_steps
    if steps_abandoned:
        cause = _cause_of_abandoning(starts, log_point["branch"], last)
        spent.abandoned[cause] = spent.abandoned.get(cause, 0.0) + seconds * steps_abandoned / steps
        spent.abandoned_steps[cause] = spent.abandoned_steps.get(cause, 0) + steps_abandoned


def _cause_of_abandoning(starts: dict[int, tuple[int, Event]], branch: int, step: int) -> str:
    """Return why a step of a branch is not part of the run any more."""
    for later in sorted(starts):
        start, event = starts[later]
        # The first later branch that starts before the step has abandoned it.
        if later > branch and start < step:
            return "rollback" if event["type"] == "rollback" else "stop before a save"
    return "unknown"
