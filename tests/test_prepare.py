"""Prepared once, found again, never half made; every bad sample has its place and reason."""

from __future__ import annotations

import copy
import errno
import fcntl
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tokenizers.processors import TemplateProcessing

import zerobook.data.files as files
from recipes.lora_finetune import LoraConfig, LoraFinetune
from tests.alone import train
from zerobook.config import DatasetSpec, RecipeConfig
from zerobook.constants import IGNORE
from zerobook.data import prepare, verification
from zerobook.data.prepare import Library
from zerobook.data.templates import CausalEncoder
from zerobook.data.views import Blocks, Documents, Packs
from zerobook.errors import CheckpointError, ConfigError, DataError
from zerobook.objective import NextToken
from zerobook.utils.reading import file_digest


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


@pytest.fixture
def shelf(tmp_path, tokenizer):
    def make(length=64, workers=1, **keys):
        config = LoraConfig(**({"cache_dir": str(tmp_path / "cache"), "max_seq_length": length} | keys))
        library = Library(config, tokenizer, LoraFinetune(config).encoder(tokenizer), NextToken())
        return library.open(library.tokenize(workers))

    return make


def chats(path, count, start=0):
    lines = []
    for i in range(start, start + count):
        turns = [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"{i} is " + "word " * (i % 9)}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_splits_limits_and_views(tmp_path, shelf):
    file = chats(tmp_path / "a.jsonl", 40)
    data = shelf(train_file=file, validation_split_percentage=10)
    assert (len(data.train), {k: len(v) for k, v in data.held_out.items()}) == (36, {"a": 4})
    train, held = data.train.views[0].chosen, data.held_out["a"].views[0].chosen
    assert sorted([*train, *held]) == list(range(40))
    assert shelf(train_file=file, validation_split_percentage=10).held_out["a"].views[0].chosen.tolist() == held.tolist()
    assert len(shelf(train_file=file, validation_split_percentage=10, max_train_samples=7, max_eval_samples=2).train) == 7
    packed = shelf(train_file=file, validation_split_percentage=10, packing=True)
    assert isinstance(packed.train.views[0], Packs) and packed.train.isolated and not data.train.isolated
    assert packed.train.loss_weights.sum() == data.train.loss_weights.sum()
    assert {data.train.fingerprint} != {packed.train.fingerprint}
    assert shelf(train_file=file, validation_file=chats(tmp_path / "v.jsonl", 3)).held_out["validation"].sizes == [3]


def test_a_limit_of_packs_takes_samples_of_all_lengths(tmp_path, shelf):
    """Packs are made longest sample first."""
    file = tmp_path / "a.jsonl"
    lines = [{"question": "a", "answer": "b" * (40 if number % 4 else 200)} for number in range(400)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"length": 256, "train_file": str(file), "validation_split_percentage": 50, "packing": True}
    (every,) = shelf(**keys).held_out["a"].views
    assert len(every) > 40

    (limited,) = shelf(max_eval_samples=20, **keys).held_out["a"].views

    assert len(limited) == 20
    lengths = limited.stops - limited.starts
    assert lengths[limited.packing.members].mean() == pytest.approx(lengths.mean(), rel=0.2)
    assert [sum(len(limited.samples(row)) for row in range(20))] == [len(limited.packing.members)]


def test_all_tokens_of_chats_are_counted_by_the_loss_where_the_config_says_so(tmp_path, shelf):
    """The two are other prepared data of the same file."""
    file = chats(tmp_path / "a.jsonl", 4)
    shelf(train_file=file, validation_split_percentage=0)
    view = shelf(train_file=file, validation_split_percentage=0, assistant_only_loss=False).train.views[0]
    # Nothing predicts the first token of a row.
    assert view.loss_weights.tolist() == (view.lengths - 1).tolist()


def test_text_becomes_whole_blocks_and_the_end_is_held_out(tmp_path, shelf, tokenizer):
    text = "".join(f"line {i}\n" for i in range(400))
    (tmp_path / "book.txt").write_text(text)
    data = shelf(length=16, train_file=str(tmp_path / "book.txt"), validation_split_percentage=10)
    assert isinstance(data.train.views[0], Blocks) and set(data.train.lengths) == {16} and set(data.train.loss_weights) == {15}
    decoded = tokenizer.decode(np.concatenate([data.train[i]["input_ids"] for i in range(len(data.train))]))
    assert text.startswith(decoded)
    held = data.held_out["book"]
    tail = tokenizer.decode(np.concatenate([held[i]["input_ids"] for i in range(len(held))]))
    assert tail in text and text.index(tail) >= len(decoded)
    assert 0.08 < len(held) / (len(held) + len(data.train)) < 0.12


def test_one_of_several_texts_is_not_prepared_as_the_only_one(tmp_path, shelf):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("word " * 999)
    (tmp_path / "texts" / "empty.txt").touch()
    files = (tmp_path / "texts" / "a.txt", tmp_path / "texts")
    assert [shelf(train_file=str(file)).train.views[0].store.meta["lone_text"] for file in files] == [True, False]


def test_long_text_is_tokenized_in_pieces_that_leave_no_seam(tmp_path, shelf, tokenizer, monkeypatch):
    import zerobook.data.tokenize as tokenize

    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    monkeypatch.setattr(tokenize, "TEXT_PIECE", 100)
    store = shelf(length=16, train_file=str(tmp_path / "book.txt")).train.views[0].store
    ids = np.asarray(store.ids).tolist()
    assert tokenizer.decode(ids) == text + tokenizer.eos_token and ids.count(tokenizer.eos_token_id) == 1


def test_a_document_begins_and_ends_once_however_it_is_cut(tmp_path, tokenizer, monkeypatch):
    import zerobook.data.tokenize as tokenize

    made = copy.deepcopy(tokenizer)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    texts = ["".join(f"line {i}\n" for i in range(first, first + 30)) for first in (0, 100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(tokenize, "TEXT_PIECE", 100)
    keys = dict(cache_dir=str(tmp_path / "cache"), train_file=str(tmp_path / "a.jsonl"), validation_split_percentage=0)
    for packing in (False, True):
        library = Library(RecipeConfig(packing=packing, **keys), made, CausalEncoder(made, length=16), NextToken())
        view = library.open(library.tokenize(1)).train.views[0]
        ids = np.asarray(view.store.ids).tolist()
        assert made.decode(ids) == "".join(f"<|im_start|>{text}<|im_end|>" for text in texts)
        begins = [part for row in view for part in np.split(row["input_ids"], np.flatnonzero(row["input_ids"] == 1))]
        assert sum(part[:1].tolist() == [1] for part in begins) == 2, "blocks and packs hold what was prepared"


def test_prepared_data_is_found_again_and_made_anew_when_anything_changed(tmp_path, shelf):
    file = tmp_path / "a.jsonl"
    chats(file, 20)
    folders = tmp_path / "cache" / "data"
    first = shelf(train_file=str(file))
    (made,) = [f for f in folders.iterdir() if f.is_dir()]
    stamp = made.stat().st_mtime_ns
    assert shelf(train_file=str(file)).train.fingerprint == first.train.fingerprint
    shelf(train_file=str(file), packing=True, validation_split_percentage=20)
    assert [f for f in folders.iterdir() if f.is_dir()] == [made] and made.stat().st_mtime_ns == stamp, "only views differ"
    chats(file, 21)
    second = shelf(train_file=str(file))
    assert second.train.fingerprint != first.train.fingerprint and len([f for f in folders.iterdir() if f.is_dir()]) == 2
    shelf(train_file=str(file), length=24)
    assert len([f for f in folders.iterdir() if f.is_dir()]) == 3, "chats are cut to the length"


def test_a_text_that_is_read_in_parts_is_one_document(tmp_path, shelf, tokenizer, monkeypatch):
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "many").mkdir()
    for name in "abcdef":
        (tmp_path / "many" / f"{name}.txt").write_text(name + text)
    whole = shelf(length=16, train_file=str(tmp_path / "book.txt.gz"))
    monkeypatch.setattr(files, "TEXT_BLOCK", 100)
    parts = shelf(length=16, train_file=str(tmp_path / "book.txt.gz"), cache_dir=str(tmp_path / "parts"))
    assert parts.train.views[0].store.meta["documents"] > 1
    for one, other in ((whole.train, parts.train), (whole.held_out["book"], parts.held_out["book"])):
        assert [row["input_ids"].tolist() for row in one] == [row["input_ids"].tolist() for row in other]
    ids = np.asarray(parts.train.views[0].store.ids)
    assert tokenizer.decode(ids) == text + tokenizer.eos_token
    # parts of a document are held out together, and count as one sample
    data = shelf(length=16, train_file=str(tmp_path / "many"), validation_split_percentage=34)
    view = data.held_out["many"].views[0]
    samples = view.store.samples[np.searchsorted(view.store.offsets, view.starts, side="right") - 1]
    assert len(view.starts) > 2 and len(set(samples.tolist())) == 2
    two = shelf(length=16, datasets=[DatasetSpec(path=str(tmp_path / "many"), limit=2)], validation_split_percentage=0)
    assert tokenizer.decode(np.asarray(two.train.views[0].store.ids)) == "".join(f"{n}{text}<|im_end|>" for n in "ab")


def test_nothing_is_read_behind_a_limit(tmp_path, shelf):
    (tmp_path / "rows.json").write_text('[{"text": "one"}, {"text": "two"}, {"text": ')
    data = shelf(length=2, datasets=[DatasetSpec(path=str(tmp_path / "rows.json"), limit=2)], validation_split_percentage=0)
    assert data.train.views[0].store.meta["documents"] == 2


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", '{"documents": 3}', None])
def test_a_broken_folder_in_the_cache_is_made_again(tmp_path, shelf, broken):
    a, b = chats(tmp_path / "a.jsonl", 20), chats(tmp_path / "b.jsonl", 20, start=50)
    first = shelf(train_file=a)
    meta = first.train.views[0].store.folder / "meta.json"
    if broken is None:
        meta.unlink()
    else:
        meta.write_text(broken)
    assert len(shelf(train_file=b).train) == 19, "another dataset is prepared beside it"
    again = shelf(train_file=a)
    assert again.train.fingerprint == first.train.fingerprint and len(again.train) == 19


def warnings_of(shelf, **flags) -> list[str]:
    """The warnings about held-out samples that are trained on."""
    return prepare.describe_trained_held_out(LoraConfig(**flags), shelf(**flags))


def test_a_validation_file_that_is_trained_on_is_said(tmp_path, shelf):
    a, copy, b = (chats(tmp_path / f"{name}.jsonl", 20, start=start) for name, start in (("a", 0), ("copy", 0), ("b", 50)))
    assert not warnings_of(shelf, train_file=a, validation_file=b)
    (warning,) = warnings_of(shelf, train_file=a, validation_file=copy)
    assert "a.jsonl" in warning and "'validation'" in warning

    # A file of a folder that is trained on, and a folder that has a file that is trained on.
    for name, content in (("a", a), ("b", b)):
        (tmp_path / name / "more").mkdir(parents=True)
        (tmp_path / name / "empty.jsonl").touch()
        shutil.copy(content, tmp_path / name)
        chats(tmp_path / name / "more" / "c.jsonl", 9, start=70 if name == "a" else 90)
    folders = {name: str(tmp_path / name) for name in ("a", "b")}
    assert len(warnings_of(shelf, train_file=folders["a"], validation_file=a)) == 1
    assert len(warnings_of(shelf, train_file=b, validation_file=folders["b"])) == 1
    assert not warnings_of(shelf, train_file=folders["a"], validation_file=folders["b"])


def test_entries_of_one_file_that_hold_out_different_samples_are_said(tmp_path, shelf):
    a, other = chats(tmp_path / "a.jsonl", 40), chats(tmp_path / "other.jsonl", 40, start=50)
    equal = [DatasetSpec(path=a, weight=1), DatasetSpec(path=a, name="again", weight=2), DatasetSpec(path=other)]
    assert not warnings_of(shelf, datasets=equal)
    # Each of the two trains on samples that the other one holds out.
    different = [DatasetSpec(path=a), DatasetSpec(path=a, name="part", limit=20)]
    assert len(warnings_of(shelf, datasets=different)) == 2
    # Without held-out data there is nothing to say.
    assert not warnings_of(shelf, datasets=different, validation_split_percentage=0)


@pytest.mark.parametrize("name", ["input_ids.bin", "labels.bin", "supervised.npy", "input_ids.offsets.npy"])
def test_a_folder_with_a_file_that_was_cut_off_is_made_again(tmp_path, shelf, name):
    """A loss of power leaves a file so. The ids that are missing would be rows without tokens."""
    a = chats(tmp_path / "a.jsonl", 20)
    first = shelf(train_file=a)
    file = first.train.views[0].store.folder / name
    whole = file.read_bytes()
    del first
    file.unlink()  # not written over: a run may have mapped it
    file.write_bytes(whole[: len(whole) // 2])
    shelf(train_file=a)
    assert file.read_bytes() == whole


def change_a_byte(file: Path) -> bytes:
    """Change a byte in the middle of a file, and return the content before. Not in place: a test may have mapped the file."""
    content = file.read_bytes()
    middle = len(content) // 2
    file.unlink()
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    return content


@pytest.mark.parametrize("name", ["input_ids.bin", "labels.bin", "supervised.npy", "input_ids.offsets.npy", "meta.json"])
def test_data_with_a_changed_byte_is_prepared_again_with_a_warning(tmp_path, shelf, capfd, name):
    a = chats(tmp_path / "a.jsonl", 20)
    first = shelf(train_file=a).train
    file = first.views[0].store.folder / name
    content = change_a_byte(file)
    capfd.readouterr()
    again = shelf(train_file=a).train
    assert file.read_bytes() == content and again.fingerprint == first.fingerprint
    assert str(file) in capfd.readouterr().out
    assert [f.name for f in file.parent.parent.iterdir() if f.is_dir()] == [file.parent.name]


def test_data_that_an_earlier_version_wrote_without_digests_is_prepared_again(tmp_path, shelf):
    a = chats(tmp_path / "a.jsonl", 20)
    first = shelf(train_file=a).train
    meta = first.views[0].store.folder / "meta.json"
    facts = json.loads(meta.read_text())
    meta.write_text(json.dumps({key: value for key, value in facts.items() if "xxh3_128" not in key}))
    assert shelf(train_file=a).train.fingerprint == first.fingerprint
    assert json.loads(meta.read_text()) == facts


def test_damaged_data_whose_source_is_gone_is_an_error_that_names_the_file(tmp_path, shelf, monkeypatch):
    a = chats(tmp_path / "a.jsonl", 20)
    file = shelf(train_file=a).train.views[0].store.folder / "input_ids.bin"
    change_a_byte(file)

    def unreadable(self, *arguments):
        raise DataError("the source cannot be read.")

    monkeypatch.setattr(Library, "_write", unreadable)
    with pytest.raises(DataError, match=f"{file}.*the source cannot be read"):
        shelf(train_file=a)


@pytest.fixture
def reads(monkeypatch):
    """Names of the prepared files that are read to compare their digests."""
    names = []

    def counted(file, tell):
        names.append(file.name)
        return file_digest(file, tell)

    monkeypatch.setattr(verification, "file_digest", counted)
    return names


def test_a_host_reads_prepared_files_once_a_day_and_when_one_was_touched(tmp_path, shelf, reads):
    a = chats(tmp_path / "a.jsonl", 20)
    folder = shelf(train_file=a).train.views[0].store.folder
    shelf(train_file=a)
    assert reads == [], "what was just written is not read again"
    (stamp,) = folder.glob("verified-*.json")
    files = sorted(json.loads((folder / "meta.json").read_text())["bytes"])

    stamp.rename(folder / "verified-another-host.json")
    shelf(train_file=a)
    assert reads == files, "another host has its own stamp"
    shelf(train_file=a)
    assert reads == files

    facts = json.loads(stamp.read_text())
    stamp.write_text(json.dumps(facts | {"time": facts["time"] - 24 * 60 * 60}))
    shelf(train_file=a)
    assert reads == 2 * files, "a day has passed"

    os.utime(folder / "labels.bin")
    shelf(train_file=a)
    shelf(train_file=a)
    assert reads == 3 * files, "a file was touched"


def test_a_folder_that_cannot_be_written_is_read_by_every_run(tmp_path, shelf, reads, monkeypatch):
    a = chats(tmp_path / "a.jsonl", 20)
    folder = shelf(train_file=a).train.views[0].store.folder
    (stamp,) = folder.glob("verified-*.json")
    stamp.unlink()
    write = Path.write_text

    def read_only(self, *arguments, **options):
        if "verified-" in self.name:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return write(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", read_only)
    for _ in range(2):
        assert len(shelf(train_file=a).train) == 19
    assert reads.count("input_ids.bin") == 2


def test_prepared_files_are_durable_before_their_folder_has_its_name(tmp_path, shelf, monkeypatch):
    fsync, durable = os.fsync, []

    def noted(descriptor):
        durable.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    folder = shelf(train_file=chats(tmp_path / "a.jsonl", 20)).train.views[0].store.folder
    (staging,) = {file.parent for file in durable if file.parent.name.endswith(".partial")}
    names = [file.name for file in folder.iterdir() if not file.name.startswith("verified-")]
    assert {staging / name for name in names} < set(durable)
    assert durable[-2:] == [staging, folder.parent]


def test_a_run_resumes_on_the_data_that_it_began_with_where_a_byte_was_changed(tmp_path, tiny):
    flags = {
        "model_name_or_path": tiny / "llama", "train_file": chats(tmp_path / "a.jsonl", 20), "cache_dir": tmp_path / "cache",
        "block_size": 64, "validation_split_percentage": 0, "per_device_train_batch_size": 2, "logging_steps": 1,
        "save_steps": 2, "seed": 3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    expected = train(tmp_path / "uninterrupted", max_train_steps=4, **flags).losses
    train(tmp_path / "run", max_train_steps=2, **flags)
    (ids,) = (tmp_path / "cache" / "data").glob("*/input_ids.bin")
    content = ids.read_bytes()
    ids.unlink()
    ids.write_bytes(np.full(len(content) // 4, 3, np.int32).tobytes())
    losses = train(tmp_path / "run", max_train_steps=4, resume_from_checkpoint="auto", **flags).losses
    assert losses == pytest.approx(expected, rel=1e-6)
    assert ids.read_bytes() == content


def test_a_resume_on_other_data_names_the_setting_that_changed(tmp_path, tiny):
    flags = {
        "model_name_or_path": tiny / "llama", "train_file": chats(tmp_path / "a.jsonl", 20), "cache_dir": tmp_path / "cache",
        "block_size": 64, "validation_split_percentage": 50, "per_device_train_batch_size": 2, "save_steps": 2,
    }  # fmt: skip
    train(tmp_path / "run", max_train_steps=2, max_eval_samples=3, **flags)

    with pytest.raises(CheckpointError, match="max_eval_samples 3 -> 4"):
        train(tmp_path / "run", max_train_steps=4, max_eval_samples=4, resume_from_checkpoint="auto", **flags)


@pytest.mark.parametrize("has_locks", [False, True], ids=["no locks", "each host grants its own"])
def test_data_is_prepared_on_a_file_system_whose_locks_do_not_reach_other_hosts(tmp_path, shelf, monkeypatch, has_locks):
    """Another host prepares the same data at the same time, and is faster."""

    def flock(handle, how):
        if not has_locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    file = chats(tmp_path / "chats.jsonl", 20)
    write, others, inode = Library._write, [], []

    def meanwhile(self, writer, *arguments):
        if not others:
            others.append(None)
            with pytest.MonkeyPatch.context() as on_other_host:
                on_other_host.setattr(socket, "gethostname", lambda: "other")
                others[0] = shelf(train_file=file).train
            inode.append(_data_folder(tmp_path).stat().st_ino)
        return write(self, writer, *arguments)

    monkeypatch.setattr(Library, "_write", meanwhile)
    train = shelf(train_file=file).train
    assert len(train) == 19 and train.fingerprint == others[0].fingerprint
    folder = _data_folder(tmp_path)
    assert not folder.name.startswith("."), "nothing half made stays"
    assert [folder.stat().st_ino] == inode, "what the other host has made stays, since it is read there"


def _data_folder(tmp_path):
    """The only folder of prepared data, besides those that are being written."""
    (folder,) = (f for f in (tmp_path / "cache" / "data").iterdir() if f.is_dir() and not f.name.endswith(".partial"))
    return folder


def test_workers_make_the_same_bytes(tmp_path, shelf, tokenizer, monkeypatch):
    import zerobook.data.tokenize as tokenize

    monkeypatch.setattr(tokenize, "CHUNK_SAMPLES", 50)
    file = chats(tmp_path / "a.jsonl", 400)
    digests = []
    for workers in (1, 2):
        config = RecipeConfig(cache_dir=str(tmp_path / f"cache{workers}"), train_file=file)
        library = Library(config, tokenizer, CausalEncoder(tokenizer, length=64), NextToken())
        digests.append(library.open(library.tokenize(workers)).train.views[0].store.meta["digest"])
    assert digests[0] == digests[1]


KILLED = """
import os, psutil, signal
from zerobook.data import tokenize
tokenize._encode_in_worker = len
results = tokenize.encode_all(None, iter([[]] * 9), 2)
next(results)
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_the_process_that_started_them(tmp_path):
    output = tmp_path / "pids"
    # Workers that went on would keep a pipe open.
    with output.open("wb") as file:
        assert subprocess.run([sys.executable, "-c", KILLED], stdout=file).returncode == -9
    processes = [psutil.Process(int(pid)) for pid in output.read_text().split() if psutil.pid_exists(int(pid))]

    _, alive = psutil.wait_procs(processes, timeout=30)

    for process in alive:
        process.kill()
    assert not alive


BAD = {
    2: "{not json",
    3: '["a list"]',
    4: '{"messages": [{"role": "pope", "content": "x"}]}',
    5: '{"messages": [{"role": "user", "content": "x"}]}',
    6: '{"messages": [{"role": "user", "content": "a\\u0000b"}, {"role": "assistant", "content": "y"}]}',
    7: '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "y"}]}',
    8: '{"other": 1}',
}


def bad_file(tmp_path):
    good = chats(tmp_path / "a.jsonl", 30)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    for number, line in BAD.items():
        lines.insert(number - 1, line)
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    return good


def test_bad_samples_are_listed_in_the_order_of_the_file(tmp_path, shelf):
    """A sample may be bad when it is read, or when it is encoded."""
    file = tmp_path / "a.jsonl"
    bad_when_encoded = {"source": "a", "target": "b <|im_end|> c"}
    bad_when_read = {"source": "", "target": "b"}
    rows = [bad_when_encoded, bad_when_read, {"source": "a", "target": "b"}, bad_when_encoded]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    data = shelf(train_file=str(file), on_bad_sample="skip", validation_split_percentage=0)

    assert [entry.partition(":")[0] for entry in data.bad_samples["a"]] == ["line 1", "line 2", "line 4"]
    with pytest.raises(DataError, match="line 1"):
        shelf(train_file=str(file), validation_split_percentage=0)


def test_a_target_of_an_end_token_alone_is_empty(tmp_path, shelf, tokenizer):
    file = tmp_path / "a.jsonl"
    rows = [{"source": "a", "target": tokenizer.eos_token}, {"source": "a", "target": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    data = shelf(train_file=str(file), on_bad_sample="skip", validation_split_percentage=0)

    assert len(data.train) == 1 and "empty" in data.bad_samples["a"][0]


def test_the_report_of_packs_counts_the_samples_in_their_rows(tmp_path, shelf):
    keys = {"train_file": chats(tmp_path / "a.jsonl", 300), "validation_split_percentage": 0, "packing": True}

    data = shelf(max_train_samples=3, **keys)

    assert data.report["a"]["samples"] == sum(len(data.train.samples_of(row)) for row in range(len(data.train))) < 300


def test_a_bad_sample_stops_with_its_line_or_is_skipped_and_counted(tmp_path, shelf):
    file = bad_file(tmp_path)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not valid JSON.*--on_bad_sample skip"):
        shelf(train_file=file)
    assert not [f for f in (tmp_path / "cache" / "data").iterdir() if f.is_dir()], "nothing half made is left"
    data = shelf(train_file=file, on_bad_sample="skip", validation_split_percentage=0)
    assert len(data.train) == 30 and data.report["a"]["bad samples skipped"] == len(BAD)
    listed = data.bad_samples["a"]
    assert [entry.split(":")[0] for entry in listed] == [f"line {n}" for n in BAD]
    for entry, reason in zip(listed, ("JSON", "list", "pope", "assistant", "NUL", "surrogate", "messages"), strict=True):
        assert reason in entry, entry


def test_a_line_of_50_mb_is_one_bad_sample(tmp_path, shelf):
    file = tmp_path / "a.jsonl"
    chats(file, 5)
    with file.open("a") as handle:
        handle.write(json.dumps({"messages": [{"role": "assistant", "content": "x" * 50_000_000}]}) + "\n")
    with pytest.raises(DataError, match=r"line 6: .* bytes; a sample of more than"):
        shelf(train_file=str(file))


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "the dataset is empty, there is nothing to train on"),
        ('{"text": "a few words"}\n', r"the text has \d+ tokens, fewer than one block of 64 .*Lower --max_seq_length"),
        ('{"headline": "a"}\n', "the samples have the columns headline, which fit no known format"),
        ('[\n{\n"text": "a b"\n}\n]', "none of the first 5 samples can be read: not valid JSON.* is an array"),
    ],
)
def test_nothing_to_train_on(tmp_path, shelf, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        shelf(train_file=str(tmp_path / "a.jsonl"))
    assert "a.jsonl" in str(caught.value)


def test_columns_that_are_not_read_are_told_and_those_that_matter_refused(tmp_path, shelf, capfd):
    turns = [{"role": "user", "content": "What is 2?"}, {"role": "assistant", "content": "2 is a number."}]
    rows = [{"messages": turns, "id": i, "images": ["a.png"] if i == 3 else None} for i in range(5)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"a.jsonl, line 4: the column images is not read.* --format"):
        shelf(train_file=str(file))
    skipped = shelf(train_file=str(file), on_bad_sample="skip", validation_split_percentage=0)
    assert len(skipped.train) == 4
    named = shelf(train_file=str(file), format="messages", validation_split_percentage=0)
    assert len(named.train) == 5 and named.formats == {"a": ("messages", ["id", "images"])}


def test_samples_marked_as_held_out_are_not_trained_on(tmp_path, shelf):
    marked = tmp_path / "marked.jsonl"
    splits = ["train", "Test", "train", "validation", "dev"]
    marked.write_text(
        "".join(json.dumps({"prompt": f"a {n}", "completion": "b", "split": name}) + "\n" for n, name in enumerate(splits))
    )
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "c", "completion": "d", "split": "test"}) + "\n")

    with pytest.raises(DataError, match=r"line 2: the column split is 'Test'"):
        shelf(train_file=str(marked), validation_file=str(held_out))
    skipped = shelf(train_file=str(marked), validation_file=str(held_out), on_bad_sample="skip")
    all_rows = shelf(train_file=str(marked), format="prompt_completion", validation_split_percentage=0)

    assert len(skipped.train) == 2 and [len(part) for part in skipped.held_out.values()] == [1]
    assert len(all_rows.train) == 5


def test_a_first_sample_of_no_format_is_skipped_too(tmp_path, shelf):
    file = chats(tmp_path / "a.jsonl", 3)
    Path(file).write_text('{"note": "made by hand"}\n' + Path(file).read_text())
    with pytest.raises(DataError, match="which fit no known format"):
        shelf(train_file=file)
    data = shelf(train_file=file, on_bad_sample="skip", validation_split_percentage=0)
    assert len(data.train) == 3 and data.bad_samples["a"][0].startswith("line 1: expected messages")


def test_chats_need_a_template(tmp_path, shelf, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        shelf(train_file=chats(tmp_path / "a.jsonl", 3))


def test_a_mixture_numbers_its_datasets_through(tmp_path, shelf):
    a, b = chats(tmp_path / "a.jsonl", 20), chats(tmp_path / "b.jsonl", 30, start=100)
    specs = [DatasetSpec(path=a, weight=3), DatasetSpec(path=b, limit=10), DatasetSpec(path=b, name="rest", format="messages")]
    data = shelf(datasets=specs, validation_split_percentage=10)
    assert data.train.sizes == [18, 9, 27] and data.weights == [3.0, 1.0, 1.0]
    assert {name: len(part) for name, part in data.held_out.items()} == {"a": 2, "b": 1, "rest": 3}
    assert isinstance(data.train.views[1], Documents)
    assert shelf(datasets=[DatasetSpec(path=a), DatasetSpec(path=b)]).weights is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, shelf, monkeypatch, code):
    import zerobook.data.store as store

    def full(self, *documents, **more):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.TokenWriter, "append", full)
    with pytest.raises(DataError, match=r"the disk of .* is full .* --cache_dir"):
        shelf(train_file=chats(tmp_path / "a.jsonl", 20))
    assert [f.suffix for f in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


FLAT = """
import sys
from pathlib import Path
from pathlib import Path
from transformers import AutoTokenizer
from zerobook.config import RecipeConfig
from zerobook.data import verification
from zerobook.data.prepare import Library
from zerobook.data.templates import CausalEncoder
from zerobook.objective import NextToken
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for file in sys.argv[2:]:
    config = RecipeConfig(cache_dir=str(Path(file).parent / "cache"), train_file=file)
    library = Library(config, tokenizer, CausalEncoder(tokenizer, length=64), NextToken())
    library.tokenize(1)
    # not ru_maxrss, which a process inherits from the one that started it
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


@pytest.mark.full  # growth
def test_memory_does_not_grow_with_the_source(tmp_path, tiny):
    """Ten times the bytes, the same peak but for the lengths of the documents (20 bytes each)."""
    files = []
    for name, copies in (("small", 6), ("large", 60)):
        file = tmp_path / f"{name}.jsonl"
        line = json.dumps({"text": "one two three four " * 500})
        file.write_text((line + "\n") * (100 * copies))
        files.append(str(file))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run([sys.executable, "-c", FLAT, str(tiny / "llama"), *files], capture_output=True, text=True,
                            env=environment, timeout=300, check=True)  # fmt: skip
    small, large = map(int, result.stdout.split())
    assert large < small + 60, f"peak {small} MB for {os.path.getsize(files[0])} bytes, {large} MB for ten times as many"


def test_texts_that_name_a_special_token_are_used_and_counted(tmp_path, shelf, tokenizer):
    lines = [{"text": f"number {i} " * 9 + "<|endoftext|> and on" * (i % 2)} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = shelf(length=16, train_file=str(tmp_path / "a.jsonl"), validation_split_percentage=0)
    assert data.report["a"]["texts with the name of a special token, read as characters"] == 3
    assert 0 not in np.asarray(data.train.views[0].store.ids)


def test_labels_survive_as_given(tmp_path, shelf):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}\n' * 4)
    data = shelf(train_file=str(tmp_path / "a.jsonl"), validation_split_percentage=0)
    assert data.train[0]["labels"].tolist() == [IGNORE, 4, 5] and data.train.loss_weights.tolist() == [2] * 4


def test_data_that_another_host_has_made_are_not_made_again(tmp_path, monkeypatch):
    """An NFS client that has looked for the folder before says that it is missing, until the folders above it are opened."""
    folder = tmp_path / "data" / "rows"
    folder.parent.mkdir()
    opened = os.open

    def open_and_show(path, flags, *args, **options):
        if path == folder.parent:
            folder.mkdir(exist_ok=True)
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_and_show)
    monkeypatch.setattr(prepare, "find_damage", lambda folder, silent: None)
    library = SimpleNamespace(config=SimpleNamespace(streaming=False))
    Library._make_if_needed(library, folder, None, lambda: pytest.fail("made again"))
