"""A journey: a run is killed and goes on under another strategy file, in a folder outside the clone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed.test_parity import largest_difference
from tests.harness import ROOT, SETTINGS, Run, command

DIES = """
import os
from zerobook.training.hooks import Hook


class Dies(Hook):
    def on_log(self, trainer, records):
        if records[-1].step == 6:
            os._exit(1)
"""


@pytest.mark.launch
def test_a_run_that_was_killed_goes_on_under_another_strategy_file(tmp_path, tiny):
    (tmp_path / "dies.py").write_text(DIES)
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}

    def run(words, code=0):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def zerobook(*words, code=0):
        return run([sys.executable, "-m", "zerobook.cli.main", *words], code)

    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=8, global_batch_size=4, logging_steps=1, save_steps=4, learning_rate=3e-3,
    )  # fmt: skip
    small, alone = {"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 4}
    run(command("single", 1, "causal_lm", flags | alone | {"output_dir": "whole"}))
    run(command("zero2", 2, "causal_lm", flags | small | {"output_dir": "mine", "hooks": f"{tmp_path / 'dies.py'}:Dies"}), 1)
    assert zerobook("runlog", "status", "mine").startswith("ENDED WITHOUT AN EVENT")
    run(command("fsdp", 2, "causal_lm", flags | small | {"output_dir": "mine", "resume_from_checkpoint": "auto"}))
    mine, whole = Run(tmp_path / "mine").read(), Run(tmp_path / "whole").read()
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
