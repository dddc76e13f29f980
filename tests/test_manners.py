"""Manners of the commands: wrong names, JSON, and what a run says at its end."""

from __future__ import annotations

import json

import pytest

from tests.test_runlog import run  # noqa: F401  a fixture
from zerobook.cli.main import COMMANDS, HELP, main


def test_a_wrong_command_is_answered_with_the_nearest(capsys):
    assert main(["runlgo", "status"]) == 2
    assert "zerobook runlgo: no such command. Did you mean zerobook runlog?" in capsys.readouterr().err
    assert main(["xyz"]) == 2 and "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("typed, meant", [
    ("runlog stauts x", "status"), ("runlog reprot x", "report"), ("data inspect x.jsonl --modle y", "--model"),
    ("checkpoint lst x", "list"), ("export x --outptu y", "--output"),
])  # fmt: skip
def test_a_wrong_word_or_flag_is_answered_with_the_nearest(capsys, typed, meant):
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1
    assert said.startswith(f"zerobook {typed.split()[0]}") and (f"Did you mean {meant}?" in said or "required" in said)


def test_a_number_of_gpus_is_not_the_name_of_one(capsys):
    assert main(["plan", "--gpu", "2", "recipes/causal_lm.py"]) == 2
    assert "Did you mean --gpus 2?" in capsys.readouterr().err


def test_help_names_every_command():
    assert all(f"\n  {command} " in HELP for command in COMMANDS)


def test_what_is_read_can_be_read_as_json(run, capsys):  # noqa: F811
    def told(*arguments):
        assert main(["runlog", *arguments, str(run), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert told("status")["status"].startswith("Finished: step 40") and told("status")["run_end"]["progress"] == {"step": 40}
    shown = told("show")
    assert [event["onset"] for event in shown["spikes"]] == [18]
    assert [event["type"] for event in shown["decisions"][0]] == ["spike", "decision", "rollback", "skip", "rollback"]
    assert shown["time"]["steps_given_up"]
    assert shown["branches"][0]["number"] == 0
    assert shown["skipped"][0]["samples"] == 3
    assert {event["step"] for event in shown["checkpoints"]} == {10, 30}
    assert main(["runlog", "show", str(run), "spikes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown["spikes"]
    with pytest.raises(SystemExit, match="2"):
        main(["runlog", "verify", str(run), "--json"])
    assert "--json" in capsys.readouterr().err
