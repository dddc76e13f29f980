"""Packed and mixed data in real runs: the same tokens wherever a run goes on, and a loss for every dataset."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from tests.distributed.test_parity import largest_difference
from tests.harness import ROOT, launch, reseal, sampled, seen, sequence
from zerobook.data.files import SHARD_BYTES

STEPS = 12


def flags(tiny, cache):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", validation_split_percentage=0, block_size=128,
        packing=True, dataloader_num_workers=1, max_train_steps=STEPS, per_device_train_batch_size=2, learning_rate=3e-3,
        save_steps=4, logging_steps=1, cache_dir=cache,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.launch
@pytest.mark.parametrize("strategy, processes", sampled([("single", 1), ("fsdp", 4)], ("fsdp", 4)))
def test_a_killed_run_on_packed_rows_goes_on_anywhere(tiny, tmp_path, cache, strategy, processes):
    whole = launch("zero2", 2, "causal_lm", tmp_path / "whole", spy={}, **flags(tiny, cache))
    hashes = sequence(seen(whole.output), 1, STEPS)
    assert len(hashes) > 2 * 4 * STEPS, "rows hold several samples"
    rows = whole.event("run_start")["data"]["train"]
    assert rows < 4 * STEPS, "the run goes over the end of an epoch"
    killed = launch("zero3", 2, "causal_lm", tmp_path / "killed", spy={"hang_at_step": 7}, **flags(tiny, cache))
    first = sequence(seen(killed.output), 1, 4)

    for file in killed.output.glob("spy-*"):
        file.unlink()
    run = launch(strategy, processes, "causal_lm", killed.output, spy={}, resume_from_checkpoint="auto", **flags(tiny, cache))
    assert run.event("resume")["step"] == 4
    # within a row the samples' order is the row's; between ranks it is the run's
    assert first + sequence(seen(run.output), 5, STEPS) == hashes
    mine = [s for s in run.steps if s["attempt"] == 2]
    assert largest_difference([s["loss"] for s in mine], whole.losses[4:]) < 1e-5
    assert largest_difference([s["grad_norm"] for s in mine], whole.norms[4:]) < 1e-5


@pytest.mark.launch
def test_a_killed_run_on_a_stream_goes_on_anywhere(tiny, tmp_path, cache):
    """Shards are files here, prepared while the run goes on; behind a kill only those from the cursor on are opened."""
    lines = (tiny / "chats.jsonl").read_text().splitlines(keepends=True)
    folder = tmp_path / "shards"
    folder.mkdir()
    # Smaller files share a shard. Blank lines are no samples.
    blank_lines = (" " * (SHARD_BYTES // 64) + "\n") * 32
    for shard in range(6):
        (folder / f"{shard}.jsonl").write_text(blank_lines + "".join(lines[shard:48:6]))
    streamed = flags(tiny, cache) | dict(train_file=folder, streaming=True, packing=False, block_size=64)
    whole = launch("zero2", 2, "causal_lm", tmp_path / "whole", spy={}, **streamed)
    hashes = sequence(seen(whole.output), 1, STEPS)
    opened = [e for e in whole.events if e["type"] == "shard"]
    assert len(hashes) == 4 * STEPS and sum(e["rows"] for e in opened) >= 4 * STEPS
    assert sorted(e["shard"] for e in opened[:6]) == list(range(6))
    killed = launch("zero3", 2, "causal_lm", tmp_path / "killed", spy={"hang_at_step": 11}, **streamed)
    first = sequence(seen(killed.output), 1, 8)
    for file in (tmp_path / "killed").glob("spy-*"):
        file.unlink()
    shutil.rmtree(cache / "data")
    run = launch("ddp", 4, "causal_lm", killed.output, spy={}, resume_from_checkpoint="auto",
                 **(streamed | {"preprocessing_num_workers": 2}))  # fmt: skip
    assert run.event("resume")["step"] == 8
    assert first + sequence(seen(run.output), 9, STEPS) == hashes
    there = {f.name for f in cache.glob("data/stream-*/shard-*") if f.is_dir()}
    behind = {f"shard-{e['shard']:05d}" for e in opened[:4]}
    assert there - behind and len(there & behind) <= 2, "none behind the cursor, but two for the next pass"


@pytest.mark.launch
def test_a_mixture_has_a_loss_for_each_dataset_and_a_curve_for_each_task(tiny, tmp_path, cache):
    recipe = {
        "datasets": [
            {"path": str(tiny / "chats.jsonl"), "weight": 2},
            {"path": str(tiny / "text.txt"), "name": "book", "weight": 1},
            {"path": str(tiny / "epoch24.jsonl"), "weight": 1, "limit": 20},
        ],
        "model_name_or_path": str(tiny / "llama"),
        "block_size": 64,
        "max_train_steps": 8,
        "eval_steps": 4,
        "eval_on_start": True,
        "learning_rate": 3e-3,
        "eval_tasks": [str(ROOT / "tests" / "fixtures" / "tasks" / f"{name}.jsonl") for name in ("arithmetic", "geography")],
        "cache_dir": str(cache),
    }
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(recipe))
    runs = [
        launch(strategy, processes, "causal_lm", tmp_path / strategy, config=tmp_path / "mixture.yaml",
               per_device_train_batch_size=4 // processes, report_to="tensorboard")
        for strategy, processes in (("single", 1), ("zero3", 2))
    ]  # fmt: skip
    one, two = runs
    assert [s["ids"] for s in one.steps] == [s["ids"] for s in two.steps]
    assert largest_difference(two.losses, one.losses) < 1e-5
    sizes = one.event("run_start")["data"]["report"]
    chats, book = sizes["chats"]["rows"], sizes["book"]["rows"]
    owners = [0 if i < chats else 1 if i < chats + book else 2 for s in one.steps for i in s["ids"]]
    assert [owners.count(k) for k in range(3)] == [16, 8, 8], "half, a quarter and a quarter of 32"
    assert sizes["epoch24"]["rows"] + sizes["epoch24, held out"]["rows"] == 20
    for run in runs:
        evaluations = [e for e in run.events if e["type"] == "eval"]
        assert [e["step"] for e in evaluations] == [0, 4, 8]
        for e in evaluations:
            assert set(e["datasets"]) == {"chats", "book", "epoch24"}
            total = sum(part["loss"] * part["tokens"] for part in e["datasets"].values())
            assert (
                abs(total / e["tokens"] - e["loss"]) < 1e-6 * e["loss"]
                and len({p["loss"] for p in e["datasets"].values()}) == 3
            )
            assert {"task/arithmetic/acc", "task/geography/acc"} <= set(e["metrics"])
            assert {row["task"] for row in e["samples"]} == {"arithmetic", "geography"}
        assert evaluations[-1]["loss"] < 0.95 * evaluations[0]["loss"]
        assert tracked(run.output) >= {"eval_loss/chats", "eval_loss/book", "eval_loss/epoch24", "eval/task/geography/acc"}
    for mine, theirs in zip(*([e for e in r.events if e["type"] == "eval"] for r in runs), strict=True):
        for name, part in mine["datasets"].items():
            assert abs(theirs["datasets"][name]["loss"] / part["loss"] - 1) < 1e-5
        assert mine["metrics"] == theirs["metrics"]


def tracked(output) -> set[str]:
    """Tags in the tensorboard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: set[str] = set()
    for folder in {f.parent for f in output.rglob("events.out.tfevents*")}:
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        tags |= set(accumulator.Tags()["scalars"])
    return tags


@pytest.mark.launch
def test_skipped_samples_never_reach_the_model_in_any_epoch(tiny, tmp_path, cache):
    """Ranges in the progress record name samples, also inside packs, and hold in all later epochs."""
    run = launch("ddp", 2, "causal_lm", tmp_path / "run", spy={}, **(flags(tiny, cache) | {"max_train_steps": 4}))
    checkpoint = run.output / "checkpoints" / "step-000004"
    progress = json.loads((checkpoint / "progress.json").read_text())
    progress["skip_ranges"] = [[0, 40]]
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    reseal(checkpoint)
    for file in run.output.glob("spy-*"):
        file.unlink()
    again = flags(tiny, cache) | {"max_train_steps": 30}
    launch("ddp", 2, "causal_lm", run.output, spy={}, resume_from_checkpoint="auto", **again)
    later = sequence(seen(run.output), 5, 30)
    # 96 samples less the 40 that are skipped, each in every one of the epochs that follow
    assert len(set(later)) == 56
    counts = sorted(later.count(h) for h in set(later))
    assert counts[-1] - counts[0] <= 2 and counts[0] >= 2, "the stretch begins and ends within an epoch"
