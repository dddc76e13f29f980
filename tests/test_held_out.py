"""The held-out loss: the memory of its forward passes is bounded, and its value does not depend on the bound."""

from __future__ import annotations

import pytest
import torch

import recipes.seq2seq_chatbot
import zerobook.loss
from tests.alone import train
from zerobook.evaluation import held_out
from zerobook.loss import Objective

RECIPES = {
    "chats": (None, "CAUSAL", "llama", {"block_size": 64}),
    "packed": (None, "CAUSAL", "llama", {"block_size": 64, "packing": True}),
    "pairs": (recipes.seq2seq_chatbot, "SEQ2SEQ", "bart", {"max_source_length": 64, "max_target_length": 32}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_takes_fewer_rows_where_their_logits_would_be_too_many(tiny, tmp_path, monkeypatch, capsys, name):
    recipe, objective, model, flags = RECIPES[name]
    own = getattr(zerobook.loss, objective)
    seen: list[torch.Size] = []

    def loss(logits, labels):
        if not torch.is_grad_enabled():
            seen.append(logits.shape)
        return own.loss(logits, labels)

    monkeypatch.setattr(zerobook.loss, objective, Objective(loss, own.shifted))
    common = dict(
        model_name_or_path=tiny / model, train_file=tiny / "few.jsonl", validation_file=tiny / "chats.jsonl", max_train_steps=1,
        max_eval_samples=12, per_device_train_batch_size=2, per_device_eval_batch_size=6, num_warmup_steps=0, **flags,
    )  # fmt: skip
    whole = train(tmp_path / "whole", recipe, **common)
    assert max(shape[0] for shape in seen) > 2 and "per_device_eval_batch_size" not in capsys.readouterr().out
    most = max(shape.numel() for shape in seen)
    seen.clear()
    monkeypatch.setattr(held_out, "LOGITS", most // 2)
    bounded = train(tmp_path / "bounded", recipe, **common)
    assert max(shape.numel() for shape in seen) <= most // 2
    assert "per_device_eval_batch_size" in capsys.readouterr().out
    assert bounded.event("eval")["loss"] == pytest.approx(whole.event("eval")["loss"], rel=1e-6)
    assert bounded.event("eval")["tokens"] == whole.event("eval")["tokens"]
