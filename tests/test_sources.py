"""Every kind of file, folder and dataset gives its samples, and damage is named with its place."""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard

from zerobook.data.sources import Malformed, open_source
from zerobook.errors import DataError

ROWS = [{"text": f"line {i}", "n": i} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def texts(source):
    found = []
    for _, row, _ in source.read():
        found.append((json.loads(row) if isinstance(row, bytes) else row)["text"])
    return found


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", LINES),
        ("a.ndjson", "\n" + LINES.replace("\n", "\n\n")),
        ("a.json", json.dumps(ROWS)),
        ("b.json", LINES),
        ("a.csv", "text,n\n" + "".join(f'"line {i}",{i}\n' for i in range(5))),
        ("a.tsv", "text\tn\n" + "".join(f"line {i}\t{i}\n" for i in range(5))),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress(LINES.encode())),
        ("a.csv.gz", gzip.compress(("\ufefftext,n\n" + "".join(f"line {i},{i}\n" for i in range(5))).encode())),
        ("a.parquet", None),
    ],
)
def test_files(tmp_path, name, content):
    path = tmp_path / name
    if content is None:
        parquet(path)
    else:
        write(path, content)
    source = open_source(str(path)).train
    assert texts(source) == [row["text"] for row in ROWS]
    assert texts(source) == texts(source), "a source can be read again"
    shares = [cost for _, _, cost in source.read()]
    assert sum(shares) <= source.total == path.stat().st_size
    before = source.digest()
    path.write_bytes(path.read_bytes() + b"\n")
    assert source.digest() != before


def test_text_folders_and_saved_datasets(tmp_path):
    import datasets

    book = open_source(write(tmp_path / "book.txt", "one\ntwo\n")).train
    assert book.lone_text and texts(book) == ["one\ntwo\n"]
    folder = tmp_path / "many"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.md", "deep/c.py"):
        write(folder / name, name)
    many = open_source(str(folder)).train
    assert texts(many) == ["a.md", "b.txt", "deep/c.py"] and not many.lone_text
    split = tmp_path / "split"
    split.mkdir()
    write(split / "train.jsonl", LINES)
    write(split / "validation.jsonl.gz", gzip.compress(LINES.splitlines()[0].encode()))
    opened = open_source(str(split))
    assert len(texts(opened.train)) == 5 and texts(opened.held_out) == ["line 0"]
    assert open_source(str(split), split="validation").held_out is None
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:2])).save_to_disk(
        str(tmp_path / "saved")
    )
    saved = open_source(str(tmp_path / "saved"))
    assert len(texts(saved.train)) == 5 and len(texts(saved.held_out)) == 2
    assert len(list(open_source("embedded:chatterbot").train.read())) > 1900


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("odd.docx", "x", "unknown file type '.docx'"),
        ("latin.txt", b"caf\xe9", "not UTF-8 text (byte 3"),
        ("bad.json", '[{"text": "a"},\n {"text"', "line 2: not valid JSON"),
        ("cut.jsonl.gz", gzip.compress(LINES.encode() * 100)[:-30], "cannot be read (EOFError"),
        ("no.parquet", "PAR", "cannot be read (ArrowInvalid"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        list(open_source(path).train.read())
    assert message in str(caught.value) and name in str(caught.value)


def test_a_table_row_of_another_width_is_one_bad_sample(tmp_path):
    path = write(tmp_path / "a.csv", "text,n\na,1\nb\nc,3,4\nd,5\n")
    rows = [row for _, row, _ in open_source(path).train.read()]
    assert rows[1:3] == [Malformed("1 fields where the header has 2"), Malformed("3 fields where the header has 2")]
    assert rows[3]["text"] == "d"


@pytest.mark.parametrize("name", ["./nothing", "nothing.jsonl", "embedded:nothing"])
def test_what_is_not_there(name):
    with pytest.raises(DataError, match=r"no such (file or folder|embedded dataset\. There are: chatterbot, stdlib)"):
        open_source(name)


def test_a_missing_split_names_those_there_are(tmp_path):
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="there is no split 'dev', only train"):
        open_source(str(tmp_path / "saved"), split="dev")
