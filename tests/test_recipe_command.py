"""``zerobook recipe``: what it writes resolves, is read by the recipe, and plans again to the figures of its header."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.harness import ROOT
from tests.planning import MODELS
from zerobook.cli.doctor import inspect_launch
from zerobook.cli.main import main
from zerobook.config import parse
from zerobook.launch.resolve import Hardware
from zerobook.plan.hardware import cluster
from zerobook.plan.rows import planned
from zerobook.training.recipe_file import recipe_class

full = pytest.mark.full
SLOW = ["--interconnect", "400Gbps"]
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "vocab_size": 512,
}  # fmt: skip
CASES = {
    "a tiny one": ("tiny", ["--gpu", "a10g"], "full", "causal_lm", 64),
    "tiny adapters on several nodes": (
        "tiny",
        ["--gpus", "8", "--nodes", "2", *SLOW, "--method", "lora"],
        "lora",
        "lora_finetune",
        64,
    ),
    "all weights on one card": ("qwen3_0.6b", ["--gpu", "a10g"], "full", "causal_lm", 64),
    "the method that fits": ("llama2_7b", ["--gpu", "a10g", "--length", "512"], "lora", "lora_finetune", 64),
    "an encoder-decoder": ("flan_t5_base", ["--gpu", "a10g"], "full", "seq2seq_chatbot", 64),
    "adapters of an encoder-decoder": ("flan_t5_xl", ["--gpu", "a10g", "--method", "lora"], "lora", "seq2seq_chatbot", 64),
    "several nodes": ("falcon_7b", ["--gpus", "8", "--nodes", "2", *SLOW, "--method", "lora"], "lora", "lora_finetune", 64),
    "a batch that is rounded up": ("qwen3_0.6b", ["--gpus", "3", "--global_batch", "64"], "full", "causal_lm", 66),
    "a quantised base": ("llama2_13b", ["--gpu", "a10g", "--length", "1024"], "qlora", "lora_finetune", 64),
}
"""Case -> (model, flags, method, recipe, samples of a step)."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in ("all weights on one card", "an encoder-decoder") else full) for case in CASES],
)
def test_what_is_written_can_be_launched(case, tmp_path, monkeypatch, capsys):
    model, flags, method, recipe, batch = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    data = tmp_path / "chats.jsonl"
    data.write_text("")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    path = tmp_path / "tiny.json" if model == "tiny" else MODELS / f"{model}.json"
    assert main(["recipe", str(path), *flags, "--train_file", str(data)]) == 0
    said = capsys.readouterr().out
    (file,) = tmp_path.glob("*.yaml")
    assert f"_{method}_" in file.name and str(file.name) in said
    header = dict(re.findall(r"^# (\w+): +(.*)$", file.read_text(), re.M))
    launch = shlex.split(header["Launch"])[2:]
    assert f"recipes/{recipe}.py" in header["Launch"] and shlex.join(launch) in said

    where = cluster(**{flags[i][2:]: flags[i + 1] for i in range(0, len(flags), 2) if flags[i][2:] in command_flags()})
    hardware = Hardware(gpus=where.gpus, gpu_name=where.device.name, bf16=True, flash_attention=True)
    plan, problems, config, _ = inspect_launch(launch, hardware)
    assert not problems and not plan.problems
    size = config.per_device_train_batch_size * config.gradient_accumulation_steps * where.ranks
    assert size == batch and f"= {batch} " in header["Batch"]
    assert bool(config.load_in_4bit if recipe == "lora_finetune" else False) == (method == "qlora")

    kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    config, sources, _ = parse(kind.config_class, ["--config", str(file)], data=False)
    strategy = next(word for word in launch if word.endswith(".yaml"))
    _, (row,) = planned(kind(config), sources, where, [ROOT / "accelerate_configs" / strategy.rpartition("/")[2]])
    assert row.fits and not row.tight
    memory = f"{row.memory.total / 1e9:.1f} of {where.device.memory / 1e9:.0f} GB a GPU"
    assert header["Plan"].startswith(f"{memory}; {row.time.step:.1f} s")


def command_flags() -> set[str]:
    return {"gpus", "nodes", "gpu", "gpu_memory", "host_memory", "disk", "interconnect", "intra_node"}


def test_nothing_is_written_if_nothing_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = str(MODELS / "qwen3_0.6b.json")
    assert main(["recipe", model, "--gpu_memory", "1GB", "--host_memory", "1GB", "--method", "full"]) == 1
    assert "comes nearest" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_data_may_be_named_later(tmp_path, monkeypatch, capsys):
    """Its key is then a comment, and the run asks for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    assert main(["recipe", "tiny.json", "--output", "mine.yaml"]) == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert "Name your data" in capsys.readouterr().out and "\n# train_file: " in text
    assert "\nblock_size: 256\n" in text, "its positions are fewer than the default"
    assert main(["recipe", "tiny.json", "--output", "mine.yaml"]) == 2, "a file is not overwritten"
    assert (tmp_path / "mine.yaml").read_text() == text


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--train_file", "a.jsonl", "--dataset_name", "b"], "Leave one out"),
        (["--output", "none/mine.yaml"], "there is no folder"),
        (["--output", "mine.txt"], "no .yaml file"),
        (["--method", "qlora"], "encoder-decoder recipe has no quantised base"),
        (["--nodes", "2"], "--interconnect"),
    ],
)
def test_mistakes_are_named(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", str(MODELS / "flan_t5_base.json"), *flags]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
