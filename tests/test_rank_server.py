"""A forked launch is to its processes, and to those who wait for it, what ``accelerate launch`` is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import REAL
from tests.harness import ALONE, ROOT, SETTINGS, server
from zerobook.utils.subprocess_launch import kill_family

PROBE = """
import json, os, pathlib, signal, sys, psutil, torch
from zerobook.launch.accelerate_cli import has_automatic_threads, parent_flags
me, parent = psutil.Process(), psutil.Process().parent()
told = {
    "environ": dict(os.environ), "seen": me.environ(), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0],
    "line": [word for word in me.cmdline()[1:] if not word.startswith(("-X", "xxx"))],
    "main": [__name__, __file__], "leads a session": os.getsid(0) == os.getpid(), "parent": parent_flags(),
    "given": parent.environ(), "chose threads": has_automatic_threads(), "threads": torch.get_num_threads(),
    "files": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(3)), "encoding": sys.stdout.encoding,
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)],
    "group": torch.distributed.is_initialized(), "umask": os.umask(0o22),
    "unbuffered": not hasattr(sys.stdout.buffer, "raw"), "modules": sorted({"tests", "recipes"} & set(sys.modules)),
}
pathlib.Path(sys.argv[1], os.environ.get("RANK", "0") + ".json").write_text(json.dumps(told))
"""
OWN = (
    "ZEROBOOK_FILLER", "PYTEST_CURRENT_TEST", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "LINES", "COLUMNS", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip
"""Variables that differ between launches; the last one DeepSpeed sets at its import, which is the server's."""


def line(strategy: str, processes: int, *words: object) -> list[str]:
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*start, "--num_processes", str(processes), *ALONE, *map(str, words)]


def forked(*words: object, strategy: str = "ddp", processes: int = 2):
    return server().launch(line(strategy, processes, *words), ROOT, os.environ | SETTINGS)


def written(folder: Path, code: str) -> Path:
    file = folder / "script.py"
    file.write_text(code)
    return file


def told(folder: Path) -> list[dict]:
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    for one in found:
        for name in ("environ", "seen", "given"):
            one[name] = {key: value for key, value in one[name].items() if key not in OWN}
    return found


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("strategy, processes", [("single", 1), ("ddp", 2), ("zero3", 2), ("fsdp", 2)])
def test_a_forked_process_sees_what_a_started_one_sees(tmp_path, strategy, processes):
    script = written(tmp_path, PROBE)
    folders = [tmp_path / name for name in ("forked", "started")]
    for folder in folders:
        folder.mkdir()
    launch = forked(script, folders[0], strategy=strategy, processes=processes)
    said, _ = launch.communicate(60)
    assert launch.returncode == 0, said
    words = line(strategy, processes, script, folders[1])
    subprocess.run(words, cwd=ROOT, env=os.environ | SETTINGS, check=True, capture_output=True, timeout=120)
    ours, theirs = told(folders[0]), told(folders[1])
    assert len(ours) == len(theirs) == processes
    for mine, other in zip(ours, theirs, strict=True):
        for one, folder in ((mine, folders[0]), (other, folders[1])):
            one["argv"].remove(str(folder)), one["line"].remove(str(folder)), one["parent"].remove(str(folder))
        assert mine == other


@pytest.mark.launch
@pytest.mark.full
def test_a_rank_that_fails_ends_the_others_and_the_launcher_says_how(tmp_path):
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    launch = forked(written(tmp_path, code))
    said, _ = launch.communicate(30)
    assert launch.returncode == 1 and "exitcode  : 3" in said and "closing signal SIGTERM" in said, said
    launch = forked(written(tmp_path, "raise ValueError('no such thing')"), strategy="single", processes=1)
    said, _ = launch.communicate(30)
    assert launch.returncode == 1 and "rank_server" not in said.partition("ValueError: no such thing")[0], said


@pytest.mark.launch
@pytest.mark.full
def test_nothing_is_left_for_the_next_launch(tmp_path):
    code = """
import os, random, sys, torch, zerobook
print(hasattr(zerobook, "left"), "LEFT" in os.environ, torch.is_grad_enabled(), torch.initial_seed(), random.random())
zerobook.left, os.environ["LEFT"] = True, "1"
torch.manual_seed(7), torch.set_grad_enabled(False), os.chdir("/")
"""
    script = written(tmp_path, code)
    said = [forked(script, strategy="single", processes=1).communicate(30)[0].split() for _ in range(2)]
    assert said[0][:3] == said[1][:3] == ["False", "False", "True"]
    assert said[0][3] != said[1][3] and said[0][4] != said[1][4], "random numbers differ by process"


@pytest.mark.launch
@pytest.mark.full
def test_a_launch_that_is_killed_leaves_no_process(tmp_path):
    code = "import os, sys, time\nopen(f'{sys.argv[1]}/{os.getpid()}.pid', 'w').close()\ntime.sleep(100)"
    launch = forked(written(tmp_path, code), tmp_path)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert {psutil.Process(pid).ppid() for pid in pids} == {launch.pid} and launch.poll() is None
    family = [launch.pid, *(child.pid for child in psutil.Process(launch.pid).children(recursive=True))]
    assert set(pids) < set(family)
    kill_family(launch)
    launch.communicate(10)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.returncode == -9 and not [pid for pid in family if psutil.pid_exists(pid)]


@pytest.mark.launch
@pytest.mark.full
def test_what_libraries_read_at_their_import_is_never_forked():
    words, given = line("ddp", 2, "script.py"), os.environ | SETTINGS
    assert server().fits(words, given) and server().fits(words, given | {"ZEROBOOK_FAULT": "nan"})
    for changed in ({"OMP_NUM_THREADS": "2"}, {"HF_HOME": "/elsewhere"}, {"CUDA_VISIBLE_DEVICES": "0"}):
        assert not server().fits(words, given | changed)
    assert not server().fits(words, {key: value for key, value in given.items() if key != "OMP_NUM_THREADS"})


@pytest.mark.parametrize("name", REAL)
def test_every_test_that_launches_for_real_exists(name):
    file, _, test = re.sub(r"\[.*", "", name).partition("::")
    (found,) = (ROOT / "tests").rglob(file)
    assert f"def {test}" in found.read_text()
