"""A run that is killed goes on, anywhere, on the same samples in the same order and with the same losses."""

from __future__ import annotations

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_parity import largest_difference, pieces
from tests.harness import REFUSED, ROOT, launch, seen, sequence
from tests.test_checkpoints import flip, manifest
from zerobook.checkpoint import store

STEPS = 18  # three epochs of 24 samples in steps of 4
KILLED_IN = 10  # the middle of epoch 2; the last checkpoint is of step 8


def flags(tiny):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=128,
        num_train_epochs=3, per_device_train_batch_size=2, learning_rate=3e-3, weight_decay=0.1, save_steps=4, logging_steps=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    run = launch("zero2", 2, "causal_lm", output, spy={}, **flags(tiny))
    return run, sequence(seen(output), 1, STEPS)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Return the argument of `launch` for a strategy. ``zero3_pieces`` is ZeRO-3 cut into many buckets and sub-groups."""
    cut = pieces(tmp_path_factory.mktemp("pieces"), 3)
    return lambda strategy: cut if strategy == "zero3_pieces" else strategy


@pytest.fixture(scope="module")
def killed_under(tiny, tmp_path_factory, launcher):
    """A run killed in step `KILLED_IN`, by the strategy it ran under; each is launched once."""

    @cache
    def made(strategy):
        output = tmp_path_factory.mktemp("killed") / "run"
        return launch(launcher(strategy), 2, "causal_lm", output, spy={"hang_at_step": KILLED_IN}, **flags(tiny))

    return made


@pytest.fixture
def killed(killed_under):
    return killed_under("zero2")


CONTINUED = [
    ("zero2", "zero2", 2), ("zero2", "zero3", 2), ("zero2", "zero3_pieces", 2), ("zero2", "fsdp", 2), ("zero2", "single", 1),
    ("zero2", "ddp", 4), ("zero2", "zero1", 2), ("zero2", "zero3_offload", 4), ("zero3_pieces", "fsdp", 2),
    ("zero3_pieces", "zero2", 2), ("fsdp", "zero3", 2), ("fsdp", "single", 1),
]  # fmt: skip
"""(strategy that wrote the checkpoint on two processes, strategy and processes that go on)"""
SAMPLE = [("zero2", "zero3_pieces", 2), ("zero2", "ddp", 4)]


def cases():
    for case in CONTINUED:
        marks = [] if case in SAMPLE else [pytest.mark.full]
        yield pytest.param(*case, marks=[pytest.mark.launch, *marks], id="{}-then-{}-on-{}".format(*case))


@pytest.mark.parametrize("before, strategy, processes", list(cases()))
def test_killed_run_goes_on(tiny, tmp_path, uninterrupted, killed_under, launcher, before, strategy, processes):
    whole, hashes = uninterrupted
    assert len(set(hashes)) == 24 and len(hashes) == 72, "every sample once an epoch"
    assert hashes[:24] != hashes[24:48], "epochs are shuffled apart"
    killed = killed_under(before)
    output = tmp_path / "run"
    shutil.copytree(killed.output, output)
    for file in output.glob("spy-*"):
        file.unlink()

    run = launch(launcher(strategy), processes, "causal_lm", output, spy={}, resume_from_checkpoint="auto", **flags(tiny))

    resumed = run.event("resume")
    assert resumed["step"] == 8 and resumed["cursor"] == 32
    assert sequence(seen(killed.output), 1, 8) + sequence(seen(output), 9, STEPS) == hashes
    mine = [s for s in run.steps if s["attempt"] == 2]
    assert [s["step"] for s in mine] == list(range(9, STEPS + 1))
    assert [s["ids"] for s in mine] == [s["ids"] for s in whole.steps[8:]]
    assert [s["learning_rate"] for s in mine] == [s["learning_rate"] for s in whole.steps[8:]]
    assert largest_difference([s["loss"] for s in mine], whole.losses[8:]) < 1e-5
    assert largest_difference([s["grad_norm"] for s in mine], whole.norms[8:]) < 1e-5
    assert [e["seq"] for e in run.events] == list(range(len(run.events)))
    if processes != 2:
        assert "global batch kept at 4" in run.text
    end = run.event("run_end")["progress"]
    assert end["epoch"] == 3.0 and end["samples"] == 72 and end["step"] == STEPS


@pytest.mark.launch
def test_a_run_without_flags_that_is_killed_loses_few_steps(tiny, tmp_path):
    output = tmp_path / "run"
    settings = {key: value for key, value in flags(tiny).items() if key != "save_steps"}
    launch("ddp", 2, "causal_lm", output, spy={"hang_at_step": 14}, **settings)

    run = launch("ddp", 2, "causal_lm", output, resume_from_checkpoint="auto", **settings)

    assert run.event("resume")["step"] == 10
    assert [step["step"] for step in run.steps if step["attempt"] == 2] == list(range(11, STEPS + 1))


@pytest.mark.launch
@pytest.mark.full
def test_a_run_offloaded_to_nvme_goes_on(tiny, tmp_path):
    """Weights and moments that live on disk are read from it, and come back onto it."""
    nvme = flags(tiny) | {"model_name_or_path": tiny / "wide", "max_train_steps": 8, "learning_rate": 1e-3}
    whole = launch("zero3_nvme", 2, "causal_lm", tmp_path / "whole", **nvme)
    swapped = sum(rank["swapped_out"] for rank in whole.event("memory")["per_rank_bytes"])
    assert swapped > 3 * 4 * 3 * 128 * 8192, "masters and both moments of the three wide tensors must really be on disk"
    assert not list((tmp_path / "whole").rglob("*.swp")), "files that no run can use any more must be deleted"
    checkpoint = whole.output / "checkpoints" / "step-000004"
    for strategy in ("zero3_nvme", "zero2"):
        run = launch(strategy, 2, "causal_lm", tmp_path / strategy, resume_from_checkpoint=checkpoint, **nvme)
        assert [s["step"] for s in run.steps] == [5, 6, 7, 8]
        assert largest_difference(run.losses, whole.losses[4:]) < 1e-5
        assert largest_difference(run.norms, whole.norms[4:]) < 1e-5


@pytest.mark.launch
@pytest.mark.full
def test_a_weight_that_is_larger_than_a_buffer_for_nvme_is_loaded(tiny, tmp_path):
    """DeepSpeed asserts that each shard of the model fits into a buffer."""
    config = json.loads((ROOT / "ds_configs" / "zero3_nvme.json").read_text())
    config["zero_optimization"]["offload_param"]["buffer_size"] = 1000.0
    (tmp_path / "small_buffers.json").write_text(json.dumps(config))
    file = tmp_path / "small_buffers.yaml"
    text = (ROOT / "accelerate_configs" / "zero3_nvme.yaml").read_text()
    file.write_text(text.replace("ds_configs/zero3_nvme.json", str(tmp_path / "small_buffers.json")))
    settings = flags(tiny) | {"model_name_or_path": tiny / "wide", "max_train_steps": 2}
    run = launch(["--config_file", str(file)], 2, "causal_lm", tmp_path / "run", **settings)
    assert len(run.steps) == 2


FINISHED = [
    ("single", 1, {"num_train_epochs": 1}),
    pytest.param("zero3", 2, {"num_train_epochs": 1}, marks=pytest.mark.full),
    pytest.param("fsdp", 2, {"max_train_steps": 4}, marks=pytest.mark.full),
    pytest.param("zero2", 2, {"max_train_steps": 6, "eval_steps": 3}, marks=pytest.mark.full),
]


@pytest.mark.launch
@pytest.mark.parametrize("strategy, processes, length", FINISHED)
def test_a_finished_run_that_lost_its_model_writes_it_and_does_nothing_twice(tiny, tmp_path, strategy, processes, length):
    settings = flags(tiny) | {"validation_split_percentage": 20, "num_warmup_steps": 1, "save_total_limit": 1} | length
    whole = launch(strategy, processes, "causal_lm", tmp_path / "run", **settings)
    before = load_file(whole.output / "model" / "model.safetensors")
    shutil.rmtree(whole.output / "model")
    saved = {f: f.stat().st_mtime_ns for f in (whole.output / "checkpoints").rglob("*.*") if ".lock" not in f.name}
    again = launch(strategy, processes, "causal_lm", whole.output, resume_from_checkpoint="auto", **settings)
    after = load_file(again.output / "model" / "model.safetensors")
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)
    done = [e["type"] for e in again.events if e["attempt"] == 2]
    assert "run_end" in done and not {"eval", "checkpoint", "metrics"} & set(done)
    ends = [e for e in again.events if e["type"] == "run_end"]
    assert ends[0]["eval"] == ends[1]["eval"] and ends[0]["eval"]["loss"] > 0 and ends[0]["progress"] == ends[1]["progress"]
    assert {f: f.stat().st_mtime_ns for f in saved} == saved, "the checkpoint is not written again"


@pytest.mark.launch
def test_a_run_that_is_past_its_end_compares_no_next_step(tiny, tmp_path):
    settings = flags(tiny) | {"num_train_epochs": 1}
    launch("single", 1, "causal_lm", tmp_path / "run", **settings | {"max_train_steps": 30})

    again = launch("single", 1, "causal_lm", tmp_path / "run", resume_from_checkpoint="auto", **settings)

    (resumed,) = [event for event in again.events if event["type"] == "resume"]
    assert "nothing is left to train" in again.text and not resumed["differing"]


@pytest.mark.launch
def test_resume_refuses_other_data_and_other_models(tiny, tmp_path, killed):
    output = tmp_path / "run"
    shutil.copytree(killed.output, output)
    run = launch("single", 1, "causal_lm", output, expect=REFUSED, **flags(tiny))
    assert "holds 2 checkpoints of an earlier run, the newest step-000008" in run.text

    changed = flags(tiny) | {"train_file": tiny / "chats.jsonl"}
    run = launch("single", 1, "causal_lm", output, expect=1, resume_from_checkpoint="auto", **changed)
    assert "CheckpointError" in run.text and "24 samples with fingerprint" in run.text and "now 96 samples" in run.text

    changed = flags(tiny) | {"model_name_or_path": tiny / "gpt2"}
    run = launch("single", 1, "causal_lm", output, expect=1, resume_from_checkpoint="auto", **changed)
    assert "CheckpointError" in run.text and "made by another model: model_type was 'llama' and is 'gpt2' now" in run.text


@pytest.mark.launch
@pytest.mark.full
def test_no_rank_starts_over_checkpoints_that_cannot_be_read(tiny, tmp_path, killed):
    output = tmp_path / "run"
    shutil.copytree(killed.output, output)
    checkpoints = store.list_candidates(store.folder_of(output))
    assert [c.name for c in checkpoints] == ["step-000004", "step-000008"]

    def harmed(harm, words, expect):
        for checkpoint in checkpoints:
            harm(checkpoint)
        before = {f: f.read_bytes() for c in checkpoints for f in c.iterdir()}
        run = launch("ddp", 2, "causal_lm", output, expect=expect, resume_from_checkpoint="auto", **flags(tiny))
        for part in run.text.split("Root Cause"):  # by the rank that stopped first, and by its launcher
            assert "none of them can be read" in part and part.count(words) == len(checkpoints), part
        assert run.text.count("Root Cause") == (expect == 1) and "(rank 1)" not in run.text
        assert {f: f.read_bytes() for c in store.list_candidates(store.folder_of(output)) for f in c.iterdir()} == before

    harmed(flip, "its content is damaged", 1)  # seen by rank 0, once the ranks know each other
    harmed(lambda c: manifest(c, format_version=99), "format 99 is newer", REFUSED)  # seen by each rank, before


@pytest.mark.launch
def test_going_on_from_an_earlier_checkpoint_gives_the_later_ones_up(tiny, tmp_path, killed):
    output = tmp_path / "run"
    shutil.copytree(killed.output, output)
    back = flags(tiny) | {"resume_from_checkpoint": output / "checkpoints" / "step-000004", "save_total_limit": 1}
    run = launch("single", 1, "causal_lm", output, max_train_steps=6, **back)
    assert run.event("resume")["set_aside"] == [str(output / "checkpoints" / "step-000008.abandoned")]
    assert [c.name for c in (output / "checkpoints").glob("step-*")] == ["step-000006"]

    other = flags(tiny) | {"resume_from_checkpoint": killed.output}
    run = launch("single", 1, "causal_lm", output, expect=REFUSED, **other)
    assert "step-000008 is of another run than the 1 checkpoint in" in run.text
