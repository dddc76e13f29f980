"""Whether the process of another rank is still there. The system answers for it: none of that process's threads has to run.

Each rank listens at a port. The system refuses connections to it once the process has ended, and makes them while it hangs.
"""

import errno
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

CONNECT_S = 0.5
"""Seconds for connections, at most: a host may be gone, or its link."""
MOST_CONNECTIONS = 256
"""Connections that are made at once. Many systems allow a process 1024 open files."""
UNANSWERED = (errno.EINPROGRESS, errno.EALREADY)
"""Error numbers of a connection that is still being made."""
Endpoint = tuple[str, int]
"""An address and a port."""
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen() -> socket.socket:
    """Listen at a free port of the address from which this host reaches the first one. If none does, the port is local."""
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
    _listeners.add(listener)
    return listener


def _close_listeners() -> None:
    for listener in list(_listeners):
        listener.close()


# A child that is forked, such as a worker of the data loader, would keep the port open after this process has ended. Programs
# that are started inherit no socket of Python.
os.register_at_fork(after_in_child=_close_listeners)


class Presence:
    """Looks for processes that have been silent for ``patience`` seconds."""

    def __init__(self, patience: float):
        self.patience = patience
        # Address -> its first answer, an error number.
        self._first_answers: dict[str, int] = {}

    def find_ended(self, silences: Mapping[Endpoint, float]) -> set[Endpoint]:
        """Return the endpoints whose process has certainly ended.

        Args:
            silences: endpoint -> seconds without a sign of its process.
        """
        asked = []
        for endpoint, silence in silences.items():
            address, port = endpoint
            # Each address is tried while all is well: if a firewall refuses, too, a refusal says nothing.
            if port and (silence >= self.patience or address not in self._first_answers):
                asked.append(endpoint)
        ended = set()
        # Addresses beyond these come with the next call.
        for endpoint, answer in _connect(asked[:MOST_CONNECTIONS]).items():
            if self._first_answers.setdefault(endpoint[0], answer) == 0 and answer == errno.ECONNREFUSED:
                ended.add(endpoint)
        return ended


def _connect(endpoints: Sequence[Endpoint]) -> dict[Endpoint, int]:
    """Connect to all endpoints at once. Return an error number for each: 0 for a connection, `UNANSWERED` for no answer."""
    answers = {}
    with ExitStack() as stack:
        pending = {}
        for endpoint in endpoints:
            family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
            pending[endpoint] = stack.enter_context(socket.socket(family))
            pending[endpoint].setblocking(False)
        deadline = time.monotonic() + CONNECT_S
        while True:
            for endpoint, connection in list(pending.items()):
                # The first call begins to connect. The next ones tell what has become of it.
                answers[endpoint] = connection.connect_ex(endpoint)
                if answers[endpoint] not in UNANSWERED:
                    del pending[endpoint]
            # Look at the clock only after the calls: this thread may have waited for a core.
            if not pending or time.monotonic() > deadline:
                return answers
            time.sleep(0.01)
