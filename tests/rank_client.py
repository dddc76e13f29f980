"""Starts tests/rank_server.py and asks it for launches; says which launches may be forked."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rank_server import FILLER, ROOM, ROOT, Process, ignored_signals, receive, send

OWN = ("ZEROBOOK_", "PYTEST_")
"""Variables that no library reads."""
AT_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "LANG", "LC_", "HOME", "PATH")
"""Variables that act before Python code runs."""


class Launch(Process):
    """A launcher, seen by the process that asked the server for it; ``stdout`` is the pipe of its output."""

    def __init__(self, args: Sequence[str], pid: int, status: int, stdout: int):
        super().__init__(args, pid)
        self._status = status
        self._stdout = stdout

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Read the output to its end, and wait. A second call continues where a timeout interrupted the first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        said = self.__dict__.setdefault("_said", bytearray())
        while self._stdout >= 0:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            if part := os.read(self._stdout, 1 << 16):
                said += part
            else:
                os.close(self._stdout)
                self._stdout = -1
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return said.decode(errors="replace"), None

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            answer = os.read(self._status, 4)
            self.returncode = struct.unpack("i", answer)[0] if answer else -signal.SIGKILL
            os.close(self._status)
        return self.returncode


class Server:
    """The server's end that tests see; starts it."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = dict(environment)
        early = {key: value for key, value in environment.items() if key.startswith(AT_START)}
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.rank_server import serve; serve({theirs.fileno()})"
        started = early | {FILLER: "x" * ROOM["env"]}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-X", "x" * ROOM["arg"], "-c", code], cwd=ROOT, env=started, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._said,
        )  # fmt: skip
        theirs.close()
        self._socket = ours
        send(ours, {"environment": self.environment})
        self._imported = self._answer()["environment"]

    def fits(self, line: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether such processes may be forked: no variable differs that a library may have read at its import."""
        known = (self.environment, self._imported)  # some libraries set variables, also in the process that asks
        names = {name for name in (*environment, *self.environment) if not name.startswith(OWN)}
        same = all(environment.get(name) in [variables.get(name) for variables in known] for name in names)
        sizes = {"arg": line, "env": [f"{name}={value}" for name, value in environment.items()]}
        # the launcher adds variables for its ranks
        return same and all(sum(len(os.fsencode(word)) + 1 for word in sizes[area]) < 3 * ROOM[area] / 4 for area in ROOM)

    def launch(self, line: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Launch:
        """Start ``python -m accelerate.commands.launch ...``, or ``python [-u] SCRIPT ...``, with both outputs in one pipe.

        Like a started process, it ignores the signals that this one ignores.
        """
        read, write = os.pipe()
        try:
            return self._start(line, cwd, environment, [0, write, write], read)
        finally:
            os.close(write)

    def run(
        self, line: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Do as `launch` and wait; the outputs are kept apart. Raises `subprocess.TimeoutExpired`."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self._start(line, cwd, environment, [0, out.fileno(), err.fileno()])
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                raise
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(line, process.wait(), out.read().decode(), err.read().decode())

    def _start(
        self, line: Sequence[str], cwd: Path, environment: Mapping[str, str], files: Sequence[int], output: int = -1
    ) -> Launch:
        status, told = os.pipe()
        order = {"line": list(line), "cwd": str(cwd), "environment": dict(environment), "ignored": ignored_signals()}
        send(self._socket, order, [*files, told])
        os.close(told)
        return Launch(line, self._answer()["pid"], status, output)

    def _answer(self) -> dict[str, Any]:
        answer, _ = receive(self._socket)
        if not answer:
            self._said.seek(0)
            raise RuntimeError(f"the rank server has ended, with {self.process.wait()}:\n{self._said.read()[-3000:]}")
        return answer
