"""Rotary embeddings whose frequencies transformers chooses by the longest row of a batch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.alone import train
from zerobook.models.load import pin_rotary

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module", params=["dynamic", "longrope"])
def model(request, tiny, tmp_path_factory):
    """A model that was first trained on 32 positions, beside the tiny Llama's tokenizer."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(tiny / "llama", folder)
    (folder / "model.safetensors").unlink()
    vocabulary = json.loads((tiny / "llama" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    if request.param == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        made = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, rope_parameters=rope, **SIZES))
    else:
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 9.0]}  # fmt: skip
        made = Phi3ForCausalLM(
            Phi3Config(vocab_size=vocabulary, max_position_embeddings=128, original_max_position_embeddings=32,
                       rope_parameters=rope, pad_token_id=0, **SIZES)
        )  # fmt: skip
    made.save_pretrained(folder)
    return folder


def test_the_cut_of_a_batch_an_evaluation_and_a_stop_change_nothing(model, tiny, tmp_path, capfd):
    flags = dict(
        model_name_or_path=model, train_file=tiny / "chats.jsonl", validation_file=tiny / "few.jsonl", max_eval_samples=3,
        block_size=96, learning_rate=1e-3, num_warmup_steps=0, logging_steps=1, save_steps=3,
    )  # fmt: skip
    one = train(tmp_path / "one", **flags, max_train_steps=6, per_device_train_batch_size=4)
    lengths = {len(step["ids"]) for step in one.steps}
    assert lengths == {4} and "in this run they are those of its longest sample" in capfd.readouterr().out
    cut = train(tmp_path / "cut", **flags, max_train_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert cut.losses == pytest.approx(one.losses, rel=1e-5)
    seen = train(tmp_path / "seen", **flags, max_train_steps=6, per_device_train_batch_size=4, eval_on_start=True, eval_steps=1)
    assert seen.losses == pytest.approx(one.losses, rel=1e-6)
    shutil.copytree(tmp_path / "one" / "checkpoints" / "step-000003", tmp_path / "went" / "checkpoints" / "step-000003")
    went = train(tmp_path / "went", **flags, max_train_steps=6, per_device_train_batch_size=4, resume_from_checkpoint="auto")
    assert went.losses == pytest.approx(one.losses[3:], rel=1e-6)


def test_what_fits_into_the_first_positions_is_left_as_it_is(model):
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        before = loaded(ids).logits
        assert pin_rotary(loaded, 32) is None and torch.equal(loaded(ids).logits, before)
        long = torch.arange(3, 63)[None]
        wanted = loaded(long).logits
        assert "60 tokens" in pin_rotary(loaded, 60)
        assert torch.equal(loaded(long).logits, wanted), "the frequencies of the longest sample"
        assert (loaded(ids).logits - before).abs().max() > 1e-5, "for short rows too"
