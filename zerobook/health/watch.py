"""Watch a run: every rank sends heartbeats, rank 0 judges them, and all ranks stop if one of them blocks the run.

Each rank has two threads for this, and no collectives. One thread exchanges heartbeats through a store of torch.distributed. It
has a connection of its own to the store, since the main thread may block the other one. If a link is cut, a call to the store
can block for a quarter of an hour. So the second thread, which never uses the store, measures how long ago the last exchange
was.
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

# Exit code of a rank that stopped because a rank, this one or another, blocks the run.
EXIT_CODE = 77
# Seconds to wait for the stacks of ranks that block the run.
STACKS_TIMEOUT_S = 3.0
# Seconds that a process may spend on its report. After them it ends without a report.
REPORT_TIMEOUT_S = 5.0
# If no thread of this process has run for this share of ``hang_timeout``, the process was suspended.
SUSPENDED_SHARE = 0.25
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
        store: a store for the ranks of this attempt alone. Only one thread of this process uses it.
        hang_timeout: seconds without a heartbeat, or without progress in a phase of a step, after which the run stops.
        local: ranks on this host.

    Attributes:
        report: called with (verdict, text) before this process ends, on one rank of each host.
        record: called before this process ends, on every rank whose process can still run it.
        locate: returns the position that the GPU has reached; the host may be ahead of it. None without a GPU.
        verdict: the verdict on the ranks that block the run; None until there is one.
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
        # The thread that acquires this lock ends the process. It never releases the lock.
        self._ending = threading.Lock()
        self._exchange_thread = threading.Thread(target=self._exchange_beats, name="health exchange", daemon=True)
        self._guard_thread = threading.Thread(target=self._guard, name="health guard", daemon=True)
        position.on_enter(self._announce)
        self._exchange_thread.start()
        self._guard_thread.start()

    # --- the main thread
    def _announce(self, phase: str) -> None:
        """Send a heartbeat now if the phase is no part of a step, so that rank 0 knows its longer time limit at once."""
        if phase not in position.STEP_PHASES:
            self._wake.set()

    def failed(self, error: BaseException) -> Verdict | None:
        """Tell the other ranks of an error that ends this one. Return the verdict if another rank is its cause, else None.

        If the error is that of a connection, the rank at the other end may be gone. Then wait for a verdict on it.
        """
        # Send only the first line, cut to a limit, since rank 0 reads the heartbeats of all ranks.
        self._error = plain(f"{type(error).__name__}: {error}".splitlines()[0])[:MAX_ERROR_LENGTH]
        position.enter("failed")
        self._wake.set()
        if self.world_size > 1 and is_connection_error(error):
            # Rank 0 notices the silence of a rank that is gone after `GONE_INTERVALS` intervals.
            self._has_verdict.wait(5 * self.interval + 1)
            silence = self._clock.now() - self._exchange.pulse_time
            # If rank 0 itself is gone, it sends no verdict. Then this rank makes one.
            if self.verdict is None and self.rank != 0 and silence > GONE_INTERVALS * self.interval:
                self._exchange.verdict = self._judge_main("silent", silence)
        # A verdict on this rank says no more than its error.
        if self.verdict is not None and self.rank in self.verdict.ranks:
            return None
        return self.verdict

    def take_slow(self) -> list[Slow]:
        """Return the hosts with slow ranks that were noticed since the last call. Other ranks than 0 notice none."""
        return self._exchange.take_slow()

    @property
    def verdict(self) -> Verdict | None:
        return self._exchange.verdict

    def stop(self) -> None:
        """End the watch, and tell the other ranks that this one ended as it should."""
        position.enter("ended")
        self._done.set()
        self._wake.set()
        # The guard sets the timer of faulthandler, so wait for its end before the timer is cancelled.
        self._guard_thread.join(2 * self.interval + 1)
        faulthandler.cancel_dump_traceback_later()
        self._exchange_thread.join(2 * self.interval + 1)
        self._listener.close()

    # --- the thread that uses the store
    # Exchanges heartbeats until this rank or rank 0 has finished. Ends this process if there is a verdict before that.
    def _exchange_beats(self) -> None:
        failures = 0
        while True:
            try:
                self._exchange.step(self._next_beat(), self._clock.now())
                self._last_exchange_time = self._clock.now()
                failures = 0
            except Exception as error:
                failures += 1
                # A connection that is closed twice shows that the store is gone: a link that is cut for a while does not close
                # it. After any other error, `_guard` decides. A rank that has failed does not wait for that.
                is_closed = failures > 1 and is_connection_error(error)
                if self.verdict is None and (is_closed or position.here().phase == "failed"):
                    self._exchange.verdict = self._judge_lost_store(
                        f"the run's store has closed its connection ({type(error).__name__})"
                    )
            now = self._clock.now()
            if self.verdict is None and self._exchange.has_main_ended(now):
                self._exchange.verdict = self._judge_main("ended", now - self._exchange.pulse_time)
            if self.verdict is not None:
                self._has_verdict.set()
            if self._done.is_set() or self._has_main_finished():
                return
            # A rank that has failed ends with its own error, which says more than a verdict. A rank that has finished does not
            # need the others.
            if self.verdict is not None and position.here().phase not in position.FINISHED_PHASES:
                self._end(self.verdict)
            self._wake.wait(self.interval)
            self._wake.clear()

    # Returns a heartbeat with the position of this process. If the host may be waiting for its GPU, it is that of the GPU.
    def _next_beat(self) -> Beat:
        here = position.here()
        # Do not ask the GPU while the host still makes progress. After two intervals, rank 0 knows the phase of the host.
        is_waiting = self._clock.seconds_since(here.since) > 2 * self.interval and here.phase not in position.FINISHED_PHASES
        if self.locate is not None and is_waiting:
            # If the GPU hangs, `locate` may never return the GIL, and no thread of this process can go on. So send the error
            # before the call, with the number of the last heartbeat, so that it does not count as a new one.
            self._exchange.send(self._beat._replace(error=GPU_SILENT))
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
    # Ends this process if the store or rank 0 has been silent for too long, or if no Python code can run any more.
    def _guard(self) -> None:
        while not self._done.wait(self.interval):
            if self._ending.locked():
                return
            # Set the timer anew. A call to a GPU that hangs may never return the GIL. Then the timer's thread, which is written
            # in C, writes the stacks to stderr and ends the process. The other ranks have named this one by then.
            faulthandler.dump_traceback_later(2 * self.hang_timeout, file=2, exit=True)
            # Accept the connections of ranks that look for this process (see `presence`), which send nothing.
            with suppress(OSError):
                while True:
                    self._listener.accept()[0].close()
            now = self._clock.now()
            if self._has_main_finished():
                continue
            # The other thread cannot see this, since its call to the store may block for much longer.
            store_silence = now - self._last_exchange_time
            if store_silence > self.hang_timeout:
                verdict = self._judge_lost_store(f"the run's store has not answered for {store_silence:.0f} s")
                self._end(verdict, with_stacks=False)
            main_silence = now - self._exchange.pulse_time
            if self.rank != 0 and main_silence > self.hang_timeout and self.verdict is None:
                self._end(self._judge_main("silent", main_silence), with_stacks=False)

    def _has_main_finished(self) -> bool:
        """Return whether rank 0 has ended as it should. Then no rank judges this one, and the store may be gone."""
        return self._exchange.main_beat.phase == "ended"

    def _judge_lost_store(self, error: str) -> Verdict:
        return self._judge_main("lost", self._clock.now() - self._last_exchange_time, error)

    def _judge_main(self, kind: Kind, seconds: float, error: str = "") -> Verdict:
        """Return this rank's own verdict on rank 0, which cannot judge itself."""
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
        """Report the verdict, and end this process."""
        if not self._ending.acquire(blocking=False):
            # Another thread is in this method already, and ends the process during this sleep.
            time.sleep(60)
        text = describe(verdict)
        if with_stacks:
            text += self._exchange_stacks(verdict)
        if verdict.kind == "silent" and verdict.hosts:
            text += f"\nIf processes hang on {', '.join(verdict.hosts)}, end the launcher there: it waits for them."
        text += "\nAll ranks stop. Start the run again with --resume_from_checkpoint auto."
        # Write the report in another thread, with a time limit: the main thread may hold a lock that the report needs.
        writer = threading.Thread(target=self._write_reports, args=(verdict, text), daemon=True)
        # If a call to a GPU that hangs never returns the GIL, the timer of faulthandler, written in C, ends the process.
        faulthandler.dump_traceback_later(REPORT_TIMEOUT_S + 5, file=2, exit=True)
        writer.start()
        writer.join(REPORT_TIMEOUT_S)
        os._exit(EXIT_CODE)

    # Prints the verdict and calls `report` on one rank of each host, and calls `record` on all ranks.
    def _write_reports(self, verdict: Verdict, text: str) -> None:
        # Ranks that block the run can report only if they still send heartbeats.
        blamed_can_report = verdict.kind in ("stuck", "together")
        reporters = [rank for rank in self.local if blamed_can_report or rank not in verdict.ranks]
        if self.rank == min(reporters, default=self.rank):
            say(f"\nHANG: {text}\n", file=sys.stderr)
            self.report(verdict, text)
        # The report is written. An error must not keep the process from ending.
        with suppress(Exception):
            self.record()

    def _exchange_stacks(self, verdict: Verdict) -> str:
        """Send the stack of this rank if it blocks the run. Return the stacks of all ranks that do, as text."""
        stacks: list[str] = []
        # A report without stacks is better than none.
        with suppress(Exception):
            blamed_ranks = verdict.ranks[:MAX_STACKS]
            if self.rank in blamed_ranks:
                self.store.set(f"stack/{self.rank}", main_stack())
            # Ranks that still send heartbeats read the verdict with the next one, and then send their stacks. Wait for these.
            timeout = 0.0
            if verdict.kind in ("stuck", "together"):
                timeout = STACKS_TIMEOUT_S + self.interval
            deadline = time.monotonic() + timeout
            for rank in blamed_ranks:
                key = f"stack/{rank}"
                if self._wait_for_keys([key], deadline):
                    stack = self.store.get(key)[:MAX_STACK_BYTES].decode(errors="replace")
                    stacks.append(f"\nStack of rank {rank}:\n{stack.rstrip()}")
            # The store may end with the process of rank 0, so rank 0 waits until the others have read the verdict.
            if self.rank == 0:
                reads = [f"read/{rank}" for rank in range(1, self.world_size) if rank not in verdict.ranks]
                self._wait_for_keys(reads, time.monotonic() + 2 * self.interval + STACKS_TIMEOUT_S)
        return "".join(stacks)

    def _wait_for_keys(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait until the store has all keys. Return False if it does not by ``deadline``, a time of `time.monotonic`."""
        while keys and not self.store.check(list(keys)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        return True


_CONNECTION_WORDS = ("connection", "gloo", "nccl", "socket", "store", "peer", "timed out", "broken pipe")


def is_connection_error(error: BaseException) -> bool:
    """Return whether the type and the text of an error can be those of a broken connection to another rank."""
    text = f"{type(error).__name__}: {error}"
    return text.startswith(CONNECTION_ERRORS) and any(word in text.lower() for word in _CONNECTION_WORDS)


def main_stack() -> str:
    """Return the stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "it has no stack"
    return "".join(traceback.format_stack(frame)[-MAX_STACK_FRAMES:])
