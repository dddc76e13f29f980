"""Real training, killed at any moment: its log opens, and the next attempt joins it."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.harness import SETTINGS, command, start
from zerobook.runlog.check import problems
from zerobook.runlog.history import History
from zerobook.runlog.jsonl import stream
from zerobook.runlog.writer import STEPS, RunLog
from zerobook.utils.subprocess_launch import kill_family


@pytest.mark.launch
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.full)])
def test_training_that_is_killed_at_any_moment_leaves_a_log_that_the_next_attempt_joins(tiny, tmp_path, times):
    output = tmp_path / "run"
    flags = dict(
        output_dir=output, model_name_or_path=tiny / "gpt2", dataset_name="embedded:chatterbot", cache_dir=tmp_path / "data",
        block_size=64, max_train_steps=100_000, per_device_train_batch_size=2, logging_steps=3, save_steps=20,
        save_total_limit=2, max_eval_samples=8, validation_split_percentage=1, resume_from_checkpoint="auto",
    )  # fmt: skip
    line = command("single", 1, "causal_lm", flags)
    rng = random.Random(times)
    for attempt in range(1, times + 1):
        process = start(line, os.environ | SETTINGS)
        deadline = time.monotonic() + 120

        def trains(number=attempt):
            return (output / "runlog" / STEPS).exists() and any(
                s["attempt"] == number for s in list(stream(output / "runlog" / STEPS))[-5:]
            )

        while not trains() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.poll() is None and trains(), f"attempt {attempt} did not begin to train"
        time.sleep(rng.random() * 2)
        kill_family(process)
        process.communicate(timeout=60)
    RunLog(output).close()  # cuts what is torn, as the next attempt would
    assert problems(output / "runlog")[0] == []
    history = History.read(output)
    starts = history.of("run_start")
    assert [e["attempt"] for e in starts] == list(range(1, times + 1))
    told = [e for e in history.of("crash") if e.get("of_attempt")]
    assert [e["of_attempt"] for e in told] == list(range(1, times)), "each next attempt says how the last one ended"
    living = [s["step"] for s in history.steps(current=True)]
    assert living == list(range(1, living[-1] + 1)), "the attempts join without a gap"
    assert len(history.of("repaired")) <= 2 * times
