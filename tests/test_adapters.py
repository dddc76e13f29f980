"""Adapters on a frozen base: the dtypes of both, what the planner counts of them, and what is saved."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import get_args

import pytest
import torch

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig, LoraFinetune
from recipes.seq2seq_chatbot import Seq2SeqChatbot, Seq2SeqConfig
from tests.alone import train
from tests.harness import ROOT, sampled
from zerobook.config_sources import ConfigSources, parse
from zerobook.errors import ConfigError
from zerobook.launch.resolve import Hardware, resolve
from zerobook.models.adapters import Method, add_adapter, continue_adapter, merge_adapter, save_adapter
from zerobook.plan.hardware import cluster
from zerobook.plan.job import make_job
from zerobook.plan.rows import resolve_launch_plan
from zerobook.plan.sharding import sharding_spec
from zerobook.plan.state_bytes import count_states
from zerobook.strategy.weights import persistent_buffers

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
    assert sources.is_set("dtype") is (dtype != "float32" or "dtype" in given)


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
        planned = make_job(LoraFinetune(config))
        model = planned.weights()
        sources = ConfigSources(dict.fromkeys(LoraConfig.model_fields, "default"))
        where = cluster(gpus="1", gpu="a100-80gb")
        spreads = sharding_spec(resolve_launch_plan(SINGLE, where, config, sources), planned.model_config)
        held = asdict(count_states(model, spreads).live)
        assert run.event("memory")["per_rank_bytes"] == [held]
        frozen = {weight.element_bytes for weight in model.weights if not weight.trained}
        assert frozen == ({4} if dtype else {2}) and {weight.element_bytes for weight in model.trained} == {4}


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["fsdp", "zero3", "ddp", "zero2"], "fsdp", "zero3"))
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
    planned, where = make_job(LoraFinetune(config)), cluster(gpus="2", gpu="a100-80gb")
    sources = ConfigSources(dict.fromkeys(LoraConfig.model_fields, "default"))
    spreads = sharding_spec(resolve_launch_plan(SINGLE.with_stem(strategy), where, config, sources), planned.model_config)
    held = [asdict(count_states(planned.weights(), spreads, rank).live) for rank in range(2)]
    assert run.event("memory")["per_rank_bytes"] == held


LLAMA2_7B = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32, vocab_size=32000, max_position_embeddings=4096,
)  # fmt: skip
TRAINED = {"lora": 39_976_960, "rslora": 39_976_960, "dora": 41_336_832, "pissa": 39_976_960, "ia3": 614_400}
"""Trained parameters of Llama-2-7B: rank 16 on all linear layers. The formula of LoRA is r (in + out) for each of them."""


@pytest.mark.parametrize("method", get_args(Method))
def test_the_planner_counts_what_an_adapter_trains(tmp_path, method):
    (tmp_path / "llama2_7b.json").write_text(json.dumps(LLAMA2_7B))
    config = LoraConfig(model_name_or_path=str(tmp_path / "llama2_7b.json"), train_file="x", adapter=method)
    model = make_job(LoraFinetune(config)).weights()
    weights, groups = model.weights, model.groups
    trained = sum(weight.numel for group in groups for weight in group)
    assert trained == sum(weight.numel for weight in weights if weight.trained) == TRAINED[method]
    row = f"| `{method}` | {trained:,} | {trained / 6_738_415_616:.3%} |"
    assert row in (ROOT / "docs" / "guides" / "recipes.md").read_text()


def test_adapters_of_an_encoder_decoder_are_planned(tiny):
    facts = dict(model_name_or_path=str(tiny / "t5"), train_file="x")
    whole, adapted = Seq2SeqConfig(**facts), Seq2SeqConfig(**facts, adapter="lora", lora_r=4)
    assert (whole.trains_adapters, whole.result) == (False, "model")
    assert (adapted.trains_adapters, adapted.result) == (True, "adapter")
    assert all(weight.trained for weight in make_job(Seq2SeqChatbot(whole)).weights().weights)
    trained = [weight.name for weight in make_job(Seq2SeqChatbot(adapted)).weights().weights if weight.trained]
    assert trained and all(".lora_" in name for name in trained)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"adapter": "vera"}, "adapter: .*vera is not available: .*peft [0-9.]+"),
        ({"adapter": "olora"}, "adapter: .*changes the base weights"),
        ({"adapter": "ia3", "lora_r": "8"}, "lora_r: .*adapter=ia3 does not read"),
        ({"adapter": "pissa", "load_in_4bit": True}, "adapter: pissa .*load_in_4bit"),
        ({"adapter_path": "nowhere"}, "adapter_path: there is no nowhere/adapter_config.json"),
        ({"adapter_path": "nowhere", "lora_alpha": "8"}, "lora_alpha: .*adapter_path=nowhere"),
    ],
)
def test_what_cannot_be_is_an_error(given, words):
    with pytest.raises(ConfigError, match=words):
        resolved(**given)


def test_a_setting_of_adapters_without_adapters_is_an_error():
    with pytest.raises(ConfigError, match=r"lora_r: .*adapter=None does not read"):
        resolved(Seq2SeqConfig, lora_r="8")


IDS = torch.arange(3, 27)[None]


def test_experts_have_adapters_by_the_names_that_they_had_before_they_were_stacked(tiny):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "mixtral")
    adapted = add_adapter(model, "lora", rank=2, alpha=4, dropout=0.0, targets=["q_proj", "w1", "w2", "w3"], seed=0)

    assert any("experts" in name and ".lora_A" in name for name, _ in adapted.named_parameters())


@pytest.mark.parametrize("method", get_args(Method))
@torch.no_grad()
def test_a_saved_adapter_fits_the_base_as_it_was_loaded(tiny, tmp_path, method):
    """It begins where the base is, and computes the same when it is loaded, continued or merged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def base():
        return AutoModelForCausalLM.from_pretrained(tiny / "llama")

    before = base()(IDS).logits
    model = add_adapter(base(), method, rank=4, alpha=12, dropout=0.0, targets=["all-linear"], seed=0)
    close = dict(rtol=0, atol=2e-5)
    torch.testing.assert_close(model(IDS).logits, before, **close)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    after = model(IDS).logits
    assert (after - before).abs().max() > 0.5
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(model, tmp_path / "adapter", trained | dict(persistent_buffers(model)))
    torch.testing.assert_close(PeftModel.from_pretrained(base(), tmp_path / "adapter")(IDS).logits, after, **close)
    torch.testing.assert_close(continue_adapter(base(), tmp_path / "adapter")(IDS).logits, after, **close)
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, after, **close)


@torch.no_grad()
def test_ranks_that_hold_zeros_decompose_no_weights(tiny, monkeypatch):
    """Under FSDP2, ranks other than 0 hold zeros, and get the adapters of rank 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    for parameter in model.parameters():
        parameter.zero_()
    decompose = torch.svd_lowrank
    decomposed = []
    monkeypatch.setattr(torch, "svd_lowrank", lambda *args, **more: decomposed.append(1) or decompose(*args, **more))

    adapted = add_adapter(model, "pissa", rank=4, alpha=12, dropout=0.0, targets=["all-linear"], seed=0)

    shapes = {tuple(p.shape) for name, p in adapted.named_parameters() if "lora_A" in name}
    assert decomposed == [] and (4, model.config.hidden_size) in shapes


def test_an_adapter_of_another_model_is_refused(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    wide = add_adapter(
        AutoModelForCausalLM.from_pretrained(tiny / "wide"),
        "lora",
        rank=4,
        alpha=8,
        dropout=0.0,
        targets=["all-linear"],
        seed=0,
    )
    save_adapter(wide, tmp_path / "adapter", dict(wide.named_parameters()))
    with pytest.raises(ConfigError, match="adapter_path: "):
        continue_adapter(AutoModelForCausalLM.from_pretrained(tiny / "llama"), tmp_path / "adapter")


def test_an_adapter_with_new_rows_that_are_not_trained_is_refused(tiny, tmp_path):
    """peft saves the embeddings of a resized base beside the adapter."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    model.resize_token_embeddings(520)
    get_peft_model(model, PeftLoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")

    with pytest.raises(ConfigError, match="more rows"):
        continue_adapter(AutoModelForCausalLM.from_pretrained(tiny / "llama"), tmp_path / "adapter")


def test_targets_can_be_a_regular_expression(tiny):
    from transformers import AutoModelForCausalLM

    def names(targets):
        model = AutoModelForCausalLM.from_pretrained(tiny / "llama")
        made = add_adapter(model, "lora", rank=2, alpha=4, dropout=0.0, targets=targets, seed=0)
        found = {name.partition(".lora_A")[0] for name, _ in made.named_parameters() if ".lora_A" in name}
        return {name.removeprefix("base_model.model.") for name in found}

    assert names([r"model\.layers\.0\..*\.(q|v)_proj"]) == {f"model.layers.0.self_attn.{which}_proj" for which in "qv"}
    assert all(name.endswith("q_proj") for name in names(["q_proj"])) and len(names(["q_proj"])) > 1
    # Of several names, each has to be one of the model's.
    for wrong in ("all-linear", "v_porj", ".*v_proj"):
        with pytest.raises(ConfigError, match=r"lora_target_modules: .* is called"):
            names(["q_proj", wrong])
    with pytest.raises(ConfigError, match=r"lora_target_modules: .* Its linear layers: .*q_proj"):
        names([r".*\.not_there$"])


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_merged_adapter_of_tied_embeddings_changes_its_own_layer_alone(tiny, tmp_path, targets):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    assert base.config.tie_word_embeddings
    model = add_adapter(base, "lora", rank=4, alpha=12, dropout=0.0, targets=targets, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        expected = model(IDS).logits

        merge_adapter(model).save_pretrained(tmp_path / "merged")

        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=0, atol=2e-5)


def test_embeddings_can_have_adapters(flags, tmp_path):
    run = train(tmp_path / "run", LoraFinetune, **flags | {"mixed_precision": "no"}, lora_target_modules="embed_tokens")
    assert run.losses[-1] < run.losses[0]
