"""Check of a runlog, line by line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from zerobook.runlog.events import COMMON_FIELDS
from zerobook.runlog.jsonl import Damage, stream
from zerobook.runlog.writer import EVENTS, STEPS

# Only an event with a cause has a parent, and `stream` has checked and removed the checksum.
REQUIRED_FIELDS = [name for name in COMMON_FIELDS if name not in ("parent", "crc")]


def problems(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Return (the problems of a log, each a sentence; the number of lines read of each file).

    Problems are: damaged lines; numbers that are missing or occur twice; attempts, branches and clocks that go back; steps done
    twice in one branch; parents that come later than what they caused.
    """
    problems_of_events, events = _check_events(folder / EVENTS)
    problems_of_steps, steps = _check_steps(folder / STEPS)
    return problems_of_events + problems_of_steps, {"events": events, "steps": steps}


# Return the problems of the file of events, and the number of lines that could be read.
def _check_events(file: Path) -> tuple[list[str], int]:
    problems: list[str] = []
    damaged: list[Damage] = []
    readable_lines = 0
    previous: dict[str, Any] | None = None
    for event in stream(file, damaged):
        readable_lines += 1
        missing = [field for field in REQUIRED_FIELDS if field not in event]
        if missing:
            problems.append(f"{EVENTS}, line {readable_lines + len(damaged)}: it lacks {', '.join(missing)}.")
            continue
        problems += _compare_with_previous(previous, event, has_damage=bool(damaged))
        previous = event
    damage = [f"{EVENTS}, line {line}: {reason}." for line, reason in damaged]
    return damage + problems, readable_lines


# Return the problems of the file of steps, and the number of lines that could be read.
def _check_steps(file: Path) -> tuple[list[str], int]:
    damaged: list[Damage] = []
    times_written: Counter[tuple[int, int]] = Counter()
    for step in stream(file, damaged):
        times_written[step["branch"], step["step"]] += 1
    problems = [f"{STEPS}, line {line}: {reason}." for line, reason in damaged]
    repeated = [key for key, times in times_written.items() if times > 1]
    if repeated:
        first_branch, first_step = repeated[0]
        problems.append(
            f"{STEPS}: {len(repeated)} steps stand twice in one branch, the first is step {first_step} of branch "
            f"{first_branch}."
        )
    return problems, times_written.total()


def _compare_with_previous(previous: dict[str, Any] | None, event: dict[str, Any], has_damage: bool) -> list[str]:
    """Return the problems of an event that follows ``previous``, which is None for the first event of the log.

    Args:
        has_damage: lines before the event are damaged. They are reported themselves, and explain missing numbers.
    """
    seq = event["seq"]
    where = f"{EVENTS}, seq {seq}"
    if previous is None:
        if seq == 0 or has_damage:
            return []
        return [f"{where}: the log begins with it; events before it are missing."]
    problems = []
    if seq <= previous["seq"]:
        problems.append(f"{where}: it comes after seq {previous['seq']}; two processes have written.")
    elif seq > previous["seq"] + 1 and not has_damage:
        problems.append(f"{where}: {seq - previous['seq'] - 1} events before it are missing.")
    for key in ("attempt", "branch"):
        if event[key] < previous[key]:
            problems.append(f"{where}: {key} {event[key]} comes after {previous[key]}.")
    # Clocks are comparable only within an attempt. Less than a second is no sign of another writer.
    seconds_back = previous["monotonic"] - event["monotonic"]
    if event["attempt"] == previous["attempt"] and seconds_back > 1:
        problems.append(f"{where}: time goes back by {seconds_back:.0f} s within an attempt.")
    if event.get("parent") is not None and event["parent"] >= seq:
        problems.append(f"{where}: what caused it, seq {event['parent']}, comes after it.")
    return problems
