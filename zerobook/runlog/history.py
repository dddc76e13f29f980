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
from zerobook.runlog.jsonl import BadLine, Damage, check_format, decode, map_content, stream
from zerobook.runlog.writer import EVENTS, STEPS
from zerobook.utils import locks
from zerobook.utils.reading import open_regular
from zerobook.utils.terminal import say

# A live run writes a ``machine`` event every 30 seconds. A log that has not grown for this time has no writer.
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
    with open_regular(file) as handle, map_content(handle) as log:
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
    """Return whether a process writes the log, or may write it: on a file system without locks this is not known."""
    with open_regular(folder / EVENTS) as handle:
        # The lock of a writer is exclusive, so this shared lock is then refused. `lock` returns None if there are no locks.
        if locks.lock(handle.fileno(), shared=True) is not True:
            return True
    return is_written_elsewhere(folder)


def is_written_elsewhere(folder: Path) -> bool:
    """Return whether a process of another host has written the log lately, and its attempt has not ended.

    Some network file systems grant a lock to one process of each host, so the lock alone does not show such a writer.
    """
    log = folder / EVENTS
    if time.time() - log.stat().st_mtime > _RECENT_S:
        return False
    newest = last_of(log, ["env", *ending_types()])
    # The event ``env`` is written at the start of an attempt, and names the host.
    env = newest.pop("env", None)
    if env is None or env["host"] == socket.gethostname():
        return False
    # The events that are left ended an attempt, and those before ``env`` an earlier one.
    return all(ending["seq"] < env["seq"] for ending in newest.values())


def event_time(event: Event) -> datetime:
    return datetime.fromisoformat(event["utc"])


def is_finished_rollback(event: Event) -> bool:
    # A rollback writes two events: its intent, and its outcome once it is done.
    return event["type"] == "rollback" and event.get("phase") == "outcome"


def find_ending(attempt: Iterable[Event]) -> Event | None:
    """Return the event that ended an attempt, of which ``attempt`` has some or all events; None if it has no such event."""
    types = ending_types()
    # A crash with ``of_attempt`` tells how the attempt before ended, which could not write it.
    endings = [event for event in attempt if event["type"] in types and event.get("of_attempt") is None]
    return max(endings, key=lambda event: event["seq"], default=None)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch of a run: its steps after ``start``. Those up to ``lives_to`` are part of the run, later ones were abandoned."""

    number: int
    attempt: int
    start: int
    end: int
    lives_to: int
    cause: Event | None
    """the rollback or start of an attempt that began it; None for the start of a new run"""


@dataclass
class History:
    """The events of a run. Its steps may be millions, so only the method `steps` reads them, one by one."""

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

    def of(self, *event_types: str) -> list[Event]:
        return [event for event in self.events if event["type"] in event_types]

    def _find_by_seq(self, seq: int) -> Event | None:
        # The numbers go up, so a binary search finds the event. Damaged lines leave gaps between the numbers.
        index = bisect_left(self.events, seq, key=lambda event: event["seq"])
        if index == len(self.events) or self.events[index]["seq"] != seq:
            return None
        return self.events[index]

    def causes(self, event: Event) -> list[Event]:
        """Return the chain of parents, oldest first, ``event`` last."""
        chain = [event]
        while chain[0].get("parent") is not None:
            cause = self._find_by_seq(chain[0]["parent"])
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
            # An attempt that does no step a second time continues the branch of the last one. So a branch may have several
            # such events, and the first of them started it.
            if event["type"] == "run_start" or is_finished_rollback(event):
                starts.setdefault(event["branch"], (event["step"], event))
        return starts

    def last_current_steps(self) -> dict[int, float]:
        """Return branch -> its last step that is still part of the run; infinity if all of its steps are."""
        last_step = float("inf")
        last_current_steps = {}
        # From the newest branch to the oldest: the steps of a branch are current up to the first start of any later branch.
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
            # The log points are in order, so the last one of a branch overwrites the others.
            ends[event["branch"]] = event["steps"][1]
        last_steps = self.last_current_steps()
        branches = []
        for number, (start, event) in sorted(self.branch_starts().items()):
            end = ends.get(number, start)
            # Nothing causes the first branch, unless the run begins from an imported checkpoint.
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
        """Return the events of each attempt, oldest attempt first."""
        by_attempt: dict[int, list[Event]] = {}
        for event in self.events:
            by_attempt.setdefault(event["attempt"], []).append(event)
        return list(by_attempt.values())

    def ending(self, attempt: list[Event]) -> str:
        """Return how an attempt ended (finished, crash, preempted, stop, imported or killed), or ``running`` if it has not."""
        ending = find_ending(attempt)
        if ending is not None:
            return "finished" if ending["type"] == "run_end" else str(ending["type"])
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
    last_current_steps = history.last_current_steps()
    starts = history.branch_starts()
    # Monotonic time from which steps are done that no log point has counted; None before the first step of an attempt.
    steps_begin: float | None = None
    # Seconds of evaluations and saves since then.
    interruptions = 0.0
    previous = history.events[0]
    for event in history.events:
        if event["attempt"] == previous["attempt"]:
            spent.total += event["monotonic"] - previous["monotonic"]
        else:
            # Monotonic clocks of two attempts are not comparable, so the wall clock measures the time between them. It is
            # used nowhere else, since it may be set while a run trains.
            seconds_between = max(0.0, (event_time(event) - event_time(previous)).total_seconds())
            spent.stopped += seconds_between
            spent.total += seconds_between
            steps_begin = None
        previous = event
        event_type = event["type"]
        # Evaluations of another trainer, which an import writes without any start, took no time of this run.
        if event_type == "eval" and steps_begin is not None:
            spent.evaluating += event["seconds"]
            interruptions += event["seconds"]
        # The steps go on during a save in the background, so it takes no time of its own.
        elif event_type == "checkpoint" and event.get("seconds") is not None and not event.get("background"):
            spent.saving += event["seconds"]
            interruptions += event["seconds"]
        elif is_finished_rollback(event):
            spent.going_back += event["seconds"]
        elif event_type == "metrics" and steps_begin is not None:
            seconds_of_steps = max(0.0, event["monotonic"] - steps_begin - interruptions)
            _add_steps(spent, event, seconds_of_steps, last_current_steps, starts)
        # Steps follow each of these events. A resumed attempt loads its checkpoint between ``run_start`` and ``resume``.
        if event_type in ("run_start", "resume", "metrics") or is_finished_rollback(event):
            steps_begin = event["monotonic"]
            interruptions = 0.0
    return spent


def _add_steps(
    spent: TimeSpent,
    log_point: Event,
    seconds: float,
    last_current_steps: dict[int, float],
    starts: dict[int, tuple[int, Event]],
) -> None:
    """Add the seconds of the steps of a log point, divided into those of current steps and those of abandoned steps."""
    first, last = log_point["steps"]
    steps = last - first + 1
    last_current = min(last, last_current_steps.get(log_point["branch"], last))
    current_steps = max(0, int(last_current) - first + 1)
    spent.training += seconds * current_steps / steps
    abandoned_steps = steps - current_steps
    if abandoned_steps:
        cause = _find_cause_of_abandoning(starts, log_point["branch"], last)
        spent.abandoned[cause] = spent.abandoned.get(cause, 0.0) + seconds * abandoned_steps / steps
        spent.abandoned_steps[cause] = spent.abandoned_steps.get(cause, 0) + abandoned_steps


def _find_cause_of_abandoning(starts: dict[int, tuple[int, Event]], branch: int, step: int) -> str:
    """Return why a step of a branch is not part of the run any more. ``starts``: as `History.branch_starts` returns them."""
    for later in sorted(starts):
        start, event = starts[later]
        # The first later branch that starts before the step has abandoned it.
        if later > branch and start < step:
            # An attempt begins a branch if the last one stopped after its last save: the steps since then are done again.
            return "rollback" if event["type"] == "rollback" else "stop before a save"
    return "unknown"
