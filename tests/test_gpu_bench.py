"""benchmarks/gpu.py writes down what failed and goes on, runs nothing twice, and docs/measured/gpu.md says what ran."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.published import trial
from scripts import gpu_status
from tests.harness import ROOT
from zerobook.utils import subprocess_launch

STAMP = {"date": "2026-11-22", "versions": {"torch": "2.13.0"}}


def test_a_case_that_fails_is_written_down_and_the_next_goes_on(tmp_path):
    file, ran = tmp_path / "part.json", []

    def fails(left, rows):
        ran.append("fails")
        raise AttributeError("it cannot be")

    def works(left, rows):
        ran.append("works")
        assert "it cannot be" in rows["fails"]["died"] and json.loads(file.read_text())["fails"], "written as it ended"
        return {"losses": [1.0]}

    cases = {"fails": fails, "works": works}
    assert gpu.run(cases, file) and gpu.run(cases, file)
    assert ran == ["fails", "works"], "no case is run twice"
    found = json.loads(file.read_text())
    assert found["works"]["losses"] == [1.0] and found["works"]["date"] and found["works"]["versions"]["torch"]


def test_time_ends_between_cases_and_the_next_call_goes_on(tmp_path):
    file, ran = tmp_path / "part.json", []

    def slow(left, rows):
        ran.append(left)
        time.sleep(0.3)
        return {}

    cases = {"one": slow, "two": slow}
    assert not gpu.run(cases, file, time.monotonic() + 0.2)
    assert list(json.loads(file.read_text())) == ["one"] and ran[0] <= 0.2
    assert gpu.run(cases, file) and len(ran) == 2 and ran[1] == gpu.LIMIT_S


def test_a_case_that_was_cut_short_is_begun_again(tmp_path):
    file = tmp_path / "part.json"

    def cut(left, rows):
        time.sleep(0.2)
        return {"died": f"stopped after {left} s"}

    assert not gpu.run({"cut": cut}, file, time.monotonic() + 0.1) and not file.exists()
    assert gpu.run({"cut": cut}, file) and "died" in json.loads(file.read_text())["cut"]


@pytest.mark.parametrize(
    "lacking, said", [(["hypothesis"], "hypothesis is"), (["pytest", "chatterbot_corpus"], "pytest, chatterbot-corpus are")]
)
def test_tests_whose_packages_are_missing_are_not_run(tmp_path, monkeypatch, lacking, said):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in lacking else name)
    monkeypatch.setattr(subprocess_launch, "run", lambda *given, **named: (1, "ModuleNotFoundError: No module"))
    setting = gpu.Setting(tiny=True, cpu=True, folder=tmp_path)
    found = [case(1.0, {}) for case in gpu.tests(setting).values()]
    assert found and all(row == {"not run": f"{said} not installed"} for row in found)


def test_no_speed_of_one_gpu_is_called_ddps(tmp_path):
    setting = gpu.Setting(tiny=True, cpu=False, folder=tmp_path)
    setting.__dict__["materials"] = SimpleNamespace(text=tmp_path)
    assert set(gpu.speed(setting)) == {
        name + words for name in ("single", "zero1", "zero2", "zero3", "fsdp") for words in ("", ", checkpointing")
    }


@pytest.mark.parametrize("on_gpu", [False, True])
def test_only_a_budget_on_a_cpu_limits_stacks_and_the_allocator(monkeypatch, on_gpu):
    launches = []

    def record_launch(line, limit, environment, cwd):
        launches.append((line, environment))
        return 1, "RuntimeError: nothing was run"

    monkeypatch.setattr(subprocess_launch, "runs_on_gpu", lambda environment: on_gpu)
    monkeypatch.setattr(subprocess_launch, "run", record_launch)
    with pytest.raises(trial.TrialError):
        trial.attempt(trial.Arm.of("single", 1), "causal_lm", {}, budget=2**30)
    ((line, environment),) = launches
    assert ("prlimit" in line) is not on_gpu
    assert bool(environment) is not on_gpu


def test_ops_that_no_case_needs_are_not_compiled(monkeypatch):
    lines = []
    ready = (0, '[["cpu_adam", "ready"]]')
    monkeypatch.setattr(subprocess_launch, "run", lambda line, *given, **named: (lines.append(line), ready)[1])
    assert gpu._ops(1.0, {}) == {"ops": {"cpu_adam": "ready"}}
    assert "ops.compile_ops(('cpu_adam', 'pin_memory'))" in lines[0][-1]


def test_curves_of_another_length_are_not_alike():
    assert gpu._furthest([1.0, 2.0], [1.0, 4.0]) == 0.5
    assert math.isinf(gpu._furthest([1.0], [1.0, 2.0])) and math.isinf(gpu._furthest([], []))


def test_a_table_that_came_through_has_not_died(tmp_path):
    from benchmarks.published.table import Table

    setting = gpu.Setting(tiny=True, cpu=True, folder=tmp_path)
    for died in ("", "exit status 1"):
        row = gpu._table(setting, lambda bench, died=died: Table("A", "a title", "a source", died=died), 1.0, {})
        assert row.get("died", "") == died and ("died" in row) == bool(died) and row["letter"] == "A"


def test_the_error_of_a_dead_run_is_its_message():
    said = "Traceback:\n    raise NotImplementedError(\nNotImplementedError: no such kernel\nChildFailedError: of rank 0"
    assert subprocess_launch.last_error(said) == "NotImplementedError: no such kernel"


# --- docs/measured/gpu.md
def test_the_page_says_what_the_results_say():
    text = gpu_status.PAGE.read_text()
    assert gpu_status.written(text, gpu_status.RESULTS) == text, "run scripts/gpu_status.py"


def test_the_first_results_change_what_is_said(tmp_path):
    text = f"before\n{gpu_status.BEGIN}\nold\n{gpu_status.END}\nbehind"
    empty = gpu_status.written(text, tmp_path)
    assert "Nothing yet" in empty and "old" not in empty and empty.startswith("before\n") and empty.endswith("\nbehind")
    peak = {"planned": 9.0, "measured": 10.0}
    for part, rows in {
        "parity": {"a": {"alike": True}, "b": {"alike": False}, "c": {"died": "of it"}},
        "planner": {"a": {"figures": {"GPU memory, peak": peak}}},
        "precision": {"a": {"not run": "no such package"}},
    }.items():
        file = tmp_path / "NVIDIA_H200" / f"{part}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({name: row | STAMP for name, row in rows.items()}))
    said = gpu_status.written(empty, tmp_path)
    assert "Nothing yet" not in said and "One NVIDIA H200, 2026-11-22, torch 2.13.0" in said
    assert "| 2 | 1 | 0 | 1 of 2 within 1e-5 of the CPU |" in said and "-10.0% at most" in said and "| 0 | 0 | 1 |" in said
    assert gpu_status.written(said, tmp_path) == said


def test_a_text_without_marks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 times"):
        gpu_status.written("nothing", tmp_path)


# --- the cases themselves
def test_there_is_no_gpu_result_from_a_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "all", "--device", "cpu", "--scale", "tiny"])
    with pytest.raises(SystemExit, match="--out FOLDER"):
        gpu.main()


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_case_of_every_part_goes_through_on_a_cpu(tmp_path):
    line = [sys.executable, "benchmarks/gpu.py", "all", "--device", "cpu", "--scale", "tiny", "--limit", "1"]
    given = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*line, "--out", str(tmp_path)], cwd=ROOT, env=given, capture_output=True, text=True, timeout=880, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all cases have results" in result.stdout
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert set(found) == set(gpu.PARTS) and all(len(rows) == 1 for rows in found.values())
    for part, rows in found.items():
        assert not any("died" in row for row in rows.values()), (part, rows)
    (trained,) = found["parity"].values()
    assert trained["rolled back"] and len(trained["resumed"]) == 6 and len(trained["losses"]) == 12
    assert trained["resumed"] == pytest.approx(trained["losses"][-6:], rel=1e-5)
    (planned,) = found["planner"].values()
    for kind in ("parameters", "gradients", "optimizer"):
        assert planned["figures"][kind]["planned"] == planned["figures"][kind]["measured"] > 0
    assert found["speed"]["single"]["tokens/s"] > 0 and len(found["precision"]["eager"]["losses"]) == 8
    assert len(found["tables"]["A"]["lines"]) == 4
