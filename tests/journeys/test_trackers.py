"""A journey: a run with trackers is stopped and goes on, from a folder outside the clone. Each tracker shows one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.harness import ROOT, SETTINGS, command

MLFLOW = '''
"""A stub of mlflow that writes down how it is called."""
import json
from types import SimpleNamespace


def note(what, **facts):
    with open("mlflow.jsonl", "a") as file:
        file.write(json.dumps({"what": what, **facts}) + "\\n")


def search_experiments(filter_string):
    return [SimpleNamespace(experiment_id="7")]


def start_run(run_id=None, run_name=None, **more):
    note("start", run_id=run_id, run_name=run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "of-the-first"))


def log_params(params, **more):
    note("params", keys=sorted(params))


def log_metrics(metrics, step=None, **more):
    note("metrics", step=step, loss=metrics.get("loss"), of=metrics.get("step"))


def end_run():
    note("end")


utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
'''


@pytest.mark.launch
@pytest.mark.full
def test_a_run_that_goes_on_is_one_run_in_each_tracker(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "mlflow.py").write_text(MLFLOW)
    (stubs / "mlflow-3.0.0.dist-info").mkdir()
    (stubs / "mlflow-3.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mlflow\nVersion: 3.0.0\n")
    (tmp_path / "dies.py").write_text(
        "import os\nfrom zerobook.training.hooks import Hook\n\n\nclass Dies(Hook):\n    def on_log(self, trainer, records):\n"
        "        if records[-1].step == 6:\n            os._exit(1)\n"
    )
    environment = os.environ | SETTINGS | {"PYTHONPATH": f"{stubs}:{ROOT}", "WANDB_PROJECT": "of-mine", "WANDB_MODE": "offline"}
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", validation_split_percentage=0, block_size=64,
        per_device_train_batch_size=2, max_train_steps=8, logging_steps=1, save_steps=4, output_dir=tmp_path / "run",
        report_to=["tensorboard", "wandb", "mlflow"], run_name="first-try",
    )  # fmt: skip
    for more, code in (({"hooks": f"{tmp_path / 'dies.py'}:Dies"}, 1), ({"resume_from_checkpoint": "auto"}, 0)):
        line = command("ddp", 2, "causal_lm", flags | more)
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == code, done.stdout + done.stderr

    calls = [json.loads(text) for text in (tmp_path / "mlflow.jsonl").read_text().splitlines()]
    starts = [call for call in calls if call["what"] == "start"]
    assert [(call["run_id"], call["run_name"]) for call in starts] == [(None, "first-try"), ("of-the-first", None)]
    assert sum(call["what"] == "params" for call in calls) >= 1
    first_end = next(i for i, call in enumerate(calls) if call["what"] == "start" and call["run_id"])
    assert not any(call["what"] == "params" for call in calls[first_end:]), "the config is logged once"
    steps = [(call["step"], call["of"]) for call in calls if call["what"] == "metrics" and call["of"]]
    assert steps == [*((n, n) for n in range(1, 7)), *((n + 2, n) for n in range(5, 9))], "no step number twice"

    points: dict[int, float] = {}
    for file in sorted((tmp_path / "run" / "logs" / "of-mine").glob("events.out.tfevents.*")):
        for event in EventAccumulator(str(file)).Reload().Scalars("step"):
            assert event.step not in points
            points[event.step] = event.value
    assert points == {step: float(of) for step, of in steps}

    kept = json.loads((tmp_path / "run" / "runlog" / "trackers.json").read_text())
    runs = [folder.name for folder in tmp_path.rglob("offline-run-*") if folder.is_dir()]
    assert len(runs) == 2 and all(name.endswith(kept["wandb"]) for name in runs), "wandb sync puts both into one run"


def test_a_tracker_that_is_not_installed_is_named(tmp_path):
    recipe = str(ROOT / "recipes" / "causal_lm.py")
    flags = {"model_name_or_path": "m", "dataset_name": "d", "report_to": "swanlab", "output_dir": tmp_path / "run"}
    line = [sys.executable, recipe, "--dry-run", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]
    environment = os.environ | SETTINGS
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "report_to: swanlab is not installed. Run: pip install swanlab" in done.stderr
