"""A journey: a run is killed and goes on under another strategy file, in a folder outside the clone."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.distributed.test_parity import largest_difference
from tests.harness import ROOT, SETTINGS, Run, command, launch
from zerobook.cli.main import main

DIES = """
import os
from zerobook.training.hooks import Hook


class Dies(Hook):
    def on_log(self, trainer, records):
        if records[-1].step == 6:
            os._exit(1)
"""


@pytest.mark.launch
def test_a_run_that_was_killed_goes_on_under_another_strategy_file(tmp_path, tiny, monkeypatch, capsys):
    (tmp_path / "dies.py").write_text(DIES)
    monkeypatch.chdir(tmp_path)
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}

    def run(words, code=0):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == code, done.stdout + done.stderr

    def zerobook(*words):
        assert main(list(words)) == 0
        return capsys.readouterr().out

    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=8, global_batch_size=4, logging_steps=1, save_steps=4, learning_rate=3e-3,
    )  # fmt: skip
    small = {"per_device_train_batch_size": 1}
    run(command("zero2", 2, "causal_lm", flags | small | {"output_dir": "mine", "hooks": f"{tmp_path / 'dies.py'}:Dies"}), 1)
    assert zerobook("runlog", "status", "mine").startswith("ENDED WITHOUT AN EVENT")
    run(command("fsdp", 2, "causal_lm", flags | small | {"output_dir": "mine", "resume_from_checkpoint": "auto"}))
    mine = Run(tmp_path / "mine").read()
    whole = launch("single", 1, "causal_lm", tmp_path / "whole", **flags, per_device_train_batch_size=4)
    last = {step["step"]: step["loss"] for step in mine.steps}
    assert largest_difference([last[step] for step in sorted(last)], whole.losses) < 1e-5
    (changed,) = [event["differing"] for event in mine.events if event["type"] == "launch_diff"]
    assert changed["strategy"] == ["ZeRO-2", "FSDP2"] and "processes" not in changed
    assert next(event["steps"] for event in mine.events if event["type"] == "verify")[0] == 5
    said = zerobook("runlog", "compare", "mine", "--attempts", "1", "2")
    assert "ZeRO-2" in said and "FSDP2" in said and ("differ from step" in said or "the same, bit for bit" in said)
    zerobook("runlog", "report", "mine")
    page = (tmp_path / "mine" / "runlog" / "report.html").read_text()
    assert "Another launch than before" in page and "done again" in page
