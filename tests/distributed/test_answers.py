"""Answers to held-out prompts at every evaluation, on two ranks."""

from __future__ import annotations

import json

import pytest

from tests.distributed.test_parity import largest_difference
from tests.harness import launch
from zerobook.runlog.report import write


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.full), pytest.param("ddp", marks=pytest.mark.full)]
)
def test_held_out_prompts_are_answered_and_the_training_is_the_same(tiny, tmp_path, strategy):
    rows = [[("user", f"Say {number}."), ("assistant", f"{number} it is.")] for number in range(5)]
    held = tmp_path / "held.jsonl"
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    held.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", validation_file=held, max_seq_length=64,
        max_train_steps=4, eval_steps=2, logging_steps=1, learning_rate=1e-3,
    )  # fmt: skip
    plain = launch("single", 1, "lora_finetune", tmp_path / "plain", per_device_train_batch_size=2, **flags)
    run = launch(strategy, 2, "lora_finetune", tmp_path / "run", per_device_train_batch_size=1, eval_samples=3, **flags)
    assert largest_difference(run.losses, plain.losses) < 1e-4
    evaluations = [event for event in run.events if event["type"] == "eval"]
    assert [event["step"] for event in evaluations] == [2, 4]
    for event in evaluations:
        samples = event["samples"]
        assert [sample["expected"] for sample in samples] == ["0 it is.", "1 it is.", "2 it is."]
        assert all(f"Say {number}." in sample["prompt"] and sample["answer"] for number, sample in enumerate(samples))
    page = write(run.output)
    assert "Samples of the evaluation at step 4" in page.read_text()
