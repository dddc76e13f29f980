"""Append-only JSON Lines, one ``write`` a line, so that a crash can tear the last line at most."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

EVENTS = "events.jsonl"
STEPS = "steps.jsonl"


class RunLog:
    """Writes ``events.jsonl`` and ``steps.jsonl`` under ``output_dir/runlog``. One process writes.

    Every event carries ``seq`` (gap-free over the whole file) and ``attempt`` (+1 per process
    start). ``steps.jsonl`` holds one line per optimizer step: loss (nats per supervised token, over
    all ranks), gradient norm before clipping, learning rate, tokens, sample ids in order.
    """

    def __init__(self, output_dir: str | Path):
        self.folder = Path(output_dir) / "runlog"
        self.folder.mkdir(parents=True, exist_ok=True)
        torn = [cut_torn_line(self.folder / name) for name in (EVENTS, STEPS)]
        last = last_line(self.folder / EVENTS)
        self.seq = last["seq"] + 1 if last else 0
        self.attempt = last["attempt"] + 1 if last else 1
        self._events = os.open(self.folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._steps = os.open(self.folder / STEPS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for name, text in zip((EVENTS, STEPS), torn, strict=True):
            if text is not None:
                self.event("torn_line", file=name, kept_as=f"{name}.torn", bytes=len(text))

    def event(self, kind: str, **facts: Any) -> None:
        """Append one event and make it durable."""
        record = {
            "seq": self.seq,
            "attempt": self.attempt,
            "type": kind,
            "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "monotonic": round(time.monotonic(), 3),
            **facts,
        }
        os.write(self._events, orjson.dumps(record, default=str) + b"\n")
        os.fsync(self._events)
        self.seq += 1

    def steps(self, records: list[dict[str, Any]]) -> None:
        """Append a block of step records in one write."""
        lines = b"".join(orjson.dumps({"attempt": self.attempt, **r}, default=list) + b"\n" for r in records)
        os.write(self._steps, lines)

    def close(self) -> None:
        os.close(self._events)
        os.close(self._steps)


def read(file: Path) -> list[dict[str, Any]]:
    """All whole lines of a runlog file, oldest first."""
    if not file.exists():
        return []
    return [orjson.loads(line) for line in file.read_bytes().split(b"\n")[:-1] if line]


def last_line(file: Path) -> dict[str, Any] | None:
    lines = read(file)
    return lines[-1] if lines else None


def cut_torn_line(file: Path) -> bytes | None:
    """Cut what follows the last newline, keep it in ``FILE.torn``, and return it; None where nothing is torn."""
    if not file.exists():
        return None
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    torn = content[whole:]
    if not torn:
        return None
    file.with_name(file.name + ".torn").write_bytes(torn)
    os.truncate(file, whole)
    return torn
