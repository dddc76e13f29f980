"""Check of a runlog, line by line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from zerobook.runlog.jsonl import Damage, stream
from zerobook.runlog.writer import EVENTS, STEPS


def problems(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Return (the problems of a log, each a sentence; the number of lines read of each file).

    Problems are: damaged lines; numbers that are missing or occur twice; attempts, branches and clocks that go back; steps done
    twice in one branch; parents that come later than what they caused.
    """
    found: list[str] = []
    counts = {"events": 0, "steps": 0}
    damaged: list[Damage] = []
    before: dict[str, Any] | None = None
    for event in stream(folder / EVENTS, damaged):
        counts["events"] += 1
        found += _after(before, event, known_damage=bool(damaged))
        before = event
    found = [f"{EVENTS}, line {line}: {reason}." for line, reason in damaged] + found
    damaged = []
    seen: Counter[tuple[int, int]] = Counter()
    for step in stream(folder / STEPS, damaged):
        counts["steps"] += 1
        seen[step["branch"], step["step"]] += 1
    found += [f"{STEPS}, line {line}: {reason}." for line, reason in damaged]
    twice = [key for key, count in seen.items() if count > 1]
    if twice:
        found.append(
            f"{STEPS}: {len(twice)} steps stand twice in one branch, the first is step {twice[0][1]} of branch {twice[0][0]}."
        )
    return found, counts


def _after(before: dict[str, Any] | None, event: dict[str, Any], known_damage: bool) -> list[str]:
    seq, where = event["seq"], f"{EVENTS}, seq {event['seq']}"
    found = []
    if before is None:
        if seq != 0 and not known_damage:
            found.append(f"{where}: the log begins with it; events before it are missing.")
        return found
    if seq <= before["seq"]:
        found.append(f"{where}: it comes after seq {before['seq']}; two processes have written.")
    elif seq > before["seq"] + 1 and not known_damage:
        found.append(f"{where}: {seq - before['seq'] - 1} events before it are missing.")
    for key in ("attempt", "branch"):
        if event[key] < before[key]:
            found.append(f"{where}: {key} {event[key]} comes after {before[key]}.")
    if event["attempt"] == before["attempt"] and event["monotonic"] < before["monotonic"] - 1:
        found.append(f"{where}: time goes back by {before['monotonic'] - event['monotonic']:.0f} s within an attempt.")
    if event.get("parent") is not None and event["parent"] >= seq:
        found.append(f"{where}: what caused it, seq {event['parent']}, comes after it.")
    return found
