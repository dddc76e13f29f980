"""`zerobook data inspect FILE`: what it counts is what a run does with the same file."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.lora_finetune import LoraConfig
from zerobook.cli.main import main
from zerobook.data import formats
from zerobook.data.examine import examine
from zerobook.data.prepare import Library
from zerobook.data.sources import open_source
from zerobook.data.templates import CausalEncoder
from zerobook.errors import DataError
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
    assert main([*line, "--validation_file", str(held), "--json"]) == 2, "two lines cannot be used"
    facts = json.loads(capsys.readouterr().out)
    found = facts["train"]
    assert found["format"] == "messages" and found["samples"] == 6
    assert [place.partition(":")[0] for place in found["bad"]["first"]] == ["line 5", "line 6"]
    assert [places["first"] for places in found["bad"]["by_reason"].values()] == [["line 5"], ["line 6"]]
    assert found["duplicates"] == {"count": 1, "first": ["line 4 (as line 1)"]}
    assert [place.partition(" (")[0] for place in found["dropped"]["first"]] == ["line 7"]
    assert [place.partition(" (")[0] for place in found["cut"]["first"]] == ["line 8"]
    assert found["needed_length"] == found["lengths"]["longest"] > 80
    assert facts["in_both"] == {"count": 1, "first": ["sample 2"]} and facts["held_out"]["samples"] == 2
    assert main(line) == 2
    said = capsys.readouterr().out
    assert f"the tokenizer of {tiny / 'llama'} (--model)" in said.replace("\n", "")
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


QUESTION = {"prompt": "Two and two?", "completion": "Nine."}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("row", [
    QUESTION | {"label": False}, QUESTION | {"label": "False"}, QUESTION | {"label": 0}, QUESTION | {"kto_tag": True},
    CHAT | {"label": "1"}, CHAT | {"label": 0.0}, CHAT | {"images": ["a.png"]}, CHAT | {"messages": []},
    {"input_ids": [5, 6], "prompt_mask": [1, 0]},
])  # fmt: skip
def test_what_the_recipe_refuses_is_refused_with_the_same_code(tmp_path, tiny, capsys, row):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    config = LoraConfig(cache_dir=str(tmp_path / "cache"), train_file=str(file), validation_split_percentage=0)
    library = Library(config, tokenizer_of(tiny), CausalEncoder(tokenizer_of(tiny), length=80), NextToken())
    with pytest.raises(DataError) as refused:
        library.tokenize(1)
    code = main(["data", "inspect", str(file), "--model", str(tiny / "llama")])
    assert code == 2
    reason = str(refused.value).partition("line 1: ")[2][:40]
    assert reason and reason in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("row", [
    {"text": "a kind text", "label": 1}, QUESTION | {"label": 3}, QUESTION | {"label": "news"},
    {"input_ids": [5, 6], "special_tokens_mask": [0, 0]}, {"question": "is it?", "answer": "no", "label": 0},
])  # fmt: skip
def test_a_label_that_is_a_class_is_no_verdict(tmp_path, tiny, row):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert main(["data", "inspect", str(file), "--model", str(tiny / "llama")]) == 0


def tokenizer_of(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


def test_the_held_out_samples_are_those_of_a_run(tmp_path, tiny, capsys):
    rows = [chat(number % 7 + 1, 2) for number in range(30)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_of(tiny)
    config = LoraConfig(cache_dir=str(tmp_path / "cache"), train_file=str(file), validation_split_percentage=20, seed=3)
    library = Library(config, tokenizer, CausalEncoder(tokenizer, length=80), NextToken())
    part = library.open(library.tokenize(1)).held_out["rows"]
    flags = ["--validation_split_percentage", "20.0", "--seed", "3", "--json"]
    assert main(["data", "inspect", str(file), "--model", str(tiny / "llama"), *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["held_out_samples"] == len(part) == 6
    numbers = [int(place.split()[1]) - 1 for place in facts["in_both"]["first"]]
    encoder = CausalEncoder(tokenizer, length=80)
    encoded = encoder.encode([formats.parse("messages", rows[number]) for number in numbers])
    held_out = [list(part[row]["input_ids"]) for row in range(len(part))]
    assert facts["in_both"]["count"] == 6 and [list(row.input_ids) for row in encoded] == held_out


@pytest.mark.parametrize("action", ["prepare", "inspect"])
def test_a_stream_has_nothing_to_show_before_its_run(tmp_path, tiny, capsys, action):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(CHAT) + "\n")
    flags = ["--model_name_or_path", str(tiny / "llama"), "--train_file", str(file), "--streaming", "--max_train_steps", "4"]

    code = main(["data", action, "lora_finetune", *flags])

    assert code == 2 and "--streaming false" in " ".join(capsys.readouterr().err.split())


def test_supervised_tokens_of_all_samples_are_counted(tokenizer, tmp_path):
    file = tmp_path / "tokens.jsonl"
    file.write_text('{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}\n{"input_ids": [1, 2, 4], "labels": [-100, -100, 4]}\n')
    found = examine(open_source(str(file)).train, CausalEncoder(tokenizer, length=None), length=8)
    assert found.supervised == 3


def test_flags_may_stand_before_the_file(tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat(number, 2)) + "\n" for number in (1, 2, 3)))
    assert main(["data", "inspect", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["samples"] == 3
    with pytest.raises(SystemExit):
        main(["data", "inspect", str(file), "--max_seq_length", "0"])


@pytest.mark.parametrize("flag, value", [("--seed", "-1"), ("--seed", "x"), ("--validation_split_percentage", "100")])
def test_a_value_that_the_recipes_refuse_is_refused(capsys, flag, value):
    with pytest.raises(SystemExit) as ended:
        main(["data", "inspect", "embedded:chatterbot", flag, value])
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err
