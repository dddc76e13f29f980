"""``zerobook recipe``: what it writes resolves, is read by the recipe, and plans again to the figures of its header."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.harness import ROOT, launch
from tests.planning import MODELS, shortened
from zerobook.cli.doctor import inspect_launch
from zerobook.cli.main import main
from zerobook.config_sources import parse
from zerobook.launch.resolve import Hardware
from zerobook.plan.hardware import cluster
from zerobook.plan.rows import plan_recipe
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.units import duration

pytestmark = pytest.mark.usefixtures("traced_once")
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
    "a short encoder-decoder": ("short t5", ["--gpu", "a10g"], "full", "seq2seq_chatbot", 64),
    "an encoder-decoder": ("flan_t5_base", ["--gpu", "a10g"], "full", "seq2seq_chatbot", 64),
    "adapters of an encoder-decoder": ("flan_t5_xl", ["--gpu", "a10g", "--method", "lora"], "lora", "seq2seq_chatbot", 64),
    "adapters of a short encoder-decoder": ("short t5", ["--gpu", "a10g", "--method", "lora"], "lora", "seq2seq_chatbot", 64),
    "a tiny base quantised as asked": ("tiny", ["--gpu", "a10g", "--method", "qlora"], "qlora", "lora_finetune", 64),
    "several nodes": ("falcon_7b", ["--gpus", "8", "--nodes", "2", *SLOW, "--method", "lora"], "lora", "lora_finetune", 64),
    "a batch that does not divide": ("tiny", ["--gpus", "3", "--global_batch", "64"], "full", "causal_lm", 63),
    "few positions": ("blenderbot_400m", ["--gpu", "a10g"], "full", "seq2seq_chatbot", 64),
    "a quantised base": ("llama2_13b", ["--gpu", "a10g", "--length", "1024"], "qlora", "lora_finetune", 64),
}
"""Case -> (model, flags, method, recipe, samples of a step)."""
SAMPLE = {
    "tiny adapters on several nodes",
    "a batch that does not divide",
    "a short encoder-decoder",
    "adapters of a short encoder-decoder",
    "a tiny base quantised as asked",
}
"""Cases of every test run; each plans a small model with all its settings."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in SAMPLE else full) for case in CASES],
)
def test_what_is_written_can_be_launched(case, tmp_path, monkeypatch, capsys):
    model, flags, method, recipe, batch = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    data = tmp_path / "chats.jsonl"
    data.write_text("")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    path = file_of(model, tmp_path)
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
    assert config.trains_adapters == (method != "full")
    assert (config.base_format is not None) == (method == "qlora")
    size = config.per_device_train_batch_size * config.gradient_accumulation_steps * where.ranks
    assert size == batch and f"= {batch} " in header["Batch"]
    assert bool(config.load_in_4bit if recipe == "lora_finetune" else False) == (method == "qlora")

    kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    config, sources, _ = parse(kind.config_class, ["--config", str(file)], data=False)
    strategy = next(word for word in launch if word.endswith(".yaml"))
    _, (row,) = plan_recipe(kind(config), sources, where, [ROOT / "accelerate_configs" / strategy.rpartition("/")[2]], {})
    assert row.fits and not row.tight
    memory = f"{row.memory.total / 1e9:.1f} of {where.device.memory / 1e9:.0f} GB a GPU"
    assert header["Plan"].startswith(f"{memory}; {duration(row.time.step)} a step")


def file_of(model: str, folder: Path) -> Path:
    """Return the config of a case's model, which is in ``folder`` where it is none of the shipped ones."""
    if model == "tiny":
        return folder / "tiny.json"
    if model == "short t5":
        return shortened(folder, "flan_t5_base", num_layers=1, num_decoder_layers=1)
    return MODELS / f"{model}.json"


def command_flags() -> set[str]:
    return {"gpus", "nodes", "gpu", "gpu_memory", "host_memory", "disk", "interconnect", "intra_node"}


def told(capsys) -> dict[str, str]:
    """Return the rows of what was printed."""
    return dict(re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +(.*)$", capsys.readouterr().out, re.M))


def make_model(folder) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))


def test_a_config_in_a_folder_names_the_folder(tmp_path, monkeypatch, capsys):
    """Its weights are beside it. A path that YAML would fold is written whole."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    folder = "a long name with spaces " * 2 + "of a folder"
    make_model(tmp_path / "small")
    (tmp_path / folder / folder).mkdir(parents=True)
    data = f"{folder}/{folder}/chats.jsonl"
    (tmp_path / data).write_text("x" * 4 * 256 * 64 * 10)  # ten steps and what is held out
    assert main(["recipe", "small/config.json", "--train_file", data]) == 0
    out = capsys.readouterr().out
    file = tmp_path / "small_full_1xa100-80gb.yaml"
    config, *_ = parse(recipe_class(str(ROOT / "recipes" / "causal_lm.py")).config_class, ["--config", str(file)])
    assert (config.model_name_or_path, config.train_file) == ("small", data)
    assert "30 steps: 3 epochs" in out and "without weights" not in out
    table = out.partition("\nwrote ")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_all_gpus_are_used_on_a_slow_network(tmp_path, monkeypatch, capsys):
    """One process would be faster, and is no answer: the launch line names all of them."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "small")
    assert main(["recipe", "small", "--nodes", "2", "--interconnect", "1Mbps", "--dataset_name", "NAME"]) == 0
    said = told(capsys)
    assert "single" not in said["strategy"] and "run" not in said
    (file,) = tmp_path.glob("*.yaml")
    assert "--machine_rank 1 on the other nodes" in file.read_text()


@full
@pytest.mark.launch
def test_what_is_written_trains(tiny, tmp_path, monkeypatch, capsys):
    """The file as it was written, without the precision, which a CPU does not have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text((tiny / "chats.jsonl").read_text())
    asked = ["--gpus", "2", "--method", "lora", "--global_batch", "4", "--length", "64"]
    assert main(["recipe", str(tiny / "llama"), *asked, "--train_file", str(tmp_path / "chats.jsonl")]) == 0
    (file,) = tmp_path.glob("*.yaml")
    strategy = re.search(r"accelerate_configs/(\w+)\.yaml", told(capsys)["strategy"])
    run = launch(
        strategy[1], 2, "lora_finetune", tmp_path / "run", config=file, mixed_precision="no", max_train_steps=2,
    )  # fmt: skip
    assert len(run.steps) == 2 and os.path.isdir(tmp_path / "run" / "adapter")


def test_nothing_is_written_if_nothing_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = str(shortened(tmp_path, "qwen3_0.6b", num_hidden_layers=2))
    assert main(["recipe", model, "--gpu_memory", "1GB", "--host_memory", "1GB", "--method", "full"]) == 1
    assert "comes nearest" in capsys.readouterr().out and [*tmp_path.iterdir()] == [Path(model)]


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
        (["--output", "mine.txt"], "not a .yaml file"),
        (["--method", "qlora"], "encoder-decoder recipe has no quantised base"),
        (["--nodes", "2"], "--interconnect"),
    ],
)
def test_mistakes_are_named(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", str(MODELS / "flan_t5_base.json"), *flags]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
