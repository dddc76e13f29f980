"""The model that is exported from a checkpoint is the trained one: tied weights, merged adapters, encoder-decoders."""

from __future__ import annotations

import json

import pytest
import torch

from tests.harness import launch, sampled
from zerobook.checkpoint import store
from zerobook.cli.export import export
from zerobook.errors import CheckpointError, ConfigError

IDS = torch.arange(3, 27)[None]


@torch.no_grad()
def logits(model, **more):
    return model.eval()(input_ids=IDS, **more).logits.float()


@pytest.mark.launch
def test_a_tied_model_exports_from_any_strategys_checkpoint(launches, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = launches("zero2", 2, 2, 1)
    assert export([str(run.output), "--output", str(tmp_path / "whole")]) == 0
    assert "logits differ by at most 0.0e+00" in capsys.readouterr().out
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    theirs = AutoModelForCausalLM.from_pretrained(run.output / "model")
    assert torch.equal(logits(mine), logits(theirs)) and mine.config.tie_word_embeddings
    assert mine.lm_head.weight is mine.get_input_embeddings().weight
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").eos_token_id == 2
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "| steps | 10 |" in card and "ZeRO-2, 2 processes" in card and "chats.jsonl" in card
    export([str(run.output), "--output", str(tmp_path / "half"), "--dtype", "bfloat16"])
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16 and (logits(half) - logits(mine)).abs().max() < 0.1
    with pytest.raises(ConfigError, match="is not empty"):
        export([str(run.output), "--output", str(tmp_path / "half")])


@pytest.mark.launch
def test_an_adapter_is_merged_or_kept_and_an_untrained_one_refused(launches, tiny, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = launches("zero3", 2, 2, 1, "lora_finetune")
    base = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    before = logits(base)
    theirs = logits(PeftModel.from_pretrained(base, run.output / "adapter"))
    export([str(run.output), "--output", str(tmp_path / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - theirs).abs().max() < 1e-5 * theirs.abs().max() < 1e-2 * (theirs - before).abs().max()
    export([str(run.output), "--output", str(tmp_path / "kept"), "--keep_adapter"])
    kept = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "llama"), tmp_path / "kept")
    assert torch.equal(logits(kept), theirs) and not (tmp_path / "kept" / "model.safetensors").exists()

    flags = {
        "model_name_or_path": tiny / "llama",
        "model_revision": "v1",
        "train_file": tiny / "few.jsonl",
        "max_train_samples": 4,
        "max_seq_length": 64,
        "max_train_steps": 1,
        "learning_rate": 1e-300,  # 0 in fp32: the step changes nothing
    }
    begun = launch("single", 1, "lora_finetune", tmp_path / "begun", **flags)
    facts = json.loads((begun.output / "adapter" / "adapter_config.json").read_text())
    assert facts["revision"] == "v1", "a folder has no revisions, so the word alone is looked at"
    (checkpoint,) = store.list_complete(store.folder_of(begun.output))
    with pytest.raises(CheckpointError, match="what it was before training"):
        export([str(checkpoint), "--output", str(tmp_path / "nothing")])
    assert not (tmp_path / "nothing").exists()


@pytest.mark.launch
@pytest.mark.parametrize("recipe", sampled(["causal_lm", "lora_finetune"], "lora_finetune"))
def test_a_model_that_also_takes_images_exports(tiny, tmp_path, recipe):
    from transformers import AutoModelForCausalLM

    run = launch(
        "single", 1, recipe, tmp_path / "run", model_name_or_path=tiny / "gemma3_composite", train_file=tiny / "few.jsonl",
        max_train_steps=2, learning_rate=1e-2, validation_split_percentage=0,
    )  # fmt: skip
    export([str(run.output), "--output", str(tmp_path / "out")])
    base, mine = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny / "gemma3_composite", tmp_path / "out"))
    assert not torch.equal(logits(mine), logits(base))
    tower, before = mine.model.vision_tower.state_dict(), base.model.vision_tower.state_dict()
    assert all(torch.equal(tower[name], before[name]) for name in before), "weights that text does not use are unchanged"
    if recipe == "causal_lm":
        theirs = AutoModelForCausalLM.from_pretrained(run.output / "model")
        assert torch.equal(logits(mine), logits(theirs))
        assert theirs.state_dict().keys() == base.state_dict().keys()


@pytest.mark.launch
def test_an_encoder_decoder_exports_with_the_way_it_generates(tiny, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    run = launch(
        "fsdp", 2, "seq2seq_chatbot", tmp_path / "run", dataset_name="embedded:chatterbot", model_name_or_path=tiny / "bart",
        max_source_length=64, max_target_length=32, val_max_target_length=32, max_train_samples=8, max_eval_samples=2,
        num_beams=2, max_train_steps=3, learning_rate=1e-3,
    )  # fmt: skip
    export([str(run.output), "--output", str(tmp_path / "out")])
    mine, theirs = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (tmp_path / "out", run.output / "model"))
    assert torch.equal(logits(mine, decoder_input_ids=IDS), logits(theirs, decoder_input_ids=IDS))
    base = AutoModelForSeq2SeqLM.from_pretrained(tiny / "bart")
    assert base.final_logits_bias.abs().max() > 0
    assert torch.equal(mine.final_logits_bias, base.final_logits_bias), "a buffer that only rank 0 reads, and nobody trains"


@pytest.mark.launch
def test_a_model_saved_under_zero3_has_the_names_and_the_trained_weights(tiny, tmp_path):
    """transformers knows older names of this class's weights, in other files than the one that was loaded."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = launch(
        "zero3", 2, "causal_lm", tmp_path / "run", model_name_or_path=tiny / "gemma3_composite", train_file=tiny / "few.jsonl",
        max_train_steps=2, learning_rate=1e-2, validation_split_percentage=0, save_steps=2,
    )  # fmt: skip
    base, saved = (load_file(folder / "model.safetensors") for folder in (tiny / "gemma3_composite", run.output / "model"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(run.output / "model").named_parameters())

    assert set(saved) == set(base)
    trained = {name.removeprefix("weight/"): value for name, value in run.state().items() if name.startswith("weight/")}
    assert trained and all(torch.equal(loaded[name], value) for name, value in trained.items())
