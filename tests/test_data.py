"""Formats, masks and bad input."""

from __future__ import annotations

import json

import pytest

from zerobook.config import RecipeConfig
from zerobook.data import sources
from zerobook.data.feed import IGNORE
from zerobook.data.tokenize import encode_chat, supervised_tokens, tokenize
from zerobook.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


CHAT = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A book."},
]


def test_only_the_assistants_turns_are_supervised_and_each_ends(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "the case where the end token is easily lost"
    row = encode_chat(CHAT, tokenizer)
    spoken = tokenizer.decode([i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORE])
    assert spoken == "Hi there.<|im_end|>\nA book.<|im_end|>\n"
    assert row["labels"].count(tokenizer.eos_token_id) == 2


def test_text_becomes_whole_blocks(tokenizer):
    result = tokenize([{"text": "one two three " * 50}, {"text": "four"}], tokenizer, length=16)
    assert {len(r["input_ids"]) for r in result.rows} == {16}
    assert (supervised_tokens(result.rows) == 15).all()
    joined = tokenizer.decode([i for r in result.rows for i in r["input_ids"]])
    assert joined.startswith("one two three one")
    assert result.report["samples"] == len(result.rows)


def test_a_limit_counts_blocks_and_reads_no_further(tokenizer):
    def rows():
        yield {"text": "one two three " * 50}
        raise AssertionError("read on behind the limit")

    class Lazy(list):
        __iter__ = lambda self: rows()  # noqa: E731

    result = tokenize(Lazy([{"text": ""}]), tokenizer, length=16, limit=3)
    assert len(result.rows) == 3 and result.report["samples"] == 3
    chats = tokenize([{"messages": CHAT}] * 5, tokenizer, length=64, limit=2)
    assert len(chats.rows) == 2


def test_a_sample_with_nothing_supervised_is_dropped_and_counted(tokenizer):
    mute = {"messages": [{"role": "user", "content": "Hello?"}]}
    result = tokenize([{"messages": CHAT}, mute], tokenizer, length=64)
    assert len(result.rows) == 1 and result.report["dropped, nothing supervised"] == 1
    with pytest.raises(DataError, match="none has a supervised token"):
        tokenize([mute], tokenizer, length=64)


def test_tokenized_samples_are_taken_as_they_are_and_checked(tokenizer):
    rows = tokenize([{"input_ids": [3, 4, 5], "labels": [IGNORE, 4, 5]}], tokenizer, length=8).rows
    assert rows == [{"input_ids": [3, 4, 5], "labels": [IGNORE, 4, 5]}]
    with pytest.raises(DataError, match="3 input_ids but 2 labels"):
        tokenize([{"input_ids": [3, 4, 5], "labels": [4, 5]}], tokenizer, length=8)
    with pytest.raises(DataError, match="token id 99999 is outside"):
        tokenize([{"input_ids": [99999, 1]}], tokenizer, length=8)


def load(**keys):
    return sources.load(RecipeConfig(**keys))


def test_sources(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"line {i}"}) for i in range(40)))
    train, held_out = load(train_file=str(tmp_path / "a.jsonl"), validation_split_percentage=10)
    assert (len(train), len(held_out)) == (36, 4)
    again = load(train_file=str(tmp_path / "a.jsonl"), validation_split_percentage=10)
    assert [r["text"] for r in again[1]] == [r["text"] for r in held_out]
    assert not {r["text"] for r in train} & {r["text"] for r in held_out}
    (tmp_path / "book.txt").write_text("".join(f"line {i}\n" for i in range(20)))
    head, tail = load(train_file=str(tmp_path / "book.txt"), validation_split_percentage=10)
    assert tail == [{"text": "line 18\nline 19\n"}] and head[0]["text"].endswith("line 17\n")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("x.txt", "y.py"):
        (folder / name).write_text(f"content of {name}")
    assert [r["text"] for r in load(dataset_name=str(folder), validation_split_percentage=0)[0]] == [
        "content of x.txt", "content of y.py",
    ]  # fmt: skip
    assert len(load(dataset_name="embedded:chatterbot")[0]) > 1900


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("empty.jsonl", "", "the dataset is empty"),
        ("bad.jsonl", '{"text": "a"}\n{"text"', "cannot be read as json"),
        ("odd.docx", "x", "unknown file type '.docx'"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "not UTF-8 text (byte 3"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, expected):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load(train_file=str(file))
    assert expected in str(caught.value) and name in str(caught.value)


def test_unknown_columns_and_names(tokenizer):
    with pytest.raises(DataError, match="columns question; expected one of input_ids, messages, text"):
        tokenize([{"question": "?"}], tokenizer, length=8)
    with pytest.raises(DataError, match=r"no such embedded dataset\. There are: chatterbot, stdlib"):
        load(dataset_name="embedded:nothing")
