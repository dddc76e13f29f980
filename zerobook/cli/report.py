"""``zerobook runlog report RUN``: the logbook as one HTML page that needs nothing else, and as Markdown."""

from __future__ import annotations

import re
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from zerobook.cli.arguments import Parser
from zerobook.runlog.history import History, folder_of
from zerobook.runlog.report import render, write
from zerobook.runlog.writer import EVENTS
from zerobook.utils.terminal import say

SECONDS = 15
"""Seconds after which the page of --watch loads itself again."""


def report(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code."""
    parser = Parser("zerobook runlog report", description=__doc__)
    parser.add_argument("run", help="a run's output_dir")
    parser.add_argument(
        "--watch", action="store_true", help=f"serve the page on localhost, rendered every {SECONDS} s as the run goes on"
    )
    parser.add_argument("--port", type=int, default=8765, help="of --watch")
    known = parser.parse_args(arguments)
    if known.watch:
        return _serve(known.run, known.port)
    page, markdown = write(known.run)
    say(f"written: {page} and {markdown}")
    return 0


def _serve(run: str, port: int) -> int:
    folder = folder_of(run)
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(PageHandler, folder))
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
    return 0


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
