"""The planned bytes are those that real runs hold and send, on one, two and four ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.test_parity import record
from tests.harness import SETTINGS, skip_without_op, start
from zerobook.cli.main import main
from zerobook.config_sources import parse
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import make_job
from zerobook.plan.measure import measure
from zerobook.training.recipe_file import recipe_class
from zerobook.utils import subprocess_launch
from zerobook.utils.devices import Device

ROOT = Path(__file__).resolve().parents[2]
full = pytest.mark.full
TEXT = {"train_file": "text.txt", "block_size": 64}
CHATS = {"train_file": "chats.jsonl"}
JOBS = {
    "llama": ("causal_lm", "llama", {**TEXT, "weight_decay": 0.1}),
    "gpt2": ("causal_lm", "gpt2", {**TEXT, "gradient_accumulation_steps": 2}),
    "bf16": ("causal_lm", "llama", {**TEXT, "mixed_precision": "bf16"}),
    "checkpointing": ("causal_lm", "gpt2", {**TEXT, "activation_checkpointing": True}),
    "selective": ("causal_lm", "gpt2", {**TEXT, "activation_checkpointing": "selective"}),
    "every second layer": ("causal_lm", "llama", {**TEXT, "activation_checkpointing": "every:2"}),
    "lora": ("lora_finetune", "llama", {**CHATS, "max_seq_length": 64}),
    "qlora": ("lora_finetune", "llama", {**CHATS, "max_seq_length": 64, "load_in_4bit": True}),
    "int8": ("lora_finetune", "llama", {**CHATS, "max_seq_length": 64, "load_in_8bit": True}),
    "packed lora": ("lora_finetune", "llama", {**CHATS, "max_seq_length": 64, "packing": True}),
    # ZeRO-3 must not learn the order of modules from passes without a backward one: it would gather twice for ever
    "evaluated first": (
        "lora_finetune",
        "llama",
        {
            **CHATS,
            "max_seq_length": 64,
            "eval_on_start": True,
            "validation_split_percentage": 10,
            "per_device_eval_batch_size": 1,
        },
    ),
    "bart": ("seq2seq_chatbot", "bart", {**CHATS, "max_source_length": 64, "max_target_length": 32}),
    "wide": ("causal_lm", "wide", TEXT),
    "wide lora": ("lora_finetune", "wide", {**CHATS, "max_seq_length": 64}),
}
SHARDED = ("zero1", "zero2", "zero3", "fsdp")
OFFLOADED = ("zero2_offload", "zero3_offload", "zero3_offload_optimizer", "fsdp_offload")
FAR = ("llama", "gpt2", "checkpointing", "lora", "packed lora", "bart", "bf16")
SAMPLE = {("zero3_narrow", 2, "bart"), ("fsdp", 2, "packed lora")}
CASES = [
    ("single", 1, "llama"),
    *[("ddp", ranks, name) for ranks, name in ((2, "llama"), (4, "bart"), (2, "bf16"))],
    *[(strategy, ranks, "llama") for strategy in SHARDED for ranks in (1, 2, 4)],
    *[(strategy, 2, name) for strategy in SHARDED for name in ("gpt2", "bf16", "checkpointing", "lora", "packed lora")],
    *[(strategy, 2, name) for strategy in SHARDED for name in ("selective", "every second layer")],
    *[(strategy, 2, "llama") for strategy in OFFLOADED],
    *[(strategy, 2, "qlora") for strategy in ("ddp", *SHARDED)],
    *[(strategy, 2, "int8") for strategy in ("ddp", "zero2")],
    *[(strategy, 4, name) for strategy in ("fsdp_hybrid", "zero3_hpz") for name in ("llama", "packed lora")],
    ("zero3_hpz", 4, "gpt2"),
    ("zero3_hpz", 4, "evaluated first"),
    ("zero3", 2, "evaluated first"),
    ("zero2", 2, "bart"),
    ("zero3", 4, "bart"),
    ("fsdp", 2, "bart"),
    ("zero2_offload", 2, "bf16"),
    ("zero3_nvme", 2, "wide"),
    ("zero3_nvme", 2, "wide lora"),
    ("zero3_nvme_little", 2, "wide"),
    *[("zero3_forgetting", 2, name) for name in FAR],
    *[("zero3_narrow", 2, name) for name in FAR],
    ("zero3_narrow", 4, "gpt2"),
    ("zero3_hpz_forgetting", 4, "gpt2"),
    ("zero3_hpz_narrow", 4, "bart"),
]


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Let the planner's launches be forked. tests/test_tables.py and tests/test_gpu_bench.py run real ones."""

    def run(line, limit):
        process = start(line, os.environ | SETTINGS)
        text, _ = process.communicate(timeout=limit)
        return process.returncode, text

    monkeypatch.setattr(subprocess_launch, "run", run)


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, ranks, name",
    [pytest.param(*case, marks=[] if case in SAMPLE else full, id="-".join(map(str, case))) for case in CASES],
)
def test_the_plan_is_what_a_run_holds_and_sends(tiny, tmp_path, strategy, ranks, name):
    skip_without_op(strategy)
    recipe, model, flags = JOBS[name]
    flags = {"model_name_or_path": tiny / model, "per_device_train_batch_size": 2, "validation_split_percentage": 0} | flags
    flags["train_file"] = tiny / flags["train_file"]
    line = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    file = ROOT / "recipes" / f"{recipe}.py"
    kind = recipe_class(str(file))
    config, sources, _ = parse(kind.config_class, line)
    here = Cluster(gpus=ranks, device=Device("CPU process", 10**10, 1e10, 1e10, 1e10, 1e10), link=1e10, cpu=True)
    base, *changes = CHANGES.get(strategy, (strategy,))
    shipped = ROOT / "accelerate_configs" / f"{base}.yaml"
    changed = edited(shipped, tmp_path, *changes) if changes else shipped
    found = measure(changed, make_job(kind(config)), file, line, here, sources)
    assert not found.failure, found.failure
    figures = {kind: [figure.planned, figure.measured] for kind, figure in found.figures.items()}
    record("plan", strategy=strategy, ranks=ranks, job=name, **figures)
    for kind in ("parameters", "gradients", "optimizer"):
        figure = found.figures[kind]
        assert figure.planned == figure.measured, f"{kind}: {figure}"
    assert found.figures["activations saved"].measured > 0
    assert abs(found.figures["activations saved"].error) < 0.05, found.figures["activations saved"]
    assert (found.figures["sent"].measured > 0) == (ranks > 1)
    assert abs(found.figures["sent"].error) < 0.001, found.figures["sent"]  # a norm and a loss are in no plan


PAIRS = ('"zero_hpz_partition_size": "auto"', '"zero_hpz_partition_size": 2')
FORGETS = [
    ('"stage3_max_reuse_distance": 1000000000.0', '"stage3_max_reuse_distance": 0'),
    ('"stage3_prefetch_bucket_size": "auto"', '"stage3_prefetch_bucket_size": 0'),
]
NARROW = [
    ('"stage3_max_reuse_distance": 1000000000.0', '"stage3_max_reuse_distance": 60000'),
    ('"stage3_max_live_parameters": 1000000000.0', '"stage3_max_live_parameters": 70000'),
]
CHANGES = {
    # two processes are a group: by itself hpZ finds none on one node
    "zero3_hpz": ("zero3_hpz", PAIRS),
    # so little stays in host RAM that trained weights lie on the disk
    "zero3_nvme_little": ("zero3_nvme", ('"max_in_cpu": 1000000000.0', '"max_in_cpu": 1e5')),
    # as models have it that are larger than those limits: nothing, or little, stays from the forward pass for the backward one
    "zero3_forgetting": ("zero3", *FORGETS),
    "zero3_narrow": ("zero3", *NARROW),
    "zero3_hpz_forgetting": ("zero3_hpz", PAIRS, *FORGETS),
    "zero3_hpz_narrow": ("zero3_hpz", PAIRS, *NARROW),
}


def edited(file: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of a strategy file with something else in its DeepSpeed config."""
    text = (ROOT / "ds_configs" / f"{file.stem}.json").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "edited.json").write_text(text)
    copy = folder / file.name
    copy.write_text(file.read_text().replace(f"ds_configs/{file.stem}.json", str(folder / "edited.json")))
    return copy


@pytest.mark.launch
def test_a_run_that_dies_says_how(tiny, tmp_path, capsys):
    line = ["plan", "--here", "--gpus", "2", "--measure", "--strategies", "ddp,fsdp_hybrid", str(tiny / "llama")]
    # A tokenizer that cannot be read passes the plan, which needs none, and not the run.
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main([*line, "--train_file", str(tiny / "chats.jsonl"), "--tokenizer_name", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "ddp: exit status" in said and "tokenizer_name" in said
    assert "fsdp_hybrid: cannot run" in said
