"""The how-to's hook under sharding gives the norms of one process."""

from __future__ import annotations

import math
import re

import pytest

from tests.harness import ROOT, launch

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp"]
pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def hook(tmp_path_factory):
    text = (ROOT / "docs" / "how-to" / "gradient_norms.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code.splitlines()) <= 60
    file = tmp_path_factory.mktemp("hook") / code.splitlines()[0].removeprefix("# ")
    file.write_text(code)
    return f"{file}:LayerNorms"


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


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp_hybrid", "zero3_hpz"])
def test_copies_of_a_gradient_count_once(tiny, hook, strategy, tmp_path):
    run = trained(tiny, hook, strategy, 4, tmp_path / "run")
    for step in run.steps:
        assert math.hypot(*step["metrics"].values()) == pytest.approx(step["grad_norm"], rel=1e-6)
