"""Planned peaks of published runs stay as near as they are: a sample of ``benchmarks/published_memory.py``."""

from __future__ import annotations

import json

import pytest

from benchmarks.published_memory import (
    MemoryComparison,
    MemoryPlanner,
    append_section,
    cached_share,
    leave_sources_out,
    memory_section,
    read_memory_runs,
)
from benchmarks.published_runs import PublishedRun, peer_table
from zerobook.plan.memory import CONTEXT_BYTES, DeviceBytes, PeakMemory, peak_memory
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


def small(name: str, *, vocabulary: int = 512, **changes) -> PublishedRun:
    """Return a published run of a model of 4 narrow layers."""
    facts = json.loads(json.dumps(RUNS[name].facts))
    facts["arch"] |= {"hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 160, "vocab": vocabulary}
    # Buckets of the real size would be larger than all else.
    buckets = {"reduce_bucket_elements": 0}
    return PublishedRun(facts | {"seq_len": 128, "micro_batch": 2, "deepspeed_elements": buckets} | changes)


SELECTIVE = {"saved": "second_products"}


@pytest.mark.parametrize(
    "name, vocabulary, less, more",
    [
        ("torchtitan-009", 512, SELECTIVE, {}),
        ("torchtitan-009", 8192, SELECTIVE | {"loss_chunks": 8}, SELECTIVE),
        ("torchtune-012", 512, {"layers": "fused"}, {}),
        ("torchtune-012", 8192, {"loss": "torchtune_compiled"}, {"loss": "torchtune_spring"}),
        ("bigscience-005", 65536, {"loss": "megatron"}, {}),
    ],
)
def test_a_program_is_planned_with_what_it_keeps(planner, name, vocabulary, less, more):
    """Its own savings, layers, losses and chunks of logits make a difference."""
    small_peak, large_peak = (
        planner.compare(small(name, vocabulary=vocabulary, memory=program)).memory.device.activations
        for program in (less, more)
    )

    assert small_peak < 0.95 * large_peak


def test_weights_that_are_whole_while_they_are_loaded_stay_reserved(planner):
    program = {"whole_model_at_load": True}
    sharded = planner.compare(small("ml-engineering-001", vocabulary=8192, memory={})).memory
    whole = planner.compare(small("ml-engineering-001", vocabulary=8192, memory=program)).memory
    embeddings = 2 * 8192 * 64
    layers = 4 * 64 * (64 + 32 + 32 + 64 + 3 * 160)

    assert whole.device.allocated == sharded.device.allocated
    assert whole.device.reserved >= max(2 * (embeddings + layers), 2 * layers + whole.device.activations)


def comparison(source: str, published: int, *, ranks: int = 1) -> MemoryComparison:
    device = DeviceBytes(parameters=100, cached=4)
    memory = PeakMemory(device=device, when="", host_at_load=0, host=0, disk=0, low=100, high=120)
    facts = {"id": source, "source": source, "nodes": 1, "gpus_per_node": ranks, "strategy": "zero3"}
    return MemoryComparison(PublishedRun(facts), memory, 10**9, "reserved", published, True)


def test_the_share_of_cached_bytes_weighs_sources_alike_and_is_that_of_the_other_sources():
    many = [comparison("a/a", 110) for _ in range(9)]
    few = [comparison("b/b", 120), comparison("c/c", 130), comparison("d/d", 150, ranks=2)]

    left_out = {each.run.source: each.planned for each in leave_sources_out([*many, *few])}

    assert cached_share([*many, *few], shares_states=False) == pytest.approx(0.2)
    assert cached_share([*many, *few], shares_states=True) == pytest.approx(0.5)
    assert left_out["c/c"] == 110 and left_out["a/a"] == 120


def test_another_program_is_compared_on_the_runs_that_both_plan():
    """ftuneai has no words for offload."""
    runs = [comparison("QwenLM/Qwen", 100), comparison("huggingface/peft", 100)]
    for each, name in zip(runs, ("qwen-001", "peft-008"), strict=True):
        each.run.facts["id"] = name

    table = "\n".join(peer_table(runs, "memory_gb", lambda each: each.published / 10))

    assert "| QwenLM/Qwen | 1 |" in table and "huggingface/peft" not in table


def peak(kind: str, ranks: int, *, on_gpu: bool = True, stage: int = 0):
    model = ModelWeights([Weight("w", (1000, 1000), 4, True)], [[Weight("w", (1000, 1000), 4, True)]])
    sharding = ShardingSpec(kind=kind, name="", ranks=ranks, ranks_per_node=ranks, stage=stage, reduce_bucket_elements=0)
    trace = Trace(0, [TimelinePoint(0, 10**9), TimelinePoint(10**6, 0)])
    return peak_memory(model, sharding, trace, accumulation=1, gpus_per_node=ranks, on_gpu=on_gpu)


@pytest.mark.parametrize(
    "kind, stage, offload", [("single", 0, "none"), ("deepspeed", 2, "none"), ("deepspeed", 3, "cpu"), ("fsdp", 3, "none")]
)
def test_a_step_holds_what_loading_holds(kind, stage, offload):
    """While weights are loaded, a GPU has its part of them, and a whole one besides where they are sharded."""
    layers = [Weight(f"layers.{index}", (1000, 1000), 2, False, unit=str(index)) for index in range(4)]
    trained = Weight("adapter", (10, 10), 4, True, unit="0")
    model = ModelWeights([*layers, trained], [[trained]])
    sharding = ShardingSpec(
        kind=kind,
        name="",
        ranks=4,
        ranks_per_node=4,
        stage=stage,
        shard_ranks=4,
        precision="bf16",
        offload_param=offload,
        reduce_bucket_elements=0,
    )

    memory = peak_memory(model, sharding, Trace(0, [TimelinePoint(0, 0)]), accumulation=1, gpus_per_node=4)

    a_whole_weight = 2 * 10**6 if stage == 3 else 0
    assert memory.device.allocated >= memory.device.parameters + a_whole_weight


def test_fsdp_gathers_one_layer_beside_the_one_in_use():
    layers = [Weight(f"layers.{index}", (1000, 1000), 2, False, unit=str(index)) for index in range(4)]
    trained = Weight("norm", (10,), 4, True)
    model = ModelWeights([*layers, trained], [[trained]])
    sharding = ShardingSpec(kind="fsdp", name="", ranks=4, ranks_per_node=4, stage=3, shard_ranks=4, precision="bf16")

    memory = peak_memory(model, sharding, Trace(0, [TimelinePoint(0, 0)]), accumulation=1, gpus_per_node=4)

    assert memory.device.buffers == 2 * 2 * 10**6 + 2 * 10


def test_a_peak_is_stated_as_allocated_reserved_and_card():
    alone = peak("single", 1)

    assert alone.device.allocated < alone.device.reserved < alone.total == alone.device.reserved + CONTEXT_BYTES
    assert alone.low < alone.total < alone.high


def test_shared_states_leave_more_gaps_and_several_ranks_have_buffers_of_nccl():
    alone = peak("single", 1)
    replicated = peak("ddp", 2)
    shared = peak("deepspeed", 2, stage=1)

    def gaps(memory) -> float:
        return memory.device.reserved / memory.device.allocated

    assert gaps(alone) == pytest.approx(1.04, abs=1e-6) and gaps(shared) == pytest.approx(1.17, abs=1e-6)
    assert gaps(replicated) == pytest.approx(gaps(alone))
    assert replicated.device.other == shared.device.other > alone.device.other


def test_the_three_figures_are_one_on_a_cpu():
    on_cpu = peak("ddp", 2, on_gpu=False)

    assert on_cpu.device.allocated == on_cpu.device.reserved == on_cpu.total == on_cpu.low == on_cpu.high
