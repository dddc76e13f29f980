"""torchrun's agent, which starts and restarts the ranks of one host, with two of its habits changed."""

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
"""Exit code of ranks that refuse to start."""


class Agent(LocalElasticAgent):
    """An agent that leaves ranks the seconds of `SHUTDOWN_TIMEOUT`, and does not restart what would end in the same way.

    torch leaves them these seconds only if the launcher gets a signal: 30 seconds if a machine joins, and always before 2.12.
    """

    _starts = 0
    """how often this agent has started its ranks"""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starts += 1
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        # Ranks that ran before may be refused because of a machine that has joined and leaves again.
        is_refused = WRONG_COMMAND_LINE in codes and self._starts == 1
        if is_refused or STOPPED in codes:
            self._remaining_restarts = 0
        if is_refused:
            # This would end the launchers of other machines, which may continue without this one.
            worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self._pcontext is not None:
            # A second signal can interrupt this. torch then calls this method again, which ends the ranks.
            self._pcontext.close(death_sig, int(os.environ.get(SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S)))
        # torch also calls this again at the end, and would wait again for a rank that hangs in its driver.
        self._pcontext = None
        super()._shutdown(death_sig)


def install() -> None:
    """Let launches of this process use `Agent`."""
    api.LocalElasticAgent = Agent  # type: ignore[misc]
