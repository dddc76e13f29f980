"""Launches over two hosts of which one cannot start: both are this machine, with a launcher each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness import LIMIT_S, ROOT, SETTINGS, on_two_machines, words_of
from zerobook.utils.subprocess_launch import kill_family

BROKEN = """
import os
import accelerate
from recipes.causal_lm import CausalLM
from zerobook.training.run import run

def broken(self, **_):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

if os.environ["RANK"] == "1":
    accelerate.Accelerator.__init__ = broken
run(CausalLM)
"""


def launch_both(recipe, strategy, flags_of_host):
    """Launch on two hosts; return their exit codes and what they wrote to stderr."""
    launchers = []
    for flags, meeting in zip(flags_of_host, on_two_machines(), strict=True):
        line = [sys.executable, "-m", "zerobook.cli.main", "launch", "--num_processes", "2", *meeting]
        line += ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), str(recipe), *words_of(flags)]
        environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}
        launchers.append(subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            kill_family(launcher)
    return [launcher.returncode for launcher in launchers], errors


def flags(tiny, tmp_path):
    return {
        "model_name_or_path": tiny / "llama",
        "train_file": tiny / "text.txt",
        "block_size": 64,
        "max_train_steps": 2,
        "output_dir": tmp_path / "run",
    }


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.full)])
@pytest.mark.parametrize("refusing", [0, 1])
def test_hosts_that_wait_for_one_that_refuses_end_with_its_reason(refusing, strategy, tiny, tmp_path):
    absent = str(tmp_path / "absent.txt")
    flags_of_host = [flags(tiny, tmp_path), flags(tiny, tmp_path)]
    flags_of_host[refusing]["train_file"] = absent
    codes, errors = launch_both(ROOT / "recipes" / "causal_lm.py", strategy, flags_of_host)
    assert codes == [2, 2], errors
    assert absent in errors[refusing] and "LaunchError" not in errors[refusing]
    assert absent in errors[1 - refusing] and "LaunchError" in errors[1 - refusing]


@pytest.mark.launch
def test_a_rank_that_fails_before_the_first_collective_ends_the_other_hosts(tiny, tmp_path):
    """Under NCCL, they would wait for it without end."""
    (tmp_path / "broken.py").write_text(BROKEN)
    codes, errors = launch_both(tmp_path / "broken.py", "ddp", [flags(tiny, tmp_path)] * 2)
    assert codes == [1, 1], errors
    assert "LaunchError" in errors[0] and "uncorrectable ECC" in errors[0]
