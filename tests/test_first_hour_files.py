"""The notebook and the Dockerfile, which are not run here: their commands resolve, and the files that they name are there."""

from __future__ import annotations

import json
import re
import shlex

from tests.harness import ROOT
from zerobook.cli.doctor import inspect_launch
from zerobook.cli.main import COMMANDS
from zerobook.launch.resolve import Hardware

NOTEBOOK = ROOT / "docs" / "notebooks" / "qlora_t4.ipynb"


def test_the_notebooks_commands_resolve_on_a_t4(tmp_path, monkeypatch):
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and all("outputs" not in cell or not cell["outputs"] for cell in notebook["cells"])
    lines = [line.strip() for cell in notebook["cells"] if cell["cell_type"] == "code" for line in cell["source"]]
    shown = [line for line in lines if line.startswith("!") and "git" not in line]
    typed = [words for line in shown for words in re.findall(r"zerobook ([a-z]+ .*)", line)]
    named = [words.split()[0] for words in typed]
    assert named == ["data", "plan", "launch", "chat", "runlog"] and set(named) <= set(COMMANDS)
    (launch,) = (shlex.split(words)[1:] for words in typed if words.startswith("launch"))
    monkeypatch.chdir(ROOT)
    launch[launch.index("outputs/t4")] = str(tmp_path / "t4")
    t4 = Hardware(gpus=1, gpu_name="Tesla T4", bf16=False)
    plan, problems, config, _ = inspect_launch(launch, t4)
    assert not problems and not plan.problems and plan.precision == "fp16"
    assert config.base_format == "nf4" and config.gradient_accumulation_steps == 4
    assert "Not run here" in "".join(notebook["cells"][0]["source"])


def test_the_dockerfile_copies_what_is_there():
    text = (ROOT / "Dockerfile").read_text()
    assert "not built here" in text
    for names in re.findall(r"^COPY (\S+) ", text, re.M):
        assert (ROOT / names).exists(), names
    packages = re.search(r"apt-get install -y --no-install-recommends (.*?) \\", text)[1].split()
    assert packages == sorted(packages) and {"g++", "libaio-dev", "python3-dev"} <= set(packages)
