"""Adapters through real launches: of encoder-decoders, continued ones, stacked ones, and their exports."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_parity import TOLERANCE, largest_difference
from tests.harness import launch, sampled
from zerobook.checkpoint import store
from zerobook.cli.export import export
from zerobook.errors import CheckpointError
from zerobook.models.result import load_result
from zerobook.training.resume import check_base

IDS = torch.arange(3, 27)[None]
STRATEGIES = ("zero3", "fsdp", "ddp", "zero2")


@torch.no_grad()
def logits(path, **more):
    return load_result(path).model(input_ids=IDS, **more).logits.float()


def assert_exports_to_the_same(run, folder, **more):
    """The merged export and the kept adapter predict as the adapter that the run saved."""
    theirs = logits(run.output, **more)
    export([str(run.output), "--output", str(folder / "merged")])
    export([str(run.output), "--output", str(folder / "kept"), "--keep_adapter"])
    for name in ("merged", "kept"):
        assert (logits(folder / name, **more) - theirs).abs().max() < 1e-5 * theirs.abs().max(), name


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, method",
    [pytest.param(strategy, method, marks=pytest.mark.full)
     for strategy, method in (("zero3", "pissa"), ("fsdp", "dora"), ("ddp", "rslora"), ("zero2", "ia3"))],
)  # fmt: skip
def test_each_method_is_saved_and_exported(launches, tmp_path, strategy, method):
    flags = {"lora_r": None, "lora_alpha": None, "learning_rate": 0.3} if method == "ia3" else {"learning_rate": 3e-3}
    run = launches(strategy, 2, 2, 1, "lora_finetune", adapter=method, **flags)
    assert_exports_to_the_same(run, tmp_path)


@pytest.fixture(scope="module")
def seq2seq(tiny, tmp_path_factory):
    def train(strategy, processes, **flags):
        return launch(
            strategy, processes, "seq2seq_chatbot", tmp_path_factory.mktemp(strategy) / "run", model_name_or_path=tiny / "t5",
            dataset_name="embedded:chatterbot", max_source_length=64, max_target_length=16, source_prefix="answer: ",
            max_train_samples=8, max_eval_samples=2, per_device_train_batch_size=4 // processes, max_train_steps=6,
            adapter="lora", lora_r=8, learning_rate=1e-2, adam_epsilon=1e-6, logging_steps=1, **flags,
        )  # fmt: skip

    return train


@pytest.fixture(scope="module")
def seq2seq_alone(seq2seq):
    return seq2seq("single", 1)


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(STRATEGIES, "zero3"))
def test_adapters_of_an_encoder_decoder(seq2seq, seq2seq_alone, tmp_path, strategy):
    run = seq2seq(strategy, 2)
    assert largest_difference(run.losses, seq2seq_alone.losses) < TOLERANCE
    assert largest_difference(run.norms, seq2seq_alone.norms) < TOLERANCE
    assert run.losses[-1] < run.losses[0] and not (run.output / "model").exists()
    assert load_result(run.output).source_prefix == "answer: "
    assert run.event("eval")["metrics"] == seq2seq_alone.event("eval")["metrics"], "what was generated"
    assert_exports_to_the_same(run, tmp_path, decoder_input_ids=IDS)


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(STRATEGIES, "fsdp"))
def test_a_saved_adapter_is_trained_further(launches, tmp_path, strategy):
    before = launches("zero3", 2, 2, 1, "lora_finetune")
    flags = dict(adapter_path=before.output / "adapter", lora_r=None, lora_alpha=None, learning_rate=1e-3)
    one = launches("single", 1, 4, 1, "lora_finetune", **flags)
    run = launches(strategy, 2, 2, 1, "lora_finetune", **flags)
    assert largest_difference(run.losses, one.losses) < TOLERANCE and largest_difference(run.norms, one.norms) < TOLERANCE
    assert run.losses[-1] < run.losses[0] < before.losses[-1], "it begins where the other ended"
    assert_exports_to_the_same(run, tmp_path)


@pytest.mark.launch
@pytest.mark.parametrize("recipe", ["lora_finetune", pytest.param("causal_lm", marks=pytest.mark.full)])
def test_a_checkpoint_is_trained_further_by_its_name(launches, tmp_path, recipe):
    """The first process exports the checkpoint, as `zerobook export` does, and the others wait for the folder."""
    before = launches("single", 1, 4, 1, recipe, save_steps=2)
    first = store.list_complete(store.folder_of(before.output))[0]
    export([str(first), "--output", str(tmp_path / "kept"), "--keep_adapter"])
    flags = dict(lora_r=None, lora_alpha=None) if recipe == "lora_finetune" else {}
    run, same = (launches("zero3", 2, 2, 1, recipe, model_name_or_path=name, **flags) for name in (first, tmp_path / "kept"))
    assert run.losses == same.losses and run.losses[0] < before.losses[0]
    assert run.text.count("making a model of this checkpoint") <= 1


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_an_adapter_is_stacked_on_a_merged_one(launches, tmp_path, strategy):
    before = launches("zero3", 2, 2, 1, "lora_finetune")
    export([str(before.output), "--output", str(tmp_path / "first")])
    flags = dict(model_name_or_path=tmp_path / "first", learning_rate=1e-3, adapter="rslora")
    one, run = launches("single", 1, 4, 1, "lora_finetune", **flags), launches(strategy, 2, 2, 1, "lora_finetune", **flags)
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert run.losses[-1] < run.losses[0] < before.losses[-1]
    assert_exports_to_the_same(run, tmp_path)


@pytest.mark.launch
@pytest.mark.full
def test_a_run_goes_on_beside_the_same_adapter_only(launches, tmp_path):
    """The checkpoint records the config of the adapter that was continued."""
    before = launches("zero3", 2, 2, 1, "lora_finetune")
    flags = dict(adapter_path=before.output / "adapter", lora_r=None, lora_alpha=None, learning_rate=1e-3)
    run = launches("fsdp", 2, 2, 1, "lora_finetune", **flags)
    (*_, checkpoint) = store.list_complete(store.folder_of(run.output))
    kept = store.read_json(checkpoint / "config.json")
    assert kept["base"]["adapter"]["lora_alpha"] == 32

    from recipes.lora_finetune import LoraConfig

    model = torch.nn.Module()
    model.base_facts = kept["base"] | {"adapter": kept["base"]["adapter"] | {"lora_alpha": 64}}
    with pytest.raises(CheckpointError, match=r"lora_alpha was 32.0, and .* has 64"):
        check_base(checkpoint, LoraConfig(**kept["config"]), model)
