"""A hook that counts what this host sends to other hosts, between two steps."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch.distributed as dist

from zerobook.training.hooks import Hook, TrainerView

FROM, TO = 4, 24
RESULT = "ZEROBOOK_BYTES_SENT"


class BytesSent(Hook):
    """Writes the bytes of each step into the file of ``$ZEROBOOK_BYTES_SENT``, one for each rank."""

    def before_step(self, trainer: TrainerView, step: int) -> None:
        if step not in (FROM, TO):
            return
        dist.barrier()
        time.sleep(0.3)  # acknowledgements
        if step == FROM:
            self.first = sent()
        else:
            path = Path(f"{os.environ[RESULT]}.{trainer.strategy.rank}.json")
            path.write_text(json.dumps((sent() - self.first) / (TO - FROM)))
        dist.barrier()


def sent() -> int:
    """Return the bytes that the host's network device has sent."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.split()[9])
