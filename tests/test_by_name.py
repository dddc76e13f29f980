"""Recipes and strategies by name: what a command line of ``zerobook launch`` stands for."""

from __future__ import annotations

import os
import sys

import pytest

from recipes.causal_lm import CausalLMConfig
from tests.harness import ROOT
from zerobook.cli.main import main
from zerobook.config_sources import read
from zerobook.errors import ConfigError
from zerobook.launch import by_name

ZERO3 = str(ROOT / "accelerate_configs" / "zero3.yaml")
LORA = str(ROOT / "recipes" / "lora_finetune.py")
YAML = "strategy: zero3\nnum_processes: 2\nlearning_rate: 1e-3\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder that is no clone, with a recipe's YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(YAML)
    return tmp_path


@pytest.mark.parametrize(
    "arguments, strategy, flags",
    [
        (["lora_finetune"], "zero3", ["--config_file", ZERO3]),
        (["lora_finetune", "--config", "my.yaml"], None, ["--config_file", ZERO3, "--num_processes", "2"]),
        (["lora_finetune", "--config=my.yaml"], None, ["--config_file", ZERO3, "--num_processes", "2"]),
        (
            ["--num_processes", "4", "lora_finetune", "--config", "my.yaml"],
            ZERO3,
            ["--config_file", ZERO3, "--num_processes", "4"],
        ),
        (
            ["--config_file", "a.yaml", "lora_finetune", "--config", "my.yaml"],
            None,
            ["--config_file", "a.yaml", "--num_processes", "2"],
        ),
    ],
)
def test_names_and_keys_of_the_yaml_become_paths_and_flags_which_typed_ones_override(folder, arguments, strategy, flags):
    place = arguments.index("lora_finetune")
    assert by_name.replace_names(arguments, strategy) == [*flags, LORA, *arguments[place + 1 :]]


@pytest.mark.parametrize(
    "arguments", [["--cpu", "x.py", "lora_finetune"], ["-m", "causal_lm", "--config", "my.yaml"], ["--cpu"]]
)
def test_other_launches_stay_as_they_are(folder, arguments):
    assert by_name.replace_names(arguments, None) == arguments


def test_the_copies_that_init_has_made_go_before_the_shipped_files(folder):
    assert main(["init", "mine"]) == 0
    os.chdir("mine")
    assert by_name.replace_names(["causal_lm"], "zero2") == [
        "--config_file",
        "accelerate_configs/zero2.yaml",
        "recipes/causal_lm.py",
    ]


def test_empty_keys_of_the_yaml_count_as_not_given(folder):
    (folder / "my.yaml").write_text("strategy: null\nnum_processes:\n")
    assert by_name.replace_names(["causal_lm", "--config", "my.yaml"], None)[0].endswith("causal_lm.py")
    assert not read(CausalLMConfig, ["--config", "my.yaml"], data=False).launch_keys


def test_a_strategy_file_of_the_yaml_may_lie_beside_it(folder):
    other = folder / "other"
    other.mkdir()
    (other / "my.yaml").write_text("strategy: mine.yaml\n")
    (other / "mine.yaml").write_text("distributed_type: MULTI_GPU\n")
    line = by_name.replace_names(["causal_lm", "--config", "other/my.yaml"], None)
    assert line[:2] == ["--config_file", "other/mine.yaml"]


@pytest.mark.parametrize("words, near", [
    (["--strategy", "zero33", "causal_lm"], "zero3"), (["lora_finetun"], "lora_finetune"),
    (["--strategy", "zero3", "--config_file", "a.yaml", "causal_lm"], "--config_file"),
    (["--strategy", "zero3"], "causal_lm"), (["--num_proceses", "2"], "--num_processes"),
])  # fmt: skip
def test_a_wrong_name_is_refused_with_the_near_ones(folder, words, near):
    with pytest.raises(ConfigError, match=near) as refused:
        from zerobook.cli.launch import launch

        launch(words)
    assert len(refused.value.problems) == 1


def test_a_named_launch_goes_on_as_the_line_that_it_prints(folder, monkeypatch, capsys):
    """Ranks read the command line of their launcher, so it is the written-out one."""

    class Started(Exception):
        pass

    def execute(program, line):
        raise Started(line)

    words = ["launch", "--min_machines", "1", "--strategy", "zero3", "lora_finetune", "--config", "my.yaml"]
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(sys, "orig_argv", ["python", "/env/bin/zerobook", *words])
    with pytest.raises(Started) as started:
        main(words)
    written = ["launch", "--min_machines", "1", "--config_file", ZERO3, "--num_processes", "2", LORA, "--config", "my.yaml"]
    assert started.value.args[0] == [sys.executable, "/env/bin/zerobook", *written]
    assert capsys.readouterr().out.split() == [sys.executable, "/env/bin/zerobook", *written]


def test_doctor_takes_the_same_line(folder, capsys):
    assert main(["doctor", "--strategy", "zero3", "--num_processes", "2", "--json"]) == 0
    assert "ZeRO-3" in capsys.readouterr().out


def test_data_inspect_takes_the_name_of_a_recipe(folder, tiny, capsys):
    flags = {
        "model_name_or_path": tiny / "llama",
        "train_file": tiny / "chats.jsonl",
        "cache_dir": folder,
        "output_dir": folder,
    }
    line = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]

    assert main(["data", "inspect", "lora_finetune", *line, "--samples", "1"]) == 0

    # A data file is shown by its lines.
    assert "row 0" in capsys.readouterr().out
