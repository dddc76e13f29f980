"""scripts/slurm/train.sbatch with a stub of srun that starts the tasks of a job on simulated hosts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT, SETTINGS
from tests.nodes.hosts import Host, Network, missing
from zerobook.runlog.writer import read

NEEDS = missing()
pytestmark = [pytest.mark.nodes, pytest.mark.launch, pytest.mark.full,
              pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS))]  # fmt: skip


def stubs(folder: Path, hosts: list[Host]) -> Path:
    """Write srun, which starts its command on every host and sends signals on, and scontrol."""
    starts = [
        f'SLURM_NODEID={number} setsid {shlex.join(host.command([]))} "${{line[@]}}" & tasks+=($!)'
        for number, host in enumerate(hosts)
    ]
    names = "\\n".join(host.name for host in hosts)
    files = {
        "srun": ['line=("${@:2}") tasks=()', *starts,
                 "trap 'for task in \"${tasks[@]}\"; do kill -USR1 -- -$task; done' USR1",
                 "code=0", 'for task in "${tasks[@]}"; do',
                 '  while wait "$task"; status=$?; kill -0 "$task" 2>/dev/null; do :; done', "  ((status)) && code=$status",
                 "done", "exit $code"],
        "scontrol": [f'echo "$@" >> {folder / "scontrol.log"}', f"if [[ $1 == show ]]; then printf '{names}\\n'; fi"],
    }  # fmt: skip
    for name, lines in files.items():
        (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (folder / name).chmod(0o755)
    return folder


def submit(folder: Path, hosts: list[Host], tiny: Path, steps: int) -> tuple[subprocess.Popen, Path]:
    """Start the batch script, as Slurm does on the first node; return it and the run's folder."""
    output, config = folder / "run", folder / "config.yaml"
    config.write_text(yaml.safe_dump({
        "model_name_or_path": str(tiny / "llama"), "train_file": str(tiny / "text.txt"), "format": "text", "block_size": 64,
        "per_device_train_batch_size": 1, "max_train_steps": steps, "save_steps": 1000, "logging_steps": 5,
        "output_dir": str(output), "cache_dir": str(folder / "cache"),
    }))  # fmt: skip
    path = f"{stubs(folder, hosts)}:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    job = {"SLURM_JOB_NODELIST": "host[a-b]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "4711", "PROCESSES_PER_NODE": "1"}
    line = ["bash", "scripts/slurm/train.sbatch", "recipes/causal_lm.py", str(config), "accelerate_configs/ddp.yaml"]
    with (folder / "job.log").open("wb") as log:
        environment = dict(os.environ) | SETTINGS | job | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    return process, output


def test_a_job_on_two_nodes_trains(tmp_path, tiny):
    with Network(tmp_path) as hosts:
        job, output = submit(tmp_path, hosts, tiny, steps=10)
        code = job.wait(180)
    said = (tmp_path / "job.log").read_text()
    assert code == 0, said[-4000:]
    assert len(read(output / "runlog" / "steps.jsonl")) == 10 and "2 x cpu over gloo" in said
    assert "requeue" not in (tmp_path / "scontrol.log").read_text()


def test_a_warning_saves_on_all_nodes_and_queues_the_job_again(tmp_path, tiny):
    with Network(tmp_path) as hosts:
        job, output = submit(tmp_path, hosts, tiny, steps=100_000)
        steps, end = output / "runlog" / "steps.jsonl", time.monotonic() + 120
        while not (steps.exists() and len(read(steps)) > 5):
            assert job.poll() is None and time.monotonic() < end, (tmp_path / "job.log").read_text()[-4000:]
            time.sleep(0.3)
        os.kill(job.pid, signal.SIGUSR1)
        code = job.wait(120)
    said = (tmp_path / "job.log").read_text()
    assert code == 0 and "SIGUSR1: saved at step" in said, said[-4000:]
    assert "requeue 4711" in (tmp_path / "scontrol.log").read_text()
    assert list((output / "checkpoints").glob("step-*"))
