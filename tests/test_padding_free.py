"""``--padding_free``: its refusals, and the size of its evaluations. tests/distributed/test_parity.py compares the training."""

from __future__ import annotations

import pytest

from recipes.causal_lm import CausalLM, CausalLMConfig
from recipes.lora_finetune import LoraConfig, LoraFinetune
from recipes.seq2seq_chatbot import Seq2SeqConfig
from tests.alone import train
from zerobook.data.collate import CausalCollator
from zerobook.errors import ConfigError


@pytest.mark.parametrize(
    "kind, given, named",
    [
        (CausalLMConfig, {"packing": True}, "packing"),
        (CausalLMConfig, {"group_by_length": True}, "group_by_length"),
        (LoraConfig, {"attn_implementation": "flex_attention"}, "flex_attention"),
        (Seq2SeqConfig, {}, "padding_free"),
    ],
)
def test_what_does_not_go_together_is_a_problem(kind, given, named):
    alone = kind(model_name_or_path="x", dataset_name="y", **given).problems()
    both = kind(model_name_or_path="x", dataset_name="y", padding_free=True, **given).problems()
    (problem,) = [problem for problem in both if problem not in alone]
    assert named in problem and "padding_free" in problem


def flags(tiny):
    return {
        "model_name_or_path": str(tiny / "llama"), "train_file": str(tiny / "chats.jsonl"), "max_seq_length": 64,
        "validation_file": str(tiny / "few.jsonl"), "max_train_steps": 2, "per_device_train_batch_size": 2,
        "padding_free": True,
    }  # fmt: skip


def test_an_evaluation_joins_no_more_rows_than_training(tiny, tmp_path, monkeypatch, capsys):
    from zerobook.data.collate import PackedCollator

    joined, real = [], PackedCollator.__call__
    monkeypatch.setattr(PackedCollator, "__call__", lambda self, rows: joined.append(len(rows)) or real(self, rows))
    run = train(tmp_path, LoraFinetune, per_device_eval_batch_size=8, **flags(tiny))
    assert run.event("eval")["loss"] > 0 and max(joined) == 2
    assert "an evaluation takes 2 rows at once; 8," in capsys.readouterr().out


def test_a_recipe_that_pads_is_refused(tiny, tmp_path):
    class Pads(LoraFinetune):
        def collator(self, tokenizer, model):
            return CausalCollator(tokenizer.pad_token_id)

    with pytest.raises(ConfigError, match=r"padding_free: .* CausalCollator"):
        train(tmp_path, Pads, **flags(tiny))


def test_an_objective_that_reads_rows_is_refused(tiny, tmp_path):
    class Own(CausalLM):
        def objective(self):
            from zerobook.objective import TargetTokens

            return TargetTokens()

    given = {key: value for key, value in flags(tiny).items() if key != "max_seq_length"}
    with pytest.raises(ConfigError, match="padding_free: TargetTokens"):
        train(tmp_path, Own, block_size=64, **given)
