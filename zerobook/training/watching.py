"""The watch of a run, started and ended with it: see `zerobook.health.watch`."""

import os
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerobook.config import RecipeConfig
from zerobook.health import position
from zerobook.health.judge import describe
from zerobook.health.watch import PeerError, Watch
from zerobook.strategy import Strategy
from zerobook.utils.messages import SignedStore
from zerobook.utils.writing import write_whole

# Function of torch that returns the collectives of a recorder -> the file for them. NCCL's collectives have another recorder,
# which only builds with NCCL have. It comes last: it asks the device, which may not answer.
RECORDERS = {
    "_dump_fr_trace_json": "collectives.rank{rank}.json",
    "_dump_nccl_trace_json": "collectives.nccl.rank{rank}.json",
}


@contextmanager
def watching(config: RecipeConfig, strategy: Strategy) -> Iterator[Watch | None]:
    """Return a context in which the ranks watch each other. It gives the watch; None without ``hang_timeout``. Collective."""
    position.reset()
    if not config.hang_timeout:
        yield None
        return
    # After a restart, the store may still have the entries of an earlier attempt. This attempt's have a name of their own. The
    # secret signs the entries, and is sent through the process group only.
    attempt, secret = strategy.from_main((uuid.uuid4().hex, secrets.token_hex()))
    if strategy.world_size == 1:
        plain_store: dist.Store = dist.HashStore()
    else:
        group_store: Any = dist.distributed_c10d._get_default_store()
        # Use a copy of the group's store, since the watch reads and writes it in another thread.
        plain_store = dist.PrefixStore(f"zerobook/health/{attempt}", group_store.clone())
    store = SignedStore(plain_store, secret)
    # One of the ranks of this host reports what the watch finds.
    first_rank = strategy.rank - int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = range(first_rank, first_rank + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    watch = Watch(store, strategy.rank, strategy.world_size, config.hang_timeout, local=local_ranks)
    watch.record = lambda: _keep_collectives(Path(config.output_dir) / "runlog", strategy.rank)
    try:
        with telling_ranks_of_errors(watch):
            yield watch
    finally:
        watch.stop()


def _keep_collectives(folder: Path, rank: int) -> None:
    """Write the newest collectives of this rank, which torch's flight recorders keep, into files of `RECORDERS`."""
    for function, file in RECORDERS.items():
        dump = getattr(torch._C._distributed_c10d, function, None)
        if dump is not None:
            write_whole(folder / file.format(rank=rank), dump())


@contextmanager
def telling_ranks_of_errors(watch: Watch | None) -> Iterator[None]:
    """Return a context that tells the other ranks of an error in it.

    If the watch knows that another rank is the cause, a `PeerError` that names this rank is raised instead of the error.
    """
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        # A collective often fails because another rank is gone. The watch knows which one.
        verdict = watch.failed(error) if watch else None
        if verdict is None:
            raise
        raise PeerError(f"{describe(verdict)} Start the run again with --resume_from_checkpoint auto.") from error
