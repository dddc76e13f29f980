"""Simulated hosts themselves: nothing of them stays behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.nodes.hosts import Network, missing

NEEDS = missing()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.launch,
    pytest.mark.full,
    pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS)),
]
KILLED_TEST = """
import os, signal, sys
from pathlib import Path
from tests.nodes.hosts import Network

hosts = Network(Path(sys.argv[1])).__enter__()
process = hosts[0].start(["sleep", "600"], output=open(os.devnull, "wb"))
print(process.pid, hosts[0].namespace, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_of_a_killed_test_are_removed_by_the_next_one(tmp_path):
    line = [sys.executable, "-c", KILLED_TEST, str(tmp_path)]
    killed = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    pid, namespace = killed.stdout.split()
    assert psutil.pid_exists(int(pid))
    assert namespace in namespaces()
    (tmp_path / "next").mkdir()
    with Network(tmp_path / "next"):
        assert namespace not in namespaces()
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
