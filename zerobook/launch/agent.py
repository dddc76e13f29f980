"""torchrun's agent, which starts and restarts the ranks of one host, with two changes: see `Agent`."""

import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from zerobook.constants import STOPPED
from zerobook.errors import ZerobookError

# Variable with the seconds after which torchrun kills processes that do not end at SIGTERM. torch 2.12 and newer read it.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# Seconds if the variable is not set.
SHUTDOWN_TIMEOUT_S = 30
# Exit code of ranks that refuse to start.
REFUSED_TO_START = ZerobookError.exit_code


class Agent(LocalElasticAgent):
    """An agent that always gives ranks the seconds of `SHUTDOWN_TIMEOUT` to end, and restarts no ranks that would fail again.

    torch 2.12 gives them these seconds only if the launcher gets a signal. If a machine joins, and in earlier versions, ranks
    have 30 seconds.
    """

    # How often this agent has started its ranks.
    _starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starts += 1
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        # Ranks that refuse their first start would refuse every start. A later refusal may be due to a machine that has joined,
        # and may leave again.
        has_refused = REFUSED_TO_START in codes and self._starts == 1
        # A run that stopped for a person to decide would stop again at the same spike.
        if has_refused or STOPPED in codes:
            self._remaining_restarts = 0
        if has_refused:
            # At the end of the launch, torchrun calls `shutdown` of the rendezvous. That would end the launchers of the other
            # machines, too, which may continue without this one.
            worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        # `_pcontext` holds the processes of the ranks.
        if self._pcontext is not None:
            # If a second signal interrupts this wait, torch calls this method again, which then ends the ranks.
            self._pcontext.close(death_sig, int(os.environ.get(SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S)))
        # torch calls this method once more at the end. It would then wait a second time for a rank that hangs in its driver.
        self._pcontext = None
        super()._shutdown(death_sig)


def install() -> None:
    """Let torchrun use `Agent` for launches from this process."""
    api.LocalElasticAgent = Agent  # type: ignore[misc]
