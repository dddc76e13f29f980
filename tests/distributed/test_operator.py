"""A person commands a live run of two ranks, as on a terminal: `zerobook runlog act`."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tests.harness import LIMIT_S, ROOT, SETTINGS, Run, command, start
from zerobook.checkpoint import store
from zerobook.cli.main import main
from zerobook.monitor.policy import compute_rate_share
from zerobook.runlog.check import problems
from zerobook.runlog.history import History
from zerobook.runlog.summary import summary
from zerobook.utils.subprocess_launch import kill_family

pytestmark = pytest.mark.launch


def wait_for(process, output, step):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if any(store.step_of(checkpoint) >= step for checkpoint in store.list_complete(store.folder_of(output))):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    raise AssertionError(f"there is no checkpoint of step {step}")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_every_command_is_taken_by_all_ranks_of_a_live_run(tiny, tmp_path, capsys, strategy):
    output = tmp_path / "run"
    flags = {
        "output_dir": output,
        "model_name_or_path": tiny / "gpt2",
        "dataset_name": "embedded:chatterbot",
        "cache_dir": tmp_path / "data",
        "block_size": 64,
        "max_train_steps": 100_000,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_steps": 10,
        "max_eval_samples": 10,
        "rollback_lr_steps": 1000,
        "hooks": str(ROOT / "tests" / "distributed" / "run_hooks.py") + ":Slow",
    }
    process = start(command(strategy, 2, "causal_lm", flags), {**os.environ, **SETTINGS})

    def act(*words):
        code = main(["runlog", "act", str(output), *words, "--wait", "120"])
        return code, capsys.readouterr().out

    try:
        wait_for(process, output, 20)
        refused = [act("rollback", "--to", "13"), act("rollback", "--to", "99999"), act("skip", "5-99999")]
        accepted = [
            act("policy", "log"),
            act("skip", "12-13", "--reason", "they are copies"),
            act("lower-rate", "0.5"),
            act("save"),
            act("rollback", "--to", "10", "--reason", "to begin again"),
            act("stop", "--reason", "lunch"),
        ]
        text, _ = process.communicate(timeout=LIMIT_S)
    finally:
        kill_family(process)

    assert [code for code, _ in refused] == [1, 1, 1] and all("REFUSED" in words for _, words in refused)
    assert "complete checkpoints: 10, 20" in refused[0][1]
    assert [code for code, _ in accepted] == [0] * 6, accepted
    assert process.returncode == 1 and "exitcode  : 76" in text
    run = Run(output).read()
    assert problems(output / "runlog")[0] == []
    assert Counter(event["accepted"] for event in run.events if event["type"] == "command") == {True: 6, False: 3}
    # The run went back, and did the steps again with the same losses, until the first that had lost samples.
    outcome = run.event("rollback")
    assert outcome["step"] == 10 and outcome["verified"] == ["learning rate", "random numbers", "samples"]
    skipped = {sample for start, end in run.event("skip")["ranges"] for sample in range(start, end)}
    living = list(History.read(output).steps(current=True))
    assert len(skipped) == 16 and not skipped & {sample for step in living[11:] for sample in step["ids"]}
    # The rate was lowered at a step that came again after the rollback.
    cut = run.event("lr_change")["cut"]
    assert cut[1:] == [0.5, 1000]
    assert (
        living[-1]["step"] < cut[0] or living[-1]["learning_rate"] < 1.01 * compute_rate_share([cut], living[-1]["step"]) * 5e-5
    )
    stop = run.event("stop")
    assert stop["why"] == "lunch" and "asked for it" in stop["rule"] and stop["exit_code"] == 76
    assert stop["go_on_from"].endswith(store.name_of(living[-1]["step"])), "the last step is saved"
    assert "STOPPED" in summary(output / "runlog")
    assert main(["runlog", "act", str(output), "save"]) == 2, "the run is not live"
