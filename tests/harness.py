"""Starts recipes as a user does, with ``accelerate launch``, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.rank_client import Launch, Server
from zerobook.checkpoint import store
from zerobook.launch.resolve import Hardware
from zerobook.runlog.jsonl import stream
from zerobook.training.recipe_file import recipe_class
from zerobook.training.run import run
from zerobook.utils.reading import file_digest
from zerobook.utils.subprocess_launch import kill_family

ROOT = Path(__file__).resolve().parents[1]
SPY = ROOT / "tests" / "distributed" / "spy.py"
LIMIT_S = 240
"""A launch that hangs is killed; none comes near this."""
ALONE = ["--main_process_port", "0"]
REFUSED = -signal.SIGUSR1
"""Exit status of an ``accelerate launch`` whose command line the recipe refuses: the recipe ends it."""
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TWO_MACHINES = ["zero3_hpz"]
"""Strategy files that are launched as on two machines, by a launcher each: on one they do nothing of their own."""


def read_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint by names such as ``weight/PARAMETER``."""
    from zerobook.checkpoint.state import Reader

    reader = Reader(checkpoint)
    return {name: reader.read_tensor(name) for name in reader.index["pieces"]}


def make_staging(checkpoints: Path, step: int) -> Path:
    """Make the folder in which a checkpoint is written, with the files that every checkpoint must have, without content."""
    staging = store.staging_of(checkpoints, step)
    store.make_staging(staging)
    for name in ("config.json", "tensors.json", store.PROGRESS, "buffers.safetensors"):
        (staging / name).write_text("{}")
    return staging


@contextmanager
def staged(output: Path, step: int) -> Iterator[Path]:
    """Yield a folder that becomes the run's checkpoint of ``step``."""
    staging = make_staging(store.folder_of(output), step)
    yield staging
    store.publish(staging, step, {})


real = False
"""True for a test whose launches are ``accelerate launch`` itself."""
real_launches = 0
"""Launches of the test that runs, so far, that were not forked."""


def sampled(cases: Iterable[Any], *sample: Any) -> list[Any]:
    """Return cases for ``parametrize``: those of ``sample`` run always, the others only in the whole matrix."""
    return [case if case in sample else pytest.param(*_values(case), marks=pytest.mark.full) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


@dataclass
class Run:
    """A finished (or killed) launch and its output folder."""

    output: Path
    returncode: int = 0
    text: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> Run:
        self.steps = list(stream(self.output / "runlog" / "steps.jsonl"))
        self.events = list(stream(self.output / "runlog" / "events.jsonl"))
        return self

    def event(self, kind: str) -> dict[str, Any]:
        """The last event of that type."""
        return [e for e in self.events if e["type"] == kind][-1]

    @property
    def losses(self) -> list[float]:
        return [s["loss"] for s in self.steps]

    @property
    def norms(self) -> list[float]:
        return [s["grad_norm"] for s in self.steps]

    def state(self) -> dict[str, Any]:
        """All tensors of the newest checkpoint, by their names there."""
        from zerobook.checkpoint.store import folder_of, list_complete

        return read_tensors(list_complete(folder_of(self.output))[-1])


def command(
    strategy: str | list[str],
    processes: int,
    recipe: str,
    flags: dict[str, Any],
    through: Path | None = None,
    meeting: list[str] = ALONE,
) -> list[str]:
    """The command line. ``strategy`` is a file's stem in accelerate_configs/, a path, or launcher flags; ``through`` a script
    that runs the recipe; ``meeting`` says where the processes find each other."""
    if isinstance(strategy, list):
        launcher = strategy
    else:
        path = Path(strategy)
        launcher = ["--config_file", str(path if path.suffix else ROOT / "accelerate_configs" / f"{strategy}.yaml")]
    line = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", str(processes)]
    line += ["--num_machines", "1"] if isinstance(strategy, list) else []
    line += [
        *meeting,
        *([str(through)] if through else []),
        recipe if recipe.endswith(".py") else str(ROOT / "recipes" / f"{recipe}.py"),
    ]
    return [*line, *words_of(flags)]


def words_of(flags: dict[str, Any]) -> list[str]:
    """Return flags as on a command line. True is a flag without a value, and a list is one with several."""
    words = []
    for key, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words.append(f"--{key}")
        if value is not True:
            words += map(str, values)
    return words


def skip_without_op(strategy: str | list[str]) -> None:
    """Skip the test where ``strategy`` offloads to NVMe and this machine cannot compile DeepSpeed's op for that."""
    why = Hardware.detect().missing_ops.get("async_io") if "nvme" in str(strategy) else None
    if why:
        pytest.skip(f"not run: async_io cannot be compiled here: {why}")


def launch(
    strategy: str | list[str],
    processes: int,
    recipe: str,
    output: Path,
    *,
    spy: dict[str, Any] | None = None,
    through: Path | None = None,
    environment: dict[str, Any] | None = None,
    expect: int | None = 0,
    forked: bool | None = None,
    **flags: Any,
) -> Run:
    """Launch a recipe and wait for it.

    Args:
        spy: environment for tests/distributed/spy.py, which then wraps the recipe; ``{}`` to watch only.
        through: another script that wraps it.
        environment: variables besides; None takes one away.
        expect: the exit status to insist on; None takes any.
        forked: fork it from tests/rank_server.py where that makes no difference. None: unless the test that runs is in
            tests/conftest.py's `REAL`.
    """
    skip_without_op(strategy)
    through = SPY if spy is not None else through
    meetings = on_two_machines() if strategy in TWO_MACHINES else [ALONE]
    lines = [command(strategy, processes, recipe, {"output_dir": output, **flags}, through, meeting) for meeting in meetings]
    environment = os.environ | SETTINGS | (environment or {})
    environment |= {f"ZEROBOOK_SPY_{k.upper()}": v for k, v in (spy or {}).items()}
    environment = {key: str(value) for key, value in environment.items() if value is not None}
    hang = output / "hanging"
    process, *others = [start(line, environment, forked) for line in lines]
    if spy and "hang_at_step" in spy:
        deadline = time.monotonic() + LIMIT_S
        while not hang.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        kill_family(process)
        text, _ = process.communicate()
        assert hang.exists(), f"the run never reached step {spy['hang_at_step']}:\n{text[-3000:]}"
        hang.unlink()
        return Run(output, process.returncode, text).read()
    text, code = "", 0
    for launcher in (process, *others):
        if code:
            # The first machine's ranks are gone: those of the second would wait for them.
            kill_family(launcher)
        try:
            part, _ = launcher.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_family(launcher)
            text += launcher.communicate()[0]
            raise AssertionError(f"hung for {LIMIT_S} s: {shlex.join(lines[0])}\n{text[-3000:]}") from None
        text += part
        code = code or launcher.returncode
    if expect is not None:
        assert code == expect, f"exit {code}: {shlex.join(lines[0])}\n{text[-9000:]}"
    return Run(output, code, text).read()


@cache
def server(*variables: tuple[str, str]) -> Server:
    """Return the session's server of processes with these variables besides."""
    return Server(os.environ | SETTINGS | dict(variables))


def may_fork(forked: bool | None = None) -> bool:
    """Return whether launches may be forked at all, now. GPUs are for processes that start by themselves."""
    if forked is None:
        forked = not real
    return forked and "ZEROBOOK_REAL_LAUNCH" not in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def start(line: list[str], environment: dict[str, str], forked: bool | None = None) -> subprocess.Popen | Launch:
    """Start ``accelerate launch``; see `launch` for ``forked``."""
    if may_fork(forked) and server().fits(line, environment):
        return server().launch(line, ROOT, environment)
    global real_launches
    real_launches += 1
    return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alone(recipe: str, flags: dict[str, Any], variables: dict[str, str]) -> subprocess.CompletedProcess:
    """Run ``python recipes/RECIPE.py`` without a launcher."""
    line = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *words_of(flags)]
    environment = os.environ | SETTINGS | variables
    if may_fork() and server(*variables.items()).fits(line, environment):
        return server(*variables.items()).run(line, ROOT, environment, LIMIT_S)
    global real_launches
    real_launches += 1
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def run_here(
    recipe: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> tuple[int | str | None, str]:
    """Run a recipe that an error ends, in this process, as ``python RECIPE WORDS``. Return its exit status and its output."""
    monkeypatch.setattr(sys, "argv", [str(recipe), *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    # A rank ends itself without the end of its interpreter.
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        run(recipe_class(str(recipe)))
    output = capsys.readouterr()
    return ended.value.code, output.out + output.err


def on_two_machines() -> list[list[str]]:
    """Launcher flags of two machines, both of which are this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--machine_rank"]
    return [[*meeting, str(rank)] for rank in (0, 1)]


def seen(output: Path) -> dict[tuple[int, int, int], list[str]]:
    """Return the rows that the spy saw: (step, micro-batch, rank) -> hashes of the decoded rows that reached the model."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for file in sorted(output.glob("spy-*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "rows":
                found[(record["step"], record["micro"], record["rank"])] = record["hashes"]
    return found


def sequence(found: dict[tuple[int, int, int], list[str]], first: int, last: int) -> list[str]:
    """Hashes in run order over the steps ``first`` to ``last`` (counted from 1, inclusive)."""
    return [h for key in sorted(found) if first <= key[0] <= last for h in found[key]]


def calls(output: Path, rank: int = 0) -> dict[str, int]:
    """Return the counts of the spy on ``rank`` over the run: collectives by name, ``layer_forwards``, and most ``workers``."""
    return _last_calls(output, rank)["counts"]


def kinds(output: Path, rank: int = 0) -> set[tuple[str, str, str]]:
    """Return (collective, device type, dtype) of the tensors that ``rank`` handed to torch.distributed."""
    return {tuple(kind.split()) for kind in _last_calls(output, rank)["kinds"]}  # type: ignore[misc]


def timeouts(output: Path, rank: int = 0) -> list[float]:
    """Seconds that each process group of ``rank`` waits for its other ranks, at the end of the run."""
    return _last_calls(output, rank)["timeouts"]


def threads(output: Path, rank: int = 0) -> int:
    """Threads that ``rank`` computes with, at the end of the run."""
    return _last_calls(output, rank)["threads"]


def _last_calls(output: Path, rank: int) -> dict[str, Any]:
    records = [json.loads(line) for line in (output / f"spy-{rank}.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "calls"][-1]


def reseal(checkpoint: Path) -> None:
    """Let the manifest agree with files that a test has changed."""
    from zerobook.checkpoint import store

    manifest = json.loads((checkpoint / store.MANIFEST).read_text())
    for name, facts in manifest["files"].items():
        facts |= {"bytes": (checkpoint / name).stat().st_size, "xxh3_128": file_digest(checkpoint / name)}
    (checkpoint / store.MANIFEST).write_text(json.dumps(manifest))
    assert store.find_damage(checkpoint, thorough=True) is None


@contextmanager
def disk_of(folder: Path, size: str) -> Iterator[Path]:
    """Return a context in which ``folder`` is a disk of ``size``, such as 512k: a tmpfs. Skips the test where there is none."""
    folder.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
