"""A Slurm cluster on simulated hosts: Slurm's own daemons, and its commands to submit and look at jobs.

The first host has the controller, each host has a node's daemon, and all share one munge daemon, which signs their messages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.harness import SETTINGS
from tests.nodes.hosts import Host, Network, missing

CONFIGURATION = """\
ClusterName=zerobook
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until the credentials of its last start have expired, by default 2 minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
# A task is bound to the cores that its step asks for, as many clusters do it.
TaskPlugin=task/affinity
TaskPluginParam=Cores
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
# Seconds between SIGTERM and SIGKILL; 30 by default.
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
"""States of a job that Slurm does not start again."""


def missing_slurm() -> str | None:
    """Return why no Slurm can be started here; None if it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(tool, path=path) is None]
    if absent:
        return f"a Slurm cluster needs {', '.join(absent)}: install slurm-wlm and munge"
    return missing()


class Cluster:
    """Slurm on two hosts, ``hosta`` and ``hostb``. Use it as a context manager."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._network = Network(folder)
        self.hosts: list[Host] = []
        self._jobs: list[str] = []

    def __enter__(self) -> Cluster:
        self.hosts = self._network.__enter__()
        try:
            self._start()
        except BaseException:
            self._network.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # Every process of a namespace is killed: daemons, steps of jobs and what they have started.
        self._network.__exit__()

    def _start(self) -> None:
        configuration = self.folder / "etc"
        configuration.mkdir()
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs={os.cpu_count()}" for host in self.hosts]
        content = CONFIGURATION.format(controller=self._controller(), folder=self.folder, nodes="\n".join(nodes))
        (configuration / "slurm.conf").write_text(content)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        # munged refuses a key that others may read.
        key.chmod(0o400)
        for host in self.hosts:
            (self.folder / f"spool.{host.name}").mkdir()
            # Slurm's programs look for their configuration there, also those of a job without its user's environment.
            host.prepare = f"mkdir -p /etc/slurm && mount --bind {configuration} /etc/slurm"
        self._start_munge(key)
        # In the foreground, so that what a daemon says is in a file, and its process is known.
        self._daemon(self.hosts[0], "slurmctld", "-D", "-c")
        for host in self.hosts:
            self._daemon(host, "slurmd", "-D", "-N", host.name)
        self.until(lambda: self.states() == {host.name: "idle" for host in self.hosts}, 60)

    def _controller(self) -> str:
        return f"{self.hosts[0].name}({self.hosts[0].address})"

    def _start_munge(self, key: Path) -> None:
        files = {"key-file": key}
        files |= {f"{name}-file": self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}
        options = [f"--{name}={file}" for name, file in files.items()]
        socket = self.folder / "munge.socket"
        self._daemon(self.hosts[0], "munged", "--foreground", "--force", f"--socket={socket}", *options)
        self.until(socket.exists, 20)

    def _daemon(self, host: Host, *line: str) -> None:
        with (self.folder / f"{line[0]}.{host.name}.log").open("wb") as log:
            host.start(line, environment={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}, output=log)

    def command(self, *line: str, environment: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands on the first host; return what it prints."""
        variables = dict(os.environ) | (environment or {})
        words = self.hosts[0].command(line)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=variables, cwd=cwd)
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)}: {done.stderr.strip()}")
        return done.stdout

    def submit(
        self, script: str, arguments: Sequence[str], options: Sequence[str], environment: dict[str, str], cwd: Path
    ) -> str:
        """Submit a batch script from the folder ``cwd``; return the number of the job."""
        line = ["sbatch", "--parsable", *options, script, *arguments]
        job = self.command(*line, environment=SETTINGS | environment, cwd=cwd).strip()
        self._jobs.append(job)
        return job

    def jobs(self, number: str) -> list[dict[str, str]]:
        """Return what Slurm says of a job, or of each task of a job array: ``JobState``, ``Restarts`` and so on."""
        lines = self.command("scontrol", "--oneliner", "show", "job", number).splitlines()
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job that is no array."""
        (job,) = self.jobs(number)
        return job

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]

    def states(self) -> dict[str, str]:
        """Return node -> state."""
        try:
            lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except RuntimeError:
            # The controller does not listen yet.
            return {}
        return dict(line.split() for line in lines)

    def clear(self) -> None:
        """Cancel all jobs, wait until nothing of them runs, and let all nodes take jobs."""
        for job in self._jobs:
            # A job that has ended may be forgotten already.
            subprocess.run(self.hosts[0].command(["scancel", "--quiet", job]), capture_output=True, timeout=60, check=False)
        self._jobs.clear()
        for host in self.hosts:
            if "drain" in self.states()[host.name]:
                self.command("scontrol", "update", f"NodeName={host.name}", "State=RESUME")
        self.until(lambda: set(self.states().values()) == {"idle"}, 120)

    def until(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Wait for ``condition`` and return its result; fail with what the daemons said."""
        deadline = time.monotonic() + seconds
        while True:
            result = condition()
            if result:
                return result
            if time.monotonic() > deadline:
                logs = [f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in self.folder.glob("*.log")]
                raise AssertionError(f"not within {seconds:.0f} s; nodes: {self.states()}\n" + "\n".join(logs))
            time.sleep(0.3)
