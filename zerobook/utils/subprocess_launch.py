"""Start a script through ``accelerate launch``, with a time limit, and end all its processes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# Exit status of a command that exceeded its time limit, as in timeout(1).
TIMED_OUT = 124
# Seconds between two looks at the workers of a command. A look reads the list of all processes, which takes time.
POLL_SECONDS = 0.5


def command(launcher: Sequence[str], ranks: int, script: Path, *words: object) -> list[str]:
    """Return the command line that launches a script.

    Args:
        launcher: flags of ``accelerate launch``, such as ``--config_file FILE`` for a strategy file.
        words: the arguments of the script.
    """
    line = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", str(ranks)]
    if "--config_file" not in launcher:
        line += ["--num_machines", "1"]
    # With port 0, the system chooses a free port.
    line += ["--main_process_port", "0", str(script)]
    return [*line, *map(str, words)]


def flags(values: Mapping[str, object]) -> list[str]:
    """Return ``{"seed": 1}`` as ``--seed 1``."""
    words = []
    for key, value in values.items():
        words += [f"--{key}", str(value)]
    return words


def run(
    line: Sequence[str], limit: float, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, str]:
    """Run a command for at most ``limit`` seconds. Return its exit status (`TIMED_OUT` if it was stopped) and its output.

    On a CPU, each rank gets one thread, because ranks share the cores. On a GPU, the run chooses the number of threads, since
    an optimizer in host memory needs several.

    Args:
        environment: variables that are added to those of this process.
    """
    environment = dict(environment or {})
    defaults = {"TOKENIZERS_PARALLELISM": "false"}
    if not runs_on_gpu(os.environ | environment):
        defaults["OMP_NUM_THREADS"] = "1"
    # The output of a command that is killed may end inside a character.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            line, cwd=cwd, env=os.environ | defaults | environment, stdout=output, stderr=subprocess.STDOUT
        )
        workers: list[psutil.Process] = []
        deadline = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(psutil.NoSuchProcess):
                    children = psutil.Process(process.pid).children(recursive=True)
                    # The workers of a launcher that has crashed get another parent, so keep the earlier list of them.
                    if children:
                        workers = children
                time.sleep(POLL_SECONDS)
            code = process.poll()
            if code is None:
                code = TIMED_OUT
        finally:
            kill_family(process, workers)
        output.seek(0)
        return code, output.read()


def runs_on_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether a run with these environment variables uses a GPU."""
    from zerobook.utils.environment import is_true

    # torch takes seconds to import, so look at the variables first.
    if environment.get("CUDA_VISIBLE_DEVICES") == "" or is_true(environment.get("ACCELERATE_USE_CPU")):
        return False
    import torch

    return torch.cuda.is_available()


def kill_family(process: subprocess.Popen, workers: Sequence[psutil.Process] = ()) -> None:
    """Kill the processes of the launcher and its workers that still run.

    They are killed one by one, since torch's elastic agent gives each worker its own session and process group.

    Args:
        workers: workers that were seen before the launcher ended.
    """
    family = [*workers]
    # List the children before anything is killed, since they get another parent then.
    with suppress(psutil.NoSuchProcess):
        family += [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def last_error(text: str) -> str:
    """Return the line of a failed run's output that names the error, at most 300 characters. torchrun's summary is skipped."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
    # Use a line of code in a traceback, such as "raise ValueError(text)", only if no other line names an error.
    messages = [line for line in lines if not line.startswith("raise ")] or lines
    if not messages:
        return "it said nothing of an error"
    return messages[0][:300]
