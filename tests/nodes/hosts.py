"""Simulated hosts on one machine: network namespaces on a bridge, each with a host name, an /etc/hosts and a link of its own.

A link can be cut, mended and slowed, and a host can be killed with all its processes. Needs root, `ip`, `tc` and `unshare`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

NETWORK = "10.213.7"
PREFIX = "zb"
"""Of the names of namespaces; the id of the process that made them follows."""
CLOCK = """
import time
real = time.time


def shifted():
    with open({file!r}) as ahead:
        return real() + float(ahead.read() or 0)


time.time = shifted
"""


def missing() -> str | None:
    """Return why hosts cannot be simulated here; None if they can."""
    tools = ("ip", "tc", "nsenter", "unshare", "mount")
    absent = [tool for tool in tools if shutil.which(tool, path=_path()) is None]
    if absent:
        return f"simulated hosts need {', '.join(absent)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "simulated hosts need root, for network namespaces"
    probe = f"zb-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


@dataclass
class Host:
    """A simulated host.

    ``address`` is its IPv4 address; ``namespace`` its network namespace. ``disks`` are folders that are a disk of this host's
    own, with their bytes, and ``prepare`` is a shell command that fills them. ``versions`` are packages that have another
    version there. They, and the clock, are those of Python programs alone.
    """

    name: str
    namespace: str
    address: str
    hosts_file: Path
    processes: list[subprocess.Popen] = field(default_factory=list)
    disks: dict[Path, int] = field(default_factory=dict)
    prepare: str = "true"
    versions: dict[str, str] = field(default_factory=dict)

    def start(
        self,
        line: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: IO | None = None,
    ) -> subprocess.Popen:
        """Start a command on this host, in a session of its own."""
        environment = dict(environment or {})
        environment["PYTHONPATH"] = f"{self._injected()}:{environment.get('PYTHONPATH', '')}"
        process = subprocess.Popen(
            self.command(line), env=dict(os.environ) | environment, cwd=cwd, stdout=output,
            stderr=subprocess.STDOUT if output else None, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def command(self, line: Sequence[str]) -> list[str]:
        """Return the command that runs ``line`` on this host."""
        mounts = [f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))}" for disk, size in self.disks.items()]
        inside = " && ".join(['hostname "$1"', 'mount --bind "$2" /etc/hosts', *mounts, self.prepare, "shift 2", 'exec "$@"'])
        # `ip netns exec` would mount another /sys, without the cgroups that a daemon of Slurm looks for.
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", inside, "sh", self.name, str(self.hosts_file), *line]

    def set_clock(self, ahead: float) -> None:
        """Set the clock so many seconds ahead, also of programs that run."""
        self._clock.write_text(str(ahead))

    @property
    def _clock(self) -> Path:
        return self.hosts_file.with_suffix(".clock")

    def _injected(self) -> Path:
        """Make what Python programs of this host find first: another clock, and other versions."""
        folder = self.hosts_file.with_suffix(".injected")
        folder.mkdir(exist_ok=True)
        if not self._clock.exists():
            self.set_clock(0)
        (folder / "sitecustomize.py").write_text(CLOCK.format(file=str(self._clock)))
        for name, version in self.versions.items():
            facts = folder / f"{name}-{version}.dist-info"
            facts.mkdir(exist_ok=True)
            (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder

    def pids(self) -> list[int]:
        """Return the processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """Kill every process on this host, as a loss of power would."""
        _kill_all(self.namespace)
        for process in self.processes:
            process.wait()

    def ranks(self) -> dict[int, int]:
        """Return rank -> process id of the training processes on this host."""
        found = {}
        for pid in self.pids():
            try:
                process = psutil.Process(pid)
                environment, parent = process.environ(), process.parent()
                if "RANK" in environment and "LOCAL_RANK" in environment and parent and "RANK" not in parent.environ():
                    found[int(environment["RANK"])] = pid
            except psutil.Error:
                continue
        return found

    def cut(self) -> None:
        """Cut the link to the other hosts."""
        _ip("link", "set", self._port, "down", inside=self._switch)

    def mend(self) -> None:
        """Mend a cut link."""
        _ip("link", "set", self._port, "up", inside=self._switch)

    def slow(self, rate: str) -> None:
        """Limit what this host sends to ``rate``, such as ``10mbit``."""
        words = ["replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        subprocess.run(["ip", "netns", "exec", self.namespace, "tc", "qdisc", *words], check=True, capture_output=True)

    def sent(self) -> int:
        """Return the bytes that this host has sent to other hosts."""
        return json.loads(_ip("-s", "-j", "link", "show", "eth0", inside=self.namespace))[0]["stats64"]["tx"]["bytes"]

    @property
    def _switch(self) -> str:
        return self.namespace.rsplit("-", 1)[0] + "-sw"

    @property
    def _port(self) -> str:
        return f"p-{self.name}"


class Network:
    """Hosts ``a``, ``b``, ... joined by a switch. Use it as a context manager."""

    def __init__(self, folder: Path, count: int = 2):
        self._prefix = f"{PREFIX}{os.getpid()}"
        names = [f"host{chr(ord('a') + number)}" for number in range(count)]
        addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self.hosts = []
        for name, address in zip(names, addresses, strict=True):
            file = folder / f"{name}.hosts"
            lines = ["127.0.0.1 localhost", *(f"{there} {called}" for called, there in zip(names, addresses, strict=True))]
            file.write_text("\n".join(lines) + "\n")
            self.hosts.append(Host(name, f"{self._prefix}-{name}", address, file))

    def __enter__(self) -> list[Host]:
        _remove_leftovers()
        switch = f"{self._prefix}-sw"
        _ip("netns", "add", switch)
        _ip("link", "add", "br0", "type", "bridge", inside=switch)
        _ip("link", "set", "br0", "up", inside=switch)
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            _ip("link", "add", "eth0", "netns", host.namespace, "type", "veth", "peer", "name", host._port, "netns", switch)
            _ip("link", "set", host._port, "master", "br0", "up", inside=switch)
            _ip("addr", "add", f"{host.address}/24", "dev", "eth0", inside=host.namespace)
            _ip("link", "set", "eth0", "up", inside=host.namespace)
            _ip("link", "set", "lo", "up", inside=host.namespace)
        return self.hosts

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.kill()
        for namespace in (*(host.namespace for host in self.hosts), f"{self._prefix}-sw"):
            _ip("netns", "del", namespace)


def _kill_all(namespace: str) -> None:
    """Kill the processes of a network namespace, also those that they start meanwhile."""
    deadline = time.monotonic() + 20
    while True:
        pids = [int(pid) for pid in _ip("netns", "pids", namespace).split()]
        if not pids or time.monotonic() > deadline:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _remove_leftovers() -> None:
    """Remove the hosts of test processes that were killed before they could do it."""
    for line in _ip("netns", "list").splitlines():
        namespace = re.match(rf"{PREFIX}(\d+)-\w+", line)
        if namespace and not psutil.pid_exists(int(namespace[1])):
            _kill_all(namespace[0])
            _ip("netns", "del", namespace[0])


def _ip(*words: str, inside: str | None = None) -> str:
    line = ["ip", *(["-n", inside] if inside else []), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=dict(os.environ) | {"PATH": _path()})
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {done.stderr.strip()}")
    return done.stdout


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
