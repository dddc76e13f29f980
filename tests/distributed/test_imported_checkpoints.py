"""Another trainer trains six steps and saves the third; we import that and take three more: the same losses as theirs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.other_trainer import HALF, STEPS
from tests.distributed.test_parity import largest_difference, record
from tests.harness import LIMIT_S, ROOT, SETTINGS, launch, start
from tests.test_checkpoint_import import LORA
from zerobook.checkpoint import store
from zerobook.cli.main import main
from zerobook.interop.checkpoints.exporter import export_state
from zerobook.interop.checkpoints.importer import import_checkpoint
from zerobook.utils.subprocess_launch import kill_family

TOLERANCE = 1e-5
RATE = 1e-3
EPSILON = 1e-6
"""Half of an adapter has no gradient at the first step; with a small epsilon, AdamW would turn rounding into steps."""


AUTOMATIC = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")


def zero(stage):
    """The DeepSpeed JSON of a Trainer, whose optimizer is Trainer's own."""
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0, **dict.fromkeys(AUTOMATIC, "auto")}


ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
# DeepSpeed's own optimizer decays norm gains and biases too, and here only matrices decay.
OWN_ADAMW = {"deepspeed": zero(2) | {"optimizer": {"type": "AdamW", "params": ADAMW}}, "weight_decay": 0.0}
UNIVERSAL = {"checkpoint": {"load_universal": True}}
# ZeRO-3 reads a plain step count, which only DeepSpeed's own optimizers take. This is DeepSpeedCPUAdam.
OFFLOADED_ADAMW = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
}
THEIRS = {
    "trainer-single": {"ranks": 1},
    "trainer-ddp": {"ranks": 2},
    "trainer-zero1": {"ranks": 2, "deepspeed": zero(1)},
    "trainer-zero2": {"ranks": 2, "deepspeed": zero(2)},
    "trainer-zero2-adamw": {"ranks": 2, **OWN_ADAMW},
    "trainer-zero3": {"ranks": 2, "deepspeed": zero(3)},
    "trainer-zero3-on-4": {"ranks": 4, "deepspeed": zero(3)},
    "trainer-lora": {"ranks": 1, "lora": LORA},
    "trainer-lora-zero2": {"ranks": 2, "lora": LORA, "deepspeed": zero(2)},
    "trainer-lora-zero3": {"ranks": 2, "lora": LORA, "deepspeed": zero(3)},
    "accelerate-zero2": {"ranks": 2, "strategy": "zero2", "weight_decay": 0.0},
    "accelerate-fsdp2": {"ranks": 2, "strategy": "fsdp", "weight_decay": 0.0},
    "accelerate-fsdp2-full": {"ranks": 2, "strategy": "fsdp", "weight_decay": 0.0, "state_dict": "FULL_STATE_DICT"},
}
UNIVERSAL_READERS = {
    "trainer-zero1-universal": {"ranks": 2, "deepspeed": zero(1) | UNIVERSAL},
    "trainer-zero2-universal": {"ranks": 2, "deepspeed": zero(2) | UNIVERSAL},
    "trainer-zero2-universal-on-4": {"ranks": 4, "deepspeed": zero(2) | UNIVERSAL},
    "trainer-zero2-universal-adamw": {"ranks": 2, "deepspeed": OWN_ADAMW["deepspeed"] | UNIVERSAL, "weight_decay": 0.0},
    "trainer-zero3-universal": {"ranks": 2, "deepspeed": zero(3) | OFFLOADED_ADAMW | UNIVERSAL, "weight_decay": 0.0},
}
THEIRS |= UNIVERSAL_READERS
READERS = {
    "trainer-single": [("zero2", 2), ("single", 1)],
    "trainer-ddp": [("single", 1), ("zero3", 4), ("fsdp", 2)],
    "trainer-zero1": [("single", 1), ("zero1", 2), ("zero3", 4), ("fsdp", 2)],
    "trainer-zero2": [("single", 1), ("zero2", 2), ("zero3", 4), ("fsdp", 2)],
    "trainer-zero2-adamw": [("single", 1), ("fsdp", 2)],
    "trainer-zero3": [("single", 1), ("zero3", 2), ("zero2", 4), ("fsdp", 2)],
    "trainer-zero3-on-4": [("fsdp", 2), ("single", 1)],
    "trainer-lora": [("single", 1), ("zero3", 2), ("fsdp", 2)],
    "trainer-lora-zero2": [("single", 1), ("fsdp", 2)],
    "trainer-lora-zero3": [("zero2", 2), ("single", 1)],
    "accelerate-zero2": [("single", 1), ("zero3", 2), ("fsdp", 2)],
    "accelerate-fsdp2": [("single", 1), ("zero2", 2), ("fsdp", 4)],
    "accelerate-fsdp2-full": [("single", 1), ("zero3", 2)],
}
"""How the other trainer ran -> strategies, with processes, under which its checkpoint is continued."""
SAMPLE = [("trainer-zero3", "fsdp"), ("trainer-zero2", "single"), ("accelerate-fsdp2", "zero2")]


def run_other(tiny: Path, folder: Path, case: str, resume: Path | None = None) -> list[float]:
    """Let the other trainer train, or continue the checkpoint ``resume``, and return its losses."""
    facts = THEIRS[case]
    decay = facts.get("weight_decay", 0.1)
    arguments = {
        "learning_rate": RATE,
        "weight_decay": decay,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "adam_epsilon": EPSILON,
    }
    if "deepspeed" in facts:
        arguments["deepspeed"] = facts["deepspeed"]
    spec = {
        "kind": case.partition("-")[0],
        "model": str(tiny / "llama"),
        "data": str(tiny / "few.jsonl"),
        "output": str(folder),
        "rows": 8,
        "resume": None if resume is None else str(resume),
        "ranks": facts["ranks"],
        "lora": facts.get("lora"),
        "state_dict": facts.get("state_dict", "SHARDED_STATE_DICT"),
        "arguments": arguments,
        "optimizer": {"lr": RATE, "weight_decay": decay, "eps": EPSILON},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    script = [str(ROOT / "tests" / "distributed" / "other_trainer.py"), str(folder / "spec.json")]
    if "strategy" in facts:
        strategy = ROOT / "accelerate_configs" / f"{facts['strategy']}.yaml"
        launcher = ["accelerate.commands.launch", "--config_file", str(strategy), "--num_processes", str(facts["ranks"])]
        launcher += ["--main_process_port", "0"]
    else:
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(facts["ranks"])]
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    process = start([sys.executable, "-m", *launcher, *script], environment, forked=False)
    try:
        text, _ = process.communicate(timeout=4 * LIMIT_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, text[-5000:]
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def theirs(tiny, tmp_path_factory):
    """The losses of another trainer and its checkpoint of the third step: each case is launched once."""

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("theirs")
        losses = run_other(tiny, folder, case)
        return losses, folder / ("state" if "strategy" in THEIRS[case] else f"checkpoint-{HALF}")

    return run


def flags_of(tiny, case, processes):
    schedule = {"lr_scheduler_type": "cosine", "num_warmup_steps": 1}
    if "strategy" in THEIRS[case]:
        schedule = {"lr_scheduler_type": "constant"}
    flags = schedule | {
        "learning_rate": RATE,
        "weight_decay": THEIRS[case].get("weight_decay", 0.1),
        "model_name_or_path": tiny / "llama",
        "train_file": tiny / "few.jsonl",
        "validation_split_percentage": 0,
        "per_device_train_batch_size": 8 // processes,
        "max_train_steps": STEPS,
        "adam_epsilon": EPSILON,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "resume_from_checkpoint": "auto",
    }  # fmt: skip
    if "lora" in THEIRS[case]:
        targets = LORA["target_modules"]
        return flags | {
            "max_seq_length": 64,
            "lora_r": LORA["r"],
            "lora_alpha": LORA["lora_alpha"],
            "lora_target_modules": targets,
        }
    return flags | {"block_size": 64}


def cases():
    for case, readers in READERS.items():
        for reader, processes in readers:
            marks = [pytest.mark.launch, *([] if (case, reader) in SAMPLE else [pytest.mark.full])]
            yield pytest.param(case, reader, processes, marks=marks, id=f"{case}-then-{reader}-on-{processes}")


@pytest.mark.parametrize("case, reader, processes", list(cases()))
def test_another_trainers_checkpoint_is_continued_under_any_strategy(tiny, tmp_path, theirs, case, reader, processes):
    losses, checkpoint = theirs(case)
    output = tmp_path / "run"
    imported = import_checkpoint(checkpoint, output)
    assert imported.position.step == HALF
    recipe = "lora_finetune" if "lora" in THEIRS[case] else "causal_lm"
    run = launch(reader, processes, recipe, output, **flags_of(tiny, case, processes))
    assert run.event("resume")["step"] == HALF and run.event("resume")["differing"] == {}
    first = [] if "strategy" in THEIRS[case] else list(range(1, HALF + 1))
    assert [step["step"] for step in run.steps] == [*first, *range(HALF + 1, STEPS + 1)]
    if first:
        assert largest_difference(run.losses[:HALF], losses[:HALF]) < TOLERANCE, "the log begins as theirs"
    loss = largest_difference(run.losses[len(first) :], losses[HALF:])
    assert loss < TOLERANCE
    assert main(["runlog", "report", str(output)]) == 0
    record(
        "imported", trainer=f"{case} on {THEIRS[case]['ranks']}", reader=f"{reader} on {processes}", recipe=recipe, loss=loss
    )


@pytest.mark.launch
@pytest.mark.full
def test_a_rollback_may_go_to_an_imported_checkpoint(tiny, tmp_path, theirs):
    losses, checkpoint = theirs("trainer-zero2")
    output = tmp_path / "run"
    import_checkpoint(checkpoint, output)
    run = launch(
        "zero2",
        2,
        "causal_lm",
        output,
        through=ROOT / "tests" / "distributed" / "between.py",
        environment={"ZEROBOOK_BETWEEN_BACK_AT": 5},
        save_steps=0,
        **flags_of(tiny, "trainer-zero2", 2),
    )
    outcome = next(event for event in run.events if event["type"] == "rollback" and event["phase"] == "outcome")
    assert outcome["step"] == HALF and outcome["differing"] == {}
    assert largest_difference(run.losses[-3:], losses[HALF:]) < TOLERANCE


@pytest.mark.launch
@pytest.mark.full
def test_trainer_continues_under_ddp_what_it_began_with_zero_and_we_went_on_with(tiny, tmp_path, theirs):
    losses, checkpoint = theirs("trainer-zero3-on-4")
    import_checkpoint(checkpoint, tmp_path / "run")
    launch("fsdp", 2, "causal_lm", tmp_path / "run", save_steps=4, **flags_of(tiny, "trainer-zero3-on-4", 2))
    exported = tmp_path / "checkpoint-4"
    export_state(tmp_path / "run" / "checkpoints" / "step-000004", exported, "trainer")
    (tmp_path / "back").mkdir()
    loss = largest_difference(run_other(tiny, tmp_path / "back", "trainer-ddp", exported), losses[4:])
    assert loss < TOLERANCE
    record(
        "imported", trainer="trainer-zero3-on-4 on 4", reader="fsdp on 2, then trainer-ddp on 2", recipe="causal_lm", loss=loss
    )


@pytest.mark.launch
@pytest.mark.full
def test_accelerate_continues_an_exported_sharded_state_dict(tiny, tmp_path, theirs):
    losses, checkpoint = theirs("accelerate-fsdp2")
    # Only the config says which weights have two names.
    shutil.copy(tiny / "llama" / "config.json", checkpoint)
    imported = import_checkpoint(checkpoint, tmp_path / "run").checkpoint
    export_state(imported, tmp_path / "state", "dcp")
    (tmp_path / "back").mkdir()
    loss = largest_difference(run_other(tiny, tmp_path / "back", "accelerate-fsdp2", tmp_path / "state"), losses[HALF:])
    assert loss < TOLERANCE
    record("imported", trainer="accelerate-fsdp2 on 2", reader="accelerate-fsdp2 on 2", recipe="causal_lm", loss=loss)


@pytest.fixture(scope="module")
def ours(tiny, tmp_path_factory):
    """The losses of our run and its checkpoint of the third step: each weight decay is launched once."""

    @cache
    def run(weight_decay):
        folder = tmp_path_factory.mktemp("ours")
        flags = flags_of(tiny, "trainer-zero2", 2) | {"weight_decay": weight_decay, "resume_from_checkpoint": None}
        run = launch("fsdp", 2, "causal_lm", folder, save_steps=HALF, **flags)
        return run.losses, folder / "checkpoints" / store.name_of(HALF)

    return run


def universal_cases():
    for case in UNIVERSAL_READERS:
        marks = [pytest.mark.launch, *([] if case == "trainer-zero2-universal" else [pytest.mark.full])]
        yield pytest.param(case, marks=marks)


@pytest.mark.parametrize("case", list(universal_cases()))
def test_deepspeed_continues_a_universal_checkpoint_on_any_number_of_ranks(tiny, tmp_path, ours, case):
    losses, checkpoint = ours(THEIRS[case].get("weight_decay", 0.1))
    exported = tmp_path / f"checkpoint-{HALF}"
    export_state(checkpoint, exported, "deepspeed")
    (tmp_path / "back").mkdir()
    continued = run_other(tiny, tmp_path / "back", case, exported)
    assert len(continued) == STEPS - HALF
    loss = largest_difference(continued, losses[HALF:])
    assert loss < TOLERANCE
    ranks = THEIRS[case]["ranks"]
    record("imported", trainer="zerobook fsdp on 2", reader=f"{case} on {ranks}", recipe="causal_lm", loss=loss)
