"""The end of a process: errors of users without tracebacks, and an exit that a launcher reports correctly."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from zerobook.errors import ZerobookError
from zerobook.utils.terminal import say, say_traceback


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a `ZerobookError` from inside without a traceback, once for all ranks, and exit with its exit code."""
    sys.excepthook = say_traceback
    try:
        yield
    except ZerobookError as error:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if rank != 0:
            # Most errors occur on every rank. The launcher stops all ranks once one has exited, so rank 0 prints first; a
            # rank that is still alive after that has an error of its own.
            time.sleep(5)
        where = f" (rank {rank})" if rank else ""
        say(f"\n{type(error).__name__}{where}: {error}\n", file=sys.stderr)
        os._exit(error.exit_code)  # without destructors, which would wait for other ranks


def launched() -> bool:
    """Return whether this process is a rank of a process group, which ends with its run."""
    import torch.distributed as dist

    return dist.is_initialized()


def leave(code: int = 0) -> None:
    """End a launched process with ``code`` after its exit handlers have run.

    One process alone returns, or raises `SystemExit` where ``code`` is not 0.

    gloo's threads drop their last tensors some time after a collective has returned. Where that falls into the
    interpreter's own shutdown, the process aborts ("terminate called without an active exception") and the launcher
    reports a finished run as failed, so a launched process ends without that shutdown.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        if code:
            sys.exit(code)
        return
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
