"""The watch of a run: every rank sends heartbeats, rank 0 judges them, and all ranks stop if one of them blocks the run.

Two threads of each rank do so, without collectives. One exchanges heartbeats through a store of torch.distributed, over a
connection of its own: the main thread's may wait in it. A call to a store behind a cut link can block for a quarter of an hour,
so the other thread, which never touches the store, measures how long ago the last exchange was.

A rank reads its verdict and rank 0's pulse; rank 0 reads one heartbeat of each rank. So the work grows linearly with the ranks.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from zerobook.errors import ZerobookError
from zerobook.health import position
from zerobook.health.clock import RunningClock
from zerobook.health.exchange import CONNECTION_ERRORS, GONE_INTERVALS, Exchange
from zerobook.health.judge import GPU_SILENT, NO_BEAT, Beat, Kind, Verdict, describe
from zerobook.health.presence import listen
from zerobook.health.stragglers import Slow
from zerobook.utils.terminal import plain, say

if TYPE_CHECKING:
    from torch.distributed import Store

    from zerobook.utils.messages import SignedStore

EXIT_CODE = 77
"""Exit code of a rank that stopped because another rank, or itself, held up the run."""
STACKS_TIMEOUT_S = 3.0
"""Seconds to wait for the stacks of ranks that block the run."""
REPORT_TIMEOUT_S = 5.0
"""Seconds that a process takes for its report before it ends without."""
SUSPENDED_SHARE = 0.25
"""Share of ``hang_timeout`` in which no thread of this process has run, after which it counts as suspended."""
MAX_STACKS = 4
MAX_STACK_BYTES = 16_384
MAX_STACK_FRAMES = 12
MAX_ERROR_LENGTH = 300


class PeerError(ZerobookError):
    """Another rank is gone. Its message names it."""

    exit_code = EXIT_CODE


class Watch:
    """Watches the run from this rank until `stop`.

    Args:
        store: for all ranks of this attempt alone; it is used by one thread.
        hang_timeout: seconds without a heartbeat, or without progress in a phase of a step, after which the run stops.
        local: ranks on this host.

    Attributes:
        report: called with (verdict, text) before this process ends, on one rank of each host.
        record: called before this process ends, on every rank that can.
        locate: asks the GPU for the position that it has reached, which the host's is ahead of; None without a GPU.
        verdict: the ranks that block the run, once it is known.
    """

    def __init__(
        self,
        store: Store | SignedStore,
        rank: int,
        world_size: int,
        hang_timeout: float,
        *,
        local: Sequence[int],
    ):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.hang_timeout = hang_timeout
        self.local = local
        self.report: Callable[[Verdict, str], None] = lambda verdict, text: None
        self.record: Callable[[], None] = lambda: None
        self.locate: Callable[[], position.Position] | None = None
        self._error = ""
        self._listener = listen()
        self._beat = NO_BEAT._replace(host=socket.gethostname(), pid=os.getpid(), endpoint=self._listener.getsockname()[:2])
        self._clock = RunningClock(SUSPENDED_SHARE * hang_timeout)
        self._last_exchange_time = self._clock.now()
        self._exchange = Exchange(store, rank, world_size, hang_timeout, self._last_exchange_time)
        self.interval = self._exchange.interval
        self._done = threading.Event()
        self._wake = threading.Event()
        self._has_verdict = threading.Event()
        # Whoever holds the lock ends the process; it is never released.
        self._ending = threading.Lock()
        self._exchange_thread = threading.Thread(target=self._exchange_beats, name="health exchange", daemon=True)
        self._guard_thread = threading.Thread(target=self._guard, name="health guard", daemon=True)
        position.on_enter(self._announce)
        self._exchange_thread.start()
        self._guard_thread.start()

    # --- the main thread
    def _announce(self, phase: str) -> None:
        """Send a heartbeat now for a phase outside of steps, so that others know of an evaluation before the next interval."""
        if phase not in position.STEP_PHASES:
            self._wake.set()

    def failed(self, error: BaseException) -> Verdict | None:
        """Tell the other ranks of an error that ends this one. Return the verdict if another rank is gone.

        It waits for the verdict if the error is that of a connection: the other end then stops sending heartbeats.
        """
        # One line, and no long one: rank 0 reads the heartbeats of all ranks.
        self._error = plain(f"{type(error).__name__}: {error}".splitlines()[0])[:MAX_ERROR_LENGTH]
        position.enter("failed")
        self._wake.set()
        if self.world_size > 1 and is_connection_error(error):
            self._has_verdict.wait(5 * self.interval + 1)
            silence = self._clock.now() - self._exchange.pulse_time
            # Rank 0 judges. If it is gone itself, no verdict comes.
            if self.verdict is None and self.rank != 0 and silence > GONE_INTERVALS * self.interval:
                self._exchange.verdict = self._verdict_on_main("silent", silence)
        # The error is this rank's own if no other one is gone.
        if self.verdict is not None and self.rank in self.verdict.ranks:
            return None
        return self.verdict

    def take_slow(self) -> list[Slow]:
        """Return the ranks that have become slow since the last call; on rank 0 alone."""
        return self._exchange.take_slow()

    @property
    def verdict(self) -> Verdict | None:
        return self._exchange.verdict

    def stop(self) -> None:
        """End the watch, and tell the other ranks that this one ended as it should."""
        position.enter("ended")
        self._done.set()
        self._wake.set()
        # It sets the timer, so it ends first.
        self._guard_thread.join(2 * self.interval + 1)
        faulthandler.cancel_dump_traceback_later()
        self._exchange_thread.join(2 * self.interval + 1)
        self._listener.close()

    # --- the thread that uses the store
    def _exchange_beats(self) -> None:
        failures = 0
        while True:
            try:
                self._exchange.step(self._next_beat(), self._clock.now())
                self._last_exchange_time = self._clock.now()
                failures = 0
            except Exception as error:
                failures += 1
                # A closed connection means that the store is gone for good: a link that is cut for a while does not close it.
                # After any other error, `_guard` decides, unless this rank has failed and only waits for a verdict.
                is_closed = failures > 1 and is_connection_error(error)
                if self.verdict is None and (is_closed or position.here().phase == "failed"):
                    self._exchange.verdict = self._store_lost(
                        f"the run's store has closed its connection ({type(error).__name__})"
                    )
            now = self._clock.now()
            if self.verdict is None and self._exchange.has_main_ended(now):
                self._exchange.verdict = self._verdict_on_main("ended", now - self._exchange.pulse_time)
            if self.verdict is not None:
                self._has_verdict.set()
            if self._done.is_set() or self._has_main_finished():
                return
            # A rank that has failed ends with its own error, which says more than the verdict. A rank that has finished does
            # not need the others.
            if self.verdict is not None and position.here().phase not in position.FINISHED_PHASES:
                self._end(self.verdict)
            self._wake.wait(self.interval)
            self._wake.clear()

    def _next_beat(self) -> Beat:
        here = position.here()
        # A host that gets on is not held up by its GPU. After two intervals, its last heartbeat has told its phase.
        is_waiting = self._clock.seconds_since(here.since) > 2 * self.interval and here.phase not in position.FINISHED_PHASES
        if self.locate is not None and is_waiting:
            # The number stays: this shows no progress.
            self._exchange.send(self._beat._replace(error=GPU_SILENT))
            # If the GPU hangs, this may keep Python's lock, and no thread of this process goes on.
            here = self.locate()
        self._beat = self._beat._replace(
            number=self._beat.number + 1,
            phase=here.phase,
            step=here.step,
            entered=here.entered,
            seconds=round(self._clock.seconds_since(here.since), 2),
            limit=here.limit(self.hang_timeout),
            error=self._error,
            window=position.window(),
        )
        return self._beat

    # --- the thread that never touches the store
    def _guard(self) -> None:
        while not self._done.wait(self.interval):
            if self._ending.locked():
                return
            # If no thread of this process can run Python code for so long, as where a call to a GPU that hangs keeps Python's
            # lock, a thread in C writes the stacks to the standard error output and ends the process. The others have named
            # it by then.
            faulthandler.dump_traceback_later(2 * self.hang_timeout, file=2, exit=True)
            # Whoever looks for this process only connects.
            with suppress(OSError):
                while True:
                    self._listener.accept()[0].close()
            now = self._clock.now()
            if self._has_main_finished():
                continue
            # A call to the store may block for much longer, so its thread cannot tell that itself.
            store_silence = now - self._last_exchange_time
            if store_silence > self.hang_timeout:
                self._end(self._store_lost(f"the run's store has not answered for {store_silence:.0f} s"), with_stacks=False)
            main_silence = now - self._exchange.pulse_time
            if self.rank != 0 and main_silence > self.hang_timeout and self.verdict is None:
                self._end(self._verdict_on_main("silent", main_silence), with_stacks=False)

    def _has_main_finished(self) -> bool:
        """Return whether rank 0 has ended as it should. Nobody judges this rank then, and the store may be gone."""
        return self._exchange.main_beat.phase == "ended"

    def _store_lost(self, error: str) -> Verdict:
        return self._verdict_on_main("lost", self._clock.now() - self._last_exchange_time, error)

    def _verdict_on_main(self, kind: Kind, seconds: float, error: str = "") -> Verdict:
        """Return this rank's own verdict about rank 0."""
        here = position.here()
        main_beat = self._exchange.main_beat
        return Verdict(
            kind=kind,
            ranks=[0],
            hosts=[main_beat.host] if main_beat.host else [],
            phase=main_beat.phase,
            step=main_beat.step,
            seconds=round(seconds, 1),
            others=[(here.phase, here.step, [(self.rank, self.rank)])],
            error=error or main_beat.error,
        )

    # --- the end of this process
    def _end(self, verdict: Verdict, *, with_stacks: bool = True) -> None:
        """Report, and end this process. The first thread that calls it does so."""
        if not self._ending.acquire(blocking=False):
            # The other thread ends the process meanwhile.
            time.sleep(60)
        text = describe(verdict)
        if with_stacks:
            text += self._exchange_stacks(verdict)
        if verdict.kind == "silent" and verdict.hosts:
            text += f"\nIf processes hang on {', '.join(verdict.hosts)}, end the launcher there: it waits for them."
        text += "\nAll ranks stop. Start the run again with --resume_from_checkpoint auto."
        # In a thread of its own, since the main thread may hold a lock that the report needs.
        writer = threading.Thread(target=self._write_reports, args=(verdict, text), daemon=True)
        # A call to a GPU that hangs may keep Python's lock, so that no thread goes on. This one is written in C.
        faulthandler.dump_traceback_later(REPORT_TIMEOUT_S + 5, file=2, exit=True)
        writer.start()
        writer.join(REPORT_TIMEOUT_S)
        os._exit(EXIT_CODE)

    def _write_reports(self, verdict: Verdict, text: str) -> None:
        # Blamed ranks can report only if they still send heartbeats.
        blamed_can_report = verdict.kind in ("stuck", "together")
        reporters = [rank for rank in self.local if blamed_can_report or rank not in verdict.ranks]
        if self.rank == min(reporters, default=self.rank):
            say(f"\nHANG: {text}\n", file=sys.stderr)
            self.report(verdict, text)
        # The report is out, and nothing may keep the process from ending.
        with suppress(Exception):
            self.record()

    def _exchange_stacks(self, verdict: Verdict) -> str:
        """Send this rank's stack if it blocks the run, and return the stacks of those that do."""
        stacks: list[str] = []
        # The report without stacks is better than none.
        with suppress(Exception):
            blamed_ranks = verdict.ranks[:MAX_STACKS]
            if self.rank in blamed_ranks:
                # From the thread of the heartbeats, as the main thread hangs.
                self.store.set(f"stack/{self.rank}", main_stack())
            # A blamed rank that still sends heartbeats reads the verdict with its next one, and sends its stack then.
            timeout = 0.0
            if verdict.kind in ("stuck", "together"):
                timeout = STACKS_TIMEOUT_S + self.interval
            deadline = time.monotonic() + timeout
            for rank in blamed_ranks:
                key = f"stack/{rank}"
                if self._wait_for_keys([key], deadline):
                    stack = self.store.get(key)[:MAX_STACK_BYTES].decode(errors="replace")
                    stacks.append(f"\nStack of rank {rank}:\n{stack.rstrip()}")
            # The store may end with rank 0, so rank 0 waits until the others have read the verdict.
            if self.rank == 0:
                reads = [f"read/{rank}" for rank in range(1, self.world_size) if rank not in verdict.ranks]
                self._wait_for_keys(reads, time.monotonic() + 2 * self.interval + STACKS_TIMEOUT_S)
        return "".join(stacks)

    def _wait_for_keys(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait until the store has all keys, and return whether it has; ``deadline`` is a time of `time.monotonic`."""
        while keys and not self.store.check(list(keys)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        return True


_CONNECTION_WORDS = ("connection", "gloo", "nccl", "socket", "store", "peer", "timed out", "broken pipe")


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error may be that of a connection to another rank."""
    text = f"{type(error).__name__}: {error}"
    return text.startswith(CONNECTION_ERRORS) and any(word in text.lower() for word in _CONNECTION_WORDS)


def main_stack() -> str:
    """Return the stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "it has no stack"
    return "".join(traceback.format_stack(frame)[-MAX_STACK_FRAMES:])
