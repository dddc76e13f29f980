"""The watch of a run: every rank sends heartbeats, rank 0 judges them, and all ranks stop if one of them holds up the run.

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
from zerobook.health.exchange import BROKEN, GONE, Exchange
from zerobook.health.judge import Beat, Kind, Verdict, describe
from zerobook.health.stragglers import Slow
from zerobook.utils.terminal import say

if TYPE_CHECKING:
    from torch.distributed import Store

    from zerobook.utils.messages import SignedStore

EXIT_CODE = 77
"""Exit code of a rank that stopped because another rank, or itself, held up the run."""
STACKS_S = 3.0
"""Seconds to wait for the stacks of ranks that hold up the run."""
MOST_STACKS = 4
MOST_STACK_BYTES = 16_384


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
        verdict: the ranks that hold up the run, once it is known.
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
        self.store, self.rank, self.world_size, self.hang_timeout = store, rank, world_size, hang_timeout
        self.local = local
        self.report: Callable[[Verdict, str], None] = lambda verdict, text: None
        self.record: Callable[[], None] = lambda: None
        self.host = socket.gethostname()
        self._error, self._number, self._took = "", 0, 0.0
        self._exchanged = time.monotonic()
        self._exchange = Exchange(store, rank, world_size, hang_timeout, self._exchanged)
        self.interval = self._exchange.interval
        self._ending, self._done, self._wake = threading.Lock(), threading.Event(), threading.Event()
        self._judged = threading.Event()
        self._threads = [threading.Thread(target=work, name=f"health {work.__name__}", daemon=True)
                         for work in (self._exchange_beats, self._guard)]  # fmt: skip
        for thread in self._threads:
            thread.start()

    # --- the main thread
    def failed(self, error: BaseException) -> Verdict | None:
        """Tell the other ranks of an error that ends this one. Return the verdict if another rank is gone.

        It waits for the verdict where the error is that of a connection: the other end then stops sending heartbeats.
        """
        self._error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        position.enter("failed")
        self._wake.set()
        if broken_connection(error):
            self._judged.wait(5 * self.interval + 1)
            silent = time.monotonic() - self._exchange.pulsed
            if self.verdict is None and self.rank != 0 and silent > GONE * self.interval:  # rank 0, which judges, is gone
                self._exchange.verdict = self._verdict("silent", round(silent, 1))
        return self.verdict

    def slow(self) -> list[Slow]:
        """Return the ranks and links that have become slow since the last call; on rank 0 alone."""
        found, self._exchange.slow = self._exchange.slow, []
        return found

    @property
    def verdict(self) -> Verdict | None:
        return self._exchange.verdict

    def stop(self) -> None:
        """End the watch, and tell the other ranks that this one ended as it should."""
        position.enter("ended")
        self._done.set()
        self._wake.set()
        faulthandler.cancel_dump_traceback_later()
        self._threads[0].join(2 * self.interval + 1)

    # --- the thread that uses the store
    def _exchange_beats(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                self._exchange.step(self._beat(), begun)
                self._exchanged = time.monotonic()
                self._took = self._exchanged - begun
            except Exception as error:  # the store's host may be gone: `_guard` decides
                if self.verdict is None and position.here().phase == "failed":
                    said = f"the run's store has closed its connection ({type(error).__name__})"
                    self._exchange.verdict = self._unreachable(said)
            if self.verdict is not None:
                self._judged.set()
            if self._done.is_set():
                return
            if self.verdict is not None and position.here().phase != "failed":
                self._end(self.verdict)
            self._wake.wait(self.interval)
            self._wake.clear()

    def _beat(self) -> Beat:
        here, self._number = position.here(), self._number + 1
        return Beat(
            self._number, self.host, os.getpid(), here.phase, here.step, here.entered, round(time.monotonic() - here.since, 2),
            here.limit(self.hang_timeout), self._error, round(self._took, 4), position.window(),
        )  # fmt: skip

    # --- the thread that does not
    def _guard(self) -> None:
        while not self._done.wait(self.interval):
            # written from C, to the standard error output, if no thread of this process can run Python code for so long
            faulthandler.dump_traceback_later(self.hang_timeout, file=2)
            now = time.monotonic()
            if now - self._exchanged > self.hang_timeout:
                said = f"the run's store has not answered for {now - self._exchanged:.0f} s"
                self._end(self._unreachable(said), stacks=False)
            if self.rank != 0 and now - self._exchange.pulsed > self.hang_timeout and self.verdict is None:
                self._end(self._verdict("silent", round(now - self._exchange.pulsed, 1)), stacks=False)

    def _unreachable(self, said: str) -> Verdict:
        return self._verdict("lost", round(time.monotonic() - self._exchanged, 1), said)

    def _verdict(self, kind: Kind, seconds: float, error: str = "") -> Verdict:
        """Return this rank's own verdict about rank 0, whose position it does not know."""
        here = position.here()
        hosts = [self._exchange.main_host] if self._exchange.main_host else []
        return Verdict(
            kind, [0], hosts, "unknown", here.step, seconds, [(here.phase, here.step, [(self.rank, self.rank)])], error
        )

    # --- the end of this process
    def _end(self, verdict: Verdict, *, stacks: bool = True) -> None:
        """Report, and end this process. The first thread that calls it does so."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)
        text = describe(verdict)
        if stacks:
            text += self._exchange_stacks(verdict)
        text += "\nAll ranks stop. Start the run again with --resume_from_checkpoint auto."
        # the main thread may hold a lock that the report needs
        writing = threading.Thread(target=self._reports, args=(verdict, text), daemon=True)
        writing.start()
        writing.join(5)
        os._exit(EXIT_CODE)

    def _reports(self, verdict: Verdict, text: str) -> None:
        alive = [rank for rank in self.local if verdict.kind in ("stuck", "together") or rank not in verdict.ranks]
        if self.rank == min(alive, default=self.rank):
            say(f"\nHANG: {text}\n", file=sys.stderr)
            self.report(verdict, text)
        with suppress(Exception):  # the report is more important
            self.record()

    def _exchange_stacks(self, verdict: Verdict) -> str:
        """Send this rank's stack if it holds up the run, and return the stacks of those that do."""
        wanted, found = verdict.ranks[:MOST_STACKS], []
        try:
            if self.rank in wanted:
                self.store.set(f"stack/{self.rank}", main_stack())
            until = time.monotonic() + (STACKS_S + self.interval if verdict.kind in ("stuck", "together") else 0)
            for rank in wanted:
                key = f"stack/{rank}"
                while not self.store.check([key]) and time.monotonic() < until:
                    time.sleep(0.1)
                if self.store.check([key]):
                    stack = self.store.get(key)[:MOST_STACK_BYTES].decode(errors="replace")
                    found.append(f"\nStack of rank {rank}:\n{stack.rstrip()}")
            # the store may end with rank 0, so rank 0 waits until the others have read the verdict
            others = [f"read/{rank}" for rank in range(1, self.world_size) if rank not in verdict.ranks]
            until = time.monotonic() + 2 * self.interval + STACKS_S
            while self.rank == 0 and others and not self.store.check(others) and time.monotonic() < until:
                time.sleep(0.1)
        except Exception:  # the report without stacks is better than none
            pass
        return "".join(found)


_WORDS = ("connection", "gloo", "nccl", "socket", "store", "peer", "timed out", "broken pipe")


def broken_connection(error: BaseException) -> bool:
    """Return whether an error may be that of a connection to another rank."""
    said = f"{type(error).__name__}: {error}"
    return said.startswith(BROKEN) and any(word in said.lower() for word in _WORDS)


def main_stack() -> str:
    """Return the stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-12:]) if frame else "it has no stack"
