"""Handle preemption: after a warning signal to any rank, or Ctrl-C, all ranks save and exit at the same step.

SLURM sends SIGUSR1 (``--signal=USR1@120``) or SIGTERM some time before it kills a job. Spot machines send SIGTERM, and so does
``torchrun`` when another node is lost. The terminal sends SIGINT to the launcher, which sends it to its ranks.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed as dist

from zerobook.launch.process import INTERRUPTED
from zerobook.strategy import Strategy
from zerobook.utils import messages

# Exit code EX_TEMPFAIL of sysexits.h, which means: start the run again. ``--max_restarts`` does so at any code except 0.
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Key of the store with the name of the signal that a rank has received.
_SIGNAL_KEY = "zerobook/stop/asked"


class Preemption:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a last step that all ranks share. A second SIGINT ends the process at once.

    At a second Ctrl-C, torchrun sends SIGTERM to its ranks, or ends without a signal to them. So SIGTERM after SIGINT, and the
    end of torchrun after SIGINT, end this process too.

    Processes may be several steps apart, since nothing between log points waits for the device. So each rank that learns of
    a signal (through the process group's store, not a collective) writes its step to the store. From then on, it calls
    ``settle`` at every step to wait for its device. When all ranks have written their step, the last step is two after the
    largest of them: by then every rank knows it.

    Attributes:
        received: name of the signal that this rank, or another one, has received; None before that.
    """

    def __init__(self, strategy: Strategy, settle: Callable[[], Any]):
        self.strategy = strategy
        self.settle = settle
        self.received: str | None = None
        # Whether this rank itself has received SIGINT. `received` may be the signal of another rank.
        self._is_interrupted = False
        # Keys of the store, in which each rank writes its step.
        self._step_keys = [f"zerobook/stop/{rank}" for rank in range(strategy.world_size)]
        self._has_written_step = False
        self._last_step: int | None = None
        self._earlier_handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def restore(self) -> None:
        """Set the signal handlers that were there before."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember it, or end the process at a second Ctrl-C."""
        if self._is_interrupted and number in (signal.SIGINT, signal.SIGTERM):
            os._exit(INTERRUPTED)
        if number == signal.SIGINT:
            self._is_interrupted = True
            if self.strategy.rank == 0:
                # Do not call print here: if the signal has interrupted a print, a second call raises an error.
                os.write(2, b"\nCtrl-C: the run saves a checkpoint and ends. Press Ctrl-C again to stop without one.\n")
            # A thread watches torchrun, and ends this process when torchrun ends.
            if "TORCHELASTIC_RUN_ID" in os.environ:
                threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
        self.received = signal.Signals(number).name

    def due(self, step: int) -> bool:
        """Return whether the step that was just done is the last one. Every rank calls this after each step. Not collective.

        Args:
            step: number of steps done, with those of abandoned branches, so that it becomes larger after a rollback too.
        """
        if self.strategy.world_size == 1:
            return self.received is not None
        store = dist.distributed_c10d._get_default_store()
        if not self._has_written_step:
            if self.received is not None:
                store.set(_SIGNAL_KEY, self.received)
            else:
                self.received = _read_signal(store)
            if self.received is None:
                return False
            self._has_written_step = True
            store.set(self._step_keys[self.strategy.rank], str(step))
        # From here on the ranks are at most a step apart.
        self.settle()
        if self._last_step is None and store.check(self._step_keys):
            # A value that is no step is ignored: the next call reads all steps again.
            with suppress(messages.MessageError):
                self._last_step = max(messages.read(store.get(key), int) for key in self._step_keys) + 2
        return self._last_step is not None and step >= self._last_step


def _read_signal(store: dist.Store) -> str | None:
    """Return the name of the signal that some rank has received; None if there is none."""
    if not store.check([_SIGNAL_KEY]):
        return None
    name = store.get(_SIGNAL_KEY).decode(errors="replace")
    # Any program that reaches the store's port can write there, so check the value.
    is_signal = any(name == number.name for number in SIGNALS)
    return name if is_signal else None


def _end_with_launcher(launcher: int) -> None:
    """End this process when its launcher, the process ``launcher``, has ended."""
    # The parent of a process changes when the parent ends.
    while os.getppid() == launcher:
        time.sleep(0.1)
    os._exit(INTERRUPTED)
