"""Adapters on a frozen base: the dtypes of both, what the planner counts of them, and that the loss stays."""

from __future__ import annotations

import pytest

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig, LoraFinetune
from tests.alone import train
from tests.harness import ROOT
from zerobook.config import ConfigSources, parse
from zerobook.launch.resolve import Hardware, resolve
from zerobook.plan.hardware import cluster
from zerobook.plan.job import job
from zerobook.plan.rows import launch_plan
from zerobook.plan.sharding import spread
from zerobook.plan.state_bytes import hold

SINGLE = ROOT / "accelerate_configs" / "single.yaml"


def resolved(kind=LoraConfig, environ=None, **given):
    line = ["--model_name_or_path", "x", "--dataset_name", "embedded:chatterbot"]
    for key, value in given.items():
        line += [f"--{key}", *([] if value is True else [value])]
    config, sources, _ = parse(kind, line)
    plan, config, sources = resolve(environ or {}, Hardware(gpus=1, gpu_name="A100"), config, sources)
    assert not plan.problems
    return config, sources, plan


@pytest.mark.parametrize(
    "kind, environ, given, dtype",
    [
        (LoraConfig, {}, {"mixed_precision": "bf16"}, "bfloat16"),
        (LoraConfig, {}, {"mixed_precision": "fp16"}, "float16"),
        (LoraConfig, {"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "bfloat16"),
        (LoraConfig, {}, {"mixed_precision": "no"}, "float32"),
        (LoraConfig, {}, {"mixed_precision": "bf16", "dtype": "float32"}, "float32"),
        (LoraConfig, {}, {"mixed_precision": "bf16", "load_in_4bit": True}, "bfloat16"),
        (CausalLMConfig, {}, {"mixed_precision": "bf16"}, "float32"),
    ],
)
def test_a_frozen_base_is_loaded_in_the_precision_of_the_run(kind, environ, given, dtype):
    config, sources, plan = resolved(kind, environ, **given)
    assert config.dtype == dtype
    assert any(dtype in note for note in plan.notes) is (dtype != "float32"), "it is said at the start"
    assert sources.given("dtype") is (dtype != "float32" or "dtype" in given)


@pytest.fixture(scope="module")
def flags(tiny):
    return dict(
        model_name_or_path=str(tiny / "llama"), train_file=str(tiny / "chats.jsonl"), max_seq_length=64, lora_r=8,
        max_train_steps=6, per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=5e-3, logging_steps=1,
        mixed_precision="bf16",
    )  # fmt: skip


def test_a_half_precision_base_trains_like_an_fp32_one_and_is_planned(flags, tmp_path):
    """Losses within bf16's rounding; adapters are fp32 masters; the weights held are to the byte those that were planned."""
    runs = {dtype: train(tmp_path / str(dtype), LoraFinetune, **flags, **given)
            for dtype, given in ((None, {}), ("float32", {"dtype": "float32"}))}  # fmt: skip
    half, full = runs[None], runs["float32"]
    assert half.losses == pytest.approx(full.losses, rel=0.02) and half.losses != full.losses
    assert half.losses[-1] < half.losses[0]
    assert half.event("run_start")["live"]["master_dtype"] == "float32"
    for dtype, run in runs.items():
        config = LoraConfig(**flags | ({"dtype": dtype} if dtype else {}))
        planned = job(LoraFinetune(config))
        weights, groups = planned.weights()
        sources = ConfigSources(dict.fromkeys(LoraConfig.model_fields, "default"))
        where = cluster(gpus="1", gpu="a100-80gb")
        spreads = spread(launch_plan(SINGLE, where, config, sources), planned.model_config)
        held = hold(weights, groups, spreads).states
        assert run.event("memory")["per_rank_bytes"] == [held]
        frozen = {w.element for w in weights if not w.trained}
        assert frozen == ({4} if dtype else {2}) and {w.element for w in weights if w.trained} == {4}


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy", ["fsdp", "zero3", *(pytest.param(name, marks=pytest.mark.full) for name in ("ddp", "zero2"))]
)
def test_a_half_precision_base_is_spread(launches, strategy):
    """FSDP2 shards bf16 weights beside fp32 adapters; DeepSpeed casts all of them."""
    one = launches("single", 1, 4, 1, "lora_finetune", mixed_precision="bf16")
    run = launches(strategy, 2, 2, 1, "lora_finetune", mixed_precision="bf16")
    assert run.event("run_start")["config"]["dtype"] == "bfloat16"
    assert run.event("run_start")["live"]["master_dtype"] == "float32"
    assert run.losses == pytest.approx(one.losses, rel=0.03)
    assert run.losses[-1] < 0.75 * run.losses[0]
    if strategy == "zero3":  # its first step, which is recorded, keeps more: it is only learning the order of modules
        return
    config = LoraConfig(**run.event("run_start")["config"])
    planned, where = job(LoraFinetune(config)), cluster(gpus="2", gpu="a100-80gb")
    sources = ConfigSources(dict.fromkeys(LoraConfig.model_fields, "default"))
    spreads = spread(launch_plan(SINGLE.with_stem(strategy), where, config, sources), planned.model_config)
    held = [hold(*planned.weights(), spreads, rank).states for rank in range(2)]
    assert run.event("memory")["per_rank_bytes"] == held
