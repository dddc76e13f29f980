"""The commands of docs/guides/multi_node.md, as somebody follows them on two machines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT, SETTINGS
from tests.nodes.hosts import Host, Network, missing
from zerobook.launch.elastic import OWN_STORE
from zerobook.runlog.jsonl import stream

NEEDS = missing()
pytestmark = [pytest.mark.nodes, pytest.mark.launch, pytest.mark.full,
              pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS))]  # fmt: skip
PAGE = (ROOT / "docs" / "guides" / "multi_node.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines() if line[:1] != "#"]


def adapted(line: str, number: int, hosts: list[Host], folder: Path, tiny: Path) -> list[str]:
    """Return a command of the page for a host: other addresses, one process a host, a model and data that are there."""
    words = shlex.split(line.replace("10.0.0.1", hosts[0].address))
    changed = {
        "--num_processes": "2", "--model_name_or_path": str(tiny / "llama"), "--train_file": str(tiny / "chats.jsonl"),
        "--machine_rank": str(number), "--output_dir": str(folder / "run"), "--config": str(folder / "my.yaml"),
    }  # fmt: skip
    for flag, value in changed.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    words[0] = str(Path(sys.executable).parent / words[0])
    return words if "doctor" in words else [*words, "--max_train_steps", "4", "--cache_dir", str(folder / "cache")]


def test_the_page_has_commands_for_each_way():
    assert [line.split()[:2] for line in COMMANDS] == [["accelerate", "launch"], ["zerobook", "doctor"], ["zerobook", "launch"]]


@pytest.mark.parametrize("number", range(3), ids=["accelerate launch", "zerobook doctor", "zerobook launch"])
def test_a_command_of_the_page_works_on_two_machines(tmp_path, tiny, number):
    given = {
        "model_name_or_path": str(tiny / "llama"),
        "train_file": str(tiny / "chats.jsonl"),
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(given))
    with Network(tmp_path) as hosts:
        started: list[subprocess.Popen] = []
        for machine, host in enumerate(hosts):
            with (tmp_path / f"{host.name}.log").open("wb") as log:
                line = adapted(COMMANDS[number], machine, hosts, tmp_path, tiny)
                environment = SETTINGS | OWN_STORE | {"PYTHONPATH": str(ROOT)}
                started.append(host.start(line, environment=environment, cwd=ROOT, output=log))
        codes = [process.wait(180) for process in started]
    said = "\n".join((tmp_path / f"{host.name}.log").read_text() for host in hosts)
    assert codes == [0, 0], said[-5000:]
    if "doctor" in COMMANDS[number]:
        assert "links between hosts" in said
    else:
        assert len(list(stream(tmp_path / "run" / "runlog" / "steps.jsonl"))) == 4 and "2 x cpu over gloo" in said
