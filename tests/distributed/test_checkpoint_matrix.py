"""Ten steps saved under every strategy, ten more under others: the losses, moments and tokens of a run never stopped."""

from __future__ import annotations

import json
import shutil
from functools import cache

import pytest
import torch

from tests.distributed.test_parity import largest_difference, record
from tests.harness import launch, reseal, seen, sequence

TOLERANCE = 1e-5
HALF, STEPS = 10, 20

WRITERS = {
    "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 4, "zero3_offload": 2, "zero3_nvme": 2, "fsdp": 2, "fsdp_hybrid": 4,
    "zero3_hpz": 4,
}  # fmt: skip
READERS = {
    "ddp": [("zero1", 2), ("zero3", 4), ("fsdp", 2)],
    "zero1": [("zero2", 2), ("fsdp", 4), ("single", 1)],
    "zero2": [("zero3", 2), ("fsdp_hybrid", 4), ("zero3_offload", 2)],
    "zero3": [("zero2", 2), ("fsdp", 2), ("ddp", 4)],
    "zero3_offload": [("zero3_nvme", 2), ("zero1", 4), ("fsdp", 2)],
    "zero3_nvme": [("zero2", 2), ("zero3_offload", 4), ("ddp", 2)],
    "fsdp": [("zero3", 2), ("fsdp_hybrid", 4), ("single", 1), ("zero3_hpz", 4)],
    "fsdp_hybrid": [("zero1", 2), ("zero3", 2), ("fsdp_offload", 2)],
    "zero3_hpz": [("zero2", 2), ("fsdp", 4), ("zero3", 4)],
}
"""Each writer's checkpoint goes on under three others or more, one of them on another number of processes."""
OTHERS = [("dora", "zero3", "fsdp"), ("dora", "fsdp", "zero2"), ("pissa", "zero3", "fsdp"), ("pissa", "fsdp", "zero3")]
"""Other adapters: case, writer, reader on two processes."""
SAMPLE = [("zero3", "zero2", "causal_lm"), ("fsdp", "single", "lora_finetune")]


def flags(tiny, writer, recipe, processes):
    common = dict(
        validation_split_percentage=0, per_device_train_batch_size=4 // processes, max_train_steps=STEPS, save_steps=HALF,
        weight_decay=0.1, logging_steps=5, num_warmup_steps=2,
    )  # fmt: skip
    # of the tiny Llama nothing is large enough to be swapped; adapters never are
    model = "wide" if writer == "zero3_nvme" and recipe == "causal_lm" else "llama"
    common |= dict(model_name_or_path=tiny / model, train_file=tiny / "epoch24.jsonl")
    if recipe in ("lora_finetune", "dora", "pissa"):
        adapter = {"adapter": recipe} if recipe != "lora_finetune" else {}
        return common | dict(max_seq_length=64, lora_r=32, lora_alpha=32, learning_rate=5e-3, adam_epsilon=1e-6) | adapter
    return common | dict(block_size=64, learning_rate=1e-3 if model == "wide" else 3e-3, adam_epsilon=1e-6)


def file(recipe):
    return "causal_lm" if recipe == "causal_lm" else "lora_finetune"


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """The run of twenty steps, with a checkpoint of its tenth: each is launched once."""

    @cache
    def run(writer, recipe):
        output = tmp_path_factory.mktemp(writer) / "run"
        return launch(writer, WRITERS[writer], file(recipe), output, spy={}, **flags(tiny, writer, recipe, WRITERS[writer]))

    return run


def cases():
    for recipe in ("causal_lm", "lora_finetune"):
        for writer, readers in READERS.items():
            for reader, processes in readers:
                marks = [pytest.mark.launch, *([] if (writer, reader, recipe) in SAMPLE else [pytest.mark.full])]
                name = f"{recipe}-{writer}-{WRITERS[writer]}-then-{reader}-{processes}"
                yield pytest.param(recipe, writer, reader, processes, marks=marks, id=name)
    for recipe, writer, reader in OTHERS:
        name = f"{recipe}-{writer}-{WRITERS[writer]}-then-{reader}-2"
        yield pytest.param(recipe, writer, reader, 2, marks=[pytest.mark.launch, pytest.mark.full], id=name)


def go_on(tiny, checkpoint, output, recipe, writer, reader, processes):
    given = flags(tiny, writer, recipe, WRITERS[writer])  # as written: the batch is cut anew by itself
    return launch(reader, processes, file(recipe), output, spy={}, resume_from_checkpoint=checkpoint, **given)


def moments_differ(mine, theirs):
    """The largest difference of any moment, as a share of that tensor's largest."""
    names = [name for name in theirs if not name.startswith("weight/")]
    return max(float((mine[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp_min(1e-30)) for n in names)


@pytest.mark.parametrize("recipe, writer, reader, processes", list(cases()))
def test_any_checkpoint_goes_on_under_any_strategy(tiny, tmp_path, written, recipe, writer, reader, processes):
    whole = written(writer, recipe)
    checkpoint = whole.output / "checkpoints" / f"step-{HALF:06d}"
    run = go_on(tiny, checkpoint, tmp_path / "run", recipe, writer, reader, processes)
    resumed = run.event("resume")
    assert resumed["step"] == HALF and resumed["differing"] == {}
    state = run.state()
    weights = sum(4 * t.numel() for name, t in state.items() if name.startswith("weight/"))
    # Each byte is read once over all ranks. ZeRO-3's masters and what its forwards read are two; replicas have each their own.
    once = 3 * weights + (weights if reader.startswith("zero3") else 0)
    assert sum(resumed["bytes_read"]) == once * (processes // 2 if reader == "fsdp_hybrid" else 1)
    assert [s["step"] for s in run.steps] == list(range(HALF + 1, STEPS + 1))
    loss = largest_difference(run.losses, whole.losses[HALF:])
    norm = largest_difference(run.norms, whole.norms[HALF:])
    moments = moments_differ(state, whole.state())
    assert loss < TOLERANCE and norm < TOLERANCE and moments < 1e-4
    assert sequence(seen(run.output), HALF + 1, STEPS) == sequence(seen(whole.output), HALF + 1, STEPS)
    record("resume", recipe=recipe, writer=f"{writer} on {WRITERS[writer]}", reader=f"{reader} on {processes}",
           loss=loss, norm=norm, moments=moments)  # fmt: skip


def spoil(checkpoint, target, how):
    """A copy of ``checkpoint`` that is whole by its manifest, and wrong."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, target)
    if how == "steps":
        index = json.loads((target / "tensors.json").read_text())
        (target / "tensors.json").write_text(json.dumps(index | {"adam_steps": 0}))
    for file in target.glob("*.safetensors") if how == "moments" else ():
        tensors = load_file(file)
        save_file({name: t if name.startswith("weight/") else torch.zeros_like(t) for name, t in tensors.items()}, file)
    reseal(target)


@pytest.mark.launch
@pytest.mark.parametrize("how", ["moments", pytest.param("steps", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "writer, reader", [("zero3", "zero2"), pytest.param("fsdp", "zero3", marks=pytest.mark.full)]
)  # fmt: skip
def test_lost_moments_and_a_lost_step_count_are_seen(tiny, tmp_path, written, writer, reader, how):
    """Without these a run goes on as if nothing were wrong; so the comparison above would notice."""
    whole = written(writer, "causal_lm")
    spoilt = tmp_path / "checkpoints" / f"step-{HALF:06d}"
    spoil(whole.output / "checkpoints" / f"step-{HALF:06d}", spoilt, how)
    run = go_on(tiny, spoilt, tmp_path / "run", "causal_lm", writer, reader, 2)
    assert largest_difference(run.losses, whole.losses[HALF:]) > 10 * TOLERANCE
