"""Find out whether the process of another rank has ended or only hangs.

Each rank listens at a port. The operating system refuses connections to this port when the process has ended. While the process
hangs, the system still makes them, without any of its threads.
"""

import errno
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

# Seconds to wait for connections, at most. None comes if a host or its link is gone.
CONNECT_S = 0.5
# Largest number of connections that are made at once. Many systems allow a process 1024 open files.
MOST_CONNECTIONS = 256
# Error numbers of a connection that is still being made.
UNANSWERED = (errno.EINPROGRESS, errno.EALREADY)
# An address and a port.
Endpoint = tuple[str, int]
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen() -> socket.socket:
    """Listen at a free port, and return the socket.

    The address is the one from which this host reaches the first host. If it reaches none, the address is that of localhost.
    """
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
        # Address -> the error number of the first connection to it; 0 if it was made.
        self._first_answers: dict[str, int] = {}

    def find_ended(self, silences: Mapping[Endpoint, float]) -> set[Endpoint]:
        """Return the endpoints whose process has certainly ended.

        Args:
            silences: endpoint -> seconds without a sign of its process.
        """
        endpoints = []
        for endpoint, silence in silences.items():
            address, port = endpoint
            # Try each address once while its processes run. If a firewall refuses that connection, later refusals say nothing.
            if port and (silence >= self.patience or address not in self._first_answers):
                endpoints.append(endpoint)
        ended = set()
        # The other endpoints are tried at the next call.
        for endpoint, answer in _connect(endpoints[:MOST_CONNECTIONS]).items():
            first_answer = self._first_answers.setdefault(endpoint[0], answer)
            if first_answer == 0 and answer == errno.ECONNREFUSED:
                ended.add(endpoint)
        return ended


def _connect(endpoints: Sequence[Endpoint]) -> dict[Endpoint, int]:
    """Connect to all endpoints at once. Return endpoint -> error number: 0 for a connection, `UNANSWERED` for no answer."""
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
                # The first call begins to connect. Each later call returns the state of this connection.
                answers[endpoint] = connection.connect_ex(endpoint)
                if answers[endpoint] not in UNANSWERED:
                    del pending[endpoint]
            # Look at the clock only after the calls: if this thread has waited for a core, answers may have come meanwhile.
            if not pending or time.monotonic() > deadline:
                return answers
            time.sleep(0.01)
