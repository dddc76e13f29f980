"""The parts that published tables are run again with: search, budget, fingerprints, pages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.published import dialogue, one_device, pages
from benchmarks.published.bench import Bench
from benchmarks.published.capped import is_refusal, own_memory
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import Arm, Outcome, TrialError, attempt, fingerprint, largest
from scripts import reproduce_tables
from tests.test_generation import PUBLISHED_RULES
from tests.test_published import TITAN
from zerobook.cli.doctor import inspect_launch
from zerobook.launch.resolve import Hardware
from zerobook.plan.hardware import Cluster
from zerobook.utils import subprocess_launch
from zerobook.utils.devices import Device

ROOT = Path(__file__).resolve().parents[1]
CPU = Cluster(gpus=2, device=Device("CPU process", 10**10, 1e10, 1e10, 1e10, 1e10), link=1e10, cpu=True)


# --- the search
@given(truth=st.integers(0, 3000), start=st.integers(1, 300), most=st.integers(300, 2000))
def test_the_largest_that_fits_is_found_to_an_eighth_and_nothing_is_tried_twice(truth, start, most):
    def run(number: int) -> Outcome:
        assert 1 <= number <= most
        return Outcome(refused="" if number <= truth else f"no room for {number}")

    found = largest(run, start=start, most=most)
    assert found.largest <= min(truth, most) and len(set(found.tried)) == len(found.tried)
    if truth >= most:
        assert found.largest == most and found.refused is None
    else:
        assert found.refused is not None and found.refused > truth and found.why == f"no room for {found.refused}"
        assert found.refused - found.largest <= max(2, found.largest // 8) or (found.largest == 0 and found.refused == 1)
    assert len(found.tried) <= 24


def test_what_never_fits_is_tried_down_to_one():
    found = largest(lambda number: Outcome(refused="full"), start=16, most=64)
    assert found.largest == 0 and found.tried == [16, 8, 4, 2, 1] and found.refused == 1


# --- the budget, in real processes
@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("tables"), True, 2, CPU, None, lambda words: None)


@pytest.mark.launch
@pytest.mark.full
def test_a_budget_is_enforced_and_a_run_that_dies_otherwise_is_no_refusal(bench):
    arm = Arm.of("single", 1)
    flags = bench.plain | {"model_name_or_path": bench.gpt2, "per_device_train_batch_size": 1, "max_train_steps": 2}
    free = attempt(arm, "causal_lm", flags, 0)
    assert free.fits and len(free.steps) == 2 and len(free.losses) == 2 and free.training > free.step > 0
    states = sum(free.held.values())
    assert free.held["optimizer"] == pytest.approx(2 * free.held["parameters"], rel=1e-4)
    roomy = attempt(arm, "causal_lm", flags, 2 * states)
    assert roomy.fits and roomy.losses == free.losses
    # weights and gradients fit, Adam's state does not
    tight = attempt(arm, "causal_lm", flags, int(0.9 * states))
    assert not tight.fits and "allocate" in tight.refused and not tight.steps
    with pytest.raises(TrialError, match="max_train_steps"):  # no refusal
        attempt(arm, "causal_lm", flags | {"max_train_steps": -1}, 0)
    with pytest.raises(TrialError, match="stopped after 1 s"):
        attempt(arm, "causal_lm", flags, 0, 1.0)


def test_weights_are_in_own_memory_though_a_buffer_is_a_view_of_the_file(tmp_path):
    """A file that stays mapped counts as private memory, and hides what a strategy allocates when it is freed."""
    save_file({"weight": torch.ones(8), "bias": torch.ones(1, 8)}, tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(stored["weight"])
    model.register_buffer("bias", stored.pop("bias").view(8)[:])
    del stored

    def mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    assert mapped()
    own_memory(model)
    assert not mapped() and torch.equal(model.bias, torch.ones(8))


def test_where_the_time_is_over_no_run_is_begun_and_what_ran_stays(bench):
    over = replace(bench, until=0.0)
    table = one_device.run(over)
    assert [(line.name, line.here) for line in table.lines] == [("DDP", {})] and not table.findings
    assert table.died == "DDP, causal_lm: not begun, the time for all runs was over"
    with pytest.raises(TrialError, match="zero2, 1 processes: not begun"):
        over.measured("zero2", 1)
    with table.keeping_what_ran():
        table.lines.append(Line("before"))
        raise TrialError("exit status 1")
    assert table.lines[-1].name == "before" and "**A run failed here:** exit status 1" in table.markdown()


@pytest.mark.launch
@pytest.mark.full
def test_the_script_writes_a_page_a_json_and_nothing_that_it_did_not_run(tmp_path):
    line = [
        sys.executable,
        str(ROOT / "scripts" / "reproduce_tables.py"),
        "--scale",
        "tiny",
        "--tables",
        "F",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "benchmarks" / "results" / "tables_tiny_CPU.json").read_text())
    (table,) = result["tables"]
    kept, recomputed = (row["here"] for row in table["lines"])
    assert kept["saved activations, MB"] > 4 * recomputed["saved activations, MB"] > 0
    assert kept["s a step"] > 0 and table["findings"][0]["holds"]
    assert all(len(row["config"]) == 12 for row in table["lines"])
    page = (tmp_path / "docs" / "measured" / "tables.md").read_text()
    assert "## F." in page and "## A." not in page and "torch" in page and result["date"] in page


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.timeout(5500)
def test_all_tables_at_the_tiny_scale(tmp_path):
    line = [sys.executable, str(ROOT / "scripts" / "reproduce_tables.py"), "--scale", "tiny", "--out", str(tmp_path)]
    # It takes 15 minutes alone, and more than twice as long beside other tests. The limit only ends a script that hangs.
    done = subprocess.run(line, capture_output=True, text=True, timeout=5400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = json.loads((tmp_path / "benchmarks" / "results" / "tables_tiny_CPU.json").read_text())
    tables = {table["letter"]: table for table in result["tables"]}
    assert sorted(tables) == list("ABCDEFG") and all(table["lines"] and not table["died"] for table in tables.values())
    ddp, zero2, equal = (row["here"] for row in tables["A"]["lines"])
    assert zero2["largest batch"] > ddp["largest batch"] > 0, "the published direction"
    assert (equal["batch"], equal["steps"]) == (ddp["batch"], ddp["steps"])
    assert equal["held-out loss"] == pytest.approx(ddp["held-out loss"], rel=1e-5), "the same job"
    plain, offloaded = (row["here"] for row in tables["B"]["lines"])
    assert plain["largest batch"] == "out of memory at 1" and offloaded["largest batch"] >= 2
    weights = tables["B"]["lines"][1]["here"]["offloaded, MB"] / 20
    assert 26 < weights < 27, "20 bytes a parameter: fp32 masters, two moments, and gradients twice"
    assert all((tmp_path / "docs" / "measured" / f"tables_{kind}.png").exists() for kind in ("memory", "time"))


@pytest.mark.parametrize("words, why", [
    (["--scale", "full"], "want a GPU"),
    (["--scale", "tiny", "--tables", "AZ"], "'AZ': there are the tables A to G"),
    (["--scale", "tiny", "--tables", ""], "there are the tables A to G"),
    (["--scale", "tiny", "--tables", "F"], "Give --out FOLDER"),
    (["--scale", "tiny", "--processes", "0"], "--processes: 0"),
    (["--scale", "tiny", "--device_memory", "24"], "Write GB"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_starts(monkeypatch, capsys, words, why):
    monkeypatch.setattr(sys, "argv", ["reproduce_tables.py", *words])
    assert reproduce_tables.main() == 2
    assert why in capsys.readouterr().err


# --- fingerprints
def test_a_fingerprint_is_of_what_is_run_and_not_of_where(bench, tmp_path):
    flags = {"seed": 1, "train_file": Path("/here/text.txt")}
    arm = Arm.of("zero2", 2)
    made = fingerprint(arm, "causal_lm", flags)
    assert made == fingerprint(arm, "causal_lm", flags | {"train_file": Path("/there/text.txt")})
    others = [
        fingerprint(arm, "causal_lm", flags | {"seed": 2}), fingerprint(arm, "seq2seq_chatbot", flags),
        fingerprint(Arm.of("zero3", 2), "causal_lm", flags),
        fingerprint(bench.variant("zero2", 2, "smaller", reduce_bucket_size=7), "causal_lm", flags),
        fingerprint(bench.variant("zero2", 2, "smaller", reduce_bucket_size=8), "causal_lm", flags),
    ]  # fmt: skip
    assert len({made, *others}) == len(others) + 1
    elsewhere = Bench(tmp_path, True, 2, CPU, None, lambda words: None)
    small = {"reduce_bucket_size": 8}
    assert fingerprint(elsewhere.variant("zero2", 2, "smaller", **small), "causal_lm", flags) == others[-1]


# --- pages
def test_a_table_keeps_published_and_measured_apart():
    table = Table(
        "A", "A title", "somebody, 2020", "two processes",
        [Line("one", {"s": 1234.56}, {"s": 2, "MB": 12345.6}, "abc"), Line("two"), Line("by formula", {"s": 23.9391})],
        [Finding("It is faster", False, "2 s against 1.5 s")], ["A note."],
    )  # fmt: skip
    text = table.markdown()
    assert "|  | *published:* s | **here:** s | **here:** MB | config |" in text
    assert "| one | 1,234.56 | 2 | 12,346 | `abc` |" in text, "published figures keep their digits"
    assert "| by formula | 23.9 |" in text and "| two | - | - | - | `` |" not in text
    assert "| two | - | - | - | - |" in text
    assert "- It is faster: **not reproduced**. 2 s against 1.5 s" in text and "A note." in text
    assert "**Not run here:** no GPU" in Table("B", "b", "-", not_run="no GPU").markdown()


def test_the_page_in_docs_is_made_of_the_result_that_is_kept():
    result = json.loads((ROOT / "benchmarks" / "results" / "tables_tiny_CPU.json").read_text())
    tables = [
        Table(
            **facts
            | {"lines": [Line(**line) for line in facts["lines"]], "findings": [Finding(**f) for f in facts["findings"]]}
        )
        for facts in result["tables"]
    ]
    drawn = [ROOT / "docs" / "measured" / f"tables_{kind}.png" for kind in ("memory", "time")]
    assert (ROOT / "docs" / "measured" / "tables.md").read_text() == pages.markdown(result, tables, drawn)
    assert [table.letter for table in tables] == list("ABCDEFG")


# --- processes
def test_what_takes_too_long_is_stopped_with_all_that_it_started(tmp_path):
    mark = tmp_path / "pid"
    child = "subprocess.Popen(['sleep', '300'], start_new_session=True)"
    child = f"import subprocess, time; open({str(mark)!r}, 'w').write(str({child}.pid))"
    code, said = subprocess_launch.run([sys.executable, "-c", f"print('begun', flush=True); {child}; time.sleep(300)"], 5)
    assert code == subprocess_launch.TIMED_OUT and "begun" in said
    assert_ends(mark)


def test_workers_of_a_launcher_that_ended_are_stopped_and_half_a_character_is_read(tmp_path):
    mark = tmp_path / "pid"
    code, said = subprocess_launch.run(
        ["sh", "-c", f"printf 'bar \\342\\226'; setsid sleep 300 & echo $! > {mark}; sleep 1; exit 3"], 60
    )
    assert code == 3 and said.startswith("bar ")
    assert_ends(mark)


def assert_ends(mark: Path) -> None:
    """Wait for the end of the process whose id is in a file."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(mark.read_text())) and time.monotonic() < deadline:
        if psutil.Process(int(mark.read_text())).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        assert not psutil.pid_exists(int(mark.read_text()))


@pytest.mark.parametrize("where, name, file", [(CPU, "DDP", "ddp"), (replace(CPU, cpu=False), "one process", "single")])
def test_one_process_on_a_gpu_is_not_called_ddp(tmp_path, monkeypatch, where, name, file):
    bench = Bench(tmp_path, True, 1, where, None, lambda words: None)
    model, ran = tmp_path / "model", []
    bench.__dict__ |= {"materials": SimpleNamespace(text=model, pairs=model), "blenderbot": model, "gpt2": model}
    done = Outcome(steps=[1.0, 1.0], held=dict.fromkeys(one_device.OFFLOADED, 1))
    monkeypatch.setattr(Bench, "attempt", lambda bench, arm, *given: (ran.append(arm), done)[1])
    dialogues, larger = dialogue.shape(bench), one_device.run(bench)
    assert [line.name for line in dialogues.lines] == [f"{name}, 8", f"{name}, 16", "ZeRO-2, 8", "ZeRO-2, 16"]
    assert larger.lines[0].name == name and larger.lines[0].here["largest batch"] == 64
    plain = [arm for arm in ran if arm.name == name]
    assert plain and all(arm.launcher[1].endswith(f"/{file}.yaml") for arm in plain)
    for table in (dialogues, larger):
        assert not table.died and ("DDP" in table.markdown()) == (name == "DDP"), table.markdown()


def test_both_scales_of_table_b_offload_what_the_published_file_offloads(tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the tests' own, on a machine without GPUs

    def resolved(tiny: bool, where: Cluster):
        bench = Bench(tmp_path, tiny, 1, where, None, lambda words: None)
        config, ran = ROOT / "benchmarks" / "models" / "gpt2_xl.json", {}
        bench.__dict__ |= {"materials": SimpleNamespace(text=config), "gpt2": config}
        done = Outcome(steps=[1.0, 1.0], held=dict.fromkeys(one_device.OFFLOADED, 10))
        monkeypatch.setattr(Bench, "attempt", lambda _, arm, *given: (ran.update({arm.name: (arm, *given)}), done)[1])
        one_device.run(bench)
        arm, recipe, flags, budget = ran["ZeRO-3, optimizer offloaded"]
        words = [*arm.launcher, "--num_processes", "1", f"recipes/{recipe}.py", *subprocess_launch.flags(flags)]
        plan, problems, _, _ = inspect_launch(words, Hardware(gpus=0 if where.cpu else 1, **({} if where.cpu else TITAN)))
        assert not problems and not plan.problems
        assert (plan.zero_stage, plan.world_size, plan.offload_param) == (3, 1, "none") and plan.offload_optimizer == "cpu"
        return plan.precision, budget

    assert resolved(True, CPU) == ("no", one_device.BUDGET + 20), "what is offloaded is not in the budget"
    assert resolved(False, replace(CPU, cpu=False)) == ("fp16", 24 * 2**30)


def test_the_evaluation_of_the_published_size_is_the_published_one(tmp_path, monkeypatch):
    bench = Bench(tmp_path, False, 2, replace(CPU, cpu=False), None, lambda words: None)
    bench.__dict__ |= {"materials": SimpleNamespace(pairs=tmp_path / "pairs"), "blenderbot": tmp_path / "model"}
    ran = []
    done = Outcome(steps=[1.0, 1.0])
    monkeypatch.setattr(Bench, "attempt", lambda bench, arm, recipe, flags, budget: (ran.append((arm.name, flags)), done)[1])
    dialogue.run(bench)
    epochs = {(name, flags["per_device_eval_batch_size"]) for name, flags in ran if flags.get("n_val") == 1000}
    assert {("DDP", 50), ("ZeRO-2", 100), ("ZeRO-2", 50)} <= epochs
    evaluations = [flags for _, flags in ran if flags.get("n_val")]
    assert all(flags["num_beams"] == 10 and PUBLISHED_RULES.items() <= flags.items() for flags in evaluations)
    assert not any("n_val_batch_generations" in flags for flags in evaluations), "the published script generates for all rows"


def test_runs_that_save_nothing_ask_for_no_room(tmp_path, monkeypatch):
    from recipes.causal_lm import CausalLMConfig
    from zerobook.config_sources import ConfigSources
    from zerobook.plan.measure import measure

    lines = []
    monkeypatch.setattr(subprocess_launch, "run", lambda line, *given, **named: (lines.append(line), (1, "Error: no"))[1])
    with pytest.raises(TrialError, match="Error: no"):
        attempt(Arm.of("single", 1), "causal_lm", {}, 0)
    config = CausalLMConfig(model_name_or_path="x", dataset_name="x")
    single, recipe = ROOT / "accelerate_configs" / "single.yaml", ROOT / "recipes" / "causal_lm.py"
    where = replace(CPU, gpus=1)
    assert "Error: no" in measure(single, SimpleNamespace(config=config), recipe, [], where, ConfigSources()).failure
    assert [line[line.index("--on_low_disk") + 1] for line in lines] == ["warn", "warn"]


@pytest.mark.parametrize(
    "gpu, given, expected",
    [
        (False, {}, "1"),
        (True, {}, "None"),
        (True, {"CUDA_VISIBLE_DEVICES": ""}, "1"),
        (True, {"ACCELERATE_USE_CPU": "true"}, "1"),
    ],
)
def test_a_run_on_a_gpu_chooses_its_threads(monkeypatch, gpu, given, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    _, said = subprocess_launch.run([sys.executable, "-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))"], 60, given)
    assert said.strip() == expected


def test_a_dead_runs_reason_is_its_own_and_not_the_launchers():
    said = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nDataError: no rows\nmore"
    assert subprocess_launch.last_error(said) == "DataError: no rows"
    assert subprocess_launch.last_error("nothing") == "it said nothing of an error"


def test_a_compiler_that_was_refused_memory_is_no_refusal_of_the_runs():
    assert is_refusal("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes")
    compiler = (
        "virtual memory exhausted: Cannot allocate memory\nninja: build stopped\nRuntimeError: Error building extension 'x'"
    )
    assert not is_refusal(compiler)
