"""Check of a runlog, line by line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from zerobook.runlog.events import COMMON_FIELDS
from zerobook.runlog.jsonl import Damage, stream
from zerobook.runlog.writer import EVENTS, STEPS

REQUIRED_FIELDS = [name for name in COMMON_FIELDS if name not in ("parent", "crc")]
"""Fields that every event has, without the checksum, which is read with the line."""


def problems(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Return (the problems of a log, each a sentence; the number of lines read of each file).

    Problems are: damaged lines; numbers that are missing or occur twice; attempts, branches and clocks that go back; steps done
    twice in one branch; parents that come later than what they caused.
    """
    problems_of_events: list[str] = []
    counts = {"events": 0, "steps": 0}
    damaged_events: list[Damage] = []
    previous: dict[str, Any] | None = None
    for event in stream(folder / EVENTS, damaged_events):
        counts["events"] += 1
        missing = [field for field in REQUIRED_FIELDS if field not in event]
        if missing:
            # Each line before it was read or is damaged.
            line = counts["events"] + len(damaged_events)
            problems_of_events.append(f"{EVENTS}, line {line}: it lacks {', '.join(missing)}.")
            continue
        # After a damaged line, a gap in the numbers is not a problem of its own.
        problems_of_events += _problems_after(previous, event, known_damage=bool(damaged_events))
        previous = event

    damaged_steps: list[Damage] = []
    times_written: Counter[tuple[int, int]] = Counter()
    for step in stream(folder / STEPS, damaged_steps):
        counts["steps"] += 1
        times_written[step["branch"], step["step"]] += 1
    problems_of_steps = []
    repeated = [key for key, times in times_written.items() if times > 1]
    if repeated:
        first_branch, first_step = repeated[0]
        problems_of_steps.append(
            f"{STEPS}: {len(repeated)} steps stand twice in one branch, the first is step {first_step} of branch "
            f"{first_branch}."
        )
    damage = [f"{EVENTS}, line {line}: {reason}." for line, reason in damaged_events]
    damage_of_steps = [f"{STEPS}, line {line}: {reason}." for line, reason in damaged_steps]
    return [*damage, *problems_of_events, *damage_of_steps, *problems_of_steps], counts


def _problems_after(previous: dict[str, Any] | None, event: dict[str, Any], known_damage: bool) -> list[str]:
    """Return the problems of an event that follows ``previous``, which is None for the first one of the log."""
    seq = event["seq"]
    where = f"{EVENTS}, seq {seq}"
    if previous is None:
        # Damaged lines at the beginning are reported themselves, and explain the gap.
        if seq == 0 or known_damage:
            return []
        return [f"{where}: the log begins with it; events before it are missing."]
    problems = []
    if seq <= previous["seq"]:
        problems.append(f"{where}: it comes after seq {previous['seq']}; two processes have written.")
    elif seq > previous["seq"] + 1 and not known_damage:
        problems.append(f"{where}: {seq - previous['seq'] - 1} events before it are missing.")
    for key in ("attempt", "branch"):
        if event[key] < previous[key]:
            problems.append(f"{where}: {key} {event[key]} comes after {previous[key]}.")
    # Clocks are comparable within an attempt; a second covers the time between two threads.
    seconds_back = previous["monotonic"] - event["monotonic"]
    if event["attempt"] == previous["attempt"] and seconds_back > 1:
        problems.append(f"{where}: time goes back by {seconds_back:.0f} s within an attempt.")
    if event.get("parent") is not None and event["parent"] >= seq:
        problems.append(f"{where}: what caused it, seq {event['parent']}, comes after it.")
    return problems
