"""Decisions about spikes outlive the attempt, in a file of their own."""

from __future__ import annotations

import pytest

from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.recovery_state import FILE, RecoveryState
from zerobook.errors import CheckpointError
from zerobook.runlog.writer import RunLog
from zerobook.training.resume import restore_decisions


class Attempt:
    """An attempt that resumes at a step; without a checkpoint where that is 0."""

    def __init__(self, output_dir, step, **saved):
        self.output_dir = output_dir
        self.is_main = True
        self.decisions = RecoveryState.read(output_dir)
        self.checkpoint = output_dir / "checkpoint" if step else None
        self.log = RunLog(output_dir)
        self.progress = Progress(step=step, **saved)
        self.policy = restore_decisions(self.progress, self, self, self.log)
        self.log.event("run_start", step=step)

    def on_main(self, work):
        return work()

    def remember(self, **values):
        vars(self.decisions).update(values)
        self.decisions.write(self.output_dir)

    def log_steps(self, first, last):
        self.log.steps([{"step": step, "loss": 1.0} for step in range(first, last + 1)])

    def go_back(self, step):
        self.progress.redone += self.progress.step - step
        self.log.branch += 1
        self.remember(redone=self.progress.redone, counted_from=[self.log.attempt, self.log.branch])


def test_decisions_outlive_the_attempt(tmp_path):
    first = Attempt(tmp_path, 0)
    first.remember(skip_ranges=[[3, 9]], rate_cuts=[[40, 0.5, 100]], policy={"rollbacks": 2, "trouble": None}, proven=[10])
    first.log.close()

    second = Attempt(tmp_path, 10, skip_ranges=[[8, 12]])

    assert second.progress.skip_ranges == [[3, 12]]
    assert second.progress.rate_cuts == [[40, 0.5, 100]]
    assert second.policy == {"rollbacks": 2, "trouble": None}
    assert second.proven == {10}


def test_a_run_that_starts_over_has_decided_nothing(tmp_path):
    first = Attempt(tmp_path, 0)
    first.log_steps(1, 3)
    first.remember(skip_ranges=[[3, 9]], policy={"rollbacks": 1, "trouble": None})
    first.log.close()

    second = Attempt(tmp_path, 0)

    assert (second.progress.skip_ranges, second.policy, second.progress.redone) == ([], {}, 3)
    assert RecoveryState.read(tmp_path).skip_ranges == []


def test_cuts_of_another_runs_checkpoint_stay(tmp_path):
    assert Attempt(tmp_path, 10, rate_cuts=[[4, 0.5, 9]]).progress.rate_cuts == [[4, 0.5, 9]]


def test_steps_that_were_given_up_are_counted_once(tmp_path):
    first = Attempt(tmp_path, 0)
    first.log_steps(1, 10)
    first.progress.step = 10
    first.go_back(4)
    first.log.close()
    second = Attempt(tmp_path, 4)
    assert second.progress.redone == 6, "nothing was logged since the rollback"
    second.log_steps(5, 9)
    second.log.close()
    third = Attempt(tmp_path, 8)
    assert third.progress.redone == 7, "step 9 was lost"
    third.log.close()
    assert Attempt(tmp_path, 8).progress.redone == 7, "the attempt before ended before its first step"


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    (tmp_path / "runlog").mkdir()
    for content in ("", "[]", '{"other": 1}', '{"rollback_to": "../step"}', '{"policy": [1]}', '{"proven": null}'):
        (tmp_path / "runlog" / FILE).write_text(content)
        with pytest.raises(CheckpointError, match="recovery"):
            RecoveryState.read(tmp_path)
