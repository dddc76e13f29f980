"""Other architectures, starts from scratch, activation checkpointing, trackers, and a user's own Accelerate file."""

from __future__ import annotations

import pytest

from tests.distributed.test_parity import TOLERANCE, largest_difference
from tests.harness import calls, launch

ARCHITECTURES = [("gpt2", "zero3"), ("falcon", "fsdp"), ("gpt2", "zero2"), ("falcon", "zero3_offload")]


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("model, strategy", ARCHITECTURES)
def test_other_architectures(launches, model, strategy):
    one = launches("single", 1, 4, 1, model=model)
    run = launches(strategy, 2, 2, 1, model=model)
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert largest_difference(run.norms, one.norms) < TOLERANCE
    assert run.losses[-1] < run.losses[0]


@pytest.mark.launch
def test_from_scratch_starts_alike_everywhere(tiny, tmp_path):
    """zero.Init draws other random numbers than a plain initialisation; the recipe must not."""
    flags = dict(
        config_name=tiny / "gpt2", tokenizer_name=tiny / "gpt2", train_file=tiny / "text.txt", block_size=32,
        max_train_steps=4, max_eval_samples=8, logging_steps=1,
    )  # fmt: skip
    one = launch("single", 1, "causal_lm", tmp_path / "one", per_device_train_batch_size=4, **flags)
    run = launch("zero3", 2, "causal_lm", tmp_path / "run", per_device_train_batch_size=2, **flags)
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert abs(run.event("eval")["loss"] - one.event("eval")["loss"]) < 1e-5
    # what was trained is what was saved: a plain folder that loads without the recipe
    from transformers import AutoModelForCausalLM

    state = run.state()
    loaded = AutoModelForCausalLM.from_pretrained(run.output / "model")
    for name, tensor in loaded.named_parameters():
        assert (tensor - state[f"weight/{name}"]).abs().max() < 1e-6


@pytest.mark.launch
def test_activation_checkpointing_workers_and_trackers_change_nothing(launches, tmp_path):
    plain = launches("zero2", 2, 2, 1)
    run = launches(
        "zero2", 2, 2, 1, activation_checkpointing=True, dataloader_num_workers=1, report_to=["wandb", "tensorboard"], spy={}
    )
    counted = calls(run.output)
    assert counted["layer_forwards"] == 2 * 2 * 10, "two layers, each run again in the backward pass, over ten steps"
    assert counted["workers"] == 1
    assert largest_difference(run.losses, plain.losses) < TOLERANCE
    assert largest_difference(run.norms, plain.norms) < TOLERANCE
    assert list(run.output.rglob("events.out.tfevents*")), "tensorboard wrote nothing"
    assert list(run.output.rglob("*.wandb")), "wandb wrote nothing offline"


@pytest.mark.launch
def test_a_file_that_accelerate_config_writes_works(launches, tmp_path):
    """No JSON, everything inline, and a precision beside it."""
    file = tmp_path / "default_config.yaml"
    file.write_text(
        """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: false
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""
    )
    one = launches("single", 1, 4, 1)
    run = launch(
        str(file), 2, "causal_lm", tmp_path / "run", model_name_or_path=launches.tiny / "llama",
        train_file=launches.tiny / "chats.jsonl", validation_split_percentage=0, per_device_train_batch_size=1,
        max_train_steps=10, num_warmup_steps=2, logging_steps=5, block_size=64, learning_rate=3e-3,
        max_train_samples=8, weight_decay=0.1,
    )  # fmt: skip
    start = run.event("run_start")
    assert start["live"]["zero_stage"] == 3 and start["live"]["optimizer_class"] == "DeepSpeedCPUAdam"
    assert start["sources"]["gradient_accumulation_steps"] == "the Accelerate YAML or launcher"
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert largest_difference(run.norms, one.norms) < TOLERANCE


@pytest.mark.launch
@pytest.mark.full
def test_dropout_draws_the_same_after_a_resume_and_differs_by_step_and_rank(tiny, tmp_path):
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", max_train_samples=4, validation_split_percentage=0,
        max_seq_length=64, lora_r=8, lora_dropout=0.5, learning_rate=5e-3, per_device_train_batch_size=2, max_train_steps=8,
        save_steps=4, logging_steps=1,
    )  # fmt: skip
    whole = launch("ddp", 2, "lora_finetune", tmp_path / "whole", **flags)
    checkpoint = whole.output / "checkpoints" / "step-000004"
    run = launch("ddp", 2, "lora_finetune", tmp_path / "run", resume_from_checkpoint=checkpoint, **flags)
    assert largest_difference(run.losses, whole.losses[4:]) < TOLERANCE
    without = launch("ddp", 2, "lora_finetune", tmp_path / "without", **(flags | {"lora_dropout": 0.0}))
    assert largest_difference(without.losses[1:], whole.losses[1:]) > 1e-3, "the control: dropout does change the losses"
    other = launch("ddp", 2, "lora_finetune", tmp_path / "other", **(flags | {"seed": 7}))
    assert largest_difference(sorted(other.losses), sorted(whole.losses)) > 1e-3
