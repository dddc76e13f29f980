"""Every kind of file, folder and dataset gives its samples, and damage is named with its place."""

from __future__ import annotations

import errno
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zstandard
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from zerobook.data import files, sources
from zerobook.data import parquet as parquet_rows
from zerobook.data.formats import Chat, parse
from zerobook.data.source import Malformed
from zerobook.data.sources import open_held_out, open_source
from zerobook.data.tokenize import parse_row
from zerobook.errors import DataError, SourceError

ROWS = [{"text": f"line {i}", "n": i} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def texts(source):
    found = []
    for _, row, _ in source.read():
        found.append((json.loads(row.decode()) if isinstance(row, bytes) else row)["text"])
    return found


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    "rows", [":2", "1:3", "-2:", ":-1", "3:99", ":", ":50%", "20%:60%", "-50%:", "30%:", "90%:10%", ":30%", ":100%", "1:50%"]
)
def test_the_rows_of_a_split_are_those_that_datasets_takes(tmp_path, rows):
    import datasets

    (tmp_path / "files").mkdir()
    file = write(tmp_path / "files" / "train.jsonl", LINES)
    saved = str(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(saved)
    # datasets takes two bounds of one unit.
    if rows != "1:50%":
        expected = datasets.load_dataset("json", data_files=file, split=f"train[{rows}]", cache_dir=str(tmp_path / "cache"))[
            "text"
        ]
    else:
        expected = ["line 1"]

    for path in (file, str(tmp_path / "files"), saved):
        splits = open_source(path, split=f"train[{rows}]")
        assert texts(splits.train) == list(expected)
        assert f"[{rows}]" in splits.describe(uses_held_out=True)


def test_a_saved_dataset_is_known_by_its_content_and_read_without_its_format(tmp_path, monkeypatch):
    """`datasets` keeps the fingerprint of rows that a function made if code changes that the function calls."""
    import datasets

    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1 << 20)
    digests, sketches = set(), set()
    for word in ("before", "after"):
        dataset = datasets.Dataset.from_list([{"text": word, "n": 1}], split="train")
        dataset._fingerprint = "equal"
        dataset.set_format("numpy", columns=["n"])
        dataset.save_to_disk(str(tmp_path / "saved"))
        source = open_source(str(tmp_path / "saved")).train
        assert texts(source) == [word]
        digests.add(source.digest())
        sketches.add(source.sketch())
        assert source.shards()[0].digest() == source.sketch()
    assert len(digests) == len(sketches) == 2


@pytest.mark.parametrize("name", ["state.json", "data-00000-of-00001.arrow"])
def test_a_dataset_that_was_not_saved_completely_is_named(tmp_path, name):
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "train" / name).unlink()
    with pytest.raises(DataError, match=r"saved: cannot be read \(FileNotFoundError"):
        open_source(str(tmp_path / "saved"))


def test_other_rows_are_other_data(tmp_path):
    """Prepared data is found by the digest of its source."""
    file = write(tmp_path / "a.jsonl", LINES)
    sources = [open_source(file, split=split).train for split in (None, "train", "train[:2]", "train[2:]")]
    digests = [source.digest() for source in sources]
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize("split", ["train[", "train[:2", "train[5]", "train[a:b]", "train[:10%](closest)", "train[1:2:3]"])
def test_what_is_no_range_of_rows_is_an_error(tmp_path, split):
    with pytest.raises(DataError, match="split"):
        open_source(write(tmp_path / "a.jsonl", LINES), split=split)


def test_a_long_text_in_parts_is_one_row_of_a_range(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TEXT_BLOCK", 16)
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "a.txt", "one line of text\nanother line of text\nthe last\n")
    write(tmp_path / "train" / "b.txt", "short\n")

    every, first, second = (
        [part for _, part, _ in open_source(str(tmp_path), split=f"train[{rows}]").train.read()] for rows in (":", ":1", "50%:")
    )

    assert len(first) > 2 and len(second) == 1
    assert first + second == every


def test_config_names_that_yaml_reads_as_numbers_can_be_chosen(tmp_path):
    fill(tmp_path, ["2023/train.jsonl", "2024/train.jsonl"])
    entries = [f"- config_name: {year}\n  data_files: {year}/*.jsonl\n" for year in (2023, 2024)]
    with_card(tmp_path, "configs:\n" + "".join(entries))

    with pytest.raises(DataError, match="2023, 2024"):
        open_source(str(tmp_path))
    assert texts(open_source(str(tmp_path), config_name="2024").train) == ["2024/train.jsonl"]


def test_a_text_has_no_rows_and_a_folder_without_splits_has(tmp_path):
    write(tmp_path / "a.txt", "one\ntwo\n")
    with pytest.raises(DataError, match="has no rows"):
        open_source(str(tmp_path / "a.txt"), split="train[:1]")
    write(tmp_path / "a.jsonl", LINES)
    write(tmp_path / "b.jsonl", LINES)
    assert texts(open_source(str(tmp_path), split="train[4:6]").train) == ["line 4", "line 0"]
    with pytest.raises(DataError, match="no splits"):
        open_source(str(tmp_path), split="dev")


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", LINES),
        ("a.ndjson", "\n" + LINES.replace("\n", "\n\n")),
        ("a.json", json.dumps(ROWS)),
        ("b.json", LINES),
        ("a.csv", "text,n\n" + "".join(f'"line {i}",{i}\n' for i in range(5))),
        ("a.tsv", "text\tn\n" + "".join(f"line {i}\t{i}\n" for i in range(5))),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress(LINES.encode())),
        ("b.JSONL.GZ", gzip.compress(LINES.encode(), mtime=0)),
        ("two.jsonl.zst", b"".join(zstandard.ZstdCompressor().compress(line.encode()) for line in LINES.splitlines(True))),
        ("bom.jsonl", "\ufeff" + LINES),
        ("bom.json", "\ufeff" + json.dumps([json.loads(line) for line in LINES.splitlines()])),
        ("a.csv.gz", gzip.compress(("\ufefftext,n\n" + "".join(f"line {i},{i}\n" for i in range(5))).encode(), mtime=0)),
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


def test_a_parquet_file_may_have_a_map(tmp_path):
    import pyarrow

    maps = pyarrow.array([[("a", "b")], [], None], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y", "z"], "facts": maps}), tmp_path / "a.parquet")
    assert texts(open_source(str(tmp_path / "a.parquet")).train) == ["x", "y", "z"]


def test_a_parquet_file_may_have_views_of_texts(tmp_path):
    import pyarrow

    views = pyarrow.array(["x", "a longer text than fits into a view", None], pyarrow.string_view())
    lists = pyarrow.array([["y"], [], None], pyarrow.list_(pyarrow.string_view()))
    pyarrow.parquet.write_table(pyarrow.table({"text": views, "tags": lists}), tmp_path / "a.parquet")

    assert texts(open_source(str(tmp_path / "a.parquet")).train) == views.to_pylist()


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
    assert [location.partition(",")[0] for location, _, _ in many.read()] == texts(many)
    assert open_source(str(folder / "deep")).train.lone_text
    digest = many.digest()
    folder.rename(tmp_path / "moved")
    assert open_source(str(tmp_path / "moved")).train.digest() == digest
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
    "files, train, held_out",
    [
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl", "test-0.jsonl"],
         ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], ["validation-00000-of-00001.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl", "README.md"], ["train/a.jsonl", "train/b.jsonl"], ["test/a.jsonl"]),
        (["train.jsonl", "val.jsonl", "more.jsonl"], ["train.jsonl"], ["val.jsonl"]),
        (["data.jsonl", "validation.jsonl"], ["data.jsonl"], ["validation.jsonl"]),
        (["data.jsonl", "validation.jsonl", "eval/a.jsonl"], ["data.jsonl"], ["validation.jsonl"]),
        (["train.jsonl", "more.jsonl", "test/a.jsonl"], ["train.jsonl"], ["test/a.jsonl"]),
        (["data/test-00000-of-00001.jsonl", "b.jsonl", "dev.jsonl"], ["b.jsonl"], ["dev.jsonl"]),
        (["b.jsonl", "test/train-0.jsonl"], ["b.jsonl"], ["test/train-0.jsonl"]),
        (["b.jsonl", ".ipynb_checkpoints/b-checkpoint.jsonl", "._b.jsonl"], ["b.jsonl"], None),
        (["src/a.py", "test/a.py", "test_b.py"], ["src/a.py", "test/a.py", "test_b.py"], None),
    ],
)  # fmt: skip
def test_what_a_folder_holds_out_is_not_trained_on(tmp_path, files, train, held_out):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name if name.endswith((".py", ".md")) else json.dumps({"text": name}))
    opened = open_source(str(tmp_path))
    assert texts(opened.train) == train
    assert opened.held_out and texts(opened.held_out) == held_out if held_out else opened.held_out is None


def fill(folder, names):
    """Write one sample of its own into each file, and a small README where one is named."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, f"text,n\n{name},1\n" if name.endswith(".csv") else json.dumps({"text": name}) + "\n")


def with_card(folder, header):
    write(folder / "README.md", f"---\n{header}---\n# A dataset\n")


@pytest.mark.parametrize(
    "files, train, held_out",
    [
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "data/train", "data/test"),
        (["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"], "data/train_sft", "data/test_sft"),
        (["train_sft-00000-of-00001.jsonl", "test_sft-00000-of-00001.jsonl"], "train_sft", "test_sft"),
        (["train.v1.jsonl", "test.v1.jsonl"], "train", "test"),
        (["a/b/my-training.jsonl", "a/b/my-dev.jsonl", "a/b/my-eval.jsonl"], "a/b/my-training", "a/b/my-dev"),
        (["en/training/0.jsonl", "en/evaluation/0.jsonl"], "en/training", "en/evaluation"),
        (["wiki.train.txt", "wiki.test.txt", "wiki.valid.txt"], "wiki.train", "wiki.valid"),
    ],
)
def test_the_test_split_of_a_downloaded_folder_is_held_out(tmp_path, files, train, held_out):
    fill(tmp_path, files)
    write(tmp_path / "README.md", "# A dataset")
    opened = open_source(str(tmp_path))
    assert [text.startswith((train, '{"text": "' + train)) for text in texts(opened.train)] == [True]
    assert [text.startswith((held_out, '{"text": "' + held_out)) for text in texts(opened.held_out)] == [True]


def test_the_configs_of_a_readme_name_the_splits(tmp_path):
    fill(tmp_path, ["en/a.jsonl", "en/b.jsonl", "fr/a.jsonl", "fr/test.jsonl"])
    english = "- config_name: en\n  data_files:\n  - {split: train, path: en/b*}\n  - {split: test, path: [en/a.jsonl]}\n"
    with_card(tmp_path, f"configs:\n{english}- config_name: fr\n  data_dir: fr\n")
    with pytest.raises(DataError, match=r"en, fr.*--dataset_config_name"):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match="only en, fr"):
        open_source(str(tmp_path), config_name="de")
    en, fr = (open_source(str(tmp_path), config_name=name) for name in ("en", "fr"))
    assert texts(en.train) == ["en/b.jsonl"] and texts(en.held_out) == ["en/a.jsonl"]
    assert texts(fr.train) == ["fr/a.jsonl"] and texts(fr.held_out) == ["fr/test.jsonl"]
    assert texts(open_source(str(tmp_path), config_name="en", split="test").train) == ["en/a.jsonl"]


def test_the_commits_in_a_cache_of_the_hub_are_not_joined(tmp_path):
    (tmp_path / "refs").mkdir()
    for commit in ("a1", "b2"):
        (tmp_path / "snapshots" / commit).mkdir(parents=True)
        (tmp_path / "snapshots" / commit / "train.jsonl").write_text('{"text": "a"}\n')

    with pytest.raises(DataError, match="snapshots/COMMIT"):
        open_source(str(tmp_path))

    assert texts(open_source(str(tmp_path / "snapshots" / "b2")).train) == ["a"]


def test_a_readme_in_a_subfolder_is_no_data(tmp_path):
    fill(tmp_path, ["en/a.jsonl"])
    write(tmp_path / "en" / "README.md", "# English")
    with_card(tmp_path, "configs:\n- config_name: default\n  data_files: en/*\n")
    assert texts(open_source(str(tmp_path)).train) == ["en/a.jsonl"]


@pytest.mark.parametrize("path", ["../secret.jsonl", "/etc/passwd", "https://example.org/a.jsonl", "data/none-*"])
def test_a_readme_cannot_name_files_outside_of_its_folder(tmp_path, path):
    fill(tmp_path, ["secret.jsonl", "folder/a.jsonl"])
    with_card(tmp_path / "folder", f"configs:\n- config_name: default\n  data_files: {path}\n")
    with pytest.raises(DataError, match=r"a\.jsonl"):
        open_source(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    "header",
    [
        "configs: [1]\n",
        "configs: {a: b\n",
        "date: 2024-13-45\nconfigs: [1]\n",
        "configs:\n- config_name: a\n  data_files: [{split: train}]\n",
    ],
)
def test_a_readme_with_broken_configs_is_named(tmp_path, header):
    fill(tmp_path, ["a.jsonl"])
    with_card(tmp_path, header)
    with pytest.raises(DataError, match=r"README\.md"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "files, words",
    [
        (["data/train_sft-00000-of-00001.jsonl", "data/train_gen-00000-of-00001.jsonl"], "train_gen"),
        (["data/test-00000-of-00001.jsonl", "data/dev-00000-of-00001.jsonl"], "dev-00000-of-00001.jsonl"),
        (["train-test.jsonl"], "train-test.jsonl"),
        (["data/train.jsonl", "data/train.jsonl.zst"], "copy of train.jsonl,"),
        (["data/train.jsonl.gz", "data/train.jsonl.zst"], "copy of train.jsonl.gz,"),
    ],
)
def test_a_folder_whose_training_split_is_unclear_is_refused(tmp_path, files, words):
    fill(tmp_path, files)
    with pytest.raises(DataError, match=words):
        open_source(str(tmp_path))


HELD_OUT = ["validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"]
OTHERS = ["train", "training", "trainer", "latest", "a", "train-0", "my_test", "test.v1", "dev set", "0test1", "__dev", ".val"]
NAMES = st.sampled_from([*HELD_OUT, *OTHERS])
FOLDERS = st.sampled_from(["", "data/", "data/train/", "test/", "x/dev_1/", "x/y/", "__x/", ".x/", "my-train/"])
LAYOUTS = st.lists(
    st.tuples(FOLDERS, NAMES, st.sampled_from(["", "-00000-of-00001", "_1"])), min_size=1, max_size=5, unique=True
)


@settings(max_examples=40, deadline=None)
@example([("", "train", ""), ("x/", "a", ""), ("test/", "a", "")])
@given(LAYOUTS)
def test_splits_of_a_folder_are_those_of_datasets(layout):
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    with TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, [f"{inside}{stem}{number}.csv" for inside, stem, number in layout])
        try:
            expected = DataFilesDict.from_patterns(get_data_patterns(name), base_path=name)
        except EmptyDatasetError:
            expected = {}
        except ValueError:  # datasets refuses some names of splits
            reject()
        by_split = {split: {str(Path(file).relative_to(folder)) for file in files} for split, files in expected.items()}
        shared = sum(map(len, by_split.values())) > len(set().union(*by_split.values()))
        try:
            opened = open_source(name)
        except DataError:
            assert shared or "train" not in by_split
            return
        trained, held_out = set(texts(opened.train)), set(texts(opened.held_out) if opened.held_out else [])
        assert not shared and not trained & held_out
        if "train" in by_split:
            assert trained == by_split["train"]
            assert held_out == next((by_split[split] for split in HELD_OUT if split in by_split), set())
        else:
            assert not any(trained & by_split.get(split, set()) for split in HELD_OUT)


def test_held_out_data_may_have_no_training_split(tmp_path, monkeypatch):
    import datasets

    fill(tmp_path, ["files/val-0.jsonl", "files/val-1.jsonl", "both/test.jsonl", "both/train.jsonl", "train/train.jsonl"])
    datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS[:2])).save_to_disk(str(tmp_path / "saved"))
    held_out = {name: texts(open_held_out(str(tmp_path / name))) for name in ("files", "both", "train", "saved")}
    assert held_out == {
        "files": ["files/val-0.jsonl", "files/val-1.jsonl"],
        "both": ["both/test.jsonl"],
        "train": ["train/train.jsonl"],
        "saved": ["line 0", "line 1"],
    }
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nothing.jsonl"):
        with pytest.raises(DataError, match=name):
            open_held_out(str(tmp_path / name))
    requests = []

    def refuse(*request, streaming):
        requests.append(request)
        raise DataError("no such dataset")

    monkeypatch.setattr(sources, "_hub", refuse)
    with pytest.raises(DataError, match="no such dataset"):
        open_held_out("owner/name")
    assert len(requests) == 1


def test_the_choice_of_splits_is_said(tmp_path):
    fill(tmp_path, ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "data/extra-00000-of-00001.jsonl"])
    opened = open_source(str(tmp_path))
    used, replaced = opened.describe(uses_held_out=True), opened.describe(uses_held_out=False)
    assert used.startswith("trains on split train (1 file), holds out split test (1 file)") and "extra" in used
    assert "holds out" not in replaced and "does not use split test" in replaced
    alone = write(tmp_path / "alone.jsonl", LINES)
    assert open_source(alone).describe(uses_held_out=True) == ""


def test_a_split_that_is_not_there_is_not_all_of_it(tmp_path):
    for name in ("a.jsonl", "train-1.jsonl"):
        write(tmp_path / name, LINES)
    for path in (tmp_path, tmp_path / "a.jsonl"):
        with pytest.raises(DataError, match="split"):
            open_source(str(path), split="dev")
    with pytest.raises(DataError, match="split"):
        open_source("embedded:chatterbot", split="test")
    write(tmp_path / "train-2.csv", "text,n\na,1\n")
    with pytest.raises(DataError, match=r"several kinds: \.csv, \.jsonl"):
        open_source(str(tmp_path))


def test_the_same_bytes_of_another_kind_are_other_data(tmp_path):
    one, other = (open_source(write(tmp_path / name, LINES)).train for name in ("rows.txt", "rows.jsonl"))
    assert one.digest() != other.digest() and one.sketch() != other.sketch()


@pytest.mark.parametrize(
    "content, texts",
    [
        ('{"text": "a", "data": []}', ["a"]),
        ('\n\n{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ('\ufeff[{"text": "a"}]', ["a"]),
    ],
)
def test_json_files_are_arrays_or_lines(tmp_path, content, texts):
    for name in ("some.json", "SOME.JSON"):
        source = open_source(write(tmp_path / name, content)).train
        rows = [row if isinstance(row, dict) else json.loads(row) for _, row, _ in source.read()]
        assert [row["text"] for row in rows] == texts


def tool_rows() -> list[dict]:
    """Two chats whose tools and calls have different keys, as those of different tools do."""
    rows = []
    for name, arguments in (("weather", {"city": "Oslo"}), ("add", {"a": 2, "b": [{"c": 3}]}), ("now", {})):
        call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
        properties = {key: {"type": "string"} for key in arguments}
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        messages = [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Done"},
        ]
        rows.append({"messages": messages, "tools": [tool]})
    return rows


def chats(path: object) -> list[Chat]:
    rows = [row if isinstance(row, dict) else json.loads(row) for _, row, _ in open_source(str(path)).train.read()]
    return [parse("messages", row) for row in rows]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_nulls_that_a_table_adds_to_tools_and_calls_are_left_out(tmp_path, kind):
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = tool_rows()
    if kind == "saved":
        path = tmp_path / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    else:
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert chats(path) == chats(lines) == [parse("messages", row) for row in rows]


def test_a_null_that_a_user_wrote_in_json_is_data(tmp_path):
    (row,) = tool_rows()[:1]
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo", "day": None}

    (chat,) = chats(write(tmp_path / "rows.jsonl", json.dumps(row)))

    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "day": None}


def test_an_empty_cell_of_a_table_of_numbers_is_no_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"instruction": "Two?", "input": float("nan"), "output": "Four."}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    ((_, row, _),) = open_source(str(tmp_path / "rows.parquet")).train.read()

    assert parse("instruction", row).messages[0]["content"] == "Two?"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_have_is_named(constant):
    row = parse_row(b'{"text": "a", "score": %b}' % constant.encode())

    assert isinstance(row, Malformed) and constant in row.reason and "column" in row.reason


def test_suffixes_in_capitals_are_the_same_types(tmp_path):
    write(tmp_path / "TRAIN.JSONL.GZ", gzip.compress(b"\xef\xbb\xbf" + LINES.encode(), mtime=0))
    plain = open_source(write(tmp_path / "rows.jsonl", LINES)).train
    assert [row for _, row, _ in open_source(str(tmp_path / "TRAIN.JSONL.GZ")).train.read()] == [r for _, r, _ in plain.read()]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("odd.docx", "x", "unknown file type '.docx'"),
        ("latin.txt", b"caf\xe9", "not UTF-8 from byte 3 on. If it is Latin-1"),
        ("bad.json", '[{"text": "a"},\n {"text"', "sample 1: not valid JSON"),
        ("bare.json", '[{"text": "a"}\n\n {"text": "b"}]', "sample 0: not valid JSON"),
        ("open.json", '[{"text": "a"},\n', "sample 1: not valid JSON"),
        ("more.json", '[{"text": "a"}]\n[]', "something follows the array"),
        ("nan.json", '[{"text": NaN}]', "sample 0: not valid JSON: NaN"),
        ("latin.json", b'[{"text": "caf\xe9"}]', "not UTF-8. If it is Latin-1 or Windows-1252"),
        ("wide.jsonl", LINES.encode("utf-16"), "it is UTF-16, and UTF-8 is expected"),
        ("wide.csv", "\ufefftext\na\n".encode("utf-16-be"), "it is UTF-16"),
        ("pointer.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n", "git lfs pull"),
        (
            "twice.jsonl.gz",
            gzip.compress(gzip.compress(LINES.encode(), mtime=0), mtime=0),
            "compressed with gzip, which its name",
        ),
        ("unnamed.jsonl", zstandard.ZstdCompressor().compress(LINES.encode()), "compressed with zstd, which its name"),
        ("cut.txt.zst", zstandard.ZstdCompressor().compress(LINES.encode() * 100)[:-30], "cannot be read (OSError"),
        ("open.csv", 'text,n\na,1\nb,2\nc,"3\nd,4\n', "open.csv, the row that begins on line 4: its quotes are not closed"),
        ("tail.tsv", 'text\tn\n"a" and b\t1\n', "tail.tsv, the row that begins on line 2: its quotes are not closed"),
        ("twice.csv", "text,text\na,b\n", "its header has the column 'text' twice"),
        ("cut.jsonl.gz", gzip.compress(LINES.encode() * 100, mtime=0)[:-30], "cannot be read (EOFError"),
        ("no.parquet", "PAR", "cannot be read (ArrowInvalid"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        list(open_source(path).train.read())
    assert message in str(caught.value) and name in str(caught.value)


def test_columns_of_one_name_are_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    arrays = [pyarrow.array(["first"]), pyarrow.array(["second"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["text", "text"]), tmp_path / "a.parquet")

    with pytest.raises(DataError, match="have the same name"):
        list(open_source(str(tmp_path / "a.parquet")).train.read())


def test_a_table_row_of_another_width_is_one_bad_sample(tmp_path):
    path = write(tmp_path / "a.csv", "text,n\na,1\nb\nc,3,4\nd,5\n")
    rows = [row for _, row, _ in open_source(path).train.read()]
    assert rows[1:3] == [Malformed("1 fields where the header has 2"), Malformed("3 fields where the header has 2")]
    assert rows[3]["text"] == "d"


@pytest.mark.parametrize("name", ["./nothing", "nothing.jsonl", "~nobody-here/x.jsonl", "embedded:nothing"])
def test_what_is_not_there(name):
    with pytest.raises(DataError, match=r"no such (file or folder|embedded dataset\. There are: chatterbot, stdlib)"):
        open_source(name)


def test_a_missing_split_names_those_there_are(tmp_path):
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="there is no split 'dev', only train"):
        open_source(str(tmp_path / "saved"), split="dev")


def peak(path) -> int:
    """Bytes of Python's memory that reading a source takes at most."""
    list(open_source(write(path.with_name("warm.txt"), "x")).train.read())
    tracemalloc.start()
    for _ in open_source(str(path)).train.read():
        pass
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.txt", "a.json.gz", "a.json"])
def test_what_unpacks_to_much_is_read_in_parts(tmp_path, monkeypatch, name):
    """The memory that reading takes is bounded by the parts, whatever a small file unpacks to."""
    monkeypatch.setattr(files, "TEXT_BLOCK", 1 << 16)
    monkeypatch.setattr(files, "JSON_BLOCK", 1 << 16)
    line = "word " * 20
    content = (
        "[" + ",\n".join([json.dumps({"text": line})] * 30_000) + "]" if ".json" in name else (line + "\n") * 30_000
    ).encode()
    assert len(content) > 2.8 * (1 << 20)
    if name.endswith(".gz"):
        content = gzip.compress(content, 1, mtime=0)
    elif name.endswith(".zst"):
        content = zstandard.ZstdCompressor().compress(content)
    path = tmp_path / name
    path.write_bytes(content)
    assert peak(path) < 1.9 * (1 << 20)


@pytest.mark.parametrize("content", ["one\ntwo\n\nthree", "é" * 99, "é\n" * 40 + "x" * 50, "a\n", "\ufeffone\ntwo\r\nthree\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_in_parts_is_the_same_text(tmp_path, monkeypatch, content, packed):
    monkeypatch.setattr(files, "TEXT_BLOCK", 16)
    data = content.encode()
    path = write(tmp_path / ("a.txt.gz" if packed else "a.txt"), gzip.compress(data, mtime=0) if packed else data)
    source = open_source(path).train
    parts = [row for _, row, _ in source.read()]
    assert "".join(part["text"] for part in parts) == content.removeprefix("\ufeff")
    assert [(part.begins, part.ends) for part in parts] == [(i == 0, i == len(parts) - 1) for i in range(len(parts))]
    assert len(parts) > 1 or len(data) < 32
    assert all(len(part["text"].encode()) <= 32 for part in parts)
    assert sum(cost for _, _, cost in source.read()) <= source.total
    monkeypatch.setattr(files, "SHARD_BYTES", 20)
    shards = [row for shard in source.shards() for _, row, _ in shard.read()]
    assert "".join(part["text"] for part in shards) == content.removeprefix("\ufeff")
    assert [part.begins for part in shards] == [True] + [False] * (len(shards) - 1)
    assert [part.ends for part in shards] == [False] * (len(shards) - 1) + [True]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(values, max_size=5), st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 9))
@example([12345, 1.5e3, -1, "a]", {"b": ["[,"]}], None, False, 1)
def test_any_array_is_read_as_it_is_written(tmp_path_factory, rows, indent, escaped, part):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=escaped), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "JSON_BLOCK", part)
        found = [(where, row) for where, row, _ in open_source(str(path)).train.read()]
    assert found == [(f"sample {i}", row) for i, row in enumerate(rows)]


def test_a_sample_of_an_array_has_the_limit_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_LIMIT", 1000)
    monkeypatch.setattr(files, "JSON_BLOCK", 100)
    path = write(tmp_path / "a.json.gz", gzip.compress(json.dumps([{"text": "a"}, {"text": "b" * 2000}]).encode()))
    with pytest.raises(DataError, match=r"a\.json\.gz, sample 1: .*longer than "):
        list(open_source(path).train.read())


class Stale(io.RawIOBase):
    """A file on a network disk that does not answer."""

    def readable(self):
        return True

    def readinto(self, buffer):
        raise OSError(errno.ESTALE, "Stale file handle")


def test_an_error_of_the_disk_may_be_gone_at_the_next_start_and_damage_is_not(tmp_path, monkeypatch):
    damaged = write(tmp_path / "damaged.jsonl.gz", gzip.compress(LINES.encode())[:-9])
    source = open_source(write(tmp_path / "a.jsonl", LINES)).train
    with pytest.raises(DataError) as of_content:
        list(open_source(damaged).train.read())
    monkeypatch.setattr(files, "open_regular", lambda file: io.BufferedReader(Stale()))
    with pytest.raises(DataError) as of_disk:
        list(source.read())
    assert (of_content.value.exit_code, of_disk.value.exit_code) == (2, 1)


def test_an_error_of_the_disk_comes_from_the_process_that_reads_parquet(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet")).train

    def fail(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(parquet_rows, "_send_rows", fail)
    with pytest.raises(SystemExit) as exit:
        parquet_rows._serve("a.parquet", "null", str(1 << 40), "1")
    monkeypatch.setattr(parquet_rows, "_START", f"import sys; sys.stderr.write('stale'); sys.exit({exit.value.code})")
    with pytest.raises(SourceError, match=r"a\.parquet.*stale"):
        list(source.read())


def test_a_dataset_without_its_owner_and_a_hub_that_does_not_answer(monkeypatch):
    import datasets

    def refuse(*arguments, **options):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    for streaming, exit_code in ((False, 2), (True, 1)):
        with pytest.raises(DataError, match="OWNER/NAME") as refused:
            open_source("wikitext", streaming=streaming)
        assert refused.value.exit_code == exit_code


def test_another_commit_than_the_one_asked_for_is_refused(tmp_path, monkeypatch):
    """`datasets` takes what its cache has if the hub does not answer."""
    import datasets

    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "train.jsonl", LINES)
    cached = datasets.load_dataset_builder(str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"))
    cached.hash = "a" * 40
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments, **options: cached)
    assert open_source("OWNER/NAME", revision="a" * 40).train.total == LINES.count("\n")
    with pytest.raises(SourceError, match=r"b{40}.*a{40}"):
        open_source("OWNER/NAME", revision="b" * 40)


def test_rows_that_were_read_before_a_lack_of_memory_come_once(tmp_path, monkeypatch):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": list("abcde")}), tmp_path / "a.parquet")

    class WithLittleMemory(pyarrow.parquet.ParquetFile):
        def iter_batches(self, batch_size, **options):
            for number, batch in enumerate(super().iter_batches(batch_size=2 if batch_size > 1 else 1, **options)):
                if batch_size > 1 and number == 1:
                    raise pyarrow.ArrowMemoryError("no memory")
                yield batch

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", WithLittleMemory)
    file = str(tmp_path / "a.parquet")
    batches = parquet_rows._batches(file, None, pyarrow.parquet.read_metadata(file))
    assert [row["text"] for batch in batches for row in batch.to_pylist()] == list("abcde")
