"""The writer of a runlog: append-only JSON Lines. A crash can tear the last line at most.

Nothing heavy such as torch is imported here, so that a log opens in milliseconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerobook.errors import LockedError
from zerobook.runlog.jsonl import FORMAT, check_format, encode, read_newest, repair
from zerobook.utils import locks
from zerobook.utils.terminal import say
from zerobook.utils.writing import refuse_link

EVENTS = "events.jsonl"
STEPS = "steps.jsonl"
# Seconds to wait for a lock. Processes that a killed run leaves behind, mostly data workers, hold its log until they end.
GRACE_S = 15.0


class RunLog:
    """Writes ``events.jsonl`` and ``steps.jsonl`` under ``output_dir/runlog``. One process writes.

    Every event carries ``seq`` (gap-free over the whole file), ``attempt`` (+1 per process start), ``branch`` (+1 whenever
    steps are done again, so that (branch, step) is unique), ``utc``, ``monotonic`` (s, comparable within an attempt),
    ``parent`` (seq of its cause, if it has one) and a CRC. ``steps.jsonl`` holds one line per optimizer step: loss
    (nats per supervised token, over all ranks), gradient norm before clipping, learning rate, tokens, sample ids in order.

    If the disk is full, at most `BACKLOG` writes are held in memory, and are done once there is space.

    Args:
        attempt: True begins a new attempt, as each process that trains does. False adds events to the last attempt.

    Raises:
        LockedError: another process writes this log.
        RunLogError: a newer version wrote this log.
    """

    BACKLOG = 100_000

    def __init__(self, output_dir: str | Path, *, attempt: bool = True):
        self.folder = Path(output_dir) / "runlog"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _File(self.folder / name) for name in (EVENTS, STEPS)}
        check_format(self.folder / EVENTS)
        # Both files are locked by now, so no other process writes the torn lines that are moved away.
        repaired = [repair(self.folder / name) for name in (EVENTS, STEPS)]
        last, damaged = read_newest(self.folder / EVENTS)
        # The events of damaged lines had numbers, which are not used a second time.
        self.seq: int = damaged
        self.attempt: int = 1
        self.branch: int = 0
        if last is not None:
            self.seq += last["seq"] + 1
            self.attempt = last["attempt"] + 1 if attempt else last["attempt"]
            self.branch = last["branch"]
        # A thread writes the samples of the machine. `_write` holds the lock when it calls `event` again.
        self._lock = threading.RLock()
        # (file name, lines) of each write that the disk has not taken yet, oldest first.
        self._backlog: deque[tuple[str, bytes]] = deque(maxlen=self.BACKLOG)
        # Number of writes that did not fit into the backlog.
        self._lost = 0
        if last is None:
            # `check_format` reads the format from the first line.
            self.event("runlog", format=FORMAT)
        elif damaged:
            self.event("repaired", file=EVENTS, damaged_lines_at_the_end=damaged)
        for facts in repaired:
            if facts is not None:
                self.event("repaired", **facts)

    # Positional only, since events of spikes have a fact ``kind``.
    def event(self, kind: str, /, *, parent: int | None = None, durable: bool = True, **facts: Any) -> int:
        """Append one event, and return its number ``seq``.

        Args:
            parent: seq of the event that caused this one.
            durable: wait until the event is on disk. If False, it outlives this process, but not a loss of power.
            facts: the fields of this type of event.
        """
        with self._lock:
            record: dict[str, Any] = {
                "seq": self.seq,
                "attempt": self.attempt,
                "branch": self.branch,
                "type": kind,
                "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "monotonic": round(time.monotonic(), 3),
            }
            if parent is not None:
                record["parent"] = parent
            record |= facts
            self.seq += 1
            self._write(EVENTS, encode(record), durable)
            return record["seq"]

    def steps(self, records: list[dict[str, Any]]) -> None:
        """Append a block of step records in one write."""
        position = {"attempt": self.attempt, "branch": self.branch}
        with self._lock:
            # The lines outlive this process. Waiting for the disk would hold up the training.
            self._write(STEPS, b"".join(encode(position | record) for record in records), durable=False)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    # Append lines to the file ``name``, after those that wait in the backlog. On a full disk, they wait there too.
    def _write(self, name: str, lines: bytes, durable: bool) -> None:
        was_waiting = bool(self._backlog)
        # A full backlog drops its oldest entry for the new one.
        if len(self._backlog) == self.BACKLOG:
            self._lost += 1
        self._backlog.append((name, lines))
        try:
            # The oldest lines are written first, so the numbers in the file go up. An entry leaves the backlog after its
            # write, so that an error of the disk keeps it.
            while self._backlog:
                file_name, waiting_lines = self._backlog[0]
                self._files[file_name].append(waiting_lines, durable)
                self._backlog.popleft()
        except OSError as error:
            # One warning is enough until the disk takes lines again.
            if not was_waiting:
                say(
                    f"WARNING: {self.folder}: the runlog cannot be written ({error.strerror}); training goes on, and "
                    f"up to {self.BACKLOG:,} writes are held in memory until there is room.",
                    file=sys.stderr,
                )
            return
        if was_waiting:
            lost = self._lost
            self._lost = 0
            message = f"{self.folder}: the runlog is written again"
            if lost:
                message += f", {lost} writes were lost"
            say(message, file=sys.stderr)
            self.event("written_late", lost=lost)


class NullRunLog(RunLog):
    """The runlog of the ranks other than 0, which writes nothing."""

    def __init__(self, output_dir: str | Path):
        # `RunLog.__init__` is not called, since it would open and lock the files.
        self.folder = Path(output_dir) / "runlog"
        self.attempt = 0
        self.branch = 0

    def event(self, kind: str, /, *, parent: int | None = None, durable: bool = True, **facts: Any) -> int:
        return 0

    def steps(self, records: list[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class _File:
    """A file that only one process can open for appending. An error of the disk never leaves half a line in it."""

    def __init__(self, path: Path):
        self.path = path
        self.handle = refuse_link(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if locks.lock(self.handle, wait=GRACE_S) is False:
            os.close(self.handle)
            # The advice is a copy, since it has no lock, and the log itself must not be deleted.
            raise LockedError(
                f"{path}: another process writes this log. Wait for that run, or give this one another --output_dir. If its "
                "host is gone for good, a network disk may keep its lock for ever: "
                f"rename {path.parent}, and copy it back to its old name"
            )

    def append(self, content: bytes, durable: bool) -> None:
        before = os.fstat(self.handle).st_size
        try:
            written = os.write(self.handle, content)
            # A disk that fills up takes the beginning of the content, and reports no error. 28 is ENOSPC.
            if written != len(content):
                raise OSError(28, "No space left on device")
            # A network disk may report only here that it is full.
            if durable:
                os.fsync(self.handle)
        except OSError:
            # The content is written again later. Half a line before it would be damage in the middle of the file.
            os.ftruncate(self.handle, before)
            raise

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
