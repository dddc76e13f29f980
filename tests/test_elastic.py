"""``zerobook launch``: what it passes to torchrun, and what it refuses. tests/nodes/test_node_restart.py runs it."""

from __future__ import annotations

import os
import socket

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from tests.harness import ROOT
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.launch import elastic
from zerobook.launch.accelerate_cli import launcher_flags

MACHINES = ["--num_machines", "4", "--num_processes", "8", "--main_process_ip", "10.0.0.1", "--main_process_port", "29511"]


def file(name):
    return ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml")]


@pytest.fixture
def started(monkeypatch):
    """(arguments of torchrun, environment) of each start."""
    found = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: found.append((args, dict(os.environ))))
    return found


@pytest.mark.parametrize("name, variable", [
    ("ddp", "ACCELERATE_MIXED_PRECISION"), ("zero3", "ACCELERATE_USE_DEEPSPEED"), ("fsdp", "ACCELERATE_USE_FSDP"),
])  # fmt: skip
def test_torchrun_gets_a_range_of_machines_and_accelerates_environment(started, name, variable):
    before = dict(os.environ)
    assert main(["launch", "--min_machines", "2", *file(name), *MACHINES, "recipe.py", "--flag", "1"]) == 0
    ((args, environ),) = started
    assert (args.nnodes, args.nproc_per_node) == ("2:4", "2")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "10.0.0.1:29511")
    assert args.max_restarts == elastic.RESTARTS and f"last_call_timeout={elastic.LAST_CALL_S}" in args.rdzv_conf
    assert (args.training_script, args.training_script_args) == ("recipe.py", ["--flag", "1"])
    assert elastic.OWN_STORE.items() <= environ.items() and variable in environ
    assert dict(os.environ) == before


def test_a_machine_that_is_not_the_first_needs_neither_a_number_nor_the_port(started):
    with socket.create_server(("127.0.0.1", 0)) as server:
        machines = ["--num_machines", "4", "--num_processes", "8", "--main_process_ip", "10.0.0.1"]
        port = ["--main_process_port", str(server.getsockname()[1])]
        assert main(["launch", "--min_machines", "2", "--multi_gpu", *machines, *port, "recipe.py"]) == 0
    assert started


def test_machines_that_do_not_meet_get_a_sentence(monkeypatch, capsys):
    def run(args):
        raise RendezvousConnectionError("The connection to the C10d store has failed.\nC++ frames")

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert main(["launch", "--min_machines", "2", *file("ddp"), *MACHINES, "recipe.py"]) == 1
    said = capsys.readouterr().err
    assert "has failed" in said and "C++" not in said and "Traceback" not in said


def test_typed_settings_of_the_rendezvous_are_kept(started):
    main(
        ["launch", "--min_machines=2", *file("ddp"), *MACHINES, "--max_restarts", "7", "--rdzv_conf", "join_timeout=60", "x.py"]
    )
    ((args, _),) = started
    assert args.max_restarts == 7 and args.rdzv_conf.endswith("join_timeout=60"), "the last value counts"


@pytest.mark.parametrize("least, flags, said", [
    (5, [], "and --num_machines is 4"), (0, [], "--min_machines: it is 0"),
    (1, ["--num_machines", "1"], "--num_machines is 1"), (1, ["--num_processes", "6"], "6 is no multiple of --num_machines 4"),
    (1, ["--rdzv_backend", "etcd"], "--rdzv_backend: etcd"), (1, ["--main_process_ip", ""], "--main_process_ip: not given"),
])  # fmt: skip
def test_what_cannot_be_a_range_is_refused(started, least, flags, said):
    with pytest.raises(ConfigError, match=said):
        elastic.launch(least, [*file("ddp"), *MACHINES, *flags, "x.py"])
    assert not started


def test_a_worker_knows_the_flags_of_its_launcher():
    given = [*file("ddp"), "x.py", "--min_machines", "kept"]
    for program in (["/env/bin/python", "/env/bin/zerobook"], ["python", "-m", "zerobook.cli.main"]):
        for least in (["--min_machines", "1"], ["--min_machines=1"]):
            recipe = ["x.py", "--min_machines", "5", "--min_machines=6"]  # a user's recipe with a flag of the same name
            assert launcher_flags([*program, "launch", *least, *file("ddp"), *recipe]) == [*file("ddp"), *recipe]
    assert launcher_flags(["python", "zerobook", "plan", *given]) is None
