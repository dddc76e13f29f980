"""Every command in the README is run here, is a make target, or names the hardware it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT


def commands() -> list[tuple[str, str | None]]:
    """(command, the hardware it says it needs)."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        needs = None
        for line in block.strip().splitlines():
            if line.startswith("# needs:"):
                needs = line.removeprefix("# needs:").strip()
            else:
                found.append((line, needs))
                needs = None
    return found


RUN_HERE = [line for line, needs in commands() if needs is None and not line.startswith("make ")]


def test_readme_shows_both_commands_and_every_strategy():
    lines = [line for line, _ in commands()]
    assert lines[:2] == ["make demo", "make test"]
    text = (ROOT / "README.md").read_text()
    for file in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"| `{file.name}` |" in text
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {line.split()[1] for line in lines if line.startswith("make ")} <= set(targets)
    assert len(RUN_HERE) >= 5


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder that looks like a fresh clone to the commands, so that they write their outputs there."""
    for name in ("accelerate_configs", "ds_configs", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(line: str, cwd: Path, limit: int = 240) -> subprocess.CompletedProcess:
    program, *arguments = shlex.split(line)
    if program == "accelerate":
        arguments = [arguments[0], "--main_process_port", "0", *arguments[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    path = str(Path(sys.executable).with_name(program))
    return subprocess.run(
        [path, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


@pytest.mark.launch
def test_every_command_without_a_note_runs(clone):
    # in order: one of them continues what another saved
    for line in RUN_HERE:
        result = run(line, clone)
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
        if "--resume_from_checkpoint" in line:
            assert "resumed outputs/lora/checkpoints/step-000003 at step 3" in result.stdout + result.stderr
        if "--dry-run" in line:
            assert "4 micro x 1 accumulation x 2 processes = 8 samples a step" in result.stdout
            assert "recipes/configs/lora_smollm2.yaml" in result.stdout and "strategy ZeRO-2 | 2 x cpu" in result.stdout


@pytest.mark.launch
def test_commands_for_gpus_pass_their_dry_run(clone):
    """What needs GPUs and a hub to run needs neither to be read."""
    for line, needs in commands():
        if needs is not None:
            line = line.replace("chats.jsonl", str(ROOT / "README.md")).replace(
                " --mixed_precision", " --dry-run --mixed_precision"
            )
            result = run(line.replace("recipes/", "--num_processes 2 recipes/", 1), clone)
            assert result.returncode == 0, result.stderr[-2000:]
            assert "x 2 processes" in result.stdout


@pytest.mark.launch
@pytest.mark.timeout(900)
def test_demo():
    result = subprocess.run(
        [sys.executable, "scripts/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=840, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for part in ("ZeRO stage 2", "ZeRO stage 3", "came in the order of a run that was never stopped", "adapter:", "runlog:"):
        assert part in result.stdout
    assert result.stdout.count("before:") == result.stdout.count("after:") == 2
