"""Logs of other programs: each format is recognised by its content, and read as it was written."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
import shutil
import struct
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.detector import main
from scripts.event_files import read_scalars
from scripts.other_logs import COLUMNS, read_log
from scripts.other_runs import judge_run
from zerobook.errors import DataError
from zerobook.monitor.finding import Point
from zerobook.runlog.writer import RunLog

SAMPLES = Path(__file__).parent / "fixtures" / "logs"
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


def test_the_settings_beside_the_event_files_of_a_tracker_are_no_second_run(tmp_path):
    shutil.copytree(SAMPLES / "runs", tmp_path / "run")
    (tmp_path / "run" / "1764400000.12").mkdir()
    settings = event_file([(0, "hparams/learning_rate", 1e-3)])
    (tmp_path / "run" / "1764400000.12" / "events.out.tfevents.1.host.1.0").write_bytes(settings)

    assert [record["step"] for record in read_log(tmp_path).records] == STEPS


def test_losses_of_a_run_that_are_not_finite_are_points(tmp_path):
    log = RunLog(tmp_path)
    step = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 1, "ids": []}
    losses = [2.0, 2.1, math.nan]
    log.steps([{**step, "step": number, "loss": loss, "cursor": [0, 1]} for number, loss in enumerate(losses, 1)])
    log.event("run_end", status="finished")
    log.close()

    assert [str(record["loss"]) for record in read_log(tmp_path).records] == ["2.0", "2.1", "nan"]


def test_event_files_of_a_resumed_run_are_one_curve(tmp_path):
    (file,) = (SAMPLES / "runs").rglob("events.out.tfevents.*")
    for time in (1, 2):
        shutil.copy(file, tmp_path / f"events.out.tfevents.{time}.host.1.0")

    assert [record["step"] for record in read_log(tmp_path).records] == [*STEPS, *STEPS]


def test_a_torn_event_file_is_read_up_to_its_end(tmp_path):
    (file,) = (SAMPLES / "runs").rglob("events.out.tfevents.*")
    torn = tmp_path / "events.out.tfevents.1.host.1.0"
    torn.write_bytes(file.read_bytes()[:7000])

    steps = [record["step"] for record in read_log(torn).records]

    assert 2 < len(steps) < len(STEPS) and steps == STEPS[: len(steps)]


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

    assert curve(read_log(file)) == [(10, 2.5), (20, 2.25)]


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


def test_steps_that_were_done_again_are_another_branch(tmp_path):
    steps = [1, 2, 3, 4, 3, 4, 5, 2, 3]
    log = read_log(written(tmp_path, "a.csv", "step,loss\n" + "".join(f"{step},1\n" for step in steps)))

    assert [record["branch"] for record in log.records] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert log.last_current_steps() == {2: math.inf, 1: 1, 0: 1}


# --- what would have been done
def curve_with_a_divergence(folder):
    """Logged every fifth step, with norms and rates, one odd point, a divergence from step 700 on, and a restart at 650."""
    noise = random.Random(3)
    rows = []
    for first, last in ((5, 840), (650, 1500)):
        for step in range(first, last, 5):
            loss = 2 + 5 * math.exp(-step / 200) + noise.gauss(0, 0.03)
            if step == 400:
                loss *= 2
            if first == 5 and step >= 700:
                loss += 1.2 + (step - 700) / 50
            rows.append(f"{step},{loss},{1 + noise.random()},1e-3\n")
    return written(folder, "run.csv", "step,loss,grad_norm,lr\n" + "".join(rows))


def test_the_command_says_what_it_would_have_done_in_each_log(tmp_path, capsys):
    healthy = written(tmp_path, "healthy.csv", "iter,train_loss\n" + "".join(f"{i},{2 + 3 / i}\n" for i in range(1, 80)))

    assert main(["try", str(curve_with_a_divergence(tmp_path)), str(healthy)]) == 0

    first, second = capsys.readouterr().out.split("healthy.csv")
    assert "1 alarm, 1 rollback, 1 outlier" in first and "0 alarms, 0 rollbacks" in second
    # A run of 1,500 steps saves at step 14, and then every 149 steps. The newest that is proven good is from before the spike.
    assert "610" in first
    assert main(["try", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_the_page_of_another_programs_run_has_its_curves_and_what_was_found(tmp_path, capsys):
    file = curve_with_a_divergence(tmp_path)
    assert main(["page", str(file)]) == 0

    page = (tmp_path / "run.csv.report.html").read_text()
    assert "1 alarm, 1 rollback" in page and "go back to step 610" in page and "grad_norm" in page
    chart = json.loads(re.search(r'id="curves"><script type="application/json">(.*?)</script>', page)[1])
    curves = {curve["name"]: curve for curve in chart["panels"][0]["curves"]}
    assert [panel["title"] for panel in chart["panels"]] == ["loss", "gradient norm", "learning rate"]
    assert curves["abandoned: branch 0"]["x"][-1] == 835 and curves["the run as it is"]["x"][-1] == 1495
    assert curves["rollback"]["x"] == [735] and curves["rollback"]["y"][0] > 3, "it stands on the branch that was given up"
    assert curves["anomaly"]["x"] == [400] and curves["spike"]["x"][0] == 700


def test_the_page_of_a_folder_of_trainer_is_written_into_it(tmp_path, capsys):
    shutil.copy(SAMPLES / "trainer_state.json", tmp_path)

    assert main(["page", str(tmp_path)]) == 0

    assert "held out" in (tmp_path / "report.html").read_text()


def points(losses):
    return [Point(step=step, loss=loss) for step, loss in enumerate(losses, 1)]


def test_a_second_run_in_a_log_is_not_a_spike():
    losses = [2 + 3 * math.exp(-step / 20) + 0.01 * (step % 3) for step in range(100)]

    judgements = judge_run(points(losses + losses), range(10, 200, 10)).judgements

    assert not any(judgement.action for judgement in judgements)
    assert judgements[-1].finding.kind == "reset"


def test_norms_of_zero_do_not_end_the_judgement():
    curve = []
    for step in range(1, 121):
        rate = 1e-3 if step < 60 else 2e-3
        loss = 2.0 + 0.01 * (step % 3) + 0.8 * (step >= 62)
        curve.append(Point(step=step, loss=loss, grad_norm=0.0, learning_rate=rate))

    assert judge_run(curve, range(10, 120, 10)).judgements


def test_losses_that_stay_not_finite_are_one_rollback():
    losses = [2 + 0.01 * (step % 3) for step in range(60)] + [math.nan] * 40

    judgements = judge_run(points(losses), range(10, 100, 10)).judgements

    assert [(judgement.finding.step, judgement.action.kind, judgement.action.to_step) for judgement in judgements] == [
        (61, "replay", 50)
    ]


def test_without_a_checkpoint_from_before_it_the_run_stops():
    losses = [2.0] * 8 + [math.inf] * 3

    (judgement,) = judge_run(points(losses), [10]).judgements

    assert judgement.action.kind == "stop" and judgement.reaction.startswith("stop: there is no checkpoint")


any_loss = st.one_of(st.floats(1e-3, 1e6), st.sampled_from([0.0, -1.0, math.nan, math.inf]))


@given(st.lists(any_loss, min_size=1, max_size=80), st.lists(st.integers(0, 90), max_size=5))
def test_any_curve_is_judged(losses, saved_steps):
    hindsight = judge_run(points(losses), sorted(saved_steps))

    for judgement in hindsight.judgements:
        assert judgement.reaction and (judgement.action is not None) == judgement.finding.needs_action


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
        ("{\n{\n{\n", "3 lines"),
        ("\0\0\0PNG\n\0", "none"),
        # Other code of the process may have raised the limit of a cell.
        ("step,loss\n1," + "9" * 200_000, "CSV|1 rows"),
        ('[{"step": 1' + "0" * 400 + ', "loss": 1}, {"step": 2, "loss": 1}]', "1 rows"),
        ('{"step": 1' + "0" * 5000 + ', "loss": 1}', "1 lines"),
    ],
)
def test_a_file_that_is_no_curve_is_an_error_that_says_what_was_found(tmp_path, text, found):
    with pytest.raises(DataError, match=found):
        read_log(written(tmp_path, "x.csv", text))


class EvaluationLoader:
    def __len__(self):
        return 7


def test_held_out_losses_of_trainers_output_have_the_steps_of_the_training(tmp_path):
    """Two bars are drawn after an evaluation, in an order that changes from one evaluation to the next."""
    from transformers.trainer_callback import ProgressCallback, TrainerControl, TrainerState

    def train():
        callback = ProgressCallback()
        state = TrainerState(is_world_process_zero=True, is_local_process_zero=True, max_steps=40)
        callback.on_train_begin(None, state, TrainerControl())
        for step in range(1, 41):
            state.global_step = step
            callback.on_step_end(None, state, TrainerControl())
            if step % 5 == 0:
                callback.on_log(None, state, TrainerControl(), logs={"loss": 3 - step / 40})
            if step % 10 == 0:
                for _ in range(7):
                    callback.on_prediction_step(None, state, TrainerControl(), eval_dataloader=EvaluationLoader())
                callback.on_log(None, state, TrainerControl(), logs={"eval_loss": 3.1 - step / 40})
                callback.on_evaluate(None, state, TrainerControl())
        callback.on_train_end(None, state, TrainerControl())

    for number in range(10):
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            train()
        log = read_log(written(tmp_path, f"{number}.txt", output.getvalue()))
        assert len(log.records) == 8 and sorted(log.held_out) == [10, 20, 30, 40]


def test_decimal_commas_are_numbers_or_an_error(tmp_path):
    assert curve(read_log(written(tmp_path, "a.csv", "step;loss\n10;2,31\n20;2\n30;1,9\n"))) == [
        (10, 2.31),
        (20, 2.0),
        (30, 1.9),
    ]
    with pytest.raises(DataError, match=r"line 2.*more cells"):
        read_log(written(tmp_path, "b.csv", "step,loss\n10,2,31\n20,2,11\n"))


def test_several_curves_in_one_table_are_refused_by_their_names(tmp_path):
    with pytest.raises(DataError, match=r"run .*: a, b"):
        read_log(written(tmp_path, "runs.csv", "step,run,loss\n10,a,2\n20,a,1\n10,b,3\n20,b,2\n"))


def test_a_table_with_held_out_losses_in_rows_of_their_own_is_one_curve(tmp_path):
    log = read_log(written(tmp_path, "wide.csv", "step,split,loss,eval_loss\n10,train,2.9,\n20,train,2.8,\n20,eval,,3.0\n"))
    assert curve(log) == [(10, 2.9), (20, 2.8)] and log.held_out == {20: 3.0}


def test_output_of_a_run_that_was_resumed_with_more_steps_keeps_all_points(tmp_path):
    lines = [f"{{'loss': {3 - step / 100}}}\n| {step}/{total} [00:01<00:01]" for total, step in
             [(100, 10), (100, 20), (200, 30), (200, 40), (200, 50)]]  # fmt: skip
    assert [step for step, _ in curve(read_log(written(tmp_path, "out.txt", "\n".join(lines))))] == [10, 20, 30, 40, 50]


def test_held_out_losses_that_are_not_finite_are_left_out(tmp_path):
    history = [{"step": step, "loss": 2 - step / 100} for step in range(10, 60, 10)]
    history += [{"step": 20, "eval_loss": math.nan}, {"step": 40, "eval_loss": 1.9}]
    assert read_log(written(tmp_path, "trainer_state.json", json.dumps({"log_history": history}))).held_out == {40: 1.9}
