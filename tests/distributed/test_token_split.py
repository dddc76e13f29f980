"""Rows split among processes: the same training as one process, in every combination, and checkpoints that go anywhere."""

from __future__ import annotations

import json

import pytest
import torch

from tests.distributed.test_checkpoint_matrix import moments_differ
from tests.distributed.test_how_to import file_of, flags_of
from tests.distributed.test_parity import (
    TOLERANCE,
    assert_same_between_the_steps,
    largest_difference,
    record,
    weight_differences,
)  # fmt: skip
from tests.harness import ROOT, launch, sampled

full = pytest.mark.full


def strategy_file(folder, base, **changed):
    """Write a copy of a shipped file with other lines, and return its path."""
    text = (ROOT / "accelerate_configs" / f"{base}.yaml").read_text()
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / f"{base}_changed.yaml"
    file.write_text(text)
    return str(file)


COMBINATIONS = {
    "zero1": ("zero3_sequence", {"zero3.json": "zero1.json", "zero3_init_flag: true": "zero3_init_flag: false"}, 2, {}),
    "zero2": ("zero3_sequence", {"zero3.json": "zero2.json", "zero3_init_flag: true": "zero3_init_flag: false"}, 2, {}),
    "zero3-2x2": ("zero3_sequence", {}, 4, {}),
    "zero2-2x2": ("zero3_sequence", {"zero3.json": "zero2.json", "zero3_init_flag: true": "zero3_init_flag: false"}, 4, {}),
    "zero3-offload": ("zero3_sequence", {"zero3.json": "zero3_offload.json"}, 2, {}),
    "zero3-recomputed": ("zero3_sequence", {}, 2, {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
    "context-2x2": ("fsdp_context", {}, 4, {}),
    "context-4": ("fsdp_context", {"cp_size: 2": "cp_size: 4"}, 4, {}),
    "context-gathered": ("fsdp_context", {"alltoall": "allgather"}, 2, {}),
    "context-recomputed": ("fsdp_context", {}, 2, {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
    "context-gpt2": ("fsdp_context", {}, 2, {"model": "gpt2"}),
}
"""Case -> (strategy file, changes of it, processes, flags)."""


@pytest.mark.launch
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case == "zero2" else full) for case in COMBINATIONS])
def test_every_combination_trains_as_one_process(launches, tmp_path_factory, case):
    base, changed, processes, flags = COMBINATIONS[case]
    groups = processes // (4 if case == "context-4" else 2)
    accumulation = flags.get("gradient_accumulation_steps", 1)
    file = strategy_file(tmp_path_factory.mktemp("files"), base, **changed)
    flags = {key: value for key, value in flags.items() if key != "gradient_accumulation_steps"}
    one = launches("single", 1, 4, 1, between=True, model=flags.get("model", "llama"))
    run = launches(file, processes, 4 // (groups * accumulation), accumulation, between=True, **flags)
    assert [s["ids"] for s in run.steps] == [s["ids"] for s in one.steps]
    assert largest_difference(run.losses, one.losses) < TOLERANCE and largest_difference(run.norms, one.norms) < TOLERANCE
    weight, far = weight_differences(run.state(), one.state())
    assert far < 1e-3 and weight < 1e-2 * max(s["learning_rate"] for s in one.steps)
    assert run.event("run_start")["live"]["strategy"] == run.event("run_start")["plan"]["name"]
    assert_same_between_the_steps(run, one)


RESUMED = [
    ("zero3_sequence", 2, "zero3", 2),
    ("zero3_sequence", 4, "single", 1),
    ("zero3_sequence", 2, "fsdp", 2),
    ("ddp", 2, "zero3_sequence", 2),
    ("fsdp_context", 2, "zero2", 2),
    ("fsdp_context", 2, "zero3_sequence", 4),
    ("fsdp", 2, "fsdp_context", 2),
]
"""(writer, its processes, reader, its processes)."""


@pytest.mark.launch
@pytest.mark.parametrize(
    "writer, processes, reader, later",
    sampled(RESUMED, ("ddp", 2, "zero3_sequence", 2), ("fsdp_context", 2, "zero2", 2)),
)
def test_checkpoints_go_to_and_from_split_rows(tiny, tmp_path, writer, processes, reader, later):
    groups = processes // (2 if writer in ("zero3_sequence", "fsdp_context") else 1)
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        per_device_train_batch_size=4 // groups, max_train_steps=8, save_steps=4, learning_rate=3e-3, adam_epsilon=1e-6,
        logging_steps=4,
    )  # fmt: skip
    whole = launch(writer, processes, "causal_lm", tmp_path / "whole", **flags)
    run = launch(
        reader, later, "causal_lm", tmp_path / "run",
        resume_from_checkpoint=whole.output / "checkpoints" / "step-000004", **flags,
    )  # fmt: skip
    assert run.event("resume")["differing"] == {}
    assert [s["ids"] for s in run.steps] == [s["ids"] for s in whole.steps[4:]]
    assert largest_difference(run.losses, whole.losses[4:]) < TOLERANCE
    assert largest_difference(run.norms, whole.norms[4:]) < TOLERANCE
    ours, theirs = run.state(), whole.state()
    for name in theirs:
        assert (ours[name] - theirs[name]).abs().max() <= 1e-4 * theirs[name].abs().max(), name
    record("resume", recipe="causal_lm", writer=f"{writer} on {processes}", reader=f"{reader} on {later}",
           loss=largest_difference(run.losses, whole.losses[4:]), norm=largest_difference(run.norms, whole.norms[4:]),
           moments=moments_differ(ours, theirs))  # fmt: skip


SAVED = '''
import json
from pathlib import Path

import torch

from zerobook.training.hooks import Hook


def storage(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()


class Saved(Hook):
    """Count the bytes that autograd keeps of activations, by rank."""

    def on_start(self, trainer):
        self.strategy, self.output, self.kept = trainer.strategy, Path(trainer.config.output_dir), {}

    def around_loss(self, trainer, batch):
        def pack(tensor):
            # gathered weights are there only while their layer runs
            if storage(tensor).data_ptr() not in {storage(p).data_ptr() for p in trainer.strategy.model.parameters()}:
                self.kept[storage(tensor).data_ptr()] = storage(tensor).nbytes()
            return tensor

        self.kept.clear()
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def after_step(self, trainer, record):
        file = self.output / f"saved-{trainer.strategy.rank}.json"
        file.write_text(json.dumps({"saved": sum(self.kept.values()), "seed": torch.initial_seed()}))
'''


@pytest.mark.launch
@full
@pytest.mark.parametrize("split, plain", [("zero3_sequence", "zero3"), ("fsdp_context", "fsdp")])
def test_activations_shrink_with_the_processes_that_share_a_row(tiny, tmp_path, split, plain):
    hook = tmp_path / "saved.py"
    hook.write_text(SAVED)
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "text.txt", block_size=512, validation_split_percentage=0,
        max_train_steps=2, per_device_train_batch_size=1, hooks=f"{hook}:Saved", format="text",
    )  # fmt: skip
    kept = {}
    for strategy in (split, plain):
        launch(strategy, 2, "causal_lm", tmp_path / strategy, **flags)
        files = [tmp_path / strategy / f"saved-{rank}.json" for rank in range(2)]
        found = [json.loads(file.read_text()) for file in files]
        kept[strategy] = [rank["saved"] for rank in found]
        assert found[0]["seed"] != found[1]["seed"], "other tokens, other dropout"
    for ours, whole in zip(kept[split], kept[plain], strict=True):
        assert 0.45 * whole < ours < 0.6 * whole


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["zero3_sequence", pytest.param("fsdp_context", marks=full)])
def test_an_objective_that_needs_whole_rows_is_refused(tiny, tmp_path, strategy):
    file = file_of("custom_loss", tmp_path)
    run = launch(strategy, 2, str(file), tmp_path / "run", expect=None, max_train_steps=2,
                 **flags_of("custom_loss", tiny, tmp_path))  # fmt: skip
    assert run.returncode and "WithZLoss needs whole rows" in " ".join(run.text.split())


@pytest.mark.launch
@full
@pytest.mark.parametrize(
    "strategy, model, said",
    [("zero3_sequence", "gpt2", "num_key_value_heads"), ("fsdp_context", "falcon", "does not support that")],
)
def test_a_model_that_cannot_be_split_is_refused(tiny, tmp_path, strategy, model, said):
    run = launch(
        strategy, 2, "causal_lm", tmp_path / "run", expect=None, max_train_steps=2, model_name_or_path=tiny / model,
        train_file=tiny / "chats.jsonl", block_size=64, validation_split_percentage=0,
    )  # fmt: skip
    assert run.returncode and said in " ".join(run.text.split())


@pytest.mark.launch
@full
@pytest.mark.parametrize("strategy", ["zero3_sequence", "fsdp_context"])
def test_half_precision_is_rounding_only(launches, strategy):
    one = launches("single", 1, 4, 1, mixed_precision="bf16")
    run = launches(strategy, 2, 4, 1, mixed_precision="bf16")
    assert largest_difference(run.losses, one.losses) < 0.02
    assert torch.tensor(run.norms).isfinite().all()
