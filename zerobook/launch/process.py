"""The end of a process: errors of users are printed without tracebacks, and launchers get the right exit code."""

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
from typing import NoReturn

import psutil

from zerobook.errors import ConfigError, LaunchError, ZerobookError
from zerobook.launch import meet
from zerobook.launch.accelerate_cli import is_of_zerobook, launcher_flags, parent_command
from zerobook.utils.library_messages import hush
from zerobook.utils.terminal import plain, say, say_traceback

# Exit code after Ctrl-C, as shells give it.
INTERRUPTED = 130


@contextmanager
def exit_on_error(*, ends_launcher: bool = False) -> Iterator[None]:
    """Print a `ZerobookError` of the context without a traceback, once for all ranks, and exit with its exit code.

    Every error is also written to the file that torchrun reads, so that torchrun's report quotes the error.

    Args:
        ends_launcher: also end ``accelerate launch``, see `_end_launcher`. True only before the process group is formed.
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
        _report_and_exit(error, ends_launcher=ends_launcher)
    except Exception as error:
        _write_error_file(traceback.format_exc())
        meet.tell_refusal(f"{type(error).__name__}: {error}", exit_code=1)
        raise


def _report_and_exit(error: ZerobookError, *, ends_launcher: bool) -> NoReturn:
    """Print an error without a traceback, tell it to other hosts and to the launcher, and exit with its exit code."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank != 0:
        # If the launcher ends this rank during the wait below, the exit code 0 keeps the rank out of torchrun's report.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        # Most errors occur on every rank, and should be printed once. So rank 0 prints first, and the launcher then stops the
        # other ranks. A rank that is still alive after 5 seconds has a different error.
        time.sleep(5)
    where = f" (rank {rank})" if rank else ""
    say(f"\n{type(error).__name__}{where}: {error}\n", file=sys.stderr)
    # A `LaunchError` comes from another host, or from ranks that are missing. There is nothing to tell to other hosts.
    if not isinstance(error, LaunchError):
        meet.tell_refusal(f"{type(error).__name__}: {error}", error.exit_code)
    launcher = _find_accelerate_launcher()
    if launcher is not None:
        if ends_launcher and rank == 0:
            _end_launcher(launcher)
        say(
            "The lines below are accelerate's report of this error. zerobook launch takes the same flags and omits it.\n",
            file=sys.stderr,
        )
    _write_error_file(f"{type(error).__name__}: {error}")
    if rank == 0 and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        # The launcher stops the other ranks when this one ends, and reports those that have not reached the same error yet as
        # failed. So give them time.
        time.sleep(2)
    # A normal exit would run destructors, which wait for other ranks.
    os._exit(error.exit_code)


def _find_accelerate_launcher() -> psutil.Process | None:
    """Return the process of ``accelerate launch`` that started this one; None if another launcher did.

    Unlike ``zerobook launch``, it prints a traceback of its own if this process fails.
    """
    command = parent_command()
    if launcher_flags(command) is None or is_of_zerobook(command):
        return None
    return psutil.Process().parent()


def _end_launcher(launcher: psutil.Process) -> None:
    """End the launcher, its other processes and this one, so that no 40 lines of the launcher follow the error.

    torchrun prints a traceback however it is ended, except by signals that it does not handle, such as SIGUSR1. Return if the
    launcher does not end at this signal, for example because it is the first process of a container.
    """
    with suppress(psutil.Error, OSError):
        # With --tee, the launcher prints what its processes write. So it must not end before. Its stderr is then another file
        # than that of this process.
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


def _write_error_file(text: str) -> None:
    """Write an error into the file that torchrun reads, in the format of torch's ``ErrorHandler``."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": plain(text), "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": plain(text), "extraInfo": extra}}))


def run_launcher(launcher: Callable[[], None]) -> int:
    """Run a launcher of processes without its tracebacks and logs, since the processes have printed their errors.

    Returns:
        The exit code of the process that failed first; 128 plus the number of a signal that ended the launch; 1 if the
        machines did not meet; 0 without a failure.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from zerobook.launch import agent

    hush()
    # Import the module before the levels are set, since the import sets them, too.
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
            # A thread of torch that watches NCCL aborts the process.
            if -failure.exitcode == signal.SIGABRT:
                text += " torch ends a healthy process so if NCCL has lost another one: see the lines above."
            say(text, file=sys.stderr)
        return _to_shell_code(failure.exitcode)
    except subprocess.CalledProcessError as error:
        # accelerate's launcher of a single process raises this.
        return _to_shell_code(error.returncode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0]
        say(f"The launchers of the machines did not meet: {reason}. Is each of them started?", file=sys.stderr)
        return 1
    return 0


# A negative code is the number of a signal, for which shells return 128 plus the number.
def _to_shell_code(code: int) -> int:
    return code if code > 0 else 128 - code


def pass_signals_on() -> None:
    """Let this launcher pass SIGTERM and SIGINT on to its single process, so that it ends when the process has ended.

    torchrun, which starts several processes, does so itself. accelerate's launcher of a single process would end at once, and
    the process would continue.
    """
    # The terminal sends Ctrl-C to all of its foreground processes. The witness is one of them: if Ctrl-C has ended it, then the
    # launched process has got the signal, too. Without a signal, cat runs until this launcher ends.
    witness = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def send_on(number: int, frame: FrameType | None) -> None:
        children = [child for child in psutil.Process().children() if child.pid != witness.pid]
        # The process has not been started yet.
        if not children:
            os._exit(128 + number)
        if number == signal.SIGINT:
            with suppress(subprocess.TimeoutExpired):
                witness.wait(2)
            # Do not send a second signal, at which the process would end without a checkpoint.
            if witness.returncode == -number:
                return
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(number)

    signal.signal(signal.SIGTERM, send_on)
    signal.signal(signal.SIGINT, send_on)


def launched() -> bool:
    """Return whether this process is a rank of a process group. Such a process ends with its run."""
    import torch.distributed as dist

    return dist.is_initialized()


def leave(code: int = 0) -> None:
    """End a launched process (see `launched`) with ``code``, after its exit handlers have run.

    In another process, return if ``code`` is 0, and raise `SystemExit` otherwise.

    gloo's threads free their last tensors some time after a collective has returned. If this happens while the interpreter
    shuts down, the process aborts ("terminate called without an active exception"), and the launcher reports a finished run as
    failed. So a launched process ends without the interpreter's shutdown.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        if code:
            sys.exit(code)
        return
    dist.destroy_process_group()
    # Flush after the exit handlers, since they may print. `os._exit` flushes nothing.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
