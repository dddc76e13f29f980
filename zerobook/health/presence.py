"""Whether the process of another rank is still there. The system answers for it: none of that process's threads has to run.

Each rank listens at a port. The system refuses connections to it once the process has ended, and makes them while it hangs.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

CONNECT_S = 0.5
"""Seconds for a connection, at most: the host may be gone, or its link."""
Endpoint = tuple[str, int]
"""An address and a port."""


def listen() -> socket.socket:
    """Listen at a free port of the address from which this host reaches the first one. Where none does, the port is local."""
    address = "127.0.0.1"
    family = socket.AF_INET
    first_host = os.environ.get("MASTER_ADDR", "localhost")
    with suppress(OSError):
        route_family, kind, _, _, target = socket.getaddrinfo(first_host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(route_family, kind) as route:
            # This sends nothing. The system chooses the address that it would send from.
            route.connect(target)
            address = route.getsockname()[0]
        family = route_family
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    listener.setblocking(False)
    return listener


class Presence:
    """Looks for processes that have been silent for ``patience`` seconds."""

    def __init__(self, patience: float):
        self.patience = patience
        # Address -> its first answer.
        self._first_answers: dict[str, str] = {}

    def has_ended(self, endpoint: Endpoint, silence: float) -> bool:
        """Return whether the process that listened at ``endpoint`` has ended; False where that is not known."""
        address, port = endpoint
        # Each address is tried once while all is well: where a firewall refuses, too, a refusal says nothing.
        is_tried = address in self._first_answers
        if not port or (is_tried and silence < self.patience):
            return False
        answer = "none"
        try:
            socket.create_connection(endpoint, CONNECT_S).close()
            answer = "accepted"
        except ConnectionRefusedError:
            answer = "refused"
        except OSError:
            pass
        return self._first_answers.setdefault(address, answer) == "accepted" and answer == "refused"
