"""The end of a process: errors of users without tracebacks, and an exit that a launcher reports correctly."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType

import psutil

from zerobook.errors import ConfigError, LaunchError, ZerobookError
from zerobook.launch import meet
from zerobook.launch.accelerate_cli import is_of_zerobook, launcher_flags, parent_command
from zerobook.utils.library_messages import hush
from zerobook.utils.terminal import plain, say, say_traceback

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


@contextmanager
def exit_on_error(*, ends_launcher: bool = False) -> Iterator[None]:
    """Print a `ZerobookError` of the context without a traceback, once for all ranks, and exit with its exit code.

    Every error is also written to the file that torchrun reads, so that torchrun's report quotes it.

    Args:
        ends_launcher: also end ``accelerate launch``, see `_end_launcher`. Only before the process group is formed.
    """
    sys.excepthook = say_traceback
    try:
        yield
    except KeyboardInterrupt:
        # During the training, `zerobook.monitor.preemption` handles Ctrl-C.
        if int(os.environ.get("RANK", 0)) == 0:
            say("\nInterrupted before the training; nothing was saved.", file=sys.stderr)
        os._exit(INTERRUPTED)
    except ZerobookError as error:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if rank != 0:
            # If the launcher ends this rank during the wait below, the exit code 0 keeps it out of torchrun's report.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            # Most errors occur on every rank, and should be printed once. So rank 0 prints first, and the launcher then stops
            # the others. A rank that is still alive after 5 seconds has a different error.
            time.sleep(5)
        where = f" (rank {rank})" if rank else ""
        say(f"\n{type(error).__name__}{where}: {error}\n", file=sys.stderr)
        # What another host has told is known there.
        if not isinstance(error, LaunchError):
            meet.tell_refusal(f"{type(error).__name__}: {error}", error.exit_code)
        launcher = _accelerate_launcher()
        if launcher is not None:
            if ends_launcher and rank == 0:
                _end_launcher(launcher)
            say(
                "The lines below are accelerate's report of this error. zerobook launch takes the same flags and omits it.\n",
                file=sys.stderr,
            )
        _tell_launcher(f"{type(error).__name__}: {error}")
        if rank == 0 and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
            # The other ranks need time to reach the same error. A rank that the launcher ends earlier is reported as a failure.
            time.sleep(2)
        # A normal exit would run destructors, which wait for other ranks.
        os._exit(error.exit_code)
    except Exception as error:
        _tell_launcher(traceback.format_exc())
        meet.tell_refusal(f"{type(error).__name__}: {error}", exit_code=1)
        raise


def _accelerate_launcher() -> psutil.Process | None:
    """Return the process of accelerate's own command, which started this one and ends with its traceback; or None."""
    command = parent_command()
    if launcher_flags(command) is None or is_of_zerobook(command):
        return None
    return psutil.Process().parent()


def _end_launcher(launcher: psutil.Process) -> None:
    """End the launcher, its other processes and this one, so that 40 lines about processes do not follow a refusal.

    torchrun answers each way to end it with a traceback, but for signals that it does not handle: SIGUSR1 is one.
    Returns if the launcher does not end in this way, as when it is the first process of a container.
    """
    with suppress(psutil.Error, OSError):
        # A launcher with --tee prints what its processes write, so it has to live until it has done that.
        if not os.path.samestat(os.stat(f"/proc/{launcher.pid}/fd/2"), os.fstat(2)):
            return
        for process in launcher.children():
            if process.pid != os.getpid():
                process.terminate()
        launcher.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            if os.getppid() != launcher.pid:
                os._exit(ConfigError.exit_code)
            time.sleep(0.02)


def _tell_launcher(text: str) -> None:
    """Write an error into the file that torchrun reads, in the format of its ``ErrorHandler``."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": plain(text), "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": plain(text), "extraInfo": extra}}))


def quietly(launcher: Callable[[], None]) -> int:
    """Run a launcher of processes without its tracebacks: the processes have printed their errors.

    Returns:
        The exit code of the process that failed first; 130 after Ctrl-C; 0.
    """

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from zerobook.launch import agent

    hush()
    # The import sets the levels of these loggers.
    import_module("torch.distributed.run")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    agent.install()
    try:
        launcher()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            text = f"rank {rank}, process {failure.pid}, was ended by {failure.signal_name()}."
            if -failure.exitcode == signal.SIGABRT:
                text += " torch ends a healthy process so if NCCL has lost another one: see the lines above."
            say(text, file=sys.stderr)
        # A negative code is a signal, for which shells have 128 and its number.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except subprocess.CalledProcessError as error:
        # The launcher of one process alone raises this.
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except SignalException as error:
        return 128 + int(error.sigval)
    except (DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0]
        say(f"The launchers of the machines did not meet: {reason}. Is each of them started?", file=sys.stderr)
        return 1
    return 0


def pass_signals_on() -> None:
    """Let the launcher of one process alone end with it and not before: at SIGTERM and SIGINT, which it sends on.

    torchrun, which starts several processes, does so itself. accelerate's launcher of one would end, and leave it running.
    """

    # Ctrl-C reaches all processes that the terminal shows, and so ends this one. It reads until the launcher has ended.
    witness = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def send_on(number: int, frame: FrameType | None) -> None:
        children = [child for child in psutil.Process().children() if child.pid != witness.pid]
        # No child runs yet that the signal could be sent to.
        if not children:
            os._exit(128 + number)
        if number == signal.SIGINT:
            with suppress(subprocess.TimeoutExpired):
                witness.wait(2)
            # The process has got this signal, too. It would end without a checkpoint at a second one.
            if witness.returncode == -number:
                return
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(number)

    signal.signal(signal.SIGTERM, send_on)
    signal.signal(signal.SIGINT, send_on)


def launched() -> bool:
    """Return whether this process is a rank of a process group, which ends with its run."""
    import torch.distributed as dist

    return dist.is_initialized()


def leave(code: int = 0) -> None:
    """End a launched process with ``code`` after its exit handlers have run.

    One process alone returns, or raises `SystemExit` where ``code`` is not 0.

    gloo's threads drop their last tensors some time after a collective has returned. If that falls into the
    interpreter's own shutdown, the process aborts ("terminate called without an active exception") and the launcher
    reports a finished run as failed, so a launched process ends without that shutdown.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        if code:
            sys.exit(code)
        return
    # In this order: handlers may print, and what they print has to be flushed.
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
