"""Any strategy, the same training: real launches of the shipped files against one process.

Every strategy file is launched with full finetuning and with LoRA. ``make test`` takes the sample named
below; ``make test-full`` takes all, and its measured differences go into docs/parity.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness import ROOT, Run, calls, launch

STRATEGIES = {
    "single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero2_offload": 2, "zero3": 2, "zero3_offload_optimizer": 2,
    "zero3_offload": 2, "zero3_nvme": 2, "fsdp": 2, "fsdp_offload": 2, "fsdp_hybrid": 4,
}  # fmt: skip
"""File in accelerate_configs/ -> processes it is launched on."""

SAMPLE = {
    ("ddp", "causal_lm"), ("zero1", "causal_lm"), ("zero2", "causal_lm"), ("zero2_offload", "causal_lm"),
    ("zero3", "causal_lm"), ("fsdp", "causal_lm"), ("zero3_offload", "lora_finetune"), ("zero3_nvme", "lora_finetune"),
    ("fsdp_offload", "lora_finetune"), ("fsdp_hybrid", "lora_finetune"),
}  # fmt: skip

TOLERANCE = 1e-5
"""Relative, on every step's loss and global gradient norm, in fp32."""


def largest_difference(ours: list[float], reference: list[float]) -> float:
    assert len(ours) == len(reference) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def cases():
    for strategy in STRATEGIES:
        if strategy == "single":
            continue
        for recipe in ("causal_lm", "lora_finetune"):
            marks = [] if (strategy, recipe) in SAMPLE else [pytest.mark.full]
            yield pytest.param(strategy, recipe, marks=[pytest.mark.launch, *marks], id=f"{strategy}-{recipe}")


def test_every_strategy_file_is_covered():
    assert {f.stem for f in (ROOT / "accelerate_configs").rglob("*.yaml")} == set(STRATEGIES)


@pytest.mark.parametrize("strategy, recipe", list(cases()))
def test_same_training_as_one_process(launches, strategy, recipe):
    processes = STRATEGIES[strategy]
    # swapping to disk starts at tensors of 1 MiB a rank
    swapped = strategy == "zero3_nvme" and recipe == "causal_lm"
    # at rates that make the gradient norm jump, a rounding grows to more than the tolerance within ten steps
    faster = {"learning_rate": 4e-3, "num_warmup_steps": 0, "adam_epsilon": 1e-6}
    model, flags = ("wide", faster) if swapped else ("llama", {})
    one = launches("single", 1, 4, 1, recipe, model, **flags)
    run = launches(strategy, processes, 4 // processes, 1, recipe, model, **flags)

    assert [s["ids"] for s in run.steps] == [s["ids"] for s in one.steps]
    loss, norm = largest_difference(run.losses, one.losses), largest_difference(run.norms, one.norms)
    weight, far = weight_differences(run, one)
    record(strategy, recipe, processes, loss=loss, norm=norm, weight=weight, fall=1 - run.losses[-1] / run.losses[0])
    assert loss < TOLERANCE and norm < TOLERANCE
    # Adam divides by the root of the squared gradient: where that is near zero, rounding moves a weight by a
    # share of the learning rate. Such weights are few, and bounded by a hundredth of one step.
    assert far < 1e-3 and weight < 1e-2 * max(s["learning_rate"] for s in one.steps)
    assert run.losses[-1] < 0.8 * run.losses[0]
    assert run.event("run_start")["live"]["strategy"] == run.event("run_start")["plan"]["name"]
    assert_sharded(strategy, recipe, run, processes)


def weight_differences(run: Run, one: Run) -> tuple[float, float]:
    """(largest absolute difference of a weight, share of weights that differ by more than the tolerance)."""
    ours, reference = run.state(), one.state()
    assert set(ours) == set(reference)
    largest, far, count = 0.0, 0, 0
    for name in reference:
        if name.startswith("weight/"):
            difference = (ours[name] - reference[name]).abs()
            largest = max(largest, difference.max().item())
            far += int((difference > TOLERANCE).sum())
            count += difference.numel()
    return largest, far / count


def assert_sharded(strategy: str, recipe: str, run: Run, processes: int) -> None:
    """Bytes that each rank holds are what the stage promises, plus padding that is stated here."""
    memory = run.event("memory")
    trained = 4 * memory["trained_parameters"]  # bytes of fp32
    tensors = {k: 4 * t.numel() for k, t in run.state().items() if k.startswith("weight/")}
    largest, padding = max(tensors.values()), 4 * 2 * processes * (len(tensors) + 1)
    shards = 2 if strategy == "fsdp_hybrid" else processes
    small = sum(size for size in tensors.values() if size <= 4 * 10 * 128)  # ZeRO-3 keeps vectors whole
    counters = 64 * (len(tensors) + 1)
    for rank in memory["per_rank_bytes"]:
        if strategy == "ddp":
            assert rank["gradients"] == trained and rank["optimizer"] <= 2 * trained + counters
        elif strategy.startswith("zero"):
            # masters and two moments; a torch scalar or two counts the steps
            assert rank["optimizer"] <= 3 * trained / shards + 3 * padding + counters
            # a tensor that straddles two partitions is held whole by both
            assert rank["gradients"] <= trained / shards + (0 if strategy.startswith("zero3") else largest) + padding
        else:
            assert rank["gradients"] <= trained / shards + padding
            assert rank["optimizer"] <= 2 * trained / shards + 2 * padding + counters
        if recipe == "causal_lm" and (strategy.startswith("zero3") or strategy.startswith("fsdp")):
            assert rank["parameters"] <= trained / shards + small + padding


@pytest.mark.launch
def test_zero3_gathers_every_layer_and_zero2_does_not(tiny, tmp_path):
    """With a persistence threshold of 0 nothing stays whole, and each step gathers forward and backward."""
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    strict = tmp_path / "zero3_strict.json"
    strict.write_text(json.dumps(config))
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", validation_split_percentage=0, block_size=64,
        per_device_train_batch_size=2, max_train_steps=4, spy={},
    )  # fmt: skip
    launcher = ["--use_deepspeed", "--zero3_init_flag", "true", "--deepspeed_config_file"]
    three = launch([*launcher, str(strict)], 2, "causal_lm", tmp_path / "three", **flags)
    two = launch("zero2", 2, "causal_lm", tmp_path / "two", **flags)

    assert three.event("run_start")["live"]["zero_stage"] == 3
    tensors = [t for name, t in three.state().items() if name.startswith("weight/")]
    whole = sum(4 * t.numel() for t in tensors)
    for rank in three.event("memory")["per_rank_bytes"]:
        assert rank["parameters"] <= whole / 2 + 4 * 2 * len(tensors)
    gathers = calls(tmp_path / "three")["all_gather_into_tensor"] / 4
    # coalesced per module and kind; at least once forward and once backward for each of the two layers
    assert gathers >= 2 * 2
    assert calls(tmp_path / "three")["reduce_scatter_tensor"] >= 4
    assert calls(tmp_path / "two").get("all_gather_into_tensor", 0) / 4 < gathers
    assert largest_difference(three.losses, two.losses) < TOLERANCE


@pytest.mark.launch
def test_ddp_sends_gradients_once_a_step(launches):
    """Whatever the accumulation: only the last micro-batch's backward reduces."""
    run = launches("ddp", 2, 1, 4, spy={})
    assert len(run.steps) == 10
    assert calls(run.output)["gradient buckets"] == 10  # the tiny model fits into one


def record(strategy: str, recipe: str, processes: int, **measured: float) -> None:
    """Keep what was measured, where the environment asks for it, for the table in docs/parity.md."""
    file = os.environ.get("ZEROBOOK_PARITY_RECORD")
    if file:
        with Path(file).open("a") as handle:
            handle.write(json.dumps({"strategy": strategy, "recipe": recipe, "processes": processes, **measured}) + "\n")
