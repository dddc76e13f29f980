"""Logs of other programs: each format is recognised by its content, and read as it was written."""

from __future__ import annotations

import csv
import json
import math
import shutil
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT
from zerobook.errors import DataError
from zerobook.runlog.event_files import read_scalars
from zerobook.runlog.other_logs import COLUMNS, read_log

SAMPLES = ROOT / "tests" / "fixtures" / "logs"
"""What transformers 5.23 wrote about a run of 40 steps, logged every second step and evaluated every tenth."""
STEPS = list(range(2, 41, 2))


def written(folder, name, text):
    file = folder / name
    file.write_text(text)
    return file


def curve(log):
    return [(record["step"], record["loss"]) for record in log.records]


# --- transformers and TensorBoard, as the libraries write them
def test_one_run_is_the_same_curve_in_each_file_that_transformers_writes():
    state = read_log(SAMPLES / "trainer_state.json")
    events = read_log(SAMPLES / "runs")
    output = read_log(SAMPLES / "output.txt")

    assert [record["step"] for record in state.records] == STEPS
    for log, precision in ((events, 1e-6), (output, 1e-3)):
        assert [record["step"] for record in log.records] == STEPS
        for name in ("loss", "grad_norm", "learning_rate"):
            expected = [record[name] for record in state.records]
            assert [record[name] for record in log.records] == pytest.approx(expected, rel=precision)
        assert list(log.held_out) == [10, 20, 30, 40]
        assert list(log.held_out.values()) == pytest.approx(list(state.held_out.values()), rel=precision)
    assert len({state.file_format, events.file_format, output.file_format}) == 3


def test_the_mean_loss_of_the_whole_run_is_no_point(tmp_path):
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "train_loss": 2.5, "train_runtime": 1.0}]
    file = written(tmp_path, "trainer_state.json", json.dumps({"log_history": history}))

    assert curve(read_log(file)) == [(1, 3.0), (2, 2.0)]


def test_the_newest_history_in_a_trainers_output_folder_is_read(tmp_path):
    for step in (4, 40):
        history = [{"step": number, "loss": 2.0} for number in range(step)]
        (tmp_path / f"checkpoint-{step}").mkdir()
        written(tmp_path / f"checkpoint-{step}", "trainer_state.json", json.dumps({"log_history": history}))

    assert len(read_log(tmp_path).records) == 40


def test_a_dead_run_is_read_as_it_is(tmp_path):
    history = [{"step": 1, "loss": 2.0, "grad_norm": 1.0}, {"step": 2, "loss": 0.0, "grad_norm": math.nan}]
    file = written(tmp_path, "trainer_state.json", json.dumps({"log_history": history}))

    last = read_log(file).records[-1]

    assert last["loss"] == 0.0 and math.isnan(last["grad_norm"])


def test_output_without_progress_bars_numbers_its_points(tmp_path):
    lines = ["{'loss': 2.5, 'grad_norm': nan, 'epoch': 0.1}", "{'eval_loss': 2.2}", "{'loss': 'nan', 'grad_norm': '1e-3'}"]
    file = written(tmp_path, "train.log", "Loading.\n" + "\n".join(lines) + "\nSaving: 100%|####| 1/1 [00:00<00:00]\n")

    log = read_log(file)

    assert [record["step"] for record in log.records] == [1, 2] and log.held_out == {1: 2.2}
    assert math.isnan(log.records[0]["grad_norm"]) and math.isnan(log.records[1]["loss"])
    assert log.records[1]["grad_norm"] == 1e-3 and "numbered" in log.file_format


def test_event_files_of_several_runs_are_refused_by_name(tmp_path):
    for name in ("first", "second"):
        shutil.copytree(SAMPLES / "runs", tmp_path / name)

    with pytest.raises(DataError, match=r"first.*second"):
        read_log(tmp_path)


def test_event_files_of_a_resumed_run_are_one_curve(tmp_path):
    (file,) = (SAMPLES / "runs").rglob("events.out.tfevents.*")
    for time in (1, 2):
        shutil.copy(file, tmp_path / f"events.out.tfevents.{time}.host.1.0")

    assert [record["step"] for record in read_log(tmp_path).records] == [*STEPS, *STEPS]


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def message(number, content):
    return varint(8 * number + 2) + varint(len(content)) + content


def event_file(scalars):
    content = b""
    for step, tag, value in scalars:
        summary = message(1, message(1, tag.encode()) + varint(8 * 2 + 5) + struct.pack("<f", value))
        # As the library does it, a step of 0 is left out.
        event = (
            varint(8 * 1 + 1) + struct.pack("<d", 1.8e9) + (varint(16) + varint(step) if step else b"") + message(5, summary)
        )
        content += struct.pack("<Q", len(event)) + b"\0" * 4 + event + b"\0" * 4
    return content


scalars = st.lists(st.tuples(st.integers(0, 2**62), st.text(max_size=20), st.floats(width=32, allow_nan=False)), max_size=8)


@given(scalars, st.integers(0, 400))
def test_scalars_come_back_up_to_a_torn_record(expected, cut):
    content = event_file(expected)

    assert list(read_scalars(content)) == expected
    torn = list(read_scalars(content[: len(content) - cut]))
    assert torn == expected[: len(torn)]


@given(st.binary(max_size=300))
def test_damaged_event_files_end_where_the_damage_begins(content):
    assert len(list(read_scalars(event_file([(7, "loss", 1.0)]) + content))) >= 1


# --- exports
def test_the_table_that_tensorboards_page_downloads(tmp_path):
    file = written(tmp_path, "run.csv", "Wall time,Step,Value\n1764000000.1,10,2.5\n1764000001.2,20,2.25\n")
    norms = written(tmp_path, "norm.csv", "Wall time,Step,Value\n1764000000.1,10,1.5\n1764000001.2,20,0.5\n")

    log = read_log(file, norms)

    assert curve(log) == [(10, 2.5), (20, 2.25)]
    assert [record["grad_norm"] for record in log.records] == [1.5, 0.5]


@pytest.mark.parametrize("axis", ["Step", "train/global_step"])
def test_the_chart_that_weights_and_biases_exports(tmp_path, axis):
    header = f'"{axis}","a - b-1 - train/loss","a - b-1 - train/loss__MIN","a - b-1 - train/loss__MAX"'
    file = written(tmp_path, "wandb.csv", f'{header}\n"10","2.5","2","3"\n"20","","",""\n"30","NaN","NaN","NaN"\n')

    records = read_log(file).records

    assert [record["step"] for record in records] == [10, 30]
    assert records[0]["loss"] == 2.5 and math.isnan(records[1]["loss"])


def test_a_chart_of_several_runs_is_refused_by_their_names(tmp_path):
    file = written(tmp_path, "wandb.csv", '"Step","one - train/loss","two - train/loss"\n1,2,3\n2,3,4\n')

    with pytest.raises(DataError, match=r"one - train/loss, two - train/loss"):
        read_log(file)


def test_the_history_of_weights_and_biases_counts_in_the_trainers_steps(tmp_path):
    rows = [
        {"_step": 0, "train/global_step": 10, "train/loss": 3.0, "train/learning_rate": 1e-4, "_timestamp": 1.7e9},
        {"_step": 1, "train/global_step": 10, "eval/loss": 2.8},
        {"_step": 2, "train/global_step": 20, "train/loss": "Infinity", "train/grad_norm": "NaN"},
    ]
    lines = written(tmp_path, "history.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with open(tmp_path / "history.csv", "w", newline="") as handle:
        table = csv.DictWriter(handle, ["", *dict.fromkeys(name for row in rows for name in row)])
        table.writeheader()
        table.writerows(rows)

    for file in (lines, tmp_path / "history.csv"):
        log = read_log(file)
        assert curve(log) == [(10, 3.0), (20, math.inf)] and log.held_out == {10: 2.8}
        assert log.records[0]["learning_rate"] == 1e-4 and math.isnan(log.records[1]["grad_norm"])


def test_rows_of_one_step_are_one_point(tmp_path):
    text = "epoch,lr-AdamW,step,train_loss_step,val_loss\n,0.1,9,,\n0,,9,2.5,\n0,,9,,2.4\n,0.1,19,,\n0,,19,2.0,\n"

    log = read_log(written(tmp_path, "metrics.csv", text))

    assert curve(log) == [(9, 2.5), (19, 2.0)] and log.held_out == {9: 2.4}
    assert [record["learning_rate"] for record in log.records] == [0.1, 0.1]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("loss", ["loss", "Train_Loss", " lm loss "])
@pytest.mark.parametrize("step", ["iter", "iteration", "Global_Step"])
def test_usual_names_of_columns_are_known(tmp_path, step, loss, separator):
    rows = [[step, loss, "lr", "note"], ["1", "2.5", "1e-4", "a"], ["2", "", "", "b"], ["3", "inf", "", "c"]]
    file = written(tmp_path, "a.csv", "\n".join(separator.join(row) for row in rows))

    log = read_log(file)

    assert curve(log) == [(1, 2.5), (3, math.inf)]
    assert [record["learning_rate"] for record in log.records] == [1e-4, None]


def test_broken_lines_among_json_are_left_out(tmp_path):
    file = written(tmp_path, "a.jsonl", '{"_step": 1, "train/loss": 3}\nbroken\n{"_step": 2, "train/loss": 2}\n')

    assert curve(read_log(file)) == [(1, 3), (2, 2)]


# --- any content
names = st.sampled_from([name for names in COLUMNS.values() for name in names] + ["epoch", "x"])
cells = st.one_of(st.floats(), st.integers(), st.text(max_size=8), st.none(), st.booleans())


@given(st.lists(st.dictionaries(names, cells, max_size=5), max_size=8))
def test_any_table_is_a_curve_or_a_named_error(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("any") / "a.json"
    file.write_text(json.dumps(rows))

    try:
        log = read_log(file)
    except DataError as error:
        assert "a.json" in str(error)
    else:
        assert len(log.records) > 1 and all(isinstance(record["step"], int) for record in log.records)


@given(st.one_of(st.binary(max_size=200), st.text("{}[]'\":,;\n loss123|/ [\0", max_size=200).map(str.encode)))
def test_any_bytes_are_a_curve_or_a_named_error(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("any") / "a.log"
    file.write_bytes(content)

    try:
        assert len(read_log(file).records) > 1
    except DataError as error:
        assert "a.log" in str(error)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("name,price\nx,1\n", "name, price"),
        ("", "none"),
        ("step,eval_loss\n1,2\n2,3\n", "eval_loss, step"),
        ("step,loss\na,b\n", "0 rows"),
        ("step,loss\n1,2\n", "1 rows"),
        ("{}\n{}\n", "none"),
        ("{\n{\n{\n", "3 of its lines"),
        ("\0\0\0PNG\n\0", "none"),
        ("step,loss\n1," + "9" * 200_000, "CSV"),
        ('[{"step": 1' + "0" * 400 + ', "loss": 1}, {"step": 2, "loss": 1}]', "1 rows"),
        ('{"step": 1' + "0" * 5000 + ', "loss": 1}', "1 of its lines"),
    ],
)
def test_a_file_that_is_no_curve_is_an_error_that_says_what_was_found(tmp_path, text, found):
    with pytest.raises(DataError, match=found):
        read_log(written(tmp_path, "x.csv", text))
