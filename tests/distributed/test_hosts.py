"""Launches over two hosts of which one cannot start: both are this machine, with a launcher each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness import LIMIT_S, ROOT, SETTINGS, on_two_machines, words_of
from zerobook.utils.subprocess_launch import kill_family


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.full)])
@pytest.mark.parametrize("refusing", [0, 1])
def test_hosts_that_wait_for_one_that_refuses_end_with_its_reason(refusing, strategy, tiny, tmp_path):
    absent = str(tmp_path / "absent.txt")
    launchers = []
    for host, meeting in enumerate(on_two_machines()):
        flags = {
            "model_name_or_path": tiny / "llama",
            "train_file": absent if host == refusing else tiny / "text.txt",
            "block_size": 64,
            "max_train_steps": 2,
            "output_dir": tmp_path / "run",
        }
        line = [sys.executable, "-m", "zerobook.cli.main", "launch", "--num_processes", "2", *meeting]
        line += ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
        line += [str(ROOT / "recipes" / "causal_lm.py"), *words_of(flags)]
        launchers.append(subprocess.Popen(line, cwd=ROOT, env=os.environ | SETTINGS, stderr=subprocess.PIPE, text=True))
    try:
        errors = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            kill_family(launcher)
    assert [launcher.returncode for launcher in launchers] == [2, 2], errors
    assert absent in errors[refusing] and "LaunchError" not in errors[refusing]
    assert absent in errors[1 - refusing] and "LaunchError" in errors[1 - refusing]
