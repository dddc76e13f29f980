"""A journey: runs are started outside the clone, with recipes and strategies by name, and with modules of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.harness import LIMIT_S, ROOT, SETTINGS, Run, command, run_here

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


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["zero2", pytest.param("fsdp", marks=pytest.mark.full)])
def test_one_yaml_and_names_start_a_run_in_any_folder_and_the_printed_line_is_the_same_launch(tiny, tmp_path, strategy):
    config = flags(tiny, strategy=strategy, num_processes=2, max_seq_length=64, output_dir="run")
    config["validation_file"] = tiny / "few.jsonl"
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({key: str(value) for key, value in config.items()}))
    words = ["lora_finetune", "--config", "my.yaml", "--max_train_steps", "3"]

    code, text = run_in(tmp_path, [sys.executable, "-m", "zerobook.cli.main", "launch", "--main_process_port", "0", *words])

    assert code == 0, text
    run = Run(tmp_path / "run").read()
    assert len(run.losses) == 3
    live = run.event("run_start")["live"]
    assert live["world_size"] == 2 and live["strategy"] == {"zero2": "ZeRO-2", "fsdp": "FSDP2"}[strategy]
    # The run's own evaluation, by the run's name.
    code, measured = run_in(
        tmp_path, [sys.executable, "-m", "zerobook.cli.main", "eval", "run", "--file", str(tiny / "few.jsonl"), "--json"]
    )
    assert code == 0, measured
    loss = json.loads(measured.splitlines()[-1])["held_out"]["loss"]
    assert loss == pytest.approx(run.event("eval")["loss"], rel=1e-5)
    (line,) = (line for line in text.splitlines() if "accelerate" in line and "--config_file" in line)
    code, text = run_in(tmp_path, ["bash", "-c", f"{line} --output_dir again --dry-run"])
    assert code == 0 and live["strategy"] in text, text


def test_a_launch_without_a_strategy_of_its_own_refuses_the_one_in_the_yaml(tiny, tmp_path, monkeypatch, capsys):
    keys = "strategy: zero3\nnum_processes: 4\n"
    (tmp_path / "my.yaml").write_text(f"{keys}model_name_or_path: {tiny / 'llama'}\ntrain_file: {tiny / 'chats.jsonl'}\n")
    words = ["--config", str(tmp_path / "my.yaml"), "--output_dir", str(tmp_path / "run")]

    code, text = run_here(ROOT / "recipes" / "causal_lm.py", words, monkeypatch, capsys)

    assert code == 2
    assert "strategy: the config says zero3" in text and "num_processes: the config says 4" in text
