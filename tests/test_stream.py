"""A stream gives every row of every shard once a pass, from anywhere, and opens no shard that it does not need."""

from __future__ import annotations

import fcntl
import gzip
import json
import pickle
import threading
import time
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobook.config import ConfigError, OrderSettings, RecipeConfig
from zerobook.config_sources import parse
from zerobook.data import files, sources
from zerobook.data.batch_loader import BatchLayout, BatchLoader
from zerobook.data.prepare import Library
from zerobook.data.stream import BEHIND, Stream, row_number
from zerobook.data.templates import CausalEncoder
from zerobook.data.views import Documents, PreparedRows
from zerobook.errors import DataError
from zerobook.health import position
from zerobook.objective import NextToken

IN_ANY_ORDER = OrderSettings(group_by_length=False, datasets=None)
BY_LENGTH = OrderSettings(group_by_length=True, datasets=None)

FAR = 10**6


class Store:
    """Documents of one token: what a shard's rows are does not matter to a stream."""

    def __init__(self, rows):
        self.offsets = np.arange(rows + 1)
        self.loss_weights = np.ones(rows, np.int32)
        self.meta = {"tokens": rows, "report": {}, "bad_samples": []}


class Shards:
    """``sizes[dataset][shard]`` rows; remembers which shards were opened."""

    def __init__(self, *sizes):
        self.sizes = sizes
        self.opened = []
        self.forgotten = []

    def shard(self, dataset, index):
        self.opened.append((dataset, index))
        rows = self.sizes[dataset][index]
        return PreparedRows((Documents(Store(rows), np.arange(rows)),), "")

    def delete_shard(self, dataset, index):
        self.forgotten.append((dataset, index))


def stream(shards, **options):
    counts = [len(sizes) for sizes in shards.sizes]
    return Stream(
        shards=shards, counts=counts, fingerprint="", isolated=False, longest_sample=1, largest_id=1, **options
    )  # fmt: skip


def every_row(sizes, dataset=0):
    return {row_number(dataset, shard, row) for shard, rows in enumerate(sizes) for row in range(rows)}


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)


@given(sizes, st.integers(0, 9), st.data())
def test_a_pass_takes_each_row_once_and_goes_on_from_anywhere(sizes, seed, data):
    total = sum(sizes)
    order = stream(Shards(sizes)).order(IN_ANY_ORDER, seed=seed, weights=None)
    ids, cursor = order.take(0, 3 * total, FAR)
    assert cursor == 3 * total == len(ids)
    for first in range(0, 3 * total, total):
        assert set(ids[first : first + total].tolist()) == every_row(sizes)
    at = data.draw(st.integers(0, 3 * total - 1))
    shards = Shards(sizes)
    again = stream(shards).order(IN_ANY_ORDER, seed=seed, weights=None, passed=json.loads(json.dumps(order.passed)))
    assert again.take(at, 1, FAR)[0].tolist() == [ids[at]]
    assert len(shards.opened) == 1, "shards before the cursor are not opened again"
    assert again.take(at, 3 * total - at, FAR)[0].tolist() == ids[at:].tolist()
    assert order.epoch(3 * total) >= 3 - (sizes.count(0) > 0)


@given(sizes, sizes, st.integers(0, 9), st.integers(0, 90))
@settings(max_examples=30)
def test_streams_mix_by_weight_and_skip_samples(first, second, seed, cursor):
    order = stream(Shards(first, second)).order(IN_ANY_ORDER, seed=seed, weights=[3.0, 1.0])
    ids, _ = order.take(0, 120, FAR)
    owners = ids >> 56
    assert (owners == 1).sum() == 30 and (owners[:8] == 1).sum() == 2
    mine = ids[owners == 1][: sum(second)]
    assert set(mine.tolist()) <= every_row(second, dataset=1) and len(set(mine.tolist())) == len(mine)
    assert order.ids(cursor, 120).tolist() == ids[cursor:].tolist()
    skipped = stream(Shards(first, second)).without_samples([[ids[0], ids[0] + 1]])
    if sum(first) > 1:
        left, _ = skipped.order(IN_ANY_ORDER, seed=seed, weights=[3.0, 1.0]).take(0, 60, FAR)
        kept = ids[ids != ids[0]]
        assert left.tolist() == kept[:60].tolist(), "what is skipped uses up its places, and moves no other row"


def test_shards_come_mixed_and_their_order_changes_with_the_pass():
    order = stream(Shards([4] * 50)).order(IN_ANY_ORDER, seed=1, weights=None)
    shards = order.take(0, 400, FAR)[0][::4] >> 32
    first, second = shards[:50].tolist(), shards[50:].tolist()
    assert sorted(first) == sorted(second) == list(range(50)) and first != second and first != sorted(first)
    rows = order.take(0, 200, FAR)[0] & 0xFFFFFFFF
    assert len({tuple(r) for r in rows.reshape(50, 4).tolist()}) > 10


def test_an_empty_stream_is_said_to_be_empty():
    with pytest.raises(DataError, match="none of the shards has a row"):
        stream(Shards([0, 0])).order(IN_ANY_ORDER, seed=1, weights=None).take(0, 1, FAR)


class Maker:
    """In place of a process that prepares a shard."""

    started: list[tuple[int, int]] = []
    alive = False

    def __init__(self, *, args, **options):
        self.args = args

    def start(self):
        self.started.append(self.args[2])

    def is_alive(self):
        return self.alive


@pytest.mark.parametrize("alive", [False, True])
def test_shards_far_behind_are_deleted_and_those_ahead_made_by_others(monkeypatch, alive):
    monkeypatch.setattr(Maker, "started", [])
    monkeypatch.setattr(Maker, "alive", alive)
    monkeypatch.setattr("zerobook.data.stream.multiprocessing.get_context", lambda kind: SimpleNamespace(Process=Maker))
    shards = Shards([4] * 20)
    order = stream(shards, ahead=2).order(IN_ANY_ORDER, seed=1, weights=None)
    walk = [int(i) >> 32 for i in order.take(0, 40, FAR)[0][::4]]
    assert [index for _, index in shards.forgotten] == walk[: 10 - 1 - BEHIND]
    later = [int(i) >> 32 for i in order.take(0, 48, FAR)[0][::4]]
    if alive:
        assert Maker.started == later[1:3], "no more at a time than was asked for, however slow they are"
    else:
        assert Maker.started[:11] == later[1:12], "each of the following shards once, two ahead"


def test_shards_behind_empty_ones_are_deleted_too(monkeypatch):
    monkeypatch.setattr("zerobook.data.stream.multiprocessing.get_context", lambda kind: SimpleNamespace(Process=Maker))
    shards = Shards([4, 0] * 10)

    stream(shards, ahead=1).order(IN_ANY_ORDER, seed=1, weights=None).take(0, 40, FAR)

    kept = [key for key in dict.fromkeys(shards.opened) if key not in shards.forgotten]
    assert len(kept) <= BEHIND + 1 and len(shards.forgotten) == len(set(shards.forgotten))


def read(source):
    return [(row, where) for where, row, _ in source.read()]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60), st.booleans())
def test_lines_cut_anywhere_are_each_read_once(tmp_path_factory, lengths, shard, ended):
    lines = [json.dumps({"text": "é" * n + str(i)}, ensure_ascii=False) for i, n in enumerate(lengths)]
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_text("\n".join(lines) + "\n" * ended)
    text = tmp_path_factory.mktemp("text") / "a.txt"
    text.write_text("\n".join(lines) + "\n" * ended)
    before, files.SHARD_BYTES = files.SHARD_BYTES, shard
    try:
        cut = sources.open_source(str(file)).train.shards()
        texts = sources.open_source(str(text)).train.shards()
        assert len(cut) == max(1, -(-file.stat().st_size // shard))
        assert [json.loads(row) for part in cut for row, _ in read(part)] == [json.loads(line) for line in lines]
        assert "".join(row["text"] for part in texts for row, _ in read(part)) == text.read_text()
    finally:
        files.SHARD_BYTES = before


def test_other_sources_are_cut_where_they_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 300)
    monkeypatch.setattr(sources, "SHARD_ROWS", 10)
    rows = [{"text": f"row {i}"} for i in range(25)]
    folder = tmp_path / "folder"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=7)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:3]), folder / "b.parquet")
    shards = sources.open_source(str(folder)).train.shards()
    assert len(shards) == 3 and [row for part in shards for row, _ in read(part)] == rows + rows[:3]
    alone = sources.open_source(str(folder / "a.parquet")).train.shards()
    assert [where for part in alone for _, where in read(part)] == [f"row {i}" for i in range(25)]

    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert len(sources.open_source(str(packed)).train.shards()) == 1, "a compressed file is read from the front only"

    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    saved = sources.open_source(str(tmp_path / "saved")).train.shards()
    assert [len(read(part)) for part in saved] == [10, 10, 5] and [r for p in saved for r, _ in read(p)] == rows


def test_a_hub_dataset_is_read_shard_by_shard(tmp_path, monkeypatch):
    """The hub client, on files here: `datasets` streams a local folder by the same code."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": f"row {i}"} for i in range(9)]
    for part in range(3):
        lines = [json.dumps(row) for row in rows[3 * part : 3 * part + 3]]
        (folder / f"train-{part}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "validation.jsonl").write_text(json.dumps(rows[0]) + "\n")
    splits = sources._hub(str(folder), None, None, None, streaming=True)
    shards = splits.train.shards()
    assert [[row for row, _ in read(part)] for part in shards] == [rows[:3], rows[3:6], rows[6:]]
    assert [row for row, _ in read(splits.train)] == rows and [row for row, _ in read(splits.held_out)] == rows[:1]
    assert (
        splits.train.digest()
        == sources._hub(str(folder), None, None, None, streaming=True).train.digest()
        != splits.held_out.digest()
    )
    assert len({part.digest() for part in shards}) == 3


def test_small_files_of_a_folder_share_a_shard_and_lose_one_block_together(tmp_path, library, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(f"page {number} " * 5)
    whole = library(train_file=str(folder), validation_split_percentage=0)
    tokens = len(whole.open(whole.tokenize(1)).train) * 64

    streamed = library(train_file=str(folder), streaming=True, max_train_steps=1).stream(0)
    monkeypatch.setattr(files, "SHARD_BYTES", 5 * 40)
    shards = sources.open_source(str(folder)).train.shards()

    assert streamed.counts == [1]
    assert len(streamed.open_shard(0, 0)) * 64 == tokens > 0
    assert [len(read(shard)) for shard in shards] == [5, 5, 2]
    assert [where.split(",")[0] for shard in shards for _, where in read(shard)] == [f"{i:02}.txt" for i in range(12)]


@pytest.fixture
def library(tmp_path, tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")

    def make(objective=None, **keys):
        config = RecipeConfig(cache_dir=str(tmp_path / "cache"), **keys)
        return Library(config, tokenizer, CausalEncoder(tokenizer, length=64), objective or NextToken())

    return make


def test_a_stream_trains_on_what_whole_data_has(tiny, tmp_path, library, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 2000)
    keys = dict(train_file=str(tiny / "chats.jsonl"), validation_split_percentage=0)
    whole = library(**keys)
    whole = whole.open(whole.tokenize(1)).train
    made = library(streaming=True, max_train_steps=1, **keys)
    streamed = made.stream(0)
    assert streamed.counts[0] > 3 and not list((tmp_path / "cache" / "data").glob("stream-*")), "nothing is prepared yet"
    ids, _ = streamed.order(IN_ANY_ORDER, seed=3, weights=None).take(0, len(whole), FAR)
    assert len(set(ids.tolist())) == len(whole)
    assert sorted(streamed[i]["input_ids"].tobytes() for i in ids) == sorted(r["input_ids"].tobytes() for r in whole)
    assert sorted(streamed.loss_weights_of(ids)) == sorted(whole.loss_weights) and streamed.lengths_of(ids).max() <= 64
    folders = list((tmp_path / "cache" / "data").glob("stream-*/shard-*/meta.json"))
    assert len(folders) == streamed.counts[0]
    order, layout = streamed.order(BY_LENGTH, seed=3, weights=None), BatchLayout(world_size=1, rank=0, micro=4)
    loader = BatchLoader(streamed, order, layout, lambda rows: rows, end=FAR, workers=1)
    plan, batches = next(iter(loader))
    assert plan.samples == 4 and [len(r["input_ids"]) for r in next(batches)] == streamed.lengths_of(plan.ids).tolist()
    made.delete_shard(0, 0)
    assert len(made.shard(0, 0)) and made.stream(0).fingerprint == streamed.fingerprint


def test_a_damaged_shard_is_prepared_again(tiny, tmp_path, library):
    keys = dict(train_file=str(tiny / "chats.jsonl"), streaming=True, max_train_steps=1)
    store = library(**keys).shard(0, 0).views[0].store
    content = (store.folder / "input_ids.bin").read_bytes()
    (store.folder / "input_ids.bin").unlink()
    (store.folder / "input_ids.bin").write_bytes(bytes(len(content)))
    assert library(**keys).shard(0, 0).views[0].store.ids.tobytes() == content


def test_a_wait_for_a_shard_that_another_process_prepares_is_progress(tiny, library):
    """The watch of the ranks ends a run without progress."""
    keys = dict(train_file=str(tiny / "chats.jsonl"), streaming=True, max_train_steps=1)
    lock = library(**keys).shard(0, 0).views[0].store.folder.with_name("shard-00000.lock")
    with open(lock, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (other, fcntl.LOCK_UN))
        release.start()
        began = time.monotonic()
        library(**keys).shard(0, 0)
    assert position.here().since > began + 0.1


def test_a_stream_is_prepared_by_other_processes_when_the_objective_has_a_second_model(tiny, library):
    objective = NextToken()
    made = library(objective, train_file=str(tiny / "chats.jsonl"), streaming=True, max_train_steps=1)
    # A model that a strategy has sharded cannot be pickled, like this object.
    objective.reference_model = threading.Lock()
    assert len(pickle.loads(pickle.dumps(made)).shard(0, 0))


def test_what_changed_under_a_stream_is_another_stream(tiny, tmp_path, library):
    text = (tiny / "chats.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text)
    keys = dict(train_file=str(tmp_path / "a.jsonl"), streaming=True, max_train_steps=1)
    before = library(**keys).stream(0).fingerprint
    assert library(packing=True, **keys).stream(0).fingerprint != before
    (tmp_path / "a.jsonl").write_text(text + text.splitlines()[0] + "\n")
    assert library(**keys).stream(0).fingerprint != before


def test_a_bad_sample_in_a_shard_says_where_it_stands(tiny, tmp_path, library, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 1000)
    text = (tiny / "chats.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text + "{broken\n")
    keys = dict(train_file=str(tmp_path / "a.jsonl"), streaming=True, max_train_steps=1)
    last = library(**keys).stream(0).counts[0] - 1
    with pytest.raises(DataError, match=f"the line at byte {len(text.encode())}: not valid JSON.*skip"):
        library(**keys).shard(0, last)
    part = library(on_bad_sample="skip", **keys).shard(0, last)
    assert "not valid JSON" in part.views[0].store.meta["bad_samples"][0]


def test_the_shards_of_a_stream_have_the_format_of_its_first_sample(tiny, tmp_path, library, monkeypatch):
    chats = (tiny / "chats.jsonl").read_text()
    monkeypatch.setattr(files, "SHARD_BYTES", len(chats.encode()))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text(chats)
    (folder / "b.jsonl").write_text('{"text": "a document"}\n{"id": 1}\n')
    keys = dict(train_file=str(folder), streaming=True, max_train_steps=1)

    stream = library(on_bad_sample="skip", **keys)
    sizes = [len(stream.shard(0, index)) for index in range(2)]

    assert sizes[0] > 0 and sizes[1] == 0
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: expected messages, it has text"):
        library(**keys).shard(0, 1)


def test_streaming_says_what_it_needs(tiny, tmp_path):
    chats = str(tiny / "chats.jsonl")
    with pytest.raises(ConfigError) as caught:
        parse(RecipeConfig, ["--streaming", "--train_file", chats, "--max_train_samples", "4"])
    assert "Give --max_train_steps" in str(caught.value) and "Drop them, or streaming" in str(caught.value)
    some_rows = RecipeConfig(streaming=True, max_train_steps=2, datasets=[{"path": chats, "split": "train[:10%]"}])
    assert any("Drop them, or streaming" in problem for problem in some_rows.problems())
    file = tmp_path / "mix.yaml"
    file.write_text(f"streaming: true\nmax_train_steps: 2\ndatasets:\n- path: {chats}\n- path: {chats}\n  name: b\n")
    with pytest.raises(ConfigError, match="Give each entry of datasets a weight"):
        parse(RecipeConfig, ["--config", str(file)])


def test_a_stream_of_which_all_is_left_out_says_so():
    empty = stream(Shards([3, 2])).without_samples([(row_number(0, 0, 0), row_number(0, 2, 0))])
    order = empty.order(IN_ANY_ORDER, seed=1, weights=None)
    with pytest.raises(DataError, match="all samples are left out"):
        order.take(0, 4, FAR)
    most = stream(Shards([3, 2])).without_samples([(row_number(0, 0, 0), row_number(0, 1, 1))])
    taken, _ = most.order(IN_ANY_ORDER, seed=1, weights=None).take(0, 40, FAR)
    assert set(taken.tolist()) == {row_number(0, 1, 1)} and len(taken) == 40, "one row is left: it comes in every pass"
