"""Messages between processes: what comes over the network is data of known types, and never code."""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import ROOT
from zerobook.errors import CheckpointError, ConfigError
from zerobook.health.exchange import Exchange
from zerobook.health.judge import Beat, Verdict
from zerobook.health.position import Window
from zerobook.utils import messages
from zerobook.utils.messages import MessageError, SignedStore

BEAT = Beat(1, "hosta", 4711, "forward", 3, 9, 0.5, float("inf"), "", Window(2, 1, 1.0, 0.1, 0.5))
VERDICT = Verdict("stuck", [1], ["hosta"], "data", 3, 30.0, [("backward", 3, [(0, 0)])])
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list",
    "send_object_list", "eval", "exec", "unsafe_load",
}  # fmt: skip


# --- values between ranks
@pytest.mark.parametrize("value", [
    None, True, -3, 2.5, float("inf"), "text \ud800", [1, [2]], (1, ("a", None)), {"a": {"b": [(1, 2)]}}, {1: "x", (2, 3): []},
    {"$": "path", "value": "x"}, Path("/tmp/a\udcff"), torch.bfloat16, {"w": torch.float32},
])  # fmt: skip
def test_a_value_arrives_as_it_was_sent(value):
    received = messages.decode(messages.encode(value))

    assert received == value
    assert type(received) is type(value)


def test_an_error_arrives_with_its_class_and_what_it_knows():
    problems = messages.decode(messages.encode(ConfigError(["one", "two"])))
    missing = messages.decode(messages.encode(CheckpointError("nothing there")))
    full = messages.decode(messages.encode(OSError(errno.ENOSPC, "no space", "/data/x")))
    other = messages.decode(messages.encode(ZeroDivisionError("by zero")))

    assert type(problems) is ConfigError and problems.problems == ["one", "two"] and "two" in str(problems)
    assert type(missing) is CheckpointError and str(missing) == "nothing there"
    assert (full.errno, full.filename) == (errno.ENOSPC, "/data/x")
    assert type(other) is RuntimeError and "by zero" in str(other)


@pytest.mark.parametrize("value", [object(), {1, 2}, [subprocess.run], b"bytes"])
def test_only_data_is_sent(value):
    with pytest.raises(TypeError):
        messages.encode(value)


@pytest.mark.parametrize("data", [
    pickle.dumps(["a"]), b"", b"\xff", b"[" * 100_000, b'{"$": "os.system", "value": "x"}', b'{"$": "dtype", "value": "load"}',
    b'{"$": "error", "value": {"kind": 1}}', b'{"$": "error"}', b'{"$": "dtype", "value": 1}',
])  # fmt: skip
def test_what_is_no_message_is_refused(data):
    with pytest.raises(MessageError):
        messages.decode(data)


# --- values in a store
def test_heartbeats_and_verdicts_are_read_as_they_were_written():
    assert messages.read(json.dumps(BEAT), Beat) == BEAT
    assert messages.read(json.dumps(BEAT._replace(window=None)), Beat).window is None
    assert messages.read(json.dumps(VERDICT), Verdict) == VERDICT


@pytest.mark.parametrize("text", [
    b"", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, pickle.dumps("x"), b'["explode", [0], [], "data", 1, 1.0, []]',
    b'["stuck", [], [], "data", 1, 1.0, []]', b'["stuck", [99], [], "data", 1, 1.0, []]', b'["stuck", ["a"], [], 1, 1, 1, []]',
    b'["stuck", [0], [], "data", 1, 1.0, [["data", 1, []]]]', b" " * (messages.MOST_BYTES_IN_STORE + 1) + b"null",
])  # fmt: skip
def test_a_strangers_verdict_and_heartbeats_are_passed_over(text):
    store = dist.HashStore()
    ranks = [Exchange(store, rank, 2, 30.0, 0.0) for rank in range(2)]
    ranks[0].step(BEAT, 1.0)
    for key in ("verdict", "beat/1", "pulse"):
        store.set(key, text.decode("latin-1"))

    ranks[1].step(BEAT, 2.0)
    store.set("beat/1", text.decode("latin-1"))
    ranks[0].step(BEAT._replace(number=2), 3.0)

    assert ranks[0].verdict is None and ranks[1].verdict is None


def test_a_value_without_the_runs_signature_is_none():
    plain = dist.HashStore()
    first, second = SignedStore(plain, "secret"), SignedStore(plain, "secret")
    first.set("verdict", "mine")
    first.set("beat/0", "of rank 0")
    plain.set("forged", "x" * 64 + json.dumps(VERDICT))
    plain.set("beat/1", plain.get("beat/0").decode())

    assert second.get("verdict") == b"mine"
    assert second.multi_get(["beat/0", "beat/1", "forged"]) == [b"of rank 0", b"", b""]


# --- real processes
RANK = """
import json, sys, time
from pathlib import Path
from accelerate import Accelerator
from zerobook.errors import DataError
from zerobook.strategy.mesh import Mesh

folder = Path(sys.argv[1])
mesh = Mesh(Accelerator(cpu=True))

def tokenize():
    (folder / "tokenizing").touch()
    while not (folder / "attacked").exists():
        time.sleep(0.05)
    return {"rows": 3, "folder": folder}

def fail():
    raise DataError("no rows")

found = [mesh.once_per_node(tokenize), mesh.gather(("rank", mesh.rank))]
found += [mesh.from_main(mesh.rank + 10), mesh.gather("x" * mesh.rank)]
errors = []
for method in (mesh.once_per_node, mesh.on_main):
    try:
        method(fail)
    except DataError as error:
        errors.append(str(error))
print(json.dumps([found, errors], default=str), flush=True)
mesh.barrier()
mesh.accelerator.end_training()
"""


PATIENT = """
import sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from zerobook.strategy.mesh import Mesh

rank = int(sys.argv[1])
limit = timedelta(seconds=2)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2, timeout=limit)
facts = {"num_processes": 2, "process_index": rank, "is_main_process": rank == 0, "device": torch.device("cpu")}
mesh = Mesh(SimpleNamespace(**facts))

def read():
    time.sleep(5)
    return "whole"

print(mesh.on_main(read, takes_long=True), flush=True)
"""


def test_work_of_rank_0_may_take_longer_than_a_collective_waits(tmp_path):
    """Rank 0 reads every byte of a checkpoint to resume from, which can take hours."""
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", PATIENT, str(rank), str(tmp_path / "store")]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == ["whole\n", "whole\n"]


class Bomb:
    """Pickle of a call: whoever unpickles it makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.launch
def test_a_stranger_at_the_launchs_port_runs_no_code_in_a_rank(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=os.environ | addresses | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        ) for rank in range(2)
    ]  # fmt: skip
    until = time.monotonic() + 120
    while not (tmp_path / "tokenizing").exists() and time.monotonic() < until:
        time.sleep(0.05)

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    for prefix in ("", "default_pg/0//", "0/"):
        for rank in range(2):
            # protocol 0 is ASCII, which the store's Python interface takes
            store.set(f"{prefix}zerobook/once/1/{rank}", pickle.dumps(Bomb(tmp_path / "ran"), protocol=0).decode())
    time.sleep(1)
    (tmp_path / "attacked").touch()
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0]
    assert not (tmp_path / "ran").exists()
    results = {"rows": 3, "folder": str(tmp_path)}
    for output in outputs:
        found, errors = json.loads(output.splitlines()[-1])
        assert found == [results, [["rank", 0], ["rank", 1]], 10, ["", "x"]]
        assert errors == ["no rows", "no rows"]


# --- the code
def calls_of(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Return every call with the last part of what it calls."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", ""), call) for call in calls]


def imports_of(tree: ast.AST) -> set[str]:
    """Return the first part of every imported module's name."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


@pytest.mark.parametrize("folder", ["zerobook", "recipes"])
def test_the_code_reads_nothing_that_can_hold_code(folder):
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text())
        forbidden_modules = FORBIDDEN_MODULES
        if file == ROOT / "zerobook/interop/checkpoints/unpickle.py":
            # The unpickler of sharded checkpoints' index makes listed classes of torch alone: tests/test_checkpoint_import.py.
            forbidden_modules = FORBIDDEN_MODULES - {"pickle"}
        found += [f"{file.name}: {name}" for name in forbidden_modules & imports_of(tree)]
        for name, call in calls_of(tree):
            words = {word.arg: ast.unparse(word.value) for word in call.keywords}
            called = ast.unparse(call.func)
            # nn.Module.eval takes no argument
            forbidden = name in FORBIDDEN_CALLS and not (name == "eval" and isinstance(call.func, ast.Attribute))
            unsafe_torch = called == "torch.load" and words.get("weights_only") != "True"
            if forbidden or unsafe_torch or words.get("allow_pickle", "False") != "False":
                found.append(f"{file.name}:{call.lineno}: {called}")
    assert not found
