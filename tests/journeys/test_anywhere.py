"""A journey: runs are started outside the clone, with recipes and strategies by name, and with modules of one's own."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.harness import LIMIT_S, ROOT, SETTINGS, Run, command

HOOK = """
import beside
import working.part
from zerobook.training.hooks import Hook


class Mine(Hook):
    def on_start(self, trainer):
        print(beside.WORD, working.part.WORD)
"""


def flags(tiny, **more):
    return {
        "model_name_or_path": tiny / "llama",
        "train_file": tiny / "chats.jsonl",
        "validation_split_percentage": 25,
        "max_train_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
    } | more


def run_in(folder, line):
    """Run a command in ``folder``, and return (exit status, output)."""
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    return done.returncode, done.stdout


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, launcher",
    [
        ("ddp", "zerobook"),
        pytest.param("ddp", "accelerate", marks=pytest.mark.full),
        pytest.param("fsdp", "zerobook", marks=pytest.mark.full),
        pytest.param("zero2", "accelerate", marks=pytest.mark.full),
    ],
)
def test_a_hook_imports_what_lies_beside_it_and_in_the_working_folder(tiny, tmp_path, strategy, launcher):
    for name, text in {"hooks/mine.py": HOOK, "hooks/beside.py": "WORD = 'left'", "working/part.py": "WORD = 'right'"}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    line = command(
        strategy, 2, "causal_lm", flags(tiny, output_dir="run", block_size=32, hooks=["hooks/mine.py:Mine", "hooks.mine:Mine"])
    )
    if launcher == "zerobook":
        place = line.index("accelerate.commands.launch")
        line[place : place + 1] = ["zerobook.cli.main", "launch"]

    code, text = run_in(tmp_path, line)

    assert code == 0, text
    assert text.count("left right") == 4, "two hooks on two ranks"
    assert len(Run(tmp_path / "run").read().losses) == 2
