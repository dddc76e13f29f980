"""`zerobook data inspect FILE`: what it counts is what a run does with the same file."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.lora_finetune import LoraConfig
from zerobook.cli.main import main
from zerobook.data.examine import examine
from zerobook.data.prepare import Library
from zerobook.data.sources import open_source
from zerobook.data.templates import CausalEncoder
from zerobook.objective import NextToken


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


def chat(question: int, answer: int) -> dict:
    turns = [{"role": "user", "content": "why " * question}, {"role": "assistant", "content": "so " * answer}]
    return {"messages": turns}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=12, unique=True), st.integers(10, 80))
def test_the_counts_are_those_of_a_run(tokenizer, tmp_path_factory, sizes, length):
    folder = tmp_path_factory.mktemp("data")
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(chat(*size)) + "\n" for size in sizes))
    found = examine(open_source(str(file)).train, CausalEncoder(tokenizer, length=None), length=length)
    config = LoraConfig(cache_dir=str(folder / "cache"), train_file=str(file), validation_split_percentage=0)
    library = Library(config, tokenizer, CausalEncoder(tokenizer, length=length), NextToken())
    opened = library.tokenize(1)
    report = library.open(opened).report["chats"] if len(sizes) > found.dropped.count else {}
    assert len(found.lengths) == len(sizes) and not found.bad.count and not found.duplicates.count
    assert (found.lengths > length).sum() == found.cut.count + found.dropped.count
    if report:
        assert report.get("cut to the maximum length", 0) == found.cut.count
        assert report.get("dropped, nothing supervised within the maximum length", 0) == found.dropped.count
    needed = found.summary()["needed_length"]
    again = examine(open_source(str(file)).train, CausalEncoder(tokenizer, length=None), length=needed)
    assert not again.cut.count and not again.dropped.count


def test_lines_are_named(tmp_path, tiny, capsys):
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    good = [json.dumps(chat(number, 2)) for number in (1, 2, 3)]
    train.write_text(
        "\n".join([*good, good[0], "{", '{"messages": []}', json.dumps(chat(60, 2)), json.dumps(chat(10, 80))]) + "\n"
    )
    held.write_text(f"{json.dumps(chat(9, 9))}\n{good[1]}\n")
    line = ["data", "inspect", str(train), "--model", str(tiny / "llama"), "--max_seq_length", "80"]
    assert main([*line, "--validation_file", str(held), "--json"]) == 1, "two lines cannot be used"
    facts = json.loads(capsys.readouterr().out)
    found = facts["train"]
    assert found["format"] == "messages" and found["samples"] == 6
    assert [place.partition(":")[0] for place in found["bad"]["first"]] == ["line 5", "line 6"]
    assert found["duplicates"] == {"count": 1, "first": ["line 4 (as line 1)"]}
    assert [place.partition(" (")[0] for place in found["dropped"]["first"]] == ["line 7"]
    assert [place.partition(" (")[0] for place in found["cut"]["first"]] == ["line 8"]
    assert found["needed_length"] == found["lengths"]["longest"] > 80
    assert facts["in_both"] == {"count": 1, "first": ["sample 2"]} and facts["held_out"]["samples"] == 2
    assert main(line) == 1
    said = capsys.readouterr().out
    for words in ("line 4 (as line 1)", f"--max_seq_length {found['needed_length']} keeps all of them whole", "line 1: "):
        assert words in said


@pytest.mark.parametrize("rows, format", [
    ([{"prompt": "a", "completion": "b"}], "prompt_completion"), ([{"text": "one text"}], "text"),
    ([{"instruction": "do", "output": "done"}], "instruction"), ([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}], "tokenized"),
    ([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}], "sharegpt"),
])  # fmt: skip
def test_every_format_is_read(tmp_path, tiny, capsys, rows, format):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "inspect", str(file), "--model", str(tiny / "llama")]) == 0
    assert f"format {format}; 1 samples" in capsys.readouterr().out
