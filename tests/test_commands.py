"""Commands of people to a live run: what a run takes from its folder, and what a person is told."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from tests.alone import train
from zerobook.cli.main import main
from zerobook.monitor.policy import RecoveryPolicy
from zerobook.runlog import commands
from zerobook.runlog.commands import Command, is_waiting, send, take_oldest, withdraw
from zerobook.runlog.history import History
from zerobook.runlog.writer import RunLog
from zerobook.training.hooks import Hook
from zerobook.training.rollback import Recovery


@pytest.fixture
def runlog(tmp_path):
    log = RunLog(tmp_path)
    commands.make_folder(log.folder)
    yield log.folder
    log.close()


def command(action="save", **values):
    return Command(**{"action": action, "host": "here", "attempt": 1, "branch": 0, "newest_seq": 0} | values)


def put(runlog, content, name="0000000000000001-00000000.json"):
    file = runlog / commands.FOLDER / name
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


VALID = {"action": "save", "host": "here", "attempt": 1, "branch": 0, "newest_seq": 0}


def test_commands_are_taken_once_the_oldest_first(runlog):
    first = send(runlog, command("rollback", step=60, reason="it looks bad"))
    second = send(runlog, command("skip", steps=(3, 5)))

    taken = [take_oldest(runlog), take_oldest(runlog)]

    assert [received.command_id for received in taken] == [first, second]
    assert taken[0].command == command("rollback", step=60, reason="it looks bad") and taken[0].problem is None
    assert taken[1].command.argument == (3, 5)
    assert take_oldest(runlog) is None and not is_waiting(runlog)


def test_either_the_run_takes_a_command_or_its_author_withdraws_it(runlog):
    command_id = send(runlog, command())
    assert withdraw(runlog, command_id) and take_oldest(runlog) is None
    command_id = send(runlog, command())
    assert take_oldest(runlog).command_id == command_id and not withdraw(runlog, command_id)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04N.",  # a pickle
        b"[" * 10_000,
        VALID | {"action": "import os"},
        VALID | {"step": 3},
        VALID | {"action": "rollback"},
        VALID | {"action": "rollback", "step": "3"},
        VALID | {"action": "rollback", "step": 0},
        VALID | {"action": "lower_rate", "factor": 1.5},
        VALID | {"action": "lower_rate", "factor": -0.5},
        b'{"action":"lower_rate","factor":NaN,"host":"h","attempt":1,"branch":0,"newest_seq":0}',
        VALID | {"action": "skip", "steps": [5, 3]},
        VALID | {"action": "policy", "on_spike": "never"},
        VALID | {"reason": "x" * 2000},
        VALID | {"more": 1},
        b" " * (commands.MOST_BYTES + 1),
    ],
    ids=str,
)
def test_a_malformed_command_is_refused_and_removed(runlog, content):
    put(runlog, content)
    received = take_oldest(runlog)
    assert received.command is None and received.problem
    assert not is_waiting(runlog)


def test_a_file_of_another_user_is_refused(runlog):
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(put(runlog, VALID), 12345, 12345)
    received = take_oldest(runlog)
    assert received.command is None and received.user == "user 12345" and "may command" in received.problem


def test_what_is_no_regular_file_is_never_read(runlog, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(VALID))
    folder = runlog / commands.FOLDER
    (folder / "0000000000000001-00000000.json").symlink_to(secret)
    os.mkfifo(folder / "0000000000000002-00000000.json")
    (folder / "0000000000000003-00000000.json").mkdir()
    put(runlog, VALID, "notes.json")

    taken = [take_oldest(runlog) for _ in range(3)]

    assert [received and received.command for received in taken] == [None, None, None]
    assert secret.exists() and (folder / "notes.json").exists()
    assert taken[2] is None, "a folder cannot be removed, and holds up nothing"


def test_a_link_in_the_place_of_the_folder_is_not_followed(runlog, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (runlog / commands.FOLDER).rmdir()
    (runlog / commands.FOLDER).symlink_to(other)
    put(runlog, VALID)
    assert take_oldest(runlog) is None and not is_waiting(runlog)
    assert len(list(other.iterdir())) == 1


def test_the_policy_of_a_command_lasts_until_the_flag_changes():
    policy = RecoveryPolicy("rollback", max_rollbacks=8, rate_factor=0.5)
    policy.on_spike = "log"

    def resumed(flag):
        return RecoveryPolicy(flag, max_rollbacks=8, rate_factor=0.5, state=policy.state()).on_spike

    assert resumed("rollback") == "log"
    assert resumed("stop") == "stop"


class Operator(Hook):
    """Gives commands before given steps: step -> list of the fields of commands, or bytes."""

    plan: dict[int, list] = {}

    def before_step(self, trainer, step):
        # Once: a step may be done again.
        for fields in self.plan.pop(step, []):
            if isinstance(fields, bytes):
                put(trainer.log.folder, fields)
                continue
            log = trainer.log
            now = {"attempt": log.attempt, "branch": log.branch, "newest_seq": log.seq - 1}
            send(log.folder, command(**now | fields))


@pytest.fixture
def commanded(tiny, tmp_path, monkeypatch):
    """(steps of commands, flags) -> a finished run of one process, which logs every 5 steps and saves every 10."""

    def run(plan, **flags):
        monkeypatch.setattr(Operator, "plan", dict(plan))
        settings = {
            "model_name_or_path": tiny / "gpt2",
            "dataset_name": "embedded:chatterbot",
            "block_size": 64,
            "max_train_steps": 40,
            "per_device_train_batch_size": 4,
            "logging_steps": 5,
            "save_steps": 10,
            "max_eval_samples": 20,
            "hooks": f"{__name__}:Operator",
        }
        return train(tmp_path / "run", **settings | flags)

    return run


def answers(run):
    return [(e["step"], e["action"], e["accepted"]) for e in run.events if e["type"] == "command"]


def test_a_rollback_a_lower_rate_and_samples_to_leave_out_are_carried_out(commanded):
    run = commanded(
        {
            12: [{"action": "skip", "steps": (11, 12), "reason": "copies of the test set"}],
            22: [{"action": "lower_rate", "factor": 0.5}],
            32: [{"action": "rollback", "step": 20, "reason": "to see it again"}],
        },
        rollback_lr_steps=10,
    )

    assert answers(run) == [(15, "skip", True), (25, "lower_rate", True), (35, "rollback", True)]
    steps = list(History.read(run.output).steps(current=True))
    assert [step["step"] for step in steps] == list(range(1, 41))
    skipped = run.event("skip")
    left_out = {sample for start, end in skipped["ranges"] for sample in range(start, end)}
    assert skipped["why"] == "copies of the test set" and skipped["samples"] == 8
    assert left_out == set(steps[10]["ids"]) | set(steps[11]["ids"])
    assert not left_out & {sample for step in steps[15:] for sample in step["ids"]}
    assert run.event("lr_change")["cut"] == [25, 0.5, 10]
    outcome = run.event("rollback")
    assert (outcome["step"], outcome["steps_given_up"]) == (20, 15)
    # Nothing was left out since that checkpoint, and the rate falls at the same step again.
    assert run.event("verify")["largest_relative_difference"] == 0
    causes = [event["type"] for event in History.read(run.output).causes(outcome)]
    assert causes == ["command", "decision", "rollback", "rollback"]
    assert run.event("command")["by"].endswith("@here") and run.event("command")["why"] == "to see it again"


def test_a_command_at_a_step_that_is_evaluated_and_saved_takes_neither_away(commanded):
    run = commanded(
        {
            12: [{"action": "skip", "steps": (11, 12)}],
            22: [{"action": "lower_rate", "factor": 0.5}],
        },
        logging_steps=10,
        eval_steps=10,
    )

    assert answers(run) == [(20, "skip", True), (30, "lower_rate", True)]
    assert [event["step"] for event in run.events if event["type"] == "eval"] == [10, 20, 30, 40]
    saved = [event["step"] for event in run.events if event["type"] == "checkpoint" and event["state"] == "complete"]
    assert saved == [10, 20, 30, 40]


def test_what_cannot_be_done_is_refused_with_a_reason(commanded):
    run = commanded(
        {
            12: [{"action": "rollback", "step": 7}],
            17: [{"action": "rollback", "step": 500}],
            22: [{"action": "skip", "steps": (20, 60)}],
            27: [b"rm -rf /"],
            32: [{"action": "save", "attempt": 0}],
            37: [{"action": "rollback", "step": 40}],
        }
    )

    events = [event for event in run.events if event["type"] == "command"]
    assert [event["accepted"] for event in events] == [False] * 6
    words = ["no checkpoint of step 7; complete checkpoints: 10", "future", "future", "malformed", "attempt 0", "is at step 40"]
    for event, word in zip(events, words, strict=True):
        assert word in event["refused_because"]
    assert not [event for event in run.events if event["type"] in ("decision", "rollback", "skip")]
    assert main(["runlog", "verify", str(run.output)]) == 0


def test_of_commands_given_at_once_the_second_is_not_carried_out_on_another_run(commanded):
    """Whoever gave the second one has not seen what the first one did."""
    run = commanded(
        {
            22: [{"action": "rollback", "step": 10}, {"action": "rollback", "step": 10}, {"action": "save"}],
            32: [{"action": "lower_rate", "factor": 0.5}, {"action": "lower_rate", "factor": 0.5}],
        }
    )
    assert answers(run) == [
        (25, "rollback", True),
        (15, "rollback", False),
        (20, "save", True),
        (35, "lower_rate", True),
        (40, "lower_rate", False),
    ]
    assert len([event for event in run.events if event["type"] == "lr_change"]) == 1


def test_a_save_is_made_at_the_log_point(commanded):
    run = commanded({12: [{"action": "save"}]}, save_steps=30)
    complete = [e["step"] for e in run.events if e["type"] == "checkpoint" and e["state"] == "complete"]
    assert complete == [15, 30, 40]


def test_after_policy_log_a_spike_is_only_recorded(commanded):
    run = commanded({2: [{"action": "policy", "on_spike": "log"}]}, max_train_steps=10)
    assert answers(run) == [(5, "policy", True)]
    recovery = json.loads((run.output / "runlog" / "recovery.json").read_text())
    assert recovery["policy"]["on_spike"] == "log"


def test_late_commands_are_refused_at_the_end(commanded, monkeypatch):
    class Late(Operator):
        def on_end(self, trainer):
            send(trainer.log.folder, command())

    monkeypatch.setattr("tests.test_commands.Operator", Late)
    run = commanded({}, max_train_steps=10)
    assert run.event("command")["refused_because"] == "the run has ended"
    assert run.events[-1]["type"] == "run_end"


def test_a_run_is_not_ended_for_want_of_samples(commanded, monkeypatch):
    monkeypatch.setattr(Recovery, "check_samples_left", lambda recovery, action: replace(action, kind="stop"))
    run = commanded({7: [{"action": "skip", "steps": (1, 5)}]}, max_train_steps=20)
    assert "no samples" in run.event("command")["refused_because"] and run.events[-1]["type"] == "run_end"


def test_a_run_that_is_not_live_takes_no_command(commanded, capsys):
    run = commanded({}, max_train_steps=10)
    before = len(run.events)
    assert main(["runlog", "act", str(run.output), "stop"]) == 2
    assert "not live" in capsys.readouterr().err
    assert len(run.read().events) == before


@pytest.mark.parametrize(
    "words", [["rollback"], ["rollback", "--to", "x"], ["skip", "9-x"], ["skip", "9-5"], ["lower-rate", "2"], ["policy", "x"]]
)
def test_a_command_line_that_makes_no_sense_is_refused_at_once(tmp_path, words, capsys):
    log = RunLog(tmp_path)
    commands.make_folder(log.folder)
    try:
        code = main(["runlog", "act", str(tmp_path), *words])
    except SystemExit as ended:
        code = ended.code
    log.close()
    assert code == 2 and capsys.readouterr().err
    assert not is_waiting(log.folder)


def test_a_command_that_nobody_takes_is_withdrawn(tmp_path, capsys):
    log = RunLog(tmp_path)
    commands.make_folder(log.folder)
    assert main(["runlog", "act", str(tmp_path), "save", "--wait", "1"]) == 1
    log.close()
    assert "withdrawn" in capsys.readouterr().out and not is_waiting(log.folder)
