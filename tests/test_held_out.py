"""The held-out loss: the memory of its forward passes is bounded, and its value does not depend on the bound."""

from __future__ import annotations

import math

import pytest
import torch

from recipes.causal_lm import CausalLM
from recipes.seq2seq_chatbot import Seq2SeqChatbot
from tests.alone import train
from zerobook.errors import ConfigError
from zerobook.evaluation import held_out
from zerobook.objective import NextToken, TargetTokens

RECIPES = {
    "chats": (CausalLM, NextToken, "llama", {"block_size": 64}),
    "packed": (CausalLM, NextToken, "llama", {"block_size": 64, "packing": True}),
    "pairs": (Seq2SeqChatbot, TargetTokens, "bart", {"max_source_length": 64, "max_target_length": 32}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_takes_fewer_rows_where_their_logits_would_be_too_many(tiny, tmp_path, monkeypatch, capsys, name):
    recipe, objective, model, flags = RECIPES[name]
    seen: list[torch.Size] = []

    class Watched(objective):
        def loss(self, model, batch):
            if torch.is_grad_enabled():
                return super().loss(model, batch)
            seen.append(torch.Size([*batch["labels"].shape, model.config.vocab_size]))  # of the logits, if all were computed
            return super().loss(model, batch)

    class Asked(recipe):
        def objective(self):
            return Watched()

    recipe = Asked
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


def test_logits_that_are_not_kept_limit_no_evaluation(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(held_out, "LOGITS", 1)
    train(
        tmp_path / "run", CausalLM, model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", block_size=64,
        validation_file=tiny / "chats.jsonl", max_eval_samples=6, max_train_steps=1, per_device_eval_batch_size=6,
    )  # fmt: skip
    assert "per_device_eval_batch_size" not in capsys.readouterr().out


def test_two_scorers_with_one_name_are_refused(tiny, tmp_path):
    class Twice(CausalLM):
        def scorers(self, tokenizer, model, data, collate):
            return [lambda strategy, model, step: ({"mine": 1.0}, [])] * 2

    with pytest.raises(ConfigError, match="two scorers measure mine"):
        train(tmp_path / "run", Twice, model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", block_size=64,
              max_train_steps=1)  # fmt: skip


def test_only_a_cross_entropy_has_a_perplexity(tiny, tmp_path, capsys):
    class HalfLoss(NextToken):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return 0.5 * loss

    class HalfRecipe(CausalLM):
        def objective(self):
            return HalfLoss()

    flags = dict(
        model_name_or_path=tiny / "llama",
        train_file=tiny / "few.jsonl",
        validation_file=tiny / "chats.jsonl",
        max_eval_samples=12,
        max_train_steps=1,
        block_size=64,
    )
    cross_entropy = train(tmp_path / "cross_entropy", CausalLM, **flags).event("eval")
    assert cross_entropy["perplexity"] == pytest.approx(math.exp(cross_entropy["loss"]))
    assert "perplexity" in capsys.readouterr().out

    half = train(tmp_path / "half", HalfRecipe, **flags).event("eval")
    assert half["loss"] == pytest.approx(cross_entropy["loss"] / 2, rel=0.05) and "perplexity" not in half
    assert "perplexity" not in capsys.readouterr().out
