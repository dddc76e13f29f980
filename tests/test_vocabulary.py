"""New tokens and whole modules: the tokenizer, the initial rows, what is refused and what the planner counts."""

from __future__ import annotations

import pytest
import torch

from recipes.lora_finetune import LoraConfig, LoraFinetune
from tests.alone import train
from tests.test_adapters import resolved
from zerobook.config_sources import parse
from zerobook.errors import ConfigError
from zerobook.launch.resolve import Hardware, resolve
from zerobook.models.adapters import add_adapter
from zerobook.models.quantise import nf4
from zerobook.models.vocabulary import add_tokens, fit_embeddings
from zerobook.plan.job import make_job


@pytest.fixture
def llama(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny / "llama"), AutoTokenizer.from_pretrained(tiny / "llama")


def test_new_rows_start_at_the_mean_and_the_others_stay(llama):
    model, tokenizer = llama
    before = model.get_input_embeddings().weight.detach().clone()
    add_tokens(tokenizer, ["<tool>", "<tool>", "<|im_end|>", "</tool>"])
    assert tokenizer.new_token_ids == [len(before), len(before) + 1], "one that it has, and one that is given twice"
    assert fit_embeddings(model, tokenizer)
    after = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is after and model.config.vocab_size == len(after) == len(tokenizer)
    torch.testing.assert_close(after[: len(before)], before, rtol=0, atol=0)
    torch.testing.assert_close(after[len(before) :], before.mean(0).expand(2, -1))


@torch.no_grad()
def test_a_bias_of_the_output_starts_at_the_mean_too(llama):
    from transformers import PhiConfig, PhiForCausalLM

    _, tokenizer = llama
    rows = len(tokenizer)
    model = PhiForCausalLM(
        PhiConfig(vocab_size=rows, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    model.lm_head.bias.copy_(torch.arange(rows) / rows - 6)
    add_tokens(tokenizer, ["<tool>"])

    fit_embeddings(model, tokenizer)

    assert model.lm_head.bias[rows].item() == pytest.approx(model.lm_head.bias[:rows].mean().item())


def test_without_new_tokens_nothing_changes(llama):
    model, tokenizer = llama
    add_tokens(tokenizer, ["<|im_end|>"])
    assert fit_embeddings(model, tokenizer) is None


def test_a_token_that_the_template_writes_is_special(llama):
    _, tokenizer = llama
    tokenizer.chat_template = "{{ '<|turn|>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    add_tokens(tokenizer, ["<|turn|>", "<tool>"])
    ids = tokenizer("<|turn|><tool>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_embeddings_that_an_encoder_and_a_decoder_share_are_refused(tiny, kind):
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny / kind)
    with pytest.raises(ConfigError, match="new_tokens"):
        add_adapter(model, "lora", rank=2, alpha=2, dropout=0.0, targets=["all-linear"], seed=0, trains_embeddings=True)


@pytest.mark.parametrize("name, words", [("nowhere", "no module nowhere.*lm_head"), ("k_proj", "quantised")])
def test_modules_that_cannot_be_trained_are_refused(llama, name, words):
    model, _ = llama
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=words):
        add_adapter(model, "lora", rank=2, alpha=2, dropout=0.0, targets=["q_proj"], seed=0, modules_to_save=[name])


def test_modules_of_4_bits_in_a_float_dtype_cannot_be_trained(tiny):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=nf4("bf16"), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="quantised"):
        add_adapter(model, "lora", rank=2, alpha=2, dropout=0.0, targets=["q_proj"], seed=0, modules_to_save=["k_proj"])


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_tied_embeddings_are_trained_once_under_either_name(llama, name):
    model, _ = llama
    made = add_adapter(model, "lora", rank=2, alpha=2, dropout=0.0, targets=["q_proj"], seed=0, modules_to_save=[name])
    whole = [weight for key, weight in made.named_parameters() if weight.requires_grad and "lora" not in key]
    assert len(whole) == 1
    assert made.get_output_embeddings().modules_to_save["default"].weight is whole[0]


@pytest.mark.parametrize("key", ["modules_to_save", "new_tokens"])
def test_ia3_trains_no_whole_modules(key):
    assert any(key in line for line in LoraConfig(model_name_or_path="x", adapter="ia3", **{key: ["a"]}).problems())


@pytest.mark.parametrize("given", [{}, {"mixed_precision": "bf16"}])
def test_whole_modules_train_beside_a_base_in_any_precision(tiny, tmp_path, given):
    given |= dict(
        model_name_or_path=str(tiny / "llama"), train_file=str(tiny / "chats.jsonl"), max_seq_length=64, max_train_steps=6,
        per_device_train_batch_size=4, learning_rate=5e-3, logging_steps=1,
    )  # fmt: skip
    run = train(tmp_path, LoraFinetune, modules_to_save="embed_tokens", **given)
    assert run.losses[-1] < run.losses[0]
    assert run.event("run_start")["live"]["master_dtype"] == "float32"


def test_whole_modules_beside_a_half_precision_base_need_mixed_precision():
    config, sources, _ = parse(
        LoraConfig, ["--model_name_or_path", "x", "--dataset_name", "y", "--new_tokens", "<tool>", "--dtype", "bfloat16"]
    )
    plan, _, _ = resolve({}, Hardware(), config, sources)
    assert [problem for problem in plan.problems if problem.startswith("new_tokens") and "--mixed_precision bf16" in problem]


def test_the_planner_counts_new_tokens_and_whole_modules(tiny):
    def trained(**given):
        config, _, _ = resolved(model_name_or_path=str(tiny / "llama"), **given)
        weights = make_job(LoraFinetune(config)).weights().weights
        return sum(weight.numel for weight in weights if weight.trained)

    hidden, plain = 64, trained()
    rows = (trained(modules_to_save="embed_tokens") - plain) // hidden
    assert rows == 512
    assert trained(new_tokens="<tool>") - plain == (rows + 1) * hidden
