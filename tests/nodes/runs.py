"""Runs on simulated hosts, one launcher each, and what becomes of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import ROOT, SETTINGS
from tests.nodes.hosts import Host
from zerobook.launch import elastic
from zerobook.runlog.jsonl import stream

PORT = "29500"
HANG_S = 6.0
"""``--hang_timeout`` of the tests; users have minutes."""


@dataclass
class NodeRun:
    """A run with one launcher on every host.

    ``ended`` has the seconds after `fault` and the exit status of each launcher that has ended.
    """

    hosts: list[Host]
    output: Path
    line: Callable[[int], list[str]]
    per_host: int
    ended: dict[str, tuple[float, int]] = field(default_factory=dict)
    faulted: float = 0.0

    @classmethod
    def begin(
        cls,
        hosts: list[Host],
        folder: Path,
        tiny: Path,
        strategy: str,
        per_host: int,
        *,
        restarts: int = 0,
        least: int | None = None,
        recipe: str = "causal_lm",
        **flags: object,
    ) -> NodeRun:
        """Start a recipe on all hosts: a long run, with a checkpoint every 10 steps. Flags that are None are left out.

        Args:
            restarts: of c10d's agents; 0 launches without them.
            least: the fewest hosts, for ``zerobook launch``.
        """
        output = folder / "run"
        given = {
            "model_name_or_path": tiny / "llama", "train_file": tiny / "text.txt", "format": "text", "block_size": 64,
            "per_device_train_batch_size": 1, "max_train_steps": 100_000, "num_train_epochs": 1000, "logging_steps": 5,
            "save_steps": 10, "save_total_limit": 2, "output_dir": output, "hang_timeout": HANG_S,
            "resume_from_checkpoint": "auto", "cache_dir": folder / "cache", **flags,
        }  # fmt: skip
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        program = ["zerobook.cli.main", "launch", "--min_machines", str(least)] if least else ["accelerate.commands.launch"]
        again = ["--rdzv_backend", "c10d", "--max_restarts", str(restarts), "--monitor_interval", "0.5"] if restarts else []

        def line(machine: int) -> list[str]:
            return [
                sys.executable, "-m", *program, "--config_file",
                str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), "--num_machines", str(len(hosts)), "--num_processes",
                str(per_host * len(hosts)), "--machine_rank", str(machine), "--main_process_ip", hosts[0].address,
                "--main_process_port", PORT, *again, str(ROOT / "recipes" / f"{recipe}.py"), *words,
            ]  # fmt: skip

        run = cls(hosts, output, line, per_host)
        for machine in range(len(hosts)):
            run.launch(machine)
        return run

    def launch(self, machine: int) -> None:
        """Start the launcher of a host, for the first time or after the host came back."""
        host = self.hosts[machine]
        environment = SETTINGS | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | elastic.OWN_STORE
        with self.log(host).open("ab") as output:
            host.start(self.line(machine), environment=environment, cwd=self.output.parent, output=output)
        self.ended.pop(host.name, None)

    def log(self, host: Host) -> Path:
        """The file with all output of a host's launcher and ranks."""
        return self.output.parent / f"{host.name}.log"

    def said(self, host: Host) -> str:
        return self.log(host).read_text(errors="replace")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        file = self.output / "runlog" / "events.jsonl"
        return [event for event in stream(file) if event["type"] in kinds] if file.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        file = self.output / "runlog" / "steps.jsonl"
        return list(stream(file)) if file.exists() else []

    def step(self) -> int:
        """The last step in the runlog."""
        steps = self.steps()
        return steps[-1]["step"] if steps else 0

    @property
    def world_size(self) -> int:
        return self.per_host * len(self.hosts)

    def until(self, done: Callable[[], Any], seconds: float) -> Any:
        """Wait for ``done``; return its result, or fail with what the hosts said."""
        end = time.monotonic() + seconds
        while not (found := done()):
            if time.monotonic() > end or (not self.faulted and self.ended):
                said = "\n".join(f"--- {host.name}\n{self.said(host)[-3000:]}" for host in self.hosts)
                raise AssertionError(f"not within {seconds:.0f} s; ended: {self.ended}\n{said}")
            self.look()
            time.sleep(0.1)
        return found

    def look(self) -> None:
        """Take down which launchers have ended."""
        for host in self.hosts:
            code = host.processes[-1].poll()
            if code is not None and host.name not in self.ended:
                self.ended[host.name] = (time.monotonic() - self.faulted, code)

    def trains(self, steps: int = 20, seconds: float = 120) -> None:
        """Wait until the run has done some steps and saved."""
        self.until(lambda: self.step() >= steps and self.events("checkpoint"), seconds)

    def fault(self, apply: Callable[[], Any]) -> None:
        """Apply a fault, and begin to count seconds."""
        self.faulted = time.monotonic()
        apply()

    def rank(self, number: int) -> int:
        """Return the process id of a rank."""
        return next(pid for host in self.hosts for rank, pid in host.ranks().items() if rank == number)

    def signal(self, rank: int, signal: int) -> None:
        os.kill(self.rank(rank), signal)
