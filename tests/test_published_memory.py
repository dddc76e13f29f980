"""Planned peaks of published runs stay as near as they are: a sample of ``benchmarks/published_memory.py``."""

from __future__ import annotations

import json

import pytest

from benchmarks.published_memory import MemoryPlanner, append_section, memory_section, read_memory_runs
from benchmarks.published_runs import PublishedRun
from zerobook.plan.memory import CONTEXT_BYTES, peak_memory
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights, Weight
from zerobook.plan.trace import TimelinePoint, Trace

RUNS = {run.facts["id"]: run for run in read_memory_runs()}
SAMPLE = [
    "qwen-001",
    "qwen-006",
    "qwen-010",
    "qwen-014",
    "peft-008",
    "peft-metamath-002",
    "torchtune-013",
    "deepspeedexamples-011",
]
"""LoRA, LoRA with embeddings, QLoRA, offload of ZeRO-3, all weights in bf16, and a run that ran out of memory."""
LARGER = ["qwen-036", "qwen-045", "qwen-051", "ml-engineering-003", "colossalai-001", "torchtune-021", "peft-012"]


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    return MemoryPlanner(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def comparisons(planner):
    return {name: planner.compare(RUNS[name]) for name in SAMPLE}


def errors_of(comparisons) -> list[float]:
    return sorted(round(comparison.error, 2) for comparison in comparisons if comparison.published is not None)


def test_planned_peaks_are_near_published_ones(comparisons):
    errors = errors_of(comparisons.values())

    assert errors[len(errors) // 2] < 0.08, errors
    assert errors[-1] < 0.25, errors


def test_what_ran_is_not_planned_as_no_and_what_did_not_is_not_planned_as_yes(comparisons):
    verdicts = {name: comparison.verdict for name, comparison in comparisons.items()}

    assert all(verdicts[name] != "no" for name, comparison in comparisons.items() if comparison.ran), verdicts
    assert verdicts["deepspeedexamples-011"] != "yes"


@pytest.mark.full
def test_planned_peaks_of_larger_models_are_near_published_ones(planner):
    compared = [planner.compare(RUNS[name]) for name in LARGER]
    errors = errors_of(compared)

    assert errors[len(errors) // 2] < 0.1 and errors[-1] < 0.3, errors
    assert all(comparison.verdict != "no" for comparison in compared)


def test_a_trace_is_kept_for_the_next_run(planner, comparisons, monkeypatch):
    def refuse(*_):
        raise AssertionError("it was traced before")

    monkeypatch.setattr("benchmarks.published_memory.trace_job", refuse)

    assert planner.compare(RUNS["qwen-001"]).planned == comparisons["qwen-001"].planned


def test_the_section_stands_once_and_lists_every_miss(tmp_path, planner, comparisons):
    page = tmp_path / "page.md"
    page.write_text("# Times\n\nrates\n")
    off = json.loads(json.dumps(RUNS["qwen-001"].facts))
    off["id"] = "far-off"
    off["measured"]["peak_gb"] *= 2
    compared = [*comparisons.values(), planner.compare(PublishedRun(off))]

    for _ in range(2):
        append_section(page, compared, [(RUNS["qwen-001"], "no recipe")])

    text = page.read_text()
    assert text.startswith("# Times\n\nrates\n") and text.count("## Memory\n") == 1
    assert "| far-off |" in text and "no recipe" in text and memory_section(compared, []).splitlines()[0] == "## Memory"


def peak(kind: str, ranks: int, *, on_gpu: bool = True, stage: int = 0):
    model = ModelWeights([Weight("w", (1000, 1000), 4, True)], [[Weight("w", (1000, 1000), 4, True)]])
    sharding = ShardingSpec(kind=kind, name="", ranks=ranks, ranks_per_node=ranks, stage=stage, reduce_bucket_elements=0)
    trace = Trace(0, [TimelinePoint(0, 10**9), TimelinePoint(10**6, 0)])
    return peak_memory(model, sharding, trace, accumulation=1, gpus_per_node=ranks, on_gpu=on_gpu)


def test_a_peak_is_stated_as_allocated_reserved_and_card():
    alone = peak("single", 1)

    assert alone.allocated < alone.reserved < alone.total == alone.reserved + CONTEXT_BYTES
    assert alone.low < alone.total < alone.high


def test_shared_states_leave_more_gaps_and_several_ranks_have_buffers_of_nccl():
    alone = peak("single", 1)
    replicated = peak("ddp", 2)
    shared = peak("deepspeed", 2, stage=1)

    def gaps(memory) -> float:
        return memory.reserved / memory.allocated

    assert gaps(alone) == pytest.approx(1.04, abs=1e-6) and gaps(shared) == pytest.approx(1.17, abs=1e-6)
    assert gaps(replicated) == pytest.approx(gaps(alone))
    assert replicated.device.other == shared.device.other > alone.device.other


def test_the_three_figures_are_one_on_a_cpu():
    on_cpu = peak("ddp", 2, on_gpu=False)

    assert on_cpu.allocated == on_cpu.reserved == on_cpu.total == on_cpu.low == on_cpu.high
