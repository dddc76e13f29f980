"""Held-out data: none at all is an error or a warning, and losses of different held-out data are never compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.causal_lm import CausalLM
from tests.alone import train
from zerobook.cli.inspect_data import inspect
from zerobook.errors import DataError


def write_chat(file: Path, question: str) -> Path:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "So."}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    return file


@pytest.fixture
def run(tiny, tmp_path):
    """Train a tiny model for a few steps."""

    def start(output: str = "run", **flags):
        defaults = {
            "model_name_or_path": tiny / "llama",
            "train_file": tiny / "few.jsonl",
            "cache_dir": tmp_path / "cache",
            "block_size": 64,
            "max_train_steps": 1,
            "per_device_train_batch_size": 2,
            "num_warmup_steps": 0,
        }
        return train(tmp_path / output, CausalLM, **(defaults | flags))

    return start


def inspect_with(tiny: Path, *arguments: object) -> int:
    return inspect([*map(str, arguments), "--model", str(tiny / "llama"), "--max_seq_length", "64"])


TOO_LONG = "why " * 300
"""A question that fills the 64 tokens of a row, so that nothing of the answer is left."""


# --- nothing is held out
def test_a_validation_file_without_a_supervised_token_is_refused(tiny, tmp_path, run):
    file = write_chat(tmp_path / "held_out.jsonl", TOO_LONG)

    with pytest.raises(DataError, match=r"held_out.*supervised token"):
        run(validation_file=file)
    with pytest.raises(DataError, match=r"held_out.*supervised token"):
        inspect_with(tiny, tiny / "few.jsonl", "--validation_file", file)


def test_a_validation_text_shorter_than_a_block_is_refused(tiny, tmp_path, run):
    file = tmp_path / "held_out.txt"
    file.write_text("Too short.\n")

    with pytest.raises(DataError, match=r"held_out.*one block of 64"):
        run(validation_file=file)
    with pytest.raises(DataError, match=r"held_out.*one block of 64"):
        inspect_with(tiny, tiny / "text.txt", "--validation_file", file)


def test_a_split_of_the_data_that_comes_out_empty_is_refused(tmp_path, run):
    folder = tmp_path / "data"
    folder.mkdir()
    write_chat(folder / "train.jsonl", "Why?")
    write_chat(folder / "test.jsonl", TOO_LONG)

    with pytest.raises(DataError, match=r"test\.jsonl.*supervised token"):
        run(train_file=folder)


def test_a_share_of_less_than_a_row_warns_and_names_what_does_not_work(tiny, tmp_path, run, capsys):
    text = tmp_path / "small.txt"
    text.write_text((tiny / "text.txt").read_text()[:1000])

    finished = run(train_file=text)

    warning = capsys.readouterr().out
    assert "WARNING" in warning and "small.txt" in warning
    assert "early_stopping_patience" in warning and "best checkpoint" in warning
    assert not [event for event in finished.events if event["type"] == "eval"]
    assert inspect_with(tiny, text) == 0
    assert "early_stopping_patience" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{"validation_split_percentage": 0}, {"validation_split_percentage": 25}])
def test_a_share_that_is_wanted_or_not_warns_of_nothing(run, capsys, flags):
    run(**flags)

    assert "is held out" not in capsys.readouterr().out
