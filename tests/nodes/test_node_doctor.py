"""``zerobook doctor --all_ranks`` on simulated hosts: what is wrong between hosts is named before a launch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, SETTINGS
from tests.nodes.hosts import Host, Network, missing
from tests.nodes.runs import PORT
from zerobook.launch.host_check import PATIENCE_S

NEEDS = missing()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.launch,
    pytest.mark.full,
    pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS)),
]


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what the named hosts say about it. ``flags`` are those of a host that differ from the right ones."""

    prepare: Callable[[list[Host], Path], Any] = lambda hosts, output: None
    flags: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    says: Mapping[int, str] = field(default_factory=dict)
    code: int = 1


def loopback(hosts: list[Host], output: Path) -> None:
    file = hosts[1].hosts_file
    file.write_text(file.read_text().replace(f"{hosts[1].address} hostb", "127.0.1.1 hostb"))


def own_disk(hosts: list[Host], output: Path) -> None:
    output.mkdir()
    hosts[1].disks[output] = 2**20


def busy_port(hosts: list[Host], output: Path) -> None:
    listen = f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(600)"
    hosts[0].start([sys.executable, "-c", listen])


MISTAKES = {
    "none": Mistake(says={0: r"links between hosts: [\d.]+ .*bit/s", 1: "no problems"}, code=0),
    "rank that there is not": Mistake(
        flags={1: {"machine_rank": "2"}}, says={1: "--machine_rank: 2, but 2 machines have ranks 0 to 1"}
    ),
    "other number of machines": Mistake(
        flags={1: {"num_machines": "3", "num_processes": "3"}},
        says={1: "No host came with --machine_rank 2 within .* with the same --num_machines"},
    ),
    "one rank twice": Mistake(
        flags={1: {"machine_rank": "0"}}, says={1: "hostb cannot listen there: Cannot assign requested address"}
    ),
    "no second host": Mistake(flags={1: {"machine_rank": "2"}}, says={0: "No host came with --machine_rank 1 within"}),
    "another port": Mistake(
        flags={1: {"main_process_port": "29501"}},
        says={1: r"hostb cannot reach 10.213.7.1:29501 .*tried for \d+ s: Connection refused"},
    ),
    "cut link": Mistake(lambda hosts, _: hosts[1].cut(), says={1: r"hostb cannot reach 10.213.7.1:29500 .*tried for \d+ s: "}),
    "name that there is not": Mistake(
        flags={1: {"main_process_ip": "nohost"}}, says={1: "nohost: this host cannot resolve it"}
    ),
    "host name on loopback": Mistake(
        loopback,
        says={1: "problem 1: this machine's host name, hostb, resolves to 127.0.1.1"},
    ),
    "port in use": Mistake(
        busy_port,
        says={
            0: "hosta cannot listen there: Address already in use",
            1: "Is the port in use by another program",
        },
    ),
    "folder not shared": Mistake(own_disk, says={1: "output_dir: what hosta writes into .* is not visible on hostb"}),
    "other version": Mistake(
        lambda hosts, _: hosts[1].versions.update(peft="0.0.1"), says={0: r"version of peft: [\d.]+ on hosta; 0.0.1 on hostb"}
    ),
    "clock": Mistake(
        lambda hosts, _: hosts[1].set_clock(300), says={0: r"clocks: hostb is (299|30\d) s ahead of hosta"}, code=0
    ),
    "slow link": Mistake(
        lambda hosts, _: hosts[1].slow("20mbit"), says={0: r"slow link: hostb sends [\d.]+ Mbit/s to hosta"}, code=0
    ),
    "other config": Mistake(
        flags={1: {"learning_rate": "1e-3"}}, says={0: "config: learning_rate: 5e-05 on hosta; 0.001 on hostb"}
    ),
    "other strategy": Mistake(flags={1: {"config_file": "zero2"}}, says={0: "strategy: DDP on hosta; ZeRO-2 on hostb"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_between_hosts_is_named(tmp_path, tiny, name):
    mistake, output = MISTAKES[name], tmp_path / "run"
    with Network(tmp_path) as hosts:
        mistake.prepare(hosts, output)
        started = []
        for number, host in enumerate(hosts):
            with (tmp_path / f"{host.name}.log").open("wb") as log:
                line = command(number, hosts, tiny, output, mistake.flags.get(number, {}))
                environment = SETTINGS | {"PYTHONPATH": str(ROOT), "COLUMNS": "400"}
                started.append(host.start(line, environment=environment, cwd=tmp_path, output=log))
        codes = [process.wait(3 * PATIENCE_S + 30) for process in started]
    said = [(tmp_path / f"{host.name}.log").read_text() for host in hosts]
    for number, words in mistake.says.items():
        assert re.search(words, said[number]), said[number]
        assert codes[number] == mistake.code, said[number]
    assert all("Traceback" not in text for text in said), said


def command(number: int, hosts: list[Host], tiny: Path, output: Path, changed: Mapping[str, str]) -> list[str]:
    """Return the command of a host, with some flags changed."""
    launch = {"config_file": "ddp", "num_machines": "2", "num_processes": "2", "machine_rank": str(number),
              "main_process_ip": hosts[0].address, "main_process_port": PORT}  # fmt: skip
    recipe = {"model_name_or_path": str(tiny / "llama"), "train_file": str(tiny / "text.txt"), "output_dir": str(output)}
    launch, recipe = (
        launch | {k: v for k, v in changed.items() if k in launch},
        recipe | {k: v for k, v in changed.items() if k not in launch},
    )
    launch["config_file"] = str(ROOT / "accelerate_configs" / f"{launch['config_file']}.yaml")
    words = [[word for name, value in given.items() for word in (f"--{name}", value)] for given in (launch, recipe)]
    return [
        sys.executable,
        "-m",
        "zerobook.cli.main",
        "doctor",
        "--all_ranks",
        *words[0],
        str(ROOT / "recipes" / "causal_lm.py"),
        *words[1],
    ]
