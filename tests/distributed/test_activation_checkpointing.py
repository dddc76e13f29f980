"""Recomputed activations change nothing under any strategy: the same losses and norms as without, on real ranks."""

from __future__ import annotations

from itertools import product

import pytest

from tests.distributed.test_parity import largest_difference
from tests.harness import sampled

CLOSE = 1e-6
"""Relative, on every step's loss and gradient norm, against the same strategy without checkpointing."""
CASES = [
    ("ddp", "causal_lm", "full"),
    ("ddp", "lora_finetune", "offload"),
    ("ddp", "experts", "selective"),
    *product(("zero3", "fsdp"), ("causal_lm", "lora_finetune"), ("full", "every:2", "selective", "offload")),
    *product(("zero3", "fsdp"), ("experts",), ("full", "selective")),
]
"""Under DDP each rank recomputes as one process does (tests/test_recompute.py)."""
SAMPLE = [("zero3", "causal_lm", "selective"), ("fsdp", "lora_finetune", "every:2")]


@pytest.fixture(scope="module")
def experts(tiny, tmp_path_factory):
    """A Mixtral, whose tokens are routed again where a layer is computed again."""
    import torch
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.02, vocab_size=len(tokenizer),
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.launch
@pytest.mark.parametrize("strategy, recipe, mode", sampled(CASES, *SAMPLE))
def test_recomputing_changes_nothing(launches, experts, strategy, recipe, mode):
    flags = {"recipe": recipe, "model": "llama"}
    if recipe == "experts":
        flags = {"recipe": "causal_lm", "model": experts, "router_aux_loss_coef": 0.02, "max_train_steps": 5}
    plain = launches(strategy, 2, 2, 1, **flags)
    run = launches(strategy, 2, 2, 1, activation_checkpointing=mode, **flags)
    assert run.event("run_start")["config"]["activation_checkpointing"] == mode
    assert largest_difference(run.losses, plain.losses) < CLOSE
    assert largest_difference(run.norms, plain.norms) < CLOSE
    assert run.losses[-1] < run.losses[0]
