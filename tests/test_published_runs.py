"""Planned times of published runs stay as near as they are: a sample of ``benchmarks/published_runs.py``."""

from __future__ import annotations

import json

import pytest

from benchmarks import published_runs
from benchmarks.fit_times import GENERATIONS, Fit, fit
from benchmarks.published_runs import Comparison, Planner, PublishedRun, UnplannedRunError, read_runs, spread
from zerobook.plan.roofline import StepSeconds

RUNS = {run.facts["id"]: run for run in read_runs()}
SAMPLE = ["qwen-001", "qwen-006", "llm-foundry-013", "peft-metamath-003", "deepspeedexamples-003"]
LARGER = ["qwen-030", "qwen-039", "llm-foundry-150", "llm-foundry-182", "ml-engineering-009", "torchtune-001", "torchtitan-001"]
"""Runs of models that are traced more slowly."""


@pytest.fixture(scope="module")
def planned():
    planner = Planner()
    return {name: planner.plan(RUNS[name]) for name in SAMPLE}


@pytest.fixture(scope="module")
def comparisons(planned):
    return {name: run.compare() for name, run in planned.items()}


def test_planned_times_are_near_published_ones(comparisons):
    errors = {name: round(comparison.error, 2) for name, comparison in comparisons.items()}

    median, late = spread(comparisons.values())
    assert median < 0.15, errors
    assert late < 0.3, errors


@pytest.mark.full
def test_planned_times_of_larger_models_are_near_published_ones():
    planner = Planner()
    errors = {name: round(planner.plan(RUNS[name]).compare().error, 2) for name in LARGER}

    assert sorted(errors.values())[len(errors) // 2] < 0.12 and max(errors.values()) < 0.3, errors


def test_plans_wait_for_what_the_runs_waited_for(comparisons):
    """At 256 tokens, a small model's GPU waits for the host; at 8192 it computes."""
    assert comparisons["qwen-001"].time.bound == "launches"
    assert comparisons["qwen-006"].time.bound == "compute"


def test_each_source_has_the_same_weight():
    def comparison(source: str, error: float) -> Comparison:
        run = PublishedRun({"source": f"{source}:README.md", "measured": {"tokens_per_s_per_gpu": 100}})
        return Comparison(run, StepSeconds(1, 0, 0, 0, 0, 0), 100 * (1 + error))

    many = [comparison("a/large", 0.1) for _ in range(20)]
    few = [comparison("b/small", 0.5)]

    median, late = spread(many + few)
    assert (median, late) == (pytest.approx(0.1), pytest.approx(0.5))


def test_a_run_without_a_recipe_is_refused_by_its_reason():
    bert = json.loads(json.dumps(RUNS["qwen-001"].facts))
    bert["arch"]["family"] = "BertForSequenceClassification"

    with pytest.raises(UnplannedRunError, match="Bert"):
        Planner().plan(PublishedRun(bert))


def test_a_fit_finds_the_constants_of_its_runs(planned):
    """Rates that follow from other constants: a fit to them reproduces the rates."""
    runs = [planned["llm-foundry-013"], planned["peft-metamath-003"]]
    start = Fit({}, {gpu: shares for gpu, (shares, _) in GENERATIONS.items()})
    other = Fit({"MEMORY_SHARE": 0.9}, dict.fromkeys(GENERATIONS, (0.75, 0.4)))
    rates = [run.compare(other).tokens_per_second for run in runs]

    def ratios(fitted: Fit) -> list[float]:
        return [run.compare(fitted).tokens_per_second / rate for run, rate in zip(runs, rates, strict=True)]

    fitted = fit(["a/b", "c/d"], ratios)

    assert max(abs(ratio - 1) for ratio in ratios(start)) > 0.05
    assert max(abs(ratio - 1) for ratio in ratios(fitted)) < 0.03


def test_the_runs_of_one_source_are_compared_without_a_page(monkeypatch, capsys, tmp_path):
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["published_runs.py", "--only", RUNS[SAMPLE[0]].source, "--page", str(page)])
    monkeypatch.setattr(published_runs, "read_runs", lambda: [RUNS[name] for name in SAMPLE[::3]])

    published_runs.main()

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [SAMPLE[0], "sources"]
    assert not page.exists()
