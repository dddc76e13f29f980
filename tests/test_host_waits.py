"""Causal rows without an attention mask: the same loss and gradients, and a forward pass that the host need not wait for."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as flash_utils

from tests.versions import needs_transformers
from zerobook.constants import IGNORE
from zerobook.data.collate import CausalCollator, PackedCollator, Seq2SeqCollator, to_device
from zerobook.models.isolation import choose_isolating_collator, choose_packed_collator
from zerobook.objective import causal_lm_loss

WORDS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **WORDS}
ROPE = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GPT = {**WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS = {
    "Llama": ROPE,
    "Mistral": {**ROPE, "sliding_window": 8},
    "Qwen2": ROPE,
    "Qwen3": {**ROPE, "head_dim": 8},
    "Phi3": {**ROPE, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Gemma2": {**ROPE, "head_dim": 8, "sliding_window": 8},  # a window in every other layer
    "Gemma3Text": {**ROPE, "head_dim": 8, "sliding_window": 8},
    "GPT2": {**GPT, "pad_token_id": None},  # as released; with one it reads the ids back, to warn of padding
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTNeoX": {**{k: v for k, v in ROPE.items() if k != "num_key_value_heads"}, **NO_DROPOUT},
    "OPT": {**SIZES, "ffn_dim": 48, "max_position_embeddings": 128, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Bloom": {**WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {**SIZES, **NO_DROPOUT},
    "Falcon, ALiBi": {**SIZES, "alibi": True, "multi_query": False, "new_decoder_architecture": False, **NO_DROPOUT},
    "Mpt": {**WORDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "Mixtral": {**ROPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {**ROPE, **EXPERTS},
    "Qwen3Moe": {**ROPE, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 16},
    "Mamba": {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Mamba2": {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8,
               "n_groups": 1},
    "RecurrentGemma": {**SIZES, "intermediate_size": 48, "num_key_value_heads": 1, "num_hidden_layers": 3, "lru_width": 32,
                       "attention_window_size": 8},
}  # fmt: skip
SIDES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
         "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}  # fmt: skip
NEEDS_NO_LAYER_DROP = needs_transformers(
    "5.23", "compares a random number in each layer of OPT and BART, also where it skips none"
)
NEEDS_NEWER = {
    "OPT": NEEDS_NO_LAYER_DROP,
    "RecurrentGemma": needs_transformers("5.18", "looks for packs in the positions of RecurrentGemma"),
}
"""Models that the host waits for in older versions of transformers."""
WAITS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "cpu", "nonzero")


def made(name, attention=None, **changes):
    config = getattr(transformers, f"{name.split(',')[0]}Config")(**(MODELS[name] | changes))
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except ValueError as error:
        pytest.skip(f"not run: {error}"[:100])
    model.config.use_cache = False  # as in training
    return model.train()


def strategy(model):
    return SimpleNamespace(
        model=model, unwrapped=model, device=torch.device("cpu"), plan=SimpleNamespace(precision="no"), world_size=1,
        sum_over_ranks=lambda t: t, release_gathered_parameters=lambda: None,
    )  # fmt: skip


def rows(*lengths):
    found = []
    for number, length in enumerate(lengths):
        ids = np.random.default_rng(number).integers(3, 128, length)
        found.append({"input_ids": ids, "labels": np.r_[[IGNORE] * 2, ids[2:]]})
    return found


def packed(*lengths):
    samples = rows(*lengths)
    joined = {key: np.concatenate([sample[key] for sample in samples]) for key in samples[0]}
    return joined | {"position_ids": np.concatenate([np.arange(n) for n in lengths])}


@contextmanager
def never_waiting():
    """Raise an error for every call that would make the host wait for a device."""

    def refused(name):
        def raising(*_, **__):
            raise AssertionError(f"the host waits for Tensor.{name}")

        return raising

    with pytest.MonkeyPatch.context() as patch:
        for name in WAITS:
            patch.setattr(torch.Tensor, name, refused(name))
        yield


def run(model, batch):
    """(loss, gradients), by a forward pass that must not wait."""
    batch = to_device(batch, torch.device("cpu"))
    labels = batch.pop("labels")
    model.zero_grad()
    with never_waiting():
        logits = model(**batch).logits
    loss = causal_lm_loss(logits, labels)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def masked(model, texts):
    """The same by transformers' own masks."""
    batch = CausalCollator(0, 8)(texts)
    labels = batch.pop("labels")
    model.zero_grad()
    loss = causal_lm_loss(model(**batch).logits, labels)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same(found, expected):
    loss, gradients = expected
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert (found[1] - gradients).abs().max() <= 2e-6 * gradients.abs().max()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_NEWER.get(name, ())) for name in MODELS])
def test_padding_needs_no_mask_behind_causal_attention(name, attention):
    model, texts = made(name, attention), rows(20, 13, 5)
    collate = choose_isolating_collator(strategy(model), CausalCollator(0, 8))
    assert model.training, "it is left as it was"
    batch = collate(texts)
    assert "attention_mask" not in batch
    same(run(model, batch), masked(model, texts))


def test_a_model_that_sees_the_padding_keeps_its_mask():
    config = transformers.BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=128)
    model = transformers.AutoModelForCausalLM.from_config(config)  # not made a decoder: it looks both ways
    collate = CausalCollator(0, 8)
    assert choose_isolating_collator(strategy(model), collate) == collate


def test_a_model_that_takes_no_cache_needs_no_mask_either():
    model = made("Llama", "sdpa")
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None: forward(input_ids=input_ids, attention_mask=attention_mask)
    batch = choose_isolating_collator(strategy(model), CausalCollator(0, 8))(rows(20, 5))
    assert set(batch) == {"input_ids", "labels"}


def test_a_model_that_cannot_be_asked_keeps_its_mask():
    """One of a recipe's own may be no model of transformers, and take its arguments by other names."""
    collate = CausalCollator(0, 8)
    assert choose_isolating_collator(strategy(torch.nn.Linear(2, 2)), collate) == collate


def test_other_collators_stay_as_they_are():
    for collate in (Seq2SeqCollator(0, lambda labels: labels), list):
        assert choose_isolating_collator(strategy(made("Llama")), collate) == collate


def test_recomputed_activations_bring_no_warning(caplog):
    model, texts = made("Llama", "sdpa"), rows(20, 13, 5)
    expected = masked(model, texts)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = choose_isolating_collator(strategy(model), CausalCollator(0, 8))(texts)
    assert "attention_mask" not in batch
    labels = batch.pop("labels")
    model.zero_grad()
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        loss = causal_lm_loss(model(**batch).logits, labels)
    assert not caplog.records
    loss.backward()
    same((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])), expected)


@pytest.mark.parametrize(
    "name, waits, sizes",
    [
        pytest.param("Bart", 3, SIDES, marks=NEEDS_NO_LAYER_DROP),
        pytest.param("Blenderbot", 3, SIDES, marks=NEEDS_NO_LAYER_DROP),
        ("T5", 2, {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2}),
    ],
)
def test_encoder_decoders_wait_as_often_as_is_said(name, waits, sizes, monkeypatch):
    """In zerobook/training/trainer.py and docs/guides/data.md: transformers looks whether the mask masks anything."""
    config = getattr(transformers, f"{name}Config")(**WORDS, decoder_start_token_id=2, **sizes)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa").train()
    model.config.use_cache = False
    batch = Seq2SeqCollator(0, lambda labels: labels.clamp(min=0))(rows(20, 13, 5))
    del batch["labels"]
    seen = []
    for wait in WAITS:
        method = getattr(torch.Tensor, wait)
        counted = lambda *given, wait=wait, method=method, **named: (seen.append(wait), method(*given, **named))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, wait, counted)
    model(**batch)
    monkeypatch.undo()
    assert seen == ["__bool__"] * waits


@pytest.fixture
def flash(monkeypatch):
    """flash-attn's two functions in plain torch, behind transformers' own integration; records their calls."""
    calls = []

    def attend(q, k, v, sample, scale, window, causal):
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
        place = torch.arange(len(q))
        seen = (sample[:, None] == sample) & (place[:, None] >= place if causal else True)
        if window[0] >= 0:
            seen = seen & (place[:, None] - place <= window[0])
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.size(-1) ** -0.5)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    ):  # fmt: skip
        calls.append((cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
        sample = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)
        return attend(q, k, v, sample, softmax_scale, window_size, causal)

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False,
    ):  # fmt: skip
        calls.append("one length")
        sample = torch.zeros(q.size(1))
        return torch.stack([attend(*row, sample, softmax_scale, window_size, causal) for row in zip(q, k, v, strict=True)])

    pads = (flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: (flash_attn_func, flash_attn_varlen_func, None, *pads))
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    yield calls
    flash_utils._loaded_implementation = None


OPT = pytest.param("OPT", marks=NEEDS_NO_LAYER_DROP)
FLASH = ["Llama", "Mistral", "Qwen3", OPT, "GPTNeoX", "Phi3", "Mixtral"]


@pytest.mark.parametrize("name", FLASH)
def test_packed_rows_bring_their_lengths_to_flash_attention(name, flash):
    model, row = made(name, "sdpa"), packed(9, 13, 4)
    # the other way: by a mask, transformers' own from the positions or, for OPT, one spelt out
    plain = to_device(choose_packed_collator(strategy(model), PackedCollator(0))([row]), torch.device("cpu"))
    labels = plain.pop("labels")
    model.zero_grad()
    loss = causal_lm_loss(model(**plain).logits, labels)
    loss.backward()
    expected = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    model.config._attn_implementation = "flash_attention_2"
    collate = choose_packed_collator(strategy(model), PackedCollator(0, 8, flatten=True))
    flash.clear()
    same(run(model, collate([row])), expected)
    assert len(flash) == 2, "once a layer"
    for begins_q, begins_k, longest_q, longest_k in flash:
        assert begins_q.tolist() == begins_k.tolist() == [0, 9, 22, 26, 32], "padding is a sample of its own"
        assert begins_q.dtype == torch.int32
        assert (type(longest_q), longest_q, longest_k) == (int, 13, 13)


@pytest.mark.parametrize("lengths", [(20,), (20, 13, 5)])
@pytest.mark.parametrize("name", FLASH)
def test_padded_rows_bring_their_lengths_to_flash_attention(name, lengths, flash):
    """transformers looks for packs in every layer where there is one row."""
    model, texts = made(name, "sdpa"), rows(*lengths)
    expected = masked(model, texts)
    model.config._attn_implementation = "flash_attention_2"
    collate = choose_isolating_collator(strategy(model), CausalCollator(0, 8))
    flash.clear()
    same(run(model, collate(texts)), expected)
    assert [call[0].tolist() for call in flash] == [[24 * n for n in range(len(texts) + 1)]] * 2


def test_a_model_that_drops_the_lengths_still_gets_positions(flash):
    """Borders that do not arrive would be a leak."""
    model = made("Llama", "sdpa")
    model.config._attn_implementation = "flash_attention_2"
    forward = model.forward

    def without(input_ids, position_ids=None, past_key_values=None, **_):
        return forward(input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values)

    model.forward = without
    collate = choose_packed_collator(strategy(model), PackedCollator(0, flatten=True))
    flash.clear()
    model(**{key: value for key, value in collate([packed(9, 13)]).items() if key != "labels"})
    assert [call[0].tolist() for call in flash] == [[0, 9, 22]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: there is no GPU here")
@pytest.mark.parametrize("attention, pack", [("sdpa", False), ("flash_attention_2", False), ("flash_attention_2", True)])
def test_a_forward_pass_never_waits_for_a_gpu(attention, pack):
    """By CUDA's own word, which knows of more than the methods of a tensor."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="not run: flash-attn is not installed")
    config = transformers.LlamaConfig(**ROPE | {"hidden_size": 128})  # flash attention takes heads of 32 and more
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    model.config.use_cache = False
    device = torch.device("cuda")
    measured = strategy(model.to(device).train())
    measured.device = device
    collate = choose_isolating_collator(measured, PackedCollator(0, 8, flatten=True) if pack else CausalCollator(0, 8))
    batch = to_device(collate([packed(9, 13, 4)] if pack else rows(20, 13, 5)), device)
    labels = batch.pop("labels")
    causal_lm_loss(model(**batch).logits, labels).backward()  # what the first pass alone sets up may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = model(**batch).logits
        with pytest.raises(RuntimeError, match="synchroniz"):
            logits.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
