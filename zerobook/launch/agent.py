"""torchrun's agent, which starts and restarts the ranks of one host, with two of its habits changed."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from zerobook.constants import STOPPED
from zerobook.errors import ZerobookError

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable with the seconds after which torchrun kills processes that do not end at SIGTERM. torch 2.12 and newer read it."""
SHUTDOWN_TIMEOUT_S = 30
"""Seconds without the variable."""
WRONG_COMMAND_LINE = ZerobookError.exit_code
FINAL_CODES = (WRONG_COMMAND_LINE, STOPPED)
"""Exit codes that another start with the same command line would end with, too: that of a wrong command line, and that of a run
that stops for a person to decide about a spike."""


class Agent(LocalElasticAgent):
    """An agent that leaves ranks the seconds of `SHUTDOWN_TIMEOUT`, and restarts none after one of `FINAL_CODES`.

    torch leaves them these seconds only if the launcher gets a signal: 30 seconds if a machine joins, and always before 2.12.
    """

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if codes & set(FINAL_CODES):
            self._remaining_restarts = 0
        if WRONG_COMMAND_LINE in codes:
            # A number of machines that changes: the others may go on without this one, whose file or GPU is missing.
            worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, int(os.environ.get(SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S)))
        super()._shutdown(death_sig)


def install() -> None:
    """Let launches of this process use `Agent`."""
    api.LocalElasticAgent = Agent  # type: ignore[misc]
