"""``zerobook init`` makes a folder in which recipes, strategy files and the config work."""

from __future__ import annotations

import sys

import pytest
import yaml

from tests.harness import ROOT
from zerobook.cli.main import main
from zerobook.launch.deepspeed_json import find_json
from zerobook.runlog.lifecycle import environment
from zerobook.training import run as recipe_run
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.shipped import clone, shipped


@pytest.fixture
def first(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "first"]) == 0
    monkeypatch.chdir(tmp_path / "first")
    return tmp_path / "first"


def test_files_are_those_of_the_clone(first):
    for name, pattern in (
        ("recipes", "*.py"),
        ("recipes/configs", "**/*.*"),
        ("accelerate_configs", "**/*.*"),
        ("ds_configs", "**/*.json"),
    ):
        ours, theirs = (
            {file.relative_to(root / name): file.read_bytes() for file in (root / name).glob(pattern)} for root in (ROOT, first)
        )
        assert len(ours) >= 3 and theirs == ours
    assert (first / "README.md").exists()


def test_every_strategy_file_leads_somewhere(first, capsys):
    for file in sorted((first / "accelerate_configs").glob("**/*.yaml")):
        path = yaml.safe_load(file.read_text()).get("deepspeed_config", {}).get("deepspeed_config_file")
        assert path is None or (first / path).is_file()
    assert main(["doctor", "--config_file", "accelerate_configs/zero3.yaml", "--num_processes", "2"]) == 0
    assert "ds_configs/zero3.json" in capsys.readouterr().out


def test_the_commands_that_it_prints_work(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my training"]) == 0
    folder, check, launch = capsys.readouterr().out.splitlines()[-3:]
    assert folder.strip() == "cd 'my training'" and launch.split()[:2] == ["accelerate", "launch"]
    monkeypatch.chdir(tmp_path / "my training")
    config = tmp_path / "my training" / "config.yaml"
    config.write_text(config.read_text().replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny / "llama"), 1))
    config.write_text(config.read_text().replace("chats.jsonl", str(tiny / "chats.jsonl"), 1))
    assert main(check.split()[1:]) == 0
    assert launch.split()[2:] == check.split()[2:]
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", "config.yaml", "--dry-run"])
    recipe_run.run(recipe_class("recipes/lora_finetune.py"))
    assert "outputs/first" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["again", "file"])
def test_nothing_is_overwritten(first, tmp_path, capsys, there):
    (tmp_path / "file").write_text("mine")
    (first / "config.yaml").write_text("mine")
    target = first if there == "again" else tmp_path / "file"
    assert main(["init", str(target)]) == 2
    said = capsys.readouterr().err
    assert str(target) in said and "does not exist, or is empty" in " ".join(said.split())
    assert (first / "config.yaml").read_text() == (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == 0 and (tmp_path / "recipes" / "causal_lm.py").exists()


def test_a_clones_files_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert clone() == ROOT and shipped("recipes") == ROOT / "recipes"
    assert environment()["git"] is None or len(environment()["git"]["commit"]) == 40


def test_a_json_is_looked_for_in_the_working_folder_first(first, tmp_path, monkeypatch):
    file, path = first / "accelerate_configs" / "zero3.yaml", "ds_configs/zero3.json"
    assert find_json(path, file) == path
    monkeypatch.chdir(tmp_path)
    assert find_json(path, file) == str(first / path)
    assert find_json(path, None) == find_json("ds_configs/none.json", None).replace("none", "zero3") == path
    assert find_json("none.json", "/zero3.yaml") == "none.json"


def test_a_json_that_was_typed_is_in_the_working_folder_alone(first, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["doctor", "--config_file", str(first / "accelerate_configs" / "zero3.yaml")]
    assert main(line) == 0
    capsys.readouterr()
    assert main([*line, "--deepspeed_config_file", "ds_configs/zero2.json"]) == 1
    assert "ds_configs/zero2.json" in capsys.readouterr().out
