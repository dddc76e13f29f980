"""The meeting of all ranks of an attempt, before they form a process group.

If a rank on another host is missing, torch's own rendezvous waits as long as for a collective, and does not name the rank. In
this meeting, a rank that cannot start tells the other ranks the reason, and missing ranks are named.

If torchrun may restart the ranks, the meeting also gives each attempt a name. torchrun keeps its store from attempt to attempt.
So the store has addresses of processes that have ended, and torch would connect to these (pytorch issue 135712). The number of
restarts cannot be the name, since the agents of several hosts count restarts separately. Instead, rank 0 makes up a name and
writes it into the store. Each other rank answers with a random name of its process, and rank 0 confirms the answer. If a rank
reads the name of an earlier attempt, its answer is not confirmed, and it reads the name again.
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

# Seconds that ranks wait for each other if torchrun may restart them, as many as in torch's own rendezvous.
PATIENCE_S = 600.0
# Seconds that ranks of several hosts wait for each other if they are not restarted. One host may compile ops first.
HOSTS_PATIENCE_S = 1800.0
# Seconds to connect to the launcher's store, which exists before the ranks are started.
CONNECT_S = 30.0
# Seconds that a rank on the host of the store stays after it refused to start, so that waiting ranks can read the reason.
STAY_S = 3.0
# Seconds between two looks into the store for a rank that fails.
LISTEN_S = 2.0
# Set when all ranks have taken part in a collective.
_has_started = threading.Event()
# The beginning of the keys of the meeting in the store, and the key of the refusal.
_PREFIX = "zerobook/meet"
_REFUSAL = "refusal"


class Refusal(TypedDict):
    """The reason why a process of the launch ended before all ranks had come."""

    host: str
    reason: str
    exit_code: int


def restarts_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun may restart the ranks."""
    return environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _uses_agent_store(environ: Mapping[str, str]) -> bool:
    """Return whether the ranks use the store of torchrun's agents, which torchrun keeps from attempt to attempt."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def shares_refusals(environ: Mapping[str, str]) -> bool:
    """Return whether ranks that cannot start tell the reason to the ranks of other hosts.

    They do not if torchrun may restart ranks, since the store would keep the reason for later attempts.
    """
    spans_hosts = int(environ.get("LOCAL_WORLD_SIZE", 1)) < int(environ.get("WORLD_SIZE", 1))
    return spans_hosts and _uses_agent_store(environ) and not restarts_ranks(environ)


def wait_for_hosts() -> None:
    """Wait until all ranks of a launch over several hosts have come. Do nothing on one host, and if ranks may be restarted.

    A thread then listens until `stop_listening` is called, and ends this process if another rank tells that it fails.

    Raises:
        LaunchError: ranks are missing after `HOSTS_PATIENCE_S`, or a host cannot start. The message names them.
    """
    if not shares_refusals(os.environ):
        return
    import torch.distributed as dist

    try:
        meet(_connect_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), HOSTS_PATIENCE_S)
    except dist.DistNetworkError:
        raise _make_launcher_error() from None
    threading.Thread(target=_end_at_refusal, daemon=True).start()


def _make_launcher_error() -> LaunchError:
    return LaunchError(
        f"the launcher on {os.environ['MASTER_ADDR']} ended before all ranks had started. It has printed the reason there."
    )


def _end_at_refusal() -> None:
    """Listen until all ranks have started, and end this process if another rank fails. NCCL would wait for it without end."""
    import torch.distributed as dist

    error: ZerobookError
    try:
        store = _connect_store()
        while not _has_started.wait(LISTEN_S):
            _raise_refusal(store)
        return
    except ZerobookError as refusal:
        error = refusal
    except dist.DistNetworkError:
        error = _make_launcher_error()
    # The other ranks may have started, and ended, since the last look.
    if _has_started.is_set():
        return
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        say(f"\nLaunchError: {error}\n", file=sys.stderr)
    else:
        # The first process of the host prints the reason and ends. The launcher then ends this process during the wait.
        time.sleep(5)
    os._exit(error.exit_code)


def stop_listening() -> None:
    """End the exchange of refusals: all ranks have taken part in a collective, so all of them have started."""
    _has_started.set()


def tell_refusal(reason: str, exit_code: int) -> None:
    """Tell the other ranks, which wait in `wait_for_hosts` or listen after it, why this process ends."""
    if _has_started.is_set() or not shares_refusals(os.environ):
        return
    refusal = Refusal(host=socket.gethostname(), reason=plain(reason)[:4000], exit_code=exit_code)
    with suppress(RuntimeError):
        # compare_set keeps a reason that is there already, since this error may be a consequence of it.
        _connect_store().compare_set(_REFUSAL, "", json.dumps(refusal))
    # The store is on this host, and may end with this process.
    if os.environ.get("GROUP_RANK") == "0":
        time.sleep(STAY_S)


def _connect_store() -> Store:
    """Connect to the launcher's store, and return the part of the store in which ranks meet."""
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
    """Form the process group with keys in the store that no other attempt uses. Do nothing if ranks are never restarted.

    Args:
        timeout: the time limit of collectives.

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
    if _uses_agent_store(environ):
        agent_store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # The keys of an earlier attempt hold the addresses of processes that have ended. So the keys begin with the attempt.
        attempt = meet(dist.PrefixStore(_PREFIX, agent_store), rank, world_size)
        store: Store = dist.PrefixStore(f"zerobook/{attempt}", agent_store)
    else:
        # Rank 0 opens a new store for each attempt. The time limit is that of the meeting and not that of collectives.
        try:
            store = dist.TCPStore(address, port, world_size, rank == 0, timedelta(seconds=PATIENCE_S))
        except dist.DistError as error:
            raise LaunchError(f"not all ranks came within {PATIENCE_S:.0f} s: {error}") from None
        store.set_timeout(timeout)
    backend = "gloo" if on_cpu else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def meet(store: Store, rank: int, world_size: int, patience: float = PATIENCE_S) -> str:
    """Wait for all ranks. Return a name of this attempt, which all ranks share and no earlier attempt had.

    Args:
        store: it may hold keys of earlier attempts.
        patience: seconds to wait for the other ranks.

    Raises:
        LaunchError: some rank did not come, or refuses to start.
    """
    process_name = uuid.uuid4().hex
    if rank == 0:
        return _open_attempt(store, process_name, world_size, patience)
    return _join_attempt(store, process_name, rank, patience)


def _open_attempt(store: Store, attempt: str, world_size: int, patience: float) -> str:
    """On rank 0, name the attempt, wait for the answers of the other ranks, and confirm them. Return the name."""
    deadline = time.monotonic() + patience
    store.set("attempt", attempt)
    # Rank -> key of its answer, which is the name of its process.
    answer_keys = {rank: f"here/{attempt}/{rank}" for rank in range(1, world_size)}
    while not _wait_for_keys(store, list(answer_keys.values()), 1.0):
        _raise_refusal(store)
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in answer_keys.items() if not store.check([key])]
            raise LaunchError(f"rank(s) {', '.join(missing)} did not come within {patience:.0f} s.")
    # A confirmation repeats the answer, so that each rank sees whether its own answer is confirmed.
    for rank, key in answer_keys.items():
        store.set(f"confirmed/{attempt}/{rank}", _decode_name(store.get(key)))
    return attempt


def _join_attempt(store: Store, process_name: str, rank: int, patience: float) -> str:
    """On another rank, answer rank 0 with the name of this process. Return the attempt's name when rank 0 has confirmed it."""
    deadline = time.monotonic() + patience
    # The store may still have the name of an earlier attempt. So read the name again until the answer is confirmed.
    while time.monotonic() < deadline:
        _raise_refusal(store)
        if not _wait_for_keys(store, ["attempt"], 1.0):
            continue
        attempt = _decode_name(store.get("attempt"))
        store.set(f"here/{attempt}/{rank}", process_name)
        confirmation_key = f"confirmed/{attempt}/{rank}"
        if _wait_for_keys(store, [confirmation_key], 1.0):
            if _decode_name(store.get(confirmation_key)) == process_name:
                return attempt
            # The confirmation is for a process of an earlier attempt.
            time.sleep(0.1)
    raise LaunchError(f"rank 0 did not come, or another rank did not, within {patience:.0f} s.")


def _raise_refusal(store: Store) -> None:
    """If a host has told that it cannot start, raise a `LaunchError` with its reason and its exit code."""
    if not store.check([_REFUSAL]):
        return
    refusal = messages.read(store.get(_REFUSAL), Refusal)
    error = LaunchError(f"{refusal['host']} cannot start, so that this host ends too. {refusal['reason']}")
    error.exit_code = refusal["exit_code"]
    raise error


def _decode_name(name: bytes) -> str:
    """Return a name in the store as text. A name has 32 characters; longer bytes of another program are cut."""
    return name[:64].decode(errors="replace")


def _wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait at most ``seconds`` for ``keys``. Return whether all of them are in the store."""
    import torch.distributed as dist

    if keys:
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
    return True
