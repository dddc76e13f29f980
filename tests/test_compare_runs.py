"""Several runs in one table: what differs in their settings, and what came of each."""

from __future__ import annotations

import json
import math

import pytest

from zerobook.cli.main import main
from zerobook.cli.runlog import runlog
from zerobook.errors import RunLogError
from zerobook.runlog.jsonl import encode, stream
from zerobook.runlog.lifecycle import begin
from zerobook.runlog.writer import EVENTS, RunLog

CONFIG = {"model_name_or_path": "org/base", "train_file": "/data/chats.jsonl", "num_train_epochs": 1.0, "lora_r": 16}


def make_run(folder, losses, *, speed=1000.0, commit="abc", **settings):
    log = RunLog(folder)
    begin(
        log, config=CONFIG | {"output_dir": str(folder)} | settings, versions={"torch": "2"}, step=0, sources={}, argv=[],
        plan={"name": "DDP", "world_size": 2}, live={"strategy": "DDP", "world_size": 2}, batch="", total_steps=30, data={},
        code={"file": "lora_finetune.py", "commit": commit, "changed_files": 0},
    )  # fmt: skip
    log.event("memory", per_rank_bytes=[{}], trained_parameters=1_500_000)
    for own in (10**9, 3 * 10**9, 2 * 10**9):
        log.event("machine", memory_used=1, memory_total=2, swap_used=0, own=own, gpus=[], allocator=None)
    for index, loss in enumerate(losses, 1):
        for tokens_per_second in (1.0, speed) if index == 1 else (speed,):  # the first log point contains the start
            log.event("metrics", steps=[1, 10 * index], loss=loss, tokens_per_second=tokens_per_second, data_wait=0.0)
        log.event("eval", step=10 * index, seconds=0.1, samples=[], loss=loss)
    log.event("run_end", progress={"step": 30}, seconds={})
    log.close()
    return folder


@pytest.fixture
def runs(tmp_path):
    slow = make_run(tmp_path / "slow", [3.0, 2.5, 2.25], learning_rate=1e-4)
    fast = make_run(tmp_path / "fast", [3.0, 1.75, 2.0], learning_rate=2e-4, speed=1500.0)
    rank = make_run(tmp_path / "rank", [3.0, 2.0, 1.875], learning_rate=1e-4, lora_r=64, train_file="/data/other.jsonl")
    return [slow, fast, rank]


def test_the_table_has_figures_and_differing_settings_of_every_run_within_80_columns(runs, capsys):
    assert main(["runlog", "compare", *map(str, runs)]) == 0
    out = capsys.readouterr().out
    rows = {line[:24].strip(): line[24:].split() for line in out.splitlines()}
    assert max(map(len, out.splitlines())) <= 80
    assert rows["held-out loss"] == ["2.2500", "2.0000", "1.8750"]
    assert rows["lowest held-out loss"] == ["2.2500", "1.7500", "1.8750"]
    assert rows["at step"] == ["30", "20", "30"]
    assert rows["tokens/s"] == ["1,000", "1,500", "1,000"]
    assert rows["trained parameters"] == ["1.50M"] * 3
    assert rows["learning_rate"] == ["0.0001", "0.0002", "0.0001"]
    assert rows["lora_r"] == ["16", "16", "64"]
    assert "output_dir" not in out and "num_train_epochs" not in out


def test_json_has_the_figures_as_numbers(runs, capsys):
    main(["runlog", "compare", *map(str, runs), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [one["best_loss"] for one in told] == [2.25, 1.75, 1.875] and [one["best_step"] for one in told] == [30, 20, 30]
    assert [one["memory"] for one in told] == [3 * 10**9] * 3 and told[1]["tokens_per_second"] == 1500
    assert told[2]["settings"] == {"learning_rate": 1e-4, "lora_r": 64, "train_file": "/data/other.jsonl"}


def test_json_has_the_first_step_whose_loss_is_not_that_of_the_first_run(runs, capsys):
    for run, losses in zip(runs, ([3.0, 2.5, 2.0], [3.0, 2.5, 1.0], [3.0, 2.5, 2.0]), strict=True):
        log = RunLog(run, attempt=False)
        log.steps([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
        log.close()
    main(["runlog", "compare", *map(str, runs), "--json"])
    assert [one["first_differing_step"] for one in json.loads(capsys.readouterr().out)] == [None, 3, None]


def test_many_runs_and_runs_with_nothing_measured_stay_within_80_columns(tmp_path, capsys):
    runs = [make_run(tmp_path / f"run-with-a-long-name-{seed}", [], seed=seed) for seed in range(7)]
    main(["runlog", "compare", *map(str, runs)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(out.count(f" {seed} ") for seed in range(6)), "every run has its column"


def test_a_run_whose_start_is_damaged_is_compared(runs, capsys):
    file = runs[0] / "runlog" / EVENTS
    file.write_bytes(b"".join(encode(event) for event in stream(file) if event["type"] != "run_start"))
    assert main(["runlog", "compare", *map(str, runs)]) == 0
    assert "30 of 30" in capsys.readouterr().out


def test_another_commit_of_the_recipe_is_a_difference(tmp_path, capsys):
    runs = [make_run(tmp_path / commit, [1.0], commit=commit * 10) for commit in ("aaaa", "bbbb")]
    main(["runlog", "compare", *map(str, runs), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [one["settings"]["code"].split()[-1] for one in told] == ["aaaaaaaaaaaa", "bbbbbbbbbbbb"]


def test_one_run_cannot_be_compared(runs):
    with pytest.raises(RunLogError, match="two"):
        runlog(["compare", str(runs[0])])


def test_a_loss_that_is_not_finite_is_told_as_such(tmp_path, capsys):
    """The last loss is not the last finite one, and no finite loss is as far from another one as a loss that is not finite."""
    runs = [make_run(tmp_path / name, losses) for name, losses in (("good", [3.0, 2.0]), ("bad", [3.0, 1.5, math.nan]))]
    for run, losses in zip(runs, ([9.0, 3.0, 2.0], [1.0, math.nan, 2.0]), strict=True):
        log = RunLog(run, attempt=False)
        log.steps([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
        log.close()
    main(["runlog", "compare", *map(str, runs)])
    out = capsys.readouterr().out
    rows = {line[:24].strip(): line[24:].split() for line in out.splitlines()}
    assert rows["held-out loss"] == ["2.0000", "-"]
    assert rows["lowest held-out loss"] == ["2.0000", "1.5000"]
    assert " ".join(out.split()).endswith("(9.0 and 1.0), most at step 2 (3.0 and not finite).")
