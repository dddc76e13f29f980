"""``zerobook runlog report RUN --watch``: the logbook's page, served on this machine and made anew as the run goes on."""

from __future__ import annotations

import re
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from zerobook.runlog.history import History
from zerobook.runlog.report import render
from zerobook.runlog.writer import EVENTS

SECONDS = 15
"""Seconds after which the page of --watch loads itself again."""


def serve(folder: Path, port: int) -> None:
    """Serve the page of the runlog in ``folder`` until Ctrl-C."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(PageHandler, folder))
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


_LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Host names that are answered. Another site can give its own name this address (DNS rebinding) and then read the logbook."""


def _host(header: str) -> str:
    """Return the name in a Host header without the port, which a tunnel may change."""
    return header.rpartition(":")[0].lower() if re.search(r":\d*$", header) else header.lower()


class PageHandler(BaseHTTPRequestHandler):
    """Serves the page of a run, rendered again when the log has grown."""

    _made: dict[Path, tuple[int, bytes]] = {}

    def __init__(self, folder: Path, *args: Any, **kwargs: Any):
        self.folder = folder
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if _host(self.headers.get("Host", "")) not in _LOCAL:
            self.send_error(421, "Open it as http://localhost")
            return
        if self.path not in ("/", "/index.html"):
            self.send_error(404)
            return
        size = (self.folder / EVENTS).stat().st_size
        if self._made.get(self.folder, (-1,))[0] != size:
            self._made[self.folder] = (size, render(History.read(self.folder), refresh=SECONDS).encode())
        page = self._made[self.folder][1]
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *args: Any) -> None:
        """Print nothing about requests."""
