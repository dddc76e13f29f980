"""The meeting of all ranks of an attempt, where torchrun restarts ranks.

torchrun keeps its store from attempt to attempt, with the addresses of processes that are gone, and torch looks for its peers
there (pytorch issue 135712). The agents of several hosts count their restarts separately, so the count is no name for an
attempt. Here, rank 0 makes a name, and each rank answers with a name of its own, which rank 0 confirms: a name that an earlier
rank 0 left in the store is never confirmed to a new process.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 600.0
"""Seconds that ranks wait for each other, as torch's own rendezvous does."""


def restarts_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun may restart the ranks, and keeps its store from attempt to attempt."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def form_process_group(on_cpu: bool, timeout: timedelta) -> None:
    """Form the process group under keys of this attempt alone, if torchrun may restart the ranks; else do nothing."""
    environ = os.environ
    if not restarts_ranks(environ):
        return
    import torch.distributed as dist

    rank = int(environ["RANK"])
    world_size = int(environ["WORLD_SIZE"])
    store = dist.TCPStore(
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False, timeout=timeout
    )
    # Keys of this attempt alone: those of an earlier one hold addresses of processes that are gone.
    attempt = meet(dist.PrefixStore("zerobook/meet", store), rank, world_size)
    dist.init_process_group(
        "gloo" if on_cpu else "cuda:nccl,cpu:gloo",
        store=dist.PrefixStore(f"zerobook/{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def meet(store: Store, rank: int, world_size: int, patience: float = PATIENCE_S) -> str:
    """Return a name that all ranks of this attempt share, and no earlier attempt had.

    Args:
        store: may hold keys of earlier attempts.
        patience: seconds to wait for the other ranks.

    Raises:
        TimeoutError: some rank did not come.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        # Rank 0's name is that of the attempt.
        store.set("attempt", name)
        answers = {other: f"here/{name}/{other}" for other in range(1, world_size)}
        if not _wait(store, list(answers.values()), patience):
            missing = [str(other) for other, key in answers.items() if not store.check([key])]
            raise TimeoutError(f"rank(s) {', '.join(missing)} did not come within {patience:.0f} s")
        for other, key in answers.items():
            store.set(f"confirmed/{name}/{other}", _text(store.get(key)))
        return name
    # The name in the store may be of an earlier attempt, so it is read anew until rank 0 confirms an answer.
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
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
    raise TimeoutError(f"rank 0 did not come within {patience:.0f} s")


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
