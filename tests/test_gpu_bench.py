"""benchmarks/gpu.py records what failed and goes on, runs nothing twice, and docs/measured/gpu.md says what ran."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from importlib.metadata import version
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import gpu, gpu_models, gpu_parts, gpu_setting, gpu_waits
from benchmarks.published import trial
from scripts import gpu_status
from tests.harness import ROOT
from zerobook.utils import subprocess_launch


def record(folder, **versions):
    return gpu.Record(folder / "one.json", {"device": "NVIDIA H100", "versions": {"torch": "2.13.0", **versions}})


def quiet(record, until=math.inf, at_once=1):
    return gpu.Runner(record, until, at_once, show=lambda line: None)


def test_a_case_that_fails_is_recorded_and_the_next_one_runs(tmp_path):
    ran = []

    def fails(limit, rows):
        ran.append("fails")
        raise AttributeError("it cannot be")

    def works(limit, rows):
        ran.append("works")
        written = json.loads((tmp_path / "one.json").read_text())["parts"]["part"]
        assert "it cannot be" in rows["fails"]["error"]
        assert "Traceback" in written["fails"]["output"], "a result is written as its case ends"
        return {"losses": [1.0]}

    cases = {"fails": gpu.Case(fails, 1), "works": gpu.Case(works, 1)}
    quiet(record(tmp_path)).run("part", cases)
    quiet(record(tmp_path)).run("part", cases)
    assert ran == ["fails", "works"], "no case is run twice"
    content = json.loads((tmp_path / "one.json").read_text())
    assert content["parts"]["part"]["works"]["losses"] == [1.0]
    assert content["parts"]["part"]["works"]["seconds"] >= 0
    assert content["device"] == "NVIDIA H100"


def test_results_of_other_versions_are_not_mixed(tmp_path):
    quiet(record(tmp_path)).run("part", {"works": gpu.Case(lambda limit, rows: {}, 1)})
    with pytest.raises(SystemExit, match="--out"):
        record(tmp_path, torch="2.11.0")


def test_a_case_starts_only_where_its_expected_seconds_are_left(tmp_path):
    limits = []

    def slow(limit, rows):
        limits.append(limit)
        return {}

    cases = {"long": gpu.Case(slow, 60), "short": gpu.Case(slow, 1)}
    results = record(tmp_path)
    quiet(results, time.monotonic() + 30).run("part", cases)
    assert list(results.rows("part")) == ["short"]
    assert limits[0] <= 30
    assert list(results.unfinished) == ["part: long"]
    later_call = record(tmp_path)
    quiet(later_call).run("part", {"short": cases["short"]})
    assert list(later_call.unfinished) == ["part: long"], "a call that runs other cases does not say that all have results"
    results = record(tmp_path)
    quiet(results).run("part", cases)
    assert set(results.rows("part")) == {"long", "short"}
    assert limits[1] == gpu.LIMIT_S
    assert not json.loads(results.path.read_text())["unfinished"]


def test_a_case_that_was_cut_short_is_begun_again(tmp_path):
    def cut(limit, rows):
        time.sleep(0.2)
        return {"error": f"stopped after {limit} s"}

    results = record(tmp_path)
    quiet(results, time.monotonic() + 0.1).run("part", {"cut": gpu.Case(cut, 0)})
    assert not results.rows("part")
    assert "cut short" in results.unfinished["part: cut"]
    quiet(results).run("part", {"cut": gpu.Case(cut, 0)})
    assert "error" in results.rows("part")["cut"]


def test_cases_beside_each_other_wait_for_their_reference(tmp_path):
    both_run = threading.Barrier(2, timeout=30)

    def reference(limit, rows):
        time.sleep(0.2)
        return {"losses": [1.0]}

    def compared(limit, rows):
        both_run.wait()
        return {"reference": rows["reference"]["losses"]}

    cases = {
        "one": gpu.Case(compared, 1, "reference"),
        "two": gpu.Case(compared, 1, "reference"),
        "reference": gpu.Case(reference, 1),
    }
    results = record(tmp_path)
    quiet(results, at_once=2).run("part", cases, at_once=True)
    assert results.rows("part")["one"]["reference"] == [1.0]
    assert results.rows("part")["two"]["reference"] == [1.0]


def test_selected_cases_bring_what_they_are_compared_with():
    def measure(limit, rows):
        return {}

    cases = {"eager": gpu.Case(measure, 1), "sdpa": gpu.Case(measure, 1, "eager"), "flex": gpu.Case(measure, 1, "eager")}
    assert list(gpu.select(cases, "precision", "precision: s", None)) == ["eager", "sdpa"]
    assert list(gpu.select(cases, "precision", "^probe", None)) == []
    assert list(gpu.select(cases, "precision", "", 1)) == ["eager"]


def test_what_a_function_had_when_its_process_failed_is_kept(tmp_path):
    row = gpu_setting.call("tests.crashing_rows.rows_until_a_crash", 60.0, number=2)
    assert row["measured"] == 2
    assert "139" in row["error"] or "-11" in row["error"]


@pytest.mark.parametrize("order", ["torch", "zerobook"])
def test_first_calls_at_new_lengths_are_timed(order):
    row = gpu_setting.call("benchmarks.gpu_probe.new_lengths", 120.0, device="cpu", tiny=True, order=order)
    assert "error" not in row
    assert row["cuDNN enabled"] is (order == "torch")
    for case in ("grouped heads, causal", "full heads, a mask"):
        seconds = row[case]["seconds"]
        assert set(seconds) == {f"{call} {direction}" for call in ("first", "second") for direction in ("forward", "backward")}
        assert all(len(times) == 16 and min(times) > 0 for times in seconds.values())


@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_the_machine_leaves_no_process_and_what_has_ended(tmp_path, number):
    line = [
        sys.executable,
        "benchmarks/gpu.py",
        "machine",
        "parity",
        "--device",
        "cpu",
        "--scale",
        "tiny",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    for output in process.stdout:
        if output.startswith("machine: rates begins"):
            break
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not psutil.wait_procs(children, timeout=30)[1]
    rows = json.loads((tmp_path / "CPU.json").read_text())["parts"]["machine"]
    assert list(rows) == ["libraries"], "a case that was killed has no result"


def test_waits_of_the_host_are_counted_by_place(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_waits.RESULT, str(tmp_path / "waits.json"))
    trainer = SimpleNamespace(strategy=SimpleNamespace(device=torch.device("cpu")))
    hook = gpu_waits.HostWaits()
    shown = warnings.showwarning

    def wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    for step in range(1, gpu_waits.LAST_STEP + 2):
        hook.before_step(trainer, step)
        if gpu_waits.FIRST_STEP <= step <= gpu_waits.LAST_STEP:
            wait()
        hook.after_step(trainer, SimpleNamespace(step=step))
    result = json.loads((tmp_path / "waits.json").read_text())
    assert result["waits"] == result["steps"] == 3
    (place,) = result["places"]
    assert place.startswith("tests/test_gpu_bench.py:")
    assert " wait < " in place
    assert warnings.showwarning is shown


@pytest.mark.parametrize("lacking", [["hypothesis"], ["pytest", "chatterbot_corpus"]])
def test_tests_whose_packages_are_missing_are_not_run(tmp_path, monkeypatch, lacking):
    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: None if name in lacking else name)
    monkeypatch.setattr(subprocess_launch, "run", lambda *given, **named: (1, "ModuleNotFoundError: No module"))
    setting = gpu.Setting(tiny=True, cpu=True, folder=tmp_path)
    rows = [case.measure(1.0, {}) for case in gpu_parts.tests(setting).values()]
    assert rows
    for row in rows:
        assert all(name.replace("_", "-") in row["skipped"] for name in lacking)


def test_no_speed_of_one_gpu_is_called_ddps(tmp_path):
    setting = gpu.Setting(tiny=True, cpu=False, folder=tmp_path)
    setting.__dict__["materials"] = SimpleNamespace(text=tmp_path)
    assert set(gpu_parts.speed(setting)) == {
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


def test_curves_of_another_length_are_not_alike():
    assert gpu_parts.largest_difference([1.0, 2.0], [1.0, 4.0]) == 0.5
    assert math.isinf(gpu_parts.largest_difference([1.0], [1.0, 2.0])) and math.isinf(gpu_parts.largest_difference([], []))


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_curve_with_a_loss_that_is_not_finite_is_not_alike(loss):
    """The runlog records such a loss as null. The figures of the case are kept."""
    assert math.isinf(gpu_parts.largest_difference([1.0, loss], [1.0, 2.0]))
    assert math.isinf(gpu_parts.largest_difference([1.0, 2.0], [1.0, loss]))


def test_the_time_to_start_a_product_counts_once_for_all_of_a_shape(monkeypatch):
    products = []
    monkeypatch.setattr(torch, "matmul", lambda inputs, weight: products.append((*inputs.shape, weight.shape[1])))

    def measure(work, device, rounds):
        work()
        return 1.0

    monkeypatch.setattr(gpu_models, "seconds", measure)
    assert gpu_models.rate({(4, 8): 3, (8, 4): 1}, tokens=2, device="cpu") == 2 * 2 * 4 * 8 * (3 + 1) / 2
    assert products == [(2, 8, 4)] * 3 + [(2, 4, 8)]


def test_fp32_is_fp32_on_an_image_that_turns_tf32_on(monkeypatch):
    for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "HF_HUB_OFFLINE", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    gpu._set_environment("cuda")
    line = [sys.executable, "-c", "import torch; print(torch.backends.cuda.matmul.fp32_precision)"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip() != "tf32"


def test_a_table_that_came_through_has_not_died(tmp_path):
    from benchmarks.published.table import Table

    setting = gpu.Setting(tiny=True, cpu=True, folder=tmp_path)
    for died in ("", "exit status 1"):
        row = gpu_parts._table(setting, lambda bench, died=died: Table("A", "a title", "a source", died=died), 1.0, {})
        assert row.get("error", "") == died
        assert ("error" in row) == bool(died)
        assert row["letter"] == "A"


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
    date = {"date": "2026-11-22"}
    parts = {
        "parity": {"a": {"alike": True} | date, "b": {"alike": False} | date, "c": {"error": "of it"} | date},
        "models": {"1B": {"tokens/s": 12345.6} | date},
        "planner": {"a": {"figures": {"GPU memory, peak": peak}} | date},
        "precision": {"a": {"skipped": "no such package"} | date},
    }
    content = {"device": "NVIDIA H200", "versions": {"torch": "2.13.0"}, "parts": parts}
    (tmp_path / "NVIDIA_H200.json").write_text(json.dumps(content))
    said = gpu_status.written(empty, tmp_path)
    assert "Nothing yet" not in said and "One NVIDIA H200, 2026-11-22, torch 2.13.0" in said
    assert "| 2 | 1 | 0 | 1 of 2 train as the CPU does |" in said and "-10.0% at most" in said and "| 0 | 0 | 1 |" in said
    assert "1B: 12,346 tokens/s" in said
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
@pytest.mark.timeout(1800)
def test_a_case_of_every_part_goes_through_on_a_cpu(tmp_path):
    line = [sys.executable, "benchmarks/gpu.py", "all", "--device", "cpu", "--scale", "tiny", "--limit", "1"]
    given = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*line, "--out", str(tmp_path)], cwd=ROOT, env=given, capture_output=True, text=True, timeout=1780, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all cases have results" in result.stdout
    content = json.loads((tmp_path / "CPU.json").read_text())
    found = content["parts"]
    assert content["versions"]["torch"] == version("torch")
    assert list(found) == list(gpu.PARTS) and all(len(rows) == 1 for rows in found.values())
    for part, rows in found.items():
        assert not any("error" in row for row in rows.values()), (part, rows)
    (trained,) = found["parity"].values()
    assert trained["rolled back"] and len(trained["resumed"]) == 6 and len(trained["losses"]) == 12
    assert trained["resumed"] == pytest.approx(trained["losses"][-6:], rel=1e-5)
    (planned,) = found["planner"].values()
    for kind in ("parameters", "gradients", "optimizer"):
        assert planned["figures"][kind]["planned"] == planned["figures"][kind]["measured"] > 0
    assert found["speed"]["single"]["tokens/s"] > 0 and len(found["precision"]["eager"]["losses"]) == 8
    assert len(found["tables"]["A"]["lines"]) == 4


def test_tests_that_are_stopped_without_output_are_an_error_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess_launch, "run", lambda *_, **__: (subprocess_launch.TIMED_OUT, ""))
    setting = gpu.Setting(tiny=True, cpu=True, folder=tmp_path)
    case = next(iter(gpu_parts.tests(setting).values()))
    assert case.measure(300.0, {})["error"] == "stopped after 300 s"
