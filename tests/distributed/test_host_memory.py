"""Host RAM of all ranks while a model is loaded and sharded, against what is planned."""

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.test_parity import record
from tests.harness import launch
from zerobook.plan.memory import host_bytes_at_load
from zerobook.plan.sharding import ShardingSpec

pytestmark = [pytest.mark.launch, pytest.mark.full]

RANKS = 4


@pytest.fixture(scope="module")
def large(tiny, tmp_path_factory):
    """Make a Llama of 0.86 GB in fp32, in a bf16 file as most models are published. Return its folder and its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(tiny / "llama", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    model.tie_weights()
    model.save_pretrained(folder)
    sizes = [4 * weight.numel() for weight in model.parameters()]
    del model
    yield folder, sizes
    shutil.rmtree(folder)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_ranks_together_hold_while_loading_what_is_planned(strategy, large, tiny, tmp_path):
    """W is the weights in fp32, which they are trained in. ZeRO-3 shards while loading. Under FSDP2, rank 0 alone loads.

    On a CPU, ZeRO-3's prepare also makes its masters and gradients, which are there afterwards too.
    """
    folder, sizes = large
    report = tmp_path / "host_memory.json"
    launch(
        strategy, RANKS, "causal_lm", tmp_path / "run", through=Path(__file__).with_name("host_memory.py"),
        environment={"ZEROBOOK_HOST_MEMORY": report}, model_name_or_path=folder, tokenizer_name=tiny / "llama",
        train_file=tiny / "text.txt", block_size=32, max_train_steps=1, validation_split_percentage=0,
    )  # fmt: skip
    found, whole = json.loads(report.read_text()), sum(sizes)
    load, prepare, after = found["load"]["peak"], found["prepare"]["peak"], found["prepare"]["after"]
    kind = "fsdp" if strategy == "fsdp" else "deepspeed"
    spread = ShardingSpec(kind=kind, name=strategy, ranks=RANKS, ranks_per_node=RANKS, stage=3, rank_0_loads=kind == "fsdp")
    planned = host_bytes_at_load(whole, max(sizes), spread, RANKS)
    record("host", strategy=strategy, weights=whole, load=load, prepare=prepare, after=after, planned=planned)
    assert planned == pytest.approx(load, rel=0.1)
    assert load < 1.5 * whole
    assert prepare < after + 0.4 * whole
    assert strategy == "zero3" or after < 1.5 * whole
