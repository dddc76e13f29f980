"""The meeting of all ranks of an attempt, before they form a process group.

Over several hosts, torch's own rendezvous would wait for the time limit of collectives and name nobody. Here, a rank that
cannot start says so to the others, and the ranks that are missing are named.

Where torchrun restarts ranks, the meeting also gives the attempt a name. torchrun keeps its store from attempt to attempt, with
the addresses of processes that are gone, and torch looks for its peers there (pytorch issue 135712). The agents of several
hosts count their restarts separately, so the count is not a name for an attempt. Here, rank 0 makes a name, and each rank
answers with a name of its own, which rank 0 confirms: a name that an earlier rank 0 left in the store is never confirmed to a
new process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from zerobook.errors import LaunchError, ZerobookError
from zerobook.utils import messages
from zerobook.utils.terminal import plain, say

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 600.0
"""Seconds that ranks wait for each other where torchrun restarts them, as torch's own rendezvous does."""
HOSTS_PATIENCE_S = 1800.0
"""Seconds that ranks of several hosts wait for each other at the only start. One host may compile ops first."""
CONNECT_S = 30.0
"""Seconds to connect to the launcher's store, which is there before the ranks are started."""
TELL_S = 3.0
"""Seconds that the host with the store stays after it refused to start, so that waiting ranks read the reason."""
LISTEN_S = 2.0
"""Seconds between two looks for the reason of a rank that fails."""
_has_started = threading.Event()
_PREFIX = "zerobook/meet"
_REFUSAL = "refusal"


class Refusal(TypedDict):
    """Why a process of the launch has ended before all ranks had come."""

    host: str
    reason: str
    exit_code: int


def restarts_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun may restart the ranks."""
    return environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _shares_store(environ: Mapping[str, str]) -> bool:
    """Return whether the ranks use the store of the launchers, which torchrun keeps from attempt to attempt."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def tells_hosts(environ: Mapping[str, str]) -> bool:
    """Return whether ranks on several hosts tell each other why they cannot start: in a launch that is the only attempt.

    Where ranks are restarted, the store would keep the reason for later attempts.
    """
    spans_hosts = int(environ.get("LOCAL_WORLD_SIZE", 1)) < int(environ.get("WORLD_SIZE", 1))
    return spans_hosts and _shares_store(environ) and not restarts_ranks(environ)


def wait_for_hosts() -> None:
    """Wait until all ranks of a launch over several hosts have come. Do nothing in other launches, and if ranks are restarted.

    From then on until `stop_listening`, this process ends if another rank says that it fails.

    Raises:
        LaunchError: names the ranks that are missing after `HOSTS_PATIENCE_S`, or the host that cannot start.
    """
    if not tells_hosts(os.environ):
        return
    import torch.distributed as dist

    try:
        meet(_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), HOSTS_PATIENCE_S)
    except dist.DistNetworkError:
        raise _launcher_is_gone() from None
    threading.Thread(target=_end_at_refusal, daemon=True).start()


def _launcher_is_gone() -> LaunchError:
    return LaunchError(
        f"the launcher on {os.environ['MASTER_ADDR']} ended before all ranks had started. It has printed the reason there."
    )


def _end_at_refusal() -> None:
    """End this process if another rank fails before the first collective. NCCL would wait for it without end."""
    import torch.distributed as dist

    error: ZerobookError
    try:
        store = _store()
        while not _has_started.wait(LISTEN_S):
            _raise_refusal(store)
        return
    except ZerobookError as refusal:
        error = refusal
    except dist.DistNetworkError:
        error = _launcher_is_gone()
    if _has_started.is_set():
        return
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        say(f"\nLaunchError: {error}\n", file=sys.stderr)
    else:
        # The launcher ends this process after the first one of the host has printed the reason.
        time.sleep(5)
    os._exit(error.exit_code)


def stop_listening() -> None:
    """Tell and end no more: all ranks have taken part in a collective, so they can start."""
    _has_started.set()


def tell_refusal(reason: str, exit_code: int) -> None:
    """Tell the ranks that wait in `wait_for_hosts`, or listen after it, why this process ends, and with which exit code."""
    if _has_started.is_set() or not tells_hosts(os.environ):
        return
    refusal = Refusal(host=socket.gethostname(), reason=plain(reason)[:4000], exit_code=exit_code)
    with suppress(RuntimeError):
        # The first reason stays: errors of other ranks may be its consequence.
        _store().compare_set(_REFUSAL, "", json.dumps(refusal))
    if os.environ.get("GROUP_RANK") == "0":
        time.sleep(TELL_S)


def _store() -> Store:
    """Connect to the launcher's store; return the part of it where ranks meet."""
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_S),
    )
    return dist.PrefixStore(_PREFIX, store)


def form_process_group(on_cpu: bool, timeout: timedelta) -> None:
    """Form the process group under keys of this attempt alone, if torchrun may restart the ranks; else do nothing.

    Raises:
        LaunchError: some rank did not come within `PATIENCE_S`.
    """
    environ = os.environ
    if not restarts_ranks(environ):
        return
    import torch.distributed as dist

    rank = int(environ["RANK"])
    world_size = int(environ["WORLD_SIZE"])
    address = environ["MASTER_ADDR"]
    port = int(environ["MASTER_PORT"])
    if _shares_store(environ):
        kept = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # Keys of this attempt alone: those of an earlier one hold addresses of processes that are gone.
        attempt = meet(dist.PrefixStore(_PREFIX, kept), rank, world_size)
        store: Store = dist.PrefixStore(f"zerobook/{attempt}", kept)
    else:
        # torch would wait for missing ranks as long as for a collective.
        try:
            store = dist.TCPStore(address, port, world_size, rank == 0, timedelta(seconds=PATIENCE_S))
        except dist.DistError as error:
            raise LaunchError(f"not all ranks came within {PATIENCE_S:.0f} s: {error}") from None
        store.set_timeout(timeout)
    backend = "gloo" if on_cpu else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def meet(store: Store, rank: int, world_size: int, patience: float = PATIENCE_S) -> str:
    """Return a name that all ranks of this attempt share, and no earlier attempt had.

    Args:
        store: may hold keys of earlier attempts.
        patience: seconds to wait for the other ranks.

    Raises:
        LaunchError: some rank did not come, or refuses to start.
    """
    name = uuid.uuid4().hex
    deadline = time.monotonic() + patience
    if rank == 0:
        # Rank 0's name is that of the attempt.
        store.set("attempt", name)
        answers = {other: f"here/{name}/{other}" for other in range(1, world_size)}
        while not _wait(store, list(answers.values()), 1.0):
            _raise_refusal(store)
            if time.monotonic() > deadline:
                missing = [str(other) for other, key in answers.items() if not store.check([key])]
                raise LaunchError(f"rank(s) {', '.join(missing)} did not come within {patience:.0f} s.")
        for other, key in answers.items():
            store.set(f"confirmed/{name}/{other}", _text(store.get(key)))
        return name
    # The name in the store may be of an earlier attempt, so it is read anew until rank 0 confirms an answer.
    while time.monotonic() < deadline:
        _raise_refusal(store)
        if not _wait(store, ["attempt"], 1.0):
            continue
        attempt = _text(store.get("attempt"))
        store.set(f"here/{attempt}/{rank}", name)
        confirmed = f"confirmed/{attempt}/{rank}"
        if _wait(store, [confirmed], 1.0):
            if _text(store.get(confirmed)) == name:
                return attempt
            # It was confirmed to a process that is gone.
            time.sleep(0.1)
    raise LaunchError(f"rank 0 did not come, or another rank did not, within {patience:.0f} s.")


def _raise_refusal(store: Store) -> None:
    """Raise the `LaunchError` of a host that refuses to start, with the exit code of its process."""
    if not store.check([_REFUSAL]):
        return
    refusal = messages.read(store.get(_REFUSAL), Refusal)
    error = LaunchError(f"{refusal['host']} cannot start, so that this host ends too. {refusal['reason']}")
    error.exit_code = refusal["exit_code"]
    raise error


def _text(name: bytes) -> str:
    """Return a name that a process wrote. A stranger's is cut, so that it is nobody's."""
    return name[:64].decode(errors="replace")


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait for ``keys``; return whether they came."""
    import torch.distributed as dist

    if keys:
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
    return True
