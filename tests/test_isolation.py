"""Samples that share a row do not see each other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zerobook.data.collate import PackedCollator
from zerobook.data.feed import IGNORE
from zerobook.errors import ConfigError
from zerobook.isolation import isolating, leakage
from zerobook.loss import causal_lm_loss

A, B = list(range(10, 19)), list(range(30, 43))


def packed(*samples):
    labels = [[IGNORE, *s[1:]] for s in samples]
    positions = [np.arange(len(s)) for s in samples]
    return {"input_ids": np.concatenate(samples), "labels": np.concatenate(labels), "position_ids": np.concatenate(positions)}


def load(tiny, name, attention):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / name, attn_implementation=attention, dtype=torch.float32)
    model.config.use_cache = False  # as in training
    return model


def run(model, row, start, flatten=False):
    """(logits, loss, gradients) of the tokens of B, which stands at ``start``."""
    batch = isolating(strategy(model), PackedCollator(0, pad_to_multiple_of=8, flatten=flatten))([row, packed(A)])
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    labels = batch.pop("labels")
    labels[0, :start] = labels[0, start + len(B) :] = labels[1:] = IGNORE
    model.zero_grad()
    logits = model(**batch).logits
    loss = causal_lm_loss(logits, labels)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits[0, start : start + len(B)].detach(), loss.item(), gradients.clone()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_another_neighbour_changes_nothing(tiny, name, attention):
    model = load(tiny, name, attention)
    logits, loss, gradients = run(model, packed(A, B), len(A))
    others = [run(model, packed([50 + i for i in range(len(A))], B), len(A)), run(model, packed(B), 0)]
    for other_logits, other_loss, other_gradients in others:
        assert (logits - other_logits).abs().max() < 1e-5
        assert abs(loss - other_loss) < 1e-5 * loss
        assert (gradients - other_gradients).abs().max() < 1e-5 * gradients.abs().max()
    # the control: one running text of the same tokens does see what stands before
    joined = packed(A, B) | {"position_ids": np.arange(len(A) + len(B))}
    assert (logits - run(model, joined, len(A))[0]).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: flash and flex attention need a GPU")
@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_another_neighbour_changes_nothing_on_a_gpu(tiny, attention):
    """In bf16, so within its rounding; the control differs by far more."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="not run: flash-attn is not installed")
    model = load(tiny, "llama", attention).to("cuda", torch.bfloat16)
    flat = attention == "flash_attention_2"
    logits, loss, gradients = run(model, packed(A, B), len(A), flat)
    for other in (packed([50 + i for i in range(len(A))], B), packed(B)):
        start = len(other["input_ids"]) - len(B)
        other_logits, other_loss, other_gradients = run(model, other, start, flat)
        assert (logits - other_logits).abs().max() < 2e-2 * logits.abs().max()
        assert abs(loss - other_loss) < 1e-2 * loss
        assert (gradients - other_gradients).abs().max() < 2e-2 * gradients.abs().max()
    joined = packed(A, B) | {"position_ids": np.arange(len(A) + len(B))}
    assert (logits - run(model, joined, len(A), flat)[0]).abs().max() > 5e-2 * logits.abs().max()


def strategy(model):
    return SimpleNamespace(
        model=model,
        unwrapped=model,
        device=model.device,
        plan=SimpleNamespace(precision="no"),
        sum_over_ranks=lambda t: t,
        after_forwards=lambda: None,
        world_size=1,
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_is_measured_before_it_is_trained(tiny, attention):
    model = load(tiny, "llama", attention).train()
    collate = PackedCollator(0)
    assert isolating(strategy(model), collate) is collate
    leak, allowed = leakage(strategy(model), collate)
    assert leak < 1e-5 < allowed
    assert model.training, "it is left as it was"
    falcon = load(tiny, "falcon", attention)
    assert leakage(strategy(falcon), collate)[0] > 1e-2, "the control: Falcon does not look at the positions"
    assert isolating(strategy(falcon), collate).mask is (torch.bool if attention == "sdpa" else torch.float32)


def test_what_cannot_isolate_is_refused(tiny):
    class Ones(PackedCollator):
        """As a collator would be that does not know of packs."""

        def masking(self, dtype):
            return self

        def __call__(self, rows):
            batch = super().__call__(rows)
            return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    model = load(tiny, "llama", "sdpa")
    with pytest.raises(ConfigError, match="packing: in LlamaForCausalLM with attn_implementation sdpa"):
        isolating(strategy(model), Ones(0))
    falcon = load(tiny, "falcon", "sdpa")
    falcon.config.sliding_window = 8  # a mask spelt out would do away with it
    with pytest.raises(ConfigError, match="packing: in FalconForCausalLM"):
        isolating(strategy(falcon), PackedCollator(0))


@pytest.mark.parametrize("name, attention", [("bloom", "eager"), ("falcon-rw", "eager"), ("falcon-rw", "sdpa")])
def test_models_whose_positions_come_from_the_mask_are_refused(name, attention):
    """ALiBi takes a sample's positions from a mask of padding, which tells no samples apart."""
    from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig

    config = {
        "bloom": BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64),
        "falcon-rw": FalconConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, alibi=True, multi_query=False,
            new_decoder_architecture=False,
        ),
    }[name]  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    model.config.use_cache = False
    measured, given_up = strategy(model), []
    measured.after_forwards = lambda: given_up.append(model.training)
    with pytest.raises(ConfigError, match=rf"packing: in \w+ with attn_implementation {attention}.* --packing false"):
        isolating(measured, PackedCollator(0))
    assert model.training, "it is left as it was"
    assert given_up == [True, True], "what a failed forward left gathered is given up too"


def test_an_error_that_is_not_of_the_mask_is_not_taken_for_one(tiny):
    model = load(tiny, "llama", "sdpa")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.lm_head.forward = full
    with pytest.raises(torch.OutOfMemoryError):
        isolating(strategy(model), PackedCollator(0))


def test_flattened_rows_keep_their_borders():
    batch = PackedCollator(0, flatten=True)([packed(A, B), packed(B)])
    assert batch["input_ids"].tolist() == [[*A, *B, *B]]
    assert (batch["position_ids"][0] == 0).nonzero().flatten().tolist() == [0, len(A), len(A) + len(B)]
    text = {"input_ids": np.array(A), "labels": np.array(A)}
    assert PackedCollator(0)([text])["position_ids"].tolist() == [list(range(len(A)))]
