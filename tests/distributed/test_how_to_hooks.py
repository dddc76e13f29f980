"""The how-to's hooks do under sharding what they do in one process."""

from __future__ import annotations

import math
import re
import runpy
from types import SimpleNamespace

import pytest
import torch

from tests.harness import ROOT, launch, sampled
from zerobook.constants import IGNORE

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp"]


def file_of(page, folder):
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code.splitlines()) <= 60
    file = folder / code.splitlines()[0].removeprefix("# ")
    file.write_text(code)
    return file


@pytest.fixture(scope="module")
def hook(tmp_path_factory):
    return f"{file_of('gradient_norms', tmp_path_factory.mktemp('hook'))}:LayerNorms"


def trained(tiny, hook, strategy, processes, output):
    split = {"per_device_train_batch_size": 4 // processes}
    return launch(
        strategy, processes, "causal_lm", output, model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl",
        validation_split_percentage=0, block_size=64, max_train_steps=3, learning_rate=3e-3, logging_steps=2, hooks=hook,
        **split,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tiny, hook, tmp_path_factory):
    return trained(tiny, hook, "single", 1, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.launch
@pytest.mark.parametrize("strategy", [
    pytest.param(strategy, marks=[] if strategy in ("zero3", "fsdp") else pytest.mark.full) for strategy in STRATEGIES
])  # fmt: skip
def test_layers_have_the_norms_of_one_process(tiny, hook, alone, strategy, tmp_path):
    run = trained(tiny, hook, strategy, 2, tmp_path / "run")
    assert len(run.steps) == len(alone.steps) == 3
    for mine, theirs in zip(run.steps, alone.steps, strict=True):
        assert len(mine["metrics"]) >= 3
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-5)
        assert math.hypot(*mine["metrics"].values()) == pytest.approx(mine["grad_norm"], rel=1e-6)


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp_hybrid", "zero3_hpz"])
def test_copies_of_a_gradient_count_once(tiny, hook, strategy, tmp_path):
    run = trained(tiny, hook, strategy, 4, tmp_path / "run")
    for step in run.steps:
        assert math.hypot(*step["metrics"].values()) == pytest.approx(step["grad_norm"], rel=1e-6)


@pytest.fixture(scope="module")
def noisy(tiny, tmp_path_factory):
    """The NEFTune hook, and its run in one process."""
    folder = tmp_path_factory.mktemp("noise")
    hook = f"{file_of('neftune', folder)}:Neftune"
    return hook, trained(tiny, hook, "single", 1, folder / "run")


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["zero2", "zero3", "fsdp", "ddp", "zero3_offload"], "zero2", "zero3", "fsdp"))
def test_noise_is_that_of_one_process(tiny, noisy, alone, strategy, tmp_path):
    hook, one = noisy
    run = trained(tiny, hook, strategy, 2, tmp_path / "run")
    assert run.losses == pytest.approx(one.losses, rel=1e-5) and run.norms == pytest.approx(one.norms, rel=1e-5)
    # The first step of both runs has the same weights, so that the noise alone makes the difference.
    assert abs(one.losses[0] - alone.losses[0]) > 1e-4 * alone.losses[0]


def test_noise_is_uniform_up_to_the_limit_of_the_paper(tmp_path):
    namespace = runpy.run_path(str(file_of("neftune", tmp_path)))
    embed = torch.nn.Embedding(50, 16)
    model = SimpleNamespace(get_input_embeddings=lambda: embed)
    trainer = SimpleNamespace(strategy=SimpleNamespace(unwrapped=model))
    ids = torch.arange(40).reshape(2, 20)
    labels = ids.clone()
    labels[0, 12:] = IGNORE
    hook = namespace["Neftune"]()
    hook.before_step(trainer, 1)

    with hook.around_loss(trainer, {"input_ids": ids, "labels": labels}):
        noise = embed(ids) - embed.weight[ids]
    with hook.around_loss(trainer, {"input_ids": ids[1:], "labels": labels[1:]}):
        noise_of_the_second = embed(ids[1:]) - embed.weight[ids[1:]]

    assert not noise[0, 12:].any()
    for row, tokens in ((noise[0, :12], 12), (noise[1], 20)):
        limit = namespace["ALPHA"] / math.sqrt(tokens * 16)
        assert 0.9 * limit < row.abs().max() <= limit * (1 + 1e-5)
        # A uniform number has the standard deviation limit / sqrt(3).
        assert row.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.15)
    torch.testing.assert_close(noise_of_the_second[0], noise[1])
    assert torch.equal(embed(ids), embed.weight[ids]), "without noise again"
    hook.before_step(trainer, 2)
    with hook.around_loss(trainer, {"input_ids": ids, "labels": labels}):
        assert not torch.allclose(embed(ids) - embed.weight[ids], noise)
